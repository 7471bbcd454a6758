// A row normed by a warp for each of the segments of K, which its registers hold from the squares to the rounded values.
#pragma once
#include "stream.cuh"

namespace kdtree {
namespace cuda {

// r(x * 1/rms(x) * w), four elements a lane at a time, in the multiplication's order: to(element, them). The bits of square_rows,
// inverse_rows and stage_normed_rows with segments of whole units of int4. Holds w, which no launch changes, from before the wait.
// For rows of up to MOST values, by the first kSegments warps of a block.
template <int MOST>
struct RowNorm {
  static constexpr int kFours = MOST / kSegments / (4 * kWarp);  // of a row's segment that a lane has
  static_assert(MOST % (kSegments * kUnitK<WeightKind::kInt4>) == 0, "no segment is longer than others by a unit");
  float4 w[kFours];
  int first, end, k;  // the lane's elements: first, first + 128, ... below end

  __device__ __forceinline__ RowNorm(const float* norm_w, int length) : k(length) {
    constexpr int UNIT = kUnitK<WeightKind::kInt4>;
    const int warp = threadIdx.x / kWarp, units = (k + UNIT - 1) / UNIT;
    first = segment_begin(warp, units) * UNIT + threadIdx.x % kWarp * 4, end = segment_begin(warp + 1, units) * UNIT;
#pragma unroll
    for (int i = 0; i < kFours; ++i) w[i] = there(i) ? __ldg(reinterpret_cast<const float4*>(norm_w + at(i))) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __device__ __forceinline__ int at(int i) const { return first + i * 4 * kWarp; }
  __device__ __forceinline__ bool there(int i) const { return at(i) < end && at(i) < k; }

  template <typename To>
  __device__ __forceinline__ void operator()(const float* x, float eps, float* squares, const To& to) const {
    const bool odd = threadIdx.x % 2 != 0;
    float4 v[kFours];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kFours; ++i) v[i] = there(i) ? *reinterpret_cast<const float4*>(x + at(i)) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      sum = __fmaf_rn(v[i].x, v[i].x, sum), sum = __fmaf_rn(v[i].y, v[i].y, sum);
      sum = __fmaf_rn(v[i].z, v[i].z, sum), sum = __fmaf_rn(v[i].w, v[i].w, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) squares[threadIdx.x / kWarp] = sum;
    asm volatile("bar.sync 1, %0;" ::"n"(kSegments * kWarp) : "memory");
    float all = squares[0];
#pragma unroll
    for (int s = 1; s < kSegments; ++s) all = __fadd_rn(all, squares[s]);
    const float inverse = inverse_rms(all, k, eps);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const uint32_t low = pack_bf16(__fmul_rn(__fmul_rn(v[i].x, inverse), w[i].x), __fmul_rn(__fmul_rn(v[i].y, inverse), w[i].y));
      const uint32_t high = pack_bf16(__fmul_rn(__fmul_rn(v[i].z, inverse), w[i].z), __fmul_rn(__fmul_rn(v[i].w, inverse), w[i].w));
      // Of eight elements a lane has 0 to 3 and the next one 4 to 7; the order pairs 0 with 4 and so on.
      const uint32_t other = __shfl_xor_sync(kAll, odd ? low : high, 1), mine = odd ? high : low;
      const uint32_t a = odd ? other : mine, b = odd ? mine : other;
      if (at(i) < end) to(at(i), make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)));
    }
  }
};

}  // namespace cuda
}  // namespace kdtree
