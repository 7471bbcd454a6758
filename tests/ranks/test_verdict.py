"""Whom a failed job is blamed on, from what its supervisor has seen; whole jobs are in test_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.ranks.verdict import LOG_LINES, OUTPUT, Rank, blame, report, told

REPORT = """
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4711)
  error_file: <N/A>
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / OUTPUT).write_text("", "utf-8")
    return tmp_path


def test_the_first_to_die_is_to_blame_and_not_who_was_ended_for_it(folder: Path) -> None:
    ranks = [Rank(0, 4710, left=12.0), Rank(1, 4711, left=10.5), Rank(2, 4712, left=12.1)]
    line, order = blame(ranks, folder, None)
    assert (line, order) == ("rank 1 died (pid 4711)", [1, 0, 2])
    (folder / OUTPUT).write_text(REPORT, "utf-8")
    assert blame(ranks, folder, 1)[0] == "rank 1 died of SIGKILL (pid 4711)"


def test_torchrun_knows_better_than_the_order_in_which_ends_were_noticed(folder: Path) -> None:
    """It ends the others a fifth of a second later, and a busy machine may show both ends at once."""
    (folder / OUTPUT).write_text(REPORT, "utf-8")
    ranks = [Rank(0, 4710, left=10.4), Rank(1, 4711, left=10.5)]
    assert blame(ranks, folder, 1) == ("rank 1 died of SIGKILL (pid 4711)", [1, 0])


def test_who_lost_the_others_comes_after_who_died(folder: Path) -> None:
    ranks = [Rank(0, 1, left=1.0, words=("waited", "an exchange failed")), Rank(1, 2, left=5.0)]
    assert blame(ranks, folder, None)[1] == [1, 0]


def test_who_did_it_comes_before_who_suffered_it(folder: Path) -> None:
    ranks = [
        Rank(0, 1, words=("waited", "an exchange failed")),
        Rank(1, 2, words=("error", "no memory")),
        Rank(2, 3, left=1.0),
        Rank(3, 4, silent=True),
        Rank(4, 5, words=("diverged", "other logits")),
    ]
    for first, line in enumerate(
        (
            "rank 4 diverged: other logits",
            "rank 3 was not heard of",
            "rank 2 died (pid 3)",
            "rank 1 failed: no memory",
            "rank 0 lost the others: an exchange failed",
        )
    ):
        said, order = blame(ranks[: 5 - first], folder, None)
        assert said.startswith(line)
        assert order == [*range(4 - first, -1, -1)]


def test_the_verdict_waits_until_torchrun_has_told_how_they_died(folder: Path) -> None:
    ranks = [Rank(0, 4710, words=("waited", "")), Rank(1, 4711, left=1.0)]
    assert not told(ranks, folder)
    (folder / OUTPUT).write_text(REPORT, "utf-8")
    assert told(ranks, folder)
    assert told([Rank(0, 4710), Rank(1, 4712, words=("diverged", ""), left=1.0)], folder), "who spoke has told it"


@pytest.mark.parametrize(("code", "said"), [(-6, "of SIGABRT"), (1, "with status 1"), (0, "with status 0")])
def test_an_end_is_told_by_its_signal_or_status(folder: Path, code: int, said: str) -> None:
    (folder / OUTPUT).write_text(REPORT.replace("-9", str(code)), "utf-8")
    assert blame([Rank(1, 4711, left=0.0)], folder, 1)[0] == f"rank 1 died {said} (pid 4711)"


def test_a_rank_is_in_trouble_until_it_has_ended_as_it_was_told_to() -> None:
    assert not Rank(0, 1).in_trouble
    assert not Rank(0, 1, words=("done", ""), left=1.0).in_trouble
    for trouble in (Rank(0, 1, left=0.0), Rank(0, 1, silent=True), Rank(0, 1, words=("waited", ""))):
        assert trouble.in_trouble


def test_a_report_begins_with_the_log_of_who_is_to_blame(folder: Path) -> None:
    """Ranks 4 to 6 are this host's 0 to 2; the last lines of each, its errors last, and torchrun's."""
    (folder / OUTPUT).write_text("told\n", "utf-8")
    for local, text in ((0, "zero\n"), (1, "".join(f"line {i}\n" for i in range(LOG_LINES + 3)))):
        logs = folder / "job" / "attempt_0" / str(local)
        logs.mkdir(parents=True)
        (logs / "stdout.log").write_text(text, "utf-8")
        (logs / "stderr.log").write_text(f"error {local}\n", "utf-8")
    assert report("rank 5 died", [5], [4, 5, 6], 4, folder).splitlines() == [
        "rank 5 died",
        "  log of rank 5:",
        *(f"    line {i}" for i in range(3, LOG_LINES + 3)),
        "    error 1",
        "  log of rank 4:",
        "    zero",
        "    error 0",
        "  log of rank 6:",
        "    (nothing)",
        "  torchrun:",
        "    told",
        f"  all of it: {folder}",
    ]
