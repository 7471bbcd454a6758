"""A run of large configs that the memory has no room for ends before anything is made, with the figures."""

from __future__ import annotations

import pytest

from harness import host_memory
from harness.host_memory import TooLittleMemory, check, session_bytes
from harness.matrix import expected
from harness.prepare import Infrastructure, prepare

LARGE = [point for point in expected(scale=True) if point.config.startswith("k26")]


def test_the_figures_are_those_of_the_weights() -> None:
    experts, scales = 384 * 3 * 2048 * 7168 // 2, 384 * 3 * 2048 * 7168 // 16
    dense = 1536 * 7168 + 64 * 192 * 1536 + 576 * 7168 + 64 * 256 * 512 + 7168 * 8192 + 3 * 2048 * 7168 + 384 * 7168
    least = experts + scales + 4 * (dense + 2 * 2048 * 7168)
    assert 0 < session_bytes("k26_layer", "cpu") - host_memory.REST_BYTES - least < 1 << 20
    assert session_bytes("k26_layer", "cuda") < 2 << 30


def test_too_little_memory_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    need = session_bytes("k26_layer", "cpu") + session_bytes("k26_slice", "cpu")
    check(LARGE, need)
    with pytest.raises(TooLittleMemory, match=r"need 1[5-9]\.\d GiB .* 2\.0 GiB are free.*-k k26_layer"):
        check(LARGE, 2 << 30)
    check(expected(), 1)  # nothing large among them
    monkeypatch.setattr(host_memory, "available", lambda: 2 << 30)
    with pytest.raises(Infrastructure, match="GiB are free"):
        prepare("csrc", LARGE, lambda line: None)


def test_this_machine_says_what_it_has() -> None:
    assert host_memory.available() > 64 << 20
