"""The acceptance command and the trees of the demo, on small things whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import acceptance, tree_text
from harness.acceptance import passages
from harness.protocol import Decoded, DecodeRequest, Round


def test_passages_begin_lines_and_spread_over_a_document() -> None:
    text = b"abc def\nghi\n  jkl mno\npqr stu vwx"
    found = list(passages([("a", text), ("b", b"short")], 256, 9, 2))
    assert found == [(0, [256, *b"abc def\n"]), (0, [256, *b"ghi\n  jk"])]
    assert [prompt[1:5] for _, prompt in passages([("a", text)], 256, 5, 9)] == [
        list(b"abc "),
        list(b"ghi\n"),
        list(b"pqr "),
    ]


class Fake:
    """Commits 4 tokens a forward with a tree, 2 with a chain; wrong after budget 9."""

    def decode(self, request: DecodeRequest) -> Decoded:
        size = 1 if request.draft is None else 2 if request.chain else 4
        tokens = tuple(range(request.max_tokens))
        if request.budget == 9:
            tokens = (*tokens[:-1], -1)
        return Decoded(tokens, request.max_tokens // size, "limit", (size,) * (request.max_tokens // size))


def test_figures_and_equality() -> None:
    prompts = [(0, [1]), (0, [2]), (3, [3])]
    lines = acceptance.measure(Fake(), "fp32", prompts, 8, 16, [7, 9])  # type: ignore[arg-type]
    assert [(x.budget, x.tree.value, x.chain.value, x.equal, x.forwards) for x in lines] == [
        (7, 4.0, 2.0, True, 6),
        (9, 4.0, 2.0, False, 6),
    ]
    assert "9    4.00 +- 0.00    2.00 +- 0.00  NO" in acceptance.show(lines)


@pytest.mark.slow
def test_acceptance_on_held_out_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few tokens of each document: every output is AR's, trees commit 2.5 and at least what chains do."""
    out = tmp_path / "acceptance.json"
    arguments = [
        "--precision",
        "int4",
        "--passages",
        "1",
        "--tokens",
        "16",
        "--prompt",
        "32",
        "--budget",
        "15",
        "--json",
        str(out),
    ]
    assert acceptance.main(arguments) == 0
    assert "equal to AR" in capsys.readouterr().out
    content = json.loads(out.read_text("utf-8"))
    (line,) = content["lines"]
    assert content["request"]["tokens"] == 16
    assert line["equal"]
    assert line["tree"]["value"] >= max(2.5, line["chain"]["value"])
    assert acceptance.main(["--config", "tiny"]) == 3


def test_a_tree_as_text() -> None:
    drawn = Round((104, 101, 97, 108, 10, 300), (-1, 0, 0, 1, 1, 2), (0, 1, 3))
    assert tree_text.lines(drawn, tree_text.as_byte) == [
        '* "h"',
        '* |- "e"',
        '* |  |- "l"',
        '  |  `- "\\n"',
        '  `- "a"',
        "     `- <300>",
    ]
    assert tree_text.busiest([]) is None
    other = Round((1,), (-1,), (0,))
    assert tree_text.busiest([other, drawn]) is drawn
