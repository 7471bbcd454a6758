"""The text model's corpus: a Python distribution's own documentation, split by document (docs/text_model.md).

Guarantees: the same distribution gives the same bytes, whatever interpreter runs this and in whichever order a folder
is listed; nothing is imported or run, the sources are only parsed; no text of one split stands in another: a docstring
or topic that occurred already, in the order of the documents' names, is left out.

python -m training.corpus --lib DIR --out FILE.json
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

END = 256
"""Stands before, between and after documents; the model's end token."""
MASK = 257
"""What the drafter is given at positions that it is to fill in."""
VOCAB = 258

SPLITS = ("train", "valid", "heldout")
LEAST = 64
"""Bytes below which a document is left out."""
COMMENT_LINES = 3
"""Shorter comments speak of the code beside them."""
_TESTS = {"test", "tests", "idle_test"}
_GENERATED = {"site-packages", "pydoc_data", "__pycache__"}

Corpus = dict[str, list[tuple[str, str]]]
"""Documents as (name, text), sorted by name, by split."""


def tokens(text: str) -> list[int]:
    """The UTF-8 bytes of ``text``."""
    return list(text.encode())


def text_of(ids: list[int]) -> str:
    """The text that bytes spell; the two special tokens as names, broken UTF-8 as the replacement character."""
    special = {END: "<end>", MASK: "<mask>"}
    parts = b"".join(special[i].encode() if i in special else bytes([i]) for i in ids)
    return parts.decode("utf-8", "replace")


def split_of(name: str) -> str:
    """A document's split, by its name alone: one of 16 is held out, one of 32 is for choosing when to stop."""
    lot = hashlib.sha256(name.encode()).digest()[0]
    return "heldout" if lot < 16 else "valid" if lot < 24 else "train"


def build(lib: Path) -> Corpus:
    """The corpus of the standard library in ``lib`` (``.../lib/python3.X``). `ValueError` if it is none."""
    if not (lib / "pydoc_data" / "topics.py").is_file():
        raise ValueError(f"{lib}: pydoc_data/topics.py: not there; give the folder of a Python's standard library")
    found: Corpus = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for name, parts in sorted([*_topics(lib), *_modules(lib), *_licence(lib)]):
        fresh = [part for part in dict.fromkeys(parts) if part not in seen]
        seen.update(fresh)
        text = "\n\n".join(fresh)
        if len(text.encode()) >= LEAST:
            found[split_of(name)].append((name, text))
    return found


def _topics(lib: Path) -> Iterator[tuple[str, list[str]]]:
    """The language reference as pydoc keeps it: one dictionary of texts."""
    source = ast.parse((lib / "pydoc_data" / "topics.py").read_bytes())
    for node in source.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for topic, text in ast.literal_eval(node.value).items():
                yield f"topic {topic}", [str(text).strip()]


def _modules(lib: Path) -> Iterator[tuple[str, list[str]]]:
    """The docstrings of each module in the order in which they stand in it, then its longer comments."""
    for path in lib.rglob("*.py"):
        parts = path.relative_to(lib).with_suffix("").parts
        if _TESTS.intersection(parts) or _GENERATED.intersection(parts) or parts[-1].startswith("test_"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd escapes in old sources
                source = path.read_bytes().decode("utf-8")
                module = ast.parse(source)
        except (SyntaxError, ValueError):  # files that are wrong on purpose, or in another encoding
            continue
        found = [*_docstrings(module, ""), *_comments(source)]
        if found:
            yield f"module {'.'.join(parts)}", found


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    text = ast.get_docstring(node, clean=False)
    if text and text.strip():
        heading = f"{name}:\n" if name else ""
        yield heading + inspect.cleandoc(text).strip()
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}" if name else child.name)


def _comments(source: str) -> Iterator[str]:
    """Runs of lines that hold nothing but a comment, their marks taken off."""
    for is_comment, lines in itertools.groupby(source.splitlines(), lambda line: line.lstrip().startswith("# ")):
        block = [line.lstrip()[2:].rstrip() for line in lines]
        if is_comment and len(block) >= COMMENT_LINES:
            yield "\n".join(block)


def _licence(lib: Path) -> Iterator[tuple[str, list[str]]]:
    path = lib / "LICENSE.txt"
    if path.is_file():
        yield "licence", [path.read_text(encoding="utf-8").strip()]


def write(corpus: Corpus, path: Path) -> None:
    """As JSON with sorted keys."""
    path.write_text(json.dumps(corpus, sort_keys=True, ensure_ascii=True, indent=0) + "\n", encoding="ascii")


def read(path: Path) -> Corpus:
    """What `write` wrote."""
    raw = json.loads(path.read_text(encoding="ascii"))
    return {split: [(str(name), str(text)) for name, text in raw[split]] for split in SPLITS}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m training.corpus", description="the text model's corpus")
    parser.add_argument("--lib", type=Path, default=Path(ast.__file__).parent, help="default: this Python's")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    options = parser.parse_args()
    corpus = build(options.lib)
    write(corpus, options.out)
    for split, documents in corpus.items():
        size = sum(len(tokens(text)) for _, text in documents)
        print(f"{split}: {len(documents)} documents, {size} bytes")
    print(f"sha256 {hashlib.sha256(options.out.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
