"""``kdtree import HF_DIR -o FILE.kdtr``: a Hugging Face checkpoint as one KDTR model file (docs/import.md).

Guarantees: the file appears complete or not at all; the same checkpoint and options give the same bytes; of the weights
about 100 MiB are in memory at a time; an interrupted import goes on where it stopped when the same command is given
again. What does not fit is refused before anything is written, except values that only reading shows.

Exit status: 0 done, 1 the checkpoint is refused, 2 incomplete (interrupted, disk full: run again to go on),
3 the command line or the target is wrong.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import itertools
import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from engine.hf_config import INNER_NORM_EPS, HfConfig, read_config
from engine.hf_drafter import DrafterPlan, plan_drafter
from engine.hf_slice import Selection
from engine.hf_tensors import Plan, Planner
from engine.kdtr_stream import KdtrStream, TargetBusy
from engine.safetensors_reader import Checkpoint, CheckpointError, fingerprint, open_checkpoint
from engine.transfer import Progress, write_model
from harness.cli import Parser
from harness.files import said
from harness.plain_json import PRINTED, give, text
from refs import kdtr
from refs.drafter_config import TAPS
from refs.errors import RefError

DONE, REFUSED, INCOMPLETE, USAGE = 0, 1, 2, 3
NO_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.ENAMETOOLONG)
"""What the same command would meet again."""


def id_list(text: str) -> tuple[int, ...]:
    """``0-3,7`` -> (0, 1, 2, 3, 7); ascending, each once."""
    ids: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if not match:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor a range like 0-3")
        ids += range(int(match[1]), int(match[2] or match[1]) + 1)
    if not ids or any(a >= b for a, b in itertools.pairwise(ids)):
        raise argparse.ArgumentTypeError(f"{text!r} is empty or does not ascend")
    return tuple(ids)


def _eps(text: str) -> float | None:
    try:
        return None if text == "config" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor config") from None


def parser() -> Parser:
    """The command line."""
    p = Parser(
        prog="kdtree import",
        description="A Hugging Face checkpoint as one KDTR model file (docs/import.md).",
        epilog="examples:\n  kdtree import Kimi-K2.6 -o k26.kdtr --matrices bf16\n"
        "  kdtree import Kimi-K2.6 -o slice.kdtr --layers 0-3 --experts 0-31\n"
        "  kdtree import refs/text --drafter refs/text/drafter -o text.kdtr --quantize both\n\n"
        f"exit status: {DONE} done, {REFUSED} the checkpoint is refused, {INCOMPLETE} incomplete (interrupted, disk "
        f"full: the same command goes on from there), {USAGE} the command line or the target is wrong",
    )
    p.add_argument("source", type=Path, metavar="HF_DIR", help="directory with config.json and safetensors")
    p.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.kdtr", help="what is written")
    p.add_argument("--drafter", type=Path, metavar="DIR", help="a DFlash drafter's directory, put into the same file")
    p.add_argument("--layers", type=id_list, metavar="0-3", help="keep these layers only")
    p.add_argument("--experts", type=id_list, metavar="0-31", help="keep these routed experts only")
    p.add_argument(
        "--matrices",
        choices=("f32", "bf16"),
        default="f32",
        help="f32, for the precisions fp32 and int4 (default); bf16 as they are, for bf16 and int4-bf16",
    )
    p.add_argument("--quantize", choices=("int4", "both"), help="quantise float experts: in place of f32, or beside it")
    p.add_argument(
        "--inner-norm-eps",
        type=_eps,
        default=INNER_NORM_EPS,
        metavar="EPS|config",
        help="eps of the q_a and kv_a norms: 1e-6 as transformers builds them (default), or the config's rms_norm_eps",
    )
    p.add_argument("--eos", type=int, metavar="ID", help="the token that ends a text; -1: none (default: the config's)")
    p.add_argument("--context", type=int, metavar="N", help="positions the model may use, at most the config's")
    p.add_argument("--ignore-field", action="append", default=[], metavar="NAME", help="a config field without effect")
    p.add_argument("--dry-run", action="store_true", help="check everything but the values, say what would be written")
    p.add_argument("--force", action="store_true", help="replace an existing file")
    p.add_json("the summary")
    return p


def _summary(hf: HfConfig, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    config = plan.config
    return {
        "model_type": hf.model_type,
        "layers": list(plan.layers),
        "experts": list(plan.experts),
        "precisions": list(plan.precisions),
        "inner_norm_eps": config.inner_norm_eps,
        "eos_id": config.eos_id,
        "max_context": config.max_context,
        "config_sha256": hashlib.sha256(hf.file.read_bytes()).hexdigest(),
        "config_fields_without_effect": {k: hf.unread[k] for k in sorted(hf.unread)},
        "tensors_left_out": dict(sorted(plan.left_out.items())),
        "ignored_fields": sorted(args.ignore_field),
    }


def run(args: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Import as ``args`` say; the exit status. Raises `CheckpointError` and `OSError`."""
    started = time.monotonic()
    checkpoint = open_checkpoint(args.source)
    files = len(set(checkpoint.shards.values()))
    print(f"{checkpoint.listing}: {len(checkpoint.shards)} tensors in {files} files", file=err, flush=True)
    try:
        hf = read_config(
            args.source,
            inner_norm_eps=args.inner_norm_eps,
            eos=args.eos,
            context=args.context,
            ignore=frozenset(args.ignore_field),
        )
        plan = Planner(checkpoint, hf, Selection(args.layers, args.experts), args.quantize, args.matrices).plan()
        fields, literals = plan.config.fields(), {}
        if args.drafter:
            drafter = plan_drafter(args.drafter, hf, plan.config, plan.layers, frozenset(args.ignore_field))
            hf, plan = replace(hf, unread=hf.unread | drafter.unread), _joined(plan, drafter)
            fields |= {"mask_id": drafter.mask_id, **drafter.config.fields()}
            literals[TAPS] = drafter.taps
        summary = _summary(hf, plan, args)
        literals["meta.json"] = json.dumps({"import": summary}, sort_keys=True).encode()
        tensors = plan.tensors | {"meta.json": ("u8", (len(literals["meta.json"]),))}
        sources = fingerprint(p.source.path for pieces in plan.pieces.values() for p in pieces)
        identity = json.dumps([sources, {n: hashlib.sha256(d).hexdigest() for n, d in literals.items()}]).encode()
        stream = KdtrStream(args.output, fields, tensors, identity)
        for note in _notes(hf, plan):
            print(note, file=err)
        if not args.dry_run:
            _write(checkpoint, plan, stream, literals, err)
    finally:
        checkpoint.close()
    result = summary | {
        "output": str(args.output),
        "written": not args.dry_run,
        "bytes": stream.file_size,
        "tensors": len(tensors),
        "seconds": round(time.monotonic() - started, 3),
        "peak_rss_bytes": _peak_rss(),
    }
    _report(args, result, out)
    return DONE


def _write(checkpoint: Checkpoint, plan: Plan, stream: KdtrStream, literals: dict[str, bytes], err: TextIO) -> None:
    with stream:
        if stream.done:
            print(f"going on: {len(stream.done)} of {len(stream.entries)} tensors are already written", file=err)
        progress = Progress(stream.file_size, err)
        try:
            write_model(checkpoint, plan, stream, literals, progress)
        finally:
            progress.close()


def _report(args: argparse.Namespace, result: Mapping[str, Any], out: TextIO) -> None:
    if args.json == PRINTED:
        out.write(text(result) + "\n")
        return
    give(result, args.json)
    verb = "would write" if args.dry_run else "wrote"
    size = f"{result['tensors']} tensors, {result['bytes'] / 1e9:.3f} GB, {result['seconds']:.1f} s"
    out.write(f"{verb} {args.output}: {size}\n")


def _joined(plan: Plan, drafter: DrafterPlan) -> Plan:
    """The model's plan with the drafter's tensors."""
    return replace(plan, tensors=plan.tensors | drafter.tensors, pieces=plan.pieces | drafter.pieces)


def _peak_rss() -> int:
    """The most bytes this process had resident; Linux's ``ru_maxrss`` counts the parent at the fork as well."""
    try:
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _notes(hf: HfConfig, plan: Plan) -> Iterator[str]:
    c = plan.config
    experts = (
        f"{c.n_routed_experts} experts, top {c.num_experts_per_tok}" if c.first_k_dense < c.num_layers else "dense"
    )
    yield f"{c.num_layers} layers ({c.first_k_dense} dense), {experts}, {' and '.join(plan.precisions)}"
    yield f"inner_norm_eps {c.inner_norm_eps:g} (rms_norm_eps {c.rms_norm_eps:g})"
    if hf.unread:
        yield f"config fields without effect: {', '.join(sorted(hf.unread))}"
    for reason, count in sorted(plan.left_out.items()):
        yield f"left out: {count} tensors, {reason}"
    yield from hf.notes


def main(argv: Sequence[str] | None = None) -> int:
    """The ``kdtree import`` command; the exit status."""
    args = parser().parse_args(argv)
    if not args.source.is_dir():
        print(f"kdtree import: {args.source}: no such directory", file=sys.stderr)
        return USAGE
    if args.drafter and not args.drafter.is_dir():
        print(f"kdtree import: {args.drafter}: no such directory", file=sys.stderr)
        return USAGE
    if not args.output.parent.is_dir():
        print(f"kdtree import: {args.output.parent}: no such directory", file=sys.stderr)
        return USAGE
    if args.output.is_dir():
        print(f"kdtree import: {args.output}: is a folder; name the file", file=sys.stderr)
        return USAGE
    if args.output.exists() and not (args.force or args.dry_run):
        print(f"kdtree import: {args.output}: exists; --force replaces it", file=sys.stderr)
        return USAGE
    try:
        return run(args, sys.stdout, sys.stderr)
    except (CheckpointError, RefError, kdtr.KdtrError) as error:
        print(f"kdtree import: {error}", file=sys.stderr)
        return REFUSED
    except (TargetBusy, PermissionError) as error:
        print(f"kdtree import: {said(error)}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("kdtree import: interrupted; the same command goes on from here", file=sys.stderr)
        return INCOMPLETE
    except OSError as error:
        if error.errno in NO_PLACE:
            print(f"kdtree import: {said(error)}; name another place with -o", file=sys.stderr)
            return USAGE
        print(f"kdtree import: {said(error)}; the same command goes on from here", file=sys.stderr)
        return INCOMPLETE
