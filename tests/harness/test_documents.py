"""The documents against the code: commands, options, sessions, modules, variables and files that they name exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import os
import re

from harness import cli
from harness.matrix import of_run
from harness.sources import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("harness", "engine", "refs", "csrc", "tests", ".ci", ".github")
COMMAND = re.compile(r"(?<![\w.])(?:kdtree|python3? -m harness) ([a-z]+)\b([^`\n]*)")
SESSION = re.compile(r"nox (?:--no-venv |-R )?-s (\w+)([^`\n]*)")
MODULE = re.compile(r"python3? -m ((?:harness|tests|engine|training)\.[\w.]+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
VARIABLE = re.compile(r"KDTREE_[A-Z]+(?:_[A-Z]+)*")
PYTEST = {"--ignore"}
INTERNAL = {
    "KDTREE_RANKS_ADDRESS",
    "KDTREE_RANKS_KEY",
    "KDTREE_EXPORTED",
    "KDTREE_ORDER_SEED",
    "KDTREE_TEST",
    "KDTREE_STAGE",
}
"""Between processes of ours; nobody sets them."""
MADE = {"ledger.json", "junit.xml", "index.html", "report.txt", "meta.json", "generation_config.json", "bench-cpu.json"}
MADE |= {"model.safetensors.index.json", "NAME.yaml"}
"""Files that runs make, or that users have."""


@functools.cache
def help_of(command: str) -> str:
    """What ``kdtree COMMAND --help`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([command, "--help"]) == 0
    return out.getvalue()


def options_of(session: str) -> str:
    """Where the options are told that ``nox -s SESSION -- ...`` takes."""
    sources = {"test": ("harness/plugin.py", "tests/slow.py"), "fuzz": ("tests/fuzz/run.py",)}
    sources |= {"reproduce": ("harness/reproduce.py",), "nvcc": ("harness/nvcc.py",)}
    if session in sources:
        return "".join((ROOT / name).read_text("utf-8") for name in sources[session])
    return help_of(session) if session in cli.available() else ""


def files() -> list[str]:
    """Every file of the checkout that is source, relative to it."""
    found = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [n for n in inner if n not in ("__pycache__", "build", "bundles", "reports", ".git", ".nox")]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names]
    return found


def test_every_command_and_option_that_a_page_shows_is_there() -> None:
    wrong = []
    for page in PAGES:
        for name, rest in COMMAND.findall(page.read_text("utf-8")):
            if name not in cli.available():
                wrong.append(f"{page.name}: kdtree {name}")
            else:
                wrong += [f"{page.name}: kdtree {name} {o}" for o in OPTION.findall(rest) if o not in help_of(name)]
    assert wrong == []
    assert len({name for page in PAGES for name, _ in COMMAND.findall(page.read_text("utf-8"))}) > 12


def test_every_session_and_module_that_a_page_shows_is_there() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text("utf-8"))
    sessions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    wrong = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for name, rest in SESSION.findall(text):
            given = OPTION.findall(rest.partition(" -- ")[2])
            wrong += [] if name in sessions else [f"{page.name}: nox -s {name}"]
            wrong += [f"{page.name}: {name} {o}" for o in given if o not in options_of(name) and o not in PYTEST]
        for module in MODULE.findall(text):
            path = ROOT / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                wrong.append(f"{page.name}: python -m {module}")
    assert wrong == []
    readme = PAGES[0].read_text("utf-8")
    assert [name for name in sorted(sessions) if f"nox -s {name}" not in readme] == []


def test_variables_are_read_where_they_are_told_of_and_told_of_where_they_are_read() -> None:
    told = {name for page in PAGES for name in VARIABLE.findall(page.read_text("utf-8"))}
    read: set[str] = set()
    asked: set[str] = set()
    for name in files():
        top = name.partition(os.sep)[0]
        if top in CODE and name.endswith((".py", ".cpp", ".cu", ".h", ".yml", "run")):
            text = (ROOT / name).read_text("utf-8")
            quoted = set(re.findall(r'"(KDTREE_[A-Z_]+)"', text))
            read |= quoted | (set(VARIABLE.findall(text)) if top in (".ci", ".github") else set())
            asked |= quoted if top not in ("tests", ".ci", ".github") else set()
    assert told - read == set(), "no code reads these"
    assert asked - told - INTERNAL == set(), "no page tells of these"


def test_every_file_that_a_page_names_is_there() -> None:
    known = {"/".join(parts[i:]) for name in files() for parts in [name.split(os.sep)] for i in range(len(parts))}
    wrong = []
    for page in PAGES:
        for name in re.findall(
            r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|md|yaml|json|cpp|h|cuh?|xml|html|lock))`", page.read_text()
        ):
            if name.removeprefix("../") not in known and name.rpartition("/")[2] not in MADE:
                wrong.append(f"{page.name}: {name}")
    assert wrong == []


def test_pages_fit_a_page() -> None:
    """Lines of up to 120 columns, tables too."""
    wide = [
        f"{page.name}:{i}"
        for page in PAGES
        for i, line in enumerate(page.read_text("utf-8").split("\n"), 1)
        if len(line) > 120
    ]
    assert wide == []


def test_the_readme_counts_the_cells() -> None:
    count = len(of_run(["cpu"]))
    assert f"{count} of {count} expected cells passed" in PAGES[0].read_text("utf-8")
