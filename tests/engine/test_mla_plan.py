"""How attention cuts a row's keys (csrc/cuda/mla_plan.h), and what scratch is asked for: the kernels' own functions,
compiled for the host.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from engine import plan
from harness import build

LENGTHS = [*range(1, 9000), *range(9000, 300_000, 61), 32768, 40968, 40969, 131072, 262144, 262145, 2_000_000]
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "cuda/mla_plan.h"
#include "cuda/moe_scratch.h"
int main(int argc, char** argv) {
  for (int keys; std::scanf("%d", &keys) == 1;) {
    const int splits = kdtree::splits_of(keys), chunks = kdtree::chunks_of(keys);
    int least = chunks, most = 0;
    for (int i = 0; i < splits; ++i) {
      const int length = kdtree::split_begin(i + 1, splits, chunks) - kdtree::split_begin(i, splits, chunks);
      least = length < least ? length : least, most = length > most ? length : most;
    }
    const int end = kdtree::split_begin(splits, splits, chunks);
    std::printf("%d %d %d %d %d\\n", splits, kdtree::splits_bound(keys), end, least, most);
  }
  // Launches whose splits take more than the scratch of a session that has room for their rows and keys.
  int past = 0, near = 0;
  for (int heads : {1, 5, 32, 64, 128}) {
    for (int max_rows : {1, 65, 100, 128, 1000, 4096}) {
      for (int max_keys : {64, 2048, 40968, 131072, 262144, 262145}) {
        const size_t room = kdtree::parts_scratch(heads, max_rows, max_keys);
        for (int keys : {1, 64, 1024, 2048, 4096, 32768, 40968, 131072, 262144, 262145}) {
          const int splits = kdtree::splits_bound(keys);
          for (int rows = 1; rows <= max_rows && keys <= max_keys; ++rows) {
            const size_t taken = kdtree::part_bytes(heads, splits) * kdtree::rows_a_launch(heads, rows, splits, 132);
            past += taken > room, near += taken > kdtree::kMostParts;
          }
        }
      }
    }
  }
  std::printf("%d %d\\n", past, near);
  for (int heads : {8, 64, 128}) {
    for (int rows : {1, 24, 65, 4096}) {
      for (int keys : {64, 65, 72, 73, 2048, 2057, 4096, 40968, 40969, 131072, 262145}) {
        std::printf("%zu ", kdtree::parts_scratch(heads, rows, keys));
      }
    }
  }
  std::printf("\\n");
  for (int rows : {1, 24, 65, 4096}) {
    for (int inner : {96, 2048, 2056}) {
      for (int dim : {64, 136, 7168}) {
        std::printf("%zu ", kdtree::cuda::MoeScratch(nullptr, rows, 8, inner, dim, 384).bytes);
      }
    }
  }
  std::printf("\\n");
  // Of two chunks a unit, four, one less than sixteen, sixteen, and 32.
  for (int keys : {1024, 4096, 255 * 64 + 8, 256 * 64 + 8, 32768}) {
    for (int units : {1, 8, 16, 44, 45, 64, 66, 67, 1024}) std::printf("%d", kdtree::column_parts(units, keys, 132));
    std::printf(" ");
  }
  std::printf("\\n");
  const kdtree::Numerics kinds[] = {kdtree::Numerics::kF32, kdtree::Numerics::kBf16};
  for (auto kind : kinds) {
    for (int rank : {64, 512}) {
      const kdtree::MlaDims d{64, rank, 128, 64, 128, kind};
      std::printf("%d%d%d%d%d ", kdtree::attends_on_hopper(d, true), kdtree::attends_on_hopper(d, false),
                  kdtree::prepares_on_tensor_cores(d), kdtree::values_on_tensor_cores(d, true),
                  kdtree::values_on_tensor_cores(d, false));
    }
  }
}
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(PROGRAM, "utf-8")
    binary = folder / "plan"
    command = ["c++", "-std=c++17", f"-I{build.CSRC}", str(folder / "plan.cpp"), "-o", str(binary)]
    subprocess.run(command, check=True)
    asked = "\n".join(map(str, LENGTHS))
    return subprocess.run([str(binary)], input=asked, capture_output=True, text=True, check=True).stdout.splitlines()


def cuts(output: list[str]) -> dict[int, tuple[int, ...]]:
    """Length -> splits, the most of a session so long, where the last ends, chunks of the shortest and longest."""
    return {keys: tuple(map(int, line.split())) for keys, line in zip(LENGTHS, output, strict=False)}


def test_every_key_has_a_place(output: list[str]) -> None:
    """Splits cover the keys, none is empty or much longer than another; a session's bound holds for shorter rows."""
    most = 0
    for keys, (splits, bound, end, least, longest) in sorted(cuts(output).items()):
        assert end * 64 - 63 <= keys <= end * 64 + 8, keys
        assert 1 <= least <= longest <= least + 1, keys
        most = max(most, splits)
        assert most <= bound <= 33, keys


def test_lengths_for_one_row_and_for_many(output: list[str]) -> None:
    """One row has blocks enough at any length, and 64 rows do not drown in sums."""
    cut = {keys: (splits, longest) for keys, (splits, _, _, _, longest) in cuts(output).items()}
    assert [cut[keys] for keys in (1, 136, 137)] == [(1, 1), (1, 2), (2, 2)]
    assert [cut[keys] for keys in (1024, 1032, 1033, 2056, 2057)] == [
        (8, 2),
        (8, 2),
        (9, 2),
        (16, 2),
        (16, 3),
    ]
    assert [cut[keys] for keys in (4104, 4105, 32768)] == [(16, 4), (16, 5), (16, 32)]
    assert [cut[keys] for keys in (40968, 40969, 131072, 262144)] == [(16, 40), (33, 20), (33, 63), (33, 125)]


def test_splits_fit_the_scratch_of_every_larger_session(output: list[str]) -> None:
    """Whatever the widths and lengths of a session's steps; and no launch leaves more than it should."""
    assert output[len(LENGTHS)] == "0 0"


def test_a_plan_knows_the_scratch(output: list[str]) -> None:
    """`kdtree plan` asks no compiler: what it adds up is what a session of K2.6's shape asks for."""
    config = plan.find(plan.K26)
    sizes = [
        (h, r, k)
        for h in (8, 64, 128)
        for r in (1, 24, 65, 4096)
        for k in (64, 65, 72, 73, 2048, 2057, 4096, 40968, 40969, 131072, 262145)
    ]
    assert list(map(int, output[len(LENGTHS) + 1].split())) == [
        plan.hopper_scratch(config, h, k, r) for h, r, k in sizes
    ]


def test_a_plan_knows_the_scratch_of_experts(output: list[str]) -> None:
    config = replace(plan.find(plan.K26), num_experts_per_tok=8)
    sizes = [(r, i, d) for r in (1, 24, 65, 4096) for i in (96, 2048, 2056) for d in (64, 136, 7168)]
    assert list(map(int, output[len(LENGTHS) + 2].split())) == [
        plan.moe_scratch(replace(config, moe_intermediate_size=i, hidden_size=d), r) for r, i, d in sizes
    ]


def test_units_are_shared_where_blocks_are_left(output: list[str]) -> None:
    """At 132 multiprocessors: up to a third of them, and of long units up to half: four rows of 32768 keys have 64."""
    assert output[-2].split() == ["222211111", "222211111", "222211111", "222222211", "222222211"]


def test_kernels_by_shape(output: list[str]) -> None:
    """Attention, preparation, values with and without the device's means: bf16 of the right sizes alone, f32 never."""
    assert output[-1].split() == ["00000", "00000", "00000", "10110"]
