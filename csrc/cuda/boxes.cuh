// A unit's products from a box of weights (box_copy.cuh) as linear has them.
//
// A unit's products are multiply_unit's (stream.cuh) in every bit; a segment's sum is whole_sum's.
#pragma once
#include "../stream_plan.h"
#include "device.cuh"
#include "nibbles.cuh"
#include "ptx.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A segment's sum from what its units gave.
template <WeightKind KIND>
__device__ __forceinline__ float whole_sum(float v) {
  return KIND == WeightKind::kInt4 ? __fmul_rn(v, 4.f) : v;
}

// Where a lane's weights stand in a box of 128 bytes a row (unit 0; unit 1 is at ^ 64) and in one of 64.
struct BoxOffsets {
  uint32_t wide, narrow;
};
template <WeightKind KIND>
__device__ __forceinline__ BoxOffsets box_offsets(int lane) {
  // int4: its row address of ldmatrix, groups 0 and 1, ^ 32 for groups 2 and 3. bf16: piece lane%4 of row lane/4.
  const int row = KIND == WeightKind::kInt4 ? lane & 15 : lane >> 2, piece = KIND == WeightKind::kInt4 ? lane >> 4 : lane & 3;
  return {static_cast<uint32_t>(row * 128 + (piece ^ (row & 7)) * 16), static_cast<uint32_t>(row * 64 + (piece ^ (row >> 1 & 3)) * 16)};
}

// One unit of MT tiles, whose boxes follow each other, the first or the second of a box: at the lane's place in the first tile's, of bf16 also at
// the row eight below. scale (int4): the box's eight groups of a tile's row lane/4 and of the one eight below. b(nt, part): the lane's sixteen bytes
// of activations of the part-th 32 elements of the unit, of bf16 of its block, in K's order or (ORDERED) the nibbles'. acc: of VALUES 4 a
// fragment of each tile of eight columns, of 2 its even columns.
template <WeightKind KIND, bool ORDERED, int MT, int NT, int VALUES, typename Activations>
__device__ __forceinline__ void multiply_box_unit(float (&acc)[MT][NT][VALUES], uint32_t at, uint32_t at_below, const uint4 (&scale)[MT][2],
                                                  bool second, const Activations& b) {
  if constexpr (KIND == WeightKind::kInt4) {
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
    uint32_t scales[MT][2][2];
#pragma unroll
    for (int i = 0; i < MT * 2; ++i) {
      const uint4& from = scale[i / 2][i % 2];
      scales[i / 2][i % 2][0] = second ? from.z : from.x, scales[i / 2][i % 2][1] = second ? from.w : from.y;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[MT][4];  // rows 0-7 and 8-15 of one group, then of the next
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) load_matrices(words[mt], (at ^ (half * 32)) + mt * stream::kBoxWeightBytes);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float sum[MT][NT][4];
        uint4 x[NT];
        uint32_t later[MT][4];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) x[nt] = ORDERED ? b(nt, 2 * half + j) : in_order(b(nt, 2 * half + j));
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          const uint32_t low = words[mt][2 * j], high = words[mt][2 * j + 1];
          uint32_t first[4];
          quarter_fragments(first, later[mt], low, high);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply_add(sum[mt][nt], first, x[nt].x, x[nt].y, zero);
        }
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply_add(sum[mt][nt], later[mt], x[nt].z, x[nt].w, sum[mt][nt]);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          const float s[2] = {__uint_as_float(j == 0 ? scales[mt][0][half] << 16 : scales[mt][0][half] & 0xffff0000u),
                              __uint_as_float(j == 0 ? scales[mt][1][half] << 16 : scales[mt][1][half] & 0xffff0000u)};
#pragma unroll
          for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
              const int from = VALUES == 2 ? 2 * i : i;
              acc[mt][nt][i] = __fmaf_rn(sum[mt][nt][from], s[from / 2], acc[mt][nt][i]);
            }
        }
      }
    }
  } else {
    // Of a lane's eight elements 0, 1, 4, 5 are multiplied first, then 2, 3, 6, 7: in the nibbles' order those of the first two words.
    uint32_t first[MT][4], later[MT][4];
#pragma unroll
    for (int i = 0; i < MT * 2; ++i) {
      const uint4 v = load_shared16((i % 2 == 0 ? at : at_below) + i / 2 * stream::kBoxWeightBytes), w = ORDERED ? in_order(v) : make_uint4(v.x, v.z, v.y, v.w);
      first[i / 2][i % 2] = w.x, first[i / 2][i % 2 + 2] = w.y, later[i / 2][i % 2] = w.z, later[i / 2][i % 2 + 2] = w.w;
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint4 v = b(nt, second), x = ORDERED ? v : make_uint4(v.x, v.z, v.y, v.w);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        multiply_add(acc[mt][nt], first[mt], x.x, x.y, acc[mt][nt]);
        multiply_add(acc[mt][nt], later[mt], x.z, x.w, acc[mt][nt]);
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
