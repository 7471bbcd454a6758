"""What a client may ask for, one function per request.

Each gets the agent and the message, and returns the fields of its answer; errors are RequestError, StoreError, OSError.
"""

from __future__ import annotations

import hashlib
import os
import platform
import queue
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.remote.farside.probe import probe
from harness.remote.farside.process import Command
from harness.remote.farside.queue_lock import BoxLock, held_by
from harness.remote.farside.store import Store
from harness.remote.farside.tree import StoreError, Tree, decode, encode
from harness.remote.farside.wire import CHUNK, DATA, MESSAGE

if TYPE_CHECKING:
    from harness.remote.farside.agent import Agent

LARGEST_PIECE = 8 << 20  # bytes of one piece of a manifest, unpacked


class RequestError(Exception):
    """A request that cannot be met."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def hello(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Agree on the silence that is granted, and say where this is."""
    agent.silence = float(message["silence"])
    agent.pace = min(5.0, agent.silence / 4)
    agent.grace = float(message["grace"])
    agent.held["store"] = store = Store(message["workdir"])
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "node": platform.node(),
        "user": _user(),
        "time": time.time(),
        "workdir": decode(store.root),
    }


def _user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def look(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Facts about the host; changes nothing."""
    facts = probe(agent.held["store"].root, message["python"], dict(message["env"]), list(message["features"]))
    facts["holder"] = held_by(message["lock"])
    return facts


def plan(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Which contents a tree would need; changes nothing."""
    store: Store = agent.held["store"]
    have = [store.read(digest) for digest in message["pieces"]]
    tree, _ = _pieces(agent, message["pieces"], have)
    return {"contents": store.missing(tree)}


def sync(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Receive what is missing of a tree and lay it out as ``runs/RUN/PART``."""
    store: Store = agent.held["store"]
    run, part = message["run"], message["part"]
    store.open()
    guard = store.sharing()
    try:
        have = [store.read(digest) for digest in message["pieces"]]
        tree, fresh = _pieces(agent, message["pieces"], have)
        for digest, piece in fresh.items():
            store.put(digest, len(piece), partial(_once, piece))
        record = agent.held.setdefault("record", {"client": message["client"], "parts": {}})
        record["parts"][part] = message["pieces"]
        if "alive" not in agent.held:
            agent.held["alive"] = store.begin(run, record)
        else:
            store.note(run, record)
        received = 0
        for _ in range(3):  # a second time if the store turned out damaged
            received += _receive(agent, store, tree)
            if not store.lay_out(tree, run, part):
                return {"directory": decode(store.path("runs", run)), "received": received}
        raise StoreError("damaged", f"{decode(store.root)}: contents change between writing and reading them")
    finally:
        guard.close()


def _pieces(agent: Agent, digests: list[str], have: list[bytes | None]) -> tuple[Tree, dict[str, bytes]]:
    """The tree, and the pieces of its manifest that had to come from the client."""
    missing = [i for i, piece in enumerate(have) if piece is None]
    agent.wire.say(event="pieces", missing=missing)
    fresh = {}
    for i in missing:
        kind, payload = agent.inbox.get()
        if kind != DATA:
            raise RequestError("protocol", "a piece of a manifest did not come")
        piece = zlib.decompressobj().decompress(payload, LARGEST_PIECE)
        if hashlib.sha256(piece).hexdigest() != digests[i]:
            raise StoreError("damaged", "a piece of the manifest arrived damaged")
        have[i] = fresh[digests[i]] = piece
    tree = Tree()
    for known in have:
        tree.add(known or b"")
    return tree, fresh


def _once(piece: bytes, _: int) -> Iterator[bytes]:
    yield piece


def _receive(agent: Agent, store: Store, tree: Tree) -> int:
    contents = list(tree.contents().items())
    missing = store.missing(tree)
    agent.wire.say(event="contents", missing=missing)
    for i in missing:
        digest, size = contents[i]
        if not store.put(digest, size, agent.data):
            path = next(decode(path) for path, _, known, _ in tree.files if known == digest)
            raise StoreError("damaged", f"{path}: arrived damaged")
    return sum(contents[i][1] for i in missing)


def lock(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Wait for the box; every new holder is an event."""
    me = {**message["me"], "user": _user(), "pid": os.getpid(), "since": time.time()}
    box = BoxLock(message["path"])
    began = time.monotonic()

    def waiting(holder: Mapping[str, Any]) -> None:
        age = max(0.0, time.time() - float(holder.get("since", time.time())))  # both by this machine's clock
        agent.wire.say(event="waiting", holder={**holder, "age": age})

    def give_up() -> bool:
        return not agent.inbox.empty()  # whatever the client says now, it is no longer "wait"

    if not box.acquire(me, float(message["patience"]), waiting, give_up):
        holder = box.holder()
        box.close()
        return {"held": False, "holder": holder}
    agent.held["box"] = box
    return {"held": True, "waited": time.monotonic() - began}


def unlock(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Let the next run have the box."""
    if box := agent.held.pop("box", None):
        box.close()
    return {}


def run(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Run a command in the run's directory until it ends, its time is up, or the client cancels it."""
    store: Store = agent.held["store"]
    home = store.path("runs", message["run"])
    env = _environment(home, message)
    argv = [os.path.expanduser(message["argv"][0]), *message["argv"][1:]]
    began = time.monotonic()
    try:
        command = Command(
            argv,
            os.path.join(home, encode(message["cwd"])),
            env,
            agent.wire.send,
            lambda: agent.inbox.put((b"", None)),
        )
    except FileNotFoundError:
        return {"status": 127, "signal": 0, "reason": "", "text": f"{argv[0]}: not found"}
    except PermissionError:
        return {"status": 126, "signal": 0, "reason": "", "text": f"{argv[0]}: not executable"}
    reason = _until_over(agent, began + float(message["limit"]))
    interrupt = signal.SIGINT if reason == "cancelled" else signal.SIGTERM
    code, left, behind = command.finish(float(message["grace"]), first=interrupt)
    if reason:
        _drop_end(agent)
    return {
        "status": max(code, 0),
        "signal": max(-code, 0),
        "reason": reason,
        "left": left,
        "behind": behind,
        "seconds": time.monotonic() - began,
    }


def _until_over(agent: Agent, deadline: float) -> str:
    """Wait for the command's end (``""``), the client's ``cancelled``, or the time ``limit``."""
    while True:
        try:
            kind, order = agent.inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return "limit"
        if kind == b"":
            return ""
        if kind == MESSAGE and order.get("op") == "cancel":
            return "cancelled"


def _drop_end(agent: Agent) -> None:
    """The command's end is in the inbox beside the order that caused it; it must not meet the next request."""
    while True:
        try:
            kind, _ = agent.inbox.get(timeout=1)
        except queue.Empty:
            return
        if kind == b"":
            return


def _environment(home: bytes, message: Mapping[str, Any]) -> dict[str, str]:
    """The login's environment, the request's, and what preparation made of both; the later counts."""
    env = {**os.environ, **{str(k): os.path.expanduser(str(v)) for k, v in message["env"].items()}}
    if exported := message.get("exported"):
        try:
            with open(os.path.join(home, encode(exported)), "rb") as file:
                pairs = [entry.partition(b"=") for entry in file.read().split(b"\0") if entry]
            env.update((decode(name), decode(value)) for name, _, value in pairs)
        except FileNotFoundError:
            raise RequestError("protocol", f"{exported}: preparation left no environment") from None
    return env


def fetch(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Send every regular file below a path of the run's directory."""
    home = agent.held["store"].path("runs", message["run"])
    top = os.path.join(home, encode(message["path"]))
    files = total = 0
    budget = int(message["budget"])
    for folder, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if total + size > budget:
                    raise RequestError("size", f"{decode(path)}: more than {budget} bytes to bring back")
                agent.wire.say(event="file", path=decode(os.path.relpath(path, top)), size=size)
                hashing = hashlib.sha256()
                left = size
                while left and (chunk := file.read(min(CHUNK, left))):
                    hashing.update(chunk)
                    left -= len(chunk)
                    agent.wire.send(DATA, chunk)
                agent.wire.say(event="whole", sha256=hashing.hexdigest(), short=left)
            files += 1
            total += size
    return {"files": files, "bytes": total}


def prune(agent: Agent, message: dict[str, Any]) -> dict[str, Any]:
    """Remove old runs and what only they needed."""
    return dict(agent.held["store"].prune(int(message["keep"])))


HANDLERS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    f.__name__: f for f in (hello, look, plan, sync, lock, unlock, run, fetch, prune)
}
