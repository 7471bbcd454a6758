// The MLA projections of a head on tensor cores, bf16: the query through W_UK, and attention's sums through W_UV.
//
// A block keeps a head's weights in shared memory, copied before the kernel ahead has ended, and takes the step's rows 16 at a time:
// rows are the 16-row operand of mma.m16n8k16, weights its 8-column one, so a row's sum never meets another row's.
//   prepare (head, 128 latent columns): q_lat = W_UK^T q_nope, n ascending 16 at a time; the first block of a head also rotates its
//     q_rope; further blocks norm a row's latent (lane strides, then butterfly), rotate its k_rope and write both to the cache;
//   value (head, half of the rank): o_lat from global memory, or folded from attention's splits (mla_fold.cuh), then W_UV o_lat, r
//     ascending 16 at a time; the two blocks of a head meet in shared memory: first half plus second half.
// Bytes: H*(N+V)*R weights, once; flops 2*M*H*R*(N+V). Bound by weight bytes up to M = 64 and beyond.
#include <cuda_bf16.h>

#include "backend.h"
#include "mla_fold.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kTileM = 16;

__device__ __forceinline__ uint32_t shared_of(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void fetch16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void fetch_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <bool TRANSPOSE>
__device__ __forceinline__ void load_tiles(uint32_t (&r)[4], uint32_t at) {
  if constexpr (TRANSPOSE) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  }
}

// d += a b, 16x8x16.
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

struct PrepareParams {
  MlaDims dims;
  const float* q;
  const float* kv;
  const float* kv_norm_w;
  float eps;
  const __nv_bfloat16* kv_b;
  const float* cos_sin;
  __nv_bfloat16* q_lat;
  __nv_bfloat16* q_rope;
  __nv_bfloat16* latent;
  __nv_bfloat16* k_rope;
  int slots;
  const int32_t* depths;
  int max_rows;
  const StepState* state;
};

constexpr int kPrepareThreads = 128;
constexpr int kPrepareColumns = 128;              // of a block; 32 a warp
constexpr int kPrepareStride = kPrepareColumns + 8;  // elements a shared row: 8 rows of a matrix fall into different banks

__device__ __forceinline__ uint32_t rotated(const PrepareParams& p, const float* in, int position, int pair) {
  const float2 x = *reinterpret_cast<const float2*>(in + 2 * pair);
  const float2 angle = __ldg(reinterpret_cast<const float2*>(p.cos_sin) + static_cast<size_t>(position) * (p.dims.rope / 2) + pair);
  return bf16_pair(__fmaf_rn(x.x, angle.x, -__fmul_rn(x.y, angle.y)), __fmaf_rn(x.x, angle.y, __fmul_rn(x.y, angle.x)));
}

__device__ __forceinline__ void prepare_cache_row(const PrepareParams& p, int m, int kv_len) {
  const int lane = threadIdx.x % kWarp, rank = p.dims.rank, rope = p.dims.rope;
  KD_ASSERT(kv_len + m < p.slots, "mla_prepare: the cache is full");
  const float* kv = p.kv + static_cast<size_t>(m) * (rank + rope);
  __nv_bfloat16* latent = p.latent + static_cast<size_t>(kv_len + m) * rank;
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
        make_uint2(bf16_pair(normed(v.x, w.x), normed(v.y, w.y)), bf16_pair(normed(v.z, w.z), normed(v.w, w.w)));
  }
  const int position = kv_len + p.depths[m];
  uint32_t* k_rope = reinterpret_cast<uint32_t*>(p.k_rope + static_cast<size_t>(kv_len + m) * rope);
  for (int pair = lane; pair < rope / 2; pair += kWarp) k_rope[pair] = rotated(p, kv + rank, position, pair);
}

template <int NOPE>
__global__ __launch_bounds__(kPrepareThreads, 3) void prepare_kernel(const __grid_constant__ PrepareParams p) {
  extern __shared__ __align__(16) __nv_bfloat16 weights[];  // [NOPE][kPrepareStride]
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = p.dims.rank, rope = p.dims.rope, heads = p.dims.heads, parts = rank / kPrepareColumns;
  const int head = blockIdx.x / parts, column = blockIdx.x % parts * kPrepareColumns;
  if (head >= heads) {
    wait_for_previous();
    const int m = (static_cast<int>(blockIdx.x) - heads * parts) * (kPrepareThreads / kWarp) + warp;
    if (m < active_rows(&p.state->n_rows, p.max_rows)) prepare_cache_row(p, m, p.state->kv_len);
    return;
  }
  const __nv_bfloat16* w = p.kv_b + static_cast<size_t>(head) * (NOPE + p.dims.v) * rank + column;
#pragma unroll 4
  for (int i = threadIdx.x; i < NOPE * kPrepareColumns / 8; i += kPrepareThreads) {
    const int n = i / (kPrepareColumns / 8), piece = i % (kPrepareColumns / 8) * 8;
    fetch16(shared_of(weights + n * kPrepareStride + piece), w + static_cast<size_t>(n) * rank + piece);
  }
  wait_for_previous();
  const int n_rows = active_rows(&p.state->n_rows, p.max_rows), kv_len = p.state->kv_len, q_dim = NOPE + rope;
  const int q_row = lane / 4, pair = lane % 4 * 2;
  const auto row_of = [&](int m) { return p.q + (static_cast<size_t>(min(m, p.max_rows - 1)) * heads + head) * q_dim; };
  uint32_t q[NOPE / 16][4];
  const auto load_rows = [&](int m0) {
    const float *low = row_of(m0 + q_row), *high = row_of(m0 + q_row + 8);
#pragma unroll
    for (int k = 0; k < NOPE / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = *reinterpret_cast<const float2*>((i % 2 == 0 ? low : high) + k * 16 + i / 2 * 8 + pair);
        q[k][i] = bf16_pair(v.x, v.y);
      }
    }
  };
  load_rows(0);
  fetch_wait();
  __syncthreads();
  const uint32_t at = shared_of(weights + (lane % 16) * kPrepareStride + warp * 32 + lane / 16 * 8);
  for (int m0 = 0; m0 < n_rows; m0 += kTileM) {
    if (m0 > 0) load_rows(m0);
    float d[4][4] = {};
#pragma unroll
    for (int k = 0; k < NOPE / 16; ++k) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t b[4];  // two tiles of 8 columns
        load_tiles<true>(b, at + (k * 16 * kPrepareStride + c * 16) * 2);
        multiply(d[2 * c], q[k], b[0], b[1]);
        multiply(d[2 * c + 1], q[k], b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = m0 + q_row + 8 * half;
      if (m >= n_rows) continue;
      __nv_bfloat16* out = p.q_lat + (static_cast<size_t>(m) * heads + head) * rank + column + warp * 32 + pair;
#pragma unroll
      for (int c = 0; c < 4; ++c) *reinterpret_cast<uint32_t*>(out + c * 8) = bf16_pair(d[c][2 * half], d[c][2 * half + 1]);
    }
  }
  if (column > 0) return;
  for (int i = threadIdx.x; i < n_rows * (rope / 2); i += kPrepareThreads) {
    const int m = i / (rope / 2), at_pair = i % (rope / 2);
    reinterpret_cast<uint32_t*>(p.q_rope + (static_cast<size_t>(m) * heads + head) * rope)[at_pair] =
        rotated(p, row_of(m) + NOPE, kv_len + p.depths[m], at_pair);
  }
}

struct ValueParams {
  MlaDims dims;
  const __nv_bfloat16* o_lat;  // [M, heads, rank], unless folded
  MlaParts parts;              // attention's splits, when folded
  const __nv_bfloat16* kv_b;
  __nv_bfloat16* o;
  int max_rows;
  const int32_t* n_rows;
};

constexpr int kValueThreads = 256;
constexpr int kValueColumns = 256;  // of the rank, a block
constexpr int kValueStride = kValueColumns + 8;
constexpr int kValueOut = 128;      // v_head_dim

struct ValueShared {
  __nv_bfloat16 weights[kValueOut][kValueStride];
  __nv_bfloat16 x[kTileM][kValueStride];
  float other[kTileM][kValueOut];  // what the block of the second half found
  FoldWeights weight[kTileM];
};

// The other block may not be touched before it runs: arrive first thing, wait before that.
__device__ __forceinline__ void cluster_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The block of a head's second half writes into the shared memory of the first half's.
__device__ __forceinline__ void store_to_first(const float* at, float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, 0;\nst.shared::cluster.v2.f32 [there], {%1, %2};\n}\n" ::"r"(
                   shared_of(at)),
               "f"(v.x), "f"(v.y)
               : "memory");
#endif
}

template <bool FOLD>
__global__ __launch_bounds__(kValueThreads, 1) void value_kernel(const __grid_constant__ ValueParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char raw[];
  ValueShared& s = *reinterpret_cast<ValueShared*>(raw);
  cluster_start();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int rank = p.dims.rank, heads = p.dims.heads, head = blockIdx.x / 2, half = blockIdx.x % 2, column = half * kValueColumns;
  const __nv_bfloat16* w =
      p.kv_b + (static_cast<size_t>(head) * (p.dims.nope + kValueOut) + p.dims.nope) * rank + column;
#pragma unroll 4
  for (int i = threadIdx.x; i < kValueOut * kValueColumns / 8; i += kValueThreads) {
    const int v = i / (kValueColumns / 8), piece = i % (kValueColumns / 8) * 8;
    fetch16(shared_of(&s.weights[v][piece]), w + static_cast<size_t>(v) * rank + piece);
  }
  wait_for_previous();
  cluster_started();
  const int n_rows = active_rows(p.n_rows, p.max_rows);
  const uint32_t at_x = shared_of(&s.x[lane % 16][lane / 16 * 8]);
  const uint32_t at_w = shared_of(&s.weights[warp * 16 + lane / 16 * 8 + lane % 8][lane % 16 / 8 * 8]);
  for (int m0 = 0; m0 < n_rows; m0 += kTileM) {
    const int rows = min(kTileM, n_rows - m0);
    if constexpr (FOLD) {
      constexpr int kHalf = kOctets / 2;
      OctetFold sums;
      const auto fetch = [&](int i) {
        if (i < rows * kHalf) sums.fetch(p.parts, m0 + i / kHalf, head, half * kHalf + i % kHalf);
      };
      const auto splits_at = [&](int m) { return splits_of(p.parts.state->kv_len + p.parts.depths[m0 + m] + 1); };
      fetch(threadIdx.x);
      for (int m = warp; m < rows; m += kValueThreads / kWarp) {
        FoldNorms norms;
        norms.fetch(p.parts, m0 + m, head);
        norms.weigh(splits_at(m), s.weight[m]);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < rows * kHalf; i += kValueThreads) {
        const int m = i / kHalf, c = octet_column(i % kHalf);
        float2 v[4];
        sums.finish(p.parts, splits_at(m), s.weight[m], v);
#pragma unroll
        for (int k = 0; k < 4; ++k) *reinterpret_cast<uint32_t*>(&s.x[m][c + k * kOctetStep]) = bf16_pair(v[k].x, v[k].y);
        fetch(i + kValueThreads);
      }
    } else {
      for (int i = threadIdx.x; i < rows * (kValueColumns / 8); i += kValueThreads) {
        const int m = i / (kValueColumns / 8), c = i % (kValueColumns / 8) * 8;
        *reinterpret_cast<uint4*>(&s.x[m][c]) =
            *reinterpret_cast<const uint4*>(p.o_lat + (static_cast<size_t>(m0 + m) * heads + head) * rank + column + c);
      }
    }
    if (m0 == 0) fetch_wait();
    __syncthreads();
    float d[2][4] = {};
#pragma unroll
    for (int k = 0; k < kValueColumns / 16; ++k) {
      uint32_t a[4], b[4];
      load_tiles<false>(a, at_x + k * 32);
      load_tiles<false>(b, at_w + k * 32);
      multiply(d[0], a, b[0], b[1]);
      multiply(d[1], a, b[2], b[3]);
    }
    const int row = lane / 4, pair = warp * 16 + lane % 4 * 2;
    if (half == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) store_to_first(&s.other[row + i % 2 * 8][pair + i / 2 * 8], make_float2(d[i / 2][i % 2 * 2], d[i / 2][i % 2 * 2 + 1]));
    }
    cluster_barrier();
    if (half == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = row + i % 2 * 8, out = pair + i / 2 * 8;
        if (m >= rows) continue;
        const float2 other = *reinterpret_cast<const float2*>(&s.other[m][out]);
        *reinterpret_cast<uint32_t*>(p.o + (static_cast<size_t>(m0 + m) * heads + head) * kValueOut + out) =
            bf16_pair(__fadd_rn(d[i / 2][i % 2 * 2], other.x), __fadd_rn(d[i / 2][i % 2 * 2 + 1], other.y));
      }
    }
    if (m0 + kTileM < n_rows) cluster_barrier();  // what was read may be written again
  }
#endif
}

}  // namespace

bool CudaBackend::prepare_on_tensor_cores(const MlaPrepareArgs& a) {
  if (!tensor_ || !prepares_on_tensor_cores(a.dims)) return false;
  const PrepareParams p{a.dims,
                        a.q,
                        a.kv,
                        a.kv_norm_w,
                        a.eps,
                        static_cast<const __nv_bfloat16*>(a.kv_b.data),
                        a.cos_sin,
                        static_cast<__nv_bfloat16*>(a.q_lat),
                        static_cast<__nv_bfloat16*>(a.q_rope),
                        static_cast<__nv_bfloat16*>(a.cache.latent),
                        static_cast<__nv_bfloat16*>(a.cache.k_rope),
                        a.cache.slots,
                        a.rows.depths,
                        a.rows.max_rows,
                        a.state};
  constexpr int kNope = 128;
  constexpr int kRowsABlock = kPrepareThreads / kWarp;
  const size_t shared = sizeof(__nv_bfloat16) * kNope * kPrepareStride;
  const auto kernel = prepare_kernel<kNope>;
  reserve_shared(reinterpret_cast<const void*>(kernel), "mla_prepare_bf16", shared);
  const int blocks = a.dims.heads * (a.dims.rank / kPrepareColumns) + (a.rows.max_rows + kRowsABlock - 1) / kRowsABlock;
  launch("mla_prepare_bf16", kernel, dim3(blocks), kPrepareThreads, shared, p);
  ++(*counting_)["mla_prepare_bf16_tensor"];
  return true;
}

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
  reserve_shared(reinterpret_cast<const void*>(kernel), "mla_value_bf16", sizeof(ValueShared));
  launch_clusters("mla_value_bf16", kernel, 2, dim3(2 * a.dims.heads), kValueThreads, sizeof(ValueShared), p);
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
