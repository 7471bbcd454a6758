"""The corpus builder on a hand-written library: what is taken, what is left out, and the same bytes each time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from training import corpus

LONG = "This sentence is there so that the document is longer than the least that is taken."
FILES = {
    "pydoc_data/topics.py": f'topics = {{"zeta": "{LONG} zeta", "tiny": "short", "alpha": "\\n{LONG} alpha\\n"}}\n',
    "LICENSE.txt": f"A licence. {LONG}\n",
    "one.py": f'''"""Module one. {LONG}"""
# a comment
# of only two lines
class A:
    """Class A.

        indented
    """
    def f(self):
        """{LONG}"""
        # first line
        # second line
        #   third, indented
        async def inner():
            "inner text"
    def without(self): pass
''',
    "pkg/two.py": f'"""Module two. {LONG}"""\ndef g():\n    """Module two. {LONG}"""\n',
    "pkg/three.py": f'"""Module two. {LONG}"""\n',
    "broken.py": f'"""{LONG}"""\ndef (:\n',
    "latin.py": f'# coding: latin-1\n"""{LONG} \xe9"""\n',
    "test/four.py": f'"""Left out: a test. {LONG}"""\n',
    "test_five.py": f'"""Left out: a test. {LONG}"""\n',
    "site-packages/six.py": f'"""Left out: not of the distribution. {LONG}"""\n',
}


def library(folder: Path, names: list[str]) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FILES[name].encode("latin-1"))
    return folder


def documents(found: corpus.Corpus) -> dict[str, str]:
    return dict(document for split in corpus.SPLITS for document in found[split])


def test_what_is_taken_and_what_is_left_out(tmp_path: Path) -> None:
    assert documents(corpus.build(library(tmp_path, list(FILES)))) == {
        "licence": f"A licence. {LONG}",
        # pkg.three holds only what pkg.two would hold too: the first in the order of names has it
        "module pkg.three": f"Module two. {LONG}",
        "module one": f"Module one. {LONG}\n\nA:\nClass A.\n\nindented\n\nA.f:\n{LONG}\n\nA.f.inner:\ninner text\n\n"
        "first line\nsecond line\n  third, indented",
        "module pkg.two": f"g:\nModule two. {LONG}",
        "topic alpha": f"{LONG} alpha",
        "topic zeta": f"{LONG} zeta",
    }


def test_the_order_of_files_does_not_matter(tmp_path: Path) -> None:
    hashes = set()
    for name, order in (("a", list(FILES)), ("b", list(FILES)[::-1])):
        out = tmp_path / f"{name}.json"
        corpus.write(corpus.build(library(tmp_path / name, order)), out)
        hashes.add(hashlib.sha256(out.read_bytes()).hexdigest())
        assert corpus.read(out) == corpus.build(tmp_path / name)
    assert len(hashes) == 1


def test_a_document_is_in_the_split_that_its_name_gives(tmp_path: Path) -> None:
    names = [f"module m{i}" for i in range(4000)]
    counts = {split: sum(corpus.split_of(name) == split for name in names) for split in corpus.SPLITS}
    assert 190 < counts["heldout"] < 310  # one of 16
    assert 80 < counts["valid"] < 170  # one of 32
    found = corpus.build(library(tmp_path, list(FILES)))
    for split in corpus.SPLITS:
        assert all(corpus.split_of(name) == split for name, _ in found[split])
        assert found[split] == sorted(found[split])


def test_no_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="topics"):
        corpus.build(tmp_path)


def test_tokens_and_text() -> None:
    ids = [corpus.END, *corpus.tokens("\u00e9!"), corpus.MASK, 0xFF]
    assert ids == [256, 0xC3, 0xA9, 0x21, 257, 255]
    assert corpus.text_of(ids) == "<end>\u00e9!<mask>\ufffd"


def test_the_shipped_text_is_held_out() -> None:
    """By the rule of today's code, from names that are stored beside the texts."""
    shipped = json.loads((Path(corpus.__file__).parents[1] / "refs" / "text" / "heldout.json").read_text("ascii"))
    assert len(shipped) == 30
    assert all(corpus.split_of(name) == "heldout" for name, _ in shipped)
