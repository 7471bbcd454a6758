"""What hosts print, line by line with their names, and unable to do anything to a terminal."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from harness.remote.console import Console, clean
from harness.remote.farside.wire import ERR, OUT


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("abc", "abc"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://e\x1b\\link", "link"),
        ("10%\r50%\r100%", "100%"),
        ("dos\r", "dos"),
        ("bell\x07 back\x08 nul\0 csi\x9b2J", "bell back nul csi2J"),
        ("tab\tstays", "tab\tstays"),
        ("half an escape \x1b[", "half an escape ["),
        ("ünïcödé 数", "ünïcödé 数"),
    ],
)
def test_lines_are_shown_and_not_obeyed(line: str, plain: str) -> None:
    assert clean(line, colours=False) == plain
    assert clean("\x1b[1;32mok\x1b[0m\x1b[5A", colours=True) == "\x1b[1;32mok\x1b[0m"


def test_pieces_become_lines_with_names(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.width = 5
    one = console.sink("one", tmp_path / "one" / "log")
    two = console.sink("two", tmp_path / "two" / "log")
    one(OUT, b"first half, ")
    two(OUT, b"other\n")
    one(ERR, b"error\n")
    one(OUT, "second ü".encode()[:-1])
    one(OUT, "ü".encode()[1:] + b"\n\nlast without end")
    one(OUT, b"")
    one(OUT, b"")
    assert out.getvalue().splitlines() == [
        "two   | other",
        "one   | first half, second ü",
        "one   | ",
        "one   | last without end",
    ]
    assert err.getvalue() == "one   | error\n"
    assert (tmp_path / "one" / "log").read_bytes() == "first half, error\nsecond ü\n\nlast without end".encode()


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    out = io.StringIO()
    sink = Console(out, out).sink("one", tmp_path / "log")
    for _ in range(8):
        sink(OUT, b"x" * 32768)
    assert out.getvalue().count("x") >= 7 * 32768


def test_many_hosts_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(out, out)

    def pour(name: str) -> None:
        sink = console.sink(name, tmp_path / name)
        for _ in range(200):
            sink(OUT, (name * 40 + "\n").encode())

    threads = [threading.Thread(target=pour, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = out.getvalue().splitlines()
    assert len(lines) == 800
    assert set(lines) == {f"{name} | {name * 40}" for name in "abcd"}
