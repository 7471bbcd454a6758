// linear for steps of many rows (17 to 64 a launch) and short rows of INT4 on Hopper: y = w x for up to two weights, by warpgroup products, K shared
// by a cluster.
//
// Bytes: each weight once, activations once a cluster; flops 2*M*N*K on tensor cores. Bound by the scaling of sums and the turning of nibbles beside
// the products.
// A cluster of four blocks has four tiles of 64 weight rows. A block has two segments of K, of all four tiles: its activations are there once, in order,
// and each of its two multiplying warpgroups has one segment (wide_boxes.cuh). A block adds one of the tiles, the last that it multiplies: the sums of
// the other three go to the blocks that add those beside the next tile's first products, by asynchronous stores that a barrier there counts, so that at
// the end nobody has long to wait. All columns are sent whatever the rows: branches would cost more. Half of a tile's columns are added by either
// warpgroup.
// Reduction order: stream.cuh; the bits are linear_wide.cu's.
#include "backend.h"
#include "cluster.cuh"
#include "wide_boxes.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kWholeCluster;
using stream::kWholeDepth;
using stream::kWholeEarly;
using stream::kWholeUnits;

constexpr int kThreads = kWideBoxThreads;

// COLUMNS: places of activation rows.
template <int COLUMNS>
__global__ __launch_bounds__(kThreads, 1) void whole_kernel(const __grid_constant__ WideBoxParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int UNIT = kUnitK<WeightKind::kInt4>, GROUPS = kWideBoxGroups, EACH = kSegments / kWholeCluster;
  constexpr int CHUNK = kOrderedChunk<COLUMNS>, EIGHTS = COLUMNS / kColumns, HALF = EIGHTS / GROUPS;  // bytes of a chunk of activations; eights of columns
  constexpr int FRAGMENT = kWarp * 16, QUARTER = EIGHTS * FRAGMENT, SUM = 4 * QUARTER;  // bytes; of a warp's part of a segment's sums; of these
  constexpr int PAIR = 2;  // of eights of columns that are added side by side
  static_assert(EACH == GROUPS && HALF % PAIR == 0, "a warpgroup has a segment, and adds whole pairs");
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t come[kWholeUnits], in_order_at[kWholeUnits], landed[GROUPS][kWholeDepth], freed[GROUPS][kWholeDepth], met;
  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp, warpgroup = warp / 4, quarter = warp % 4;
  const int rank = cluster_rank<kWholeCluster>(), units = p.k / UNIT;
  const auto begin_of = [&](int group) { return segment_begin(EACH * rank + group, units); };
  const int unit = begin_of(0), chunks = begin_of(GROUPS) - unit;
  // [chunk] activations; [block of the cluster, from the next one on][segment] sums, of which this block's take the place of rings.
  const uint32_t staged = shared_address(smem), sums = staged + kWholeUnits * CHUNK, rings = sums + (kWholeCluster - 1) * EACH * SUM;
  const auto ring_of = [&](int group) { return ring_at(rings, group, kWholeDepth, landed[group], freed[group]); };
  // The block adds the tile of its own place, and multiplies that last.
  const auto place_of = [&](int turn) { return (rank + 1 + turn) % kWholeCluster; };
  const auto tile_of = [&](int turn) { return static_cast<int>(blockIdx.x) / kWholeCluster * kWholeCluster + place_of(turn); };
  const auto sums_of = [&](int from, int to, int group) { return sums + ((from - to + kWholeCluster - 1) % kWholeCluster * EACH + group) * SUM; };

  if (threadIdx.x == 0) {
    for (int c = 0; c < kWholeUnits; ++c) barrier_init(shared_address(come + c), 1), barrier_init(shared_address(in_order_at + c), 4);
    for (int g = 0; g < GROUPS; ++g) init_ring<kWholeDepth>(ring_of(g));
    barrier_init(shared_address(&met), 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  cluster_arrive<kWholeCluster>();

  // Chunks in the order of their use: the two segments' in turn.
  const int each = begin_of(1) - unit;  // of the first segment; the second has as many or one more
  const auto chunk_of = [&](int i) { return i / 2 < each ? i / 2 + i % 2 * each : chunks - 1; };
  if (warpgroup > GROUPS) {
    fewer_registers<kCopyRegisters>();
    const int begin = begin_of(quarter), end = begin_of(quarter + 1), first = begin / 2, last = (end + 1) / 2;  // units, boxes of a tile
    WideAsker asker(ring_of(quarter % GROUPS));
    int turn = 0, box = first;  // the next box is of the turn's tile
    const auto ask_for = [&](int most) {
      for (; most > 0 && turn < kWholeCluster && begin < end; --most) {
        asker.ask(p, tile_of(turn), box);
        if (++box == last) box = first, ++turn;
      }
    };
    const bool asks = elected();
    if (quarter < GROUPS && asks) ask_for(kWholeEarly);
    if (quarter == GROUPS && asks) {  // each cluster, of some boxes
      prefetch_map(&p.x);
      const int clusters = gridDim.x / kWholeCluster;
      for (int box = blockIdx.x / kWholeCluster; box < 2 * chunks; box += clusters) fetch_box(&p.x, unit * UNIT + box * kBox, 0);
    }
    __syncwarp();
    cluster_wait<kWholeCluster>();
    wait_for_previous();
    if (quarter == GROUPS && asks) {
      for (int i = 0; i < chunks; ++i) {
        const int c = chunk_of(i);
        barrier_expect(shared_address(come + c), chunk_bytes(p.copied, 1));
        for (int box = 0; box < 2; ++box) copy_rows(staged + c * CHUNK + box * kOrderedBox<COLUMNS>, &p.x, (unit + c) * UNIT + box * kBox, come + c);
      }
    }
    __syncwarp();
    if (quarter <= GROUPS) meet_copying();
    if (quarter < GROUPS && asks) ask_for(1 << 30);
    return;
  }
  if (warpgroup == GROUPS) {
    fewer_registers<kOrderRegisters>();
    wait_for_previous();
    cluster_wait<kWholeCluster>();
    for (int i = 0; i < chunks; ++i) {
      const int c = chunk_of(i);
      barrier_idle(shared_address(come + c), 0);
      order_chunk<COLUMNS, 4>(staged + c * CHUNK, quarter, lane, p.ordered, shared_address(in_order_at + c));
    }
    return;
  }
  more_registers<kMultiplyRegisters>();

  wait_for_previous();
  const int counted = load_early(p.n_rows);
  cluster_wait<kWholeCluster>();  // the other blocks' barriers are there
  const int rows = max(min(counted - p.first_row, p.max_rows), 0), eights = (rows + kColumns - 1) / kColumns;
  if (threadIdx.x == 0) barrier_expect(shared_address(&met), (kWholeCluster - 1) * EACH * SUM);
  const int first = begin_of(warpgroup), steps = begin_of(warpgroup + 1) - first, chunk = first - unit;
  WideReader reader(ring_of(warpgroup), quarter, lane);
  const uint32_t ordered_at = kept(shared_address(in_order_at + chunk));
  const uint32_t mine = quarter * QUARTER + lane * 16;  // a lane's place in a segment's sums
  float acc[COLUMNS / 2];  // of the tile before: a quarter at a time, its sums are sent beside the next one's first products
  const uint32_t met_at = kept(shared_address(&met));
#pragma unroll 1
  for (int turn = 0; turn < kWholeCluster; ++turn) {
    const int to = place_of(turn - 1);
    const uint32_t there = cluster_address(sums_of(rank, to, warpgroup) + mine, to), barrier = cluster_address(met_at, to);
    multiply_segment(acc, reader, lower_descriptor(staged) + chunk * (CHUNK >> 4), p.upper, first, steps, [&](int step) {
      if (turn == 0) barrier_wait(ordered_at + step * 8, 0);
    }, [&](int part) {
      if (turn == 0) return;
#pragma unroll
      for (int nt = EIGHTS * part / 4; nt < EIGHTS * (part + 1) / 4; ++nt) {
        const float v[4] = {acc[4 * nt], acc[4 * nt + 1], acc[4 * nt + 2], acc[4 * nt + 3]};
        send(there + nt * FRAGMENT, v, barrier);
      }
    });
  }

  const Sixteen of = sixteen_of_box(p, tile_of(kWholeCluster - 1), quarter);
  uint32_t live = of.live, come_from[kWholeCluster];  // of each block, a lane's place in its first segment's sums
  found_here(live);
#pragma unroll
  for (int from = 0; from < kWholeCluster; ++from) come_from[from] = sums_of(from, rank, 0) + mine, found_here(come_from[from]);
  // This tile's own sums stand behind the others', where boxes have been read, and each warpgroup adds half of the columns.
  asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 4 * kWarp) : "memory");
#pragma unroll
  for (int nt = 0; nt < EIGHTS; ++nt) {
    const float v[4] = {acc[4 * nt], acc[4 * nt + 1], acc[4 * nt + 2], acc[4 * nt + 3]};
    store_shared(sums_of(rank, rank, warpgroup) + mine + nt * FRAGMENT, v);
  }
  asm volatile("bar.sync 1, %0;" ::"n"(GROUPS * 4 * kWarp) : "memory");
  barrier_wait(shared_address(&met), 0);
  if (live == 0) return;
#pragma unroll 1
  for (int nt = warpgroup * HALF; nt < min((warpgroup + 1) * HALF, eights); nt += PAIR) {
    float4 totals[PAIR];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < PAIR; ++i) {
        const uint4 v = load_shared16(come_from[s / EACH] + s % EACH * SUM + (nt + i) * FRAGMENT);
        const float4 sum = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
        float4& total = totals[i];
        total = s == 0 ? sum : add(total, sum);
      }
    }
#pragma unroll
    for (int i = 0; i < PAIR; ++i) store_fragment(p, of, (nt + i) * kColumns, rows, totals[i], lane);
  }
#endif
}

}  // namespace

bool CudaBackend::linear_whole(const LinearArgs& a, const uint16_t* x, int ldx) {
  WideBoxParams p{};
  if (!set_wide_boxes(p, a) || !stream::serves_whole(device_shape_, WeightKind::kInt4, p.k, p.tiles, false)) return false;
  const size_t shared = stream::whole_shared();
  const unsigned blocks = static_cast<unsigned>((p.tiles + kWholeCluster - 1) / kWholeCluster * kWholeCluster);
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    set_rows(p, a, 1);
    p.x = rows_map(p, x, ldx);
    const auto kernel = p.max_rows <= stream::kWideFewer ? &whole_kernel<stream::kWideFewer> : &whole_kernel<stream::kWideRows>;
    reserve_shared(reinterpret_cast<const void*>(kernel), "linear_int4_bf16", shared);
    launch_clusters("linear_int4_bf16", kernel, kWholeCluster, dim3(blocks), kThreads, shared, p);
  }
  return true;
}

}  // namespace kdtree
