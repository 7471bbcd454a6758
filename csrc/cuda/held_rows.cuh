// The norm of a few rows as linear stages them: a warp reads its pieces once and holds them from the sum of squares to the rounded value.
#pragma once
#include "staged_rows.cuh"

namespace kdtree {
namespace cuda {

// A block has kSegments/CL segments of K of every row; a task is one of a row, and a warp has the tasks warp, warp + WARPS, ..., at most TASKS, all of
// one segment, of at most PIECES * 128 elements. Of a piece lane l holds elements 4l .. 4l + 3.
// Order: square_rows and inverse_rows (staged_rows.cuh), in every bit; what is staged are stage_normed_rows' values in K's order, in blocks of 64 elements
// of all rows as the bulk copy engine would bring them, 128-byte rows swizzled.
template <int TASKS, int PIECES, int CL, int WARPS>
struct HeldRows {
  static constexpr int SPC = kSegments / CL;
  static_assert(WARPS % SPC == 0, "a warp's tasks are of one segment");
  float4 weight[PIECES];
  int at, left, k;  // the lane's first element, elements from there to the segment's end

  // What no other launch writes; the segment is [begin, end) of K, in whole units.
  __device__ __forceinline__ void weights(const float* norm_w, int k_, int begin, int end) {
    k = k_, at = begin + threadIdx.x % kWarp * 4, left = end - at;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) weight[i] = there(i) ? __ldg(reinterpret_cast<const float4*>(norm_w + at + i * 128)) : float4{};
  }
  __device__ __forceinline__ bool there(int piece) const { return piece * 128 < left && at + piece * 128 < k; }

  // staged: the warp's segment, whose first block of BLOCK bytes begins at element k_first. squares: [row][SPC], inverse: [row]. Ends without a barrier.
  template <int BLOCK>
  __device__ __forceinline__ void stage(uint8_t* staged, int k_first, float* squares, float* inverse, const float* x, int ldx, int rows,
                                        float eps) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    float4 v[TASKS][PIECES];
#pragma unroll
    for (int t = 0; t < TASKS; ++t) {
      const int row = (warp + t * WARPS) / SPC;
      const float* const from = x + (static_cast<size_t>(row) * ldx + at);
#pragma unroll
      for (int i = 0; i < PIECES; ++i) v[t][i] = row < rows && there(i) ? *reinterpret_cast<const float4*>(from + i * 128) : float4{};
    }
#pragma unroll
    for (int t = 0; t < TASKS; ++t) {
      float ss = 0.f;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        ss = __fmaf_rn(v[t][i].x, v[t][i].x, ss), ss = __fmaf_rn(v[t][i].y, v[t][i].y, ss);
        ss = __fmaf_rn(v[t][i].z, v[t][i].z, ss), ss = __fmaf_rn(v[t][i].w, v[t][i].w, ss);
      }
      ss = warp_sum(ss);
      if (lane == 0 && warp + t * WARPS < rows * SPC) squares[warp + t * WARPS] = ss;
    }
    inverse_rows<CL, SPC>(inverse, squares, rows, k, eps);
#pragma unroll
    for (int t = 0; t < TASKS; ++t) {
      const int row = (warp + t * WARPS) / SPC;
      if (row >= rows) break;
      const float f = inverse[row];
      const int from = at - k_first, swizzled = (from / 8 % 8 ^ row % 8) * 16 + from % 8 * 2;
      uint8_t* const to = staged + from / stream::kBlock * BLOCK + row * stream::kBlockBytes + swizzled;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        const float4 a = v[t][i], w = weight[i];
        const uint32_t low = pack_bf16(__fmul_rn(__fmul_rn(a.x, f), w.x), __fmul_rn(__fmul_rn(a.y, f), w.y));
        const uint32_t high = pack_bf16(__fmul_rn(__fmul_rn(a.z, f), w.z), __fmul_rn(__fmul_rn(a.w, f), w.w));
        if (i * 128 < left) *reinterpret_cast<uint2*>(to + i * (2 * BLOCK)) = make_uint2(low, high);
      }
    }
  }
};

}  // namespace cuda
}  // namespace kdtree
