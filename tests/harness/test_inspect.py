"""``kdtree inspect``: a file's content, and files that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.inspect import main as inspect
from refs import kdtr


def test_inspect_shows_a_file_and_one_tensor(micro: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(micro), "--verify"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines()[1:])) <= 120
    for part in (
        "every checksum is right",
        "hidden_size              32",
        "golden.fp32.logits",
        'meta config: "micro"',
    ):
        assert part in text
    assert inspect([str(micro), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["fields"]["vocab_size"] == 64
    assert {t["name"]: t["shape"] for t in content["tensors"]}["golden.fp32.logits"] == [9, 64]
    assert inspect([str(micro), "--tensor", "layers.1.experts.up.sc", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert 0 < float(values["max"]) < 1  # scales are bf16, shown as numbers
    assert values["not_finite"] == 0
    assert inspect([str(micro), "--tensor", "layers.1.experts.up.sc"]) == 0
    text = capsys.readouterr().out
    assert f"\ncrc        {values['crc']:08x}\n" in text  # as the list of tensors has it
    assert f"\nfirst      {values['first'][0]} " in text


def test_inspect_refuses_by_name(micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(micro.read_bytes())
    data[kdtr.read(micro).entries["golden.prompt"].offset] ^= 1
    broken = tmp_path / "broken.kdtr"
    broken.write_bytes(data)
    assert inspect([str(broken)]) == 0  # the data's checksums are read on request
    assert inspect([str(broken), "--verify"]) == 3
    assert f"{broken}: tensor golden.prompt.crc" in capsys.readouterr().err
    assert inspect([str(micro), "--tensor", "nothing"]) == 3
    assert "nothing: the file has no such tensor" in capsys.readouterr().err
    assert inspect([str(tmp_path / "gone")]) == 3
