// Units of weights times 64 rows of activations by warpgroups: the core of linear_wide.cu and linear_whole.cu, sm_90a only.
//
// Four warps' tiles of 16 weight rows are the register operand of wgmma.m64n64k16; activations are read from shared memory, where they
// stand in the order of nibbles (nibbles.cuh). They come as they lie in memory and are put in order a piece of K at a time.
// Reduction order and bits: stream.cuh's.
#pragma once
#include <cuda.h>

#include "nibbles.cuh"
#include "stream.cuh"
#include "tensor_map.h"
#include "wgmma.cuh"

namespace kdtree {
namespace cuda {

struct WideParams {
  bool ordered;  // activations are in the order of nibbles already
  int k;
  const void* data[2];
  const uint16_t* scale[2];
  int n[2];
  void* out[2];  // f32; bf16 for kSiluMul
  int ldo[2];
  Epilogue epilogue;
  int tiles;      // of 64 weight rows, one part's after the other's; for kSiluMul of 32 gate and 32 up rows
  int first_row;  // of activations and outputs, to which x and out point
  int max_rows;   // from there on, at most 64
  int copied;     // rows of activations that a block copies: all, or its share where a cluster has the same ones
  const int32_t* n_rows;
};

// Of a product that the warpgroups' kernels serve: everything but its rows, and those of the launch that begins at p.first_row.
inline void set_wide(WideParams& p, const LinearArgs& a) {
  p.k = a.w[0].k, p.epilogue = a.epilogue, p.n_rows = a.n_rows, p.ordered = a.norm_w != nullptr;
  int sixteens = 0;
  for (int i = 0; i < 2; ++i) {
    const int j = i < a.parts ? i : 0;
    p.data[i] = a.w[j].data, p.scale[i] = a.w[j].scale, p.n[i] = i < a.parts ? a.w[i].n : 0;
    p.ldo[i] = a.ldo[a.epilogue == Epilogue::kSiluMul ? 0 : j];
    sixteens += (p.n[i] + kTileRows - 1) / kTileRows;
  }
  p.tiles = (sixteens + 3) / 4;
}
inline void set_rows(WideParams& p, const LinearArgs& a, int sharing) {
  const bool paired = a.epilogue == Epilogue::kSiluMul;
  p.max_rows = a.max_rows - p.first_row < stream::kWideRows ? a.max_rows - p.first_row : stream::kWideRows;
  p.copied = (p.max_rows + sharing * kColumns - 1) / (sharing * kColumns) * kColumns;
  for (int i = 0; i < 2; ++i) {
    const int j = paired || i >= a.parts ? 0 : i;
    p.out[i] = static_cast<char*>(a.out[j]) + static_cast<size_t>(p.first_row) * a.ldo[j] * (paired ? sizeof(uint16_t) : sizeof(float));
  }
}
// Activations of p's launch, whose rows begin at x[first_row], in boxes of kBox x p.copied.
inline CUtensorMap rows_map(const WideParams& p, const uint16_t* x, int ldx) {
  return bf16_map(x + static_cast<size_t>(p.first_row) * ldx, {static_cast<uint64_t>(p.k), static_cast<uint64_t>(p.max_rows)}, p.copied,
                  static_cast<uint64_t>(ldx));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The sixteen rows of a tile that are warp `quarter`'s of a warpgroup: their weight, their place there in sixteens, whether they are any.
struct Sixteen {
  int part, at;
  bool live;
};
__device__ __forceinline__ Sixteen sixteen_of(const WideParams& p, int tile, int quarter) {
  const int first = (p.n[0] + kTileRows - 1) / kTileRows, second = (p.n[1] + kTileRows - 1) / kTileRows;
  if (p.epilogue == Epilogue::kSiluMul) return Sixteen{quarter / 2, tile * 2 + quarter % 2, tile * 2 + quarter % 2 < first};
  const int at = tile * 4 + quarter;
  return Sixteen{at >= first, at >= first ? at - first : at, at < first + second};
}
// Where their weights come from, from unit `unit` on; rows that are none copy the first ones' weights, for nobody.
template <WeightKind KIND>
__device__ __forceinline__ TileSource source_of(const WideParams& p, const Sixteen& rows, int unit, int lane) {
  const int part = rows.live ? rows.part : 0;
  return tile_source<KIND>(p.data[part], p.scale[part], 0, rows.live ? rows.at : 0, p.n[part], p.k, unit * kUnitK<KIND>, lane);
}
// A lane's fragment of eight columns from `column` on, of their sums y; for kSiluMul of the gate's sums y and those of up.
__device__ __forceinline__ void write_fragment(const WideParams& p, const Sixteen& of, int column, int rows, const float4& y, const float4& up,
                                               int lane) {
  const float gate[4] = {y.x, y.y, y.z, y.w}, other[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int m = column + lane % 4 * 2 + e % 2, to = of.at * kTileRows + lane / 4 + e / 2 * 8;
    if (m >= rows || to >= p.n[of.part]) continue;
    const size_t place = static_cast<size_t>(m) * p.ldo[of.part] + to;
    if (p.epilogue == Epilogue::kSiluMul) {
      static_cast<uint16_t*>(p.out[0])[place] = round_bf16(__fmul_rn(silu(gate[e]), other[e]));
    } else {
      float* const o = static_cast<float*>(p.out[of.part]) + place;
      *o = p.epilogue == Epilogue::kResidual ? __fadd_rn(*o, gate[e]) : gate[e];
    }
  }
}
// A lane's fragment of eight columns from `column` on, of their sums y, to outputs that are not SiLU's.
__device__ __forceinline__ void store_fragment(const WideParams& p, const Sixteen& of, int column, int rows, const float4& y, int lane) {
  const int m = column + lane % 4 * 2, to = of.at * kTileRows + lane / 4, ldo = p.ldo[of.part];
  float* const o = static_cast<float*>(p.out[of.part]) + static_cast<size_t>(m) * ldo + to;
  float v[4] = {y.x, y.y, y.z, y.w};
  const bool below = m + 1 < rows, here = m < rows, first = to < p.n[of.part], later = to + 8 < p.n[of.part];
  const bool stored[4] = {here && first, below && first, here && later, below && later};
  if (p.epilogue == Epilogue::kResidual) {  // one branch for all four
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (stored[e]) v[e] = __fadd_rn(o[e % 2 * ldo + e / 2 * 8], v[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (stored[e]) o[e % 2 * ldo + e / 2 * 8] = v[e];
  }
}
__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
__device__ __forceinline__ void meet_warpgroup(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); }

constexpr int kFragments = 4 * 8;  // of a tile: 16 weight rows and eight columns, a float4 a lane

// Activations in order: for each 32 of K, two steps of sixteen; a step has for each eight columns two 8 x 16-byte matrices.
constexpr int kGroupBytes = 4096, kStepBytes = 2048, kColumnsBytes = 256, kMatrixBytes = 128;
constexpr int kChunkBytes = stream::kWideChunk * stream::kWideRows * 2;
template <WeightKind KIND>
constexpr int kWideDepth = stream::wide_depth(KIND);
template <WeightKind KIND>
constexpr int kWideSlot = stream::wide_slot(KIND);  // bytes of a unit in a ring
constexpr int kBox = 64, kBoxBytes = kBox * stream::kWideRows * 2;  // elements of K of a copy, 128 bytes of every row

__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3ffff) >> 4) | static_cast<uint64_t>(kMatrixBytes >> 4) << 16 |
         static_cast<uint64_t>(kColumnsBytes >> 4) << 32;
}

// The products of one group of 32: two steps, started from zero or from d.
__device__ __forceinline__ void start_group(float (&d)[32], const uint32_t (&a)[8], uint32_t b, bool more) {
  const uint32_t first[4] = {a[0], a[1], a[2], a[3]}, second[4] = {a[4], a[5], a[6], a[7]};
  wgmma_fence();
  wgmma_columns(d, first, descriptor(b), more);
  wgmma_columns(d, second, descriptor(b + kStepBytes), true);
  wgmma_commit();
}

// A lane's words of two rows of a group as the register operands of its two steps.
__device__ __forceinline__ void nibble_fragments(uint32_t (&a)[8], uint32_t low, uint32_t high) {
#pragma unroll
  for (int e = 0; e < 4; ++e) a[2 * e] = nibble_pair(low >> (4 * e)), a[2 * e + 1] = nibble_pair(high >> (4 * e));
}

__device__ __forceinline__ uint32_t load_shared4(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

// HALVES of a unit of a warp's tile from half `first` on, two groups each. Of a whole unit the next group's nibbles are turned while the
// tensor cores work; where registers are few other warpgroups must do.
template <int HALVES>
__device__ __forceinline__ void multiply_int4(float (&acc)[32], uint32_t slot, const LaneOffsets& at, uint32_t b, int first) {
  uint32_t scale[HALVES][2], words[HALVES][4], a[HALVES][8];
#pragma unroll
  for (int half = 0; half < HALVES; ++half) {
#pragma unroll
    for (int r = 0; r < 2; ++r) scale[half][r] = load_shared4(slot + at.scale + (first + half) * 4 + r * 64);
    load_matrices(words[half], slot + (at.matrix ^ ((first + half) * 32)));
  }
  float sum[32];
  const auto finish = [&](int group) {
    wgmma_wait<0>(sum, a[group % HALVES]);
    float s[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t pair = scale[group / 2][r];
      s[r] = __uint_as_float(group % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) acc[e] = __fmaf_rn(sum[e], s[e / 2 % 2], acc[e]);
  };
#pragma unroll
  for (int group = 0; group < 2 * HALVES; ++group) {
    if (HALVES == 1 && group > 0) finish(group - 1);
    nibble_fragments(a[group % HALVES], words[group / 2][2 * (group % 2)], words[group / 2][2 * (group % 2) + 1]);
    if (HALVES > 1 && group > 0) finish(group - 1);
    start_group(sum, a[group % HALVES], b + group * kGroupBytes, false);
  }
  finish(2 * HALVES - 1);
}

// Waits for its products before it returns: while they are in flight they read `a`, whose registers the compiler gives to whatever comes
// next, as it knows of no later use. Other warpgroups fill the time.
__device__ __forceinline__ void multiply_bf16(float (&acc)[32], uint32_t slot, const LaneOffsets& at, uint32_t b) {
  uint32_t a[8];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4 w = in_order(load_shared16(slot + at.row + r * 512));
    a[r] = w.x, a[r + 2] = w.y, a[r + 4] = w.z, a[r + 6] = w.w;
  }
  start_group(acc, a, b, true);
  wgmma_wait<0>(acc, a);
}

// By one thread: a box of all rows at k.
__device__ __forceinline__ void copy_rows(uint32_t to, const CUtensorMap* map, int k, uint64_t* full) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, 0}], [%3];" ::"r"(to), "l"(map),
               "r"(k), "r"(shared_address(full))
               : "memory");
}
// By one thread of each block of a cluster of CL: this block's `copied` rows of the chunk at k, to the same place of all of them. A chunk is two boxes, each
// with places for COLUMNS rows; those behind the last block's keep what they had, for columns that nobody stores. (A box without any row of its own would
// be filled with zeros, in both blocks, more slowly than rows come.)
template <int CL, int COLUMNS = stream::kWideRows>
__device__ __forceinline__ void copy_chunk(uint32_t to, const CUtensorMap* map, int k, uint64_t* full, int rank, int copied) {
#pragma unroll
  for (int box = 0; box < 2; ++box) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            to + box * (kBox * COLUMNS * 2) + rank * copied * (kBox * 2)),
        "l"(map), "r"(k + box * kBox), "r"(rank * copied), "r"(shared_address(full)), "h"(static_cast<uint16_t>((1 << CL) - 1))
        : "memory");
  }
}
// Bytes of a chunk that come into each block where `sharing` blocks copy `copied` rows each.
__device__ __forceinline__ int chunk_bytes(int copied, int sharing) { return stream::kWideChunk * 2 * copied * sharing; }

// A piece of eight elements to its four places in an ordered group; ordered: it has the nibbles' order already.
__device__ __forceinline__ void store_ordered(uint8_t* place, const uint4& v, bool ordered) {
  const uint4 w = ordered ? v : in_order(v);
  *reinterpret_cast<uint32_t*>(place) = w.x, *reinterpret_cast<uint32_t*>(place + kMatrixBytes) = w.y;
  *reinterpret_cast<uint32_t*>(place + kStepBytes) = w.z, *reinterpret_cast<uint32_t*>(place + kStepBytes + kMatrixBytes) = w.w;
}
// What this thread has stored, wgmma reads behind a barrier. Waits for the thread's own copies in flight too (MEMBAR.ALL).
__device__ __forceinline__ void fence_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// EACH of the eights of rows of a group of 32 that have come in boxes at `from`, warp by warp of WARPS: a lane reads a piece of eight
// elements of each, and puts it in order in a group of 32 behind the other at `to`. In shared memory a quarter of a warp reads
// two rows that are four apart, which the swizzle brings into all banks.
template <int WARPS, int EACH>
struct Pieces {
  uint4 v[EACH];
  __device__ __forceinline__ static int row(int lane) { return lane / 4 % 2 * 4 + lane / 8; }
  __device__ __forceinline__ void load(uint32_t from, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = i * WARPS + warp, group = at / 8, piece = group % 2 * 4 + lane % 4;
      v[i] = load_shared16(from + group / 2 * kBoxBytes + (at % 8 * 8 + row(lane)) * 128 + ((piece ^ row(lane)) & 7) * 16);
    }
  }
  __device__ __forceinline__ void store(uint8_t* to, int warp, int lane, bool ordered) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = i * WARPS + warp;
      store_ordered(to + at / 8 * kGroupBytes + at % 8 * kColumnsBytes + row(lane) * 16 + lane % 4 * 4, v[i], ordered);
    }
  }
};

#endif

}  // namespace cuda
}  // namespace kdtree
