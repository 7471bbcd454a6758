// The int4 experts of a few rows to 64 on Hopper: moe_boxes.cuh's products, in every bit, where the warps of a block go through K together.
//
// A unit is eight neighbouring tiles of an expert for one turn of its rows, a tile a warp. A stage of the block's ring is 256 of K of all of
// them: one copy of 128 weight rows x 128 bytes, and the rows of activations, which all warps read from there. Scales come a few stages at a
// time. The last units are of four tiles, which half of the warps have. Blocks take units as they come, from a counter, since equal shares
// ended up to a third apart. One thread asks for everything; a warp more finds the routes.
// Of the shared expert, a block's unit is one segment of K of eight tiles, so that blocks read few of its activations; the segments' sums meet
// in memory (L2), where the warp that found the routes adds them in the block whose segment is a group's last. Nobody waits for them there.
// Launches overlap: gate and up begin with the shared expert when the router, the launch before, has normed its rows, multiply it while experts
// are chosen, and look for the choice themselves; down begins with an expert when gate and up have counted all of its tiles, of which the same warp tells.
#pragma once
#include <climits>

#include "../tile_plan.h"
#include "box_copy.cuh"
#include "moe_items.cuh"
#include "nibbles.cuh"
#include "tickets.cuh"

namespace kdtree {
namespace cuda {

struct TileMoeParams {
  CUtensorMap weights, scales;            // of a whole unit
  CUtensorMap tile_weights, tile_scales;  // of one tile
  CUtensorMap shared, shared_rows;        // the shared expert's weights of as many tiles, and the step's rows that meet them
  StreamMoeParams p;
  bool up_first, shared_up_first;
  bool scales_differ;  // the scales' tensors lie in the other order
  Tickets* tickets;    // of the units
  int normed;          // gate and up: rows that the launch before norms, which counts them in tickets->ahead; 0: they stand normed
  const int32_t* chosen;  // of that launch too: its ids, one more each, as soon as they are not zero
  // Where gate and up count the tiles they have done, for down to begin before they have ended: of each distinct expert, and of the shared one. Null:
  // down waits for their end.
  unsigned *multiplied, *shared_multiplied;
  int before, shared_before;  // down: of a turn of an expert's rows, and of the shared expert's, in groups of kTileWarps, one more for the routes
  void* routes;               // as gate and up have found them
  float4* parts;       // [groups, kSegments, kTileWarps, shared_columns, kWarp]: the shared expert's sums of a segment, as lanes have them
  unsigned* met;       // [groups] segments whose sums are there
  int shared_columns;  // tiles of eight of the step's rows
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

// What the warps multiply next: so many tiles of the step's expert `slot`, and the places of their columns, of which there are none of the shared
// expert; no tiles: all is done.
struct TileWork {
  int tile, count, first, columns, slot;
};

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
  using AllRoutes = Routes<stream::moe_rows(false) * kMostTopK>;
  constexpr int ROUTES = (sizeof(AllRoutes) + 15) / 16 * 16;
  static_assert(ROUTES <= stream::kRoutesBytes, "room for the routes");
  __shared__ union alignas(16) {
    AllRoutes of;
    uint4 pieces[ROUTES / 16];
  } held;
  AllRoutes& routes = held.of;
  // done, told: of every other unit, the warps have multiplied it, and it has been told of. rows_there: the shared expert's may be read. ended: the launch
  // before has.
  __shared__ uint64_t full[DEPTH], empty[DEPTH], done[2], told[2], rows_there, routed, routes_there, ended;
  __shared__ int32_t ids[stream::moe_rows(false) * kMostTopK];
  __shared__ TileWork works[WORKS];  // those asked for, each at least a stage, the one at hand and the end
  const uint32_t ring = (shared_address(dynamic) + stream::kBoxAlign - 1) / stream::kBoxAlign * stream::kBoxAlign;
  const uint32_t runs = ring + DEPTH * STAGE, pieces = runs + DEPTH * RUN;
  const uint32_t full_at = shared_address(full), empty_at = shared_address(empty), routed_at = shared_address(&routed);
  const uint32_t done_at = shared_address(done), told_at = shared_address(told), rows_there_at = shared_address(&rows_there), ended_at = shared_address(&ended);
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  const int block = blockIdx.x, blocks = gridDim.x;
  const int tiles = (p.n + OUTPUTS - 1) / OUTPUTS, groups = (p.shared_n + WARPS * OUTPUTS - 1) / (WARPS * OUTPUTS);
  const int own_shared = stream::shared_items(groups * kSegments, blocks, block);
  const int stages = p.k / stream::kBoxK, shared_stages = p.shared_k / stream::kSharedStage;
  const bool tells = q.multiplied != nullptr;  // gate and up; down listens
  const int told_of = !DOWN && tells ? INT_MAX : own_shared;  // of the block's units, the first ones
  const auto live_rows = [&]() { return active_rows(p.n_rows, p.max_rows); };

  if (threadIdx.x == 0) {
    for (int i = 0; i < DEPTH; ++i) {
      barrier_init(full_at + i * 8, 1);
      barrier_init(empty_at + i * 8, WARPS);
    }
    for (int i = 0; i < 2; ++i) barrier_init(done_at + i * 8, WARPS), barrier_init(told_at + i * 8, 1);
    for (const uint32_t at : {rows_there_at, routed_at, ended_at}) barrier_init(at, kWarp);
    barrier_init(shared_address(&routes_there), 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine is to see the barriers
  }
  __syncthreads();
  const auto emit_at = [&](int tile, int first, int c, int columns, bool of_shared, float low, float high) {
    if (c >= columns) return;
    if (!of_shared) low = __fmul_rn(low, 4.f), high = __fmul_rn(high, 4.f);
    const bool swap = !DOWN && (of_shared ? q.shared_up_first : q.up_first);
    emit_column<DOWN>(p, 0, of_shared, of_shared ? first + c : routes.place[first + c], tile * OUTPUTS + lane / 4, swap ? high : low, swap ? low : high);
  };

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
        if (at_work >= 2 && at_work - 2 < told_of) barrier_wait(told_at + at_work % 2 * 8, (at_work / 2 - 1) & 1);
        works[at_work % WORKS] = work;
        ++at_work;
      };
      // A segment of a group of the shared expert's tiles: weights, and the rows that meet them.
      const auto shared_byte = [&](int item, int j) { return (item % kSegments * shared_stages + j) * 128; };
      const auto copy_shared = [&](int item, int j, int to) {
        barrier_expect(full_at + to * 8, STAGE + q.shared_columns * 1024);
        copy_box(ring + to * STAGE, &q.shared, shared_byte(item, j), item / kSegments * (WARPS * OUTPUTS), full_at + to * 8);
      };
      const auto copy_shared_rows = [&](int item, int j, int to) { copy_box(runs + to * RUN, &q.shared_rows, shared_byte(item, j), 0, full_at + to * 8); };
      // Weights alone wait for nobody.
      const int early = own_shared > 0 ? min(DEPTH, shared_stages) : 0;
      if (own_shared > 0) begin({block / kSegments, WARPS, block % kSegments, 0, 0});
      for (int j = 0; j < early; ++j) copy_shared(block, j, j);
      const int rows = live_rows();
      const auto written = [] { asm volatile("fence.proxy.async.global;" ::: "memory"); };  // what others wrote is to be read by the copy engine
      barrier_wait(rows_there_at, 0);
      written();
      for (int j = 0; j < early; ++j) {
        copy_shared_rows(block, j, j);
        advance();
      }
      if (rows <= 0) {
        for (int i = 0; i < early; ++i) barrier_wait(full_at + i * 8, 0);
      } else {
        for (int i = 0; i < own_shared; ++i) {
          const int item = block + i * blocks;
          if (i > 0) begin({item / kSegments, WARPS, item % kSegments, 0, 0});
          for (int j = i > 0 ? 0 : early; j < shared_stages; ++j) {
            slot_free();
            copy_shared(item, j, slot);
            copy_shared_rows(item, j, slot);
            advance();
          }
        }
        barrier_wait(routed_at, 0);
        bool all_written = !DOWN || !tells;
        if (all_written) written();
        const int items = routes.turn[routes.found] * tiles;
        for (int taken = block;;) {
          const stream::TileUnit unit = stream::tile_unit(taken, items, blocks);
          if (unit.item >= items) break;
          const int expert = routes.slot[unit.item / tiles], first_turn = routes.turn[expert];
          const stream::ItemPlace place = stream::tile_item(unit.item - first_turn * tiles, routes.turn[expert + 1] - first_turn);
          const int first = routes.start[expert] + place.turn * stream::kTileColumns, columns = min(routes.start[expert + 1] - first, stream::kTileColumns);
          const int first_row = routes.expert[expert] * p.step + place.tile * OUTPUTS;
          if (!all_written) {
            all_written = barrier_passed(ended_at, 0);
            if (!all_written) ticket_wait(q.multiplied + expert, q.before * (routes.turn[expert + 1] - first_turn));
            written();
          }
          begin({place.tile, unit.count, first, columns, expert});
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
        begin({});
        barrier_arrive(full_at + slot * 8);
      }
      if (leave_units(q.tickets, blocks) && DOWN && tells && rows > 0) {
        for (int i = 0; i < routes.found; ++i) q.multiplied[i] = 0;
      }
    }
    __syncwarp();
  } else if (warp == WARPS + 1) {
    const int rows = live_rows();
    // The shared expert's rows are there before the launch before has ended.
    const bool early = DOWN ? tells && rows > 0 : q.normed > 0;
    if (early) {
      if (lane == 0) ticket_wait(DOWN ? q.shared_multiplied : &q.tickets->ahead, DOWN ? q.shared_before : q.normed);
      __syncwarp();
      barrier_arrive(rows_there_at);
    }
    if (rows > 0) {
      // The ids, all at once: behind the weights that are under way a load takes microseconds. Those of a router that runs are looked for until they are there:
      // its end, and a load behind it, would come later.
      const auto read_ids = [&]() {
        constexpr int HELD = 16;
        const int32_t* const from = !DOWN && early ? q.chosen : p.ids;
        for (int base = lane; base < rows * p.top_k; base += HELD * kWarp) {
          int32_t v[HELD];
          bool all;
          do {
            all = true;
#pragma unroll
            for (int i = 0; i < HELD; ++i) v[i] = look_at_word(from + min(base + i * kWarp, rows * p.top_k - 1));
            if (!DOWN && early) {
#pragma unroll
              for (int i = 0; i < HELD; ++i) all = all && v[i] != 0, --v[i];
            }
          } while (!all);
#pragma unroll
          for (int i = 0; i < HELD; ++i) {
            if (base + i * kWarp < rows * p.top_k) ids[base + i * kWarp] = v[i];
          }
        }
        __syncwarp();
      };
      const auto read_id = [&](int at) {
        if constexpr (!DOWN) {
          for (int id; early;) {
            if ((id = look_at_word(q.chosen + at)) != 0) return id - 1;
          }
        }
        return p.ids[at];
      };
      if (DOWN && tells) {
        if (lane == 0) {
          asm volatile("fence.proxy.async.global;" ::: "memory");
          barrier_expect(shared_address(&routes_there), ROUTES);
          copy_run(shared_address(&held), q.routes, ROUTES, shared_address(&routes_there));
        }
        barrier_wait(shared_address(&routes_there), 0);
      } else {
        // Once without effect where there is time, for the code to be there.
        const bool few = rows * p.top_k <= kWarp && rows <= stream::kTileColumns;
        if (early && !few && lane < p.top_k) ids[lane] = lane;
        __syncwarp();
#pragma unroll 1
        for (int pass = early ? 0 : 1; pass < 2; ++pass) {
          if (pass == 1) {
            if (!DOWN && !early) {
              wait_for_previous();
              barrier_arrive(rows_there_at);
            }
            if (!few) read_ids();
          }
          if (few) {
            const int count = pass == 0 ? p.top_k : rows * p.top_k;
            find_few_routes(routes, pass == 0 ? lane : read_id(min(lane, count - 1)), count);
            continue;
          }
          find_routes<stream::kTileColumns, kWarp>(routes, ids, pass == 0 ? 1 : rows, p.top_k, p.experts);
        }
        if (DOWN) {  // the ids are older than the launch before
          wait_for_previous();
          barrier_arrive(rows_there_at);
        }
      }
      barrier_arrive(routed_at);
      if (!DOWN && tells && block == 0) {
        for (int i = lane; i < ROUTES / 16; i += kWarp) __stcg(static_cast<uint4*>(q.routes) + i, held.pieces[i]);
        __syncwarp();
        if (lane == 0) ticket_add(q.shared_multiplied, 1);
      }
      if (!DOWN && early) wait_for_previous();  // lets down in, too
      // Whoever has a group's last segment adds them all.
      const auto add_segments = [&](int group) {
        const float4* const from = q.parts + static_cast<size_t>(group) * (kSegments * WARPS) * (q.shared_columns * kWarp) + lane;
        const int used = (rows + kColumns - 1) / kColumns, all = WARPS * used;  // tiles of columns that have a row
        constexpr int AT_A_TIME = 2;
#pragma unroll 1
        for (int base = 0; base < all; base += AT_A_TIME) {
          float4 v[AT_A_TIME][kSegments];
#pragma unroll
          for (int i = 0; i < AT_A_TIME; ++i) {
            const int at = min(base + i, all - 1), place = at / used * q.shared_columns + at % used;
#pragma unroll
            for (int s = 0; s < kSegments; ++s) v[i][s] = __ldcg(from + (s * WARPS * q.shared_columns + place) * kWarp);
          }
#pragma unroll
          for (int i = 0; i < AT_A_TIME; ++i) {
            if (base + i >= all) break;
            float4 sum = v[i][0];
#pragma unroll
            for (int s = 1; s < kSegments; ++s) {
              sum.x = __fadd_rn(sum.x, v[i][s].x), sum.y = __fadd_rn(sum.y, v[i][s].y);
              sum.z = __fadd_rn(sum.z, v[i][s].z), sum.w = __fadd_rn(sum.w, v[i][s].w);
            }
            const int tile = group * WARPS + (base + i) / used, c = (base + i) % used * kColumns + lane % 4 * 2;
            emit_at(tile, 0, c, rows, true, sum.x, sum.z);
            emit_at(tile, 0, c + 1, rows, true, sum.y, sum.w);
          }
        }
      };
      for (int i = 0; i < told_of; ++i) {
        barrier_wait(done_at + i % 2 * 8, i / 2 & 1);
        const TileWork work = works[i % WORKS];
        __syncwarp();
        if (lane == 0) barrier_arrive(told_at + i % 2 * 8);
        if (work.count == 0) break;
        if (work.columns > 0) {
          if (lane == 0) ticket_add(q.multiplied + work.slot, work.count);
          continue;
        }
        int before = 0;
        if (lane == 0) before = ticket_add(q.met + work.tile, 1);
        if (__shfl_sync(kAll, before, 0) != kSegments - 1) continue;
        add_segments(work.tile);
        if (lane == 0) q.met[work.tile] = 0;
        __syncwarp();
        if (!DOWN && tells && lane == 0) ticket_add(q.shared_multiplied, 1);
      }
      if (DOWN && tells) {
        wait_for_previous();
        barrier_arrive(ended_at);
      }
    } else {
      wait_for_previous();
      if (!early) barrier_arrive(rows_there_at);
    }
  } else {
    int slot = 0, phase = 0, piece = 0;
    const auto free_slot = [&]() {
      __syncwarp();  // every lane has used what it read
      if (elected()) barrier_arrive(empty_at + slot * 8);
      if (++slot == DEPTH) slot = 0, phase ^= 1;
    };
    // A segment of a tile of the shared expert for N tiles of columns, whose sums go to where the segments' meet.
    const auto run_shared = [&](auto tiles_of, int group, int segment) {
      constexpr int N = decltype(tiles_of)::value;
      constexpr uint32_t above = DOWN ? 1024 : WARPS * 1024;  // bytes to the eight rows below
      // 16 bytes of row lane/4's first unit; the second's at ^ 64.
      const uint32_t line = (lane >> 2) * 128 + ((lane & 3) ^ (lane >> 2)) * 16, own = warp * (DOWN ? 2048 : 1024) + line;
      float acc[N][4] = {};
#pragma unroll 1
      for (int j = 0; j < shared_stages; ++j) {
        barrier_wait(full_at + slot * 8, phase);
        const uint32_t at = ring + slot * STAGE + own, x_at = runs + slot * RUN + line;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const uint4 low = in_order(load_shared16(at ^ (u * 64))), high = in_order(load_shared16((at + above) ^ (u * 64)));
          const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int nt = 0; nt < N; ++nt) {
            const uint4 got = load_shared16((x_at ^ (u * 64)) + nt * 1024), v = DOWN ? in_order(got) : got;
            multiply_add(acc[nt], a, v.x, v.y, acc[nt]);
            multiply_add(acc[nt], b, v.z, v.w, acc[nt]);
          }
        }
        reads_done();
        free_slot();
      }
      float4* const to = q.parts + ((static_cast<size_t>(group) * kSegments + segment) * WARPS + warp) * (q.shared_columns * kWarp) + lane;
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
        if (nt < q.shared_columns) __stcg(to + nt * kWarp, make_float4(acc[nt][0], acc[nt][1], acc[nt][2], acc[nt][3]));
      }
    };
    // An expert's tile: up to four columns at the even places of a product, up to eight, or so many products side by side.
    const auto run = [&](auto form, const TileWork& unit) {
      constexpr bool HALF = decltype(form)::value == 0;
      constexpr int VALUES = HALF ? 2 : 4, N = HALF ? 1 : decltype(form)::value;
      const bool whole = !DOWN && unit.count == WARPS;
      const uint32_t above = whole ? WARPS * 1024 : 1024;  // bytes to the eight rows below
      const uint32_t own = warp * (whole ? 1024 : 2048), matrix = own + (lane & 7) * 128 + ((lane & 8) ? above : 0) + ((lane >> 4) ^ (lane & 7)) * 16;
      const uint32_t line = warp * (whole ? 8 : 16) * S::LINE + (lane >> 2) * S::LINE, line_above = whole ? WARPS * 8 * S::LINE : 8 * S::LINE;
      const bool differ = !DOWN && q.scales_differ;
      const uint32_t low_scales_at = line + (differ ? line_above : 0), high_scales_at = line + (differ ? 0 : line_above);
      uint32_t column[N];
#pragma unroll
      for (int nt = 0; nt < N; ++nt) column[nt] = min(HALF ? lane / 8 : nt * kColumns + lane / 4, unit.columns - 1) * stream::kTileRow + lane % 4 * 16;
      float acc[N][VALUES], total[N][VALUES];
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
#pragma unroll
        for (int i = 0; i < VALUES; ++i) acc[nt][i] = 0.f, total[nt][i] = -0.f;  // -0 + s is s in every bit
      }
      const int units_of_k = p.k / kUnitK<WeightKind::kInt4>;
      int segment = 0, at_unit = 0, segment_end = segment_begin(1, units_of_k);
      const auto end_segments = [&]() {
#pragma unroll 1
        while (at_unit == segment_end && segment < kSegments) {
#pragma unroll
          for (int nt = 0; nt < N; ++nt) {
#pragma unroll
            for (int i = 0; i < VALUES; ++i) total[nt][i] = __fadd_rn(total[nt][i], acc[nt][i]), acc[nt][i] = 0.f;
          }
          ++segment;
          segment_end = segment_begin(segment + 1, units_of_k);
        }
      };
      end_segments();
#pragma unroll 1
      for (int j = 0; j < stages; ++j) {
        barrier_wait(full_at + slot * 8, phase);
        const uint32_t at = ring + slot * STAGE, scales = pieces + piece * S::PIECE + j % SPAN * 16, x_at = runs + slot * RUN;
        const BoxInt4 box(at, matrix, scales + low_scales_at, scales + high_scales_at);
#pragma unroll
        for (int g = 0; g < 8; ++g) {
          uint32_t a[4], b[4];
          box.fragments(g, a, b);
          const float scale = box.scale(g), below = box.below(g);
#pragma unroll
          for (int nt = 0; nt < N; ++nt) {
            const float zero[4] = {};
            float sum[4];
            const uint4 x = load_shared16(x_at + column[nt] + g * 64);
            multiply_add(sum, a, x.x, x.y, zero);
            multiply_add(sum, b, x.z, x.w, sum);
#pragma unroll
            for (int i = 0; i < VALUES; ++i) {
              const int from = HALF ? i * 2 : i;
              acc[nt][i] = __fmaf_rn(sum[from], from < 2 ? scale : below, acc[nt][i]);
            }
          }
          if (g % 4 == 3 && ++at_unit == segment_end) end_segments();
        }
        free_slot();
        if (j % SPAN == SPAN - 1) piece = piece + 1 == S::PIECES ? 0 : piece + 1;
      }
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
        const float* const v = total[nt];
        if constexpr (HALF) {
          emit_at(unit.tile + warp, unit.first, lane % 4, unit.columns, false, v[0], v[1]);
        } else {
          const int c = nt * kColumns + lane % 4 * 2;
          emit_at(unit.tile + warp, unit.first, c, unit.columns, false, v[0], v[2]);
          emit_at(unit.tile + warp, unit.first, c + 1, unit.columns, false, v[1], v[3]);
        }
      }
    };

    // The warp has multiplied the block's unit `count`.
    const auto finished = [&](int count) {
      __syncwarp();
      if (elected()) barrier_arrive(done_at + count % 2 * 8);
    };
    // Read once: asked for at every unit, by all warps at a time, it comes from L2 wherever something acquired meanwhile, in microseconds.
    const bool live = live_rows() > 0;
    for (int count = 0; live; ++count) {
      barrier_wait(full_at + slot * 8, phase);  // with its first stage a unit is known
      const TileWork unit = works[count % WORKS];
      const TileWork& at_hand = DOWN ? unit : works[count % WORKS];  // read again where it is used, where registers are few
      if (unit.count == 0) {
        if (count < told_of) finished(count);
        break;
      }
      if (unit.columns == 0) {
        const int rows = live_rows();
        if (rows <= kColumns) run_shared(std::integral_constant<int, 1>{}, unit.tile, unit.first);
        else if (rows <= 2 * kColumns) run_shared(std::integral_constant<int, 2>{}, unit.tile, unit.first);
        else if (rows <= 4 * kColumns) run_shared(std::integral_constant<int, 4>{}, unit.tile, unit.first);
        else run_shared(std::integral_constant<int, 8>{}, unit.tile, unit.first);
      } else if (warp >= unit.count) {  // fewer tiles than warps
#pragma unroll 1
        for (int j = 0; j < stages; ++j) {
          barrier_wait(full_at + slot * 8, phase);
          free_slot();
          if (j % SPAN == SPAN - 1) piece = piece + 1 == S::PIECES ? 0 : piece + 1;
        }
      } else if (unit.columns <= kColumns / 2) {
        run(std::integral_constant<int, 0>{}, at_hand);
      } else if (unit.columns <= kColumns) {
        run(std::integral_constant<int, 1>{}, at_hand);
      } else {
        run(std::integral_constant<int, stream::kTileColumns / kColumns>{}, at_hand);
      }
      if (count < told_of) finished(count);
    }
  }
  __syncwarp();
  wait_for_previous();
  if constexpr (DOWN) combine(p.combine);
#endif
}

}  // namespace cuda
}  // namespace kdtree
