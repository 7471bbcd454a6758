// linear for steps of many rows (17 to 64 a launch) on Hopper: y = w x for up to two weights, by warpgroup products.
//
// Bytes: each weight once; flops 2*M*N*K on tensor cores. Bound by turning nibbles into bf16 and scaling sums, by weights, and by what the
// blocks exchange, in this order.
// A block owns one segment of K and keeps its segment of all 64 rows of activations in shared memory; each of its four warpgroups takes one
// tile of 64 weight rows after the other. Activations come once for the two blocks of a cluster, chunk by chunk, and products begin with
// the first. Weights come through the warps' rings as in linear_stream.cu and are the register operand of wgmma.m64n64k16.
// A tile's sums meet the other seven segments' in global memory (L2): each of the eight blocks waits for all and adds eight columns. A
// warpgroup does that a tile later, when the others have long arrived, and at once only behind its last tile. Clusters would do the same,
// but eight blocks of a cluster take whole groups of multiprocessors, of which an H200 has 15, and four 30.
// Rows with a norm are normed once, in scratch, by a launch of their own (norm_rows.cu). Long rows of INT4 with few outputs: linear_wide_boxes.cu.
// Reduction order: stream.cuh; wgmma gives the bits of mma.sync, so that whether this kernel serves may depend on the rows.
// Waiting: every block gets its place, because the grid is no larger than the device, what runs before or beside it ends without it,
// and the next launch is let in by all blocks of this one. The eight that wait for each other have neighbouring numbers, so that where
// several sessions share a device each launch keeps few multiprocessors waiting.
#include <algorithm>

#include "backend.h"
#include "barrier.cuh"
#include "cluster.cuh"
#include "stream_wide.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kWideChunk;
using stream::kWideCluster;
using stream::kWideGroups;
using stream::kWideWarps;

struct Params : WideParams {
  CUtensorMap x;  // bf16 [max_rows, k], in boxes of kBox x copied
  float4* parts;       // [2][rows of blocks][warpgroup][segment][fragment][lane]
  unsigned* arrivals;  // [rows of blocks][warpgroup], never reset: eight more each time
};

template <WeightKind KIND>
__global__ __launch_bounds__(kWideWarps * kWarp, 1) void wide_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int UNIT = kUnitK<KIND>, A_CHUNK = kWideChunk / UNIT, DEPTH = kWideDepth<KIND>, SLOT = kWideSlot<KIND>;
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t full[16];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warpgroup = warp / 4, quarter = warp % 4;
  const int rank = cluster_rank<kWideCluster>(), segment = blockIdx.x / kWideCluster % kSegments;
  const int group = blockIdx.x / (kWideCluster * kSegments) * kWideCluster + rank, groups = gridDim.x / kSegments;
  const int units = (p.k + UNIT - 1) / UNIT, unit = segment_begin(segment, units), steps = segment_begin(segment + 1, units) - unit;
  const int chunks = (steps + A_CHUNK - 1) / A_CHUNK;
  const bool paired = p.epilogue == Epilogue::kSiluMul, whole = (p.k + 31) / 32 % 4 == 0;
  const int first_tile = warpgroup * groups + group, next_tile = kWideGroups * groups;

  uint8_t* const staged = smem;  // chunk c in order in place c, as it came in place c + 1
  const uint32_t b = shared_address(staged);
  const uint32_t ring = b + (chunks + 1) * kChunkBytes + warp * (DEPTH * SLOT), mine = piece_offset(lane / 4, lane % 4);
  TileSource from;
  int copy_tile = first_tile, copy_left = 0;
  const auto fetch = [&](uint32_t to) {
    if (copy_left == 0 && steps > 0 && copy_tile < p.tiles) {
      from = source_of<KIND>(p, sixteen_of(p, copy_tile, quarter), unit, lane);
      copy_left = steps, copy_tile += next_tile;
    }
    if (copy_left > 0) copy_unit<KIND>(to, from, mine, lane, whole), --copy_left;
    copy_commit();
  };

  if (threadIdx.x < chunks) barrier_init(shared_address(full + threadIdx.x), 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  cluster_arrive<kWideCluster>();
#pragma unroll 1
  for (int i = 0; i < DEPTH - 1; ++i) fetch(ring + i * SLOT);
  wait_for_previous();
  cluster_wait<kWideCluster>();  // the other block's barriers are there
  const int counted = load_early(p.n_rows);
  if (threadIdx.x == 0) {
    for (int c = 0; c < chunks; ++c) {
      barrier_expect(shared_address(full + c), chunk_bytes(p.copied, kWideCluster));
      copy_chunk<kWideCluster>(b + (c + 1) * kChunkBytes, &p.x, unit * UNIT + c * kWideChunk, full + c, rank, p.copied);
    }
  }

  // All chunks before the first product: the fence that lets wgmma see them waits for the warp's copies in flight, and would empty the ring
  // each time if it came between products.
  for (int c = 0; c < chunks; ++c) {
    barrier_wait(shared_address(full + c), 0);
    Pieces<kWideWarps, kChunkBytes / 512 / kWideWarps> pieces;
    pieces.load(b + (c + 1) * kChunkBytes, warp, lane);
    pieces.store(staged + c * kChunkBytes, warp, lane, p.ordered);
    if (c + 1 == chunks) fence_to_tensor_cores();
    __syncthreads();
  }

  const LaneOffsets at(lane);
  uint32_t slot = ring, behind = ring + (DEPTH - 1) * SLOT;
  unsigned* const arrivals = p.arrivals + group * kWideGroups + warpgroup;
  unsigned awaited = 0;  // arrivals of all eight blocks; the first thread of the warpgroup knows it
  const auto parts_of = [&](int half) {
    return p.parts + static_cast<size_t>((half * groups + group) * kWideGroups + warpgroup) * (kSegments * kFragments * kWarp) + lane;
  };
  // Fragment (quarter, nt) of this segment's sums goes to block nt of the eight.
  const auto publish = [&](const float (&acc)[32], int half, int rows) {
    float4* const parts = parts_of(half) + (segment * kFragments + quarter * 8) * kWarp;
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {
      const float* const v = acc + nt * 4;
      if (nt * kColumns < rows) __stcg(parts + nt * kWarp, make_float4(v[0], v[1], v[2], v[3]));
    }
    meet_warpgroup(warpgroup);
    if (threadIdx.x % (4 * kWarp) == 0) {  // one thread releases and acquires for all
      unsigned before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
      awaited = (before / kSegments + 1) * kSegments;
    }
  };
  const auto finish = [&](int tile, int half, int rows) {
    if (threadIdx.x % (4 * kWarp) == 0) {
      unsigned seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
      } while (static_cast<int>(seen - awaited) < 0);
    }
    meet_warpgroup(warpgroup);
    if (segment * kColumns >= rows || (paired && quarter >= 2)) return;
    const float4* const parts = parts_of(half);
    const Sixteen of = sixteen_of(p, tile, quarter);
    if (!of.live) return;
    const auto total_of = [&](int sixteen) {
      float4 part[kSegments];
#pragma unroll
      for (int s = 0; s < kSegments; ++s) part[s] = __ldcg(parts + (s * kFragments + sixteen * 8 + segment) * kWarp);
#pragma unroll
      for (int s = 1; s < kSegments; ++s) part[0] = add(part[0], part[s]);
      return part[0];
    };
    const float4 y = total_of(quarter);
    write_fragment(p, of, segment * kColumns, rows, y, paired ? total_of(quarter + 2) : y, lane);
  };

  int tile = first_tile, half = 0;
  for (; tile < p.tiles; tile += next_tile, half ^= 1) {
    float acc[32];
#pragma unroll
    for (int e = 0; e < 32; ++e) acc[e] = 0.f;
    for (int step = 0; step < steps; ++step) {
      copy_wait<DEPTH - 2>();
      __syncwarp();
      fetch(behind);  // the slot that was read a step ago
      behind = slot;
      if constexpr (KIND == WeightKind::kInt4) {
        multiply_int4<2>(acc, slot, at, b + step * kChunkBytes, 0);
      } else {
        multiply_bf16(acc, slot, at, b + step * kGroupBytes);
      }
      slot = slot + SLOT == ring + DEPTH * SLOT ? ring : slot + SLOT;
    }
    const int rows = min(counted - p.first_row, p.max_rows);
    if (tile > first_tile) finish(tile - next_tile, half ^ 1, rows);  // and so nobody still reads the round before that
    publish(acc, half, rows);
  }
  copy_wait<0>();
  if (first_tile < p.tiles) finish(tile - next_tile, half ^ 1, min(counted - p.first_row, p.max_rows));
#endif
}

}  // namespace

bool CudaBackend::linear_wide(const LinearArgs& a) {
  const WeightKind kind = a.w[0].kind;
  const bool int4 = kind == WeightKind::kInt4;
  const char* const name = int4 ? "linear_int4_bf16" : "linear_bf16";
  const auto kernel = int4 ? &wide_kernel<WeightKind::kInt4> : &wide_kernel<WeightKind::kBf16>;
  const size_t shared = stream::wide_shared(kind, a.w[0].k);
  const int resident = kWideCluster * resident_clusters(reinterpret_cast<const void*>(kernel), name, kWideCluster, kWideWarps * kWarp, shared);
  const int most = std::min(stream::wide_groups(resident), stream::wide_groups(device_shape_.multiprocessors));
  if (most == 0) return false;
  Params p{};
  set_wide(p, a);
  p.parts = static_cast<float4*>(exchange_), p.arrivals = arrivals_;
  const auto* x = static_cast<const uint16_t*>(a.x);
  int ldx = a.ldx;
  if (a.norm_w != nullptr) {
    auto* const normed = static_cast<uint16_t*>(a.scratch);
    norm_rows("norm_rows", normed, p.k, static_cast<const float*>(a.x), a.ldx, p.k, a.norm_w, a.eps, stream::unit_of(kind), a.max_rows, a.n_rows);
    x = normed, ldx = p.k;
  }
  const bool paired = a.epilogue == Epilogue::kSiluMul;
  if (stream::serves_whole(device_shape_, kind, p.k, p.tiles, paired) && linear_whole(a, x, ldx)) return true;
  if (stream::serves_wide_boxes(device_shape_, kind, p.k, p.tiles, paired) && linear_wide_boxes(a, x, ldx)) return true;
  const int groups = std::min(most, (p.tiles + kWideCluster - 1) / kWideCluster * kWideCluster);
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    set_rows(p, a, kWideCluster);
    p.x = rows_map(p, x, ldx);
    launch_clusters(name, kernel, kWideCluster, dim3(static_cast<unsigned>(groups * kSegments)), kWideWarps * kWarp, shared, p);
  }
  return true;
}

}  // namespace kdtree
