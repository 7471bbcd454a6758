"""How the workers of one run share the GPUs: how many may run, which GPU each sees, and who else has to wait.

A worker keeps a CUDA context and open sessions between its cells, so memory caps the number of workers and not
the number of cells at a time. What a session takes is reckoned from its config before anything is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager

from harness.gpu import CONTEXT_BYTES, Gpu, Lease, worker_cap

SCRATCH_BYTES = 128 << 20  # activations, attention's partial sums, graphs: a few rows wide, whatever the model
SESSIONS = 2  # that a worker keeps open
SHARE = "KDTREE_RANKS_SHARE_GPU"
"""Set to 1: several ranks may have one GPU, to show that they are right where there are fewer GPUs than ranks."""


class GpuTooSmall(Exception):
    """Not even one worker fits; the message has the figures."""


def session_bytes(config: str) -> int:
    """Upper bound on the device memory of one session of a config: its weights in the widest precision, cache, logits,
    scratch."""
    from refs import recipe  # numpy: for runs on a GPU alone

    found = recipe.load(config)
    model, run = found.model, found.run
    width = {"f32": 4, "bf16": 2, "u8": 1}
    weights = max(
        sum(math.prod(shape) * width[kind] for shape, kind in model.stored(precision).values())
        for precision in found.precisions
    )
    rows = max(65, run.budget + 1)
    cache = (model.max_context + rows) * model.num_layers * (model.kv_lora_rank + model.qk_rope_head_dim)
    logits = (rows + 2 * run.max_tokens + 2) * model.vocab_size  # a step's, the recorded ones, the draft table's
    return weights + 4 * (cache + logits) + SCRATCH_BYTES


def workers_that_fit(gpus: Sequence[Gpu], configs: Iterable[str], wanted: int) -> int:
    """How many of ``wanted`` workers may start, spread evenly over ``gpus``. Raises GpuTooSmall when none fits."""
    need = SESSIONS * max(session_bytes(config) for config in configs)
    fitting = sum(worker_cap(gpu.free_bytes, need, wanted) for gpu in gpus)
    least = min(worker_cap(gpu.free_bytes, need, wanted) for gpu in gpus)
    if not least:
        free = ", ".join(f"{gpu.name}: {gpu.free_bytes >> 20} MiB free" for gpu in gpus)
        raise GpuTooSmall(
            f"a worker needs {(need + CONTEXT_BYTES) >> 20} MiB of GPU memory ({free}); end what holds it, or choose "
            "another GPU with CUDA_VISIBLE_DEVICES"
        )
    return min(wanted, fitting, least * len(gpus))


def give(worker: int, gpus: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Let worker number ``worker`` see one GPU alone, by UUID, and its ranks all; before CUDA is loaded."""
    environment["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    environment["KDTREE_RANKS_GPUS"] = ",".join(gpus)


def ranks_share(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `SHARE` lets ranks share GPUs."""
    return environment.get(SHARE) == "1"


@contextmanager
def leased(gpus: Sequence[Gpu], run: str) -> Iterator[None]:
    """Hold every GPU for this run, in one order for all runs. Raises GpuBusy when the wait is over."""
    with ExitStack() as held:
        for gpu in sorted(gpus, key=lambda g: g.uuid):
            held.enter_context(Lease(gpu, run=run))
        yield
