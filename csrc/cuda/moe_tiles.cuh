// The int4 experts of a few rows to 64 on Hopper: moe_boxes.cuh's products, in every bit, where the warps of a block go through K together.
//
// A unit is eight neighbouring tiles of an expert for one turn of its rows, a tile a warp. A stage of the block's ring is 256 of K of all of
// them: one copy of 128 weight rows x 128 bytes, and the rows of activations, which all warps read from there. Scales come a few stages at a
// time. The last units are of four tiles, which half of the warps have. A tile of the shared expert is a unit whose K all warps share, a
// segment each: they meet in the ring's last stage. Blocks take units as they come, from a counter, since equal shares ended up to a third
// apart. One thread asks for everything; a warp more finds the routes.
#pragma once
#include "../tile_plan.h"
#include "box_copy.cuh"
#include "moe_items.cuh"
#include "tickets.cuh"

namespace kdtree {
namespace cuda {

struct TileMoeParams {
  CUtensorMap weights, scales;            // of a whole unit
  CUtensorMap tile_weights, tile_scales;  // of one tile
  CUtensorMap shared;                     // a tile's eight segments
  StreamMoeParams p;
  bool up_first, shared_up_first;
  bool scales_differ;  // the scales' tensors lie in the other order
  Tickets* tickets;    // of the units
};

constexpr int kAhead = 3;  // stages before a unit's last that the next one is asked for
constexpr int kTileMoeThreads = (stream::kTileWarps + 2) * kWarp;  // beside those that multiply one that copies and one that finds the routes

template <bool DOWN_, int DEPTH_, int SPAN_, int RESIDENT_>
struct TileMoeShape {
  static constexpr bool DOWN = DOWN_;
  static constexpr int DEPTH = DEPTH_, SPAN = SPAN_, RESIDENT = RESIDENT_;
  static constexpr int OUTPUTS = stream::moe_outputs(DOWN);
  static constexpr int LINE = SPAN * 16, PIECE = stream::tile_piece({DEPTH, SPAN, RESIDENT}), PIECES = stream::tile_pieces({DEPTH, SPAN, RESIDENT});
};

// What the warps multiply next: so many tiles, and the places of their columns, of which there are none of the shared expert; no tiles: all is
// done.
struct TileWork {
  int tile, count, first, columns;
};

// A box of row_map's with segments: the same bytes of all of them.
__device__ __forceinline__ void copy_segments(uint32_t to, const CUtensorMap* map, int byte, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %5}], [%2];" ::"r"(to), "l"(map),
               "r"(barrier), "r"(byte), "r"(row), "r"(0)
               : "memory");
}
// Bytes that follow each other, a multiple of 16.
__device__ __forceinline__ void copy_run(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

template <typename S>
__global__ __launch_bounds__(kTileMoeThreads, S::RESIDENT) void tile_moe_kernel(const __grid_constant__ TileMoeParams q) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // tile_plan.h chooses it on Hopper alone
#else
  constexpr bool DOWN = S::DOWN;
  constexpr int WARPS = stream::kTileWarps, DEPTH = S::DEPTH, SPAN = S::SPAN, OUTPUTS = S::OUTPUTS, WORKS = DEPTH + 2;
  constexpr int STAGE = stream::kTileStage, RUN = stream::kTileRun;
  const StreamMoeParams& p = q.p;
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ Routes<stream::moe_rows(false) * kMostTopK> routes;
  __shared__ uint64_t full[DEPTH], empty[DEPTH], routed;
  __shared__ TileWork works[WORKS];  // those asked for, each at least a stage, the one at hand and the end
  const uint32_t ring = (shared_address(dynamic) + stream::kBoxAlign - 1) / stream::kBoxAlign * stream::kBoxAlign;
  const uint32_t runs = ring + DEPTH * STAGE, pieces = runs + DEPTH * RUN;
  const uint32_t full_at = shared_address(full), empty_at = shared_address(empty), routed_at = shared_address(&routed);
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  const int block = blockIdx.x, blocks = gridDim.x;
  const int tiles = (p.n + OUTPUTS - 1) / OUTPUTS, shared_tiles = (p.shared_n + OUTPUTS - 1) / OUTPUTS;
  const int own_shared = stream::shared_items(shared_tiles, blocks, block);
  const int stages = p.k / stream::kBoxK, shared_stages = p.shared_k / stream::kSharedStage;
  const auto live_rows = [&]() { return active_rows(p.n_rows, p.max_rows); };

  if (threadIdx.x == 0) {
    for (int i = 0; i < DEPTH; ++i) {
      barrier_init(full_at + i * 8, 1);
      barrier_init(empty_at + i * 8, WARPS);
    }
    barrier_init(routed_at, kWarp);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine is to see the barriers
  }
  __syncthreads();

  if (warp == WARPS) {
    if (elected()) {
      int slot = 0, round = 0, at_work = 0, piece = 0;
      const auto slot_free = [&]() { barrier_wait(empty_at + slot * 8, round ^ 1); };
      const auto advance = [&]() {
        if (++slot == DEPTH) slot = 0, round ^= 1;
      };
      // What the next stage belongs to, which it makes known.
      const auto begin = [&](const TileWork& work) {
        slot_free();
        works[at_work % WORKS] = work;
        ++at_work;
      };
      const auto shared_stage = [&](int tile, int j) {
        slot_free();
        const uint32_t barrier = full_at + slot * 8;
        barrier_expect(barrier, STAGE);
        copy_segments(ring + slot * STAGE, &q.shared, j * 128, tile * OUTPUTS, barrier);
        advance();
      };
      // Weights alone wait for nobody; the first turn is all that is known of the rows.
      int early = 0;
      if (own_shared > 0) {
        begin({block, 1, 0, 0});
        for (; early < min(DEPTH, shared_stages); ++early) shared_stage(block, early);
      }
      const int rows = live_rows();
      wait_for_previous();
      if (rows <= 0) {
        for (int i = 0; i < early; ++i) barrier_wait(full_at + i * 8, 0);
      } else {
        asm volatile("fence.proxy.async.global;" ::: "memory");  // what the launch before wrote is to be read by the copy engine
        const int shared_turns = (rows + stream::kTileTurn - 1) / stream::kTileTurn;
        for (int i = 0; i < own_shared * shared_turns; ++i) {
          const int tile = block + i / shared_turns * blocks, turn = i % shared_turns;
          if (i > 0) begin({tile, 1, turn * stream::kTileTurn, 0});
          for (int j = i > 0 ? 0 : early; j < shared_stages; ++j) shared_stage(tile, j);
        }
        barrier_wait(routed_at, 0);
        const int items = routes.turn[routes.found] * tiles;
        for (int taken = block;;) {
          const stream::TileUnit unit = stream::tile_unit(taken, items, blocks);
          if (unit.item >= items) break;
          const int expert = routes.slot[unit.item / tiles], first_turn = routes.turn[expert];
          const stream::ItemPlace place = stream::tile_item(unit.item - first_turn * tiles, routes.turn[expert + 1] - first_turn);
          const int first = routes.start[expert] + place.turn * kColumns, columns = min(routes.start[expert + 1] - first, kColumns);
          const int first_row = routes.expert[expert] * p.step + place.tile * OUTPUTS;
          begin({place.tile, unit.count, first, columns});
          for (int j = 0; j < stages; ++j) {
            if (j == max(stages - kAhead, 0)) taken = next_unit(q.tickets, blocks);
            slot_free();
            const bool scaled = j % SPAN == 0;
            const uint32_t barrier = full_at + slot * 8, to = ring + slot * STAGE, scales = pieces + piece * S::PIECE;
            barrier_expect(barrier, unit.count * (stream::kBoxBytes + (scaled ? kTileRows * S::LINE : 0)) + columns * (stream::kBoxK * 2));
            if (unit.count == WARPS) {
              copy_box(to, &q.weights, j * 128, first_row, barrier);
              if (scaled) copy_box(scales, &q.scales, j * 16, first_row, barrier);
            } else {
#pragma unroll 1
              for (int t = 0; t < unit.count; ++t) {
                copy_box(to + t * stream::kBoxBytes, &q.tile_weights, j * 128, first_row + t * OUTPUTS, barrier);
                if (scaled) copy_box(scales + t * (kTileRows * S::LINE), &q.tile_scales, j * 16, first_row + t * OUTPUTS, barrier);
              }
            }
#pragma unroll 1
            for (int c = 0; c < columns; ++c) {
              const int place_of = routes.place[first + c], row = DOWN ? place_of : place_of / p.top_k;
              copy_run(runs + slot * RUN + c * stream::kTileRow, p.rows + static_cast<size_t>(row) * p.row_stride + j * stream::kBoxK, stream::kBoxK * 2, barrier);
            }
            if (j % SPAN == SPAN - 1) piece = piece + 1 == S::PIECES ? 0 : piece + 1;
            advance();
          }
        }
        leave_units(q.tickets, blocks);
        begin({});
        barrier_arrive(full_at + slot * 8);
      }
    }
    __syncwarp();
  } else if (warp == WARPS + 1) {
    const int rows = live_rows();
    if (!DOWN || rows <= 0) wait_for_previous();
    if (rows > 0) {
      find_routes<kColumns, kWarp>(routes, p.ids, rows, p.top_k);
      barrier_arrive(routed_at);
      if (DOWN) wait_for_previous();
    }
  } else {
    const bool any = live_rows() > 0;
    wait_for_previous();
    int slot = 0, phase = 0, piece = 0;
    const auto free_slot = [&]() {
      __syncwarp();  // every lane has used what it read
      if (elected()) barrier_arrive(empty_at + slot * 8);
      if (++slot == DEPTH) slot = 0, phase ^= 1;
    };
    const auto emit_at = [&](int tile, int first, int c, int columns, bool of_shared, float low, float high) {
      if (c >= columns) return;
      if (!of_shared) low = __fmul_rn(low, 4.f), high = __fmul_rn(high, 4.f);
      const bool swap = !DOWN && (of_shared ? q.shared_up_first : q.up_first);
      emit_column<DOWN>(p, 0, of_shared, of_shared ? first + c : routes.place[first + c], tile * OUTPUTS + lane / 4, swap ? high : low, swap ? low : high);
    };
    // A tile's segment of the shared expert for N tiles of columns; the warps' sums meet where the last stage's weights stood.
    const auto run_shared = [&](auto tiles_of, int tile, int first, int columns) {
      constexpr int N = decltype(tiles_of)::value;
      const uint8_t* const base = reinterpret_cast<const uint8_t*>(DOWN ? p.shared_act : p.rows) + warp * (p.shared_k / kSegments) * 2 + lane % 4 * 16;
      const int stride = (DOWN ? p.shared_k : p.row_stride) * 2;
      uint32_t from[N];  // rows of a step are fewer than 2^31 bytes
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
        const int row = first + min(nt * kColumns + lane / 4, columns - 1);
        from[nt] = static_cast<uint32_t>(row) * stride;
      }
      float acc[N][4] = {};
      const uint32_t line = (lane >> 2) * 128 + ((lane & 3) ^ (lane >> 2)) * 16;  // 16 bytes of row lane/4's first unit; the second's at ^ 64
      constexpr bool AHEAD = N == 1 || (N == 2 && !DOWN);  // activations are asked for a stage ahead, where registers are left
      uint4 x[N][2];
      const auto load = [&]() {
#pragma unroll
        for (int nt = 0; nt < N; ++nt) {
#pragma unroll
          for (int u = 0; u < 2; ++u) x[nt][u] = *reinterpret_cast<const uint4*>(base + from[nt] + u * 64);
          from[nt] += 128;
        }
      };
      if (AHEAD) load();
#pragma unroll 1
      for (int j = 0; j < shared_stages; ++j) {
        if (!AHEAD) load();
        [[maybe_unused]] uint4 held[N][2];
        if constexpr (AHEAD) {
#pragma unroll
          for (int nt = 0; nt < N; ++nt) held[nt][0] = x[nt][0], held[nt][1] = x[nt][1];
          if (j + 1 < shared_stages) load();
        }
        barrier_wait(full_at + slot * 8, phase);
        const uint32_t at = ring + slot * STAGE + warp * stream::kBoxBytes;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const uint4 low = in_order(load_shared16(at + (line ^ (u * 64)))), high = in_order(load_shared16(at + 1024 + (line ^ (u * 64))));
          const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int nt = 0; nt < N; ++nt) {
            const uint4 got = AHEAD ? held[nt][u] : x[nt][u], v = DOWN ? in_order(got) : got;
            multiply_add(acc[nt], a, v.x, v.y, acc[nt]);
            multiply_add(acc[nt], b, v.z, v.w, acc[nt]);
          }
        }
        if (j + 1 < shared_stages) free_slot();
      }
      __syncwarp();
      const uint32_t sums = ring + slot * STAGE;
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
        asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(sums + warp * stream::kBoxBytes + nt * 512 + lane * 16), "f"(acc[nt][0]), "f"(acc[nt][1]),
                     "f"(acc[nt][2]), "f"(acc[nt][3])
                     : "memory");
      }
      asm volatile("bar.sync 1, %0;" ::"n"(WARPS * kWarp) : "memory");
      if (warp < N && warp * kColumns < columns) {
        float v[4];
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          const uint4 w = load_shared16(sums + s * stream::kBoxBytes + warp * 512 + lane * 16);
          const float part[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = s == 0 ? part[i] : __fadd_rn(v[i], part[i]);
        }
        const int c = warp * kColumns + lane % 4 * 2;
        emit_at(tile, first, c, columns, true, v[0], v[2]);
        emit_at(tile, first, c + 1, columns, true, v[1], v[3]);
      }
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine writes there next
      free_slot();
    };
    // An expert's tile: up to four columns at the even places of a product, or up to eight.
    const auto run = [&](auto halved, const TileWork unit) {
      constexpr bool HALF = decltype(halved)::value;
      constexpr int VALUES = HALF ? 2 : 4;
      const bool whole = !DOWN && unit.count == WARPS;
      const uint32_t above = whole ? WARPS * 1024 : 1024;  // bytes to the eight rows below
      const uint32_t own = warp * (whole ? 1024 : 2048), matrix = own + (lane & 7) * 128 + ((lane & 8) ? above : 0) + ((lane >> 4) ^ (lane & 7)) * 16;
      const uint32_t line = warp * (whole ? 8 : 16) * S::LINE + (lane >> 2) * S::LINE, line_above = whole ? WARPS * 8 * S::LINE : 8 * S::LINE;
      const bool differ = !DOWN && q.scales_differ;
      const uint32_t low_scales_at = line + (differ ? line_above : 0), high_scales_at = line + (differ ? 0 : line_above);
      const uint32_t column = min(HALF ? lane / 8 : lane / 4, unit.columns - 1) * stream::kTileRow + lane % 4 * 16;
      float acc[VALUES], total[VALUES];
#pragma unroll
      for (int i = 0; i < VALUES; ++i) acc[i] = 0.f, total[i] = -0.f;  // -0 + s is s in every bit
      const int units_of_k = p.k / kUnitK<WeightKind::kInt4>;
      int segment = 0, at_unit = 0, segment_end = segment_begin(1, units_of_k);
      const auto end_segments = [&]() {
#pragma unroll 1
        while (at_unit == segment_end && segment < kSegments) {
#pragma unroll
          for (int i = 0; i < VALUES; ++i) total[i] = __fadd_rn(total[i], acc[i]), acc[i] = 0.f;
          ++segment;
          segment_end = segment_begin(segment + 1, units_of_k);
        }
      };
      end_segments();
#pragma unroll 1
      for (int j = 0; j < stages; ++j) {
        barrier_wait(full_at + slot * 8, phase);
        const uint32_t at = ring + slot * STAGE, scales = pieces + piece * S::PIECE + j % SPAN * 16, x_at = runs + slot * RUN + column;
        const BoxInt4 box(at, matrix, scales + low_scales_at, scales + high_scales_at);
#pragma unroll
        for (int g = 0; g < 8; ++g) {
          uint32_t a[4], b[4];
          box.fragments(g, a, b);
          const float scale = box.scale(g), below = box.below(g);
          const float zero[4] = {};
          float sum[4];
          const uint4 x = load_shared16(x_at + g * 64);
          multiply_add(sum, a, x.x, x.y, zero);
          multiply_add(sum, b, x.z, x.w, sum);
#pragma unroll
          for (int i = 0; i < VALUES; ++i) {
            const int from = HALF ? i * 2 : i;
            acc[i] = __fmaf_rn(sum[from], from < 2 ? scale : below, acc[i]);
          }
          if (g % 4 == 3 && ++at_unit == segment_end) end_segments();
        }
        free_slot();
        if (j % SPAN == SPAN - 1) piece = piece + 1 == S::PIECES ? 0 : piece + 1;
      }
      if constexpr (HALF) {
        emit_at(unit.tile + warp, unit.first, lane % 4, unit.columns, false, total[0], total[1]);
      } else {
        emit_at(unit.tile + warp, unit.first, lane % 4 * 2, unit.columns, false, total[0], total[2]);
        emit_at(unit.tile + warp, unit.first, lane % 4 * 2 + 1, unit.columns, false, total[1], total[3]);
      }
    };

    for (int count = 0; any; ++count) {
      barrier_wait(full_at + slot * 8, phase);  // with its first stage a unit is known
      const TileWork unit = works[count % WORKS];
      if (unit.count == 0) break;
      if (unit.columns == 0) {
        const int columns = min(live_rows() - unit.first, stream::kTileTurn);
        if (columns <= kColumns) run_shared(std::integral_constant<int, 1>{}, unit.tile, unit.first, columns);
        else if (columns <= 2 * kColumns) run_shared(std::integral_constant<int, 2>{}, unit.tile, unit.first, columns);
        else run_shared(std::integral_constant<int, stream::kTileTurn / kColumns>{}, unit.tile, unit.first, columns);
      } else if (warp >= unit.count) {  // fewer tiles than warps
#pragma unroll 1
        for (int j = 0; j < stages; ++j) {
          barrier_wait(full_at + slot * 8, phase);
          free_slot();
          if (j % SPAN == SPAN - 1) piece = piece + 1 == S::PIECES ? 0 : piece + 1;
        }
      } else if (unit.columns <= kColumns / 2) {
        run(std::true_type{}, unit);
      } else {
        run(std::false_type{}, unit);
      }
    }
  }
  __syncwarp();
  if constexpr (DOWN) combine(p.combine);
#endif
}

}  // namespace cuda
}  // namespace kdtree
