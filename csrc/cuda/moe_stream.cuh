// The experts for bf16 activations where moe_boxes.cuh does not serve: gate and up with SiLU, then down, each one launch driven by the
// distinct experts of the step (moe_items.cuh).
//
// Blocks, and within a block warps, have equal shares of the items by bytes (stream_plan.h). Every warp streams its items through its own
// ring, all segments of K of each, and waits for nobody. Rows come from L1 and L2.
// Reduction order: stream.cuh with K = D for gate and up and K = I for down; no other row has a say.
#pragma once
#include "moe_items.cuh"

namespace kdtree {
namespace cuda {

constexpr int kMoeThreads = stream::kMoeWarps * kWarp, kMoeRows = stream::moe_rows(false);

// Two scales of a row; there: 4, or 0 to write zeros and read nothing.
__device__ __forceinline__ void copy_scales(uint32_t to, const void* from, uint32_t there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there) : "memory");
}

// Finds the routes of the block's rows, and the items of one of its warps: the first, and where they end. A call, so that it takes no
// registers from the loop.
static __device__ __noinline__ int2 own_items(Routes<kMoeRows * kMostTopK>& routes, const StreamMoeParams& p, int tiles, int shared_tiles, int rows, int warp) {
  find_routes<kColumns, kMoeThreads>(routes, p.ids + blockIdx.y * kMoeRows * p.top_k, rows, p.top_k, p.experts);
  const stream::Items all = stream::moe_items(gridDim.x, shared_tiles, (rows + kColumns - 1) / kColumns, p.shared_k, routes.turn[routes.found] * tiles, p.k, p.bf16);
  const int block = blockIdx.x;
  return make_int2(stream::first_item(all, block, stream::kMoeWarps, warp), stream::first_item(all, block, stream::kMoeWarps, warp + 1));
}

template <bool DOWN>
__global__ __launch_bounds__(kMoeThreads, 1) void stream_moe_kernel(const __grid_constant__ StreamMoeParams p) {
  constexpr int DEPTH = stream::kMoeDepth, WARPS = stream::kMoeWarps, OUTPUTS = stream::moe_outputs(DOWN), PIECES = 4;
  constexpr WeightKind INT4 = WeightKind::kInt4, BF16 = WeightKind::kBf16;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ Routes<kMoeRows * kMostTopK> routes;

  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  const int block = blockIdx.x, blocks = gridDim.x, m0 = blockIdx.y * kMoeRows;
  const int tiles = (p.n + OUTPUTS - 1) / OUTPUTS, shared_tiles = (p.shared_n + OUTPUTS - 1) / OUTPUTS;
  const int own_shared = stream::shared_items(shared_tiles, blocks, block);
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * kRingBytes);
  const auto units_of = [](int k, bool bf16) {
    const int unit = bf16 ? kUnitK<BF16> : kUnitK<INT4>;
    return (k + unit - 1) / unit;
  };

  // The copying side walks the warp's items ahead of the multiplication: the shared expert's, then the others from `copy_item` on.
  // Weights alone, so that it waits for nobody: the shared expert's items are known from the start.
  // A lane has 16 bytes of the unit in row lane/4 and in the one eight below, and half of the scales of row lane/2.
  const uint32_t weights_to = kept(piece_offset(lane / PIECES, lane % PIECES)), scales_to = kept(kUnitBytes + lane * 4);
  const uint8_t* weights = nullptr;
  const uint8_t* scales = nullptr;
  std::conditional_t<DOWN, uint32_t, int64_t> eight_rows = 0;  // bytes to the row eight below: down's, or the up projection's
  bool copy_bf16 = false, whole = true;
  int copy_left = 0, copy_pieces = PIECES, copy_shared = warp, copy_turn = 0, copy_item = 0, copy_end = 0, rows = kMoeRows;
  uint32_t copy_slot = ring;
  const auto point = [&](int tile, int slot, bool of_shared) {
    const int k = of_shared ? p.shared_k : p.k, n = of_shared ? p.shared_n : p.n;
    const size_t first = of_shared ? 0 : static_cast<size_t>(routes.expert[slot]) * p.step;
    copy_bf16 = of_shared || p.bf16;
    const int pieces = copy_bf16 ? k / 8 : (k + 31) / 32;
    copy_left = units_of(k, copy_bf16);
    copy_pieces = copy_left * PIECES > pieces ? pieces % PIECES : PIECES;  // of the last unit
    whole = copy_bf16 || pieces % 4 == 0;
    const int row = min(tile * OUTPUTS + lane / PIECES, n - 1);
    const uint8_t* const data = static_cast<const uint8_t*>(of_shared ? p.shared[0] : p.data[0]);
    weights = data + byte_at(first, row, pieces, lane % PIECES, 16);
    if constexpr (DOWN) eight_rows = static_cast<uint32_t>(min(row + 8, n - 1) - row) * pieces * 16;
    else eight_rows = static_cast<const uint8_t*>(of_shared ? p.shared[1] : p.data[1]) - data;
    if (!copy_bf16) {
      const int scaled = min(tile * OUTPUTS + lane / 2 % OUTPUTS, n - 1);
      scales = reinterpret_cast<const uint8_t*>(p.scale[!DOWN && lane >= kWarp / 2]) + byte_at(first, scaled, pieces, lane % 2 * (PIECES / 2), sizeof(uint16_t));
    }
  };
  const auto refill = [&]() {
    while (copy_left == 0) {
      if (copy_shared < own_shared) {
        point(block + copy_shared * blocks, 0, true);
        const bool more = (copy_turn + 1) * kColumns < rows;
        copy_turn = more ? copy_turn + 1 : 0, copy_shared += more ? 0 : WARPS;
      } else if (copy_item < copy_end) {
        const int slot = routes.slot[copy_item / tiles];
        point(stream::item_at(copy_item, tiles, routes.turn[slot], routes.turn[slot + 1]).tile, slot, false);
        ++copy_item;
      } else {
        break;
      }
    }
  };
  // Asks for the next unit; beyond the end of a row that is no whole units come zeros.
  const auto copy = [&]() {
    const bool last = copy_left == 1;
    const uint32_t there = last && lane % PIECES >= copy_pieces ? 0 : 16;
    copy16(copy_slot + weights_to, weights, there);
    copy16(copy_slot + weights_to + 512, weights + eight_rows, there);
    constexpr int MINE = PIECES / 2;  // scales of a lane
    const int scaled = copy_bf16 ? 0 : last ? copy_pieces - lane % 2 * MINE : MINE;  // that there are
    if (whole) {
      copy_scales(copy_slot + scales_to, scales, scaled > 0 ? 2 * MINE : 0);
    } else {  // they stand at any even address
      const uint16_t* const from = reinterpret_cast<const uint16_t*>(scales);
      uint32_t two = 0;
      if (scaled > 0) two = __ldg(from);
      if (scaled > 1) two |= static_cast<uint32_t>(__ldg(from + 1)) << 16;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(copy_slot + scales_to), "r"(two) : "memory");
    }
    weights += 64, scales += 8, --copy_left;
  };
  const auto next_slot = [&](uint32_t slot) { return slot + kRingBytes == ring + DEPTH * kRingBytes ? ring : slot + kRingBytes; };
  const auto fill = [&]() {
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) {
      refill();
      if (copy_left > 0) copy();
      copy_commit();
      copy_slot = next_slot(copy_slot);
    }
  };
  // Into the first of the warp's shared items alone: how often that one is multiplied depends on the rows.
  const bool early = warp < own_shared && units_of(p.shared_k, true) >= DEPTH - 1;
  if (early) fill();

  int item = 0;
  const auto share_out = [&]() {
    const int2 own = own_items(routes, p, tiles, shared_tiles, rows, warp);
    item = copy_item = own.x, copy_end = own.y;
    if (early) {
      copy_turn = kColumns < rows ? 1 : 0, copy_shared = warp + (kColumns < rows ? 0 : WARPS);
    } else {
      fill();
    }
  };
  // Before the wait one may read what is older than the launch before this one, which has itself waited: the count of rows, and by down
  // the ids too.
  rows = min(active_rows(p.n_rows, p.max_rows) - m0, kMoeRows);
  if (rows <= 0) {
    wait_for_previous();
    copy_wait<0>();
    if constexpr (DOWN) combine(p.combine);
    return;
  }
  if constexpr (DOWN) share_out();
  wait_for_previous();
  if constexpr (!DOWN) share_out();

  LaneOffsets at(lane);
  at.matrix = kept(at.matrix), at.scale = kept(at.scale);
  uint32_t slot = ring;
  const auto run = [&](auto kind, int tile, int first, int columns, bool of_shared) {
    constexpr WeightKind KIND = decltype(kind)::value;
    constexpr int UNIT = kUnitK<KIND>;
    constexpr bool NATURAL = DOWN && KIND == BF16;  // act as it is
    const int k = of_shared ? p.shared_k : p.k, units = units_of(k, KIND == BF16);
    const uint16_t* const base = NATURAL ? (of_shared ? p.shared_act : p.act) : p.rows;
    const size_t base_row = static_cast<size_t>(m0) * (DOWN && !of_shared ? p.top_k : 1);
    const int c = first + min(lane / 4, columns - 1), place = of_shared ? c : routes.place[c], row = DOWN || of_shared ? place : place / p.top_k;
    const uint16_t* b = base + (base_row + row) * (NATURAL ? k : p.row_stride) + lane % 4 * 8;
    [[maybe_unused]] int from = lane % 4 * 8;  // of a row that may end within a unit
    float acc[1][1][4] = {};
    float total[4] = {-0.f, -0.f, -0.f, -0.f};  // -0 + s is s in every bit
    int unit = 0, segment = 0, segment_end = segment_begin(1, units);
    const auto end_segments = [&]() {
#pragma unroll 1
      while (unit == segment_end && segment < kSegments) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = __fadd_rn(total[i], acc[0][0][i]), acc[0][0][i] = 0.f;
        ++segment;
        segment_end = segment_begin(segment + 1, units);
      }
    };
    end_segments();
#pragma unroll 1
    while (unit < units) {
      if (copy_left == 0) refill();
      copy_wait<DEPTH - 2>();
      __syncwarp();
      if (copy_left > 0) copy();
      copy_commit();
      const auto activations = [&](int, int group_of_32) {
        if constexpr (NATURAL) return in_order(from < k ? *reinterpret_cast<const uint4*>(b) : make_uint4(0, 0, 0, 0));
        else return *reinterpret_cast<const uint4*>(b + group_of_32 * 32);
      };
      multiply_unit<KIND, 1, 1, 4>(acc, slot, at, activations);
      b += UNIT;
      if constexpr (NATURAL) from += UNIT;
      copy_slot = slot;
      slot = next_slot(slot);
      ++unit;
      if (unit == segment_end) end_segments();
    }
    // Of weight row lane/4 the sums are v[0] and v[1], of the one eight below v[2] and v[3].
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = lane % 4 * 2 + j;
      if (column >= columns) break;
      emit_column<DOWN>(p, m0, of_shared, of_shared ? first + column : routes.place[first + column], tile * OUTPUTS + lane / 4, total[j], total[2 + j]);
    }
  };

  for (int next_shared = warp, turn = 0; next_shared < own_shared || item < copy_end;) {
    const bool of_shared = next_shared < own_shared;
    int tile = block + next_shared * blocks, first = 0, columns = rows;
    if (!of_shared) {
      const int expert = routes.slot[item / tiles];
      const stream::ItemPlace place = stream::item_at(item, tiles, routes.turn[expert], routes.turn[expert + 1]);
      tile = place.tile, turn = place.turn, first = routes.start[expert], columns = routes.start[expert + 1] - first;
      ++item;
    }
    first += turn * kColumns, columns -= turn * kColumns;
    const bool more = columns > kColumns;
    if (more) columns = kColumns;
    if (of_shared) turn = more ? turn + 1 : 0, next_shared += more ? 0 : WARPS;
    if (of_shared || p.bf16) run(std::integral_constant<WeightKind, BF16>{}, tile, first, columns, of_shared);
    else run(std::integral_constant<WeightKind, INT4>{}, tile, first, columns, of_shared);
  }
  copy_wait<0>();
  if constexpr (DOWN) combine(p.combine);
}

}  // namespace cuda
}  // namespace kdtree
