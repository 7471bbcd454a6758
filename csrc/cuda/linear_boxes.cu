// linear for up to 16 rows on Hopper: linear_stream.cu's products, in every bit, with weights brought by the bulk copy engine.
//
// Bytes: each weight once; flops 2*M*N*K on tensor cores. Bound by weight bytes; behind them by the instructions that turn nibbles into bf16.
// A box is 16 weight rows x 128 bytes, two units of K, of rows as they lie in the file, beginning at a multiple of 128 bytes of a row; where a
// segment begins or ends between two such places it has half of a box. A warp has one segment of K, of its tiles one after the other, and a
// ring of its own with an mbarrier a slot: one lane asks for the next box as soon as the warp has multiplied what stood in its place, so
// that all slots but one are on their way, before the launch before has ended too. Where two blocks fit a multiprocessor, one is the next
// launch's. The blocks of a cluster have kSegments/CL segments each of all the cluster's tiles. A tile's sums go to the block that adds its
// eight: in a cluster through distributed shared memory, counted by a barrier there, so that nobody waits for a block that has nothing for it.
// Reduction order: stream.cuh; the norm's sum of squares likewise by segments. Neither depends on M, the shape or the grid.
#include "backend.h"
#include "boxes.cuh"
#include "held_rows.cuh"
#include "tensor_map.h"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kBoxWeightBytes;
using stream::kZeros;

struct Params {
  CUtensorMap wide[2], narrow[2], scales[2];  // boxes of 128 and of 64 bytes a row, and int4's scales of 128
  const void* x;                              // f32 with a norm, else bf16
  int ldx, k;
  const float* norm_w;
  float eps;
  int n[2];
  void* out[2];  // f32; bf16 for kSiluMul
  int ldo[2];
  Epilogue epilogue;
  int outputs;  // tiles, or pairs of them for kSiluMul, shared out among the clusters
  int batch;    // of a cluster, whose sums meet at a time
  int stride;   // bytes between staged rows
  int rows;     // at most
  const int32_t* n_rows;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// NT: tiles of eight rows of activations; 0: up to four rows, at the even columns of one (int4). BOXES: of a slot.
template <WeightKind KIND, int NT, int CL, int WARPS, int BOXES_, int DEPTH_, int RESIDENT>
struct Shape {
  static constexpr int TILES = NT == 0 ? 1 : NT, VALUES = NT == 0 ? 2 : 4, COLUMNS = NT == 0 ? kColumns / 2 : NT * kColumns;
  static constexpr int BOXES = BOXES_, DEPTH = DEPTH_;
  static constexpr int SPC = kSegments / CL, TW = WARPS / SPC;  // segments a block, tiles side by side
  static constexpr bool INT4 = KIND == WeightKind::kInt4, ABSENT = TILES == 1;  // columns may have no row
  static constexpr int SLOT = BOXES * kBoxWeightBytes, LINE = BOXES * 16, SCALES = INT4 ? kTileRows * LINE : 0;  // LINE: of a row's scales
  static constexpr int RING = WARPS * DEPTH * (SLOT + SCALES);
  static constexpr int SET = kColumns * VALUES * 4;  // bytes of a tile's sums over a segment, of one or two columns
  // Slots that are asked for before the launch before has ended. A block that fills its multiprocessor begins when that has: then
  // activations come sooner if few weights stand before them.
  static constexpr int EARLY = RESIDENT > 1 ? DEPTH : 1;
  static_assert(WARPS % SPC == 0, "a warp has one segment");
  static_assert(NT > 0 || INT4, "bf16 weights' sums are the fragments themselves");
};

// The copying side of a warp: what its ring is to be filled with, slot after slot. The warp calls as one.
template <typename S>
struct Copies {
  const Params& p;
  const int tiles, tiles0, first, begin, steps;  // of the cluster, of the first weight; the cluster's first output; the warp's segment
  const bool paired;
  const uint32_t ring, scales, barriers;
  int tile, unit = 0, left = 0, row = 0;
  uint32_t to = ring, scales_to = scales, barrier = barriers;
  const CUtensorMap* map = nullptr;  // wide boxes of the tile's weight; narrow ones and scales are two and four behind it

  __device__ __forceinline__ void ask() {
    if (left == 0) {
      if (tile >= tiles) return;
      const int at = first + (paired ? tile >> 1 : tile);
      const bool second = paired ? tile % 2 != 0 : at >= tiles0;
      map = p.wide + second, row = (second && !paired ? at - tiles0 : at) * kTileRows;
      tile += S::TW, unit = begin, left = steps;
    }
    const int head = 2 - unit % 2, full = min(left, head + 2 * (S::BOXES - 1));  // units of the first box, which begin where it does or in its middle, and of all
    if (elected()) {
      barrier_expect(barrier, full * (kBoxWeightBytes / 2) + S::SCALES);
      copy_box(to, min(full, head) == 1 ? map + 2 : map, unit * 64, row, barrier);
      if (S::BOXES > 1 && full > head) copy_box(to + kBoxWeightBytes, full - head == 1 ? map + 2 : map, (unit + head) * 64, row, barrier);
      if (S::INT4) copy_box(scales_to, map + 4, unit / 2 * 16, row, barrier);
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

template <WeightKind KIND, int NT, int CL, int WARPS, int BOXES, int DEPTH, int RESIDENT, int HELD, int PIECES>
__global__ __launch_bounds__(WARPS * kWarp, RESIDENT) void boxes_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<KIND, NT, CL, WARPS, BOXES, DEPTH, RESIDENT>;
  constexpr int SPC = S::SPC, UNIT = kUnitK<KIND>, TILES = S::TILES, VALUES = S::VALUES;
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t landed[WARPS * DEPTH], met;
  __shared__ float squares[S::COLUMNS * SPC], inverse[S::COLUMNS];
  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp, local = warp % SPC;
  const int rank = cluster_rank<CL>(), cluster = blockIdx.x / CL, clusters = gridDim.x / CL;
  const int units = (p.k + UNIT - 1) / UNIT, block_unit = segment_begin(rank * SPC, units);
  const int begin = segment_begin(rank * SPC + local, units), steps = segment_begin(rank * SPC + local + 1, units) - begin;
  const bool paired = p.epilogue == Epilogue::kSiluMul, absent_rows = S::ABSENT;
  const int parts = paired ? 2 : 1, tiles0 = (p.n[0] + kTileRows - 1) / kTileRows;
  const int first = stream::share_begin(p.outputs, clusters, cluster), count = stream::share_begin(p.outputs, clusters, cluster + 1) - first;
  const int sets = VALUES == 2 ? p.rows : (p.rows + 1) / 2, tile_sums = kSegments * sets * S::SET;
  uint8_t* const sums = smem + S::RING;
  uint8_t* const staged = sums + (p.batch + CL - 1) / CL * parts * tile_sums + kZeros;
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * S::SLOT);
  const uint32_t scales = shared_address(smem) + WARPS * DEPTH * S::SLOT + warp * (DEPTH * S::SCALES);
  const uint32_t barriers = shared_address(landed + warp * DEPTH);

  if (lane == 0)
    for (int i = 0; i < DEPTH; ++i) barrier_init(barriers + i * 8, 1);
  if (CL > 1 && threadIdx.x == 0) barrier_init(shared_address(&met), 1);
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  cluster_arrive<CL>();  // the others may send once they have waited for it
  Copies<S> copies{p, count * parts, tiles0, first, begin, steps, paired, ring, scales, barriers, steps > 0 ? warp / SPC : count * parts};
  copies.ask(S::EARLY);
  std::conditional_t<(HELD > 0), HeldRows<HELD, PIECES, CL, WARPS>, int> held;
  if constexpr (HELD > 0) held.weights(p.norm_w, p.k, segment_begin(rank * SPC + local, units) * UNIT, segment_begin(rank * SPC + local + 1, units) * UNIT);

  wait_for_previous();
  // Rows that do not count are staged and multiplied like the others, which need not wait for the count to arrive; they are not written.
  int counted = load_early(p.n_rows);
  // Columns without a row stage nothing; their lanes read zeros, again and again.
  const int columns = absent_rows ? p.rows : S::COLUMNS;
  const int k_first = block_unit * UNIT, length = segment_begin((rank + 1) * SPC, units) * UNIT - k_first;
  if constexpr (HELD > 0) {
    copies.ask(DEPTH - S::EARLY);
    cluster_wait_others<CL>();
    held.stage(staged, p.stride, k_first, squares, inverse, static_cast<const float*>(p.x), p.ldx, p.rows, p.eps);
    cluster_arrive<CL>();  // others may still read this block's squares: it must not leave before they have
  } else {
    stage_rows(staged, p.stride, static_cast<const uint16_t*>(p.x), p.ldx, p.rows, columns, p.k, k_first, length,
               [&] { copies.ask(DEPTH - S::EARLY); });
    cluster_wait_others<CL>();
  }
  if (S::ABSENT && threadIdx.x < kZeros / 16) reinterpret_cast<uint4*>(staged - kZeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  const BoxOffsets at = box_offsets<KIND>(lane);
  const int b_column = VALUES == 2 ? lane / 8 : lane / 4;
  const bool absent = S::ABSENT && b_column >= columns;
  const uint32_t b_first = shared_address(staged) + lane % 4 * 16 +
                           (absent ? 0 - static_cast<uint32_t>(kZeros) : b_column * p.stride + (begin - block_unit) * (UNIT * 2));
  const uint32_t b_unit = absent ? 0 : UNIT * 2;
  uint32_t slot = ring, slot_scales = scales + lane / 4 * S::LINE, slot_barrier = barriers, parity = 0;
  bool met_parity = false;
  int tile = warp / SPC;
  for (int batch_at = 0; batch_at < count; batch_at += p.batch) {
    const int batch = min(p.batch, count - batch_at), batch_end = (batch_at + batch) * parts;
    const int mine = (batch - rank + CL - 1) / CL;  // outputs that this block adds: every CL-th of the batch
    if (CL > 1 && threadIdx.x == 0 && mine > 0) barrier_expect(shared_address(&met), mine * parts * tile_sums);
#pragma unroll 1
    for (; tile < batch_end; tile += S::TW) {
      float acc[TILES][VALUES] = {};
      uint32_t b_at = b_first;
      int unit = begin;
#pragma unroll 1
      for (int left = steps; left > 0;) {
        const auto b = [&](int nt, int piece) { return load_shared16(b_at + nt * kColumns * p.stride + piece * 64); };
        barrier_wait(slot_barrier, parity);
#pragma unroll
        for (int box = 0; box < S::BOXES; ++box) {
          if (box > 0 && left == 0) break;
          const uint32_t here = slot + box * kBoxWeightBytes;
          uint4 scale{}, below{};
          if (S::INT4) scale = load_shared16(slot_scales + box * 16), below = load_shared16(slot_scales + box * 16 + kColumns * S::LINE);
          const bool second = unit % 2 != 0, half = left == 1 || second;
          if (half) {
            multiply_box_unit<KIND>(acc, here + at.narrow, {second ? scale.z : scale.x, second ? scale.w : scale.y},
                                    {second ? below.z : below.x, second ? below.w : below.y}, here + at.narrow + 512, b);
            b_at += b_unit;
          } else {
            multiply_box_unit<KIND>(acc, here + at.wide, {scale.x, scale.y}, {below.x, below.y}, here + at.wide + 1024, b);
            b_at += b_unit;
            multiply_box_unit<KIND>(acc, here + (at.wide ^ 64), {scale.z, scale.w}, {below.z, below.w}, here + (at.wide ^ 64) + 1024, b);
            b_at += b_unit;
          }
          unit += half ? 1 : 2, left -= half ? 1 : 2;
        }
        __syncwarp();
        copies.ask();
        const bool last = slot == ring + (DEPTH - 1) * S::SLOT;
        slot = last ? ring : slot + S::SLOT, slot_scales = last ? slot_scales - (DEPTH - 1) * S::SCALES : slot_scales + S::SCALES;
        slot_barrier = last ? barriers : slot_barrier + 8, parity ^= last;
      }
      const int j = tile - batch_at * parts, output = paired ? j >> 1 : j, owner = output % CL;
      const uint32_t to = shared_address(sums) + (output / CL * parts + (paired ? j & 1 : 0)) * tile_sums +
                          ((rank * SPC + local) * sets * kColumns + lane / 4) * (VALUES * 4);
#pragma unroll
      for (int nt = 0; nt < TILES; ++nt) {
        const int set = nt * 4 + lane % 4;
        if (set >= sets) continue;
        float v[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; ++i) v[i] = whole_sum<KIND>(acc[nt][i]);
        const uint32_t place = to + set * S::SET;
        if constexpr (CL > 1) {
          send(cluster_address(place, owner), v, cluster_address(shared_address(&met), owner));
        } else {
          store_shared(place, v);
        }
      }
    }

    if constexpr (CL > 1) {
      if (mine > 0) barrier_wait(shared_address(&met), met_parity);
    } else {
      __syncthreads();
    }
    asm volatile("" : "+r"(counted));  // whose load nothing before this waits for
    const int rows = min(counted, p.rows);
    for (int i = threadIdx.x; i < mine * sets * kColumns; i += WARPS * kWarp) {
      const int g = i % kColumns, set = i / kColumns % sets, own = i / kColumns / sets;
      const auto total = [&](int part, float (&v)[VALUES]) {
        const float* from = reinterpret_cast<const float*>(sums + (own * parts + part) * tile_sums) + (set * kColumns + g) * VALUES;
#pragma unroll
        for (int e = 0; e < VALUES; ++e) v[e] = from[e];
#pragma unroll
        for (int s = 1; s < kSegments; ++s) {
          from += sets * kColumns * VALUES;
#pragma unroll
          for (int e = 0; e < VALUES; ++e) v[e] = __fadd_rn(v[e], from[e]);
        }
      };
      const int at_output = first + batch_at + own * CL + rank, part = !paired && at_output >= tiles0;
      float y[VALUES];
      total(0, y);
      if (paired) {
        float up[VALUES];
        total(1, up);
#pragma unroll
        for (int e = 0; e < VALUES; ++e) y[e] = __fmul_rn(silu(y[e]), up[e]);
      }
#pragma unroll
      for (int e = 0; e < VALUES; ++e) {
        const int m = VALUES == 2 ? set : set * 2 + e % 2, n = (at_output - part * tiles0) * kTileRows + g + e / (VALUES / 2) * 8;
        if (m >= rows || n >= p.n[part]) continue;
        const size_t place = static_cast<size_t>(m) * p.ldo[part] + n;
        if (paired) {
          static_cast<uint16_t*>(p.out[part])[place] = round_bf16(y[e]);
        } else {
          float* const o = static_cast<float*>(p.out[part]) + place;
          *o = p.epilogue == Epilogue::kResidual ? __fadd_rn(*o, y[e]) : y[e];
        }
      }
    }
    met_parity ^= mine > 0;
    if (batch_at + p.batch < count) {  // before the sums' places are written again
      if (CL > 1 && HELD > 0 && batch_at == 0) cluster_wait_others<CL>();
      cluster_arrive<CL>();
      cluster_wait<CL>();
    }
  }
  if (CL > 1 && HELD > 0 && count <= p.batch) cluster_wait_others<CL>();
#endif
}

using Kernel = void (*)(Params);

template <WeightKind KIND, const auto& TABLE, size_t... I>
Kernel kernel_at(int index, std::index_sequence<I...>) {
  constexpr Kernel kernels[] = {&boxes_kernel<KIND, TABLE[I].nt, TABLE[I].cl, TABLE[I].warps, TABLE[I].boxes, TABLE[I].depth,
                                                    TABLE[I].resident, TABLE[I].held, TABLE[I].pieces>...};
  return kernels[index];
}
template <WeightKind KIND, const auto& TABLE>
Kernel kernel_of(int index) {
  return kernel_at<KIND, TABLE>(index, std::make_index_sequence<std::size(TABLE)>());
}

}  // namespace

bool CudaBackend::linear_boxes(const LinearArgs& a) {
  const int k = a.w[0].k;
  const WeightKind kind = a.w[0].kind;
  const bool int4 = kind == WeightKind::kInt4, paired = a.epilogue == Epilogue::kSiluMul;
  const int tiles = (a.w[0].n + kTileRows - 1) / kTileRows, others = a.parts > 1 && !paired ? (a.w[1].n + kTileRows - 1) / kTileRows : 0;
  const stream::BoxLaunch launch = stream::plan_linear_boxes(device_shape_, kind, k, a.max_rows, tiles + others, paired, a.norm_w != nullptr);
  if (launch.variant < 0) return false;
  const stream::LinearBoxes& v = int4 ? stream::kBoxesInt4[launch.variant] : stream::kBoxesBf16[launch.variant];
  Params p{};
  p.x = a.x, p.ldx = a.ldx, p.k = k, p.norm_w = a.norm_w, p.eps = a.eps, p.epilogue = a.epilogue, p.rows = a.max_rows, p.n_rows = a.n_rows;
  p.outputs = tiles + others, p.batch = launch.batch, p.stride = stream::staged_stride(stream::staged_length(k, v.cl, stream::unit_of(kind)));
  const uint64_t pitch = static_cast<uint64_t>(int4 ? k / 2 : k * 2);
  for (int i = 0; i < 2; ++i) {
    const int j = i < a.parts ? i : 0;
    const Weight& w = a.w[j];
    if (int4 && reinterpret_cast<uintptr_t>(w.scale) % 16 != 0) return false;
    p.n[i] = i < a.parts ? w.n : 0, p.out[i] = a.out[paired ? 0 : j], p.ldo[i] = a.ldo[paired ? 0 : j];
    p.wide[i] = row_map(w.data, w.data, pitch, w.n, 128, kTileRows, true), p.narrow[i] = row_map(w.data, w.data, pitch, w.n, 64, kTileRows, true);
    if (int4) p.scales[i] = row_map(w.scale, w.scale, static_cast<uint64_t>(k) / 16, w.n, v.boxes * 16, kTileRows, false);
  }
  const Kernel kernel = int4 ? kernel_of<WeightKind::kInt4, stream::kBoxesInt4>(launch.variant)
                             : kernel_of<WeightKind::kBf16, stream::kBoxesBf16>(launch.variant);
  const char* const name = int4 ? "linear_int4_bf16" : "linear_bf16";
  reserve_shared(reinterpret_cast<const void*>(kernel), name, launch.shared);
  launch_clusters(name, kernel, v.cl, dim3(static_cast<unsigned>(launch.clusters * v.cl)), v.warps * kWarp, launch.shared, p);
  return true;
}

}  // namespace kdtree
