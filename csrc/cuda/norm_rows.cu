// Rows of f32 normed and rounded to bf16 in memory, in the order in which products multiply them (nibbles.cuh): once, for many blocks.
//
// A block a row; bound by the latency of its row. The bits are those of the products that norm on the way: the sum of squares by
// segments of K whose ends lie on `granule`.
#include "backend.h"
#include "staged_rows.cuh"

namespace kdtree {
namespace {

using namespace cuda;

struct Params {
  uint16_t* to;  // [M, stride]
  int stride;
  const float* x;
  int ldx, k;
  const float* norm_w;
  float eps;
  int granule, max_rows;
  const int32_t* n_rows;
};

constexpr int kThreads = kSegments * kWarp;

// Zeros from k on.
__global__ __launch_bounds__(kThreads) void norm_kernel(const __grid_constant__ Params p) {
  __shared__ float squares[kSegments], inverse[1];
  wait_for_previous();
  const int m = blockIdx.x;
  if (m >= active_rows(p.n_rows, p.max_rows)) return;
  const float* const x = p.x + static_cast<size_t>(m) * p.ldx;
  square_rows<kSegments>(squares, x, p.ldx, 1, p.k, p.granule, 0);
  inverse_rows<1, kSegments>(inverse, squares, 1, p.k, p.eps);
  stage_normed_rows(reinterpret_cast<uint8_t*>(p.to + static_cast<size_t>(m) * p.stride), 0, x, p.ldx, 1, 1, p.k, 0, p.stride, p.norm_w, inverse);
}

}  // namespace

void CudaBackend::norm_rows(const char* counter, uint16_t* to, int stride, const float* x, int ldx, int k, const float* norm_w, float eps,
                            int granule, int max_rows, const int32_t* n_rows) {
  launch(counter, norm_kernel, dim3(static_cast<unsigned>(max_rows)), kThreads, 0,
         Params{to, stride, x, ldx, k, norm_w, eps, granule, max_rows, n_rows});
}

}  // namespace kdtree
