// mla_attention: o_lat = softmax(scale * (q_lat.latent + q_rope.k_rope)) . latent, absorbed, over a row's own path through the tree.
//
// Keys in logical order: committed slots, then the row's ancestors by depth, then itself. Online softmax over chunks of 64 positions
// counted from 0, ascending; 512 positions make a segment, and segments are folded in ascending order by a second launch when
// the session is long enough to have more than one. Chunks and segments are fixed by position, so a row's bits depend neither on
// the other rows, nor on how many heads a block takes, nor on whether keys were computed in this step.
// A score: lane l adds r = 4l, 4l+1, .. of every 128 (latent, then rope), butterfly over lanes. A chunk's values: t ascending.
// Bytes: T*(R+P) cache floats a block, shared by its heads; flops 2*M*H*T*(2R+P). Bound by f32 arithmetic for many heads.
#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = 64;
constexpr int kSegment = 512;
constexpr int kKeysPerWarp = kChunk / kWarps;

struct AttentionParams {
  MlaDims dims;
  float scale;
  const float* q_lat;
  const float* q_rope;
  MlaCache cache;
  float* o_lat;
  float* part;       // [M, H, segments, rank], null when there is one segment
  float* part_norm;  // [M, H, segments, 2]: greatest score, sum
  const int32_t* depths;
  const int32_t* path;
  int path_stride;
  const StepState* state;
};

// Adds q.k over `dim` elements to a lane's share, VEC at a time; heads and keys are independent accumulators.
template <int HEADS, int KEYS, int VEC>
__device__ __forceinline__ void add_products(float (&acc)[HEADS][KEYS], const float* q, int q_stride, const float* keys, const int (&slot)[KEYS], int dim,
                                             int lane) {
  for (int r = lane * VEC; r < dim; r += kWarp * VEC) {
    float k[KEYS][VEC];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      const float* key = keys + static_cast<size_t>(slot[j]) * dim + r;
      if constexpr (VEC == 4) {
        const float4 v = *reinterpret_cast<const float4*>(key);
        k[j][0] = v.x, k[j][1] = v.y, k[j][2] = v.z, k[j][3] = v.w;
      } else {
        k[j][0] = *key;
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int e = 0; e < VEC; ++e) {
        const float qv = q[h * q_stride + r + e];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) acc[h][j] = __fmaf_rn(qv, k[j][e], acc[h][j]);
      }
    }
  }
}

// HEADS heads a block, COLUMNS latent columns a thread.
template <int HEADS, int COLUMNS, int VEC>
__global__ __launch_bounds__(kThreads, 1) void attention_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) float q[];  // [HEADS, rank + rope]
  __shared__ float score[HEADS][kChunk];
  __shared__ int slots[kChunk];
  __shared__ float rescale[HEADS], sums[HEADS], tops[HEADS];
  allow_next();
  wait_for_previous();
  const int m = blockIdx.z, h0 = blockIdx.y * HEADS, begin = blockIdx.x * kSegment;
  if (m > 0 && m >= p.state->n_rows) return;
  const int kv_len = p.state->kv_len, n_keys = kv_len + p.depths[m] + 1;
  if (begin >= n_keys) return;
  const int end = min(n_keys, begin + kSegment);
  const int rank = p.dims.rank, rope = p.dims.rope, heads = p.dims.heads, q_stride = rank + rope;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int i = threadIdx.x; i < HEADS * q_stride; i += kThreads) {
    const size_t row = static_cast<size_t>(m) * heads + min(h0 + i / q_stride, heads - 1);
    const int r = i % q_stride;
    q[i] = r < rank ? p.q_lat[row * rank + r] : p.q_rope[row * rope + r - rank];
  }
  float o[HEADS][COLUMNS] = {};
  float top = -INFINITY, sum = 0.f;  // of head `warp`, in the warps that have one

  for (int t0 = begin; t0 < end; t0 += kChunk) {
    const int n = min(kChunk, end - t0);
    if (threadIdx.x < kChunk) {
      // Places past the end repeat the last key: read, weighted with zero, always a row that was written.
      const int t = t0 + min(static_cast<int>(threadIdx.x), n - 1);
      const int slot = t < kv_len ? t : kv_len + p.path[static_cast<size_t>(m) * p.path_stride + t - kv_len];
      KD_ASSERT(slot >= 0 && slot < p.cache.slots, "mla_attention: a key outside the cache");
      slots[threadIdx.x] = slot;
    }
    __syncthreads();
    constexpr int kBatch = HEADS >= 4 ? 4 : kKeysPerWarp;
#pragma unroll
    for (int batch = 0; batch < kKeysPerWarp; batch += kBatch) {
      const int first = warp * kKeysPerWarp + batch;
      if (first >= n) break;
      int slot[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) slot[j] = slots[first + j];
      float acc[HEADS][kBatch] = {};
      add_products<HEADS, kBatch, VEC>(acc, q, q_stride, p.cache.latent, slot, rank, lane);
      add_products<HEADS, kBatch, VEC>(acc, q + rank, q_stride, p.cache.k_rope, slot, rope, lane);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const float dot = warp_sum(acc[h][j]);
          if (lane == j) score[h][first + j] = __fmul_rn(p.scale, dot);
        }
      }
    }
    __syncthreads();
    if (warp < HEADS) {
      float* s = score[warp];
      const float s0 = lane < n ? s[lane] : -INFINITY, s1 = lane + kWarp < n ? s[lane + kWarp] : -INFINITY;
      const float next = fmaxf(top, warp_max(fmaxf(s0, s1)));
      const float p0 = lane < n ? expf(__fsub_rn(s0, next)) : 0.f, p1 = lane + kWarp < n ? expf(__fsub_rn(s1, next)) : 0.f;
      const float factor = expf(__fsub_rn(top, next));
      sum = __fmaf_rn(sum, factor, warp_sum(__fadd_rn(p0, p1)));
      top = next;
      s[lane] = p0, s[lane + kWarp] = p1;
      if (lane == 0) rescale[warp] = factor;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) o[h][c] = __fmul_rn(o[h][c], rescale[h]);
    }
#pragma unroll 2
    for (int t = 0; t < n; t += 4) {
      float v[4][COLUMNS];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* key = p.cache.latent + static_cast<size_t>(slots[t + i]) * rank;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int r = threadIdx.x + c * kThreads;
          v[i][c] = r < rank ? key[r] : 0.f;
        }
      }
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = score[h][t + i];
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) o[h][c] = __fmaf_rn(weight, v[i][c], o[h][c]);
        }
      }
    }
    __syncthreads();  // score and slots are about to be written again
  }

  if (warp < HEADS && lane == 0) sums[warp] = sum, tops[warp] = top;
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h0 + h >= heads) break;
    const size_t row = static_cast<size_t>(m) * heads + h0 + h;
    const size_t cell = row * gridDim.x + blockIdx.x;
    if (p.part != nullptr && threadIdx.x == 0) p.part_norm[2 * cell] = tops[h], p.part_norm[2 * cell + 1] = sums[h];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int r = threadIdx.x + c * kThreads;
      if (r >= rank) break;
      if (p.part != nullptr) {
        p.part[cell * rank + r] = o[h][c];
      } else {
        p.o_lat[row * rank + r] = __fdiv_rn(o[h][c], sums[h]);
      }
    }
  }
}

// Folds a row's segments in ascending order. With one segment it divides just as attention_kernel does alone.
__global__ __launch_bounds__(kThreads) void combine_kernel(const __grid_constant__ AttentionParams p, int segments) {
  allow_next();
  wait_for_previous();
  const int m = blockIdx.y, rank = p.dims.rank;
  if (m > 0 && m >= p.state->n_rows) return;
  const int filled = (p.state->kv_len + p.depths[m] + 1 + kSegment - 1) / kSegment;
  const size_t row = static_cast<size_t>(m) * p.dims.heads + blockIdx.x;
  const float* part = p.part + row * segments * rank;
  const float* norm = p.part_norm + row * segments * 2;
  for (int r = threadIdx.x; r < rank; r += kThreads) {
    float top = norm[0], sum = norm[1], o = part[r];
    for (int s = 1; s < filled; ++s) {
      const float next = fmaxf(top, norm[2 * s]);
      const float old = expf(__fsub_rn(top, next)), fresh = expf(__fsub_rn(norm[2 * s], next));
      sum = __fmaf_rn(sum, old, __fmul_rn(norm[2 * s + 1], fresh));
      o = __fmaf_rn(o, old, __fmul_rn(part[static_cast<size_t>(s) * rank + r], fresh));
      top = next;
    }
    p.o_lat[row * rank + r] = __fdiv_rn(o, sum);
  }
}

using Kernel = void (*)(AttentionParams);

template <int HEADS>
Kernel by_columns(int columns) {
  return columns <= 1 ? attention_kernel<HEADS, 1, 4> : columns <= 2 ? attention_kernel<HEADS, 2, 4> : attention_kernel<HEADS, 4, 4>;
}

int segments_of(int max_keys) { return max_keys <= 0 ? 0 : (max_keys - 1) / kSegment + 1; }

}  // namespace

size_t CudaBackend::attention_scratch(const MlaDims& dims, int max_rows, int max_keys) const {
  const int segments = segments_of(max_keys);
  return segments <= 1 ? 0 : sizeof(float) * static_cast<size_t>(max_rows) * dims.heads * segments * (static_cast<size_t>(dims.rank) + 2);
}

void CudaBackend::mla_attention(const MlaAttentionArgs& a) {
  const int rows = a.rows.max_rows;
  if (rows <= 0) return;
  const int rank = a.dims.rank, columns = (rank + kThreads - 1) / kThreads;
  if (columns > 4) throw Error("ConfigError", name_ + ": kv_lora_rank " + std::to_string(rank) + " is above the 1024 that mla_attention is built for");
  const int segments = segments_of(a.max_keys);
  AttentionParams p{a.dims, a.scale, a.q_lat, a.q_rope, a.cache, a.o_lat, nullptr, nullptr, a.rows.depths, a.rows.path, a.rows.path_stride, a.state};
  if (segments > 1) {
    p.part = static_cast<float*>(a.scratch);
    p.part_norm = p.part + static_cast<size_t>(rows) * a.dims.heads * segments * rank;
  }
  // Few blocks: a head each, so that the GPU fills. Many: more heads a block, so that keys are read less often. Never other bits.
  const long blocks = static_cast<long>(rows) * a.dims.heads * segments;
  int heads = blocks <= 264 || a.dims.heads < 4 ? 1 : blocks <= 4 * 264 || a.dims.heads < 8 ? 4 : 8;
  const bool vector = rank % 4 == 0 && a.dims.rope % 4 == 0 && reinterpret_cast<uintptr_t>(a.cache.latent) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(a.cache.k_rope) % 16 == 0;
  if (!vector) heads = 1;
  const Kernel kernel = !vector     ? attention_kernel<1, 4, 1>
                        : heads == 1 ? by_columns<1>(columns)
                        : heads == 4 ? by_columns<4>(columns)
                                     : by_columns<8>(columns);
  const size_t shared = sizeof(float) * static_cast<size_t>(heads) * (rank + a.dims.rope);
  reserve_shared(reinterpret_cast<const void*>(kernel), "mla_attention", shared);
  launch("mla_attention", kernel, dim3(segments, (a.dims.heads + heads - 1) / heads, rows), kThreads, shared, p);
  if (segments > 1) launch("mla_attention_combine", combine_kernel, dim3(a.dims.heads, rows), kThreads, 0, p, segments);
}

}  // namespace kdtree
