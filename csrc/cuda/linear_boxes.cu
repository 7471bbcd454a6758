// linear for up to 16 rows on Hopper: linear_stream.cu's products, in every bit, with weights brought by the bulk copy engine.
//
// Bytes: each weight once; flops 2*M*N*K on tensor cores. Bound by weight bytes; behind them by the instructions that turn nibbles into bf16.
// A box is 16 weight rows x 128 bytes, two units of K, of rows as they lie in the file, beginning at a multiple of 128 bytes of a row; where a
// segment begins or ends between two such places it has half of a box. A warp has one segment of K, of its tiles one after the other, and a
// ring of its own with an mbarrier a slot: one lane asks for the next box as soon as the warp has multiplied what stood in its place, so
// that all slots but one are on their way, before the launch before has ended too. Where two blocks fit a multiprocessor, one is the next
// launch's. The blocks of a cluster have kSegments/CL segments each of all the cluster's tiles. A tile's sums go to the block that adds its
// eight: in a cluster through distributed shared memory, counted by a barrier there, so that nobody waits for a block that has nothing for it.
// Activations stand in blocks of 64 elements of all rows, swizzled like weights and in K's own order. Without a norm the bulk copy engine brings
// them, a segment at a time, for which alone its warps wait (of bf16 weights a warp of its own asks for them); with one, warps hold their pieces of a row from its squares to the rounded value
// (held_rows.cuh). Where threads stage them, which is the quicker way to few, they stand row after row in the nibbles' order (nibbles.cuh).
// Weights are the first that L2 forgets, so that activations stay.
// Reduction order: stream.cuh; the norm's sum of squares likewise by segments. Neither depends on M, the shape or the grid.
#include "backend.h"
#include "boxes.cuh"
#include "cluster.cuh"
#include "held_rows.cuh"
#include "linear_boxes.cuh"
#include "staged_rows.cuh"
#include "tensor_map.h"

namespace kdtree {
namespace {

using namespace cuda;

template <WeightKind KIND, int ROWS, int MT, int CL, int WARPS, int BOXES, int DEPTH, int RESIDENT, int HELD, int PIECES, bool BY_THREADS>
__global__ __launch_bounds__((WARPS + stream::asks_apart(KIND, CL, RESIDENT, HELD, BY_THREADS)) * kWarp, RESIDENT) void boxes_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<KIND, ROWS, MT, CL, WARPS, BOXES, DEPTH, RESIDENT>;
  constexpr int SPC = S::SPC, UNIT = kUnitK<KIND>, NT = S::NT, VALUES = S::VALUES;
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t landed[WARPS * DEPTH], met, came[SPC];
  __shared__ float squares[HELD > 0 ? ROWS * SPC : 1], inverse[HELD > 0 ? ROWS : 1];
  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp, local = warp % SPC;
  const int rank = cluster_rank<CL>(), cluster = blockIdx.x / CL;
  const int units = (p.k + UNIT - 1) / UNIT;
  const int begin = segment_begin(rank * SPC + local, units), steps = segment_begin(rank * SPC + local + 1, units) - begin;
  const bool paired = p.epilogue == Epilogue::kSiluMul;
  const int parts = paired ? 2 : 1, tiles0 = (p.n[0] + kTileRows - 1) / kTileRows;
  const int first = stream::share_begin(p.each, p.rest, cluster), count = stream::share_begin(p.each, p.rest, cluster + 1) - first;
  const int sets = p.sets, tile_sums = kSegments * sets * S::SET;
  // Activations begin where a swizzled box may, behind the weights; what threads stage comes last.
  uint8_t* staged = smem + S::WEIGHTS + local * p.area;  // the warp's segment
  uint8_t* const sums = smem + S::WEIGHTS + (BY_THREADS ? 0 : p.activations) + WARPS * DEPTH * S::SCALES;
  constexpr bool FLIPS = stream::flips_rows(KIND, MT, BY_THREADS);  // then each column of a tile has a place, and none reads the zeros
  if (BY_THREADS) staged = sums + (p.batch + CL - 1) / CL * parts * tile_sums + (FLIPS ? 0 : kZeros);  // all rows
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * S::SLOT);
  const uint32_t scales = shared_address(smem) + S::WEIGHTS + (BY_THREADS ? 0 : p.activations) + warp * (DEPTH * S::SCALES);
  constexpr bool ENGINE = HELD == 0 && !BY_THREADS, APART = stream::asks_apart(KIND, CL, RESIDENT, HELD, BY_THREADS);
  // Slots that are asked for before the launch before has ended. A block that fills its multiprocessor begins when that has, and the engine takes
  // requests in turn: then activations come sooner if few weights stand before them.
  constexpr int EARLY = RESIDENT == 1 || (ENGINE && CL > 1) ? 1 : DEPTH;
  const uint32_t barriers = shared_address(landed + warp * DEPTH), activations = shared_address(came + local);
  const int block = begin * UNIT / kBlock;  // of activations, in whose middle a segment may begin
  // Staged by threads: columns without a row stage nothing; their lanes read zeros, again and again.
  const int columns = NT == 1 ? p.rows : NT * kColumns, k_first = segment_begin(rank * SPC, units) * UNIT;
  const bool absent = BY_THREADS && lane / 4 >= columns;
  const int length = segment_begin((rank + 1) * SPC, units) * UNIT - k_first;  // of a row that is staged

  if (APART && warp == WARPS) {
    // A block that fills its multiprocessor begins when one of the launch before has ended there. Of the last of them the others wait for this block's
    // activations from its first instruction on, so a warp of its own asks for them, a lane for each segment.
    const int from = segment_begin(rank * SPC + lane, units), end = segment_begin(rank * SPC + lane + 1, units);
    const uint32_t there = shared_address(came + lane);
    if (lane < SPC) barrier_init(there, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.arrive 1, %0;" ::"n"((WARPS + 1) * kWarp) : "memory");
    wait_for_previous();
    if (lane < SPC && from < end) {
      barrier_expect(there, p.area);
      copy_blocks(shared_address(smem) + S::WEIGHTS + lane * p.area, &p.boxes, from * UNIT / kBlock, there);
    }
    __syncwarp();
    cluster_arrive<CL>();
    return;
  }
  if (lane == 0)
    for (int i = 0; i < DEPTH; ++i) barrier_init(barriers + i * 8, 1);
  if (CL > 1 && threadIdx.x == 0) barrier_init(shared_address(&met), 1);
  if (ENGINE && !APART && warp < SPC && lane == 0) barrier_init(activations, 1);
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  cluster_arrive<CL>();  // the others may send once they have waited for it
  Copies<S> copies{p, count * parts, tiles0, first, begin, steps, paired, ring, scales, barriers, steps > 0 ? warp / SPC * MT : count * parts};
  copies.ask(EARLY);
  std::conditional_t<(HELD > 0), HeldRows<HELD, PIECES, CL, WARPS>, int> held;
  if (ENGINE && !APART && threadIdx.x == 0) asm volatile("prefetch.tensormap [%0];" ::"l"(&p.boxes) : "memory");
  if (ENGINE && !APART) __syncthreads();  // every segment's barriers are there
  if constexpr (HELD > 0) held.weights(p.norm_w, p.k, segment_begin(rank * SPC + local, units) * UNIT, segment_begin(rank * SPC + local + 1, units) * UNIT);
  // No division and no parameter's arrival is to lie between the wait and what is loaded first: the branch, which nobody takes, needs them before it.
  const FirstPiece first_piece(length);
  if (BY_THREADS && ((first_piece.any_sign() | p.ldx) < 0 || p.x == nullptr || p.n_rows == nullptr)) __trap();

  wait_for_previous();
  // Rows that do not count are staged and multiplied like the others, which need not wait for the count to arrive; they are not written.
  int counted = load_early(p.n_rows);
  if constexpr (HELD > 0) {
    copies.ask(DEPTH - EARLY);
    cluster_wait_others<CL>();
    held.template stage<S::BLOCK>(staged, block * kBlock, squares, inverse, static_cast<const float*>(p.x), p.ldx, p.rows, p.eps);
    cluster_arrive<CL>();  // others may still read this block's squares: it must not leave before they have
    __syncthreads();
  } else {
    if constexpr (BY_THREADS) {
      stage_rows<FLIPS>(staged, p.stride, static_cast<const uint16_t*>(p.x), p.ldx, p.rows, columns, p.k, k_first, length, first_piece,
                        [&] { copies.ask(DEPTH - EARLY); });
      cluster_wait_others<CL>();
      if (!FLIPS && threadIdx.x < kZeros / 16) reinterpret_cast<uint4*>(staged - kZeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
      __syncthreads();
    } else {
      if (!APART && warp < SPC && steps > 0 && elected()) {
        barrier_expect(activations, p.area);
        copy_blocks(shared_address(staged), &p.boxes, block, activations);
      }
      __syncwarp();
      copies.ask(DEPTH - EARLY);
      cluster_wait_others<CL>();
    }
  }

  // Kept, in place of found again at every box: where a lane's weights and scales stand there, and which sums it has.
  BoxOffsets at = box_offsets<KIND>(lane);
  uint32_t my_scales = 0;
  int quad = lane % 4;
  if constexpr (S::KEEPS) {
    at = {__shfl_sync(kAll, at.wide, lane), __shfl_sync(kAll, at.narrow, lane)};
    my_scales = __shfl_sync(kAll, lane / 4 * S::LINE, lane), quad = __shfl_sync(kAll, quad, lane);
  }
  // Column lane/4 of a tile has such a row that the two rows which eight lanes read lie in all banks.
  const int row = ROWS == 1 ? 0 : ROWS == 4 ? lane / 8 : stream::row_of_column(lane / 4);
  const uint32_t b_row = BY_THREADS ? (absent ? 0 - static_cast<uint32_t>(kZeros) : lane / 4 * p.stride + (begin * UNIT - k_first) * 2) + lane % 4 * 16
                                    : row * kBlockBytes + (lane % 4 ^ row) * 16;
  const uint32_t b_first = shared_address(staged) + (FLIPS ? b_row ^ lane / 4 % 2 * 64 : b_row), b_unit = absent ? 0 : UNIT * 2;
  if (APART) asm volatile("bar.sync 1, %0;" ::"n"((WARPS + 1) * kWarp) : "memory");  // the segments' barriers are there
  if (ENGINE && steps > 0) barrier_wait(activations, 0);
  uint32_t slot = ring, slot_scales = scales + (S::KEEPS ? 0 : lane / 4 * S::LINE), slot_barrier = barriers, parity = 0;
  bool met_parity = false;
  // Kept, in place of found again wherever they are used: the barrier's address, and that of the lane's own sums in a block.
  const uint32_t met_at = __shfl_sync(kAll, shared_address(&met), 0);
  const uint32_t my_sums =
      __shfl_sync(kAll, shared_address(sums) + ((rank * SPC + local) * sets * kColumns + lane / 4) * (VALUES * 4) + lane % 4 * S::SET, lane);
  int tile = warp / SPC * MT;
  for (int batch_at = 0; batch_at < count; batch_at += p.batch) {
    const int batch = min(p.batch, count - batch_at), batch_end = (batch_at + batch) * parts;
    const int mine = (batch - rank + CL - 1) / CL;  // outputs that this block adds: every CL-th of the batch
    if (CL > 1 && threadIdx.x == 0 && mine > 0) barrier_expect(met_at, mine * parts * tile_sums);
#pragma unroll 1
    for (; tile < batch_end; tile += S::TW) {
      float acc[MT][NT][VALUES] = {};
      uint32_t b_at = b_first;
      uint32_t to[MT];  // where a tile's sums go, of the block that adds it: found while the first box may still be on its way
      int owner[MT];
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const unsigned j = tile + mt - batch_at * parts, output = paired ? j >> 1 : j;
        owner[mt] = output % CL, to[mt] = my_sums + (output / CL * parts + (paired ? j & 1 : 0)) * tile_sums;
        asm volatile("" : "+r"(owner[mt]), "+r"(to[mt]));
      }
      int unit = begin;
#pragma unroll 1
      for (int left = steps; left > 0;) {
        const auto b = [&](int nt, int part) {  // the part-th 32 elements from the block at b_at on
          if constexpr (FLIPS) return load_shared16((part % 2 != 0 ? b_at ^ 64 : b_at) + part / 2 * 128 + nt * kColumns * p.stride);
          if constexpr (BY_THREADS) return load_shared16(b_at + nt * kColumns * p.stride + (S::INT4 ? part * 64 : 0));
          if constexpr (S::KEEPS) {
            const bool other = (part % 2 != 0) != (part >= 2 && S::FLIP != 0);
            return load_shared16((other ? b_at ^ 64 : b_at) + part / 2 * S::BLOCK + nt * (kColumns * kBlockBytes));
          }
          const uint32_t of = part < 2 ? b_at : (b_at + S::BLOCK) ^ S::FLIP;
          return load_shared16((of ^ (part % 2 * 64)) + nt * (kColumns * kBlockBytes));
        };
        barrier_wait(slot_barrier, parity);
#pragma unroll
        for (int box = 0; box < S::BOXES; ++box) {
          if (box > 0 && left == 0) break;
          const uint32_t here = slot + box * kBoxWeightBytes;
          uint4 scale[MT][2]{};  // of row lane/4 and of the one eight below
#pragma unroll
          for (int i = 0; i < (S::INT4 ? MT * 2 : 0); ++i)
            scale[i / 2][i % 2] = load_shared16(slot_scales + my_scales + i / 2 * (S::SCALES / MT) + box * 16 + i % 2 * (kColumns * S::LINE));
          const bool second = unit % 2 != 0, half = left == 1 || second;
          if (half) {
            multiply_box_unit<KIND, BY_THREADS>(acc, here + at.narrow, here + at.narrow + 512, scale, second, b);
            if (BY_THREADS) b_at += b_unit;
          } else {
#pragma unroll(S::SIDE_BY_SIDE)
            for (int i = 0; i < 2; ++i) {
              const uint32_t from = here + (at.wide ^ i * 64);
              multiply_box_unit<KIND, BY_THREADS>(acc, from, from + 1024, scale, i != 0, b);
              if (BY_THREADS) b_at += b_unit;
              if (!BY_THREADS && S::INT4 && i == 0) b_at += 2 * S::BLOCK;
            }
          }
          if (!BY_THREADS && S::INT4) b_at += 2 * S::BLOCK;
          if (!BY_THREADS && !S::INT4 && (second || !half)) b_at = (b_at + S::BLOCK) ^ S::FLIP;
          unit += half ? 1 : 2, left -= half ? 1 : 2;
        }
        __syncwarp();
        if constexpr (S::KEEPS) {
          copies.ask_again(slot, slot_scales, slot_barrier);
        } else {
          copies.ask();
        }
        const bool last = slot == ring + (DEPTH - 1) * S::SLOT;
        slot = last ? ring : slot + S::SLOT, slot_scales = last ? slot_scales - (DEPTH - 1) * S::SCALES : slot_scales + S::SCALES;
        slot_barrier = last ? barriers : slot_barrier + 8, parity ^= last;
      }
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        if (tile + mt >= batch_end) break;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          if (nt * 4 + quad >= sets) continue;
          float v[VALUES];
#pragma unroll
          for (int i = 0; i < VALUES; ++i) v[i] = whole_sum<KIND>(acc[mt][nt][i]);
          const uint32_t place = to[mt] + nt * (4 * S::SET);
          if constexpr (CL > 1) {
            send(cluster_address(place, owner[mt]), v, cluster_address(met_at, owner[mt]));
          } else {
            store_shared(place, v);
          }
        }
      }
    }

    const int all = mine * sets * kColumns;
    int g = 0, set = 0, own = 0;
    int to = 0, left = 0, ldo = 0;  // the output of the first of the sums, how many there are from it on, and between rows
    char* out = nullptr;
    const auto place = [&](int i) {
      g = i % kColumns, own = i / kColumns * p.by_sets >> 16, set = i / kColumns - own * sets;
      const int at_output = first + batch_at + own * CL + rank, part = !paired && at_output >= tiles0;
      to = (at_output - part * tiles0) * kTileRows + g, left = p.n[part] - to, ldo = p.ldo[part], out = static_cast<char*>(p.out[part]);
    };
    if constexpr (RESIDENT == 1) {  // what a thread adds first is found before it waits, where there are registers for it
      place(threadIdx.x);
      asm volatile("" : "+r"(g), "+r"(set), "+r"(own), "+r"(to), "+r"(left), "+r"(ldo), "+l"(out));
    }
    if constexpr (CL > 1) {
      if (mine > 0) barrier_wait(met_at, met_parity);
    } else {
      __syncthreads();
    }
    asm volatile("" : "+r"(counted));  // whose load nothing before this waits for
    const int rows = min(counted, p.rows);
    for (int i = threadIdx.x; i < all; i += WARPS * kWarp) {
      if (RESIDENT > 1 || i >= WARPS * kWarp) place(i);
      const auto total = [&](int part, float (&v)[VALUES]) {
        using Sums = std::conditional_t<VALUES == 2, float2, float4>;  // as they stand there, a load each
        const Sums* from = reinterpret_cast<const Sums*>(sums + (own * parts + part) * tile_sums) + set * kColumns + g;
#pragma unroll
        for (int s = 0; s < kSegments; ++s, from += sets * kColumns) {
          const Sums here = *from;
          float w[VALUES];
          memcpy(w, &here, sizeof(here));
#pragma unroll
          for (int e = 0; e < VALUES; ++e) v[e] = s == 0 ? w[e] : __fadd_rn(v[e], w[e]);
        }
      };
      float y[VALUES];
      total(0, y);
      if (paired) {
        float up[VALUES];
        total(1, up);
#pragma unroll
        for (int e = 0; e < VALUES; ++e) y[e] = __fmul_rn(silu(y[e]), up[e]);
      }
      size_t at[VALUES];
      bool stored[VALUES];
#pragma unroll
      for (int e = 0; e < VALUES; ++e) {
        const int m = VALUES == 2 ? set : BY_THREADS ? set * 2 + e % 2 : stream::row_of_set(set, e % 2), below = e / (VALUES / 2) * 8;
        stored[e] = m < rows && below < left, at[e] = static_cast<size_t>(m) * ldo + to + below;
      }
      if (paired) {
#pragma unroll
        for (int e = 0; e < VALUES; ++e) {
          if (stored[e]) reinterpret_cast<uint16_t*>(out)[at[e]] = round_bf16(y[e]);
        }
        continue;
      }
      float* const o = reinterpret_cast<float*>(out);
      if (p.epilogue == Epilogue::kResidual) {  // one branch for all of them
#pragma unroll
        for (int e = 0; e < VALUES; ++e) {
          if (stored[e]) y[e] = __fadd_rn(o[at[e]], y[e]);
        }
      }
#pragma unroll
      for (int e = 0; e < VALUES; ++e) {
        if (stored[e]) o[at[e]] = y[e];
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
  constexpr Kernel kernels[] = {&boxes_kernel<KIND, TABLE[I].rows, TABLE[I].mt, TABLE[I].cl, TABLE[I].warps, TABLE[I].boxes, TABLE[I].depth,
                                                    TABLE[I].resident, TABLE[I].held, TABLE[I].pieces, TABLE[I].by_threads>...};
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
  p.each = (tiles + others) / launch.clusters, p.rest = (tiles + others) % launch.clusters, p.batch = launch.batch;
  p.sets = stream::box_tile_sets(v, kind, a.max_rows), p.by_sets = 65536 / p.sets + 1;
  p.activations = static_cast<int>(stream::box_activations(v, kind, k, a.max_rows)), p.area = p.activations / (kSegments / v.cl);
  p.stride = stream::box_stride(v, kind, k);
  if (a.norm_w == nullptr && !v.by_threads)
    p.boxes = block_map(a.x, k / kBlock, static_cast<uint64_t>(a.ldx) * 2, a.max_rows, v.rows, p.area / (v.rows * kBlockBytes), v.rows > 1);
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
  launch_clusters(name, kernel, v.cl, dim3(static_cast<unsigned>(launch.clusters * v.cl)), (v.warps + stream::asks_apart(kind, v.cl, v.resident, v.held, v.by_threads)) * kWarp, launch.shared, p);
  return true;
}

}  // namespace kdtree
