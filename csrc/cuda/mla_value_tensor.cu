// mla_value on tensor cores, bf16: o = W_UV o_lat for a head, o_lat from memory or folded from attention's splits (mla_fold.cuh).
//
// A block (head, half of the rank) keeps its weights in shared memory, copied before the kernel ahead has ended, and takes the step's rows
// 64 at a time: rows are the 16-row operand of mma.m16n8k16, weights, held in registers, its 8-column one, so that a row's sum never meets
// another row's. r ascends 16 at a time; the two blocks of a head meet in shared memory, each for half of the rows: first half plus second half.
// Bytes: H*V*R weights once; flops 2*M*H*R*V. Bound by weight bytes up to M = 64.
#include <cuda_bf16.h>

#include "backend.h"
#include "mla_fold.cuh"
#include "mla_mma.cuh"

namespace kdtree {
namespace {

using namespace cuda;

struct ValueParams {
  MlaDims dims;
  const __nv_bfloat16* o_lat;  // [M, heads, rank], unless folded
  MlaParts parts;              // attention's splits, when folded
  const __nv_bfloat16* kv_b;
  __nv_bfloat16* o;
  int max_rows;
  const int32_t* n_rows;
};

constexpr int kThreads = 256;
constexpr int kColumns = 256;  // of the rank, a block
constexpr int kStride = kColumns + 8;
constexpr int kOut = 128;      // v_head_dim; 16 a warp
constexpr int kRows = 64;      // at a time
static_assert(values_fold(kTileM) && !values_fold(kTileM + 1), "rows that are folded are one tile");

struct Shared {
  __nv_bfloat16 weights[kOut][kStride];
  __nv_bfloat16 x[kRows][kStride];
  FoldWeights weight[kTileM];
  float other[kRows / 2][kOut + 8];  // what the other block found for this one's rows: of every sixteen the lower or the upper eight
};

// The other block may not be touched before it runs: arrive first thing, wait before that.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Into the same place of the shared memory of block `to` of the cluster.
__device__ __forceinline__ void store_to(int to, const float* at, float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.v2.f32 [there], {%2, %3};\n}\n" ::"r"(
                   shared_address(at)),
               "r"(to), "f"(v.x), "f"(v.y)
               : "memory");
#endif
}

// o_lat of the block's half of the rank, for all rows.
__device__ __forceinline__ void fold_rows(const ValueParams& p, Shared& s, int head, int half, int n_rows) {
  constexpr int kHalf = kOctets / 2;
  const int warp = threadIdx.x / kWarp;
  OctetFold<8> sums;
  const auto fetch = [&](int i) {
    if (i < n_rows * kHalf) sums.fetch(p.parts, i / kHalf, head, half * kHalf + i % kHalf);
  };
  const auto splits_at = [&](int m) { return splits_of(p.parts.state->kv_len + p.parts.depths[m] + 1); };
  fetch(threadIdx.x);
  for (int m = warp; m < n_rows; m += kThreads / kWarp) {
    FoldNorms norms;
    norms.fetch(p.parts, m, head);
    norms.weigh(splits_at(m), s.weight[m]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n_rows * kHalf; i += kThreads) {
    const int m = i / kHalf, c = octet_column(i % kHalf);
    float2 v[4];
    sums.finish(p.parts, splits_at(m), s.weight[m], v);
#pragma unroll
    for (int k = 0; k < 4; ++k) *reinterpret_cast<uint32_t*>(&s.x[m][c + k * kOctetStep]) = pack_bf16(v[k].x, v[k].y);
    fetch(i + kThreads);
  }
}

template <bool FOLD>
__global__ __launch_bounds__(kThreads, 1) void value_kernel(const __grid_constant__ ValueParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  cluster_arrive();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = p.dims.rank, heads = p.dims.heads, head = blockIdx.x / 2, half = blockIdx.x % 2, column = half * kColumns;
  const __nv_bfloat16* w = p.kv_b + (static_cast<size_t>(head) * (p.dims.nope + kOut) + p.dims.nope) * rank + column;
#pragma unroll 4
  for (int i = threadIdx.x; i < kOut * kColumns / 8; i += kThreads) {
    const int v = i / (kColumns / 8), piece = i % (kColumns / 8) * 8;
    fetch16(shared_address(&s.weights[v][piece]), w + static_cast<size_t>(v) * rank + piece);
  }
  wait_for_previous();
  const auto stage = [&](int m0, int rows) {
    for (int m = warp; m < rows; m += kThreads / kWarp)
      fetch16(shared_address(&s.x[m][lane * 8]), p.o_lat + (static_cast<size_t>(m0 + m) * heads + head) * rank + column + lane * 8);
  };
  if constexpr (!FOLD) stage(0, min(kRows, p.max_rows));  // the first before it is known how many there are
  const int n_rows = active_rows(p.n_rows, p.max_rows);
  if constexpr (FOLD) fold_rows(p, s, head, half, n_rows);
  fetch_wait();
  cluster_wait();
  __syncthreads();
  uint32_t b[kColumns / 16][4];
  const uint32_t at_w = shared_address(&s.weights[warp * 16 + lane / 16 * 8 + lane % 8][lane % 16 / 8 * 8]);
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) load_matrices(b[k], at_w + k * 32);
  const uint32_t at_x = shared_address(&s.x[lane % 16][lane / 16 * 8]);
  const int row = lane / 4, out = warp * 16 + lane % 4 * 2;
  for (int m0 = 0; m0 < n_rows; m0 += kRows) {
    const int rows = min(kRows, n_rows - m0);
    if (m0 > 0) {
      stage(m0, rows);
      fetch_wait();
      __syncthreads();
    }
    float own[kRows / kTileM][2][2];
#pragma unroll
    for (int tile = 0; tile < kRows / kTileM; ++tile) {
      if (tile * kTileM >= rows) break;
      float d[2][4] = {};
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        uint32_t a[4];
        load_matrices(a, at_x + (tile * kTileM * kStride + k * 16) * 2);
        multiply(d[0], a, b[k][0], b[k][1]);
        multiply(d[1], a, b[k][2], b[k][3]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        store_to(1 - half, &s.other[tile * 8 + row][out + i * 8], half == 0 ? make_float2(d[i][2], d[i][3]) : make_float2(d[i][0], d[i][1]));
        own[tile][i][0] = half == 0 ? d[i][0] : d[i][2], own[tile][i][1] = half == 0 ? d[i][1] : d[i][3];
      }
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int tile = 0; tile < kRows / kTileM; ++tile) {
      const int m = tile * kTileM + half * 8 + row;
      if (m >= rows) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 other = *reinterpret_cast<const float2*>(&s.other[tile * 8 + row][out + i * 8]);
        *reinterpret_cast<uint32_t*>(p.o + (static_cast<size_t>(m0 + m) * heads + head) * kOut + out + i * 8) =
            pack_bf16(__fadd_rn(own[tile][i][0], other.x), __fadd_rn(own[tile][i][1], other.y));
      }
    }
    if (m0 + kRows >= n_rows) break;
    cluster_arrive();  // what was read may be written again
    cluster_wait();
  }
#endif
}

}  // namespace

void CudaBackend::launch_values(const MlaValueArgs& a, const MlaParts* parts) {
  ValueParams p{a.dims,
                static_cast<const __nv_bfloat16*>(a.o_lat),
                {},
                static_cast<const __nv_bfloat16*>(a.kv_b.data),
                static_cast<__nv_bfloat16*>(a.o),
                a.max_rows,
                a.n_rows};
  if (parts != nullptr) p.parts = *parts;
  const auto kernel = parts != nullptr ? value_kernel<true> : value_kernel<false>;
  reserve_shared(reinterpret_cast<const void*>(kernel), "mla_value_bf16", sizeof(Shared));
  launch_clusters("mla_value_bf16", kernel, 2, dim3(2 * a.dims.heads), kThreads, sizeof(Shared), p);
  ++(*counting_)["mla_value_bf16_tensor"];
}

void CudaBackend::mla_output(const MlaAttentionArgs& a, const MlaValueArgs& v) {
  const bool folds = attends_on_hopper(a.dims, wgmma_) && values_on_tensor_cores(v.dims, device_shape_.clusters) && one_launch(a) &&
                     values_fold(a.rows.max_rows);
  if (!folds) {
    Backend::mla_output(a, v);
    return;
  }
  launch_hopper(a, [&](const MlaParts& parts) { launch_values(v, &parts); });
}

}  // namespace kdtree
