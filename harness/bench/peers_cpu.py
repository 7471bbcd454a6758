"""Peers on the CPU: torch (oneDNN or MKL) in f32, torch's int4pack, and ggml's Q4_0 and F32 through ggml-python."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from harness.bench.cases import Case
from harness.bench.ceilings import threads
from harness.bench.clock import Call
from harness.bench.peers import Peer, copies_of
from refs.quant import GROUP


def torch_calls(case: Case, copies: int) -> Sequence[Call] | None:
    """The same operation in f32, from torch's own operators."""
    import torch
    from torch.nn import functional

    c = case
    if c.op == "linear" and c.kind == "f32":

        def linear() -> Call:
            x, w = torch.rand(c.M, c.K), torch.rand(c.N, c.K)
            return lambda: functional.linear(x, w)

        return copies_of(linear, copies)
    if c.op == "mla_attention":

        def attention() -> Call:
            q, key = torch.rand(c.M * c.heads, c.rank + c.rope), torch.rand(c.T + c.M, c.rank + c.rope)
            value = key[:, : c.rank]
            return lambda: torch.softmax(q @ key.T * 0.07, -1) @ value

        return copies_of(attention, copies)
    if c.op == "select":

        def select() -> Call:
            logits = torch.rand(c.M, c.N)
            return lambda: logits.argmax(-1)

        return copies_of(select, copies)
    if c.op == "rms_norm":

        def norm() -> Call:
            x, w = torch.rand(c.M, c.K), torch.rand(c.K)
            return lambda: functional.rms_norm(x, (c.K,), w, 1e-5)

        return copies_of(norm, copies)
    if c.op == "tree_build":

        def best() -> Call:
            draft = torch.rand(c.depths, c.N)
            return lambda: (draft.logsumexp(-1), draft.topk(min(c.budget, c.N)))

        return copies_of(best, copies)
    return None


def int4pack(x: Any, q: Any, scale: Any) -> Call:
    """x [M, K] f32, q [N, K] i32 in 0..15, scale [N, K/32] f32: a call that gives x times (q - 8) * scale."""
    import torch

    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 2)
    zeros = torch.stack([scale.T, torch.zeros_like(scale.T)], -1).to(x.dtype).contiguous()
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, zeros)


def int4pack_calls(case: Case, copies: int) -> Sequence[Call] | None:
    """INT4 in groups of 32 with f32 activations."""
    import torch

    if case.op != "linear" or case.kind != "int4":
        return None

    def call() -> Call:
        q = torch.randint(0, 16, (case.N, case.K), dtype=torch.int32)
        return int4pack(torch.rand(case.M, case.K), q, torch.rand(case.N, case.K // GROUP))

    return copies_of(call, copies)


class GgmlPool:
    """ggml's own worker threads, as many as the engine has; they end with this object."""

    def __init__(self) -> None:
        ggml: Any = importlib.import_module("ggml")
        self._free = ggml.ggml_threadpool_free
        self.threads = threads()
        self.pool = ggml.ggml_threadpool_new(ctypes.byref(ggml.ggml_threadpool_params_default(self.threads)))

    def __del__(self) -> None:
        self._free(self.pool)


class GgmlMatmul:
    """One ggml graph y = W x on its CPU backend; W [N, K] as F32 or Q4_0, x [M, K] f32. Keeps all that it points to."""

    def __init__(self, pool: GgmlPool, x: Any, w: Any, q4: bool) -> None:
        import numpy as np

        ggml: Any = importlib.import_module("ggml")
        (m, k), n = x.shape, w.shape[0]
        self._ggml, self._pool, self.shape = ggml, pool, (m, n)
        kind = ggml.GGML_TYPE_Q4_0 if q4 else ggml.GGML_TYPE_F32
        size = 4 * (m * k + m * n) + w.size * (1 if q4 else 4) + (1 << 20)  # tensors, and the graph itself
        self._context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=False))
        weight = ggml.ggml_new_tensor_2d(self._context, kind, k, n)
        source = ggml.ggml_new_tensor_2d(self._context, ggml.GGML_TYPE_F32, k, m)
        self._out = ggml.ggml_mul_mat(self._context, weight, source)
        w, x = np.ascontiguousarray(w, np.float32), np.ascontiguousarray(x, np.float32)
        ctypes.memmove(ggml.ggml_get_data(source), x.ctypes.data, x.nbytes)
        if q4:
            numbers = ctypes.cast(w.ctypes.data, ctypes.POINTER(ctypes.c_float))
            ggml.ggml_quantize_chunk(kind, numbers, ggml.ggml_get_data(weight), 0, n, k, None)
        else:
            ctypes.memmove(ggml.ggml_get_data(weight), w.ctypes.data, w.nbytes)
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, self._out)
        self._plan = ggml.ggml_graph_plan(self._graph, pool.threads, pool.pool)
        self._work = (ctypes.c_uint8 * max(self._plan.work_size, 1))()
        self._plan.work_data = ctypes.cast(self._work, ctypes.POINTER(ctypes.c_uint8))

    def __call__(self) -> None:
        self._ggml.ggml_graph_compute(self._graph, ctypes.byref(self._plan))

    def result(self) -> Any:
        """[M, N] of the last call."""
        import numpy as np

        m, n = self.shape
        data = ctypes.cast(self._ggml.ggml_get_data(self._out), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, (m, n)).copy()

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._ggml.ggml_free(self._context)


def ggml_calls(case: Case, copies: int) -> Sequence[Call] | None:
    """Q4_0 (groups of 32, f16 scales, activations rounded to 8 bits) for INT4, F32 for f32."""
    import numpy as np

    if case.op != "linear":
        return None
    rng, pool = np.random.default_rng(1), GgmlPool()
    w, x = (rng.random(size, np.float32) - 0.5 for size in ((case.N, case.K), (case.M, case.K)))
    return [GgmlMatmul(pool, x, w, case.kind == "int4") for _ in range(copies)]


def peers() -> list[Peer]:
    """torch is always there: the engine itself is built against it."""
    import torch

    has_pack = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    has_ggml = importlib.util.find_spec("ggml") is not None
    return [
        Peer("torch", "the same in f32; tree_build: logsumexp and topk alone", "", torch_calls),
        Peer(
            "torch-int4pack",
            "INT4 g32, activations f32",
            "" if has_pack else f"torch {torch.__version__} has no _weight_int4pack_mm_for_cpu",
            int4pack_calls,
        ),
        Peer(
            "ggml",
            "Q4_0 for INT4, F32 for f32",
            "" if has_ggml else "not installed: pip install ggml-python",
            ggml_calls,
        ),
    ]
