"""``kdtree inspect``: what is in a KDTR file, and whether it is whole.

Exit status 0 for a valid file, 3 for one that is not: the message names the file, the field and the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness import plain_json
from harness.cells import INFRASTRUCTURE, PASSED
from harness.cli import Parser
from refs.kdtr import Kdtr, KdtrError, read

META = "meta.json"
SHOWN = 8  # elements of a tensor that are printed
WIDE = 80  # characters of an entry of meta.json that are printed


def _meta(file: Kdtr) -> dict[str, Any]:
    if META not in file.tensors:
        return {}
    try:
        content = json.loads(file.tensors[META].tobytes())
    except ValueError as error:
        raise KdtrError(file.file, META, f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise KdtrError(file.file, META, "is not a JSON object")
    return content


def _values(file: Kdtr, name: str) -> dict[str, Any]:
    """Summary of one tensor; bf16 is widened to its exact float32."""
    array = file.tensor(name)
    if file.entries[name].dtype == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    flat = array.reshape(-1)
    numbers = flat[np.isfinite(flat)].astype(np.float64) if flat.dtype.kind == "f" else flat
    return {
        "first": [str(value) for value in flat[:SHOWN]],
        "min": str(numbers.min()) if numbers.size else "none",
        "max": str(numbers.max()) if numbers.size else "none",
        "not_finite": int(flat.size - numbers.size),
        "zeros": int((flat == 0).sum()),
    }


def _print(file: Kdtr, verified: bool) -> None:
    print(f"{file.file}: KDTR 1, {file.file_size} bytes, {len(file.fields)} fields, {len(file.entries)} tensors")
    print("every checksum is right" if verified else "checksums of the data not read (--verify does)")
    for name, value in file.fields.items():
        print(f"  {name:<24} {value}")
    width = max((len(name) for name in file.entries), default=0)
    for entry in file.entries.values():
        print(
            f"  {entry.name:<{width}}  {entry.dtype:<4} {list(entry.shape)!s:<20} {entry.size:>12}  crc {entry.crc:08x}"
        )
    for name, value in _meta(file).items():
        text = json.dumps(value)
        print(f"  meta {name}: {text}" if len(text) <= WIDE else f"  meta {name}: {text[:WIDE]}... (--json has all)")


def main(argv: Sequence[str]) -> int:
    """See ``kdtree inspect --help``."""
    parser = Parser(
        prog="kdtree inspect",
        description="Show a KDTR file's fields and tensors (docs/kdtr.md).",
        epilog="examples:\n  kdtree inspect --verify bundles/*/tiny.kdtr\n\n"
        "exit status: 0 a valid file, 3 a file that is rejected or not there",
    )
    parser.add_argument("file", type=Path, metavar="FILE.kdtr", help="a bundle or an imported model")
    parser.add_argument("--verify", action="store_true", help="read all data and check every checksum and gap")
    parser.add_argument("--tensor", metavar="NAME", help="this tensor's first values and range alone")
    parser.add_json("one JSON object")
    options = parser.parse_args(argv)
    try:
        file = read(options.file, verify=options.verify)
        if options.tensor:
            entry = {**asdict(file.entries[options.tensor])} if options.tensor in file.entries else {}
            entry.update(_values(file, options.tensor))
            plain_json.give(entry, options.json)
            if options.json != plain_json.PRINTED:
                shown = {**entry, "first": " ".join(entry["first"]), "crc": f"{entry['crc']:08x}"}
                print("\n".join(f"{k:<10} {v}" for k, v in shown.items()))
            return PASSED
        if options.json:
            tensors = [asdict(entry) for entry in file.entries.values()]
            head = {"file": file.file, "file_size": file.file_size, "verified": options.verify}
            plain_json.give({**head, "fields": file.fields, "tensors": tensors, "meta": _meta(file)}, options.json)
        if options.json != plain_json.PRINTED:
            _print(file, options.verify)
    except KdtrError as error:
        print(f"kdtree inspect: {error}", file=sys.stderr)
        return INFRASTRUCTURE
    return PASSED
