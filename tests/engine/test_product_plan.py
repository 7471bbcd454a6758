"""The choice of the streaming product kernels, without a GPU: it fits the device; what it serves is up to K alone."""

from __future__ import annotations

import pytest

from engine.library import library

HOPPER, BLACKWELL = 232448, 101376  # bytes of shared memory a block may have on sm_90 and sm_120
PRODUCTS = [("linear", False), ("linear", True), ("gate_up", True), ("down", False)]
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


def test_everything_else_is_for_the_generic_kernel() -> None:
    assert plan("linear", 100, 1) == "generic", "rows that are not whole sixteen bytes"
    assert library("cpu").product_plan("linear", True, 7168, 1, False, False, HOPPER) == "generic", "no clusters"
    assert plan("linear", 7168, 1, shared=16384) == "generic", "no room"
    with pytest.raises(RuntimeError, match="product is not linear"):
        plan("router", 7168, 1)
