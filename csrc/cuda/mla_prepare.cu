// mla_prepare: absorbs W_UK into the query, rotates q_rope and k_rope, norms the latent and writes the step's cache rows, in one
// launch whose blocks have one of three roles.
//
//   head (head h, 256 latent columns): q_lat[m,h,r] = sum_n q_nope[m,h,n] * kv_b[h,n,r], a thread a column, n ascending;
//   latent: a warp a row: 1/rms (lane strides, then butterfly), the normed latent into the cache;
//   rotation: a thread a pair of q_rope of any head, or of k_rope, which goes into the cache.
// Bytes: H*N*R weights once a tile of 8 rows; flops 2*M*H*N*R. Bound by weight bytes for small M, by latency for small models.
#include "backend.h"
#include "mla_prepare.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kAhead = 8;  // weight rows a thread has in flight

__host__ __device__ constexpr int whole(int n) { return (n + kAhead - 1) / kAhead * kAhead; }

template <class T, int TM>
__device__ void write_latents(const PrepareParams& p, int m0, int n_rows, int kv_len) {
  const int lane = threadIdx.x % kWarp, rank = p.dims.rank;
  const int m = m0 + static_cast<int>(threadIdx.x) / kWarp;
  if (m >= min(n_rows, m0 + TM)) return;
  KD_ASSERT(kv_len + m < p.cache.slots, "mla_prepare: the cache is full");
  const float* kv = p.kv + static_cast<size_t>(m) * (rank + p.dims.rope);
  T* latent = static_cast<T*>(p.cache.latent) + static_cast<size_t>(kv_len + m) * rank;
  float ss = 0.f;
  for (int r = lane; r < rank; r += kWarp) ss = __fmaf_rn(kv[r], kv[r], ss);
  const float inverse = inverse_rms(warp_sum(ss), rank, p.eps);
  for (int r = lane; r < rank; r += kWarp) latent[r] = to_held<T>(__fmul_rn(__fmul_rn(kv[r], inverse), __ldg(p.kv_norm_w + r)));
}

template <class T, int TM>
__device__ void rotate_rows(const PrepareParams& p, int m0, int n_rows, int kv_len) {
  const int rope = p.dims.rope, pairs = rope / 2, heads = p.dims.heads, q_dim = p.dims.nope + rope;
  const int rows = min(TM, n_rows - m0);
  for (int i = threadIdx.x; i < rows * (heads + 1) * pairs; i += kThreads) {
    const int m = m0 + i / ((heads + 1) * pairs), head = i / pairs % (heads + 1), pair = i % pairs;
    const size_t row = static_cast<size_t>(m) * heads + head;
    const float* in =
        head < heads ? p.q + row * q_dim + p.dims.nope : p.kv + static_cast<size_t>(m) * (p.dims.rank + rope) + p.dims.rank;
    T* out = head < heads ? static_cast<T*>(p.q_rope) + row * rope : static_cast<T*>(p.cache.k_rope) + static_cast<size_t>(kv_len + m) * rope;
    const float2 x = make_float2(in[2 * pair], in[2 * pair + 1]);
    const float2 y = rotate(x, angle(p, kv_len + p.depths[m], pair));
    out[2 * pair] = to_held<T>(y.x), out[2 * pair + 1] = to_held<T>(y.y);
  }
}

// T: what only products read, float or bf16; the weights too.
template <class T, int TM>
__global__ __launch_bounds__(kThreads, 1) void prepare_kernel(const __grid_constant__ PrepareParams p, int column_blocks) {
  extern __shared__ __align__(16) float nope[];  // [TM, whole(dims.nope)], zeros past dims.nope
  const int m0 = blockIdx.y * TM;
  const int head = blockIdx.x / column_blocks, column_block = blockIdx.x % column_blocks;
  if (head >= p.dims.heads) {
    wait_for_previous();
    const int n_rows = active_rows(&p.state->n_rows, p.max_rows), kv_len = p.state->kv_len;
    if (static_cast<int>(blockIdx.x) == p.dims.heads * column_blocks) {
      write_latents<T, TM>(p, m0, n_rows, kv_len);
    } else {
      rotate_rows<T, TM>(p, m0, n_rows, kv_len);
    }
    return;
  }
  const int rank = p.dims.rank, n = p.dims.nope, q_dim = n + p.dims.rope;
  const int r = column_block * kThreads + threadIdx.x;
  const bool inside = r < rank;
  const T* w = static_cast<const T*>(p.kv_b) + static_cast<size_t>(head) * (n + p.dims.v) * rank + (inside ? r : 0);
  float ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = i < n ? from_held(__ldg(w + static_cast<size_t>(i) * rank)) : 0.f;

  wait_for_previous();
  const int n_rows = active_rows(&p.state->n_rows, p.max_rows);
  if (m0 > 0 && m0 >= n_rows) return;
  const int stride = whole(n);
  for (int i = threadIdx.x; i < TM * stride; i += kThreads) {
    const int m = min(m0 + i / stride, p.max_rows - 1), k = i % stride;  // rows that do not count harm nobody
    nope[i] = k < n ? as_held<T>(p.q[(static_cast<size_t>(m) * p.dims.heads + head) * q_dim + k]) : 0.f;
  }
  __syncthreads();
  float acc[TM] = {};
  for (int base = 0; base < n; base += kAhead) {
    float v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      v[i] = ahead[i];
      const int next = base + kAhead + i;
      ahead[i] = next < n ? from_held(__ldg(w + static_cast<size_t>(next) * rank)) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < TM; ++t) acc[t] = __fmaf_rn(nope[t * stride + base + i], v[i], acc[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < TM; ++t) {
    if (inside && m0 + t < n_rows)
      static_cast<T*>(p.q_lat)[(static_cast<size_t>(m0 + t) * p.dims.heads + head) * rank + r] = to_held<T>(acc[t]);
  }
}

template <class T>
void (*prepare_for(int tm))(PrepareParams, int) {
  switch (tm) {
    case 1: return prepare_kernel<T, 1>;
    case 2: return prepare_kernel<T, 2>;
    case 4: return prepare_kernel<T, 4>;
    default: return prepare_kernel<T, 8>;
  }
}

}  // namespace

void CudaBackend::mla_prepare(const MlaPrepareArgs& a) {
  const int rows = a.rows.max_rows;
  if (rows <= 0 || prepare_on_tensor_cores(a)) return;
  const int tm = rows >= 5 ? 8 : rows >= 3 ? 4 : rows;
  const int column_blocks = (a.dims.rank + kThreads - 1) / kThreads;
  const size_t shared = sizeof(float) * tm * static_cast<size_t>(whole(a.dims.nope));
  const bool bf16 = a.dims.numerics == Numerics::kBf16;
  const auto kernel = bf16 ? prepare_for<uint16_t>(tm) : prepare_for<float>(tm);
  reserve_shared(reinterpret_cast<const void*>(kernel), "mla_prepare", shared);
  launch(bf16 ? "mla_prepare_bf16" : "mla_prepare", kernel, dim3(a.dims.heads * column_blocks + 2, (rows + tm - 1) / tm), kThreads, shared,
         PrepareParams(a), column_blocks);
}

}  // namespace kdtree
