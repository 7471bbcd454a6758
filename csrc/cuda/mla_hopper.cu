// mla_attention for bf16 on Hopper: launches of mla_hopper.cuh, and the fold of its splits where o_lat itself is asked for.
#include "mla_hopper.cuh"

#include <algorithm>

#include "backend.h"

namespace kdtree {

using namespace cuda;

namespace {

// Only an image for sm_90a holds Hopper's matrix instructions.
__device__ const bool has_wgmma =
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    true;
#else
    false;
#endif

constexpr int kFoldThreads = 128;

// o_lat of a head: four columns a thread.
__global__ __launch_bounds__(kFoldThreads) void fold_kernel(const __grid_constant__ MlaParts p, __nv_bfloat16* o_lat, int heads) {
  __shared__ float weight[kMaxSplits];
  wait_for_previous();
  const int row = p.first_row + static_cast<int>(blockIdx.y), head = blockIdx.x;
  if (row >= p.state->n_rows) return;
  if (threadIdx.x < kWarp) fold_weights(p, row, head, weight);
  __syncthreads();
  const int column = 4 * threadIdx.x;
  const float4 v = fold(p, row, head, column, weight);
  const __nv_bfloat162 low = __floats2bfloat162_rn(v.x, v.y), high = __floats2bfloat162_rn(v.z, v.w);
  __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(o_lat + (static_cast<size_t>(row) * heads + head) * kPartRank + column);
  out[0] = low, out[1] = high;
}

}  // namespace

bool CudaBackend::finds_wgmma() {
  bool found = false;
  KD_CUDA(cudaMemcpyFromSymbol(&found, has_wgmma, sizeof found));
  return found;
}

bool CudaBackend::one_launch(const MlaAttentionArgs& a) const {
  return rows_a_launch(a.dims.heads, a.rows.max_rows, splits_bound(a.max_keys)) >= a.rows.max_rows;
}

size_t CudaBackend::hopper_scratch(const MlaDims& d, int max_rows, int max_keys) const {
  return parts_scratch(d.heads, max_rows, max_keys);
}

void CudaBackend::launch_hopper(const MlaAttentionArgs& a, const std::function<void(const MlaParts&)>& then) {
  const int rows = a.rows.max_rows, splits = splits_bound(a.max_keys), part = rows_a_launch(a.dims.heads, rows, splits);
  for (int first = 0; first < rows; first += part) {
    HopperParams p{};
    p.parts.first_row = first;
    p.parts.rows = std::min(part, rows - first);
    p.parts.head_blocks = head_blocks_of(a.dims.heads);
    const size_t units = static_cast<size_t>(splits) * p.parts.rows * p.parts.head_blocks;
    p.parts.sums = static_cast<float*>(a.scratch);
    p.parts.norms = reinterpret_cast<float2*>(p.parts.sums + units * kPartHeads * kPartRank);
    p.parts.depths = a.rows.depths;
    p.parts.state = a.state;
    p.q_lat = static_cast<const __nv_bfloat16*>(a.q_lat);
    p.q_rope = static_cast<const __nv_bfloat16*>(a.q_rope);
    p.latent = static_cast<const __nv_bfloat16*>(a.cache.latent);
    p.k_rope = static_cast<const __nv_bfloat16*>(a.cache.k_rope);
    p.path = a.rows.path;
    p.path_stride = a.rows.path_stride;
    p.scale_log2 = a.scale * 1.4426950408889634f;
    p.heads = a.dims.heads;
    p.splits = splits;
    const size_t shared = sizeof(HopperShared);
    reserve_shared(reinterpret_cast<const void*>(hopper_attention_kernel), "mla_attention_bf16", shared);
    const int blocks = std::min(splits * p.parts.rows * p.parts.head_blocks, device_shape_.multiprocessors);
    launch("mla_attention_bf16", hopper_attention_kernel, dim3(blocks), kHopperThreads, shared, p);
    ++(*counting_)["mla_attention_bf16_hopper"];
    then(p.parts);
  }
}

void CudaBackend::attention_on_hopper(const MlaAttentionArgs& a) {
  launch_hopper(a, [&](const MlaParts& parts) {
    launch("mla_fold", fold_kernel, dim3(a.dims.heads, parts.rows), kFoldThreads, 0, parts,
           static_cast<__nv_bfloat16*>(a.o_lat), a.dims.heads);
  });
}

}  // namespace kdtree
