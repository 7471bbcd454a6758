"""Changes one operator, number, condition or statement of a module at a time, and says which changes no test notices.

    python -m tests.operators harness/widths.py tests/harness/test_widths.py
    python -m tests.operators harness/matrix.py --lines 70-140 tests/harness/test_matrix_axes.py

What passes is equal code, text for a reader, or a hole in the tests: that is for a reader to say. The tests are
collected once and run once unchanged with a note of the lines that each reaches. A change is then put into the live
functions of a fork of this process, where the tests that reach its line run, the quickest first, until one fails; of a
change outside of functions, all of them. Not seen are: what other processes make of a module, and what session
fixtures made before the change. Not tried are strings, messages of errors, annotations and class bodies.

Exit status 0 when every change was noticed, 1 when one was not, 3 when the tests fail unchanged.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import os
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests import processes

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60.0  # of one change; one that takes longer counts as noticed
OTHERS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
NAMES = {"min": "max", "any": "all", "minimum": "maximum", "argmin": "argmax", "startswith": "endswith"}
NAMES |= {other: name for name, other in NAMES.items()}
FOR_READERS = ("help", "detail", "what", "metavar", "epilog", "description")
"""Arguments whose values are text."""


@dataclass(frozen=True)
class Change:
    """One node in another's place."""

    line: int
    what: str
    holder: Any
    """A node, or the list in it."""
    key: Any
    new: Any

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The tree is changed as long as the block runs."""
        get, put = (list.__getitem__, list.__setitem__) if isinstance(self.holder, list) else (getattr, setattr)
        old = get(self.holder, self.key)
        put(self.holder, self.key, self.new)
        try:
            yield
        finally:
            put(self.holder, self.key, old)


def changes(tree: ast.AST) -> list[Change]:
    """Every change of a module, by line."""
    return sorted(_changes(tree), key=lambda change: change.line)


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise)):
        return
    if not isinstance(node, ast.Module):
        yield from _of_node(node)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "op", "ops"):
            continue
        children = value if isinstance(value, list) else [value]
        for at, child in enumerate(children):
            if isinstance(child, ast.keyword) and child.arg in FOR_READERS:
                continue
            if isinstance(child, ast.stmt) and _stands_alone(child):
                yield Change(child.lineno, f"without {_text(child)}", value, at, ast.Pass())
            if isinstance(child, ast.AST):
                yield from _changes(child)


def _stands_alone(node: ast.stmt) -> bool:
    """Whether a statement can be left out."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets)
    plain = isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    return plain or isinstance(node, (ast.AugAssign, ast.Continue, ast.Break, ast.Raise))


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())[:80]


def _of_node(node: Any) -> Iterator[Change]:
    def change(what: str, key: Any, new: Any, holder: Any = node) -> Change:
        return Change(getattr(node, "lineno", 0), what, holder, key, new)

    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            for other in OTHERS[type(op)]:
                yield change(f"{type(op).__name__} -> {other.__name__}: {_text(node)}", at, other(), node.ops)
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
        for other in OTHERS.get(type(node.op), ()):
            yield change(f"{type(node.op).__name__} -> {other.__name__}: {_text(node)}", "op", other())
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        for number in _other_numbers(node.value):
            yield change(f"{node.value} -> {number}", "value", number)
    elif isinstance(node, (ast.If, ast.IfExp)):
        for truth in (False, True):
            yield change(f"if {truth}: {_text(node.test)}", "test", ast.Constant(truth))
    elif isinstance(node, ast.comprehension):
        for at, test in enumerate(node.ifs):
            yield Change(test.lineno, f"without if {_text(test)}", node.ifs, at, ast.Constant(True))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield change(f"without -: {_text(node)}", "op", ast.UAdd())
    elif isinstance(node, (ast.Name, ast.Attribute)):
        key = "id" if isinstance(node, ast.Name) else "attr"
        if getattr(node, key) in NAMES:
            yield change(f"{getattr(node, key)} -> {NAMES[getattr(node, key)]}", key, NAMES[getattr(node, key)])


def _other_numbers(value: float) -> tuple[float, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1) if value > 1 else (value + 1,)
    return (value * 1.5, value / 2) if value else (0.25,)


class Module:
    """A module under test, whose live functions can be given the code of a changed source."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text("utf-8"))
        self._first = self._codes()

    def _codes(self) -> dict[tuple[str, int], list[types.CodeType]]:
        found: dict[tuple[str, int], list[types.CodeType]] = {}
        todo = [compile(ast.fix_missing_locations(self.tree), str(self.path), "exec", dont_inherit=True)]
        while todo:
            code = todo.pop()
            found.setdefault((code.co_qualname, code.co_firstlineno), []).append(code)
            todo += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        return found

    def statement(self, line: int) -> ast.stmt:
        """The statement at the module's own level that a line lies in."""
        return next(node for node in self.tree.body if node.lineno <= line <= (node.end_lineno or 0))

    def in_function(self, line: int) -> bool:
        """Whether code of a function is meant, and not a default of its arguments."""
        outer = self.statement(line)
        return isinstance(outer, ast.ClassDef) or (isinstance(outer, ast.FunctionDef) and line >= outer.body[0].lineno)

    def install(self, line: int) -> bool:
        """Give this process what the changed tree says; False where that cannot be done."""
        if not self.in_function(line):
            return self._run_again()
        changed, codes = False, self._codes()
        for function in self._live():
            place = (function.__code__.co_qualname, function.__code__.co_firstlineno)
            alike = self._first.get(place, [])
            if function.__code__ in alike and codes[place][alike.index(function.__code__)] != function.__code__:
                function.__code__ = codes[place][alike.index(function.__code__)]
                changed = True
        return changed

    def _live(self) -> list[types.FunctionType]:
        found = [thing for thing in gc.get_objects() if type(thing) is types.FunctionType]  # no proxy is asked
        return [function for function in found if function.__code__.co_filename == str(self.path)]

    def _run_again(self) -> bool:
        """The module's values, wherever they were imported to, and its functions' defaults are those of a new run."""
        modules = [module for module in [*sys.modules.values()] if isinstance(module, types.ModuleType)]
        (module,) = (module for module in modules if getattr(module, "__file__", None) == str(self.path))
        functions, anew = self._live(), dict(module.__dict__)
        exec(compile(ast.fix_missing_locations(self.tree), str(self.path), "exec", dont_inherit=True), anew)
        for name, old in dict(module.__dict__).items():
            if not isinstance(old, (types.FunctionType, type, types.ModuleType)):
                for other in modules:
                    if other.__dict__.get(name) is old:
                        other.__dict__[name] = anew[name]
        for function in functions:
            twin = anew.get(function.__name__)
            if isinstance(twin, types.FunctionType) and twin.__qualname__ == function.__qualname__:
                function.__defaults__, function.__kwdefaults__ = twin.__defaults__, twin.__kwdefaults__
        return True


class Loop:
    """The pytest plugin: in place of the tests' own run, one of each change."""

    def __init__(self, module: Module, chosen: Sequence[Change]) -> None:
        self.module, self.chosen = module, chosen
        self.status = 3

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # what tests/conftest.py froze is found by no search
        items, reach = session.items, dict[pytest.Item, set[int]]()
        cost = dict[pytest.Item, float]()
        for item, after in zip(items, [*items[1:], None], strict=True):
            start = time.process_time()
            reach[item] = self._lines(item, after or self._nothing(session))
            cost[item] = time.process_time() - start
        ordered = sorted(items, key=lambda item: cost[item])
        if self._outcome(None, ordered, session):
            print("the tests fail unchanged", file=sys.__stderr__)
            return True
        passed = 0
        for change in self.chosen:
            lines = self._of_statement(change.line)
            tests = [item for item in ordered if not self.module.in_function(change.line) or reach[item] & lines]
            noticed = self._outcome(change, tests, session) if tests else False
            if noticed is not True:
                passed += noticed is False
                word = "not tried" if noticed is None else "passes" if tests else "not reached"
                print(f"{self.module.path.name}:{change.line}: {word}: {change.what}", file=sys.__stderr__, flush=True)
        print(f"{len(self.chosen)} changes, {passed} pass unnoticed", file=sys.__stderr__)
        self.status = int(passed > 0)
        return True

    @staticmethod
    def _nothing(session: pytest.Session) -> Any:
        """The item after the last: all that is torn down is what no other test has."""
        return types.SimpleNamespace(listchain=lambda: [session])

    def _lines(self, item: pytest.Item, after: Any) -> set[int]:
        """The lines of the module that a test reaches."""
        hit: set[int] = set()

        def called(frame: types.FrameType, event: str, value: object) -> Any:
            if frame.f_code.co_filename != str(self.module.path):
                return None
            hit.add(frame.f_lineno)
            return called

        threading.settrace(called)
        sys.settrace(called)
        try:
            runtestprotocol(item, log=False, nextitem=after)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        return hit

    def _of_statement(self, line: int) -> set[int]:
        """The lines of the innermost statement that a line is of, without its block: where a trace may show it."""
        found = {line}
        for node in ast.walk(self.module.tree):
            if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                block = getattr(node, "body", None)
                end = max(node.lineno, block[0].lineno - 1) if block else node.end_lineno or node.lineno
                if node.lineno <= line <= end:
                    found |= set(range(node.lineno, end + 1))
        return found

    def _outcome(self, change: Change | None, tests: Sequence[pytest.Item], session: pytest.Session) -> bool | None:
        """Whether one of the tests fails in a fork of this process; None where the change cannot be made."""
        with change.made() if change else contextlib.nullcontext():
            pid = os.fork()
            if pid == 0:
                os.setsid()
                status = 1
                with contextlib.suppress(BaseException):
                    if change and not self.module.install(change.line):
                        os._exit(2)
                    after = [*tests[1:], self._nothing(session)]
                    runs = (runtestprotocol(item, log=False, nextitem=n) for item, n in zip(tests, after, strict=True))
                    status = int(any(report.failed for reports in runs for report in reports))
                os._exit(status)
        end = time.monotonic() + (SECONDS if change else 20 * SECONDS)
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return {0: False, 2: None}.get(os.waitstatus_to_exitcode(status), True)
            time.sleep(0.005)
        processes.tell(pid, group=True)
        os.waitpid(pid, 0)
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """See this file's first lines."""
    parser = argparse.ArgumentParser(prog="python -m tests.operators", description="Which changes no test notices.")
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+", help="what pytest takes: files and node ids")
    parser.add_argument("--lines", metavar="A-B", default="1-1000000", help="of the module")
    options = parser.parse_args(argv)
    first, last = map(int, options.lines.split("-"))
    module = Module(options.module.resolve())
    loop = Loop(module, [change for change in changes(module.tree) if first <= change.line <= last])
    pytest.main([*options.tests, "-q", "-p", "no:cacheprovider", "--no-header"], plugins=[loop])
    return loop.status


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # fixtures of the session are the forks' too: none is torn down
