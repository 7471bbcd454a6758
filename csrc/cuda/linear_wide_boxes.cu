// linear for steps of many rows (17 to 64 a launch) and long rows of INT4 on Hopper: linear_wide.cu's products, in every bit, with weights
// brought by the bulk copy engine and two groups' sums in flight.
//
// Bytes: each weight once; flops 2*M*N*K on tensor cores. Bound by the scaling of sums and the turning of nibbles beside the products, then by
// what the blocks exchange.
// A block owns one segment of K and keeps its segment of all 64 rows of activations in shared memory, which come once for the two blocks of a cluster.
// Two warpgroups multiply (wide_boxes.cuh), one tile of 64 weight rows after the other; few boxes are asked for before the activations, which queue
// behind them.
// A tile's sums meet the other seven segments' in global memory (L2), where each of the eight blocks adds eight columns: the third warpgroup while
// the others multiply their second tile, and of its last tile each warpgroup itself. There are two rounds of tiles at most, each with a place for
// its sums. Telling the others that sums are there waits until memory has them all, so the third warpgroup does that too.
// A warp's sixteen rows have counters of their own, so that no warp waits for another's rows; pairs of products (SiLU) would need two of them.
// Reduction order: stream.cuh.
// Waiting: as in linear_wide.cu.
#include <algorithm>

#include "backend.h"
#include "cluster.cuh"
#include "wide_boxes.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kWideBoxChunks;
using stream::kWideBoxEarly;
using stream::kWideBoxMostDepth;
using stream::kWideBoxRounds;
using stream::kWideCluster;

struct Params : WideBoxParams {
  int depth;           // slots of a ring
  int each, rest;      // tiles of a row of blocks; rows of blocks that have one more
  float4* parts;       // [round][rows of blocks][warpgroup][segment][fragment][lane]
  unsigned* arrivals;  // [rows of blocks][warpgroup][quarter][round], never reset: eight more each time
};

constexpr int kThreads = kWideBoxThreads;

// COLUMNS: places of activation rows.
template <int COLUMNS>
__global__ __launch_bounds__(kThreads, 1) void wide_boxes_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int UNIT = kUnitK<WeightKind::kInt4>, GROUPS = kWideBoxGroups, CHUNK = kOrderedChunk<COLUMNS>;  // bytes of a chunk
  extern __shared__ __align__(1024) uint8_t smem[];
  // come and in order: of chunks, the latter counts warps. landed, freed: of the rings' slots. published: a warpgroup's tile of the first round, by its warps.
  __shared__ uint64_t come[kWideBoxChunks], in_order_at[kWideBoxChunks], landed[GROUPS][kWideBoxMostDepth], freed[GROUPS][kWideBoxMostDepth];
  __shared__ uint64_t published[GROUPS];
  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp, warpgroup = warp / 4, quarter = warp % 4;
  const int rank = cluster_rank<kWideCluster>(), segment = blockIdx.x / kWideCluster % kSegments;
  const int group = blockIdx.x / (kWideCluster * kSegments) * kWideCluster + rank, groups = gridDim.x / kSegments;
  const int units = p.k / UNIT, unit = segment_begin(segment, units), chunks = segment_begin(segment + 1, units) - unit;
  const int count = p.each + (group < p.rest ? 1 : 0);  // tiles: group, group + groups, ...
  const uint32_t staged = shared_address(smem), rings = staged + chunks * CHUNK;
  const auto ring_of = [&](int warpgroup) { return ring_at(rings, warpgroup, p.depth, landed[warpgroup], freed[warpgroup]); };

  if (threadIdx.x == 0) {
#pragma unroll
    for (int c = 0; c < kWideBoxChunks; ++c) barrier_init(shared_address(come + c), 1), barrier_init(shared_address(in_order_at + c), 4);
#pragma unroll
    for (int w = 0; w < GROUPS; ++w) barrier_init(shared_address(published + w), 4), init_ring<kWideBoxMostDepth>(ring_of(w));
  }
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  cluster_arrive<kWideCluster>();

  // Of a warpgroup's tile of a round, a warp's sixteen rows: the counter of the blocks whose sums are there, and the sums.
  const auto counter_of = [&](int of_warpgroup, int round) {
    return p.arrivals + ((group * GROUPS + of_warpgroup) * 4 + quarter) * kWideBoxRounds + round;
  };
  const auto parts_of = [&](int of_warpgroup, int round) {
    return p.parts + static_cast<size_t>((round * groups + group) * GROUPS + of_warpgroup) * (kSegments * kFragments * kWarp) + lane;
  };
  // By one lane, for what its warp or a warp it has waited for stored.
  const auto tell = [&](int of_warpgroup, int round) {
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter_of(of_warpgroup, round)) : "memory");
  };
  // What a counter is to reach, which was `before` at some time before this block told: it stands at a multiple of eight until a block tells.
  const auto awaited_of = [&](unsigned before) { return (before / kSegments + 1) * kSegments; };
  // Waits for all eight blocks' sums, and adds this block's columns.
  const auto finish = [&](int tile, int of_warpgroup, int round, unsigned awaited, int rows) {
    const Sixteen of = sixteen_of_box(p, tile, quarter);
    const float4* parts = parts_of(of_warpgroup, round) + (quarter * 8 + segment) * kWarp;
    uint32_t adds = segment * kColumns < rows && of.live;
    found_here(parts), found_here(adds);
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter_of(of_warpgroup, round)) : "memory");
    } while (static_cast<int>(seen - awaited) < 0);
    __syncwarp();
    if (adds == 0) return;
    float4 part[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) part[s] = __ldcg(parts + s * (kFragments * kWarp));
#pragma unroll
    for (int s = 1; s < kSegments; ++s) part[0] = add(part[0], part[s]);
    store_fragment(p, of, segment * kColumns, rows, part[0], lane);
  };

  if (warpgroup > GROUPS) {
    fewer_registers<kCopyRegisters>();
    const int first = unit / 2, last = (unit + chunks + 1) / 2;  // boxes of a tile; rows are so long that there is one
    WideAsker asker(ring_of(quarter % GROUPS));
    int i = quarter, box = first;  // the next box is of tile i of the block's
    const auto ask_for = [&](int most) {
      for (; most > 0 && i < count; --most) {
        asker.ask(p, group + i * groups, box);
        if (++box == last) box = first, i += GROUPS;
      }
    };
    const bool asks = elected();
    if (quarter < GROUPS && asks) ask_for(kWideBoxEarly);
    if (quarter == GROUPS && asks) {  // each cluster of those that share them, of some chunks
      prefetch_map(&p.x);
      for (int c = group / kWideCluster; c < chunks; c += groups / kWideCluster) {
        for (int box = 0; box < 2; ++box) fetch_box(&p.x, unit * UNIT + c * kWideChunk + box * kBox, rank * p.copied);
      }
    }
    __syncwarp();
    cluster_wait<kWideCluster>();  // the other block's barriers are there
    wait_for_previous();
    if (quarter == GROUPS && asks) {
      for (int c = 0; c < chunks; ++c) {
        barrier_expect(shared_address(come + c), chunk_bytes(p.copied, kWideCluster));
        copy_chunk<kWideCluster, COLUMNS>(staged + c * CHUNK, &p.x, unit * UNIT + c * kWideChunk, come + c, rank, p.copied);
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
    cluster_wait<kWideCluster>();
    const int counted = load_early(p.n_rows);
    for (int c = 0; c < chunks; ++c) {
      barrier_idle(shared_address(come + c), 0);
      order_chunk<COLUMNS, 4>(staged + c * CHUNK, quarter, lane, p.ordered, shared_address(in_order_at + c));
    }
    const int rows = min(counted - p.first_row, p.max_rows);
    unsigned before[GROUPS];
#pragma unroll
    for (int w = 0; w < GROUPS; ++w) {  // those tiles of the first round that are not their warpgroup's last
      if (w + GROUPS >= count) break;
      barrier_idle(shared_address(published + w), 0);
      before[w] = load_early(reinterpret_cast<const int*>(counter_of(w, 0)));
      __syncwarp();
      if (lane == 0) tell(w, 0);
    }
#pragma unroll
    for (int w = 0; w < GROUPS; ++w) {
      if (w + GROUPS < count) finish(group + w * groups, w, 0, awaited_of(before[w]), rows);
    }
    return;
  }

  more_registers<kMultiplyRegisters>();
  wait_for_previous();
  const int counted = load_early(p.n_rows);
  cluster_wait<kWideCluster>();
  WideReader reader(ring_of(warpgroup), quarter, lane);
  const uint32_t ordered_at = kept(shared_address(in_order_at));
  for (int i = warpgroup; i < count; i += GROUPS) {
    float acc[COLUMNS / 2];
    const int round = i / GROUPS;
    const bool last = i + GROUPS >= count;
    const unsigned before = last ? load_early(reinterpret_cast<const int*>(counter_of(warpgroup, round))) : 0;
    multiply_segment(acc, reader, lower_descriptor(staged), p.upper, unit, chunks, [&](int step) {
      if (round == 0) barrier_wait(ordered_at + step * 8, 0);
    }, [](int) {});
    const int rows = min(counted - p.first_row, p.max_rows);
    float4* parts = parts_of(warpgroup, round) + (segment * kFragments + quarter * 8) * kWarp;
    found_here(parts);  // once, and not for each of the stores
#pragma unroll
    for (int nt = 0; nt < COLUMNS / kColumns; ++nt) {  // fragment (quarter, nt) goes to block nt of the eight
      if (nt * kColumns < rows) __stcg(parts + nt * kWarp, make_float4(acc[4 * nt], acc[4 * nt + 1], acc[4 * nt + 2], acc[4 * nt + 3]));
    }
    __syncwarp();
    if (!last) {
      if (elected()) barrier_arrive(shared_address(published + warpgroup));
    } else {
      if (lane == 0) tell(warpgroup, round);
      finish(group + i * groups, warpgroup, round, awaited_of(before), rows);
    }
  }
#endif
}

}  // namespace

bool CudaBackend::linear_wide_boxes(const LinearArgs& a, const uint16_t* x, int ldx) {
  const char* const name = "linear_int4_bf16";
  Params p{};
  if (!set_wide_boxes(p, a)) return false;
  p.depth = stream::wide_box_depth(device_shape_, p.k);
  const size_t shared = stream::wide_box_shared(p.k, p.depth);
  const auto kernel_for = [](int rows) { return rows <= stream::kWideFewer ? &wide_boxes_kernel<stream::kWideFewer> : &wide_boxes_kernel<stream::kWideRows>; };
  int most = stream::wide_groups(device_shape_.multiprocessors);
  for (const int rows : {stream::kWideFewer, stream::kWideRows}) {
    const void* const kernel = reinterpret_cast<const void*>(kernel_for(rows));
    most = std::min(most, stream::wide_groups(kWideCluster * resident_clusters(kernel, name, kWideCluster, kThreads, shared)));
  }
  const int groups = std::min(most, (p.tiles + kWideCluster - 1) / kWideCluster * kWideCluster);
  if (p.tiles > kWideBoxRounds * kWideBoxGroups * groups) return false;
  p.each = p.tiles / groups, p.rest = p.tiles % groups;
  p.parts = static_cast<float4*>(exchange_), p.arrivals = arrivals_;
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    set_rows(p, a, kWideCluster);
    p.x = rows_map(p, x, ldx);
    launch_clusters(name, kernel_for(p.max_rows), kWideCluster, dim3(static_cast<unsigned>(groups * kSegments)), kThreads, shared, p);
  }
  return true;
}

}  // namespace kdtree
