"""An import that is interrupted, killed, out of disk, or not alone; and what it costs in memory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import hf_checkpoints as hf
import numpy as np
import pytest

from engine import convert, direct_file, kdtr_stream
from engine.importer import DONE, INCOMPLETE, REFUSED, USAGE, main
from engine.safetensors_reader import Checkpoint
from refs import kdtr
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
RUN = "import sys; from engine.importer import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    c = hf.config()
    return hf.write(tmp_path / "hf", c, hf.floats(c, "BF16"), 3)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, writes of two disk blocks, and a journal entry after every tensor."""
    monkeypatch.setattr(direct_file, "STAGE", 2 * direct_file.BLOCK)
    monkeypatch.setattr(convert, "READ_BLOCK", 500)
    monkeypatch.setattr(kdtr_stream, "FLUSH_BYTES", 1)


class Reads:
    """Counts reads of tensor data, and raises at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int, error: type[BaseException]) -> None:
        self.count, self.stop_at, self.error = 0, stop_at, error
        original = Checkpoint.read

        def read(checkpoint: Checkpoint, path: Path, offset: int, target: memoryview) -> None:
            self.count += 1
            if self.count == self.stop_at:
                raise self.error
            original(checkpoint, path, offset, target)

        monkeypatch.setattr(Checkpoint, "read", read)


def complete(source: Path, target: Path) -> bytes:
    """The bytes of an import that nothing disturbs."""
    assert main([str(source), "-o", str(target)]) == DONE
    return target.read_bytes()


def left_beside(target: Path) -> set[str]:
    return {p.name for p in target.parent.iterdir() if p.name.startswith(f".{target.name}")}


@pytest.mark.slow
@pytest.mark.usefixtures("small_steps")
def test_an_interrupt_anywhere_is_gone_on_from(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = complete(source, tmp_path / "want.kdtr")
    with monkeypatch.context() as patch:
        reads = Reads(patch, -1, KeyboardInterrupt)
        complete(source, tmp_path / "counted.kdtr")
    total = reads.count
    assert total > 100
    target = tmp_path / "out.kdtr"
    for stop_at in (1, 2, 3, total // 3, total // 2, total - 1, total):
        with monkeypatch.context() as patch:
            first = Reads(patch, stop_at, KeyboardInterrupt)
            assert main([str(source), "-o", str(target)]) == INCOMPLETE
        assert not target.exists()
        assert left_beside(target) == {f".{target.name}.partial", f".{target.name}.journal"}
        with monkeypatch.context() as patch:
            second = Reads(patch, -1, KeyboardInterrupt)
            assert main([str(source), "-o", str(target)]) == DONE
        assert target.read_bytes() == want
        assert left_beside(target) == set()
        longest = (
            1 + max(e.size for e in kdtr.read(target).entries.values()) // 500
        )  # the tensor it was in is read again
        assert first.count + second.count <= total + longest + 2, "finished tensors were read again"
        target.unlink()


def test_an_interrupt_keeps_what_no_journal_entry_was_due_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.kdtr"
    with monkeypatch.context() as patch:
        Reads(patch, 20, KeyboardInterrupt)
        assert main([str(source), "-o", str(target)]) == INCOMPLETE
    assert main([str(source), "-o", str(target)]) == DONE
    assert "going on: " in capsys.readouterr().err
    assert target.read_bytes() == complete(source, tmp_path / "want.kdtr")


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("what", ["weights", "config", "options", "partial", "cut", "journal", "torn"])
def test_a_journal_of_something_else_is_not_believed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    target = tmp_path / "out.kdtr"
    options: list[str] = []
    with monkeypatch.context() as patch:
        Reads(patch, 60, KeyboardInterrupt)
        assert main([str(source), "-o", str(target)]) == INCOMPLETE
    journal, partial = (target.with_name(f".{target.name}.{kind}") for kind in ("journal", "partial"))
    assert len(journal.read_bytes().splitlines()) > 5
    if what == "weights":
        hf.write(source, hf.config(), hf.floats(hf.config(), "BF16", seed=9), 3)
    elif what == "config":
        hf.write(source, hf.config(routed_scaling_factor=1.0), hf.floats(hf.config(), "BF16"), 3)
    elif what == "options":
        options = ["--inner-norm-eps", "config"]
    elif what == "partial":
        partial.unlink()
    elif what == "cut":
        os.truncate(partial, 0)  # made as long again, it would be zeros where the journal says that tensors are
    elif what == "journal":
        journal.write_bytes(b'{"key": "0"}\n{"tensor": "embed.w", "crc": 1}\n')
    else:
        journal.write_bytes(journal.read_bytes()[:-3])
    assert main([str(source), "-o", str(target), *options]) == DONE
    assert target.read_bytes() == _fresh(source, tmp_path, options)


def _fresh(source: Path, tmp_path: Path, options: list[str]) -> bytes:
    other = tmp_path / "fresh.kdtr"
    assert main([str(source), "-o", str(other), *options]) == DONE
    return other.read_bytes()


@pytest.mark.usefixtures("small_steps")
def test_a_full_disk_is_incomplete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    want = complete(source, tmp_path / "want.kdtr")
    target = tmp_path / "out.kdtr"
    original, written = os.pwrite, 0

    def pwrite(handle: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 20_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(handle, data[: max(1, len(data) // 2)], offset)  # short writes too

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert main([str(source), "-o", str(target)]) == INCOMPLETE
    assert "No space left" in capsys.readouterr().err
    assert not target.exists()
    assert main([str(source), "-o", str(target)]) == DONE
    assert "already written" in capsys.readouterr().err
    assert target.read_bytes() == want


def test_too_little_space_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.kdtr"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert main([str(source), "-o", str(target)]) == INCOMPLETE
    told = capsys.readouterr().err
    assert "the disk has" in told
    assert "Errno" not in told
    assert left_beside(target) == set()


def test_two_imports_of_one_target_exclude_each_other(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.kdtr"
    with kdtr_stream.KdtrStream(target, {"a": 1}, {"t": ("u8", (1,))}, b""):
        assert main([str(source), "-o", str(target)]) == USAGE
    assert left_beside(target) == set()
    assert main([str(source), "-o", str(target)]) == DONE


def well_under_way(run: subprocess.Popen[bytes], journal: Path) -> bool:
    """Or over."""
    with contextlib.suppress(FileNotFoundError):  # not there yet, or no longer
        return journal.read_bytes().count(b"\n") > 1
    return run.poll() is not None


@pytest.mark.slow
def test_sigkill_leaves_no_half_file(tmp_path: Path) -> None:
    c = hf.config(hidden_size=512, vocab_size=10_000)
    tensors = hf.floats(c, "BF16")
    source = hf.write(tmp_path / "hf", c, tensors)
    target = tmp_path / "out.kdtr"
    code = f"from engine import kdtr_stream; kdtr_stream.FLUSH_BYTES = 1 << 20; {RUN}"
    killed = 0
    for _ in range(3):
        run = subprocess.Popen([sys.executable, "-c", code, source, "-o", target], cwd=ROOT, stderr=subprocess.DEVNULL)
        journal = target.with_name(f".{target.name}.journal")
        until(partial(well_under_way, run, journal))
        run.send_signal(signal.SIGKILL)
        run.wait()
        killed += run.returncode == -signal.SIGKILL
        assert run.returncode == 0 or not target.exists()
        target.unlink(missing_ok=True)
    assert killed, "no run was killed: the checkpoint is too small for this test"
    assert main([str(source), "-o", str(target)]) == DONE
    assert left_beside(target) == set()
    found = kdtr.read(target, verify=True)
    want = np.left_shift(tensors["model.embed_tokens.weight"][1], 16, dtype=np.uint32)
    assert found.tensor("embed.w").tobytes() == want.tobytes()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """0.3 GB of source tensors, sparse on disk, imported with at most 160 MiB resident."""
    c = hf.config(hidden_size=8192, vocab_size=10_000, num_hidden_layers=1, first_k_dense_replace=1)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in hf.shapes(c).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    source = hf.write(tmp_path / "hf", c, {})
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    assert end > 320_000_000
    target = tmp_path / "out.kdtr"
    code = (
        "from engine import kdtr_stream; kdtr_stream.os.fsync = kdtr_stream.os.fdatasync = lambda f: None; " + RUN
    )  # zeros need no disk here
    run = subprocess.run(
        [sys.executable, "-c", code, source, "-o", target, "--json"], cwd=ROOT, capture_output=True, check=True
    )
    target.unlink()
    report = json.loads(run.stdout)
    assert 20 << 20 < report["peak_rss_bytes"] < 160 << 20


def test_a_place_that_will_never_do_is_not_called_incomplete(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), "-o", str(tmp_path / f"{'n' * 245}.kdtr")]) == USAGE
    assert "File name too long; name another place with -o" in capsys.readouterr().err


def test_an_existing_target_stays(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.kdtr"
    target.write_bytes(b"precious")
    assert main([str(source), "-o", str(target)]) == USAGE
    assert "--force" in capsys.readouterr().err
    assert target.read_bytes() == b"precious"
    (source / "config.json").write_text("{}")
    assert main([str(source), "-o", str(target), "--force"]) == REFUSED
    assert target.read_bytes() == b"precious"
    hf.write(source, hf.config(), hf.floats(hf.config(), "BF16"), 3)
    assert main([str(source), "-o", str(target), "--force"]) == DONE
    kdtr.read(target, verify=True)


def test_what_it_says(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.kdtr"
    (source / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert main([str(source), "-o", str(target), "--dry-run"]) == DONE
    assert not target.exists()
    assert left_beside(target) == set()
    said = capsys.readouterr()
    assert said.out.startswith("would write")
    assert "4 layers (1 dense), 8 experts, top 2, fp32" in said.err
    assert "inner_norm_eps 1e-06 (rms_norm_eps 1e-05)" in said.err
    assert "without effect: architectures, torch_dtype" in said.err
    assert "generation_config.json has eos_token_id [9, 7]" in said.err
    options = ["--json", "--inner-norm-eps", "config", "--eos", "-1", "--context", "9"]
    assert main([str(source), "-o", str(target), *options]) == DONE
    report = json.loads(capsys.readouterr().out)
    assert (report["bytes"], report["written"]) == (target.stat().st_size, True)
    fields = kdtr.read(target).fields
    assert (fields["inner_norm_eps"], fields["eos_id"], fields["max_context"]) == (1e-5, -1, 9)
    assert main([str(tmp_path / "gone"), "-o", str(target)]) == USAGE
    assert main([str(source), "-o", str(tmp_path / "gone" / "x.kdtr")]) == USAGE


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from io import StringIO

    from engine import transfer

    clock = iter([0.0, 5.0, 11.0, 12.0])
    monkeypatch.setattr(transfer.time, "monotonic", lambda: next(clock))
    out = StringIO()
    progress = transfer.Progress(4_000_000_000, out)
    for _ in range(3):
        progress.add(1_000_000_000, "embed.w")
    progress.close()
    assert out.getvalue() == "2.00 of 4.00 GB, 182 MB/s, 11 s left: embed.w\n"
