// linear for steps of many rows (17 to 64 a launch) and long rows of INT4 on Hopper: linear_wide.cu's products, in every bit, with weights
// brought by the bulk copy engine and two groups' sums in flight.
//
// Bytes: each weight once; flops 2*M*N*K on tensor cores. Bound by the scaling of sums and the turning of nibbles beside the products, then by
// what the blocks exchange.
// A block owns one segment of K and keeps its segment of all 64 rows of activations in shared memory. Two of its warpgroups multiply, one tile of
// 64 weight rows after the other: a warp has boxes of sixteen of a tile's rows (linear_boxes.cu) in a ring of its own, few of which are asked for
// before the activations, which queue behind them. While one group of 32 is multiplied, the sums of the one before are scaled and the nibbles of
// the next turned. A third warpgroup asks for activations, which come once for the two blocks of a cluster, and puts each chunk in order where it
// stands, so that products begin with the first.
// A tile's sums meet the other seven segments' in global memory (L2), where each of the eight blocks adds eight columns: the third warpgroup while
// the others multiply their second tile, and of its last tile each warpgroup itself. There are two rounds of tiles at most, each with a place for
// its sums. Telling the others that sums are there waits until memory has them all, so the third warpgroup does that too.
// A warp's sixteen rows have counters of their own, so that no warp waits for another's rows; pairs of products (SiLU) would need two of them.
// Reduction order: stream.cuh; sums are a fourth, exactly, until a segment's end (box_copy.cuh).
// Waiting: as in linear_wide.cu.
#include <algorithm>

#include "backend.h"
#include "box_copy.cuh"
#include "stream_wide.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kBoxScaleBytes;
using stream::kBoxWeightBytes;
using stream::kWideBoxDepth;
using stream::kWideBoxEarly;
using stream::kWideBoxGroups;
using stream::kWideBoxRounds;
using stream::kWideChunk;
using stream::kWideCluster;

struct Params : WideParams {
  CUtensorMap x;                              // bf16 [max_rows, k], in boxes of kBox x kWideRows / kWideCluster
  CUtensorMap wide[2], narrow[2], scales[2];  // boxes of 128 and of 64 bytes a row, and scales of 128
  float4* parts;       // [round][rows of blocks][warpgroup][segment][fragment][lane]
  unsigned* arrivals;  // [rows of blocks][warpgroup][quarter][round], never reset: eight more each time
};

constexpr int kThreads = (kWideBoxGroups + 1) * 4 * kWarp;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Activations: boxes of 64 of K, in a box eight rows of 128 bytes after the other. Put in order, eight rows are for each 32 of K two steps of sixteen, of
// each two 8 x 16-byte matrices.
constexpr int kEightBytes = 1024, kHalfBytes = 512, kStepOfHalf = 256;
static_assert(kChunkBytes == 2 * kBoxBytes, "a chunk is two boxes");

// The lower half of a descriptor of activations; places behind it are reached by adding bytes / 16. The upper half is the same for all.
__device__ __forceinline__ uint32_t lower_descriptor(uint32_t at) { return (at & 0x3ffff) >> 4 | (kMatrixBytes >> 4) << 16; }
__device__ __forceinline__ uint64_t joined_descriptor(uint32_t lower) {
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(lower), "r"(kEightBytes >> 4));
  return whole;
}
// Bytes / 16 from the first chunk's activations to the group-th 32 of K.
__device__ __forceinline__ uint32_t group_place(int group) {
  return static_cast<uint32_t>(group / 2 * kBoxBytes + group % 2 * kHalfBytes) >> 4;
}

// The products of one group of 32, whose activations' descriptor is b: two steps, started from zero.
__device__ __forceinline__ void start_boxed(float (&d)[32], const uint32_t (&a)[8], uint32_t b) {
  const uint32_t first[4] = {a[0], a[1], a[2], a[3]}, second[4] = {a[4], a[5], a[6], a[7]};
  wgmma_fence();
  wgmma_columns(d, first, joined_descriptor(b), false);
  wgmma_columns(d, second, joined_descriptor(b + (kStepOfHalf >> 4)), true);
  wgmma_commit();
}

// A lane's words of two rows of a group as the register operands of its two steps, as q/4.
__device__ __forceinline__ void quarter_fragments(uint32_t (&a)[8], uint32_t low, uint32_t high) {
  a[0] = low_pair(low), a[1] = low_pair(high), a[2] = high_pair(low), a[3] = high_pair(high);
  a[4] = low_pair(low >> 8), a[5] = low_pair(high >> 8), a[6] = high_pair(low >> 8), a[7] = high_pair(high >> 8);
}
// Adds a group's sums times its scales: of a pair of groups, of the lane's row and the one eight below, the one or the `odd` one.
__device__ __forceinline__ void add_scaled(float (&acc)[32], const float (&sum)[32], uint32_t pair, uint32_t below, bool odd) {
  const float s[2] = {__uint_as_float(odd ? pair & 0xffff0000u : pair << 16), __uint_as_float(odd ? below & 0xffff0000u : below << 16)};
#pragma unroll
  for (int e = 0; e < 32; ++e) acc[e] = __fmaf_rn(sum[e], s[e / 2 % 2], acc[e]);
}

__device__ __forceinline__ void store_matrices(uint32_t at, const uint4& v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// By four warps, a quarter each: a chunk that has come at `at`, put in order there; `done` counts quarters. A quarter of a warp reads two rows that are
// four apart, which the swizzle brings into all banks.
__device__ __forceinline__ void order_chunk(uint32_t at, int quarter, int lane, bool ordered, uint32_t done) {
  constexpr int PIECES = kChunkBytes / 4 / 512;  // of 512 bytes, in a quarter
  const int row = lane / 4 % 2 * 4 + lane / 8, to = lane / 8 * kMatrixBytes + (lane % 2 * 4 + lane % 8 / 2) * 16;
  const auto eight = [&](int i) { return at + i / 4 * kBoxBytes + (i / 2 % 2 * 4 + quarter) * kEightBytes; };
  uint4 v[PIECES];
#pragma unroll
  for (int i = 0; i < PIECES; ++i) v[i] = load_shared16(eight(i) + row * 128 + (((i % 2 * 4 + lane % 4) ^ row) & 7) * 16);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PIECES; ++i) store_matrices(eight(i) + i % 2 * kHalfBytes + to, ordered ? v[i] : in_order(v[i]));
  fence_to_tensor_cores();
  __syncwarp();
  if (elected()) barrier_arrive(done);
}

// As barrier_wait, asking rarely: for a wait as long as a tile beside warps that have work.
__device__ __forceinline__ void barrier_idle(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n@!done bra again;\n}\n" ::"r"(at), "r"(parity)
      : "memory");
}

// A warp's sixteen rows of its warpgroup's tiles: boxes asked for, slot after slot, and read in the same order. A box is two units, or the one that
// a segment begins or ends with between two boxes. The warp calls as one.
struct Boxes {
  static constexpr int PER = 2;
  const Params& p;
  const uint32_t ring, scales, barriers, at_wide, at_narrow;  // at_*: the lane's place in a box
  const int first, groups, count, quarter, begin, steps;        // tile i is first + i * groups; units of the segment
  int ask_tile, ask_unit = 0, ask_left = 0, ask_row = 0, ask_slot = 0;
  const CUtensorMap* map = nullptr;  // wide boxes of the tile's weight; narrow ones and scales are two and four behind it
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ int units_of(int unit, int left) const { return min(left, PER - unit % PER); }
  __device__ __forceinline__ void ask() {
    if (ask_left == 0) {
      if (ask_tile >= count || steps == 0) return;
      const Sixteen of = sixteen_of(p, first + ask_tile * groups, quarter);
      map = p.wide + (of.live ? of.part : 0), ask_row = of.live ? of.at * kTileRows : 0;  // rows that are none copy the first ones' weights, for nobody
      ask_tile += kWideBoxGroups, ask_unit = begin, ask_left = steps;
    }
    const int units = units_of(ask_unit, ask_left);
    if (elected()) {
      const uint32_t barrier = barriers + ask_slot * 8;
      barrier_expect(barrier, units * (kBoxWeightBytes / PER) + kBoxScaleBytes);
      copy_box(ring + ask_slot * kBoxWeightBytes, units == 1 ? map + 2 : map, ask_unit * 64, ask_row, barrier);
      copy_box(scales + ask_slot * kBoxScaleBytes, map + 4, ask_unit / PER * 16, ask_row, barrier);
    }
    ask_unit += units, ask_left -= units;
    ask_slot = ask_slot + 1 == kWideBoxDepth ? 0 : ask_slot + 1;
  }
  // All boxes of a tile as they come, by use(at, scales, step, units): where the lane's weights and its row's scales are, the first unit's number in the
  // segment and how many there are. use() says when nothing of a box is needed any more, by ask().
  template <typename Use>
  __device__ __forceinline__ void each(int lane, const Use& use) {
#pragma unroll 1
    for (int step = 0; step < steps;) {
      const int unit = begin + step, units = units_of(unit, steps - step);
      barrier_wait(barriers + slot * 8, parity);
      use(ring + slot * kBoxWeightBytes + (units == 1 ? at_narrow : at_wide), scales + slot * kBoxScaleBytes + lane / 4 * 16 + unit % PER * 8, step, units);
      step += units;
      slot = slot + 1 == kWideBoxDepth ? 0 : slot + 1, parity ^= slot == 0;
    }
  }
};

// GROUPS of a tile, a box at `at` whose scales are at `scales`; b: its activations' descriptor. Two groups are in flight until the end; read() is called when
// nothing of the box is needed any more.
template <int GROUPS, typename Read>
__device__ __forceinline__ void multiply_box(float (&acc)[32], uint32_t at, uint32_t scales, uint32_t b, const Read& read) {
  float sum[2][32];
  uint32_t a[2][8], words[GROUPS / 2][4], scale[GROUPS / 2], below[GROUPS / 2];
#pragma unroll
  for (int i = 0; i < GROUPS / 4; ++i) {
    const uint2 upper = load_shared8(scales + i * 8), lower = load_shared8(scales + kBoxScaleBytes / 2 + i * 8);
    scale[2 * i] = upper.x, scale[2 * i + 1] = upper.y, below[2 * i] = lower.x, below[2 * i + 1] = lower.y;
  }
#pragma unroll
  for (int i = 0; i < GROUPS / 2; ++i) load_matrices(words[i], at ^ (i * 32));
#pragma unroll
  for (int g = 0; g < GROUPS + 2; ++g) {
    if (g == GROUPS + 1) {
      wgmma_wait<0>(sum[g % 2], a[g % 2]);
    } else if (g >= 2) {
      wgmma_wait<1>(sum[g % 2], a[g % 2]);
    }
    if (g >= 2) add_scaled(acc, sum[g % 2], scale[(g - 2) / 2], below[(g - 2) / 2], g % 2 != 0);
    if (g == GROUPS) read();
    if (g >= GROUPS) continue;
    quarter_fragments(a[g % 2], words[g / 2][g % 2 * 2], words[g / 2][g % 2 * 2 + 1]);
    start_boxed(sum[g % 2], a[g % 2], b + group_place(g));
  }
}

// The product of a tile's segment, once boxes and, by await(chunk), activations are there.
template <typename Await>
__device__ __forceinline__ void multiply_tile(float (&acc)[32], Boxes& boxes, uint32_t b, int lane, const Await& await) {
  const auto read = [&] { __syncwarp(), boxes.ask(); };
  boxes.each(lane, [&](uint32_t at, uint32_t scales, int step, int units) {
    await(step + units - 1);
    if (units == 2) {
      multiply_box<8>(acc, at, scales, b + group_place(4 * step), read);
    } else {
      multiply_box<4>(acc, at, scales, b + group_place(4 * step), read);
    }
  });
#pragma unroll
  for (int e = 0; e < 32; ++e) acc[e] = __fmul_rn(acc[e], 4.f);
}
#endif

__global__ __launch_bounds__(kThreads, 1) void wide_boxes_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int UNIT = kUnitK<WeightKind::kInt4>, GROUPS = kWideBoxGroups;
  extern __shared__ __align__(1024) uint8_t smem[];
  // come and in order: of chunks, the latter counts quarters. landed: of a warp's slots. published: a warpgroup's tile of the first round, by its warps.
  __shared__ uint64_t come[stream::kWideBoxChunks], in_order_at[stream::kWideBoxChunks], landed[GROUPS * 4 * kWideBoxDepth];
  __shared__ uint64_t published[GROUPS];
  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp, warpgroup = warp / 4, quarter = warp % 4;
  const int rank = cluster_rank<kWideCluster>(), segment = blockIdx.x / kWideCluster % kSegments;
  const int group = blockIdx.x / (kWideCluster * kSegments) * kWideCluster + rank, groups = gridDim.x / kSegments;
  const int units = (p.k + UNIT - 1) / UNIT, unit = segment_begin(segment, units), steps = segment_begin(segment + 1, units) - unit;
  const int chunks = (steps * UNIT + kWideChunk - 1) / kWideChunk;
  const int count = group < p.tiles ? (p.tiles - group + groups - 1) / groups : 0;  // tiles: group, group + groups, ...
  const uint32_t staged = shared_address(smem), rings = staged + chunks * kChunkBytes;

  if (threadIdx.x == 0) {
    for (int c = 0; c < chunks; ++c) barrier_init(shared_address(come + c), 1), barrier_init(shared_address(in_order_at + c), 4);
    for (int w = 0; w < GROUPS; ++w) barrier_init(shared_address(published + w), 4);
    for (int i = 0; i < GROUPS * 4 * kWideBoxDepth; ++i) barrier_init(shared_address(landed + i), 1);
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
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter_of(of_warpgroup, round)) : "memory");
    } while (static_cast<int>(seen - awaited) < 0);
    __syncwarp();
    const Sixteen of = sixteen_of(p, tile, quarter);
    if (segment * kColumns >= rows || !of.live) return;
    const float4* const parts = parts_of(of_warpgroup, round) + (quarter * 8 + segment) * kWarp;
    float4 part[kSegments];
#pragma unroll
    for (int s = 0; s < kSegments; ++s) part[s] = __ldcg(parts + s * (kFragments * kWarp));
#pragma unroll
    for (int s = 1; s < kSegments; ++s) part[0] = add(part[0], part[s]);
    write_fragment(p, of, segment * kColumns, rows, part[0], part[0], lane);
  };

  if (warpgroup == GROUPS) {
    wait_for_previous();
    cluster_wait<kWideCluster>();  // the other block's barriers are there
    const int counted = load_early(p.n_rows);
    if (quarter == 0 && elected()) {
      for (int c = 0; c < chunks; ++c) {
        barrier_expect(shared_address(come + c), kChunkBytes);
        copy_chunk<kWideCluster>(staged + c * kChunkBytes, &p.x, unit * UNIT + c * kWideChunk, come + c, rank);
      }
    }
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");  // activations have been asked for, and more weights may be
    for (int c = 0; c < chunks; ++c) {
      barrier_idle(shared_address(come + c), 0);
      order_chunk(staged + c * kChunkBytes, quarter, lane, p.ordered, shared_address(in_order_at + c));
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

  const int row = lane & 15, piece = lane >> 4;  // the lane's row address of ldmatrix, groups 0 and 1; ^ 32 for groups 2 and 3
  Boxes boxes{p,
              rings + warp * kWideBoxDepth * kBoxWeightBytes,
              rings + (GROUPS * 4 * kBoxWeightBytes + warp * kBoxScaleBytes) * kWideBoxDepth,
              shared_address(landed + warp * kWideBoxDepth),
              static_cast<uint32_t>(row * 128 + (piece ^ (row & 7)) * 16),
              static_cast<uint32_t>(row * 64 + (piece ^ (row >> 1 & 3)) * 16),
              group, groups, count, quarter, unit, steps, warpgroup};
#pragma unroll 1
  for (int i = 0; i < kWideBoxEarly; ++i) boxes.ask();
  wait_for_previous();
  const int counted = load_early(p.n_rows);
  cluster_wait<kWideCluster>();
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
#pragma unroll 1
  for (int i = kWideBoxEarly; i < kWideBoxDepth; ++i) boxes.ask();

  const uint32_t b = lower_descriptor(staged);
  int known = 0;  // chunks that are in order
  const auto await = [&](int chunk) {
    for (; known <= chunk; ++known) barrier_wait(shared_address(in_order_at + known), 0);
  };
  for (int i = warpgroup; i < count; i += GROUPS) {
    float acc[32];
#pragma unroll
    for (int e = 0; e < 32; ++e) acc[e] = 0.f;
    const int round = i / GROUPS;
    const bool last = i + GROUPS >= count;
    const unsigned before = last ? load_early(reinterpret_cast<const int*>(counter_of(warpgroup, round))) : 0;
    multiply_tile(acc, boxes, b, lane, await);
    const int rows = min(counted - p.first_row, p.max_rows);
    float4* const parts = parts_of(warpgroup, round) + (segment * kFragments + quarter * 8) * kWarp;
#pragma unroll
    for (int nt = 0; nt < 8; ++nt) {  // fragment (quarter, nt) goes to block nt of the eight
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
  for (int i = 0; i < a.parts; ++i) {
    if (reinterpret_cast<uintptr_t>(a.w[i].scale) % 16 != 0) return false;
  }
  Params p{};
  set_wide(p, a);
  const size_t shared = stream::wide_box_shared(p.k);
  const int resident = kWideCluster * resident_clusters(reinterpret_cast<const void*>(wide_boxes_kernel), name, kWideCluster, kThreads, shared);
  const int most = std::min(stream::wide_groups(resident), stream::wide_groups(device_shape_.multiprocessors));
  const int groups = std::min(most, (p.tiles + kWideCluster - 1) / kWideCluster * kWideCluster);
  if (p.tiles > kWideBoxRounds * kWideBoxGroups * groups) return false;
  p.parts = static_cast<float4*>(exchange_), p.arrivals = arrivals_;
  for (int i = 0; i < a.parts; ++i) {
    const Weight& w = a.w[i];
    const uint64_t pitch = static_cast<uint64_t>(p.k) / 2;
    p.wide[i] = row_map(w.data, w.data, pitch, w.n, 128, kTileRows, true), p.narrow[i] = row_map(w.data, w.data, pitch, w.n, 64, kTileRows, true);
    p.scales[i] = row_map(w.scale, w.scale, pitch / 8, w.n, 16, kTileRows, false);
  }
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    set_rows(p, a);
    p.x = rows_map(p, x, ldx, stream::kWideRows / kWideCluster);
    launch_clusters(name, wide_boxes_kernel, kWideCluster, dim3(static_cast<unsigned>(groups * kSegments)), kThreads, shared, p);
  }
  return true;
}

}  // namespace kdtree
