// The experts for bf16 activations: gate and up with SiLU, then down, each one launch driven by the distinct experts of the step.
//
// Bytes: the distinct experts' weights once for up to 8*NT rows of each, the shared expert's likewise; flops 2*3*M*(top_k*I + S)*D on
// tensor cores. Bound by weight bytes: an expert rarely has more than eight rows.
// An item is 16 weight rows of one expert, for one turn of the rows that chose it: 16 outputs of down, or 8 gate rows and the 8 up rows
// that meet them. Blocks, and within a block groups of SPLIT warps, have equal shares of the items by bytes (stream_plan.h). Every warp
// streams its items through its own ring and waits for nobody: with SPLIT = 1 it has all segments of K, else its part of them, and the
// sums of a group meet in shared memory while the warps are already at the next items.
// Reduction order: stream.cuh with K = D for gate and up and K = I for down; no other row has a say.
#pragma once
#include "combine.cuh"
#include "routes.cuh"
#include "stream.cuh"

namespace kdtree {
namespace cuda {

struct StreamMoeParams {
  const float* x;  // gate and up, staged: residual stream, normed on the way
  const float* norm_w;
  float eps;
  const uint16_t* rows;   // rows in the multiplication's order, row_stride apart: gate and up, not staged: [M]; down of int4: [M*top_k]
  int row_stride;         // elements, whole units
  int k, shared_k;        // inner dimension of the product
  bool bf16;              // the experts' weights are bf16, else int4; the shared expert's are bf16
  const void* data[2];    // gate and up, or down
  const uint16_t* scale[2];
  const void* shared[2];
  int n, shared_n;        // weight rows of an expert; shared_n 0: none
  int step;               // weight rows from an expert to the next
  const int32_t* ids;
  int top_k;
  uint16_t* act;         // [M*top_k, n or k] bf16: written by gate and up, read by down of bf16
  uint16_t* shared_act;  // [M, S]
  uint16_t* ordered;     // gate and up: act once more, in the multiplication's order; or null
  float* products;       // down: [M*(top_k + 1), n], a row's choices, then the shared expert
  int stride;            // bytes between staged rows
  int pairs;             // of columns that a group's sums have room for
  int max_rows;
  const int32_t* n_rows;
  CombineParams combine;  // down
};

template <bool DOWN_, bool STAGED_, int SPLIT_, int NT_, int WARPS_, int UNITS_, int DEPTH_, int RESIDENT_>
struct StreamMoeShape {
  static constexpr bool DOWN = DOWN_, STAGED = STAGED_;
  static constexpr int SPLIT = SPLIT_, NT = NT_, WARPS = WARPS_, UNITS = UNITS_, DEPTH = DEPTH_, RESIDENT = RESIDENT_;
  static constexpr int TURN = NT * kColumns;              // rows of an expert at a time
  static constexpr int ROWS = stream::moe_rows(STAGED);   // rows of the step at a time
  static constexpr int GROUPS = WARPS / SPLIT, SEGMENTS = kSegments / SPLIT;
  static constexpr int OUTPUTS = stream::moe_outputs(DOWN);
  static constexpr int SLOT = UNITS * kRingBytes, RING = WARPS * DEPTH * SLOT;
  static_assert(kSegments % SPLIT == 0 && WARPS % SPLIT == 0 && (SPLIT == 1 || NT == 1), "whole groups; sums of one tile of activations");
  static_assert(!STAGED || TURN >= ROWS, "staged rows take one turn");
};

// Barriers of warps in shared memory. A wait for phase i gives back as soon as that phase has ended, also long after.
__device__ __forceinline__ void barrier_init(uint32_t at, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t at, int phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(at), "r"(phase & 1) : "memory");
}

// Two or four scales of a row; there: BYTES, or 0 to write zeros and read nothing.
template <int BYTES>
__device__ __forceinline__ void copy_scales(uint32_t to, const void* from, uint32_t there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(there) : "memory");
}
// Keeps a lane's constant in its register: the compiler would rather compute it anew at every use.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Where in_order puts element i of a row.
__device__ __forceinline__ int ordered_place(int i) { return i - i % 8 + (i % 8 < 4 ? i % 8 * 2 : i % 8 * 2 - 7); }

template <typename S>
__global__ __launch_bounds__(S::WARPS* kWarp, KD_RESIDENT(S::RESIDENT)) void stream_moe_kernel(const __grid_constant__ StreamMoeParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  if constexpr (S::RING > 99 << 10) {  // only Hopper's blocks have so much memory: stream_plan.h chooses such a ring nowhere else
    __trap();
    return;
  }
#endif
  constexpr bool DOWN = S::DOWN, STAGED = S::STAGED;
  constexpr int SPLIT = S::SPLIT, NT = S::NT, DEPTH = S::DEPTH, GROUPS = S::GROUPS, SEGMENTS = S::SEGMENTS, OUTPUTS = S::OUTPUTS;
  constexpr int SLOTS = stream::kSumSlots, UNITS = S::UNITS, PIECES = 4 * UNITS;
  constexpr WeightKind INT4 = WeightKind::kInt4, BF16 = WeightKind::kBf16;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float squares[STAGED ? S::ROWS * kSegments : 1], inverse[STAGED ? S::ROWS : 1];
  __shared__ Routes<S::ROWS * kMostTopK> routes;
  __shared__ uint64_t full[SPLIT > 1 ? GROUPS * SLOTS : 1], empty[SPLIT > 1 ? GROUPS * SLOTS : 1];
  __shared__ int4 summed[SPLIT > 1 ? GROUPS * SLOTS : 1];  // tile, first of the columns' places, columns, whether the shared expert's
  uint8_t* const sums = smem + S::RING;
  uint8_t* const staged = sums + stream::moe_sum_bytes(SPLIT, NT, S::WARPS, p.pairs);

  // The shuffle tells the compiler that a warp's number is the same in all its lanes.
  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp, group = warp / SPLIT, part = warp % SPLIT;
  const int block = blockIdx.x, blocks = gridDim.x, m0 = blockIdx.y * S::ROWS;
  const int tiles = (p.n + OUTPUTS - 1) / OUTPUTS, shared_tiles = (p.shared_n + OUTPUTS - 1) / OUTPUTS;
  const int own_shared = stream::shared_items(shared_tiles, blocks, block);
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * S::SLOT);
  const int s0 = part * SEGMENTS;  // this warp's segments begin
  const auto unit_at = [](int segment, int k, bool bf16) {
    const int unit = bf16 ? kUnitK<BF16> : kUnitK<INT4>;
    return segment_begin(segment, (k + unit - 1) / unit);
  };

  // The copying side walks the group's items ahead of the multiplication: the shared expert's, then the others from `copy_item` on.
  // Weights alone, so that it waits for nobody: the shared expert's items are known from the start.
  // A lane has 16 bytes of the step in row lane / PIECES and in those 8 / UNITS apart, and half of the scales of row lane/2.
  const uint32_t weights_to = kept(lane % PIECES / 4 * kRingBytes + piece_offset(lane / PIECES, lane % 4));
  [[maybe_unused]] const uint32_t weights_to4 = UNITS == 2 ? kept((weights_to ^ 32) + 256) : 0;
  const uint32_t scales_to = kept(UNITS == 2 ? lane % 2 * kRingBytes + kUnitBytes + lane / 2 * 8 : kUnitBytes + lane * 4);
  const uint8_t* weights = nullptr;
  const uint8_t* scales = nullptr;
  [[maybe_unused]] uint32_t four_rows = 0;                    // bytes to the row four below,
  std::conditional_t<DOWN, uint32_t, int64_t> eight_rows = 0;  // and eight below: down's, or the up projection's
  bool copy_bf16 = false, whole = true;
  int copy_left = 0, copy_pieces = PIECES, copy_shared = group, copy_turn = 0, copy_item = 0, copy_end = 0, rows = S::ROWS;
  uint32_t copy_slot = ring;
  const auto point = [&](int tile, int slot, bool of_shared) {
    const int k = of_shared ? p.shared_k : p.k, n = of_shared ? p.shared_n : p.n;
    const size_t first = of_shared ? 0 : static_cast<size_t>(routes.expert[slot]) * p.step;
    copy_bf16 = of_shared || p.bf16;
    const int pieces = copy_bf16 ? k / 8 : (k + 31) / 32, unit = unit_at(s0, k, copy_bf16), end_unit = unit_at(s0 + SEGMENTS, k, copy_bf16);
    const int begin = unit / UNITS, end = (end_unit + UNITS - 1) / UNITS;
    copy_left = end_unit > unit ? end - begin : 0;
    copy_pieces = end * PIECES > pieces ? pieces % PIECES : PIECES;  // of the last step
    whole = copy_bf16 || pieces % 4 == 0;
    const int row = min(tile * OUTPUTS + lane / PIECES, n - 1);
    const uint8_t* const data = static_cast<const uint8_t*>(of_shared ? p.shared[0] : p.data[0]);
    weights = data + byte_at(first, row, pieces, begin * PIECES + lane % PIECES, 16);
    if constexpr (UNITS == 2) four_rows = static_cast<uint32_t>(min(row + 4, n - 1) - row) * pieces * 16;
    if constexpr (DOWN) eight_rows = static_cast<uint32_t>(min(row + 8, n - 1) - row) * pieces * 16;
    else eight_rows = static_cast<const uint8_t*>(of_shared ? p.shared[1] : p.data[1]) - data;
    if (!copy_bf16) {
      const int scaled = min(tile * OUTPUTS + lane / 2 % OUTPUTS, n - 1);
      scales = reinterpret_cast<const uint8_t*>(p.scale[!DOWN && lane >= kWarp / 2]) + byte_at(first, scaled, pieces, begin * PIECES + lane % 2 * (PIECES / 2), sizeof(uint16_t));
    }
  };
  const auto refill = [&]() {
    while (copy_left == 0) {
      if (copy_shared < own_shared) {
        point(block + copy_shared * blocks, 0, true);
        const bool more = (copy_turn + 1) * S::TURN < rows;
        copy_turn = more ? copy_turn + 1 : 0, copy_shared += more ? 0 : GROUPS;
      } else if (copy_item < copy_end) {
        const int slot = routes.slot[copy_item / tiles];
        point(stream::item_at(copy_item, tiles, routes.turn[slot], routes.turn[slot + 1]).tile, slot, false);
        ++copy_item;
      } else {
        break;
      }
    }
  };
  // Asks for the next step; beyond the end of a row that is no whole steps come zeros.
  const auto copy = [&]() {
    const bool last = copy_left == 1;
    const uint32_t there = last && lane % PIECES >= copy_pieces ? 0 : 16;
    const uint8_t* const below = weights + eight_rows;
    copy16(copy_slot + weights_to, weights, there);
    if constexpr (UNITS == 2) copy16(copy_slot + weights_to4, weights + four_rows, there);
    copy16(copy_slot + weights_to + 512, below, there);
    if constexpr (UNITS == 2) copy16(copy_slot + weights_to4 + 512, below + four_rows, there);
    constexpr int MINE = PIECES / 2;  // scales of a lane
    const int scaled = copy_bf16 ? 0 : last ? copy_pieces - lane % 2 * MINE : MINE;  // that there are
    if (whole) {
      copy_scales<2 * MINE>(copy_slot + scales_to, scales, scaled > 0 ? 2 * MINE : 0);
    } else {  // they stand at any even address
      const uint16_t* const from = reinterpret_cast<const uint16_t*>(scales);
#pragma unroll
      for (int j = 0; j < MINE; j += 2) {
        uint32_t two = 0;
        if (scaled > j) two = __ldg(from + j);
        if (scaled > j + 1) two |= static_cast<uint32_t>(__ldg(from + j + 1)) << 16;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(copy_slot + scales_to + j * 2), "r"(two) : "memory");
      }
    }
    weights += 64 * UNITS, scales += 8 * UNITS, --copy_left;
  };
  const auto next_slot = [&](uint32_t slot) { return slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : slot + S::SLOT; };
  const auto fill = [&]() {
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) {
      refill();
      if (copy_left > 0) copy();
      copy_commit();
      copy_slot = next_slot(copy_slot);
    }
  };
  // Into the first of the group's shared items alone: how often that one is multiplied depends on the rows.
  const bool early = group < own_shared && (unit_at(s0 + SEGMENTS, p.shared_k, true) - unit_at(s0, p.shared_k, true)) / UNITS >= DEPTH - 1;
  if (SPLIT > 1 && threadIdx.x < GROUPS * SLOTS) {
    barrier_init(shared_address(full + threadIdx.x), SPLIT);
    barrier_init(shared_address(empty + threadIdx.x), 1);
  }
  if (early) fill();

  int item = 0;
  const auto share_out = [&]() {
    find_routes<S::TURN, S::WARPS * kWarp>(routes, p.ids + m0 * p.top_k, rows, p.top_k);
    const stream::Items all = stream::moe_items(blocks, shared_tiles, (rows + S::TURN - 1) / S::TURN, p.shared_k, routes.turn[routes.found] * tiles, p.k, p.bf16);
    item = stream::first_item(all, block, GROUPS, group), copy_end = stream::first_item(all, block, GROUPS, group + 1);
    copy_item = item;
    if (early) {
      copy_turn = S::TURN < rows ? 1 : 0, copy_shared = group + (S::TURN < rows ? 0 : GROUPS);
    } else {
      fill();
    }
  };
  // Before the wait one may read what is older than the launch before this one, which has itself waited: x and the count of rows, and
  // the ids too, unless that launch is the router, which may also have normed the rows.
  rows = min(active_rows(p.n_rows, p.max_rows) - m0, S::ROWS);
  if (rows <= 0) {
    wait_for_previous();
    copy_wait<0>();
    if constexpr (DOWN) combine(p.combine);
    return;
  }
  if constexpr (DOWN) share_out();
  if constexpr (STAGED) {
    const float* const x = p.x + static_cast<size_t>(m0) * p.k;
    square_rows<kSegments>(squares, x, p.k, rows, p.k, kUnitK<INT4>, 0);
    inverse_rows<1, kSegments>(inverse, squares, rows, p.k, p.eps);
    stage_normed_rows(staged, p.stride, x, p.k, rows, rows, p.k, 0, stream::padded(p.k), p.norm_w, inverse);
  }
  wait_for_previous();
  if constexpr (!DOWN) share_out();

  // An output's sum over K for two columns: of weight row lane/4 in v[0] and v[1], of the one eight below in v[2] and v[3].
  const auto emit = [&](int tile, int first, int columns, bool of_shared, const float (&v)[4]) {
    const int n = of_shared ? p.shared_n : p.n, out = tile * OUTPUTS + lane / 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = lane % 4 * 2 + j;
      if (c >= columns) break;
      const int place = of_shared ? first + c : routes.place[first + c];
      if constexpr (DOWN) {
        const int m = m0 + (of_shared ? place : place / p.top_k), choice = of_shared ? p.top_k : place % p.top_k;
        float* const to = p.products + (static_cast<size_t>(m) * (p.top_k + 1) + choice) * p.n + out;
        if (out < n) to[0] = v[j];
        if (out + 8 < n) to[8] = v[2 + j];
      } else if (out < n) {
        const uint16_t y = round_bf16(__fmul_rn(silu(v[j]), v[2 + j]));
        const size_t row = static_cast<size_t>(m0) * (of_shared ? 1 : p.top_k) + place;
        (of_shared ? p.shared_act : p.act)[row * n + out] = y;
        if (!of_shared && p.ordered != nullptr) p.ordered[row * n + ordered_place(out)] = y;
      }
    }
  };
  // Where a lane's four sums of a segment stand: those of the live columns alone.
  const auto sum_at = [&](int at, int segment) {
    return reinterpret_cast<float4*>(sums) + ((at * kSegments + segment) * p.pairs + lane % 4) * 8 + lane / 4;
  };
  // Adds up the group's tile number i: the segments in ascending order.
  const auto reduce = [&](int i) {
    const int at = group * SLOTS + i % SLOTS;
    barrier_wait(shared_address(full + at), i / SLOTS);
    const int4 of = summed[at];
    float4 part_of[kSegments] = {};
    if (lane % 4 < p.pairs) {
#pragma unroll
      for (int s = 0; s < kSegments; ++s) part_of[s] = *sum_at(at, s);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(empty + at));
    float v[4] = {part_of[0].x, part_of[0].y, part_of[0].z, part_of[0].w};
#pragma unroll
    for (int s = 1; s < kSegments; ++s) {
      v[0] = __fadd_rn(v[0], part_of[s].x), v[1] = __fadd_rn(v[1], part_of[s].y);
      v[2] = __fadd_rn(v[2], part_of[s].z), v[3] = __fadd_rn(v[3], part_of[s].w);
    }
    emit(of.x, of.y, of.z, of.w != 0, v);
  };

  LaneOffsets at(lane);
  at.matrix = kept(at.matrix), at.scale = kept(at.scale);
  uint32_t slot = ring;
  int sequence = 0;  // of the group's items
  const auto run = [&](auto kind, auto count_of_tiles, int tile, int first, int columns, bool of_shared) {
    constexpr WeightKind KIND = decltype(kind)::value;
    constexpr int N = decltype(count_of_tiles)::value, UNIT = kUnitK<KIND>;
    const int k = of_shared ? p.shared_k : p.k, begin = unit_at(s0, k, KIND == BF16);
    // Where a lane's activations of each eight columns are: a byte in shared memory, or an element of the rows.
    uint32_t b_at[N];
    constexpr bool NATURAL = DOWN && KIND == BF16;  // act as it is
    const uint16_t* const base = NATURAL ? (of_shared ? p.shared_act : p.act) : p.rows;
    const uint32_t base_row = static_cast<uint32_t>(m0) * (DOWN && !of_shared ? p.top_k : 1);  // a step's rows are fewer than 2^32 elements
    const int stride = NATURAL ? k : p.row_stride;
    [[maybe_unused]] const uint16_t* const b_base = base + base_row * stride;
#pragma unroll
    for (int nt = 0; nt < N; ++nt) {
      const int c = first + min(nt * kColumns + lane / 4, columns - 1), place = of_shared ? c : routes.place[c];
      const int row = DOWN || of_shared ? place : place / p.top_k;
      b_at[nt] = STAGED ? shared_address(staged) + row * p.stride + begin * (UNIT * 2) + lane % 4 * 16
                        : static_cast<uint32_t>(row) * stride + begin * UNIT + lane % 4 * 8;
    }
    [[maybe_unused]] int from = begin * UNIT + lane % 4 * 8;  // of a row that may end within a unit
    float acc[1][N][4];
    [[maybe_unused]] float total[4] = {-0.f, -0.f, -0.f, -0.f};  // -0 + s is s in every bit
    [[maybe_unused]] float4* const totals = reinterpret_cast<float4*>(sums) + warp * (NT * kWarp) + lane;
    if constexpr (N > 1) {
#pragma unroll
      for (int nt = 0; nt < N; ++nt) totals[nt * kWarp] = make_float4(-0.f, -0.f, -0.f, -0.f);
    }
    const auto clear = [&]() {
#pragma unroll
      for (int nt = 0; nt < N; ++nt) acc[0][nt][0] = acc[0][nt][1] = acc[0][nt][2] = acc[0][nt][3] = 0.f;
    };
    clear();
    int unit = begin, segment = s0, segment_end = unit_at(s0 + 1, k, KIND == BF16);
    const int end = unit_at(s0 + SEGMENTS, k, KIND == BF16);
    [[maybe_unused]] const int to = group * SLOTS + sequence % SLOTS;
    const auto end_segments = [&]() {
#pragma unroll 1
      while (unit == segment_end && segment < s0 + SEGMENTS) {
        if constexpr (SPLIT > 1) {
          if (segment == s0 && sequence >= SLOTS) barrier_wait(shared_address(empty + to), sequence / SLOTS - 1);
          if (lane % 4 < p.pairs) *sum_at(to, segment) = make_float4(acc[0][0][0], acc[0][0][1], acc[0][0][2], acc[0][0][3]);
        } else {
#pragma unroll
          for (int nt = 0; nt < N; ++nt) {
            const float(&v)[4] = acc[0][nt];
            if constexpr (N == 1) {
#pragma unroll
              for (int i = 0; i < 4; ++i) total[i] = __fadd_rn(total[i], v[i]);
            } else {
              float4& t = totals[nt * kWarp];
              t = make_float4(__fadd_rn(t.x, v[0]), __fadd_rn(t.y, v[1]), __fadd_rn(t.z, v[2]), __fadd_rn(t.w, v[3]));
            }
          }
        }
        clear();
        ++segment;
        segment_end = unit_at(segment + 1, k, KIND == BF16);
      }
    };
    end_segments();
#pragma unroll 1
    while (unit < end) {
      if (copy_left == 0) refill();
      copy_wait<DEPTH - 2>();
      __syncwarp();
      if (copy_left > 0) copy();
      copy_commit();
      const int step_end = min((unit / UNITS + 1) * UNITS, end);
#pragma unroll 1
      do {
        const uint32_t half = slot + unit % UNITS * kRingBytes;
        ++unit;
        const auto activations = [&](int nt, int group_of_32) {
          if constexpr (STAGED) {
            return load_shared16(b_at[nt] + group_of_32 * 64);
          } else if constexpr (NATURAL) {
            return in_order(from < k ? *reinterpret_cast<const uint4*>(b_base + b_at[nt]) : make_uint4(0, 0, 0, 0));
          } else {
            return *reinterpret_cast<const uint4*>(b_base + b_at[nt] + group_of_32 * 32);
          }
        };
        multiply_unit<KIND, 1, N, N == 1 ? 4 : 2>(acc, half, at, activations);
#pragma unroll
        for (int nt = 0; nt < N; ++nt) b_at[nt] += STAGED ? UNIT * 2 : UNIT;
        if constexpr (NATURAL) from += UNIT;
        if (unit == segment_end) end_segments();
      } while (UNITS > 1 && unit < step_end);
      copy_slot = slot;
      slot = next_slot(slot);
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
      __syncwarp();
      if (lane == 0) barrier_arrive(shared_address(full + to));
      // Each tile is added up by one warp of the group, in turn, one tile later: by then the others have mostly come so far.
      if (sequence > 0 && (sequence - 1) % SPLIT == part) reduce(sequence - 1);
      ++sequence;
    }
  };

  for (int next_shared = group, turn = 0; next_shared < own_shared || item < copy_end;) {
    const bool of_shared = next_shared < own_shared;
    int tile = block + next_shared * blocks, first = 0, columns = rows;
    if (!of_shared) {
      const int expert = routes.slot[item / tiles];
      const stream::ItemPlace place = stream::item_at(item, tiles, routes.turn[expert], routes.turn[expert + 1]);
      tile = place.tile, turn = place.turn, first = routes.start[expert], columns = routes.start[expert + 1] - first;
      ++item;
    }
    first += turn * S::TURN, columns -= turn * S::TURN;
    const bool more = columns > S::TURN;
    if (more) columns = S::TURN;
    if (of_shared) turn = more ? turn + 1 : 0, next_shared += more ? 0 : GROUPS;
    const auto pick = [&](auto kind) {
      const std::integral_constant<int, 1> one{};
      const std::integral_constant<int, NT> every{};
      if (NT == 1 || columns <= kColumns) run(kind, one, tile, first, columns, of_shared);
      else run(kind, every, tile, first, columns, of_shared);
    };
    if (of_shared || p.bf16) pick(std::integral_constant<WeightKind, BF16>{});
    else pick(std::integral_constant<WeightKind, INT4>{});
  }
  if constexpr (SPLIT > 1) {
    if (sequence > 0 && (sequence - 1) % SPLIT == part) reduce(sequence - 1);
  }
  copy_wait<0>();
  if constexpr (DOWN) combine(p.combine);
}

using StreamMoeKernel = void (*)(StreamMoeParams);

template <bool DOWN, const auto& TABLE, size_t... I>
StreamMoeKernel moe_kernel_at(int index, std::index_sequence<I...>) {
  constexpr StreamMoeKernel kernels[] = {
      &stream_moe_kernel<StreamMoeShape<DOWN, TABLE[I].staged, TABLE[I].split, TABLE[I].nt, TABLE[I].warps, TABLE[I].units, TABLE[I].depth, TABLE[I].resident>>...};
  return kernels[index];
}
template <bool DOWN, const auto& TABLE>
StreamMoeKernel moe_kernel(int index) {
  return moe_kernel_at<DOWN, TABLE>(index, std::make_index_sequence<std::size(TABLE)>());
}

inline bool aligned(const void* p, uintptr_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace cuda
}  // namespace kdtree
