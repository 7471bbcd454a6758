// From the splits of a row's keys to its attention: weights exp2(a split's greatest score - the greatest of all), splits ascending.
#pragma once
#include "device.cuh"
#include "mla_plan.h"

namespace kdtree {
namespace cuda {

// What attention leaves of every (split, row, 64 heads): sums of weights times latents around the split's greatest score, and for the
// split's even and odd chunks the greatest score so far (times scale * log2(e)) and the sum of weights around it. The later of the two
// is the split's.
struct MlaParts {
  float* sums;    // [splits, rows, head_blocks, 64 heads, 512]
  float2* norms;  // [splits, rows, head_blocks, 2, 64 heads]
  int first_row, rows;  // of the step: a step of many rows is taken a part at a time
  int head_blocks;
  const int32_t* depths;
  const StepState* state;

  __device__ size_t unit(int split, int row, int head) const {
    return (static_cast<size_t>(split) * rows + row - first_row) * head_blocks + head / kPartHeads;
  }
};

// By one warp: the factor of each of the row's splits, the division by the sum of weights included.
__device__ __forceinline__ void fold_weights(const MlaParts& p, int row, int head, float* weight) {
  const int lane = threadIdx.x % kWarp, splits = splits_of(p.state->kv_len + p.depths[row] + 1);
  float top[kMaxSplits / kWarp], sum[kMaxSplits / kWarp], greatest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kMaxSplits / kWarp; ++i) {
    const int split = lane + i * kWarp;
    top[i] = -INFINITY, sum[i] = 0.f;
    if (split < splits) {
      const float2* norm = p.norms + p.unit(split, row, head) * 2 * kPartHeads + head % kPartHeads;
      const float2 even = norm[0], odd = norm[kPartHeads];
      top[i] = fmaxf(even.x, odd.x);
      sum[i] = __fadd_rn(__fmul_rn(even.y, exp2f(__fsub_rn(even.x, top[i]))), __fmul_rn(odd.y, exp2f(__fsub_rn(odd.x, top[i]))));
    }
    greatest = fmaxf(greatest, top[i]);
  }
  greatest = warp_max(greatest);
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxSplits / kWarp; ++i) {
    top[i] = exp2f(__fsub_rn(top[i], greatest));
    total = __fmaf_rn(sum[i], top[i], total);
  }
  total = warp_sum(total);
#pragma unroll
  for (int i = 0; i < kMaxSplits / kWarp; ++i) {
    if (lane + i * kWarp < splits) weight[lane + i * kWarp] = __fdiv_rn(top[i], total);
  }
}

// Four columns of a head.
__device__ __forceinline__ float4 fold(const MlaParts& p, int row, int head, int column, const float* weight) {
  const int splits = splits_of(p.state->kv_len + p.depths[row] + 1);
  const float* part = p.sums + (p.unit(0, row, head) * kPartHeads + head % kPartHeads) * kPartRank + column;
  const size_t stride = static_cast<size_t>(p.rows) * p.head_blocks * kPartHeads * kPartRank;
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
  for (int i = 0; i < splits; ++i) {
    const float4 v = *reinterpret_cast<const float4*>(part + i * stride);
    const float w = weight[i];
    o.x = __fmaf_rn(v.x, w, o.x), o.y = __fmaf_rn(v.y, w, o.y), o.z = __fmaf_rn(v.z, w, o.z), o.w = __fmaf_rn(v.w, w, o.w);
  }
  return o;
}

}  // namespace cuda
}  // namespace kdtree
