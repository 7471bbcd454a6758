// The down products of the chosen experts and the shared one, for bf16 activations (moe_stream.cuh with K = I), and their combination.
#include "backend.h"
#include "moe_stream.cuh"

namespace kdtree {
namespace {

using namespace cuda;

struct CombineParams {
  const float* products;
  const float* weights;
  int top_k, dim;
  bool shared;
  float* out;
  int max_rows;
  const int32_t* n_rows;
};

constexpr int kCombineThreads = 256;

// out += sum_j weights_j products_j, ascending j, the shared expert's last. Bytes: the products once, from L2.
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const __grid_constant__ CombineParams p) {
  wait_for_previous();
  const int m = blockIdx.y, d = blockIdx.x * kCombineThreads + threadIdx.x;
  if (m >= active_rows(p.n_rows, p.max_rows) || d >= p.dim) return;
  const float* row = p.products + static_cast<size_t>(m) * (p.top_k + 1) * p.dim + d;
  float* const out = p.out + static_cast<size_t>(m) * p.dim + d;
  const float before = *out;
  float sum = 0.f;
#pragma unroll 8
  for (int j = 0; j < p.top_k; ++j) sum = __fmaf_rn(p.weights[m * p.top_k + j], row[static_cast<size_t>(j) * p.dim], sum);
  if (p.shared) sum = __fadd_rn(sum, row[static_cast<size_t>(p.top_k) * p.dim]);
  *out = __fadd_rn(before, sum);
}

}  // namespace

// The products of every (row, choice) and of the shared expert.
size_t CudaBackend::moe_scratch(int max_rows, int top_k, int, int, int dim) const {
  return sizeof(float) * static_cast<size_t>(max_rows) * (top_k + 1) * dim;
}

bool CudaBackend::down_stream(const MoeArgs& a) {
  const int shared_k = a.shared_down.n > 0 ? a.shared_down.k : a.down.k;
  if (a.numerics != Numerics::kBf16 || !stream::serves_moe(device_shape_, a.down.k, shared_k, a.top_k, a.down.e)) return false;
  const int variant = stream::choose_down(device_shape_, a.down.k, a.max_rows);
  const bool int4 = a.down.kind == WeightKind::kInt4;
  StreamMoeParams p{};
  p.k = a.down.k, p.shared_k = shared_k, p.bf16 = !int4;
  p.data[0] = p.data[1] = a.down.data, p.scale[0] = p.scale[1] = a.down.scale, p.shared[0] = p.shared[1] = a.shared_down.data;
  p.n = a.down.n, p.shared_n = a.shared_down.n, p.step = a.down.step();
  p.ids = a.ids, p.top_k = a.top_k, p.max_rows = a.max_rows, p.n_rows = a.n_rows;
  p.act = static_cast<uint16_t*>(a.act), p.shared_act = static_cast<uint16_t*>(a.shared_act);
  p.products = static_cast<float*>(a.scratch);
  if (variant < 0 || !aligned(p.data[0]) || !aligned(p.shared[0]) || !aligned(p.scale[0], 8) || !aligned(a.act) || !aligned(a.shared_act)) {
    return false;
  }
  const stream::Variant& v = stream::kDown[variant];
  const StreamMoeKernel kernel = moe_kernel<true, stream::kDown>(variant);
  const char* const name = int4 ? "experts_int4_bf16_down" : "experts_bf16_down";
  const size_t shared = stream::moe_shared(v, a.down.k, true);
  const int clusters = resident_clusters(reinterpret_cast<const void*>(kernel), name, v.cl, v.warps * kWarp, shared);
  const int columns = v.held * kColumns;
  launch_clusters(name, kernel, v.cl, dim3(clusters * v.cl, (a.max_rows + columns - 1) / columns), v.warps * kWarp, shared, p);
  const CombineParams c{p.products, a.weights, a.top_k, a.down.n, a.shared_down.n > 0, a.out, a.max_rows, a.n_rows};
  launch("experts_combine", combine_kernel, dim3((a.down.n + kCombineThreads - 1) / kCombineThreads, a.max_rows), kCombineThreads, 0, c);
  return true;
}

}  // namespace kdtree
