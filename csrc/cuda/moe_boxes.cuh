// The experts for bf16 activations on Hopper: moe_stream.cuh's products, in every bit, with weights brought by the bulk copy engine.
//
// A box is 16 weight rows x 128 bytes, two units of K, of rows as they lie in the file: of gate and up eight each, in one copy, because the
// tensor map has both as its third dimension. Every warp that multiplies has a ring of its own with two mbarriers a slot; one warp more
// asks for all boxes, a lane for each ring, so that the others have nothing to do with it but to say when a slot is free. The scales of
// several boxes come in one piece. Blocks have equal shares of the items (box_plan.h); within a block any warp may have any item, or, where
// warps share K, the groups have equal shares.
// Nibbles come as q/4 (nibbles.cuh); an item's sums are multiplied by 4 at its end.
#pragma once
#include "../box_plan.h"
#include "box_copy.cuh"
#include "moe_box_params.cuh"
#include "nibbles.cuh"
#include "staged_rows.cuh"

namespace kdtree {
namespace cuda {

template <bool DOWN_, bool STAGED_, int SPLIT_, int WARPS_, int WIDE_, int DEPTH_, int SPAN_, int RESIDENT_>
struct BoxMoeShape {
  static constexpr bool DOWN = DOWN_, STAGED = STAGED_;
  static constexpr int SPLIT = SPLIT_, WARPS = WARPS_, WIDE = WIDE_, DEPTH = DEPTH_, SPAN = SPAN_, RESIDENT = RESIDENT_;
  static constexpr int MOST = stream::box_most(STAGED, SPLIT), SHARED_TURN = MOST * kColumns;  // rows of the shared expert at a time
  static constexpr int ROWS = stream::moe_rows(STAGED);  // rows of the step at a time
  static constexpr int GROUPS = WARPS / SPLIT, SEGMENTS = kSegments / SPLIT;
  static constexpr int OUTPUTS = stream::moe_outputs(DOWN), THREADS = stream::box_threads(WARPS);
  static constexpr int SLOT = WIDE * stream::kBoxBytes, LINE = WIDE * SPAN * 16, PIECE = kTileRows * LINE;  // LINE: a row's scales in a piece
  static constexpr int RING = static_cast<int>(stream::box_ring(WARPS, WIDE, DEPTH, SPAN));
  static_assert(kSegments % SPLIT == 0 && WARPS % SPLIT == 0 && WARPS <= kWarp, "whole groups, and a lane a ring");
  static_assert(DEPTH + 2 <= kBoxItems && LINE <= 256, "each slot may be another item's; what a box may be wide");
  static_assert((LINE & (LINE - 1)) == 0, "the other eight rows' scales are a bit away");
};

// What a warp multiplies next: a tile and the places of its columns, of which there are none once all is done.
struct BoxItem {
  int tile, first, columns, of_shared;
};

template <typename S>
__global__ __launch_bounds__(S::THREADS, S::RESIDENT) void box_moe_kernel(const __grid_constant__ BoxMoeParams q) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // box_plan.h chooses it on Hopper alone
#else
  constexpr bool DOWN = S::DOWN, STAGED = S::STAGED;
  constexpr int SPLIT = S::SPLIT, WARPS = S::WARPS, DEPTH = S::DEPTH, WIDE = S::WIDE, GROUPS = S::GROUPS, SEGMENTS = S::SEGMENTS, OUTPUTS = S::OUTPUTS;
  constexpr int SLOTS = stream::kSumSlots;
  constexpr WeightKind INT4 = WeightKind::kInt4, BF16 = WeightKind::kBf16;
  const StreamMoeParams& p = q.p;
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ float squares[STAGED ? S::ROWS * kSegments : 1], inverse[STAGED ? S::ROWS : 1];
  __shared__ Routes<S::ROWS * kMostTopK> routes;
  __shared__ uint64_t landed[2][WARPS * DEPTH], routed;  // a ring's slots: what was asked for is there; and, second, it was used
  __shared__ BoxItem items[WARPS][kBoxItems];
  __shared__ int next_item, shares[SPLIT > 1 ? GROUPS + 1 : 2];  // the block's, or a group's first of the others, and the end
  __shared__ uint64_t full[SPLIT > 1 ? GROUPS * SLOTS : 1], empty[SPLIT > 1 ? GROUPS * SLOTS : 1];
  __shared__ int4 summed[SPLIT > 1 ? GROUPS * SLOTS : 1];  // tile, first of the columns' places, columns, whether the shared expert's
  uint8_t* const rings = dynamic + (stream::kBoxAlign - shared_address(dynamic) % stream::kBoxAlign) % stream::kBoxAlign;
  uint8_t* const sums = rings + S::RING;
  uint8_t* const staged = sums + stream::box_sum_bytes(SPLIT, S::MOST, S::WARPS, q.columns);

  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  const int block = blockIdx.x, blocks = gridDim.x, m0 = blockIdx.y * S::ROWS;
  const int tiles = (p.n + OUTPUTS - 1) / OUTPUTS, shared_tiles = (p.shared_n + OUTPUTS - 1) / OUTPUTS;
  const int own_shared = stream::shared_items(shared_tiles, blocks, block);
  const bool copying = warp == WARPS;
  const int mine = copying ? min(lane, WARPS - 1) : warp, group = mine / SPLIT, part = mine % SPLIT;  // a ring, and whose it is
  const uint32_t ring = shared_address(rings) + mine * (DEPTH * S::SLOT);
  const uint32_t pieces = shared_address(rings) + WARPS * DEPTH * S::SLOT + mine * (DEPTH * S::PIECE);
  const uint32_t landed_at = shared_address(landed[0] + mine * DEPTH);
  constexpr uint32_t FREED = WARPS * DEPTH * 8;  // from a slot's first barrier to its second
  const int s0 = part * SEGMENTS;  // the ring's segments begin
  const auto unit_at = [](int segment, int k, bool bf16) { return segment_begin(segment, bf16 ? k / kUnitK<BF16> : k / kUnitK<INT4>); };

  for (int i = threadIdx.x; i < 2 * WARPS * DEPTH; i += S::THREADS) barrier_init(shared_address(landed[0] + i), 1);
  if (SPLIT > 1 && threadIdx.x < GROUPS * SLOTS) {  // every lane arrives: of all warps of the group, and of the one that adds
    barrier_init(shared_address(full + threadIdx.x), SPLIT * kWarp);
    barrier_init(shared_address(empty + threadIdx.x), kWarp);
  }
  if (threadIdx.x == 0) {
    barrier_init(shared_address(&routed), kWarp);
    next_item = 0;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine is to see the barriers
  __syncthreads();

  // The copying warp: a lane's ring, and its place among the items.
  const auto live_rows = [&]() { return min(active_rows(p.n_rows, p.max_rows) - static_cast<int>(blockIdx.y) * S::ROWS, S::ROWS); };
  int rows = min(p.max_rows - m0, S::ROWS);        // at most; what is copied before their number is known takes them for one turn
  int left = 0, box = 0, first_row = 0;            // boxes of the item that are still to come, the next one, the tile's first row
  bool of_shared = false, done = lane >= WARPS;
  int to_slot = 0, round = 0, to_piece = 0, in_piece = 0;
  int index = -1, taken = 0, begun = 0;            // the item taken and not yet begun; split: items taken; items begun
  // Takes the next item. False: there is none, as far as is known.
  const auto take_item = [&]() {
    const int shared_turns = (rows + S::SHARED_TURN - 1) / S::SHARED_TURN;
    if (index < 0) index = SPLIT == 1 ? atomicAdd(&next_item, 1) : taken++;
    const int shared_count = (SPLIT == 1 ? own_shared : (own_shared - group + GROUPS - 1) / GROUPS) * shared_turns;
    BoxItem item{};
    of_shared = index < shared_count;
    if (of_shared) {
      const int i = index / shared_turns, turn = index - i * shared_turns;
      item.tile = block + (SPLIT == 1 ? i : group + i * GROUPS) * blocks, item.first = turn * S::SHARED_TURN;
      item.columns = 1, item.of_shared = 1;  // how many are there is for whoever knows the rows
      first_row = item.tile * OUTPUTS;
    } else {
      if (!barrier_passed(shared_address(&routed), 0)) return false;
      const int at = shares[SPLIT == 1 ? 0 : group] + index - shared_count;
      if (at < shares[SPLIT == 1 ? 1 : group + 1]) {
        const int expert = routes.slot[at / tiles];
        const stream::ItemPlace place = stream::item_at(at, tiles, routes.turn[expert], routes.turn[expert + 1]);
        item.tile = place.tile, item.first = routes.start[expert] + place.turn * kColumns;
        item.columns = min(routes.start[expert + 1] - item.first, kColumns);
        first_row = routes.expert[expert] * p.step + item.tile * OUTPUTS;
      } else {
        done = true;
      }
    }
    items[mine][begun++ % kBoxItems] = item;
    const bool bf16 = of_shared || p.bf16;
    const int k = of_shared ? p.shared_k : p.k;
    index = -1, in_piece = 0;
    box = unit_at(s0, k, bf16) / 2, left = done ? 0 : unit_at(s0 + SEGMENTS, k, bf16) / 2 - box;
    return true;
  };
  // Asks for what the ring's next slot is to hold, where it is free; the end of all items is a slot of nothing.
  const auto copy_slot = [&]() {
    if (done || !barrier_passed(landed_at + FREED + to_slot * 8, (round ^ 1) & 1) || (left == 0 && !take_item())) return false;
    const int boxes = min(WIDE, left);
    const bool scaled = boxes > 0 && !of_shared && !p.bf16 && in_piece == 0;
    const uint32_t to = ring + to_slot * S::SLOT, barrier = landed_at + to_slot * 8;
    barrier_expect(barrier, boxes * stream::kBoxBytes + (scaled ? S::PIECE : 0));
#pragma unroll
    for (int j = 0; j < WIDE; ++j) {
      if (j < boxes) copy_box(to + j * stream::kBoxBytes, of_shared ? &q.shared : &q.weights, (box + j) * 128, first_row, barrier);
    }
    if (scaled) {
      copy_box(pieces + to_piece * S::PIECE, &q.scales, box * 16, first_row, barrier);
      to_piece = to_piece + 1 == DEPTH ? 0 : to_piece + 1;
    }
    in_piece = in_piece + 1 == S::SPAN ? 0 : in_piece + 1;
    box += WIDE, left -= boxes;
    if (++to_slot == DEPTH) to_slot = 0, round ^= 1;
    return true;
  };
  // Weights alone, so that they wait for nobody; the shared expert's.
  if (copying && rows <= S::SHARED_TURN) {
    while (__any_sync(kAll, copy_slot())) {
    }
  }

  // Before the wait one may read what is older than the launch before this one, which has itself waited: x and the count of rows; and
  // by down the ids too.
  rows = live_rows();
  if (rows <= 0) {
    wait_for_previous();
    if (copying && lane < WARPS) {
      for (int i = 0; i < to_slot + round * DEPTH; ++i) barrier_wait(landed_at + i * 8, 0);
    }
    if constexpr (DOWN) combine(p.combine);
    return;
  }
  if constexpr (STAGED) {
    const float* const x = p.x + static_cast<size_t>(m0) * p.k;
    square_rows<kSegments>(squares, x, p.k, rows, p.k, kUnitK<INT4>, 0);
    inverse_rows<1, kSegments>(inverse, squares, rows, p.k, p.eps);
    stage_normed_rows(staged, stream::staged_stride(p.k), x, p.k, rows, rows, p.k, 0, p.k, p.norm_w, inverse);
    __syncthreads();
  }
  if (copying) {
    while (!__all_sync(kAll, done)) {
      if (!__any_sync(kAll, copy_slot())) __nanosleep(kPause);
    }
  } else {
    // The last of the others finds the routes and who has what while they are at the shared expert's items, which wait for no router.
    if (warp == WARPS - 1) {
      if constexpr (!DOWN) wait_for_previous();
      find_routes<kColumns, kWarp>(routes, p.ids + m0 * p.top_k, rows, p.top_k, p.experts);
      const int weight = stream::shared_weight((rows + S::SHARED_TURN - 1) / S::SHARED_TURN, p.shared_k, p.k, p.bf16), count = routes.turn[routes.found] * tiles;
      const int first = stream::first_box_item(count, shared_tiles, weight, blocks, block), end = stream::first_box_item(count, shared_tiles, weight, blocks, block + 1);
      constexpr int OWNERS = SPLIT > 1 ? GROUPS : 1;
      if (lane <= OWNERS) shares[lane] = first + stream::first_box_item(end - first, own_shared, weight, OWNERS, lane);
      __syncwarp();
      barrier_arrive(shared_address(&routed));
    }
    if (!STAGED || !q.early) wait_for_previous();

    // Of a column: its sums over K for weight row lane/4 and for the one eight below.
    const auto emit_at = [&](int tile, int first, int c, int columns, bool of_shared, float low, float high) {
      if (c >= columns) return;
      if (!of_shared && !p.bf16) low = __fmul_rn(low, 4.f), high = __fmul_rn(high, 4.f);
      const bool swap = !DOWN && (of_shared ? q.shared_up_first : q.up_first);
      emit_column<DOWN>(p, m0, of_shared, of_shared ? first + c : routes.place[first + c], tile * OUTPUTS + lane / 4, swap ? high : low, swap ? low : high);
    };
    // Of up to four columns, which stand at the even places of a product, a lane has one; of more, two.
    const auto emit = [&](int tile, int first, int columns, bool of_shared, const auto& v) {
      if constexpr (sizeof v == 2 * sizeof(float)) {
        emit_at(tile, first, lane % 4, columns, of_shared, v[0], v[1]);
      } else {
        emit_at(tile, first, lane % 4 * 2, columns, of_shared, v[0], v[2]);
        emit_at(tile, first, lane % 4 * 2 + 1, columns, of_shared, v[1], v[3]);
      }
    };
    // Where a lane's sums of a segment stand, of up to four columns and of more.
    const auto few_at = [&](int at, int segment) { return reinterpret_cast<float2*>(sums) + ((at * kSegments + segment) * q.columns + lane % 4) * 8 + lane / 4; };
    const auto many_at = [&](int at, int segment) { return reinterpret_cast<float4*>(sums) + (at * kSegments + segment) * kWarp + lane; };
    // Adds up the group's tile number i: the segments in ascending order.
    const auto reduce = [&](int i) {
      const int at = group * SLOTS + i % SLOTS;
      barrier_wait(shared_address(full + at), i / SLOTS & 1);
      const int4 of = summed[at];
      const auto add = [&](auto& v, const auto& s) {
#pragma unroll
        for (int j = 1; j < kSegments; ++j) {
#pragma unroll
          for (int c = 0; c < static_cast<int>(sizeof v / sizeof(float)); ++c) v[c] = __fadd_rn(v[c], reinterpret_cast<const float*>(s + j)[c]);
        }
        reads_done();
        barrier_arrive(shared_address(empty + at));
        emit(of.x, of.y, of.z, of.w != 0, v);
      };
      if (of.z <= kColumns / 2) {
        float2 s[kSegments] = {};
        if (lane % 4 < of.z) {
#pragma unroll
          for (int j = 0; j < kSegments; ++j) s[j] = *few_at(at, j);
        }
        float v[2] = {s[0].x, s[0].y};
        add(v, s);
      } else {
        float4 s[kSegments];
#pragma unroll
        for (int j = 0; j < kSegments; ++j) s[j] = *many_at(at, j);
        float v[4] = {s[0].x, s[0].y, s[0].z, s[0].w};
        add(v, s);
      }
    };

    const uint32_t matrix = kept((lane & 15) * 128 + ((lane >> 4) ^ (lane & 7)) * 16);  // int4: a lane's row address of ldmatrix; of groups 2i and 2i + 1 at ^ 32i
    const uint32_t line = kept((lane >> 2) * 128 + ((lane & 3) ^ (lane >> 2)) * 16);  // bf16: 16 bytes of row lane/4's first unit; the second's at ^ 64
    const uint32_t scales_of = kept(pieces + ((lane >> 2) + (q.scales_differ ? 8 : 0)) * S::LINE);
    int slot = 0, piece = 0, phase = 0;
    int sequence = 0;  // of the group's items
    const auto run = [&](auto kind, auto mode, int tile, int first, int columns, bool of_shared) {
      constexpr WeightKind KIND = decltype(kind)::value;
      constexpr int MODE = decltype(mode)::value, N = MODE == 0 ? 1 : MODE, VALUES = MODE == 0 ? 2 : 4;  // tiles of columns; 0: half a tile
      constexpr int BOX = 2 * kUnitK<KIND> * 2, PIECES = BOX / 64;  // bytes of activations that meet a box; what a lane has 16 of
      constexpr bool NATURAL = DOWN && KIND == BF16;                // act as it is
      constexpr bool AHEAD = !STAGED && N == 1;                     // rows come from L1 and L2, asked for a box ahead
      const int k = of_shared ? p.shared_k : p.k, begin = unit_at(s0, k, KIND == BF16), end = unit_at(s0 + SEGMENTS, k, KIND == BF16);
      const uint16_t* const base = NATURAL ? (of_shared ? p.shared_act : p.act) : p.rows;
      const size_t base_row = static_cast<size_t>(m0) * (DOWN && !of_shared ? p.top_k : 1);
      const int stride = NATURAL ? k : p.row_stride;
      [[maybe_unused]] const uint8_t* const b_base = reinterpret_cast<const uint8_t*>(base + base_row * stride);
      [[maybe_unused]] const uint8_t* b_alone = nullptr;
      [[maybe_unused]] uint32_t b_at[N];
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
        const int c = first + min(MODE == 0 ? lane / 8 : nt * kColumns + lane / 4, columns - 1), place = of_shared ? c : routes.place[c];
        const int row = DOWN || of_shared ? place : place / p.top_k, from = begin * (kUnitK<KIND> * 2) + lane % 4 * 16;
        b_at[nt] = STAGED ? shared_address(staged) + row * stream::staged_stride(p.k) + from : static_cast<uint32_t>(row) * (stride * 2) + from;
        if constexpr (AHEAD) b_alone = b_base + b_at[0];
      }
      const auto rows_at = [&](int nt, int byte) {
        uint4 v;
        if constexpr (STAGED) v = load_shared16(b_at[nt] + byte);
        else v = *reinterpret_cast<const uint4*>((AHEAD ? b_alone : b_base + b_at[nt]) + byte);
        return v;
      };
      float acc[N][VALUES] = {};
      [[maybe_unused]] float total[VALUES];
      [[maybe_unused]] float4* const totals = reinterpret_cast<float4*>(sums) + warp * (S::MOST * kWarp) + lane;
#pragma unroll
      for (int i = 0; i < VALUES; ++i) total[i] = -0.f;  // -0 + s is s in every bit
      if constexpr (N > 1) {
#pragma unroll
        for (int nt = 0; nt < N; ++nt) totals[nt * kWarp] = make_float4(-0.f, -0.f, -0.f, -0.f);
      }
      int unit = begin, segment = s0, segment_end = unit_at(s0 + 1, k, KIND == BF16);
      [[maybe_unused]] const int to = group * SLOTS + sequence % SLOTS;
      const auto end_segments = [&]() {
#pragma unroll 1
        while (unit == segment_end && segment < s0 + SEGMENTS) {
          if constexpr (SPLIT > 1) {
            if (segment == s0 && sequence >= SLOTS) barrier_wait(shared_address(empty + to), (sequence / SLOTS - 1) & 1);
            if constexpr (MODE == 0) {
              if (lane % 4 < columns) *few_at(to, segment) = make_float2(acc[0][0], acc[0][1]);
            } else {
              *many_at(to, segment) = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
            }
          } else {
#pragma unroll
            for (int nt = 0; nt < N; ++nt) {
              if constexpr (N == 1) {
#pragma unroll
                for (int i = 0; i < VALUES; ++i) total[i] = __fadd_rn(total[i], acc[0][i]);
              } else {
                float4& t = totals[nt * kWarp];
                t = make_float4(__fadd_rn(t.x, acc[nt][0]), __fadd_rn(t.y, acc[nt][1]), __fadd_rn(t.z, acc[nt][2]), __fadd_rn(t.w, acc[nt][3]));
              }
            }
          }
#pragma unroll
          for (int nt = 0; nt < N; ++nt)
#pragma unroll
            for (int i = 0; i < VALUES; ++i) acc[nt][i] = 0.f;
          ++segment;
          segment_end = unit_at(segment + 1, k, KIND == BF16);
        }
      };
      [[maybe_unused]] uint4 held[AHEAD ? PIECES : 1];
      if constexpr (AHEAD) {
        if (begin < end) {
#pragma unroll
          for (int i = 0; i < PIECES; ++i) held[i] = rows_at(0, i * 64);
        }
      }
      end_segments();
      const auto multiply_box = [&](uint32_t at, uint32_t scales, bool last) {
        [[maybe_unused]] const uint8_t* const b_next = b_alone + (last ? 0 : BOX);  // nothing is read beyond a row
        // Gives the rows' piece i of this box; where rows are asked for ahead, the next box's takes its place.
        const auto take = [&](int nt, int i) {
          if constexpr (AHEAD) return held[i];
          else return rows_at(nt, i * 64);
        };
        const auto give_back = [&](int i) {
          if constexpr (AHEAD) held[i] = *reinterpret_cast<const uint4*>(b_next + i * 64);
        };
        const float zero[4] = {};
        if constexpr (KIND == INT4) {
          const BoxInt4 box(at, matrix, scales, scales ^ (8 * S::LINE));
#pragma unroll
          for (int g = 0; g < PIECES; ++g) {
            uint32_t a[4], b[4];
            box.fragments(g, a, b);
            const float scale = box.scale(g), below = box.below(g);
            float sum[N][4];
#pragma unroll
            for (int nt = 0; nt < N; ++nt) {
              const uint4 x = take(nt, g);
              multiply_add(sum[nt], a, x.x, x.y, zero);
              multiply_add(sum[nt], b, x.z, x.w, sum[nt]);
            }
            give_back(g);
#pragma unroll
            for (int nt = 0; nt < N; ++nt) {
#pragma unroll
              for (int i = 0; i < VALUES; ++i) {
                const int from = MODE == 0 ? i * 2 : i;
                acc[nt][i] = __fmaf_rn(sum[nt][from], from < 2 ? scale : below, acc[nt][i]);
              }
            }
            if (g % 4 == 3 && ++unit == segment_end) end_segments();
          }
        } else {
          uint4 w[2][2];
#pragma unroll
          for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) w[u][r] = load_shared16(at + r * 1024 + (line ^ (u * 64)));
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            // Elements 8t..8t+7 of the rows, brought into the activations' order.
            const uint4 low = in_order(w[u][0]), high = in_order(w[u][1]);
            const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int nt = 0; nt < N; ++nt) {
              uint4 x = take(nt, u);
              if constexpr (NATURAL) x = in_order(x);
              float sum[4] = {};
#pragma unroll
              for (int i = 0; i < VALUES; ++i) sum[MODE == 0 ? i * 2 : i] = acc[nt][i];
              multiply_add(sum, a, x.x, x.y, sum);
              multiply_add(sum, b, x.z, x.w, sum);
#pragma unroll
              for (int i = 0; i < VALUES; ++i) acc[nt][i] = sum[MODE == 0 ? i * 2 : i];
            }
            give_back(u);
            if (++unit == segment_end) end_segments();
          }
        }
        if constexpr (AHEAD) b_alone = b_next;
        else {
#pragma unroll
          for (int nt = 0; nt < N; ++nt) b_at[nt] += BOX;
        }
      };
#pragma unroll 1
      for (int of_piece = 0; unit < end;) {
        barrier_wait(landed_at + slot * 8, phase & 1);
        const uint32_t at = ring + slot * S::SLOT, scales = scales_of + piece * S::PIECE + of_piece * (WIDE * 16);
        const int boxes = min(WIDE, (end - unit) / 2);
#pragma unroll 1
        for (int j = 0; j < boxes; ++j) multiply_box(at + j * stream::kBoxBytes, scales + j * 16, unit + 2 >= end);
        __syncwarp();  // every lane has used what it read
        if (elected()) barrier_arrive(landed_at + FREED + slot * 8);
        if (KIND == INT4 && (++of_piece == S::SPAN || unit >= end)) {
          of_piece = 0;
          piece = piece + 1 == DEPTH ? 0 : piece + 1;
        }
        if (++slot == DEPTH) slot = 0, phase ^= 1;
      }
      if constexpr (SPLIT == 1) {
#pragma unroll 1
        for (int nt = 0; nt * kColumns < columns; ++nt) {
          if constexpr (N > 1) {
            const float4 t = totals[nt * kWarp];
            total[0] = t.x, total[1] = t.y, total[2] = t.z, total[3] = t.w;
          }
          emit(tile, first + nt * kColumns, columns - nt * kColumns, of_shared, total);
        }
      } else {
        if (part == 0 && lane == 0) summed[to] = make_int4(tile, first, columns, of_shared);
        barrier_arrive(shared_address(full + to));
        // Each tile is added up by one warp of the group, in turn, one tile later: by then the others have mostly come so far.
        if (sequence > 0 && (sequence - 1) % SPLIT == part) reduce(sequence - 1);
        ++sequence;
      }
    };

    for (int count = 0;; ++count) {
      barrier_wait(landed_at + slot * 8, phase & 1);  // with its first slot an item is known
      const BoxItem item = items[warp][count % kBoxItems];
      if (item.columns == 0) break;
      const bool of_shared = item.of_shared != 0;
      const int tile = item.tile, first = item.first, columns = of_shared ? min(live_rows() - first, S::SHARED_TURN) : item.columns;
      const auto pick = [&](auto kind) {
        if (columns <= kColumns / 2) {
          run(kind, std::integral_constant<int, 0>{}, tile, first, columns, of_shared);
        } else if (decltype(kind)::value == INT4 || S::MOST == 1 || columns <= kColumns) {
          run(kind, std::integral_constant<int, 1>{}, tile, first, columns, of_shared);
        } else {
          run(kind, std::integral_constant<int, decltype(kind)::value == INT4 ? 1 : S::MOST>{}, tile, first, columns, of_shared);
        }
      };
      if (of_shared || p.bf16) pick(std::integral_constant<WeightKind, BF16>{});
      else pick(std::integral_constant<WeightKind, INT4>{});
    }
    if constexpr (SPLIT > 1) {
      if (sequence > 0 && (sequence - 1) % SPLIT == part) reduce(sequence - 1);
    }
  }
  if constexpr (DOWN) combine(p.combine);
#endif
}

}  // namespace cuda
}  // namespace kdtree
