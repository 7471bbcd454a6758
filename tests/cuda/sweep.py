"""Every operation and one decode of each precision and decoder, small enough to run under compute-sanitizer.

    compute-sanitizer --tool racecheck python -m tests.cuda.sweep

The operation tests are called with shapes that reach every kernel and every branch by which a launch is chosen (row
tiles of 1, 2, 4 and 8, vector and scalar reads, one and several segments, slices and heads a block), and still check
what they compute.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from engine import create
from harness.bundles import ensure
from harness.golden import Golden
from tests.cuda import test_decoding as decoding
from tests.cuda import test_products as products
from tests.cuda import test_rows as rows
from tests.cuda.operations import Operations

LINEAR = (33, 96, 1028)  # scalar reads, vector reads, more than a chunk of a tile of eight rows
ATTENTION = [((4, 32, 16, 8, 16), 63), ((3, 30, 10, 6, 17), 511), ((5, 300, 24, 16, 20), 513)]
HEADS = ((16, 32, 8, 8, 8), 5)  # enough blocks to give a block several heads
EXPERTS = [(16, 4, 64, 32, 32), (5, 2, 33, 17, 0), (12, 3, 1026, 70, 35), (6, 2, 1024, 32, 32)]


def operations() -> None:
    """Each operation's test over a few shapes."""
    rows.WIDTHS = (1, 2, 3, 9)
    with Operations("cuda") as cuda, Operations("cpu") as cpu:
        for kind in ("f32", "int4"):
            for k in LINEAR:
                rows.test_linear(cuda, kind, k)
            for epilogue in (1, 2):
                rows.test_epilogues(cuda, kind, epilogue)
            for sizes in EXPERTS:
                rows.test_experts(cuda, kind, sizes)
        rows.test_embed_and_rms_norm(cuda, 100)
        for dims, kv_len in [*ATTENTION, HEADS]:
            rows.test_prepare_and_value(cuda, dims)
            rows.test_attention(cuda, dims, kv_len)
        for groups in ((16, 4, 1, 1), (12, 3, 4, 2)):
            decoding.test_router(cuda, cpu, *groups, ties=True)
        decoding.test_router_fault_names_the_lowest_row(cuda, np.nan)
        for vocab in (512, 8193):
            for temperature in (0.0, 0.7):
                decoding.test_select(cuda, cpu, vocab, temperature)
        decoding.test_select_fault(cuda, cpu, np.nan, 20000)
        for style in ("plain", "ties", "sparse"):
            for sizes in ((512, 8, 8), (4097, 5, 20), (7, 4, 100)):
                decoding.test_tree(cuda, cpu, style, *sizes)
        decoding.test_tree_fault(cuda, cpu, np.nan, 9000)
        for seed in (1, 3, 7):
            decoding.test_accept_and_commit(cuda, cpu, seed)
        decoding.test_root(cuda, cpu)


def bf16_products() -> None:
    """The streaming kernels: every number of row tiles, partial tiles of every operand, both kinds, all epilogues."""
    products.WIDTHS = (1, 9, 17, 33)
    device = products.Device()
    for kind in products.KINDS:
        for k in (72, 1024):
            products.test_linear(device, kind, k)
            products.test_norm_and_epilogues(device, kind, k)
        for sizes in ((200, 104, 72, 20, 4), (64, 32, 0, 300, 8)):
            products.test_moe(device, kind, sizes)


def cells() -> None:
    """A decode of each precision and decoder, in poisoned memory, against the golden tokens and the guard zones."""
    asked = [("tiny", ("", "noisy"), 9), ("dflash", ("dflash",), 21)]
    for precision, (config, drafters, rows_at_most) in itertools.product(("fp32", "int4"), asked):
        path = ensure([config])[config]
        golden = Golden.open(path, precision)
        with create("cuda").load(path, precision, poison=True, max_rows=rows_at_most) as session:
            for drafter in drafters:
                decoded = session.decode(golden.request(drafter))
                if decoded.tokens != golden.tokens:
                    raise SystemExit(f"{config} {precision} {drafter or 'ar'}: {decoded.tokens}, not {golden.tokens}")
            if session.broken_guard():
                raise SystemExit(f"{precision}: {session.broken_guard()} was written outside its bounds")


def main() -> int:
    """Run both parts and say how long each took."""
    for part in (operations, bf16_products, cells):
        start = time.monotonic()
        part()
        print(f"{part.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
