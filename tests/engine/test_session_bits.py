"""What must not show in a session's bits: pieces, widths, graphs, threads, instruction sets; and rotation far out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_files import Bundle, changed
from engine_ops import same_bits

import engine
from engine.library import library
from harness.protocol import DeviceError
from refs.model import Model
from tests.fuzz.seeds import CORPUS


def test_prefill_in_one_go_or_in_pieces_or_by_steps(device: str, tiny2: Path, precision: str) -> None:
    """The same bits for max_rows 1, 3 and 65, and for prefill, step and verify with commit."""
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, Bundle(tiny2).vocab, 70)]
    results = set()
    for max_rows in (1, 3, 65):
        with engine.create(device).load(tiny2, precision, max_rows=max_rows, poison=True) as session:
            results.add(session.prefill(tokens).tobytes())
            session.reset()
            first = session.prefill(tokens[:40])
            results.add(np.concatenate([first, session.prefill(tokens[40:])]).tobytes())
            session.reset()
            results.add(np.stack([session.step(t) for t in tokens]).tobytes())
            assert session.length == 70
    assert len(results) == 1


def test_a_decode_does_not_depend_on_how_its_prompt_is_cut(device: str, tiny2: Path) -> None:
    """Pieces of one row, of several with a shorter last one, of as many as fill the prompt exactly, and all at once."""
    bundle = Bundle(tiny2)
    assert len(bundle.prompt) == 9
    results = set()
    for max_rows in (1, 3, 4, 9, 65):
        with engine.create(device).load(tiny2, "int4", max_rows=max_rows, poison=True) as session:
            done = session.decode(bundle.request("int4"))
            assert done.logits is not None
            results.add((done.tokens, done.logits.tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("committed", [0, 1, 63, 64])
def test_every_verify_width_has_ars_bits(device: str, tiny2: Path, precision: str, committed: int) -> None:
    """Widths 1..65 as random trees; every row against a session that ran its path token by token."""
    rng = np.random.default_rng(committed)
    vocab = Bundle(tiny2).vocab
    prompt = rng.integers(0, vocab, committed).tolist()
    parents = [-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, 65))]
    tokens = rng.integers(0, vocab, 65).tolist()
    with engine.create(device).load(tiny2, precision, poison=True) as session:
        if prompt:
            session.prefill(prompt)
        want = session.verify(tokens, parents)
        for width in range(1, 66):
            same_bits(
                session.verify(tokens[:width], parents[:width]), want[:width], f"logits at width {width}, [row, token]"
            )
        for row in (0, 1, 2, 17, 40, 64):
            path = [row]
            while path[0]:
                path.insert(0, parents[path[0]])
            session.reset()
            if prompt:
                session.prefill(prompt)
            for r in path:
                last = session.step(tokens[r])
            same_bits(last, want[row], f"logits of row {row}, [token]")


def test_graphs_and_poison_do_not_show(device: str, tiny2: Path, precision: str) -> None:
    bundle = Bundle(tiny2)
    results = set()
    for graphs in (True, False):
        for poison in (True, False):
            with engine.create(device).load(tiny2, precision, poison=poison, graphs=graphs) as session:
                for _ in range(2):
                    got = session.decode(bundle.request(precision, "noisy"))
                    assert got.logits is not None
                    results.add(got.logits.tobytes())
    assert len(results) == 1


def test_threads_and_instruction_sets_do_not_show(monkeypatch: pytest.MonkeyPatch, tiny2: Path, precision: str) -> None:
    bundle = Bundle(tiny2)
    results = set()
    for threads, isa in [(n, "") for n in (1, 2, 3)] + [(1, name) for name in library("cpu").isa_names().split()]:
        monkeypatch.setenv("KDTREE_THREADS", str(threads))
        monkeypatch.setenv("KDTREE_ISA", isa)
        with engine.create("cpu").load(tiny2, precision) as session:
            got = session.decode(bundle.request(precision, "noisy", max_tokens=6))
            assert got.logits is not None
            results.add(got.logits.tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "4x", " "])
def test_a_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch, tiny2: Path, text: str) -> None:
    monkeypatch.setenv("KDTREE_THREADS", text)
    with pytest.raises(DeviceError, match=f"KDTREE_THREADS={text}: is no number of threads"):
        engine.create("cpu").load(tiny2, "int4")


@pytest.mark.parametrize(
    ("fast", "slow", "why"),
    [
        (11.0, 10.5, "both ends round to pair 0: they are equal"),
        (32.0, 1e-7, "the upper end lies beyond the last dimension"),
        (4e-7, 1e-7, "both ends lie beyond it"),
    ],
)
def test_the_ramp_of_yarn_at_its_edges(
    device: str, tiny: Path, tmp_path: Path, fast: float, slow: float, why: str
) -> None:
    path = changed(tiny, tmp_path / "yarn.kdtr", fields={"rope_beta_fast": fast, "rope_beta_slow": slow})
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, Bundle(tiny).vocab, 40)]
    want = Model.open(path, "fp32").taps(tokens, operations=True)["layers.0.mla.k_rope"]
    usual = Model.open(tiny, "fp32").taps(tokens, operations=True)["layers.0.mla.k_rope"]
    assert np.abs(want - usual).max() > 0.1, "the test could not tell this ramp from the usual one"
    with engine.create(device).load(path, "fp32") as session:
        got = session.taps(tokens, operations=True)["layers.0.mla.k_rope"]
    np.testing.assert_allclose(got, want, atol=5e-5, err_msg=why)


@pytest.mark.slow
def test_positions_far_out_rotate_by_their_angle(device: str, tmp_path: Path) -> None:
    """A context beyond what the host computes angles for at a time: the cached keys tell every position's angle."""
    length = 8192 + 40
    fields: dict[str, float] = {"max_context": length, "rope_factor": 1.0}
    path = changed(CORPUS / "seed-dense", tmp_path / "long.kdtr", fields=fields)
    with engine.create(device).load(path, "fp32", max_rows=512) as session:
        session.prefill([1] * length)
        k_rope = session.cache(0)[1].astype(np.float64)
    pairs = k_rope[:, 0] + 1j * k_rope[:, 1]  # one pair, whose frequency is 1
    want = pairs[0] * np.exp(1j * np.arange(length))  # every row of the embedding is alike
    assert abs(pairs[0]) > 0.1
    assert np.abs(pairs - want).max() < 2e-6 * abs(pairs[0])
