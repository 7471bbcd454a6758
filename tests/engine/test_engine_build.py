"""The build cache: what changes the key, who builds, what a dead build leaves, and one clear line for what is missing.

Most of it runs on a source tree of two small files, so that a build takes a second.
"""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import build as builder
from harness import compiling, toolchain
from harness.build import BuildError, build, main
from harness.includes import closure
from tests import processes
from tests.waiting import PATIENCE, until

ROOT = builder.ROOT
SOURCE = '#include "value.h"\nextern "C" __attribute__((visibility("default"))) int value() { return VALUE; }\n'


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csrc/ whose library has one function, and a cache of its own."""
    root = tmp_path / "check out"  # a space, as in some people's folders
    (root / "csrc" / "cpu").mkdir(parents=True)
    (root / "harness").mkdir()
    (root / "csrc" / "value.cpp").write_text(SOURCE)
    (root / "csrc" / "value.h").write_text("#define VALUE 41\n")
    for script in builder.SCRIPTS:
        shutil.copy(ROOT / "harness" / script, root / "harness")
    monkeypatch.setattr(builder, "ROOT", root)
    monkeypatch.setattr(builder, "CSRC", root / "csrc")
    monkeypatch.setattr(compiling, "STANDARD", ("cstdint",))  # reading all of them ahead takes longer than the rest
    monkeypatch.setenv("KDTREE_BUILD", str(tmp_path / "the cache"))
    return root


def value(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).value())


@pytest.mark.slow
def test_built_once_and_found_again(tree: Path) -> None:
    first = build()
    assert value(first) == 41
    stamp = first.stat().st_mtime_ns
    assert build() == first
    assert first.stat().st_mtime_ns == stamp
    left = sorted(p.name for p in first.parent.parent.iterdir() if not p.name.startswith("."))
    assert left == [first.parent.name], "nothing but the finished build is visible"


@pytest.mark.slow
def test_every_input_is_in_the_key(tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A header, a source, a new file, a build script, flags, the compiler's name: another library each."""
    seen = [build()]
    (tree / "csrc" / "value.h").write_text("#define VALUE 42\n")
    seen.append(build())
    assert value(seen[-1]) == 42
    (tree / "csrc" / "value.cpp").write_text(SOURCE.replace("VALUE;", "VALUE + 1;"))
    seen.append(build())
    assert value(seen[-1]) == 43
    (tree / "csrc" / "cpu" / "more.cpp").write_text("int more() { return 1; }\n")
    seen.append(build())
    for name in builder.SCRIPTS:
        with open(tree / "harness" / name, "a") as script:
            script.write("# another\n")
        seen.append(build())
    seen.append(build(debug=True))
    wrapper = tmp_path / "bin" / "g++-wrapper"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo other 1.0; exit; }\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    seen.append(build())
    assert len(set(seen)) == len(seen)
    monkeypatch.delenv("CXX")
    (tree / "csrc" / "value.h").write_text("#define VALUE 41\n")
    (tree / "csrc" / "value.cpp").write_text(SOURCE)
    (tree / "csrc" / "cpu" / "more.cpp").unlink()
    for name in builder.SCRIPTS:
        shutil.copy(ROOT / "harness" / name, tree / "harness")
    assert build() == seen[0]


@pytest.mark.slow
def test_equal_sources_are_one_build_wherever_they_lie(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release build holds nothing of its folder's name, so checkouts share it; a debug build is their own."""
    (tree / "csrc" / "value.cpp").write_text(SOURCE + 'extern "C" const char* file() { return __FILE__; }\n')
    first, debug = build(), build(debug=True)
    assert bytes(tree) not in first.read_bytes()
    other = tmp_path / "another place"
    shutil.copytree(tree, other)
    monkeypatch.setattr(builder, "ROOT", other)
    monkeypatch.setattr(builder, "CSRC", other / "csrc")
    assert build() == first
    assert build(debug=True) != debug


@pytest.mark.slow
def test_another_torch_is_another_build(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    first = build()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build() != first


def test_a_build_that_is_there_is_found_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the key that a process has which imported torch: what is read of torch and of the compiler is the same."""
    import torch

    library, imported = build(), toolchain.torch_build()
    assert imported == [torch.__version__, torch.version.git_version, torch.version.cuda]
    for name in (None, "g++ -pipe"):
        with monkeypatch.context() as changed:
            changed.setenv("CXX", name) if name else changed.delenv("CXX", raising=False)
            assert toolchain.cxx() == toolchain.extension().get_cxx_compiler()
    monkeypatch.delitem(sys.modules, "torch")
    assert toolchain.torch_build() == imported
    assert build() == library
    assert "torch" not in sys.modules


def test_the_key_covers_what_the_compiler_read() -> None:
    """Of the real build: ninja holds the compiler's own list of the files that each object came from."""
    library = build()
    listed = [sys.executable, "-m", "ninja", "-C", str(library.parent), "-t", "deps"]
    deps = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    read = {line.strip().rpartition("/csrc/")[2] for line in deps.splitlines() if "/csrc/" in line and " /" in line}
    read = {name for name in read if (builder.CSRC / name).is_file()}  # torch has folders of that name, too
    covered = {str(p) for p in closure(builder.CSRC, [p.relative_to(builder.CSRC) for p in builder.sources("cpu")])}
    assert "cpu/kernels_body.h" in read
    assert read <= covered


@pytest.mark.slow
def test_what_nobody_asked_for_in_a_week_leaves_the_cache(tree: Path) -> None:
    cache = Path(os.environ["KDTREE_BUILD"])
    names = [f"cpu-{'0' * 20}", f"cuda-{'1' * 20}", f"cpu-{'2' * 20}.log", f"cpu-{'3' * 20}", "costs", "mutants"]
    for name in names:
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (0, 0))
    (cache / names[2]).rmdir()
    (cache / names[2]).touch()
    os.utime(cache / names[2], (0, 0))
    os.utime(cache / names[3])
    library = build()
    os.utime(library.parent, (0, 0))
    assert build() == library
    builder._drop_unused(cache)
    left = sorted(p.name for p in cache.iterdir() if not p.name.startswith("."))
    assert left == sorted([library.parent.name, *names[3:]])


def test_a_header_of_any_folder_is_in_the_key_of_who_includes_it(tree: Path) -> None:
    """A header that nobody includes asks for no other build; one that a header includes does."""
    for name, text in (("cuda/used.h", "#define USED 1\n"), ("cuda/other.h", ""), ("cpu/inner.inc", "")):
        (tree / "csrc" / name).parent.mkdir(exist_ok=True)
        (tree / "csrc" / name).write_text(text)
    (tree / "csrc" / "value.h").write_text('#  include "cuda/used.h" // why\n#define VALUE 41\n')
    (tree / "csrc" / "cuda" / "used.h").write_text('#if 0\n#include "../cpu/inner.inc"\n#include "gone.h"\n#endif\n')
    assert [str(p) for p in closure(tree / "csrc", [Path("value.cpp")])] == [
        "cpu/inner.inc",
        "cuda/used.h",
        "value.cpp",
        "value.h",
    ]

    def key() -> str:
        return builder._key([tree / "csrc" / "value.cpp"], {"cxx": []}, [], "", "", ())

    first = key()
    (tree / "csrc" / "cuda" / "other.h").write_text("int x;\n")
    assert key() == first
    (tree / "csrc" / "cpu" / "inner.inc").write_text("int x;\n")
    assert key() != first


def test_a_cache_that_cannot_be_written_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "file").touch()
    monkeypatch.setenv("KDTREE_BUILD", str(tree / "file" / "cache"))
    with pytest.raises(BuildError, match="file/cache: Not a directory; KDTREE_BUILD names another folder"):
        build()


def _build_in_child(queue: multiprocessing.Queue[str]) -> None:
    os.setpgrp()  # so that a test can end the compilers too
    queue.put(str(build()))


@pytest.mark.slow
def test_many_processes_build_once(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiler call leaves a line; there is one call for the one source however many ask."""
    log = tree.parent / "calls"
    wrapper = tree.parent / "cxx"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo x >> {log}; sleep 1;; esac\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=_build_in_child, args=(queue,)) for _ in range(4)]
    for child in children:
        child.start()
    paths = {queue.get(timeout=PATIENCE) for _ in children}
    for child in children:
        child.join(PATIENCE)
        assert child.exitcode == 0
    assert len(paths) == 1
    assert log.read_text() == "x\n"


@pytest.mark.slow
def test_a_killed_build_is_no_obstacle(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL in the middle: its lock ends with it, and its half build is neither used nor in the way."""
    wrapper = tree.parent / "cxx"
    stop = tree.parent / "stop"
    hang = f"[ -e {stop} ] || {{ touch {stop}; exec sleep 600; }}"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {hang};; esac\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    child = context.Process(target=_build_in_child, args=(queue,))
    child.start()
    cache = Path(os.environ["KDTREE_BUILD"])
    until(stop.exists)
    assert child.pid is not None
    assert processes.tell(child.pid)
    child.join()
    start = time.monotonic()
    library = build()
    assert time.monotonic() - start < PATIENCE
    processes.tell(child.pid, group=True)  # the compiler of the killed build, which ran on all the while
    assert value(library) == 41
    assert not list(cache.glob(".*.part"))


@pytest.mark.slow
def test_a_stale_lock_file_and_an_empty_folder_are_no_obstacle(tree: Path) -> None:
    library = build()
    library.unlink()
    lock = next(Path(os.environ["KDTREE_BUILD"]).glob(".*.lock"))
    assert lock.exists()
    (library.parent / "lock").write_text("")  # what torch's own builds wait for
    assert build() == library
    assert value(library) == 41


@pytest.mark.slow
def test_compile_errors_are_readable(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "csrc" / "value.h").write_text("#define VALUE undefined_name\n")
    with pytest.raises(BuildError) as caught:
        build()
    text = str(caught.value)
    assert "value.cpp" in text or "value.h" in text
    assert "undefined_name" in text
    assert len(text.splitlines()) < 20
    log = Path(text.rsplit(": ", 1)[1])
    assert "undefined_name" in log.read_text()
    assert sorted(p.name for p in log.parent.iterdir()) == [f".{log.stem}.lock", log.name], "nothing else is left"
    assert main([]) == 3
    assert "undefined_name" in capsys.readouterr().err
    (tree / "csrc" / "value.h").write_text("#define VALUE 5\n")
    assert value(build()) == 5


def test_an_error_in_a_foreign_header_names_the_source_that_included_it(tmp_path: Path) -> None:
    text = """[1/3] c++ -c norm.cpp
In file included from /csrc/bf16.h:5,
                 from /csrc/cpu/norm.cpp:6:
/usr/include/c++/12/cstddef:52:1: error: storage class specified for parameter
   52 | extern "C++"
[2/3] c++ -c moe.cpp
/csrc/cpu/moe.cpp: In function 'void kdtree::f()':
/csrc/cpu/moe.cpp:9:3: error: expected ';'
"""
    shown = compiling._readable(text, tmp_path / "log")
    assert "from /csrc/cpu/norm.cpp:6:\n/usr/include/c++/12/cstddef:52:1: error" in shown
    assert "In function 'void kdtree::f()':\n/csrc/cpu/moe.cpp:9:3: error" in shown
    assert "[1/3]" not in shown
    stopped = "[1/3] c++ -c norm.cpp\nninja: build stopped: interrupted by user.\n"
    assert compiling._readable(stopped, tmp_path / "log").startswith("the build was interrupted; ")


def test_colliding_object_names_are_refused(tree: Path) -> None:
    (tree / "csrc" / "cpu" / "value.cpp").write_text("int other() { return 1; }\n")
    with pytest.raises(BuildError, match=r"two sources are called value\.cpp"):
        build()


def test_no_compiler(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: 'no-such-compiler' is not on PATH; install"):
        build()


@pytest.mark.slow
def test_a_compiler_that_makes_nothing_is_no_build(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/true")
    for _ in range(2):  # nothing is left that the second would take for a build
        with pytest.raises(BuildError, match=r"the compiler, /bin/true, .* has made no library; CXX names another"):
            build()
    assert not list((tree / "build").glob("cpu-*/"))


@pytest.mark.slow
def test_no_ninja(tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only a compiler on PATH, and no ninja package."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("c++", "as", "ld", "sh"):
        found = subprocess.run(
            ["sh", "-c", f"command -v {name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(BuildError, match="ninja is not installed; install it with: pip install ninja"):
        build()


@pytest.mark.parametrize("name", ["libasan", "libtsan", "libubsan"])
def test_a_sanitizer_of_this_process_is_not_the_compilers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """gcc has ended with a segmentation fault under libtsan, where a test run under it compiled changed sources."""
    monkeypatch.setenv("LD_PRELOAD", f"/usr/lib/gcc/x86_64-linux-gnu/12/{name}.so")
    assert compiling._changes(tmp_path, [], [])["LD_PRELOAD"] == ""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libsandbox.so")
    assert "LD_PRELOAD" not in compiling._changes(tmp_path, [], [])


def test_no_torch(tmp_path: Path) -> None:
    """In a process of its own, whose torch cannot be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "harness.build"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "kdtree build: torch is not installed (not here); install it with: pip install torch\n"
    old = "import types; __version__ = '2.10.1'\nversion = types.SimpleNamespace(cuda=None)\n"
    (tmp_path / "torch" / "__init__.py").write_text(old)
    done = subprocess.run(
        [sys.executable, "-m", "harness.build", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "torch 2.10.1 is too old" in json.loads(done.stdout)["error"]


class Toolkit:
    """A torch that says it has CUDA, and an nvcc that says what the test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, release: str) -> None:
        import torch
        from torch.utils import cpp_extension

        nvcc = folder / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(
            "#!/bin/sh\n"
            'if [ "$1" = --list-gpu-arch ]; then echo compute_90; echo compute_120; exit; fi\n'
            f"echo 'Cuda compilation tools, release {release}, V{release}.88'\n"
        )
        nvcc.chmod(0o755)
        toolchain.version_of.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder))


def test_cuda_that_cannot_be(tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BuildError, match="has no CUDA; install a CUDA build of it"):
        build("cuda", ["12.0"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(BuildError, match=r"no CUDA toolkit: install nvcc 13\.x and set CUDA_HOME"):
        build("cuda", ["12.0"])
    Toolkit(monkeypatch, tmp_path / "old", "12.8")
    with pytest.raises(BuildError, match=r"is 12\.8, torch is built for 13\.0; install a toolkit 13\.x"):
        build("cuda", ["12.0"])
    Toolkit(monkeypatch, tmp_path / "new", "13.0")
    for arch, text in (("12", "not of the form"), ("7.0", "nvcc 13.0 knows compute_90 compute_120"), ("x", "not of")):
        with pytest.raises(BuildError, match=text):
            build("cuda", [arch])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as with CUDA_VISIBLE_DEVICES=""
    with pytest.raises(BuildError, match=r"no GPU is visible here, `kdtree doctor` says why; .*--arch 12\.0"):
        build("cuda")


def test_torch_does_not_warn_of_a_gpu_that_no_build_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does when it is imported where a toolkit is and no GPU."""
    import torch
    from torch.utils import cpp_extension

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    told: list[str] = []
    log = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(log, "handle", lambda record: told.append(record.getMessage()))
    monkeypatch.delitem(sys.modules, cpp_extension.__name__)
    monkeypatch.delattr(torch.utils, "cpp_extension")
    extension = toolchain.extension()  # imported again
    assert str(tmp_path) == extension.CUDA_HOME
    assert told == []
    log.warning("as before")
    assert told == ["as before"]


def test_no_flag_lets_torch_drop_the_architectures() -> None:
    for debug in (False, True):
        for flags in builder._flags("cuda", debug, None).values():
            assert not [flag for flag in flags if "arch" in flag]


def test_wrong_words() -> None:
    with pytest.raises(BuildError, match="device 'tpu'"):
        build("tpu")
    with pytest.raises(BuildError, match="sanitizer 'memory'"):
        build(sanitize="memory")


def test_the_real_sources_have_names_of_their_own() -> None:
    assert len(builder.sources("cuda")) > len(builder.sources("cpu")) > 15


@pytest.mark.slow
def test_command(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert value(Path(answer["library"])) == 41
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == answer["library"]
