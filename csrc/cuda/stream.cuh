// Streaming of weights through tensor cores: the core of linear and moe for bf16 activations.
//
// A tile is 16 weight rows. K is cut into kSegments segments of whole granules; a warp streams one segment of MT tiles through its own
// ring in shared memory (cp.async, no block barrier) in units of 16 rows x 64 bytes: 128 int4 values or 32 bf16 values a row, as they
// lie in the file. Weights are the 16-row operand of mma.m16n8k16 and activations its 8-column one, so up to 8 rows of
// activations cost one tile.
// Reduction order of an output, a function of K and the kind alone, whatever the number of rows, outputs, warps, blocks or clusters:
//   int4: a group's 32 products of q and x are summed by two mma from zero, then acc = fma(sum, scale, acc), groups ascending;
//   bf16: acc = mma(mma(acc)) by 32 elements, ascending;
//   then the segments' sums are added in ascending order.
// q is exact in bf16, so the weight is the real number q * scale. Beyond K both operands are zeros.
#pragma once
#include <type_traits>

#include "../stream_plan.h"
#include "device.cuh"
#include "nibbles.cuh"
#include "ptx.cuh"

namespace kdtree {
namespace cuda {

using stream::byte_at;
using stream::kColumns;
using stream::kRingBytes;
using stream::kSegments;
using stream::kTileRows;
using stream::segment_begin;
constexpr int kUnitBytes = 1024;  // 16 rows x 64 bytes; the scales of a tile's four groups follow

// Elements of K in a unit.
template <WeightKind KIND>
constexpr int kUnitK = stream::unit_of(KIND);

// Blocks that registers must leave room for on a multiprocessor: of Hopper's shared memory two blocks get enough, elsewhere one does.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define KD_RESIDENT(blocks) ((blocks) > 1 ? 1 : (blocks))
#else
#define KD_RESIDENT(blocks) (blocks)
#endif

// Where a warp's copies come from: its lane's places in the units of one tile's segment.
struct TileSource {
  const uint8_t* weights;  // row lane/4 of the tile, 16-byte piece lane%4 of its unit
  const uint8_t* scales;   // int4: row lane%16
  uint32_t eight_rows;     // bytes from a row to the one eight below
  int left;                // pieces of the row from this one on
};

// Rows past the last are the last. k_begin is a multiple of the unit.
template <WeightKind KIND>
__device__ __forceinline__ TileSource tile_source(const void* data, const uint16_t* scale, size_t first, int tile, int n, int k,
                                                  int k_begin, int lane) {
  const int pieces = KIND == WeightKind::kInt4 ? (k + 31) / 32 : k / 8;
  const int piece = KIND == WeightKind::kInt4 ? k_begin / 32 : k_begin / 8;
  const int row = min(tile * kTileRows + lane / 4, n - 1), below = min(tile * kTileRows + lane / 4 + 8, n - 1);
  TileSource s;
  s.weights = static_cast<const uint8_t*>(data) + byte_at(first, row, pieces, piece + lane % 4, 16);
  s.eight_rows = static_cast<uint32_t>(below - row) * pieces * 16;
  s.scales = nullptr;
  if (KIND == WeightKind::kInt4) {
    const int r = min(tile * kTileRows + lane % kTileRows, n - 1);
    s.scales = reinterpret_cast<const uint8_t*>(scale) + byte_at(first, r, pieces, piece, sizeof *scale);
  }
  s.left = pieces - piece - lane % 4;
  return s;
}

// Row r of a unit is half of the 128-byte line r/2; its 16-byte piece c stands at c ^ (r/2 mod 4), so that eight rows at one piece, and two
// rows at all pieces, lie in all banks.
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
  return static_cast<uint32_t>((row >> 1) * 128 + (row & 1) * 64 + ((piece ^ (row >> 1)) & 3) * 16);
}

// A lane's part in copying units into a ring slot. whole: a row's int4 groups are a multiple of four, so that four scales are eight aligned
// bytes and no unit reaches beyond the row.
template <WeightKind KIND>
__device__ __forceinline__ void copy_unit(uint32_t slot, TileSource& from, uint32_t offset, int lane, bool whole) {
  if constexpr (KIND == WeightKind::kInt4) {
    const uint32_t to = slot + kUnitBytes + lane * 8;
    if (whole) {
      copy16(slot + offset, from.weights, 16);
      copy16(slot + offset + 512, from.weights + from.eight_rows, 16);
      if (lane < kTileRows) copy8(to, from.scales);
      from.weights += 64, from.scales += 8;
      return;
    }
    if (lane < kTileRows) {
      uint32_t pair[2] = {0, 0};
      const uint16_t* p = reinterpret_cast<const uint16_t*>(from.scales);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (from.left + lane % 4 > j) pair[j / 2] |= static_cast<uint32_t>(__ldg(p + j)) << (j % 2 * 16);
      }
      asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(to), "r"(pair[0]), "r"(pair[1]) : "memory");
    }
    from.scales += 8;
  }
  const uint32_t there = from.left > 0 ? 16 : 0;
  copy16(slot + offset, from.weights, there);
  copy16(slot + offset + 512, from.weights + from.eight_rows, there);
  from.weights += 64;
  from.left -= 4;
}

// What a lane needs to read a unit back: offsets in a slot.
struct LaneOffsets {
  uint32_t matrix;  // int4: its row address of ldmatrix, groups 0 and 1; ^32 for groups 2 and 3
  uint32_t row;     // bf16: piece lane%4 of row lane/4; +512 for the row eight below
  uint32_t scale;   // int4: of row lane/4; +64 for the row eight below
  __device__ __forceinline__ explicit LaneOffsets(int lane)
      : matrix(piece_offset((lane & 7) + (lane >> 3 & 1) * 8, lane >> 4)),
        row(piece_offset(lane >> 2, lane & 3)),
        scale(kUnitBytes + (lane >> 2) * 8) {}
};

// One unit of MT tiles times NT tiles of activations. `b(nt, block)` gives a lane's sixteen bytes of activation row nt*8 + lane/4 in the
// block-th 32 elements of the unit. No branch stands between the tiles, so that their
// chains run side by side, at most MOST of them.
template <WeightKind KIND, int MT, int NT, int MOST, int ALL, typename Activations>
__device__ __forceinline__ void multiply_unit(float (&acc)[MT][ALL][4], uint32_t slot, const LaneOffsets& at, const Activations& b) {
  constexpr int CHAINS = NT * MT <= MOST ? NT : MOST / MT;  // tiles whose sums are formed side by side
  constexpr int HALVES = MT * NT <= MOST ? 2 : 1;  // of a unit that the compiler may interleave: more chains need no more company
  static_assert(NT % CHAINS == 0, "a whole number of batches of tiles");
  if constexpr (KIND == WeightKind::kInt4) {
    uint2 scale[MT][2];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      scale[mt][0] = load_shared8(slot + mt * kRingBytes + at.scale);
      scale[mt][1] = load_shared8(slot + mt * kRingBytes + at.scale + 64);
    }
#pragma unroll(HALVES)
    for (int half = 0; half < 2; ++half) {
      uint32_t words[MT][4];  // rows 0-7 and 8-15 of one group, then of the next
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) load_matrices(words[mt], slot + mt * kRingBytes + (at.matrix ^ (half * 32)));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t first[MT][4], second[MT][4];
        float s[MT][2];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          const uint32_t low = words[mt][2 * j], high = words[mt][2 * j + 1];
          first[mt][0] = nibble_pair(low), first[mt][1] = nibble_pair(high);
          first[mt][2] = nibble_pair(low >> 4), first[mt][3] = nibble_pair(high >> 4);
          second[mt][0] = nibble_pair(low >> 8), second[mt][1] = nibble_pair(high >> 8);
          second[mt][2] = nibble_pair(low >> 12), second[mt][3] = nibble_pair(high >> 12);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t pair = half == 0 ? scale[mt][r].x : scale[mt][r].y;
            s[mt][r] = __uint_as_float(j == 0 ? pair << 16 : pair & 0xffff0000u);
          }
        }
#pragma unroll
        for (int begin = 0; begin < NT; begin += CHAINS) {
          uint4 x[CHAINS];
          float sum[CHAINS][MT][4];
#pragma unroll
          for (int c = 0; c < CHAINS; ++c) {
            x[c] = b(begin + c, 2 * half + j);
            const float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) multiply_add(sum[c][mt], first[mt], x[c].x, x[c].y, zero);
          }
#pragma unroll
          for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) multiply_add(sum[c][mt], second[mt], x[c].z, x[c].w, sum[c][mt]);
          }
#pragma unroll
          for (int c = 0; c < CHAINS; ++c) {
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
              float(&to)[4] = acc[mt][begin + c];
              const float(&of)[4] = sum[c][mt];
              to[0] = __fmaf_rn(of[0], s[mt][0], to[0]), to[1] = __fmaf_rn(of[1], s[mt][0], to[1]);
              to[2] = __fmaf_rn(of[2], s[mt][1], to[2]), to[3] = __fmaf_rn(of[3], s[mt][1], to[3]);
            }
          }
        }
      }
    }
  } else {
    uint32_t first[MT][4], second[MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Elements 8t..8t+7 of the row, brought into the activations' order.
        const uint4 w = in_order(load_shared16(slot + mt * kRingBytes + at.row + r * 512));
        first[mt][r] = w.x, first[mt][r + 2] = w.y, second[mt][r] = w.z, second[mt][r + 2] = w.w;
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint4 x = b(nt, 0);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        multiply_add(acc[mt][nt], first[mt], x.x, x.y, acc[mt][nt]);
        multiply_add(acc[mt][nt], second[mt], x.z, x.w, acc[mt][nt]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace kdtree
