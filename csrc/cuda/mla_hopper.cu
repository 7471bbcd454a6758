// mla_attention for bf16 on Hopper: launches of mla_hopper.cuh, and the fold of its splits where o_lat itself is asked for.
#include "mla_hopper.cuh"

#include <algorithm>

#include "backend.h"
#include "tensor_map.h"

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

// Weights may be up to 2^8 before sums are brought to a greater maximum: bf16 and f32 lose nothing there.
constexpr float kSlackLog2 = 8.f;

constexpr int kFoldThreads = kOctets;
constexpr int kStagedSplits = 16;
constexpr size_t kFoldShared = 21504;  // of a block that stages: ten of them have what attention's one has
static_assert(kStagedSplits * kFoldThreads * sizeof(uint4) <= kFoldShared);

// o_lat of a head: an octet a thread. STAGED: the sums come into shared memory.
template <bool STAGED>
__global__ __launch_bounds__(kFoldThreads) void fold_kernel(const __grid_constant__ MlaParts p, __nv_bfloat16* o_lat, int heads) {
  extern __shared__ uint4 staged[];  // [kStagedSplits][kFoldThreads]
  __shared__ FoldWeights weight;
  const int row = p.first_row + static_cast<int>(blockIdx.y), head = blockIdx.x;
  const int octet = threadIdx.x;
  // What is older than attention, the kernel ahead, may be read while that runs.
  const int n_rows = __ldcg(&p.state->n_rows), splits = splits_of(__ldcg(&p.state->kv_len) + __ldcg(p.depths + row) + 1);
  OctetFold<STAGED ? kStagedSplits : 8> sums;
  uint32_t there = shared_address(staged + octet);
  if constexpr (STAGED) {
    sums.find(p, row, head, octet);
    asm volatile("" : "+r"(there));  // or each copy forms it anew
  }
  wait_for_previous();
  if (row >= n_rows) return;
  FoldNorms norms;
  if (threadIdx.x < kWarp) norms.fetch(p, row, head);
  if constexpr (STAGED) {
    sums.template stage<kFoldThreads>(p, there);
  } else {
    sums.fetch(p, row, head, octet);
  }
  if (threadIdx.x < kWarp) norms.weigh(splits, weight);
  if constexpr (STAGED) fetch_wait();
  __syncthreads();
  float2 v[4];
  if constexpr (STAGED) {
    sums.template finish_staged<kFoldThreads>(p, splits, weight, staged + octet, v);
  } else {
    sums.finish(p, splits, weight, v);
  }
  __nv_bfloat16* out = o_lat + (static_cast<size_t>(row) * heads + head) * kPartRank + octet_column(octet);
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<__nv_bfloat162*>(out + i * kOctetStep) = __floats2bfloat162_rn(v[i].x, v[i].y);
}

}  // namespace

bool CudaBackend::finds_wgmma() {
  bool found = false;
  KD_CUDA(cudaMemcpyFromSymbol(&found, has_wgmma, sizeof found));
  return found;
}

bool CudaBackend::one_launch(const MlaAttentionArgs& a) const {
  return rows_a_launch(a.dims.heads, a.rows.max_rows, splits_bound(a.max_keys), device_shape_.multiprocessors) >= a.rows.max_rows;
}

size_t CudaBackend::hopper_scratch(const MlaDims& d, int max_rows, int max_keys) const {
  return parts_scratch(d.heads, max_rows, max_keys);
}

void CudaBackend::launch_hopper(const MlaAttentionArgs& a, const std::function<void(const MlaParts&)>& then) {
  const int rows = a.rows.max_rows, splits = splits_bound(a.max_keys), sms = device_shape_.multiprocessors;
  const int part = rows_a_launch(a.dims.heads, rows, splits, sms);
  const auto heads = static_cast<uint64_t>(a.dims.heads), slots = static_cast<uint64_t>(a.cache.slots), all = static_cast<uint64_t>(rows);
  const CUtensorMap q_lat = bf16_map(a.q_lat, {kHopperRank, heads, all}, kHopperHeads);
  const CUtensorMap q_rope = bf16_map(a.q_rope, {kHopperRope, heads, all}, kHopperHeads);
  const CUtensorMap latents = bf16_map(a.cache.latent, {kHopperRank, slots}, kKeyChunk);
  const CUtensorMap k_ropes = bf16_map(a.cache.k_rope, {kHopperRope, slots}, kKeyChunk);
  for (int first = 0; first < rows; first += part) {
    HopperParams p{};
    p.parts.first_row = first;
    p.parts.rows = std::min(part, rows - first);
    p.parts.head_blocks = head_blocks_of(a.dims.heads);
    const size_t units = static_cast<size_t>(splits) * p.parts.rows * p.parts.head_blocks;
    const int most = splits * p.parts.rows * p.parts.head_blocks, blocks = std::min(most * column_parts(most, a.max_keys, sms), sms);
    p.parts.splits = splits;
    p.parts.sums = static_cast<uint4*>(a.scratch);
    p.parts.norms = reinterpret_cast<float2*>(p.parts.sums + units * kPartHeads * kOctets);
    p.parts.scales = reinterpret_cast<float*>(p.parts.norms + units * 2 * kPartHeads);
    p.parts.depths = a.rows.depths;
    p.parts.state = a.state;
    p.q_lat = q_lat, p.q_rope = q_rope, p.latents = latents, p.k_ropes = k_ropes;
    for (int i = 0; i < 2; ++i) {
      p.some_latents[i] = bf16_map(a.cache.latent, {kHopperRank, slots}, i == 0 ? kFewSlots : kMoreSlots);
      p.some_k_ropes[i] = bf16_map(a.cache.k_rope, {kHopperRope, slots}, i == 0 ? kFewSlots : kMoreSlots);
    }
    p.latent = static_cast<const __nv_bfloat16*>(a.cache.latent);
    p.k_rope = static_cast<const __nv_bfloat16*>(a.cache.k_rope);
    p.path = a.rows.path;
    p.path_stride = a.rows.path_stride;
    p.scale_log2 = a.scale * 1.4426950408889634f;
    p.slack = kSlackLog2 / p.scale_log2;
    p.heads = a.dims.heads;
    p.splits = splits;
    p.multiprocessors = sms;
    p.early = keys_settled_;
    const size_t shared = sizeof(HopperShared);
    reserve_shared(reinterpret_cast<const void*>(hopper_attention_kernel), "mla_attention_bf16", shared);
    launch("mla_attention_bf16", hopper_attention_kernel, dim3(blocks), kHopperThreads, shared, p);
    ++(*counting_)["mla_attention_bf16_hopper"];
    then(p.parts);
    keys_settled_ = true;
  }
}

void CudaBackend::attention_on_hopper(const MlaAttentionArgs& a) {
  launch_hopper(a, [&](const MlaParts& parts) {
    // Its blocks are let in as attention's leave, and the first multiprocessors to be free get all that fit. Of few rows with many splits fewer
    // had better fit: 8 rows of 4096 keys 15.9 for 17.2 us, where 64 rows lose 3 %.
    // Eight rows of 1024 keys are 0.2 us faster without the way by shared memory, of which as much is asked for.
    const bool few = parts.rows <= 16, staged = few && (parts.rows > 8 || parts.splits > 8);
    launch("mla_fold", staged ? fold_kernel<true> : fold_kernel<false>, dim3(a.dims.heads, parts.rows), kFoldThreads, few ? kFoldShared : 0,
           parts, static_cast<__nv_bfloat16*>(a.o_lat), a.dims.heads);
  });
}

}  // namespace kdtree
