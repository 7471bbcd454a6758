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

#include "device.cuh"
#include "../stream_plan.h"

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

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// there: 16, or 0 to write zeros and read nothing.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, uint32_t there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
}
__device__ __forceinline__ void copy8(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&w)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}

// d = a b + c, 16x8x16, bf16 operands, f32 sums.
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Nibbles e and e+4 of a word (shifted down by 4e) as two bf16 numbers q = nibble - 8, exactly: 0x4300 + nibble is 128 + nibble in bf16.
__device__ __forceinline__ uint32_t nibble_pair(uint32_t word) {
  uint32_t v;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(v) : "r"(word));
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x3f803f80u), "r"(0xc308c308u));
  return v;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ uint16_t round_bf16(float v) { return static_cast<uint16_t>(pack_bf16(v, 0.f)); }

// Eight consecutive bf16 numbers in the order in which a lane multiplies them: (0,4) (1,5) (2,6) (3,7), the nibbles' own order.
__device__ __forceinline__ uint4 in_order(const uint4& v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

// Blocks that registers must leave room for on a multiprocessor: of Hopper's shared memory two blocks get enough, elsewhere one does.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define KD_RESIDENT(blocks) ((blocks) > 1 ? 1 : (blocks))
#else
#define KD_RESIDENT(blocks) (blocks)
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KD_CLUSTERS 1
#else
#define KD_CLUSTERS 0
#endif

// Barrier of a cluster of CL blocks in two halves; with CL = 1 of the block (then the arrival is nothing and the wait is all of it).
//
// What a block wrote to its own shared memory before it arrives, every block of the cluster finds there after its wait. That takes a
// release of the *cluster's* scope: a block's fence orders its stores for its own threads, which reach shared memory by the same queue,
// while another block's loads come in by the network and may pass stores that still stand behind copies in that queue. The arrival's own
// release covers all memory there is, so it waits for the copies in flight and empties the rings; the fence here is a release of this
// block's shared memory alone (PTX 8.6), after which a relaxed arrival is enough. Loads of other blocks' shared memory before an arrival
// have come back by then, because every thread has used what it loaded.
template <int CL>
__device__ __forceinline__ void cluster_arrive() {
#if KD_CLUSTERS
  if constexpr (CL > 1) {
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1208
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
  }
#endif
}
template <int CL>
__device__ __forceinline__ void cluster_wait() {
#if KD_CLUSTERS
  if constexpr (CL > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  if constexpr (CL == 1) __syncthreads();
}
template <int CL>
__device__ __forceinline__ int cluster_rank() {
#if KD_CLUSTERS
  if constexpr (CL > 1) {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
  }
#endif
  return 0;
}
// Reads shared memory of block `rank` of the cluster, at the place that `at` is in this block.
template <int CL>
__device__ __forceinline__ float4 load_cluster16(uint32_t at, int rank) {
  float4 v;
#if KD_CLUSTERS
  if constexpr (CL > 1) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
    return v;
  }
#endif
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
template <int CL>
__device__ __forceinline__ float load_cluster4(uint32_t at, int rank) {
  float v;
#if KD_CLUSTERS
  if constexpr (CL > 1) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
  }
#endif
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

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

// Puts rows of x over [k_begin, k_begin + length) into shared memory as bf16 in the multiplication's order; beyond `rows` and k are zeros.
// AHEAD: pieces of eight elements that a thread has in flight. piece(row, k): one of them. between(): called once, behind the first loads.
template <int AHEAD, typename Piece, typename Between>
__device__ __forceinline__ void stage_pieces(uint8_t* staged, int stride, int rows, int columns, int k, int k_begin, int length,
                                             const Piece& piece, const Between& between) {
  const int pieces = max(length / 8, 1), threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  if (length == 0) columns = 0;
  bool begun = false;
  // A thread's pieces are `threads` apart: so many rows and so many pieces.
  const int rows_on = threads / pieces, pieces_on = threads - rows_on * pieces;
  int row = thread / pieces, at = thread - row * pieces;
  while (row < columns || !begun) {
    uint4 v[AHEAD];
    int to[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      const int from = k_begin + at * 8;
      v[a] = row < rows && from < k ? piece(row, from) : make_uint4(0, 0, 0, 0);
      to[a] = row < columns ? row * stride + at * 16 : -1;
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
template <typename Between>
__device__ __forceinline__ void stage_rows(uint8_t* staged, int stride, const uint16_t* x, int ldx, int rows, int columns, int k,
                                           int k_begin, int length, const Between& between) {
  const auto piece = [&](int row, int at) { return *reinterpret_cast<const uint4*>(x + (row * ldx + at)); };
  if (columns * length <= 4 * 8 * static_cast<int>(blockDim.x)) {  // one row: half of the loads would have nothing to do
    stage_pieces<4>(staged, stride, rows, columns, k, k_begin, length, piece, between);
  } else {
    stage_pieces<8>(staged, stride, rows, columns, k, k_begin, length, piece, between);
  }
}

// x f32: r(x * inverse[row] * norm_w).
__device__ __forceinline__ void stage_normed_rows(uint8_t* staged, int stride, const float* x, int ldx, int rows, int columns, int k,
                                                  int k_begin, int length, const float* norm_w, const float* inverse) {
  stage_pieces<4>(staged, stride, rows, columns, k, k_begin, length, [&](int row, int at) {
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
