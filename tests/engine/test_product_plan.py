"""The choice of the streaming product kernels, without a GPU: it fits the device; what it serves is up to K alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from engine.library import library

HOPPER, BLACKWELL = 232448, 101376  # bytes of shared memory a block may have on sm_90 and sm_120
STATIC = 16384  # of moe's kernels, at most
BOX_STATIC = {1: 7168, 0: 20480}  # of those for Hopper, staged or not
ROW_STATIC = 2560
PRODUCTS = [
    ("linear", False),
    ("linear", True),
    ("normed", False),
    ("normed", True),
]
WIDTHS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200]


def plan(product: str, k: int, rows: int, *, int4: bool = True, paired: bool = False, shared: int = HOPPER) -> str:
    return str(library("cpu").product_plan(product, int4, k, rows, paired, True, shared))


@pytest.mark.parametrize("shared", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize(("product", "paired"), PRODUCTS)
def test_a_variant_fits_and_does_not_depend_on_rows_for_being_one(
    product: str, paired: bool, int4: bool, shared: int
) -> None:
    """Rows choose among variants, never between them and the generic kernel: that one adds in another order."""
    for k in (8, 64, 104, 1536, 2048, 7168, 8192, 18432):
        chosen = [plan(product, k, rows, int4=int4, paired=paired, shared=shared) for rows in WIDTHS]
        assert "generic" not in chosen, k
        for text, rows in zip(chosen, WIDTHS, strict=True):
            mt, nt, cl, warps, depth, resident, held, bytes_ = (int(word) for word in text.split())
            assert bytes_ + 10240 <= shared
            assert warps % (8 // cl) == 0
            assert depth >= 2
            assert resident >= 1
            assert mt >= 1
            assert held >= nt >= 1
            assert not paired or mt * warps * cl // 8 % 2 == 0, "gate and up take half of the tiles each"
            if shared == HOPPER and k <= 7168:
                assert held * 8 >= min(rows, 64), "weights are read once for all rows"


@pytest.mark.parametrize("int4", [False, True])
def test_many_rows_of_few_columns_are_for_warpgroups(int4: bool) -> None:
    """From 17 rows on, where a block has room for its segment of 64; the bits are the others', so rows may choose."""
    for k in (8, 104, 2048, 7168, 8192):
        words = plan("wide", k, 17, int4=int4).split()
        assert words[0] == "wide"
        begins = library("cpu").product_segments(k, 128 if int4 else 32, 8)
        longest = max(b - a for a, b in pairwise(begins[:9]))
        ring = 16 * (4 * 1152 if int4 else 5 * 1024)
        assert ring + 64 * 2 * (longest + 128) <= int(words[1]) <= HOPPER - 1024
        for rows in (1, 16):
            assert plan("wide", k, rows, int4=int4) == plan("linear", k, rows, int4=int4)
    assert plan("wide", 18432, 64, int4=int4) == plan("linear", 18432, 64, int4=int4), "no room"


RING_SLOT = 64 * (128 + 16)  # a tile's rows of a box, and its scales


def test_a_cluster_has_all_of_short_rows_in_int4() -> None:
    """Rows of whole boxes: a fourth of the activations, six of a tile's eight sums, two rings of three boxes."""
    for k in (256, 1792, 2048):
        words = plan("whole", k, 64).split()
        assert words[0] == "whole"
        needed = 64 * 512 * 2 + 6 * 64 * 64 * 4 + 2 * 3 * RING_SLOT
        assert needed <= int(words[1]) <= HOPPER - 1024
        assert plan("whole", k, 16) == plan("linear", k, 16)
        assert plan("whole", k, 64, int4=False).split()[0] == "wide"
        assert plan("whole", k, 64, paired=True).split()[0] == "wide", "gate and up would lie in two tiles"
    for k in (8, 104, 2056):
        assert plan("whole", k, 64).split()[0] == "wide"


def test_long_rows_in_int4_come_in_boxes() -> None:
    """Where scales are whole sixteen bytes and shared memory holds a segment of activations and two rings of boxes."""
    for k, depth in ((2304, 4), (7168, 4), (8192, 4)):
        words = plan("whole", k, 64).split()
        assert words[0] == "boxes"
        longest = -(-(k // 128) // 8) * 128
        assert 64 * 2 * longest + 2 * depth * RING_SLOT == int(words[1]) <= HOPPER - 1024
        assert plan("whole", k, 64, int4=False).split()[0] == "wide"
        assert plan("whole", k, 64, paired=True).split()[0] == "wide", "two weights' sums have two counters"
        assert plan("whole", k, 16) == plan("linear", k, 16)
    assert plan("whole", 2304 + 128, 64).split()[0] == "wide"


def test_two_blocks_where_registers_leave_room_for_two() -> None:
    """A block that takes all of K: two at a time, of which one may be the next launch's, or one of twice the warps."""
    for int4, k, rows, resident in (
        (True, 2048, 8, 2),
        (True, 7168, 1, 1),
        (True, 7168, 8, 1),
        (False, 2048, 8, 2),
        (False, 7168, 1, 2),
    ):
        words = plan("linear", k, rows, int4=int4).split()
        assert (words[2], int(words[5])) == ("1", resident), (k, rows)
        assert resident * (int(words[7]) + 1152) <= HOPPER + 1024


@pytest.mark.parametrize("int4", [False, True])
def test_the_blocks_of_a_cluster_share_the_norm_of_many_rows(int4: bool) -> None:
    for k in (2048, 7168):
        assert plan("normed", k, 2, int4=int4) == plan("linear", k, 2, int4=int4)
        for rows in (3, 8, 16, 64):
            assert plan("normed", k, rows, int4=int4).split()[2] == "8"


@pytest.mark.parametrize("shared", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_the_experts_kernels_for_every_device_fit(product: str, shared: int) -> None:
    """Whatever the sizes and the rows."""
    for k in (8, 64, 104, 1536, 2048, 7168, 8192, 18432):
        texts = {plan(product, k, rows, shared=shared) for rows in WIDTHS}
        assert len(texts) == 1
        name, bytes_ = texts.pop().split()
        assert name == "stream"
        assert int(bytes_) + STATIC <= shared


@pytest.mark.parametrize("product", ["gate_up", "down"])
def test_boxes_of_the_experts_fit_and_begin_where_segments_do(product: str) -> None:
    """Rows of whole boxes, on a Hopper; warps that share K begin at boxes of either kind of weights."""
    for k in (256, 512, 768, 1024, 2048, 2304, 4096, 7168):
        for rows in WIDTHS:
            text = plan(f"{product}_boxes", k, rows)
            staged, split, warps, wide, depth, span, resident, bytes_ = (int(word) for word in text.split())
            assert (bytes_ + BOX_STATIC[staged] + 1024) * resident <= HOPPER + 1024
            ring = warps * depth * wide * (2048 + span * 256)
            assert bytes_ >= ring + staged * min(rows, 8) * 2 * k + (split > 1) * warps // split * 4 * 8 * 64 * min(
                rows, 4
            )
            assert not staged or (product == "gate_up" and rows <= 8)
            assert split == 1 or rows <= 8
            assert warps % split == 0
            for granule in (128, 32):
                begins = library("cpu").product_segments(k, granule, 1)
                assert all(begins[part * 8 // split] // granule % 2 == 0 for part in range(split))
    for k in (8, 104, 1000, 7168 + 128):
        assert plan(f"{product}_boxes", k, 4) == plan(product, k, 4), "no whole boxes"
    assert plan(f"{product}_boxes", 7168, 64, shared=BLACKWELL) == plan(product, 7168, 64, shared=BLACKWELL), "no room"


@pytest.mark.parametrize(("blocks", "groups"), [(1, 1), (15, 2), (132, 1), (132, 4), (132, 8)])
def test_every_item_in_boxes_is_one_groups(blocks: int, groups: int) -> None:
    """In order, none lost, none twice, and no block reads much more than another."""
    rng = np.random.default_rng(blocks + groups)
    for shared, weight, count in [
        (0, 57, 5),
        (256, 56, 2048),
        (448, 228, 72704),
        (3, 2000, 0),
        *rng.integers(1, 4000, (20, 3)).tolist(),
    ]:
        begins = np.array(library("cpu").box_work(blocks, groups, shared, weight, count), np.int64)
        assert begins[0] == 0
        assert begins[-1] == count
        sizes = np.diff(begins)
        assert sizes.min() >= 0
        own = np.bincount(np.arange(shared) % blocks, minlength=blocks)
        work = 16 * sizes.reshape(blocks, groups).sum(1) + own * weight
        assert work.max() <= max(work.mean(), (own * weight).max()) + weight + 32


def row_plan(down: bool, *sizes: int, hopper: bool = True, shared: int = HOPPER) -> list[int]:
    """k, shared_k, n, shared_n, top_k: the shape and the blocks' shares; nothing if another kernel serves."""
    return [int(n) for n in library("cpu").row_plan(down, *sizes, hopper, shared)]


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("int4", [False, True])
def test_one_row_of_the_experts_fits_and_has_a_place_for_every_tile(down: bool, int4: bool) -> None:
    """Two blocks a multiprocessor; parts of K begin at boxes; a block's tiles are of two experts at most."""
    served = 0
    for k in (256, 512, 1024, 2048, 3072, 7168, 8192):
        for n, shared_n, top_k in [
            (2048, 2048, 8),
            (7168, 7168, 8),
            (2048, 0, 8),
            (256, 512, 1),
            (1000, 24, 16),
            (7168, 0, 16),
        ]:
            found = row_plan(down, k, k, n, shared_n, top_k)
            if not found:
                continue
            served += 1
            warps, copiers, depth, early, blocks, bytes_, places = found[:7]
            own, firsts = found[7 : 7 + blocks], found[7 + blocks :]
            each, begins = 16 if down else 8, library("cpu").product_segments(k, 128 if int4 else 32, 1)
            tiles = -(-n // each)
            for unit in (128 if int4 else 32, 32):  # of the experts and of the shared one
                lengths = np.diff(library("cpu").product_segments(k, unit, 1)[:9])
                assert lengths.min() > 0, "a segment without a unit would never end"
            assert 1 <= early <= depth
            assert down or warps >= 8, "a warp norms a segment"
            assert copiers >= 1
            assert (warps + copiers) * 32 * 96 * 2 <= 65536, "registers that the kernels need"
            assert blocks == 264
            assert (bytes_ + ROW_STATIC + 1024) * 2 <= HOPPER + 1024
            assert bytes_ >= warps * depth * 2 * (2048 + 256) + places * 512 + (3 if down else 1) * 2 * k
            assert sum(own) == -(-shared_n // each)
            assert (firsts[0], firsts[-1]) == (0, top_k * tiles)
            sizes = [end - first for first, end in pairwise(firsts)]
            assert max(sizes) - min(sizes) <= 1
            for around, (first, end) in zip(own, pairwise(firsts), strict=True):
                assert 0 <= end - first <= tiles
                assert around + end - first <= places <= 40
            assert all(
                begins[part * (4 if down else 2)] % (2 * (128 if int4 else 32)) == 0 for part in range(2 if down else 4)
            )
            assert all(library("cpu").product_segments(k, 32, 1)[part] % 64 == 0 for part in range(8))
    assert served >= 5
    assert row_plan(
        down, 2048 if down else 7168, 2048 if down else 7168, 7168 if down else 2048, 7168 if down else 2048, 8
    )
    for unserved in (row_plan(down, 768, 768, 256, 256, 8), row_plan(down, 1024, 256, 256, 256, 8)):
        assert not unserved, "parts that do not begin at boxes"
    assert not row_plan(down, 2048, 2048, 65536, 2048, 8), "more tiles than places"
    assert not row_plan(down, 2048, 2048, 2048, 2048, 8, hopper=False)
    assert not row_plan(down, 2048, 2048, 2048, 2048, 8, shared=BLACKWELL)


def tiles(k: int, n: int, rows: int, *, down: bool, shared_k: int, shared: int = HOPPER) -> list[int]:
    return list(library("cpu").tile_plan(k, n, down, shared_k, rows, shared))


def test_tiles_that_go_through_k_together_fit() -> None:
    """Two or three to 64 rows of experts of whole stages, and a shared one whose segments begin at boxes."""
    for rows in (3, 4, 64):
        for k, n, down, around in ((7168, 2048, False, 7168), (2048, 7168, True, 2048), (512, 256, True, 0)):
            depth, span, resident, bytes_ = tiles(k, n, rows, down=down, shared_k=around)
            pieces = next(
                p for p in range(2, 9) if (p - 1) * span + 1 >= depth
            )  # a piece comes when depth stages are in use
            assert bytes_ >= depth * (128 * 128 + 16 * 576) + pieces * 128 * 16 * span + 1024
            assert (bytes_ + 19456 + 1024) * resident <= HOPPER + 1024
            assert k % (256 * span) == 0
    assert tiles(2048, 7168, 2, down=True, shared_k=2048)
    for rows in (1, 2, 65):
        assert not tiles(7168, 2048, rows, down=False, shared_k=7168)
        assert rows == 2 or not tiles(2048, 7168, rows, down=True, shared_k=2048)
    for k, n, around in ((7168 + 256, 2048, 0), (7168, 2048 + 32, 0), (7168, 2048, 7168 + 256)):
        assert not tiles(k, n, 16, down=False, shared_k=around)
    assert not tiles(2048, 7168, 16, down=True, shared_k=2048, shared=BLACKWELL)


@pytest.mark.parametrize("blocks", [1, 3, 264])
def test_every_tile_of_every_turn_is_in_one_unit(blocks: int) -> None:
    """Neighbouring tiles of an expert's turn, those of its next turn behind them; the last units are halves."""
    rng = np.random.default_rng(blocks)
    for count in (8, 256, 448):
        turns = rng.integers(1, 4, 9).tolist()
        work = np.array(library("cpu").tile_work(blocks, count, turns)).reshape(-1, 4)
        halves = int((work[:, 3] == 4).sum())
        assert set(work[:, 3].tolist()) <= {4, 8}
        assert (work[len(work) - halves :, 3] == 4).all()
        assert halves == 2 * min(blocks // 4, sum(turns) * count // 8)
        times = np.zeros((len(turns), max(turns), count), np.int64)
        for expert, tile, turn, size in work.tolist():
            times[expert, turn, tile : tile + size] += 1
        assert (times == (np.arange(max(turns)) < np.array(turns)[:, None])[:, :, None]).all()
        several = [row for row in work[: len(work) - halves].tolist() if turns[row[0]] > 1]
        assert all(a[0] != b[0] or b[1] - a[1] == 8 * (a[2] == turns[a[0]] - 1) for a, b in pairwise(several))


def test_the_router_in_one_launch() -> None:
    """Whether it serves does not depend on the rows; who waits for others leaves half of the places to them."""
    for k in (64, 200, 7168, 8192):
        for rows in WIDTHS:
            choosing, combining, shared = map(int, plan("route", k, rows).split())
            assert 1 <= choosing <= min(rows, 66)
            assert 1 <= combining <= 66
            assert shared <= HOPPER
    assert [plan("route", 7168, m).split()[0] for m in (1, 16, 64, 500)] == ["1", "16", "64", "64"]
    assert plan("route", 8200, 1) == "generic", "a row's segment is more than a warp holds"
    assert plan("route", 100, 1) == "generic"


def test_everything_else_is_for_the_generic_kernel() -> None:
    assert plan("linear", 100, 1) == "generic", "rows that are not whole sixteen bytes"
    assert library("cpu").product_plan("linear", True, 7168, 1, False, False, HOPPER) == "generic", "no clusters"
    assert plan("linear", 7168, 1, shared=16384) == "generic", "no room"
    with pytest.raises(RuntimeError, match="product is not linear"):
        plan("router", 7168, 1)


BOX_FIELDS = ["rows", "mt", "cl", "warps", "boxes", "depth", "resident", "held", "pieces", "spread"]
BOX_FIELDS += ["clusters", "batch", "shared"]
BOX_ROWS = [(1, False), (2, True), (4, False), (5, False), (8, True), (9, False), (16, False), (17, False)]


def box_plan(
    int4: bool, k: int, rows: int, outputs: int, *, paired: bool = False, normed: bool = False
) -> tuple[dict[str, int], list[int]]:
    """The shape of linear's launch by boxes and where its clusters' shares begin; nothing if another kernel serves."""
    found = [int(n) for n in library("cpu").linear_box_plan(int4, k, rows, outputs, paired, normed, True, HOPPER)]
    return dict(zip(BOX_FIELDS, found, strict=False)), found[len(BOX_FIELDS) :]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("int4", [False, True])
def test_a_launch_by_boxes_fits_and_shares_out_all_outputs(int4: bool, normed: bool) -> None:
    """Whatever the sizes; every cluster has as many outputs as the next, or one more."""
    seen = 0
    for k in (8, 64, 256, 1536, 2048, 7168, 8192, 18432):
        for rows, paired in BOX_ROWS:
            for outputs in (1, 7, 132, 448, 10240):
                v, begins = box_plan(int4, k, rows, outputs, paired=paired, normed=normed)
                if not v:
                    continue
                seen += 1
                assert rows <= 16
                assert not int4 or k % 256 == 0, "scales are copied eight at a time"
                assert k % (256 if int4 else 8 if normed else 64) == 0, "activations come in whole blocks of 64"
                assert rows <= v["rows"]
                assert v["resident"] * (v["shared"] + 1024 + 1024) <= HOPPER + 1024
                assert v["warps"] % (8 // v["cl"]) == 0
                assert v["clusters"] * v["cl"] <= 132 * v["spread"], "all at once"
                assert v["spread"] <= v["resident"]
                shares = [b - a for a, b in pairwise(begins)]
                assert begins[0] == 0
                assert begins[-1] == outputs
                assert len(shares) == v["clusters"]
                assert 1 <= max(shares) <= min(shares) + 1
                assert 1 <= v["batch"] <= max(shares)
                assert v["batch"] in (max(shares), *range(0, 512, v["mt"])), "tiles side by side are added together"
                assert (v["held"] > 0) == normed
                if normed:
                    begin = library("cpu").product_segments(k, 128 if int4 else 32, v["cl"])
                    assert max(b - a for a, b in pairwise(begin[:9])) <= 128 * v["pieces"]
                    assert rows * 8 // v["cl"] <= v["warps"] * v["held"]
    assert seen > 0 or (int4 and normed), "no model has an INT4 product with a norm"


def test_the_products_of_a_k26_step_come_by_boxes() -> None:
    """Up to 16 rows; elsewhere than on Hopper none."""
    tiles = {"o": (8192, 448), "q_b": (1536, 768), "q_a + kv_a": (7168, 132)}
    for rows in range(1, 17):
        for name, (k, outputs) in tiles.items():
            assert box_plan(False, k, rows, outputs, normed=name != "o")[0], (name, rows)
            assert not library("cpu").linear_box_plan(False, k, rows, outputs, False, name != "o", False, HOPPER)
        assert box_plan(True, 7168, rows, 256)[0]
        v = box_plan(True, 2048, rows, 448)[0]
        assert v["resident"] == 2, "one of them is the next launch's"
        assert v["mt"] == 2
        assert rows <= 8 or v["clusters"] * v["batch"] >= 448, "all sums meet at once"
        for outputs, paired in ((1152, True), (10240, False)):  # a dense layer's gate and up, and the head
            v = box_plan(False, 7168, rows, outputs, paired=paired, normed=True)[0]
            assert v["cl"] == (1 if rows == 1 else 2 if rows <= 8 else 8), (
                "fifteen clusters of eight read many bytes slower"
            )


K26_SIZES = [1536, 2048, 7168, 8192, 16384, 18432]
EXPERTS, INNER, DIM, TOP_K = 384, 2048, 7168, 8


@pytest.mark.parametrize("granule", [32, 128])
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_segments_are_all_of_k_and_fit_what_a_block_stages(granule: int, cluster: int) -> None:
    """In order, each element once, in whole granules but for the last; a block's ones in the room it has for them."""
    for k in [*range(8, 600, 8), *K26_SIZES]:
        *begins, room = library("cpu").product_segments(k, granule, cluster)
        assert begins[0] == 0
        assert k <= begins[8] < k + granule
        assert all(b % granule == 0 and a <= b for a, b in pairwise(begins))
        segments = 8 // cluster
        held = [begins[(rank + 1) * segments] - begins[rank * segments] for rank in range(cluster)]
        assert max(held) <= room


def _turns(rng: np.random.Generator, rows: int, turn: int) -> list[int]:
    """Of the experts that `rows` rows choose, one of them all rows', how many turns their rows take."""
    chosen = np.zeros(EXPERTS, np.int64)
    for _ in range(rows):
        chosen[rng.choice(EXPERTS - 1, TOP_K - 1, replace=False)] += 1
    chosen[-1] = rows
    return [-(-int(n) // turn) for n in chosen if n > 0]


def _in_order(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("blocks", "groups"), [(1, 1), (15, 2), (132, 4), (132, 16), (132, 24), (264, 8)])
def test_every_item_of_the_experts_is_one_workers(blocks: int, groups: int, down: bool) -> None:
    """At K2.6's sizes, whole and as one of two ranks: none lost, none twice, and nobody reads much more than others."""
    n, k, outputs = (DIM, INNER, 16) if down else (INNER, DIM, 8)
    rng = np.random.default_rng(blocks * groups)
    for rows, turn, ranks, around in ((1, 8, 1, True), (4, 8, 2, True), (17, 16, 1, False), (64, 16, 2, True)):
        tiles, turns, shared_turns = n // outputs // ranks, _turns(rng, rows, turn), -(-rows // turn)
        shared = tiles if around else 0
        given = (blocks, groups, tiles, shared, shared_turns, k, turns, k, False)
        found = np.array(library("cpu").expert_work(*given), np.int64).reshape(-1, 4)
        of_all = [(-1, shared, shared_turns), *((e, tiles, count) for e, count in enumerate(turns))]
        want = np.concatenate([np.indices((1, t, c)).reshape(3, -1).T + np.array([e, 0, 0]) for e, t, c in of_all])
        assert np.array_equal(_in_order(found[:, 1:]), _in_order(want))
        cost = np.where(found[:, 1] < 0, 32, 9)
        tile_cost = max(32 * shared_turns if around else 0, 9)  # of what is never cut: all turns of the shared expert
        work = np.bincount(found[:, 0], cost, blocks * groups)
        assert work.max() <= work.mean() + 2 * (tile_cost + 9), (rows, given[:6])
        by_block = work.reshape(blocks, groups).sum(1)
        assert by_block.max() <= by_block.mean() + tile_cost + 9, (rows, given[:6])


@pytest.mark.parametrize(("group", "size"), [(32, 16), (32, 2), (8, 16)], ids=["nibbles", "scales", "bf16"])
def test_places_in_the_experts_of_k26(group: int, size: int) -> None:
    """Beyond 32 bits for weights; the last row's last group ends where the tensor does."""
    for n, k in ((INNER, DIM), (DIM, INNER)):
        groups = k // group
        whole = EXPERTS * n * groups * size
        for expert in (0, 1, 189, 190, EXPERTS - 1):
            for row in (0, 15, n - 1):
                found = library("cpu").weight_byte(expert * n, row, groups, groups - 1, size)
                assert found == whole - ((EXPERTS - 1 - expert) * n + n - 1 - row) * groups * size - size
