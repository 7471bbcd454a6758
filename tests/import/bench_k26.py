"""Import speed and memory on a synthetic checkpoint with the names and sizes of Kimi K2.6: no test, a command.

    python tests/import/bench_k26.py [--layers 2] [--experts 32] [--vocab 163840] [--dir DIR]

Writes the checkpoint (about 6.8 GB by default) and its import (12.8 GB) into a directory that it removes afterwards.
Prints bytes per second of the import beside a plain read of the same files and a plain write of as many bytes as the
import writes, all from a cold cache and onto the disk, and the import's peak memory beside what docs/import.md allows.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hf_checkpoints as hf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16 << 20
SHARD_BYTES = 1 << 30
SIZES = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "first_k_dense_replace": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 262144,
    "eos_token_id": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": hf.PACKED,
}


def tensors(config: dict[str, object]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor of the checkpoint."""
    for name, shape in hf.shapes(config).items():
        full = f"language_model.{name}"
        if ".experts." in name:
            n, k = shape
            yield f"{full}_packed", "I32", (n, k // 8)
            yield f"{full}_scale", "BF16", (n, k // 32)
            yield f"{full}_shape", "I32", (2,)
        else:
            yield full, "F32" if name.endswith("bias") else "BF16", shape


def write_checkpoint(directory: Path, config: dict[str, object]) -> int:
    """Write shards of at most 1 GiB (or one tensor) and their index; the bytes in all."""
    noise = np.random.default_rng(0).integers(0, 1 << 16, BLOCK // 2, np.uint16)
    finite = (noise & 0x807F | 0x3C00).astype(np.uint16)  # bf16 of about 2^-7, either sign
    shards: list[list[tuple[str, str, tuple[int, ...], int]]] = [[]]
    room = SHARD_BYTES
    for name, dtype, shape in tensors(config):
        size = int(np.prod(shape)) * np.dtype(hf.NUMPY[dtype]).itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((name, dtype, shape, size))
        room -= size
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for name, dtype, shape, size in shard:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(directory / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name, dtype, _, size in shard:
                if name.endswith("_shape"):
                    inner = name.rsplit(".", 2)[1]
                    wide, narrow = config["hidden_size"], config["moe_intermediate_size"]
                    pair = (wide, narrow) if inner == "down_proj" else (narrow, wide)
                    out.write(np.array(pair, "<i4").tobytes())
                    continue
                source = (noise if dtype == "I32" else finite).view(np.uint8)
                if dtype == "F32":
                    source = np.zeros(BLOCK, np.uint8)
                for at in range(0, size, BLOCK):
                    out.write(source[: min(BLOCK, size - at)])
            out.flush()
            os.fsync(out.fileno())
        total += end
    (directory / "config.json").write_text(json.dumps(config))
    hf.write_index(directory, weight_map)
    return total


def forget(directory: Path) -> None:
    """Drop the directory's files from the page cache."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(directory: Path) -> float:
    """Seconds to read every file once, from a cold cache."""
    forget(directory)
    block = bytearray(BLOCK)
    start = time.perf_counter()
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - start


def write_plainly(path: Path, size: int) -> float:
    """Seconds to write ``size`` bytes, rounded up to blocks, past the page cache and have them on disk."""
    block = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT wants it
    block[:] = np.random.default_rng(1).integers(0, 255, BLOCK, np.uint8).tobytes()
    start = time.perf_counter()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    for _ in range(0, size, BLOCK):
        os.write(out, block)
    os.fsync(out)
    os.close(out)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=163840)
    parser.add_argument("--dir", type=Path, help="where to work (default: the system's temporary directory)")
    args = parser.parse_args()
    config = hf.config(**SIZES) | {
        "num_hidden_layers": args.layers,
        "n_routed_experts": args.experts,
        "vocab_size": args.vocab,
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as work:
        source, target = Path(work) / "hf", Path(work) / "out.kdtr"
        source.mkdir()
        size = write_checkpoint(source, config)
        print(f"checkpoint {size / 1e9:.2f} GB, {args.layers} layers, {args.experts} experts, vocabulary {args.vocab}")
        reads = [read_all(source)]
        forget(source)
        code = "import sys; from engine.importer import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, str(source), "-o", str(target), "--json"]
        start = time.perf_counter()
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if run.returncode:
            sys.exit(run.stderr)
        report = json.loads(run.stdout)
        target.unlink()
        reads.append(read_all(source))
        wrote = write_plainly(target, report["bytes"])
    out = report["bytes"]
    print(f"plain read, cold      {size / 1e6 / min(reads):8.0f} MB/s   (of two: {reads[0]:.1f} s, {reads[1]:.1f} s)")
    print(f"plain write, on disk  {out / 1e6 / wrote:8.0f} MB/s   ({out / 1e9:.2f} GB, {wrote:.1f} s)")
    print(f"import, source bytes  {size / 1e6 / seconds:8.0f} MB/s   ({seconds:.1f} s, everything on disk)")
    print(f"processor time        {used.ru_utime + used.ru_stime:8.1f} s      (of the import)")
    print(f"import / read         {min(reads) / seconds:8.2f}")
    print(f"import / write        {wrote / seconds:8.2f}")
    largest = 4 * args.vocab * 7168
    print(f"peak memory           {report['peak_rss_bytes'] / 2**20:8.0f} MiB   (allowed {1024 + largest / 2**20:.0f})")


if __name__ == "__main__":
    main()
