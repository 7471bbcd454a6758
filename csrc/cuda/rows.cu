// embed and rms_norm: one block a row. Bytes: the row once in, once out; bound by launch latency.
#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

template <class T>
__global__ void embed_kernel(float* out, const T* table, int dim, int stride, const int32_t* tokens, const int32_t* n_rows) {
  wait_for_previous();
  const int m = blockIdx.x;
  if (m >= *n_rows) return;
  const int token = tokens[m];
  KD_ASSERT(token >= 0, "embed: a token below 0");
  const T* row = table + static_cast<size_t>(token) * stride;
  for (int i = threadIdx.x; i < dim; i += kThreads) out[static_cast<size_t>(m) * dim + i] = from_held(__ldg(row + i));
}

// Sum of squares: thread t adds k = t, t+256, ... ascending; butterfly over lanes, then warps in order.
__global__ void rms_norm_kernel(float* out, const float* x, const float* w, float eps, int dim, const int32_t* n_rows) {
  __shared__ float squares[kThreads / kWarp];
  wait_for_previous();
  const int m = blockIdx.x;
  if (m >= *n_rows) return;
  const float* row = x + static_cast<size_t>(m) * dim;
  float ss = 0.f;
  for (int i = threadIdx.x; i < dim; i += kThreads) ss = __fmaf_rn(row[i], row[i], ss);
  ss = warp_sum(ss);
  if (threadIdx.x % kWarp == 0) squares[threadIdx.x / kWarp] = ss;
  __syncthreads();
  float total = squares[0];
#pragma unroll
  for (int i = 1; i < kThreads / kWarp; ++i) total = __fadd_rn(total, squares[i]);
  const float inverse = inverse_rms(total, dim, eps);
  for (int i = threadIdx.x; i < dim; i += kThreads) {
    out[static_cast<size_t>(m) * dim + i] = __fmul_rn(__fmul_rn(row[i], inverse), __ldg(w + i));
  }
}

}  // namespace

void CudaBackend::embed(const EmbedArgs& a) {
  if (a.rows.max_rows <= 0) return;
  const int32_t* tokens = a.rows.tokens;
  if (a.table.kind == WeightKind::kBf16) {
    launch("embed", embed_kernel<uint16_t>, dim3(a.rows.max_rows), kThreads, 0, a.out, static_cast<const uint16_t*>(a.table.data),
           a.table.k, a.stride, tokens, a.n_rows);
  } else {
    launch("embed", embed_kernel<float>, dim3(a.rows.max_rows), kThreads, 0, a.out, static_cast<const float*>(a.table.data),
           a.table.k, a.stride, tokens, a.n_rows);
  }
}

void CudaBackend::rms_norm(float* out, const float* x, const float* w, float eps, int dim, int max_rows,
                           const int32_t* n_rows) {
  if (max_rows <= 0) return;
  launch("rms_norm", rms_norm_kernel, dim3(max_rows), kThreads, 0, out, x, w, eps, dim, n_rows);
}

}  // namespace kdtree
