"""Links that are cut: no packets any more, and nothing is closed.

Needs the right to make network namespaces (root); where that is missing, each test says so and is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.remote.hosts import Limits
from harness.remote.link import LinkLost
from harness.remote.ssh import connect
from harness.remote.ssh_auth import ConnectionFailed
from harness.remote.sync import working_tree
from tests.processes import running
from tests.remote.boxes import Box, NoNamespaces, boxes
from tests.remote.support import Open, Server, in_background
from tests.waiting import PATIENCE, until


@pytest.fixture
def box(server: Server, tmp_path: Path) -> Iterator[Box]:
    try:
        with boxes(1, tmp_path, server.authorized) as (one,):
            yield one
    except NoNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_dropped_link(box: Box, server: Server, connect: Open, tmp_path: Path, repo: Path, marker: str) -> None:
    at = server.host(tmp_path, address=box.address, port=box.port, host_key=box.key, limits=Limits(silence=3))
    session = connect(at)
    session.sync(working_tree(repo))
    thread, errors = in_background(lambda: session.run(["sleep", marker], limit=60))
    until(lambda: running(marker))
    box.cut()
    began = time.monotonic()
    thread.join(PATIENCE)
    assert [type(e) for e in errors] == [LinkLost]
    assert time.monotonic() - began < Limits().silence * 0.75
    until(lambda: not running(marker))  # the far side, too, has noticed, on its own


@pytest.mark.slow
def test_a_link_that_is_cut_while_we_send(box: Box, server: Server, connect: Open, tmp_path: Path, repo: Path) -> None:
    """The kernel's buffer is full then, and whoever writes waits in it."""
    (repo / "big").write_bytes(os.urandom(32 << 20))
    at = server.host(tmp_path, address=box.address, port=box.port, host_key=box.key, limits=Limits(silence=3))
    session = connect(at)
    cut: list[float] = []

    def progress(done: int, total: int) -> None:
        if not cut and done > 4 << 20:
            box.cut()
            cut.append(time.monotonic())

    thread, errors = in_background(lambda: session.sync(working_tree(repo), progress=progress))
    until(lambda: cut)
    thread.join(PATIENCE)
    assert [type(e) for e in errors] == [LinkLost]
    assert "nothing was heard" in str(errors[0])
    assert list(Path(at.workdir, "runs").glob("*/tree")) == []


@pytest.mark.slow
def test_a_dead_address_has_the_connect_limit(box: Box, server: Server, tmp_path: Path) -> None:
    box.cut()
    at = server.host(tmp_path, address=box.address, port=box.port, limits=Limits(connect=1.5))
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match=r"connect: (no answer within 1\.5 s|No route to host)"):
        connect(at, server.options)
    assert time.monotonic() - began < Limits().connect * 0.75
