"""The matrix: every point of the axes once, ids that can be read back, filters that mean what pytest's mean."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.mark.expression import Expression
from hypothesis import given
from hypothesis import strategies as st

from harness import matrix
from harness.filters import matcher, select
from harness.matrix import MatrixError, Point, expected, parse
from refs import recipe

TABLE = {"tiny": ("oracle", "noisy"), "tiny2": ("hostile",), "plain": ()}


def test_every_point_of_the_axes_is_there_once() -> None:
    points = expected(("cpu", "cuda"), TABLE)
    ids = [point.id for point in points]
    assert len(ids) == len(set(ids)) == 2 * 2 * (3 + 3)  # precisions, devices, AR of each config + its drafters
    assert "fp32-ar-plain-cpu" in ids
    assert "int4-ddtree-tiny2-hostile-cuda" in ids
    assert [parse(id) for id in ids] == points


def test_more_ranks_and_precisions_are_more_cells() -> None:
    both = {"tiny": ("fp32", "int4-bf16")}
    points = expected(("cuda",), {"tiny": ()}, precisions=("bf16", "int4-bf16"), offered=both, ranks=(1, 2))
    assert [point.id for point in points] == ["int4-bf16-ar-tiny-cuda", "int4-bf16-ar-tiny-cuda-x2"]
    assert [parse(point.id) for point in points] == points


def test_a_config_has_the_precisions_it_names(tmp_path: Path) -> None:
    offered = matrix.config_precisions()
    assert {p.precision for p in expected() if p.config == "tiny"} == set(offered["tiny"]) == set(matrix.PRECISIONS)
    assert {p.precision for p in expected() if p.config == "block1"} == {"fp32", "int4"}
    assert offered == {name: recipe.load(name).precisions for name in recipe.names()}
    path = tmp_path / "some.yaml"
    for broken in ("precisions: bf16", "precisions: [fp16]", "precisions: []"):
        path.write_text(broken)
        with pytest.raises(MatrixError, match=r"some\.yaml: precisions: is .*, not a list of"):
            matrix.precisions_of(path)


def test_several_ranks_run_what_they_can_share() -> None:
    assert {"tiny", "eight", "wide"} <= set(matrix.rankable(2)) >= set(matrix.rankable(4)) > {"eight"}
    assert matrix.rankable(8) == ("eight",)
    assert not {"tiny2", "odd"} & set(matrix.rankable(2))  # three heads, five heads
    for name in matrix.rankable(2):
        assert recipe.load(name).model.num_heads % 2 == 0


SIZES = {"num_heads": 4, "hidden_size": 8, "vocab_size": 12, "intermediate_size": 16, "moe_intermediate_size": 20}


@pytest.mark.parametrize("odd", [None, *SIZES])
@pytest.mark.parametrize(("dense", "layers"), [(0, 2), (1, 2), (2, 2)])
def test_ranks_share_every_size_that_a_model_uses(tmp_path: Path, odd: str | None, dense: int, layers: int) -> None:
    """Those of dense layers where it has some, those of experts where it has some; its own before its base's."""
    base = {**SIZES, "first_k_dense": dense, "num_layers": layers}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"model": base}))
    own = {} if odd is None else {odd: 21}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"base": "base", "model": own}))
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"model": base | own}))
    unused = {"intermediate_size": dense == 0, "moe_intermediate_size": dense == layers}
    fine = odd is None or unused.get(odd, False)
    assert matrix.rankable(4, tmp_path) == (("all", "base", "own") if fine else ("base",))


def test_sizes_that_are_not_there_speak_against_no_number_of_ranks(tmp_path: Path) -> None:
    for number, text in enumerate(("", "model: {first_k_dense: 1}", "model: {first_k_dense: a, num_layers: 2}")):
        (tmp_path / f"c{number}.yaml").write_text(text or "run: {}")
    assert matrix.rankable(3, tmp_path) == ("c0", "c1", "c2")


def test_a_run_has_several_ranks_where_there_are_devices_for_them() -> None:
    def several(**options: Any) -> dict[tuple[str, int], set[str]]:
        found: dict[tuple[str, int], set[str]] = {}
        for point in matrix.of_run(["cpu", "cuda"], **options):
            if point.ranks > 1:
                found.setdefault((point.device, point.ranks), set()).add(point.config)
        return found

    assert several() == {("cpu", 2): set(matrix.RANKED_CONFIGS)}
    assert set(several(gpus=5)) == {("cpu", 2), ("cuda", 2), ("cuda", 4)}
    assert several(gpus=8)["cuda", 8] == {"eight"}
    assert several(shared=False) == {}
    assert {point.ranks for point in matrix.of_run(["cpu"], ranks=[2, 4])} == {2, 4}
    assert not any(map(matrix.is_large, {point.config for point in matrix.of_run(["cpu"])}))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [([0], "--ranks 0: a model is shared by 1"), ([2, 0], "--ranks 0: "), ([2, 97], "--ranks 97: no ")],
)
def test_a_number_of_ranks_that_nothing_can_have_is_an_error(ranks: list[int], message: str) -> None:
    assert matrix.of_run(["cpu"], ranks=[1]) == matrix.expected()
    with pytest.raises(MatrixError, match=message):
        matrix.of_run(["cpu"], ranks=ranks)


def test_neighbours_share_a_bundle_and_a_precision() -> None:
    keys = [(point.config, point.device, point.precision) for point in expected(("cpu", "cuda"), TABLE)]
    assert len(set(keys)) == 1 + sum(a != b for a, b in itertools.pairwise(keys))


@pytest.mark.parametrize(
    "id",
    [
        "",
        "x2",
        "fp32",
        "fp32-ar-tiny",
        "fp32-ar-tiny-x-cpu",
        "fp32-xx-tiny-x-cpu",
        "fp32-ddtree-tiny-cpu",
        "a-b-c-d-e-f",
        "FP-ar-c-cpu",
    ],
)
def test_what_is_no_id_is_refused(id: str) -> None:
    with pytest.raises(MatrixError, match="is no cell id"):
        parse(id)


def test_the_drafters_read_here_are_those_that_the_bundles_are_made_with() -> None:
    names = recipe.names(scale=True)
    assert matrix.configs(scale=True) == {name: recipe.load(name).run.drafters for name in names}
    assert matrix.config_precisions(scale=True) == {name: recipe.load(name).precisions for name in names}


def test_large_configs_are_expected_only_when_asked_for() -> None:
    plain, large = matrix.expected(), matrix.expected(scale=True)
    more = [point for point in large if point not in plain]
    assert [point for point in large if point in plain] == plain
    assert (
        {point.config for point in more}
        == {"k26_bf16", "k26_layer", "k26_slice"}
        == set(filter(matrix.is_large, matrix.configs(scale=True)))
    )
    assert {(p.config, p.precision) for p in more} == {
        ("k26_bf16", "int4-bf16"),
        ("k26_layer", "int4"),
        ("k26_slice", "int4"),
    }
    assert recipe.names() == list(matrix.configs())


def test_a_config_has_cells_in_its_own_precisions_alone() -> None:
    points = [point for point in matrix.expected() if point.config in ("stated", "tiny")]
    assert {point.precision for point in points if point.config == "stated"} == {"int4", "int4-bf16"}
    assert {point.precision for point in points if point.config == "tiny"} == set(matrix.PRECISIONS)


def test_listing_the_matrix_imports_nothing_heavy() -> None:
    heavy = "[name for name in ('numpy', 'torch', 'pytest') if name in sys.modules]"
    code = f"import sys, harness.matrix as m; m.expected(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=matrix.ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {drafters: oracle}", "run.drafters: is 'oracle', not a list"),
        ("run: {drafters: [a-b]}", r"run\.drafters: is \['a-b'\]"),
        ("run: {drafters: [a, a]}", "names one twice"),
        ("run: [1]", "run: not a mapping"),
        ("- 1", "run: not a mapping"),
        ("{", "one.yaml:[12]: not YAML: "),
        ("run: {}\nmodel: {a: 1, b: 1, a: 2}", "one.yaml:2: 'a' is given twice"),
        ("run: {}\n? [1]\n: 2", "one.yaml:2: found unhashable key"),
        ("\0", "special characters|control characters"),
        ("base: gone\nrun: {}", "one.yaml: base: there is no other config 'gone' beside it"),
        ("base: to\nrun: {}", "one.yaml: base: .*'to' beside it, did you mean too"),
        ("base: one\nrun: {}", "one.yaml: base: there is no other config 'one' beside it"),
        ("base: [too]\nrun: {}", "one.yaml: base: there is no other config "),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "too.yaml").write_text("run: {}")
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(MatrixError, match=rf"(?s){tmp_path}/one.yaml.*{message}|{message}"):
        matrix.configs(tmp_path)


def test_drafters_come_from_the_base_unless_a_config_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {drafters: [noisy]}")
    (tmp_path / "b.yaml").write_text("base: a")
    (tmp_path / "c.yaml").write_text("base: a\nrun: {drafters: []}")
    (tmp_path / "d.yaml").write_text("name: d")
    assert matrix.configs(tmp_path) == {"a": ("noisy",), "b": ("noisy",), "c": (), "d": matrix.DRAFTERS}


@pytest.mark.parametrize("name", ["a-b.yaml", "B.yaml"])
def test_a_config_whose_name_would_break_ids_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("name: x")
    with pytest.raises(MatrixError, match="name is made of"):
        matrix.configs(tmp_path)


def test_no_config_and_no_device_are_errors(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="holds no config"):
        matrix.configs(tmp_path)
    with pytest.raises(MatrixError, match="no device"):
        expected(())


POINTS = expected(("cpu", "cuda"), TABLE, ranks=(1, 2))


def test_an_id_chooses_its_cell_alone_even_if_it_begins_another() -> None:
    assert [point.id for point in select(POINTS, " fp32-ar-tiny-cuda ")] == ["fp32-ar-tiny-cuda"]
    assert len(select(POINTS, "fp32-ar-tiny-cud")) == 2


@pytest.mark.parametrize("expression", ["nothing", "not fp32 and not int4", "tiny and plain"])
def test_a_filter_that_matches_nothing_is_an_error(expression: str) -> None:
    with pytest.raises(MatrixError, match="matches none of 48 cells"):
        select(POINTS, expression)


@pytest.mark.parametrize("expression", ["", "(", "a and", "or b", "a b", "not", ")", "(a", "a )", "and"])
def test_a_malformed_filter_is_an_error(expression: str) -> None:
    with pytest.raises(MatrixError, match="-k "):
        matcher(expression)


words = st.sampled_from(["tiny", "fp32", "INT4", "ar", "cpu", "tiny2-", "oracle", "test_cell", "zzz"])
expressions = st.recursive(
    words,
    lambda inner: st.one_of(
        inner.map(lambda a: f"not {a}"),
        inner.map(lambda a: f"({a})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(" ".join),
    ),
    max_leaves=8,
)


@given(expressions, st.sampled_from(POINTS))
def test_filters_mean_what_pytest_s_mean(expression: str, point: Point) -> None:
    names = [point.id, "test_cell"]
    wanted = Expression.compile(expression).evaluate(lambda word: any(word.lower() in name for name in names))
    assert matcher(expression)(names) is bool(wanted)
