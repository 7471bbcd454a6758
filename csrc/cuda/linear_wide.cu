// linear for steps of many rows (17 to 64 a launch) on Hopper: y = w x for up to two weights without a norm, by warpgroup products.
//
// Bytes: each weight once; flops 2*M*N*K on tensor cores. Bound by what the blocks exchange, the activations they read and, in
// int4, by turning nibbles into bf16, in this order.
// A block owns one segment of K and, of a block of 256 weight rows, 32 a warp; it keeps its segment of all 64 rows of activations in
// shared memory. Weights come through the warps' rings as in linear_stream.cu and are the register operand of
// wgmma.m64n64k16, four warps' 16-row tiles at a time. A segment's sums meet the other seven's in global memory (L2):
// each of the eight blocks waits for all and adds eight columns. Clusters would do the same, but eight blocks of a cluster take
// whole groups of multiprocessors, of which an H200 has 15, and the exchange through their shared memory is not faster.
// Reduction order: stream.cuh; wgmma gives the bits of mma.sync, so that whether this kernel serves may depend on the rows.
// Waiting: every block gets its place, because the grid is no larger than the device, what runs before or beside it ends without it,
// and the next launch is let in by all blocks of this one. The eight that wait for each other have neighbouring numbers, so that where
// several sessions share a device each launch keeps seven multiprocessors waiting at the most.
#include <algorithm>

#include "backend.h"
#include "stream_wide.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kWideDepth;
using stream::kWideWarps;

constexpr int kRowTiles = stream::kWideTiles * kWideWarps;

struct Params {
  const uint16_t* x;  // bf16
  int ldx, k;
  const void* data[2];
  const uint16_t* scale[2];
  int n[2];
  void* out[2];  // f32; bf16 for kSiluMul
  int ldo[2];
  Epilogue epilogue;
  int blocks;      // of weight rows
  int first_row;   // of activations and outputs, to which x and out point
  int max_rows;    // from there on, at most 64
  const int32_t* n_rows;
  float4* parts;       // [2][groups of blocks][warp][segment][fragment][lane]
  unsigned* arrivals;  // [group], never reset: eight more each time
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kFragments = kWideTiles * 8;  // of 16 weight rows and eight columns, a float4 a lane
constexpr int kAhead = 14;                  // loads of activations that a lane has in flight
constexpr int kEarly = 1;                   // units of weights that are asked for before them

// A row of eight columns a warp: lane (g, t) takes piece t of row g of every group. between(): called once, behind the first loads.
template <typename Between>
__device__ __forceinline__ void stage_columns(uint8_t* staged, const Params& p, int k_begin, int groups, const Between& between) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = warp * kColumns + lane / 4;
  const int at = k_begin + lane % 4 * 8;
  const uint16_t* const from = p.x + (row * p.ldx + at);
  uint8_t* const to = staged + warp * kColumnsBytes + lane * 4;
  const int count = row < p.max_rows && at < p.k ? min(groups, (p.k - at + 31) / 32) : 0;
  bool begun = false;
  for (int first = 0; first < groups || !begun; first += kAhead) {
    uint4 v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      v[i] = first + i < count ? *reinterpret_cast<const uint4*>(from + (first + i) * 32) : make_uint4(0, 0, 0, 0);
    }
    if (!begun) between();
    begun = true;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= groups) break;
      const uint4 w = in_order(v[i]);
      uint8_t* const place = to + (first + i) * kGroupBytes;
      *reinterpret_cast<uint32_t*>(place) = w.x, *reinterpret_cast<uint32_t*>(place + kMatrixBytes) = w.y;
      *reinterpret_cast<uint32_t*>(place + kStepBytes) = w.z, *reinterpret_cast<uint32_t*>(place + kStepBytes + kMatrixBytes) = w.w;
    }
  }
}

// Publishes what the block has written and waits until the blocks of all segments have: one thread releases and acquires for all.
__device__ __forceinline__ void meet(unsigned* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before, seen;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    const unsigned all = (before / kSegments + 1) * kSegments;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
    } while (static_cast<int>(seen - all) < 0);
  }
  __syncthreads();
}
#endif

template <WeightKind KIND>
__global__ __launch_bounds__(kWideWarps * kWarp, 1) void wide_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int UNIT = kUnitK<KIND>, SLOT = kWideTiles * kRingBytes;
  extern __shared__ __align__(128) uint8_t smem[];
  uint8_t* const staged = smem + kWideWarps * kWideDepth * SLOT;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int segment = blockIdx.x % kSegments, group = blockIdx.x / kSegments, groups = gridDim.x / kSegments;
  const int units = (p.k + UNIT - 1) / UNIT, unit = segment_begin(segment, units), steps = segment_begin(segment + 1, units) - unit;
  const bool paired = p.epilogue == Epilogue::kSiluMul, whole = (p.k + 31) / 32 % 4 == 0;
  const int tiles0 = (p.n[0] + kTileRows - 1) / kTileRows, tiles1 = (p.n[1] + kTileRows - 1) / kTileRows;
  // Tile mt of this warp in a block of rows: its weight, its place there, whether it is one at all.
  struct Tile {
    int part, at;
    bool live;
  };
  const auto tile_of = [&](int block, int mt) {
    if (paired) return Tile{mt, block * kWideWarps + warp, block * kWideWarps + warp < tiles0};
    const int at = block * kRowTiles + mt * kWideWarps + warp;
    return Tile{at >= tiles0, at >= tiles0 ? at - tiles0 : at, at < tiles0 + tiles1};
  };

  const uint32_t ring = shared_address(smem) + warp * (kWideDepth * SLOT), mine = piece_offset(lane / 4, lane % 4);
  TileSource from[kWideTiles];
  int copy_block = group, copy_left = 0;
  const auto fetch = [&](uint32_t to) {
    if (copy_left == 0 && steps > 0 && copy_block < p.blocks) {
#pragma unroll
      for (int mt = 0; mt < kWideTiles; ++mt) {
        const Tile tile = tile_of(copy_block, mt);
        const int part = tile.live ? tile.part : 0;  // a tile past the last copies the first one's weights, for nobody
        from[mt] = tile_source<KIND>(p.data[part], p.scale[part], 0, tile.live ? tile.at : 0, p.n[part], p.k, unit * UNIT, lane);
      }
      copy_left = steps, copy_block += groups;
    }
    if (copy_left > 0) {
#pragma unroll
      for (int mt = 0; mt < kWideTiles; ++mt) copy_unit<KIND>(to + mt * kRingBytes, from[mt], mine, lane, whole);
      --copy_left;
    }
    copy_commit();
  };
  const auto fetch_units = [&](int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) fetch(ring + i * SLOT);
  };
  // The block fills its multiprocessor, so that it begins when the launch before has ended: activations come sooner behind few weights.
  fetch_units(0, kEarly);

  wait_for_previous();
  const int counted = load_early(p.n_rows);
  stage_columns(staged, p, unit * UNIT, steps * UNIT / 32, [&] { fetch_units(kEarly, kWideDepth - 1); });
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what was stored
  __syncthreads();
  const int rows = min(counted - p.first_row, p.max_rows);

  const LaneOffsets at(lane);
  const uint32_t b = shared_address(staged);
  uint32_t slot = ring, behind = ring + (kWideDepth - 1) * SLOT;
  int half = 0;
  for (int block = group; block < p.blocks; block += groups, half ^= 1) {
    float acc[kWideTiles][32];
    uint32_t a[kWideTiles][8];
#pragma unroll
    for (int mt = 0; mt < kWideTiles; ++mt) {
#pragma unroll
      for (int e = 0; e < 32; ++e) acc[mt][e] = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) a[mt][e] = 0;
    }
    for (int step = 0; step < steps; ++step) {
      copy_wait<kWideDepth - 2>();
      __syncwarp();
      fetch(behind);  // the slot that was read a step ago
      behind = slot;
      if constexpr (KIND == WeightKind::kInt4) {
        multiply_int4(acc, slot, at, b + step * (UNIT / 32 * kGroupBytes));
      } else {
        multiply_bf16(acc, a, slot, at, b + step * kGroupBytes);
      }
      slot = slot + SLOT == ring + kWideDepth * SLOT ? ring : slot + SLOT;
    }
    if constexpr (KIND == WeightKind::kBf16) {
#pragma unroll
      for (int mt = 0; mt < kWideTiles; ++mt) wgmma_wait<0>(acc[mt], a[mt]);
    }

    // Fragment (mt, nt) goes to block nt of the eight.
    float4* const parts = p.parts + static_cast<size_t>((half * groups + group) * kWideWarps + warp) * (kSegments * kFragments * kWarp) + lane;
#pragma unroll
    for (int mt = 0; mt < kWideTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < 8; ++nt) {
        const float* const v = acc[mt] + nt * 4;
        if (nt * kColumns < rows) __stcg(parts + (segment * kFragments + mt * 8 + nt) * kWarp, make_float4(v[0], v[1], v[2], v[3]));
      }
    }
    meet(p.arrivals + group);
    if (segment * kColumns >= rows) continue;
    float total[kWideTiles][4];
#pragma unroll
    for (int mt = 0; mt < kWideTiles; ++mt) {
      float4 part[kSegments];
#pragma unroll
      for (int s = 0; s < kSegments; ++s) part[s] = __ldcg(parts + (s * kFragments + mt * 8 + segment) * kWarp);
#pragma unroll
      for (int s = 1; s < kSegments; ++s) {
        part[0].x = __fadd_rn(part[0].x, part[s].x), part[0].y = __fadd_rn(part[0].y, part[s].y);
        part[0].z = __fadd_rn(part[0].z, part[s].z), part[0].w = __fadd_rn(part[0].w, part[s].w);
      }
      total[mt][0] = part[0].x, total[mt][1] = part[0].y, total[mt][2] = part[0].z, total[mt][3] = part[0].w;
    }
#pragma unroll
    for (int mt = 0; mt < (kWideTiles); ++mt) {
      const Tile tile = tile_of(block, mt);
      if (!tile.live || (paired && mt > 0)) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = segment * kColumns + lane % 4 * 2 + e % 2, to = tile.at * kTileRows + lane / 4 + e / 2 * 8;
        if (m >= rows || to >= p.n[tile.part]) continue;
        const size_t place = static_cast<size_t>(m) * p.ldo[tile.part] + to;
        if (paired) {
          static_cast<uint16_t*>(p.out[0])[place] = round_bf16(__fmul_rn(silu(total[0][e]), total[1][e]));
        } else {
          float* const o = static_cast<float*>(p.out[tile.part]) + place;
          *o = p.epilogue == Epilogue::kResidual ? __fadd_rn(*o, total[mt][e]) : total[mt][e];
        }
      }
    }
  }
  copy_wait<0>();
#endif
}

}  // namespace

void CudaBackend::linear_wide(const LinearArgs& a) {
  const bool paired = a.epilogue == Epilogue::kSiluMul, int4 = a.w[0].kind == WeightKind::kInt4;
  const char* const name = int4 ? "linear_int4_bf16" : "linear_bf16";
  const auto kernel = int4 ? &wide_kernel<WeightKind::kInt4> : &wide_kernel<WeightKind::kBf16>;
  const size_t shared = stream::wide_shared(a.w[0].kind, a.w[0].k);
  reserve_shared(reinterpret_cast<const void*>(kernel), name, shared);
  Params p{};
  p.ldx = a.ldx, p.k = a.w[0].k, p.epilogue = a.epilogue, p.n_rows = a.n_rows;
  p.parts = static_cast<float4*>(exchange_), p.arrivals = arrivals_;
  int tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const int j = i < a.parts ? i : 0;
    p.data[i] = a.w[j].data, p.scale[i] = a.w[j].scale, p.n[i] = i < a.parts ? a.w[i].n : 0;
    p.ldo[i] = a.ldo[paired ? 0 : j];
    if (i == 0 || !paired) tiles += (p.n[i] + kTileRows - 1) / kTileRows;
  }
  const int outputs = kRowTiles / (paired ? 2 : 1);
  p.blocks = (tiles + outputs - 1) / outputs;
  const int rounds = (p.blocks + stream::wide_groups(device_shape_) - 1) / stream::wide_groups(device_shape_);
  const int groups = (p.blocks + rounds - 1) / rounds;
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    p.max_rows = std::min(a.max_rows - p.first_row, stream::kWideRows);
    p.x = static_cast<const uint16_t*>(a.x) + static_cast<size_t>(p.first_row) * a.ldx;
    for (int i = 0; i < 2; ++i) {
      const int j = paired || i >= a.parts ? 0 : i;
      p.out[i] = static_cast<char*>(a.out[j]) + static_cast<size_t>(p.first_row) * a.ldo[j] * (paired ? sizeof(uint16_t) : sizeof(float));
    }
    launch(name, kernel, dim3(static_cast<unsigned>(groups * kSegments)), kWideWarps * kWarp, shared, p);
  }
}

}  // namespace kdtree
