// The drafter's operations: rows gathered by an index, its block, its keys and values, and its attention without a mask.
//
// Attention: a block takes a row and a head and walks the keys in chunks of 128. Order, fixed by position alone: a score's lanes add
// strides of 32 elements, then a butterfly; a chunk's weights by a butterfly a warp, warps ascending; values by keys ascending; a
// running maximum between chunks. Bytes: 8*head_dim a key and head of keys, from L2 for all rows but the first; bound by latency for
// the contexts and blocks it is meant for.
#include <cmath>

#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = kThreads;  // a key a thread where weights are made

__global__ __launch_bounds__(kThreads) void gather_kernel(GatherArgs a) {
  wait_for_previous();
  const int m = blockIdx.y;
  if (m >= active_rows(a.n_rows, a.max_rows)) return;
  const int from = a.index != nullptr ? a.index[m] : m;
  KD_ASSERT(from >= 0, "gather_rows: an index below 0");
  const float* src = a.src + static_cast<size_t>(from) * a.dim;
  float* dst = a.dst + static_cast<size_t>(m) * a.ldd;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < a.dim; i += gridDim.x * kThreads) dst[i] = src[i];
}

__global__ __launch_bounds__(kThreads) void block_kernel(DraftBlockArgs a) {
  wait_for_previous();
  for (int i = threadIdx.x; i < a.block_size; i += kThreads) a.tokens[i] = i == 0 ? a.state->bonus : a.mask_id;
  if (threadIdx.x == 0) {
    a.state->draft_first = a.state->kv_len + 1;
    a.state->draft_rows = a.block_size - 1;
  }
}

// A warp norms and rotates one head, from x to out, which may be x: a lane owns both elements of its pairs.
__device__ __forceinline__ void norm_rotate(float* out, const float* x, const float* w, float eps, const float* cos_sin, int dim) {
  const int lane = threadIdx.x % kWarp, half = dim / 2;
  float ss = 0.f;
  for (int i = lane; i < dim; i += kWarp) ss = __fmaf_rn(x[i], x[i], ss);
  const float inverse = inverse_rms(warp_sum(ss), dim, eps);
  for (int i = lane; i < half; i += kWarp) {
    const float c = __ldg(cos_sin + 2 * i), s = __ldg(cos_sin + 2 * i + 1);
    const float a = __fmul_rn(__fmul_rn(x[i], inverse), __ldg(w + i));
    const float b = __fmul_rn(__fmul_rn(x[i + half], inverse), __ldg(w + i + half));
    out[i] = __fmaf_rn(a, c, -__fmul_rn(b, s));
    out[i + half] = __fmaf_rn(b, c, __fmul_rn(a, s));
  }
}

// Warps of a row: a head of q each (if there is a q), then a head of k each, then a head of v each.
__global__ __launch_bounds__(kThreads) void prepare_kernel(DraftPrepareArgs a) {
  wait_for_previous();
  const int m = blockIdx.y, w = a.dims.head_dim, kv = a.dims.kv_heads;
  if (m >= active_rows(a.n_rows, a.max_rows)) return;
  const int queries = a.q != nullptr ? a.dims.heads : 0;
  const int task = blockIdx.x * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (task >= queries + 2 * kv) return;
  const size_t slot = static_cast<size_t>(*a.first) + m;
  const float* angles = a.cos_sin + slot * w;
  if (task < queries) {
    float* q = a.q + (static_cast<size_t>(m) * a.dims.heads + task) * w;
    norm_rotate(q, q, a.q_norm_w, a.eps, angles, w);
    return;
  }
  const int head = (task - queries) % kv;
  const size_t from = (static_cast<size_t>(m) * kv + head) * w, to = (slot * kv + head) * w;
  if (task < queries + kv) {
    norm_rotate(a.cache.k + to, a.k + from, a.k_norm_w, a.eps, angles, w);
  } else {
    for (int i = threadIdx.x % kWarp; i < w; i += kWarp) a.cache.v[to + i] = a.v[from + i];
  }
}

__global__ __launch_bounds__(kThreads) void attention_kernel(DraftAttentionArgs a, float scale) {
  extern __shared__ float shared[];  // q, then o: [head_dim] each
  __shared__ float score[kChunk], warp_value[kWarps];
  wait_for_previous();
  const int head = blockIdx.x, m = blockIdx.y, w = a.dims.head_dim, n_rows = active_rows(a.n_rows, a.max_rows);
  if (m >= n_rows) return;
  const int keys = min(a.state->kv_len + n_rows, a.max_keys), lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const size_t stride = static_cast<size_t>(a.dims.kv_heads) * w;
  const size_t column = static_cast<size_t>(head / (a.dims.heads / a.dims.kv_heads)) * w;
  const size_t at = (static_cast<size_t>(m) * a.dims.heads + head) * w;
  float *q = shared, *o = shared + w;
  for (int i = threadIdx.x; i < w; i += kThreads) q[i] = a.q[at + i], o[i] = 0.f;
  float top = -INFINITY, sum = 0.f;
  __syncthreads();
  for (int t0 = 0; t0 < keys; t0 += kChunk) {
    const int n = min(kChunk, keys - t0);
    for (int t = warp; t < n; t += kWarps) {
      const float* k = a.cache.k + (t0 + t) * stride + column;
      float dot = 0.f;
      for (int i = lane; i < w; i += kWarp) dot = __fmaf_rn(q[i], k[i], dot);
      dot = warp_sum(dot);
      if (lane == 0) score[t] = __fmul_rn(scale, dot);
    }
    __syncthreads();
    const int t = threadIdx.x;
    const float mine = t < n ? score[t] : -INFINITY, best = warp_max(mine);
    if (lane == 0) warp_value[warp] = best;
    __syncthreads();
    float next = top;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) next = fmaxf(next, warp_value[i]);
    __syncthreads();
    const float weight = t < n ? expf(__fsub_rn(mine, next)) : 0.f, part = warp_sum(weight);
    if (lane == 0) warp_value[warp] = part;
    score[t] = weight;
    __syncthreads();
    const float decay = t0 == 0 ? 0.f : expf(__fsub_rn(top, next));
    float total = warp_value[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) total = __fadd_rn(total, warp_value[i]);
    sum = __fmaf_rn(sum, decay, total);
    top = next;
    for (int i = threadIdx.x; i < w; i += kThreads) {
      const float* v = a.cache.v + static_cast<size_t>(t0) * stride + column + i;
      float acc = __fmul_rn(o[i], decay);
      for (int j = 0; j < n; ++j) acc = __fmaf_rn(score[j], v[j * stride], acc);
      o[i] = acc;
    }
    __syncthreads();  // the next chunk's scores go where these are read
  }
  for (int i = threadIdx.x; i < w; i += kThreads) a.o[at + i] = __fdiv_rn(o[i], sum);
}

}  // namespace

void CudaBackend::gather_rows(const GatherArgs& a) {
  if (a.max_rows <= 0) return;
  launch("gather_rows", gather_kernel, dim3((a.dim + kThreads - 1) / kThreads, a.max_rows), kThreads, 0, a);
}

void CudaBackend::draft_block(const DraftBlockArgs& a) { launch("draft_block", block_kernel, dim3(1), kThreads, 0, a); }

void CudaBackend::draft_prepare(const DraftPrepareArgs& a) {
  if (a.max_rows <= 0) return;
  const int tasks = (a.q != nullptr ? a.dims.heads : 0) + 2 * a.dims.kv_heads;
  launch("draft_prepare", prepare_kernel, dim3((tasks + kWarps - 1) / kWarps, a.max_rows), kThreads, 0, a);
}

void CudaBackend::draft_attention(const DraftAttentionArgs& a) {
  if (a.max_rows <= 0) return;
  const size_t shared = 2 * sizeof(float) * static_cast<size_t>(a.dims.head_dim);
  reserve_shared(reinterpret_cast<const void*>(attention_kernel), "draft_attention", shared);
  const float scale = 1.0f / std::sqrt(static_cast<float>(a.dims.head_dim));
  launch("draft_attention", attention_kernel, dim3(a.dims.heads, a.max_rows), kThreads, shared, a, scale);
}

}  // namespace kdtree
