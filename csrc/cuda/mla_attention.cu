// mla_attention: o_lat = softmax(scale * (q_lat.latent + q_rope.k_rope)) . latent, absorbed, over a row's own path through the tree.
//
// Keys in logical order: committed slots, then the row's ancestors by depth, then itself. A block takes one row, some of its heads
// and one segment of 512 positions; a second launch folds segments when the session is long enough to have more than one.
// Reduction order, all of it fixed by position (chunks of 64 and pieces of 16 positions, counted from 0):
//   a score: lane l adds r = 4l, 4l+1, .. of every 128 (latent, then rope), then a butterfly over lanes;
//   the segment's greatest score, then exp(score - greatest); their sum: a chunk by a butterfly, chunks ascending;
//   the values: a piece's keys ascending, then pieces ascending; segments: online softmax, ascending.
// So a row's bits depend neither on the other rows, nor on how many heads a block takes, nor on whether a key is of this step.
// T is what only products read: float, or uint16_t for bf16.
// Bytes: T*(R+P) cache elements a block, shared by its heads; flops 2*M*H*T*(2R+P). Bound by latency for short contexts, by f32
// arithmetic for many heads.
#include "backend.h"
#include "device.cuh"
#include "mla_plan.h"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = 64;
constexpr int kSegment = 512;
constexpr int kChunks = kSegment / kChunk;
static_assert(kChunks == kWarps, "a warp a chunk");
constexpr int kPiece = 16;

struct AttentionParams {
  MlaDims dims;
  float scale;
  const void* q_lat;
  const void* q_rope;
  MlaCache cache;
  void* o_lat;
  float* part;       // [M, H, segments, rank], null when there is one segment
  float* part_norm;  // [M, H, segments, 2]: greatest score, sum
  const int32_t* depths;
  const int32_t* path;
  int path_stride;
  const StepState* state;
};

template <int VEC>
__device__ __forceinline__ void load_key(float (&k)[VEC], const float* key) {
  if constexpr (VEC == 4) {
    const float4 v = *reinterpret_cast<const float4*>(key);
    k[0] = v.x, k[1] = v.y, k[2] = v.z, k[3] = v.w;
  } else {
    k[0] = *key;
  }
}

template <int VEC>
__device__ __forceinline__ void load_key(float (&k)[VEC], const uint16_t* key) {
  if constexpr (VEC == 4) {
    const uint2 v = *reinterpret_cast<const uint2*>(key);
    k[0] = __uint_as_float(v.x << 16), k[1] = __uint_as_float(v.x & 0xffff0000u);
    k[2] = __uint_as_float(v.y << 16), k[3] = __uint_as_float(v.y & 0xffff0000u);
  } else {
    k[0] = bf16_to_float(*key);
  }
}

// Adds q.k over `dim` elements to a lane's share, VEC at a time; heads and keys are independent accumulators.
template <int HEADS, int KEYS, int VEC, class T>
__device__ __forceinline__ void add_products(float (&acc)[HEADS][KEYS], const float* q, int q_stride, const T* keys,
                                             const int (&slot)[KEYS], int dim, int lane) {
  for (int r = lane * VEC; r < dim; r += kWarp * VEC) {
    float k[KEYS][VEC];
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
      load_key(k[j], keys + static_cast<size_t>(slot[j]) * dim + r);
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

// The keys' slots and every head's scores.
template <int HEADS, int VEC, class T>
__device__ __forceinline__ void score_keys(const AttentionParams& p, const float* q, const int* slots, float (*score)[kSegment],
                                           int n) {
  constexpr int kBatch = HEADS >= 4 ? 4 : 8;  // keys a warp has in flight
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = p.dims.rank, rope = p.dims.rope;
  for (int first = warp * kBatch; first < n; first += kWarps * kBatch) {
    int slot[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) slot[j] = slots[min(first + j, n - 1)];
    float acc[HEADS][kBatch] = {};
    add_products<HEADS, kBatch, VEC>(acc, q, rank + rope, static_cast<const T*>(p.cache.latent), slot, rank, lane);
    add_products<HEADS, kBatch, VEC>(acc, q + rank, rank + rope, static_cast<const T*>(p.cache.k_rope), slot, rope, lane);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float dot = warp_sum(acc[h][j]);
        if (lane == j && first + j < n) score[h][first + j] = __fmul_rn(p.scale, dot);
      }
    }
  }
}

// Turns scores into exp(score - greatest), as a product reads it; the sums are of the unrounded. A warp a chunk; tops and sums of the chunks are left in shared memory.
template <int HEADS, class T>
__device__ __forceinline__ void weigh_keys(float (*score)[kSegment], float (*tops)[kChunks], float (*sums)[kChunks], int n) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int t0 = warp * kChunk + lane, t1 = t0 + kWarp;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const float top = warp_max(fmaxf(t0 < n ? score[h][t0] : -INFINITY, t1 < n ? score[h][t1] : -INFINITY));
    if (lane == 0) tops[h][warp] = top;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    float top = tops[h][0];
#pragma unroll
    for (int c = 1; c < kChunks; ++c) top = fmaxf(top, tops[h][c]);
    const float p0 = t0 < n ? expf(__fsub_rn(score[h][t0], top)) : 0.f, p1 = t1 < n ? expf(__fsub_rn(score[h][t1], top)) : 0.f;
    const float sum = warp_sum(__fadd_rn(p0, p1));
    score[h][t0] = as_held<T>(p0), score[h][t1] = as_held<T>(p1);
    if (lane == 0) sums[h][warp] = sum;
  }
  __syncthreads();
}

// Sum of weights times latents over a piece of keys, for one latent column a COLUMN.
template <int HEADS, int COLUMNS, class T>
__device__ __forceinline__ void add_piece(float (&o)[HEADS][COLUMNS], const AttentionParams& p, const int* slots,
                                          const float (*score)[kSegment], int t0, int n, int r0) {
  constexpr int kBatch = COLUMNS == 1 ? kPiece : 4;  // keys a thread has in flight
  const int rank = p.dims.rank;
#pragma unroll
  for (int i = 0; i < kPiece; i += kBatch) {
    if (t0 + i >= n) break;
    float v[kBatch][COLUMNS];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const T* key = static_cast<const T*>(p.cache.latent) + static_cast<size_t>(slots[min(t0 + i + j, n - 1)]) * rank;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) v[j][c] = r0 + c * kThreads < rank ? from_held(key[r0 + c * kThreads]) : 0.f;
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float weight = score[h][t0 + i + j];  // 0 past the end
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) o[h][c] = __fmaf_rn(weight, v[j][c], o[h][c]);
      }
    }
  }
}

// HEADS heads a block, COLUMNS latent columns a thread. With one column a thread and a small rank, groups of threads take pieces
// side by side and the pieces meet in shared memory; the order of additions is the same.
template <int HEADS, int COLUMNS, int VEC, class T>
__global__ __launch_bounds__(kThreads, 1) void attention_kernel(const __grid_constant__ AttentionParams p) {
  extern __shared__ __align__(16) float shared[];  // q: [HEADS, rank + rope]; pieces: [groups, HEADS, rank], if more than one
  __shared__ float score[HEADS][kSegment];
  __shared__ int slots[kSegment];
  __shared__ float tops[HEADS][kChunks], sums[HEADS][kChunks];
  wait_for_previous();
  const int m = blockIdx.z, h0 = blockIdx.y * HEADS, begin = blockIdx.x * kSegment;
  if (m > 0 && m >= p.state->n_rows) return;
  const int kv_len = p.state->kv_len, n_keys = kv_len + p.depths[m] + 1;
  if (begin > 0 && begin >= n_keys) return;  // the first segment always has a key, and its queries need not wait for the count
  const int n = min(kSegment, n_keys - begin);
  const int rank = p.dims.rank, rope = p.dims.rope, heads = p.dims.heads, q_stride = rank + rope;
  for (int i = threadIdx.x; i < HEADS * q_stride; i += kThreads) {
    const size_t row = static_cast<size_t>(m) * heads + min(h0 + i / q_stride, heads - 1);
    const int r = i % q_stride;
    shared[i] = from_held(r < rank ? static_cast<const T*>(p.q_lat)[row * rank + r] : static_cast<const T*>(p.q_rope)[row * rope + r - rank]);
  }
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int t = begin + i;
    const int slot = t < kv_len ? t : kv_len + p.path[static_cast<size_t>(m) * p.path_stride + t - kv_len];
    KD_ASSERT(slot >= 0 && slot < p.cache.slots, "mla_attention: a key outside the cache");
    slots[i] = slot;
  }
  __syncthreads();
  score_keys<HEADS, VEC, T>(p, shared, slots, score, n);
  __syncthreads();
  weigh_keys<HEADS, T>(score, tops, sums, n);

  float o[HEADS][COLUMNS] = {};
  const int lanes = COLUMNS > 1 ? kThreads : (rank + kWarp - 1) / kWarp * kWarp;  // threads a group
  const int groups = kThreads / lanes, group = threadIdx.x / lanes, r0 = threadIdx.x % lanes;
  if (groups == 1) {
    for (int t0 = 0; t0 < n; t0 += kPiece) {
      float piece[HEADS][COLUMNS] = {};
      add_piece<HEADS, COLUMNS, T>(piece, p, slots, score, t0, n, r0);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) o[h][c] = __fadd_rn(o[h][c], piece[h][c]);
      }
    }
  } else {
    float* pieces = shared + HEADS * q_stride;
    for (int round = 0; round < n; round += groups * kPiece) {
      const int t0 = round + group * kPiece;
      float piece[HEADS][COLUMNS] = {};
      if (group < groups && t0 < n) {
        add_piece<HEADS, COLUMNS, T>(piece, p, slots, score, t0, n, r0);
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
          if (r0 < rank) pieces[(group * HEADS + h) * rank + r0] = piece[h][0];
        }
      }
      __syncthreads();
      for (int g = 0; group == 0 && r0 < rank && g < groups && round + g * kPiece < n; ++g) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) o[h][0] = __fadd_rn(o[h][0], pieces[(g * HEADS + h) * rank + r0]);
      }
      __syncthreads();
    }
  }
  if (group != 0) return;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (h0 + h >= heads) break;
    float sum = sums[h][0], top = tops[h][0];
#pragma unroll
    for (int c = 1; c < kChunks; ++c) sum = __fadd_rn(sum, sums[h][c]), top = fmaxf(top, tops[h][c]);
    const size_t row = static_cast<size_t>(m) * heads + h0 + h;
    const size_t cell = row * gridDim.x + blockIdx.x;
    if (p.part != nullptr && threadIdx.x == 0) p.part_norm[2 * cell] = top, p.part_norm[2 * cell + 1] = sum;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int r = r0 + c * kThreads;
      if (r >= rank) break;
      if (p.part != nullptr) {
        p.part[cell * rank + r] = o[h][c];
      } else {
        static_cast<T*>(p.o_lat)[row * rank + r] = to_held<T>(__fdiv_rn(o[h][c], sum));
      }
    }
  }
}

// Folds a row's segments in ascending order. With one segment it divides just as attention_kernel does alone.
template <class T>
__global__ __launch_bounds__(kThreads) void combine_kernel(const __grid_constant__ AttentionParams p, int segments) {
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
    static_cast<T*>(p.o_lat)[row * rank + r] = to_held<T>(__fdiv_rn(o, sum));
  }
}

using Kernel = void (*)(AttentionParams);

template <int HEADS, class T>
Kernel by_columns(int columns) {
  if (columns <= 1) return attention_kernel<HEADS, 1, 4, T>;
  return columns <= 2 ? attention_kernel<HEADS, 2, 4, T> : attention_kernel<HEADS, 4, 4, T>;
}

template <class T>
Kernel kernel_for(int heads, int columns, bool vector) {
  if (!vector) return columns <= 1 ? attention_kernel<1, 1, 1, T> : attention_kernel<1, 4, 1, T>;
  return heads == 1 ? by_columns<1, T>(columns) : heads == 4 ? by_columns<4, T>(columns) : by_columns<8, T>(columns);
}

int segments_of(int max_keys) { return max_keys <= 0 ? 0 : (max_keys - 1) / kSegment + 1; }

}  // namespace

size_t CudaBackend::attention_scratch(const MlaDims& dims, int max_rows, int max_keys) const {
  if (attends_on_hopper(dims, wgmma_)) return hopper_scratch(dims, max_rows, max_keys);
  const int segments = segments_of(max_keys);
  return segments <= 1
             ? 0
             : sizeof(float) * static_cast<size_t>(max_rows) * dims.heads * segments * (static_cast<size_t>(dims.rank) + 2);
}

void CudaBackend::mla_attention(const MlaAttentionArgs& a) {
  const int rows = a.rows.max_rows;
  if (rows <= 0) return;
  if (attends_on_hopper(a.dims, wgmma_)) {
    attention_on_hopper(a);
    return;
  }
  const int rank = a.dims.rank, columns = (rank + kThreads - 1) / kThreads;
  if (columns > 4)
    throw Error("ConfigError",
                name_ + ": kv_lora_rank " + std::to_string(rank) + " is above the 1024 that mla_attention is built for");
  const int segments = segments_of(a.max_keys);
  AttentionParams p{a.dims,  a.scale,       a.q_lat,     a.q_rope,           a.cache, a.o_lat, nullptr,
                    nullptr, a.rows.depths, a.rows.path, a.rows.path_stride, a.state};
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
  const bool bf16 = a.dims.numerics == Numerics::kBf16;
  const Kernel kernel = bf16 ? kernel_for<uint16_t>(heads, columns, vector) : kernel_for<float>(heads, columns, vector);
  const size_t pieces = columns > 1 ? 0 : static_cast<size_t>(kThreads / ((rank + kWarp - 1) / kWarp * kWarp)) * heads * rank;
  const size_t shared = sizeof(float) * (static_cast<size_t>(heads) * (rank + a.dims.rope) + pieces);
  reserve_shared(reinterpret_cast<const void*>(kernel), "mla_attention", shared);
  launch(bf16 ? "mla_attention_bf16" : "mla_attention", kernel, dim3(segments, (a.dims.heads + heads - 1) / heads, rows), kThreads, shared, p);
  if (segments > 1) launch("mla_attention_combine", bf16 ? combine_kernel<uint16_t> : combine_kernel<float>, dim3(a.dims.heads, rows), kThreads, 0, p, segments);
}

}  // namespace kdtree
