// Rows of activations put into shared memory as bf16 in the order in which they are multiplied, by all threads of a block, normed on the way or not.
#pragma once
#include "../stream_plan.h"
#include "cluster.cuh"
#include "device.cuh"
#include "nibbles.cuh"
#include "ptx.cuh"

namespace kdtree {
namespace cuda {

using stream::kSegments;
using stream::segment_begin;

// Sums of squares of `rows` rows of x over this block's segments, sq[row * SPC + local segment]: a warp a sum, lane l adds elements
// 4l..4l+3 of every 128, ascending; butterfly.
template <int SPC>
__device__ __forceinline__ void square_rows(float* sq, const float* x, int ldx, int rows, int k, int granule, int rank) {
  constexpr int SUMS = 2, AHEAD = 8;  // of a warp at a time, and pieces of each: all asked for before the first is there
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp, units = (k + granule - 1) / granule;
  for (int first = threadIdx.x / kWarp; first < rows * SPC; first += SUMS * warps) {
    const float* p[SUMS];
    int left[SUMS];  // elements from the lane's next one to the segment's end
    float ss[SUMS];
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {
      const int task = first + j * warps, s = rank * SPC + task % SPC, begin = segment_begin(s, units) * granule;
      p[j] = x + static_cast<size_t>(task / SPC) * ldx + begin + 4 * lane;
      left[j] = task < rows * SPC ? min(segment_begin(s + 1, units) * granule, k) - begin - 4 * lane : 0;
      ss[j] = 0.f;
    }
    for (int at = 0; at < max(left[0], left[SUMS - 1]); at += AHEAD * 4 * kWarp) {
      float4 v[SUMS][AHEAD];
#pragma unroll
      for (int j = 0; j < SUMS; ++j)
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int place = at + i * 4 * kWarp;
          v[j][i] = place < left[j] ? *reinterpret_cast<const float4*>(p[j] + place) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
#pragma unroll
      for (int j = 0; j < SUMS; ++j)
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {  // past the end zeros, which leave a sum of squares as it is
          ss[j] = __fmaf_rn(v[j][i].x, v[j][i].x, ss[j]), ss[j] = __fmaf_rn(v[j][i].y, v[j][i].y, ss[j]);
          ss[j] = __fmaf_rn(v[j][i].z, v[j][i].z, ss[j]), ss[j] = __fmaf_rn(v[j][i].w, v[j][i].w, ss[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {
      ss[j] = warp_sum(ss[j]);
      if (lane == 0 && first + j * warps < rows * SPC) sq[first + j * warps] = ss[j];
    }
  }
}

// 1/rms of the rows from the cluster's sums of squares, segments ascending. Ends with a barrier of the block.
template <int CL, int SPC>
__device__ __forceinline__ void inverse_rows(float* inverse, const float* sq, int rows, int k, float eps) {
  cluster_arrive<CL>();
  cluster_wait<CL>();
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    float part[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) part[s] = load_cluster4<CL>(shared_address(sq + row * SPC + s % SPC), s / SPC);
#pragma unroll
    for (int s = 1; s < kSegments; ++s) part[0] = __fadd_rn(part[0], part[s]);
    inverse[row] = inverse_rms(part[0], k, eps);
  }
  __syncthreads();
}

// A thread's first piece of eight elements of rows that are `length` long, and how many rows and pieces further the next one is.
struct FirstPiece {
  int row, at, rows_on, pieces_on;
  // Divides: before the wait for the launch before, where what follows that is waited for.
  __device__ __forceinline__ explicit FirstPiece(int length) {
    const int pieces = max(length / 8, 1), threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    rows_on = threads / pieces, pieces_on = threads - rows_on * pieces, row = thread / pieces, at = thread - row * pieces;
  }
  // Never negative: who branches on it has found all of them.
  __device__ __forceinline__ int any_sign() const { return row | at | rows_on | pieces_on; }
};

// Puts rows of x over [k_begin, k_begin + length) into shared memory as bf16 in the multiplication's order; beyond `rows` and k are zeros.
// AHEAD: pieces of eight elements that a thread has in flight. FLIPS: of every other row the halves of each 128 bytes are exchanged.
// piece(row, k): one of the pieces. between(): called once, behind the first loads.
template <int AHEAD, bool FLIPS, typename Piece, typename Between>
__device__ __forceinline__ void stage_pieces(uint8_t* staged, int stride, int rows, int columns, int k, int k_begin, int length,
                                             const FirstPiece& first, const Piece& piece, const Between& between) {
  const int pieces = max(length / 8, 1), rows_on = first.rows_on, pieces_on = first.pieces_on;
  if (length == 0) columns = 0;
  bool begun = false;
  int row = first.row, at = first.at;
  while (row < columns || !begun) {
    uint4 v[AHEAD];
    int to[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int from = k_begin + at * 8;
      v[a] = row < rows && from < k ? piece(row, from) : make_uint4(0, 0, 0, 0);
      to[a] = row < columns ? FLIPS ? (row * stride + at * 16) ^ row % 2 * 64 : row * stride + at * 16 : -1;
      row += rows_on, at += pieces_on;
      if (at >= pieces) at -= pieces, ++row;
    }
    if (!begun) between();
    begun = true;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (to[a] >= 0) *reinterpret_cast<uint4*>(staged + to[a]) = in_order(v[a]);
    }
  }
}

// x bf16, taken as it is. A row begins fewer than 2^31 elements behind the first.
template <bool FLIPS = false, typename Between>
__device__ __forceinline__ void stage_rows(uint8_t* staged, int stride, const uint16_t* x, int ldx, int rows, int columns, int k,
                                           int k_begin, int length, const FirstPiece& first, const Between& between) {
  const auto piece = [&](int row, int at) { return *reinterpret_cast<const uint4*>(x + (row * ldx + at)); };
  if (columns * length <= 4 * 8 * static_cast<int>(blockDim.x)) {  // one row: half of the loads would have nothing to do
    stage_pieces<4, FLIPS>(staged, stride, rows, columns, k, k_begin, length, first, piece, between);
  } else {
    stage_pieces<8, FLIPS>(staged, stride, rows, columns, k, k_begin, length, first, piece, between);
  }
}

// x f32: r(x * inverse[row] * norm_w).
__device__ __forceinline__ void stage_normed_rows(uint8_t* staged, int stride, const float* x, int ldx, int rows, int columns, int k,
                                                  int k_begin, int length, const float* norm_w, const float* inverse) {
  stage_pieces<4, false>(staged, stride, rows, columns, k, k_begin, length, FirstPiece(length), [&](int row, int at) {
    const float4* p = reinterpret_cast<const float4*>(x + (row * ldx + at));
    const float4* g = reinterpret_cast<const float4*>(norm_w + at);
    const float4 lo = p[0], hi = p[1], gl = __ldg(g), gh = __ldg(g + 1);
    const float f = inverse[row];
    return make_uint4(pack_bf16(__fmul_rn(__fmul_rn(lo.x, f), gl.x), __fmul_rn(__fmul_rn(lo.y, f), gl.y)),
                      pack_bf16(__fmul_rn(__fmul_rn(lo.z, f), gl.z), __fmul_rn(__fmul_rn(lo.w, f), gl.w)),
                      pack_bf16(__fmul_rn(__fmul_rn(hi.x, f), gh.x), __fmul_rn(__fmul_rn(hi.y, f), gh.y)),
                      pack_bf16(__fmul_rn(__fmul_rn(hi.z, f), gh.z), __fmul_rn(__fmul_rn(hi.w, f), gh.w)));
  }, [] {});
}

}  // namespace cuda
}  // namespace kdtree
