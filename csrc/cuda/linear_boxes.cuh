// What linear_boxes.cu's kernel is given, its shape, and the copying side of its warps.
#pragma once
#include "barrier.cuh"
#include "box_copy.cuh"
#include "device.cuh"
#include "ptx.cuh"
#include "stream.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kBlock;
using stream::kBlockBytes;
using stream::kBoxScaleBytes;
using stream::kBoxWeightBytes;
using stream::kZeros;

// What a block needs first comes first: each line of parameters is a miss that a block which begins late waits for.
struct Params {
  int k;
  int each, rest;   // outputs (tiles, or pairs of them for kSiluMul) of a cluster; of the first `rest` ones there is one more
  int batch;        // of a cluster's outputs, whose sums meet at a time
  int sets;         // of a tile's sums that have a row
  int by_sets;      // x * by_sets >> 16 is x / sets, of as many sets as shared memory has room for
  int activations;  // bytes of them in a block
  int area;         // of a segment's, where the bulk copy engine brings them
  int rows;         // at most
  int n[2];
  Epilogue epilogue;
  const int32_t* n_rows;
  const void* x;    // f32 with a norm, else bf16
  int ldx, stride;  // stride: bytes between rows that threads stage
  const float* norm_w;
  float eps;
  int ldo[2];
  void* out[2];                               // f32; bf16 for kSiluMul
  CUtensorMap boxes;                          // of x without a norm: a segment of all rows each
  CUtensorMap wide[2], narrow[2], scales[2];  // boxes of 128 and of 64 bytes a row, and int4's scales of 128
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// ROWS: places of activation rows, 1, 4 (int4), 8 or 16; up to four int4 rows stand at the even columns of a tile of eight. MT: tiles of
// weights a warp multiplies side by side. BOXES: of a tile in a slot.
template <WeightKind KIND, int ROWS, int MT_, int CL, int WARPS, int BOXES_, int DEPTH_, int RESIDENT>
struct Shape {
  static constexpr bool INT4 = KIND == WeightKind::kInt4;
  static constexpr int NT = (ROWS + kColumns - 1) / kColumns, VALUES = stream::at_even_columns(KIND, ROWS) ? 2 : 4;
  static constexpr int MT = MT_, BOXES = BOXES_, DEPTH = DEPTH_;
  static constexpr int SPC = kSegments / CL, TW = WARPS / SPC * MT;  // segments a block, tiles side by side
  static constexpr int SLOT = MT * BOXES * kBoxWeightBytes, LINE = BOXES * 16, SCALES = INT4 ? MT * kTileRows * LINE : 0;  // LINE: of a row's scales
  static constexpr int WEIGHTS = WARPS * DEPTH * SLOT, BLOCK = ROWS * kBlockBytes;
  static constexpr int FLIP = ROWS == 4 ? 64 : 0;  // between blocks: of four rows, every other one is swizzled as rows 4 to 7
  static constexpr int SET = kColumns * VALUES * 4;  // bytes of a tile's sums over a segment, of one or two columns
  // Units of a box, if registers are enough.
  static constexpr int SIDE_BY_SIDE = INT4 && (WARPS * RESIDENT > 16 || (MT * NT > 2 && RESIDENT > 1)) ? 1 : 2;
  // Whether registers are enough to keep what a lane would find again at every box.
  static constexpr bool KEEPS = INT4 && WARPS * RESIDENT <= 16;
  static_assert(WARPS % SPC == 0, "a warp has one segment");
  static_assert(MT == 1 || BOXES == 1, "a slot's boxes are of one tile or one of each");
};

// The copying side of a warp: what its ring is to be filled with, slot after slot. The warp calls as one.
template <typename S>
struct Copies {
  const Params& p;
  const int tiles, tiles0, first, begin, steps;  // of the cluster, of the first weight; the cluster's first output; the warp's segment
  const bool paired;
  const uint32_t ring, scales, barriers;
  int tile, unit = 0, left = 0, live = 0, row[S::MT];  // live: of the MT tiles, how many there are
  uint32_t to = ring, scales_to = scales, barrier = barriers;
  const CUtensorMap* map[S::MT];  // wide boxes of a tile's weight; narrow ones and scales are two and four behind it

  // Finds where the next box of the MT tiles is; false if there is none.
  __device__ __forceinline__ bool find() {
    if (left == 0) {
      if (tile >= tiles) return false;
#pragma unroll
      for (int mt = 0; mt < S::MT; ++mt) {
        const int at = first + (paired ? (tile + mt) >> 1 : tile + mt);
        const bool second = paired ? (tile + mt) % 2 != 0 : at >= tiles0;
        map[mt] = p.wide + second, row[mt] = (second && !paired ? at - tiles0 : at) * kTileRows;
      }
      live = min(tiles - tile, S::MT), tile += S::TW, unit = begin, left = steps;
    }
    return true;
  }
  // Slots of one box each: the next one into the slot that the warp has just read.
  __device__ __forceinline__ void ask_again(uint32_t slot, uint32_t slot_scales, uint32_t slot_barrier) {
    static_assert(S::BOXES == 1 && S::INT4, "a box and its scales");
    if (!find()) return;
    const unsigned at = unit;
    const bool half = left == 1 || (at & 1) != 0;
    if (elected()) {
      barrier_expect(slot_barrier, live * (half ? kBoxWeightBytes / 2 + kBoxScaleBytes : kBoxWeightBytes + kBoxScaleBytes));
#pragma unroll
      for (int mt = 0; mt < S::MT; ++mt) {
        if (mt >= live) break;
        copy_box_once(slot + mt * kBoxWeightBytes, half ? map[mt] + 2 : map[mt], at * 64, row[mt], slot_barrier);
        copy_box_once(slot_scales + mt * kBoxScaleBytes, map[mt] + 4, at / 2 * 16, row[mt], slot_barrier);
      }
    }
    unit += half ? 1 : 2, left -= half ? 1 : 2;
  }
  __device__ __forceinline__ void ask() {
    if (!find()) return;
    const int head = 2 - unit % 2, full = min(left, head + 2 * (S::BOXES - 1));  // units of the first box, which begin where it does or in its middle, and of all
    if (elected()) {
      barrier_expect(barrier, live * (full * (kBoxWeightBytes / 2) + S::SCALES / S::MT));
#pragma unroll
      for (int mt = 0; mt < S::MT; ++mt) {
        if (mt >= live) break;
        const uint32_t there = to + mt * kBoxWeightBytes;
        copy_box_once(there, min(full, head) == 1 ? map[mt] + 2 : map[mt], unit * 64, row[mt], barrier);
        if (S::BOXES > 1 && full > head) copy_box_once(there + kBoxWeightBytes, full - head == 1 ? map[mt] + 2 : map[mt], (unit + head) * 64, row[mt], barrier);
        if (S::INT4) copy_box_once(scales_to + mt * (S::SCALES / S::MT), map[mt] + 4, unit / 2 * 16, row[mt], barrier);
      }
    }
    unit += full, left -= full;
    const bool last = to == ring + (S::DEPTH - 1) * S::SLOT;
    to = last ? ring : to + S::SLOT, scales_to = last ? scales : scales_to + S::SCALES, barrier = last ? barriers : barrier + 8;
  }
  __device__ __forceinline__ void ask(int slots) {
#pragma unroll 1
    for (int i = 0; i < slots; ++i) ask();
  }
};
#endif

}  // namespace
}  // namespace kdtree
