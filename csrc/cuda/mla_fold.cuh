// From the splits of a row's keys to its attention: weights exp2(a split's greatest score - the greatest of all), splits ascending.
#pragma once
#include <cuda_fp16.h>

#include "device.cuh"
#include "mla_mma.cuh"
#include "mla_plan.h"

namespace kdtree {
namespace cuda {

// What attention leaves of every (split, row, 64 heads): sums of weights times latents around the split's greatest score, and for the
// split's even and odd chunks (mla_hopper.cuh) the greatest score so far (times scale * log2(e)) and the sum of weights around it. The later of the two
// is the split's.
//
// Sums are f16, a power of two for each head and 128 columns bringing their greatest to 2^14 .. 2^15: 11 bits of each, down to 2^-28 of the
// greatest. They halve what goes out and back, and their rounding is an eighth of that of the bf16 they are folded into. A head's lie by
// octets, eight columns together as a thread of attention holds them: four pairs 8 columns apart.
struct MlaParts {
  uint4* sums;    // [splits, rows, head_blocks, 64 heads, 64 octets]
  float2* norms;  // [splits, rows, head_blocks, 2, 64 heads]
  float* scales;  // [splits, rows, head_blocks, 4 times 128 columns, 64 heads]: what the sums are to be multiplied by
  int first_row, rows;  // of the step: a step of many rows is taken a part at a time
  int head_blocks;
  int splits;  // that the arrays have room for
  const int32_t* depths;
  const StepState* state;

  __device__ size_t unit(int split, int row, int head) const {
    return (static_cast<size_t>(split) * rows + row - first_row) * head_blocks + head / kPartHeads;
  }
};

constexpr int kOctets = kPartRank / 8;  // of a head
constexpr int kOctetStep = 8;           // columns from a pair of an octet to the next

__device__ __forceinline__ int octet_column(int octet) { return octet / 4 * 32 + octet % 4 * 2; }

// What brings `most` to 2^14 .. 2^15, and its inverse. Both are finite and not 0 whatever `most` is.
__device__ __forceinline__ float2 half_scale(float most) {
  const uint32_t exponent = max(15u, __float_as_uint(most) >> 23);
  return make_float2(__uint_as_float((268 - exponent) << 23), __uint_as_float((exponent - 14) << 23));
}

// A head's factors for its splits, for each of its 128 columns.
using FoldWeights = float[kPartScales][kMaxSplits];

// By one warp: the factors of each of a row's splits, the division by the sum of weights and the scale included. All there might be is
// fetched before anything is known of the row.
class FoldNorms {
 public:
  __device__ __forceinline__ void fetch(const MlaParts& p, int row, int head) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int split = threadIdx.x % kWarp + i * kWarp;
      if (split >= p.splits) continue;
      const size_t unit = p.unit(split, row, head);
      const float2* norm = p.norms + unit * 2 * kPartHeads + head % kPartHeads;
      const float* scale = p.scales + unit * kPartScales * kPartHeads + head % kPartHeads;
      even_[i] = norm[0], odd_[i] = norm[kPartHeads];
#pragma unroll
      for (int block = 0; block < kPartScales; ++block) scale_[i][block] = scale[block * kPartHeads];
    }
  }
  __device__ __forceinline__ void weigh(int splits, FoldWeights& weight) const {
    const int lane = threadIdx.x % kWarp;
    float top[kEach], sum[kEach], greatest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      top[i] = -INFINITY, sum[i] = 0.f;
      if (lane + i * kWarp < splits) {
        top[i] = fmaxf(even_[i].x, odd_[i].x);
        sum[i] = __fadd_rn(__fmul_rn(even_[i].y, exp2f(__fsub_rn(even_[i].x, top[i]))),
                           __fmul_rn(odd_[i].y, exp2f(__fsub_rn(odd_[i].x, top[i]))));
      }
      greatest = fmaxf(greatest, top[i]);
    }
    greatest = warp_max(greatest);
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      top[i] = exp2f(__fsub_rn(top[i], greatest));
      total = __fmaf_rn(sum[i], top[i], total);
    }
    total = warp_sum(total);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int split = lane + i * kWarp;
      if (split >= splits) continue;
      const float share = __fdiv_rn(top[i], total);
#pragma unroll
      for (int block = 0; block < kPartScales; ++block) weight[block][split] = __fmul_rn(share, scale_[i][block]);
    }
  }

 private:
  static constexpr int kEach = (kMaxSplits + kWarp - 1) / kWarp;  // splits of a lane
  float2 even_[kEach], odd_[kEach];
  float scale_[kEach][kPartScales];
};

// An octet of a head. Its first AHEAD splits are fetched before anything is known of the row, so that they come while the weights are formed.
template <int AHEAD>
class OctetFold {
 public:
  __device__ __forceinline__ void fetch(const MlaParts& p, int row, int head, int octet) {
    from_ = first(p, row, head, octet);
    block_ = octet / (kOctets / kPartScales);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < p.splits) part_[i] = from_[i * stride(p)];
    }
  }
  // Pair i of the octet in o[i].
  __device__ __forceinline__ void finish(const MlaParts& p, int splits, const FoldWeights& weight, float2 (&o)[4]) const {
    begin(o);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < splits) add(o, part_[i], weight[block_][i]);
    }
#pragma unroll 8
    for (int i = AHEAD; i < splits; ++i) add(o, from_[i * stride(p)], weight[block_][i]);
  }

  // The same by way of shared memory, `there`, a place of this thread for each of the AHEAD splits, STEP from one to the next. Loads into
  // registers end all together for a warp that uses one of them, so that its weights would have to wait for the sums.
  __device__ __forceinline__ void find(const MlaParts& p, int row, int head, int octet) {
    from_ = first(p, row, head, octet);
    block_ = octet / (kOctets / kPartScales);
    asm volatile("" : "+l"(from_));  // here, while there is time
  }
  template <int STEP>
  __device__ __forceinline__ void stage(const MlaParts& p, uint32_t there) {
    const uint4* from = from_;
    const size_t step = stride(p);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < p.splits) fetch16(there + i * STEP * sizeof(uint4), from);
      from += step;
    }
  }
  template <int STEP>
  __device__ __forceinline__ void finish_staged(const MlaParts& p, int splits, const FoldWeights& weight, const uint4* there,
                                                float2 (&o)[4]) const {
    begin(o);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < splits) add(o, there[i * STEP], weight[block_][i]);
    }
#pragma unroll 8
    for (int i = AHEAD; i < splits; ++i) add(o, from_[i * stride(p)], weight[block_][i]);
  }

 private:
  static __device__ __forceinline__ const uint4* first(const MlaParts& p, int row, int head, int octet) {
    return p.sums + (p.unit(0, row, head) * kPartHeads + head % kPartHeads) * kOctets + octet;
  }
  static __device__ __forceinline__ void begin(float2 (&o)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] = make_float2(0.f, 0.f);
  }
  static __device__ __forceinline__ size_t stride(const MlaParts& p) {
    return static_cast<size_t>(p.rows) * p.head_blocks * kPartHeads * kOctets;
  }
  static __device__ __forceinline__ void add(float2 (&o)[4], const uint4& v, float w) {
    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      o[i].x = __fmaf_rn(pair.x, w, o[i].x), o[i].y = __fmaf_rn(pair.y, w, o[i].y);
    }
  }
  const uint4* from_;
  int block_;
  uint4 part_[AHEAD];
};

}  // namespace cuda
}  // namespace kdtree
