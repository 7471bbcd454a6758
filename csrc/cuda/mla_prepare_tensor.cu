// mla_prepare on tensor cores, bf16: q_lat = W_UK^T q_nope, the rotations, and the step's cache rows, in one launch whose blocks have one
// of two roles.
//
//   head (head, 256 latent columns): the block keeps these weights in shared memory, copied before the kernel ahead has ended, and takes
//     the step's rows 64 at a time: rows are the 16-row operand of mma.m16n8k16, weights, held in registers, its 8-column one, so that a
//     row's sum never meets another row's; n ascends 16 at a time. The blocks of a head rotate its q_rope, each some of the rows;
//   row: a warp norms a row's latent (lane strides, then butterfly), rotates its k_rope and writes both to the cache.
// Bytes: H*N*R weights once, and a head's queries for every 256 columns; flops 2*M*H*R*N. Bound by weight bytes up to M = 64.
#include <cuda_bf16.h>

#include "backend.h"
#include "mla_mma.cuh"
#include "mla_plan.h"
#include "mla_prepare.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kNope = 128;
constexpr int kColumns = 256;              // of a block; 32 a warp
constexpr int kRows = 64;                  // at a time
constexpr int kStride = kColumns + 8;      // elements a shared row: 8 rows of a matrix fall into different banks
constexpr int kRowStride = kNope + 8;
constexpr int kOutStride = 40;             // of a warp's results, 16 rows of 32
constexpr int kTurns = kRows / kWarps;     // rows of a warp

struct Shared {
  __nv_bfloat16 weights[kNope][kStride];
  __nv_bfloat16 rows[kRows][kRowStride];
  __nv_bfloat16 out[kWarps][kTileM][kOutStride];
};

__device__ __forceinline__ void write_cache_row(const PrepareParams& p, int m, int kv_len) {
  const int lane = threadIdx.x % kWarp, rank = p.dims.rank, rope = p.dims.rope;
  KD_ASSERT(kv_len + m < p.cache.slots, "mla_prepare: the cache is full");
  const float* kv = p.kv + static_cast<size_t>(m) * (rank + rope);
  __nv_bfloat16* latent = static_cast<__nv_bfloat16*>(p.cache.latent) + static_cast<size_t>(kv_len + m) * rank;
  const int position = kv_len + p.depths[m];
  float ss = 0.f;
#pragma unroll 4
  for (int r = 4 * lane; r < rank; r += 4 * kWarp) {
    const float4 v = *reinterpret_cast<const float4*>(kv + r);
    ss = __fmaf_rn(v.x, v.x, ss), ss = __fmaf_rn(v.y, v.y, ss), ss = __fmaf_rn(v.z, v.z, ss), ss = __fmaf_rn(v.w, v.w, ss);
  }
  const float inverse = inverse_rms(warp_sum(ss), rank, p.eps);
#pragma unroll 4
  for (int r = 4 * lane; r < rank; r += 4 * kWarp) {
    const float4 v = *reinterpret_cast<const float4*>(kv + r), w = __ldg(reinterpret_cast<const float4*>(p.kv_norm_w + r));
    const auto normed = [&](float x, float weight) { return __fmul_rn(__fmul_rn(x, inverse), weight); };
    *reinterpret_cast<uint2*>(latent + r) =
        make_uint2(pack_bf16(normed(v.x, w.x), normed(v.y, w.y)), pack_bf16(normed(v.z, w.z), normed(v.w, w.w)));
  }
  uint32_t* k_rope = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.cache.k_rope) + static_cast<size_t>(kv_len + m) * rope);
  for (int pair = lane; pair < rope / 2; pair += kWarp) {
    const float2 y = rotate(*reinterpret_cast<const float2*>(kv + rank + 2 * pair), angle(p, position, pair));
    k_rope[pair] = pack_bf16(y.x, y.y);
  }
}

// Rows m0 .. of the head as bf16 into shared memory, a row a warp and turn. Rows that do not count harm nobody.
__device__ __forceinline__ void stage_rows(const PrepareParams& p, Shared& s, const float* q, size_t row_stride, int rows) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float4 v[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (warp + i * kWarps < rows) v[i] = *reinterpret_cast<const float4*>(q + (warp + i * kWarps) * row_stride + 4 * lane);
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    if (warp + i * kWarps < rows)
      *reinterpret_cast<uint2*>(&s.rows[warp + i * kWarps][4 * lane]) = make_uint2(pack_bf16(v[i].x, v[i].y), pack_bf16(v[i].z, v[i].w));
  }
}

// q_rope of the head for rows m0 + part, m0 + part + parts, ...
__device__ __forceinline__ void rotate_rows(const PrepareParams& p, int head, int m0, int rows, int part, int parts, int kv_len) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, pairs = p.dims.rope / 2;
#pragma unroll 4
  for (int i = part + warp * parts; i < rows; i += parts * kWarps) {
    const size_t at = static_cast<size_t>(m0 + i) * p.dims.heads + head;
    const int position = kv_len + p.depths[m0 + i];
    const float* in = p.q + at * (kNope + p.dims.rope) + kNope;
    uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.q_rope) + at * p.dims.rope);
    for (int pair = lane; pair < pairs; pair += kWarp) {
      const float2 y = rotate(*reinterpret_cast<const float2*>(in + 2 * pair), angle(p, position, pair));
      out[pair] = pack_bf16(y.x, y.y);
    }
  }
}

__global__ __launch_bounds__(kThreads, 1) void prepare_kernel(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(16) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = p.dims.rank, heads = p.dims.heads, parts = (rank + kColumns - 1) / kColumns;
  const int head = blockIdx.x / parts, part = blockIdx.x % parts, column = part * kColumns;
  if (head >= heads) {
    wait_for_previous();
    const int m = (static_cast<int>(blockIdx.x) - heads * parts) * kWarps + warp;
    if (m < active_rows(&p.state->n_rows, p.max_rows)) write_cache_row(p, m, p.state->kv_len);
    return;
  }
  const int columns = min(kColumns, rank - column);
  const __nv_bfloat16* w = static_cast<const __nv_bfloat16*>(p.kv_b) + static_cast<size_t>(head) * (kNope + p.dims.v) * rank + column;
#pragma unroll 4
  for (int i = threadIdx.x; i < kNope * kColumns / 8; i += kThreads) {
    const int n = i / (kColumns / 8), piece = i % (kColumns / 8) * 8;
    if (piece < columns) fetch16(shared_address(&s.weights[n][piece]), w + static_cast<size_t>(n) * rank + piece);
  }
  wait_for_previous();
  const size_t row_stride = static_cast<size_t>(heads) * (kNope + p.dims.rope);
  const float* q = p.q + static_cast<size_t>(head) * (kNope + p.dims.rope);
  stage_rows(p, s, q, row_stride, min(kRows, p.max_rows));  // the first before it is known how many there are
  const int n_rows = active_rows(&p.state->n_rows, p.max_rows), kv_len = p.state->kv_len;
  rotate_rows(p, head, 0, min(kRows, n_rows), part, parts, kv_len);  // while the weights come
  fetch_wait();
  __syncthreads();
  uint32_t b[kNope / 16][2][4];  // two tiles of eight columns each
  const uint32_t at_w = shared_address(&s.weights[lane % 16][warp * 32 + lane / 16 * 8]);
#pragma unroll
  for (int k = 0; k < kNope / 16; ++k) {
#pragma unroll
    for (int c = 0; c < 2; ++c) load_transposed(b[k][c], at_w + (k * 16 * kStride + c * 16) * 2);
  }
  const uint32_t at_x = shared_address(&s.rows[lane % 16][lane / 16 * 8]);
  for (int m0 = 0; m0 < n_rows; m0 += kRows) {
    const int rows = min(kRows, n_rows - m0);
    if (m0 > 0) {
      __syncthreads();
      stage_rows(p, s, q + m0 * row_stride, row_stride, rows);
      rotate_rows(p, head, m0, rows, part, parts, kv_len);
      __syncthreads();
    }
    for (int tile = 0; tile < rows; tile += kTileM) {
      float d[4][4] = {};
#pragma unroll
      for (int k = 0; k < kNope / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, at_x + (tile * kRowStride + k * 16) * 2);
#pragma unroll
        for (int c = 0; c < 4; ++c) multiply(d[c], a, b[k][c / 2][c % 2 * 2], b[k][c / 2][c % 2 * 2 + 1]);
      }
      // Through shared memory, so that whole sectors are written.
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<uint32_t*>(&s.out[warp][lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2]) = pack_bf16(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]);
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half, m = m0 + tile + row, at = warp * 32 + lane % 4 * 8;
        const uint4 v = *reinterpret_cast<const uint4*>(&s.out[warp][row][lane % 4 * 8]);
        if (tile + row < rows && at < columns)
          *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(p.q_lat) + (static_cast<size_t>(m) * heads + head) * rank + column + at) = v;
      }
      __syncwarp();
    }
  }
}

}  // namespace

bool CudaBackend::prepare_on_tensor_cores(const MlaPrepareArgs& a) {
  if (!tensor_ || !prepares_on_tensor_cores(a.dims)) return false;
  reserve_shared(reinterpret_cast<const void*>(prepare_kernel), "mla_prepare_bf16", sizeof(Shared));
  const int parts = (a.dims.rank + kColumns - 1) / kColumns;
  const int blocks = a.dims.heads * parts + (a.rows.max_rows + kWarps - 1) / kWarps;
  launch("mla_prepare_bf16", prepare_kernel, dim3(blocks), kThreads, sizeof(Shared), PrepareParams(a));
  keys_settled_ = true;
  ++(*counting_)["mla_prepare_bf16_tensor"];
  return true;
}

}  // namespace kdtree
