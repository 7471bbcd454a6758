"""``--json`` of every command: whole, alone, and read by any reader of JSON."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from harness import cli, plain_json
from harness.sources import ROOT


def test_what_machines_read_is_json_whatever_was_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """Python writes NaN and infinities as no other reader of JSON takes them."""
    for arguments in (["trace", "fp32-ar-tiny-cpu"], ["demo", "--precision", "fp32", "--tokens", "2"]):
        assert cli.main([*arguments, "--engine", "wrong:nan", "--json"]) in (0, 1)
        json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert cli.main(["mutants", "--list", "-k", "nibble", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)
    assert set(first) == {"name", "group", "says"}
    assert json.loads(plain_json.text({"a": [float("nan"), float("-inf"), 1.5]})) == {"a": ["nan", "-inf", 1.5]}


def test_json_is_asked_for_and_printed_in_one_way() -> None:
    """By ``Parser.add_json`` and ``harness/plain_json.py``."""
    asking = 0
    for path in [*(ROOT / "harness").rglob("*.py"), *(ROOT / "engine").rglob("*.py")]:
        text = path.read_text("utf-8")
        assert '"--json"' not in text or path.name == "cli.py", path
        if ".add_json(" in text:
            asking += 1
            calls = [ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert not [call for call in calls if call.startswith("print(json.dump")], path
    assert asking > 20


JSON = [
    ["doctor"],
    ["matrix", "-k", "tiny2"],
    ["plan", "k2.6", "--memory", "640"],
    ["mutants", "--list"],
    ["bench", "--list"],
]


@pytest.mark.parametrize("arguments", JSON, ids=" ".join)
def test_json_stands_alone_on_stdout_or_in_a_file_beside_the_text(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> str:
        assert cli.main([*arguments, *more]) == 0
        return capsys.readouterr().out

    out = tmp_path / "out.json"
    text, printed = said(), said("--json")
    assert said("--json=-") == said("--json", "-") == printed
    assert said("--json", str(out)) == text != printed
    assert out.read_text("utf-8") == printed
    other = tmp_path / "other name"
    assert said(f"--json={other}") == text
    assert other.read_text("utf-8") == printed


def test_what_a_command_reads_is_never_taken_for_the_file_that_json_writes(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", "--json", str(micro)]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(micro)
    ledger = tmp_path / "ledger.json"
    ledger.write_text("{}")
    for command in ("gate", "report", "plan"):
        assert cli.main([command, "--json", str(ledger)]) == 3
        assert "--json=- prints" in capsys.readouterr().err
    assert ledger.read_text() == "{}"
    assert cli.main(["bench", "ops", "--json", str(tmp_path / "speed")]) == 3
    assert f"--json={tmp_path / 'speed'}" in capsys.readouterr().err
