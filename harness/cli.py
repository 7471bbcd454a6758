"""The ``kdtree`` command: each subcommand is a function ``(argv) -> exit status`` in a module of its own.

Modules are imported when their subcommand is used, so that ``kdtree matrix --list`` costs neither torch nor numpy. A
subcommand whose module is not in this checkout is not offered.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from harness.cells import DEVICES, FAILED, INCOMPLETE, INFRASTRUCTURE, PASSED
from harness.ending import as_by_ctrl_c
from harness.files import said
from harness.plain_json import PRINTED
from harness.sources import ROOT
from refs.names import meant

COMMANDS = {
    "test": ("harness.matrix_command:test", "run the matrix: kdtree test [-k ID] [--engine NAME] [--device cpu|cuda]"),
    "matrix": ("harness.matrix_command:matrix", "list the expected cells: kdtree matrix --list [--json]"),
    "doctor": ("harness.doctor:main", "what this machine can run, and what is missing"),
    "build": ("harness.build:main", "compile the engine: kdtree build [--device cpu|cuda] [--arch 12.0]"),
    "bundles": ("harness.bundles:main", "regenerate bundles and check them: kdtree bundles [--out DIR] [CONFIG ...]"),
    "demo": ("harness.demo:main", "AR beside DDTree: kdtree demo [--config tiny] [--precision fp32|int4]"),
    "quality": ("harness.quality:main", "bits per byte of held-out text in FP32 and INT4: kdtree quality"),
    "acceptance": (
        "harness.acceptance:main",
        "tokens a forward with the own drafter on held-out text: kdtree acceptance",
    ),
    "inspect": ("harness.inspect:main", "what is in a KDTR file: kdtree inspect FILE.kdtr [--verify]"),
    "import": ("engine.importer:main", "a KDTR file from a checkpoint: kdtree import HF_DIR -o FILE.kdtr"),
    "trace": ("harness.trace.command:main", "where a cell's numbers first part: kdtree trace CELL [--against cpu]"),
    "report": ("harness.reports.command:main", "HTML, Markdown and JUnit from a ledger: kdtree report LEDGER"),
    "gate": ("harness.gate.command:main", "let a merge through or not: kdtree gate LEDGER"),
    "remote": ("harness.remote.command:main", "the matrix on other machines: kdtree remote HOST ..."),
    "mutants": ("harness.mutants.command:main", "plant faults in the engine and count what is caught"),
    "bench": ("harness.bench.command:main", "speed against peers and ceilings: kdtree bench [project] [ops] [step]"),
    "evidence": ("harness.evidence.command:main", "all there is to show on a GPU, as records: kdtree evidence OUT"),
    "plan": ("engine.plan:main", "what fits where: kdtree plan CONFIG --gpus 8 --memory 96"),
}
"""Target and help by name."""

READER_LEFT = 141
"""What a shell reports of a program that SIGPIPE ended: nobody saw the whole answer, so it is none."""

EXIT_STATUSES = (
    f"exit status: {PASSED} every expected cell passed, {FAILED} a cell failed, {INCOMPLETE} a cell did not run, "
    f"{INFRASTRUCTURE} configuration or infrastructure (build, bundles, host, missing device, wrong arguments), "
    f"{READER_LEFT} whoever read the output left before its end"
)


ENGINE_HELP = "csrc (default), reference, wrong:FAULT, or a registered one (docs/harness.md)"
DEVICE_HELP = "default: cpu"


class _Help(argparse.HelpFormatter):
    """Sentences are filled to the terminal's width; lines that begin with a space, examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False).fill
        return "\n".join(line if line.startswith(" ") else fill(line) for line in text.splitlines())


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors end with the documented status for configuration."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, formatter_class=_Help, **options)
        self._has_json, self._behind_json = False, ""

    def add_engine(self) -> None:
        """The options ``--engine`` and ``--device`` of a command that runs one engine on one device."""
        self.add_argument("--engine", default="csrc", help=ENGINE_HELP)
        self.add_argument("--device", choices=DEVICES, default="cpu", help=DEVICE_HELP)

    def add_json(self, what: str, group: argparse._ActionsContainer | None = None) -> None:
        """The option ``--json``: ``options.json`` is None, ``PRINTED`` or a file (`harness.plain_json`)."""
        (group or self).add_argument(
            "--json",
            nargs="?",
            const=PRINTED,
            type=_json_target,
            metavar="OUT.json",
            help=f"{what}: on stdout, or in this file beside the usual output",
        )
        self._has_json = True

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._with_json(words) if self._has_json else words, namespace)

    def _with_json(self, words: list[str]) -> list[str]:
        """``--json`` takes the word behind it only if that looks like its file.

        Otherwise ``kdtree inspect --json model.kdtr`` would write where it should read.
        """
        for at, word in enumerate(words):
            if word == "--":
                break
            if len(word) > 2 and "--json".startswith(word):
                self._behind_json = words[at + 1] if at + 1 < len(words) else ""
                if self._behind_json != str(PRINTED) and not self._behind_json.endswith(".json"):
                    words[at] = f"--json={PRINTED}"
        return words

    def error(self, message: str) -> NoReturn:
        word = self._behind_json
        if word.endswith(".json") and "required" in message:
            message += f" ({word} is taken for the file that --json writes; --json=- prints)"
        elif word and message.endswith(word):
            message += f" (if it is for --json to write: --json={word}, or a name that ends in .json)"
        self.print_usage(sys.stderr)
        self.exit(INFRASTRUCTURE, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    """As ``type=`` of an argument: a number from 1 on. Raises ArgumentTypeError."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def output(text: str) -> Path:
    """As ``type=`` of an argument: a file that can be written, told before the work that it is for is done.

    Raises ArgumentTypeError.
    """
    path = Path(text)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder, not a file")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {folder} is not for this user to write to")
    return path


def _json_target(text: str) -> Path:
    return PRINTED if text == str(PRINTED) else output(text)


def available() -> dict[str, tuple[str, str]]:
    """The commands whose module is in this checkout."""
    return {name: entry for name, entry in COMMANDS.items() if _exists(*entry[0].split(":"))}


def _exists(module: str, function: str) -> bool:
    """Looked up in the source: importing would load what the module needs, and importlib loads its package."""
    source = ROOT / f"{module.replace('.', '/')}.py"
    return source.is_file() and f"\ndef {function}(" in source.read_text("utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """``kdtree COMMAND ...``; the exit status is the command's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _usable_streams()
    commands = available()
    listing = "\n".join(f"  {name:<10} {text}" for name, (_, text) in commands.items())
    parser = Parser(
        prog="kdtree",
        usage="kdtree COMMAND ... (kdtree COMMAND --help says more)",
        description=f"commands:\n{listing}",
        epilog=EXIT_STATUSES,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the commands above")
    if not arguments:
        parser.print_help(sys.stderr)
        return INFRASTRUCTURE

    def run() -> int:
        name = parser.parse_args(arguments[:1]).command
        if name not in commands:
            parser.error(_no_command(name, commands))
        return _run(commands, name, arguments[1:])

    return ended(f"kdtree {arguments[0]}", run)


def ended(who: str, run: Callable[[], int]) -> int:
    """The exit status of a command; what ends it before its time is one line of ``who``, but for a fault of ours."""
    try:
        with as_by_ctrl_c():
            status = run()
        sys.stdout.flush()
        return status
    except SystemExit as end:
        # A command returns its status; what exits is its argument parser, and plain argparse's 2 for wrong arguments
        # would say that cells did not run.
        return PASSED if end.code in (None, PASSED) else INFRASTRUCTURE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        return READER_LEFT
    except OSError as error:
        print(f"{who}: {said(error)}", file=sys.stderr)
        return INFRASTRUCTURE
    except ModuleNotFoundError as error:
        if (ROOT / (error.name or "").partition(".")[0]).is_dir():
            return _unforeseen(who)  # one of ours: a fault of the checkout, whose place matters
        return _lacking(who, f"{error.name} is not installed for {sys.executable}")
    except ImportError as error:
        places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if any(Path(places[-1]).is_relative_to(ROOT / name) for name in ("harness", "engine", "refs")):
            return _unforeseen(who)
        return _lacking(who, f"a package of {sys.executable} cannot be imported: {error} ({places[-1]})")
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        return _interrupted() if _began_as_interrupt(error) else _unforeseen(who)


def _no_command(name: str, commands: Iterable[str]) -> str:
    noxfile = ROOT / "noxfile.py"  # not in an installed package
    if noxfile.is_file() and f"@nox.session\ndef {name}(" in noxfile.read_text("utf-8"):
        return f"{name} is no command but a session: nox -s {name}"
    return f"{name!r} is no command{meant(name, commands)}"


def _interrupted() -> int:
    print("kdtree: interrupted", file=sys.stderr)
    return INCOMPLETE


def _began_as_interrupt(error: BaseException) -> bool:
    """What an interrupt meets on its way out may fail in turn: a condition that waited holds its lock no longer."""
    while error.__context__ is not None:
        error = error.__context__
    return isinstance(error, KeyboardInterrupt)


def _lacking(who: str, what: str) -> int:
    print(
        f"{who}: {what}; `{sys.executable} -m harness doctor` says what is missing and "
        "how to get it, and nox installs it",
        file=sys.stderr,
    )
    return INFRASTRUCTURE


def _unforeseen(who: str) -> int:
    """Python's own status for a traceback, 1, would say that a cell failed."""
    traceback.print_exc()
    print(f"{who}: a fault of kdtree itself, and no verdict on the engine", file=sys.stderr)
    return INFRASTRUCTURE


def _usable_streams() -> None:
    """A stream that was closed before the start swallows what is said; a sign that a terminal lacks is spelled out."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _run(commands: dict[str, tuple[str, str]], name: str, arguments: Sequence[str]) -> int:
    module, _, function = commands[name][0].partition(":")
    run = cast(Callable[[Sequence[str]], int], getattr(importlib.import_module(module), function))
    return run(arguments)
