"""Import speed and memory on a synthetic checkpoint with the names and sizes of Kimi K2.6: no test, a command.

    python tests/import/bench_k26.py [--layers 2] [--experts 32] [--vocab 163840] [--matrices f32 bf16] [--dir DIR]

Writes the checkpoint (about 6.8 GB by default) and its import (12.8 GB) into a directory that it removes afterwards.
Prints the source's bytes per second: of a read alone, of the same read while as many bytes are written as the import
writes (what the disk leaves to a copy), and of the import, all past the page cache and onto the disk; and the import's
peak memory beside what docs/import.md allows.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hf_checkpoints as hf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 16 << 20
THREADS = 3  # that read, and that write, where the disk alone is measured
NOISE = np.random.default_rng(1).bytes(BLOCK)
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


def _in_threads(path: Path, flags: int, size: int, work: Callable[[int, mmap.mmap, int], object]) -> None:
    """Let threads do ``work(file, block, offset)`` for every block of a file opened past the page cache."""
    file = os.open(path, flags | os.O_DIRECT, 0o644)

    def part(first: int) -> None:
        block = mmap.mmap(-1, BLOCK)  # page-aligned, as O_DIRECT wants it
        block[:] = NOISE
        for at in range(first * BLOCK, size, THREADS * BLOCK):
            work(file, block, at)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(part, range(THREADS)))
    if flags & os.O_WRONLY:
        os.fsync(file)
    os.close(file)


def read_all(directory: Path) -> None:
    """Every shard once, nothing else done with it."""
    for path in sorted(directory.glob("*.safetensors")):
        _in_threads(path, os.O_RDONLY, path.stat().st_size, lambda file, block, at: os.preadv(file, [block], at))


def write_all(path: Path, size: int) -> None:
    """``size`` bytes, rounded up to blocks, on the disk."""
    _in_threads(path, os.O_WRONLY | os.O_CREAT, size, os.pwrite)
    path.unlink()


def seconds(*work: Callable[[], None]) -> float:
    """All of ``work`` side by side."""
    start = time.perf_counter()
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(job) for job in work]:
            done.result()
    return time.perf_counter() - start


def measure(source: Path, size: int, target: Path, matrices: str, largest: int) -> None:
    """One import between two readings of the disk."""
    code = "import sys; from engine.importer import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(source), "-o", str(target), "--matrices", matrices, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reads = [seconds(lambda: read_all(source))]
    forget(source)
    start = time.perf_counter()
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    took = time.perf_counter() - start
    if run.returncode:
        sys.exit(run.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(run.stdout)
    out = report["bytes"]
    target.unlink()
    reads.append(seconds(lambda: read_all(source)))
    copied = seconds(lambda: read_all(source), lambda: write_all(target, out))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"matrices {matrices}: {size / 1e9:.2f} GB read, {out / 1e9:.2f} GB written")
    rate = size / 1e6
    print(f"  disk, read             {rate / min(reads):6.0f} MB/s   (of two: {reads[0]:.1f} s, {reads[1]:.1f} s)")
    print(f"  disk, both at once     {rate / copied:6.0f} MB/s   (while {out / 1e6 / copied:.0f} MB/s are written)")
    print(f"  import                 {rate / took:6.0f} MB/s   ({took:.1f} s, on disk; {cpu:.1f} s of processors)")
    print(f"  import / read          {min(reads) / took:6.2f}")
    print(f"  import / both at once  {copied / took:6.2f}")
    peak = report["peak_rss_bytes"] / 2**20
    print(f"  peak memory            {peak:6.0f} MiB    (allowed {1024 + largest / 2**20:.0f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=163840)
    parser.add_argument("--matrices", nargs="*", choices=("f32", "bf16"), default=["f32", "bf16"])
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
        for matrices in args.matrices:
            measure(source, size, target, matrices, 4 * args.vocab * 7168)


if __name__ == "__main__":
    main()
