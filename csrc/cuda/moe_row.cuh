// The experts of one row on Hopper: moe_boxes.cuh's products, in every bit, shared out among warps in parts of K.
//
// Bytes: the chosen experts' weights and the shared one's, once. Bound by them, if all warps have the same to do: a block has 9 tiles (of 16 weight
// rows, as in moe_items.cuh) of gate and up and 15 of down, too few to be dealt whole to eight warps. What a warp's ring takes is a fourth of a
// tile's K, of down a half, of the shared expert's, whose weights are bf16, an eighth or a fourth, whichever ring is free first. So every ring asks for the
// shared expert from the start, while the router still is at work. A thread that asks for a copy waits while the engine has no room, for hundreds of
// cycles: so two boxes come in one copy, and two warps ask, each for half of the rings; and a slot is free once its words stand in registers. The
// segments' sums have a place for every tile of the block; the warp that ends a tile's last part adds them, in ascending order.
// One row: its choices are distinct experts, so that a place among the others' tiles says the choice and the tile, and the row, or the few acts that a
// block's tiles meet, stand in shared memory in the multiplication's order.
#pragma once
#include "../row_plan.h"
#include "box_copy.cuh"
#include "moe_box_params.cuh"
#include "nibbles.cuh"
#include "row_choice.cuh"
#include "row_norm.cuh"

namespace kdtree {
namespace cuda {

template <bool DOWN_, int WARPS_, int COPIERS_, int DEPTH_, int EARLY_, int PARTS_ = stream::row_parts(DOWN_), int SHARED_PARTS_ = stream::row_shared_parts(DOWN_)>
struct RowMoeShape {
  static constexpr bool DOWN = DOWN_;
  static constexpr int WARPS = WARPS_, COPIERS = COPIERS_, DEPTH = DEPTH_, EARLY = EARLY_, PARTS = PARTS_, SHARED_PARTS = SHARED_PARTS_;
  static constexpr int OUTPUTS = stream::moe_outputs(DOWN), THREADS = stream::row_threads({WARPS, COPIERS, DEPTH, EARLY}), WIDE = stream::kRowWide;
  static constexpr int SLOT = WIDE * stream::kBoxBytes, LINE = WIDE * 16, PIECE = kTileRows * LINE;  // LINE: a row's scales of a slot
  static constexpr int RING = static_cast<int>(stream::box_ring(WARPS, WIDE, DEPTH, 1));
  static_assert(WARPS <= kWarp && EARLY <= DEPTH && DEPTH + 2 <= kBoxItems, "a lane a ring; each slot may be another part's");
  static_assert(DOWN || WARPS >= kSegments, "of gate and up a warp norms a segment");
};

struct RowMoeParams {
  BoxMoeParams boxes;
  CUtensorMap pairs, shared_pairs;  // of weights and shared, two boxes at a time
  int places;  // tiles that a block has places for
  Tickets* tickets;  // down's, where gate and up count the shared expert's tiles and the choice, so that down need not wait for their end; or null
  int before;        // down: how many
  bool chooses;      // gate and up: every block for itself, the first one for all who come later
  RowChoice choice;
  bool apart = false;  // down: behind an exchange, which lets it in while gate and up, who may have chosen, still run
};

// What a warp multiplies next: segments of a tile from `segment` on. choice: whose, top_k of the shared expert, and -1 once all is done.
struct RowPart {
  int tile, segment, choice, place;  // place: among the block's tiles
};

// Two boxes that follow each other in a row, from `box` on.
__device__ __forceinline__ void copy_pair(uint32_t to, const CUtensorMap* map, int box, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, %5}], [%2];" ::"r"(to), "l"(map),
               "r"(barrier), "r"(0), "r"(row), "r"(box)
               : "memory");
}

template <typename S>
__global__ __launch_bounds__(S::THREADS, 2) void row_moe_kernel(const __grid_constant__ RowMoeParams all) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  __trap();  // row_plan.h chooses it on Hopper alone
#else
  constexpr bool DOWN = S::DOWN;
  constexpr int WARPS = S::WARPS, COPIERS = S::COPIERS, DEPTH = S::DEPTH, WIDE = S::WIDE, OUTPUTS = S::OUTPUTS, PARTS = S::PARTS, SHARED_PARTS = S::SHARED_PARTS;
  constexpr WeightKind INT4 = WeightKind::kInt4, BF16 = WeightKind::kBf16;
  const BoxMoeParams& q = all.boxes;
  const StreamMoeParams& p = q.p;
  extern __shared__ __align__(128) uint8_t dynamic[];
  __shared__ float squares[kSegments];
  __shared__ uint64_t landed[2][WARPS * DEPTH], routed, ready, acts, summed, full[stream::kRowTiles];  // landed: a ring's slots: what was asked for is there; and, second, it was used
  __shared__ RowPart parts[WARPS][kBoxItems];
  __shared__ int next_part, ended[stream::kRowTiles], expert[kMostTopK];
  uint8_t* const rings = dynamic + (stream::kBoxAlign - shared_address(dynamic) % stream::kBoxAlign) % stream::kBoxAlign;
  float2* const sums = reinterpret_cast<float2*>(rings + S::RING);  // [tile][segment][8]: of weight rows i and i + 8
  uint8_t* const staged = rings + S::RING + all.places * stream::kRowTileSums;

  const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
  const int block = blockIdx.x, blocks = gridDim.x, stride = stream::staged_stride(max(p.k, p.shared_k));
  const int tiles = (p.n + OUTPUTS - 1) / OUTPUTS, shared_tiles = (p.shared_n + OUTPUTS - 1) / OUTPUTS, count = p.top_k * tiles;
  const int own_shared = stream::shared_items(shared_tiles, blocks, block);
  const int first = stream::first_row_tile(count, blocks, block), end = stream::first_row_tile(count, blocks, block + 1);
  const bool copying = warp >= WARPS;
  const int ring_of = copying ? warp - WARPS + lane * COPIERS : warp, mine = min(ring_of, WARPS - 1);  // a ring
  const uint32_t ring = shared_address(rings) + mine * (DEPTH * S::SLOT);
  const uint32_t pieces = shared_address(rings) + WARPS * DEPTH * S::SLOT + mine * (DEPTH * S::PIECE);
  const uint32_t landed_at = shared_address(landed[0] + mine * DEPTH);
  constexpr uint32_t FREED = WARPS * DEPTH * 8;  // from a slot's first barrier to its second
  const auto unit_at = [](int segment, int k, bool bf16) { return segment_begin(segment, bf16 ? k / kUnitK<BF16> : k / kUnitK<INT4>); };
  KD_ASSERT(own_shared + end - first <= all.places && end - first <= tiles, "moe: more tiles than a block has places for");

  // A lane of each warp some of them: those of one warp would take turns.
  if (lane == 0) {
    for (int i = warp; i < 2 * WARPS * DEPTH; i += WARPS + COPIERS) barrier_init(shared_address(landed[0] + i), 1);
    for (int i = warp; i < own_shared + end - first; i += WARPS + COPIERS) {
      barrier_init(shared_address(full + i), (i < own_shared ? SHARED_PARTS : PARTS) * kWarp);  // every lane arrives
      ended[i] = 0;
    }
    if (warp == 0) barrier_init(shared_address(&routed), kWarp), barrier_init(shared_address(&summed), 1), next_part = 0;
    if (warp == WARPS) barrier_init(shared_address(&ready), (DOWN ? WARPS - 1 : kSegments) * kWarp), barrier_init(shared_address(&acts), kWarp);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine is to see the barriers
  __syncthreads();

  if (copying) {
    int left = 0, box = 0, first_row = 0;  // boxes of the part that are still to come, the next one, the tile's first row
    bool of_shared = false, done = ring_of >= WARPS;
    int to_slot = 0, round = 0, index = -1, begun = 0;  // index: the part taken and not yet begun
    // Takes the next part. False: there is none, as far as is known.
    const auto take_part = [&]() {
      // The last of the others waits for the launch before ere it multiplies: what it had, others would wait for. And of gate and up two rings are where it chooses.
      if (ring_of >= WARPS - (DOWN ? 1 : 2) && !barrier_passed(shared_address(DOWN ? &acts : &routed), 0)) return false;
      if (index < 0) index = atomicAdd(&next_part, 1);
      RowPart part{};
      of_shared = index < own_shared * SHARED_PARTS;
      if (of_shared) {
        part.place = index / SHARED_PARTS, part.segment = index % SHARED_PARTS * (kSegments / SHARED_PARTS);
        part.tile = block + part.place * blocks, part.choice = p.top_k;
        first_row = part.tile * OUTPUTS;
      } else {
        if (!barrier_passed(shared_address(&routed), 0)) return false;
        const int other = index - own_shared * SHARED_PARTS, at = first + other / PARTS;
        if (at < end) {
          part.place = own_shared + other / PARTS, part.segment = other % PARTS * (kSegments / PARTS);
          part.choice = at / tiles, part.tile = at - part.choice * tiles;
          first_row = expert[part.choice] * p.step + part.tile * OUTPUTS;
        } else {
          part.choice = -1, done = true;
        }
      }
      parts[mine][begun++ % kBoxItems] = part;
      const bool bf16 = of_shared || p.bf16;
      const int k = of_shared ? p.shared_k : p.k;
      index = -1;
      box = unit_at(part.segment, k, bf16) / 2, left = done ? 0 : unit_at(part.segment + kSegments / (of_shared ? SHARED_PARTS : PARTS), k, bf16) / 2 - box;
      return true;
    };
    // Asks for what the ring's next slot is to hold, where it is free; the end of all parts is a slot of nothing.
    const auto copy_slot = [&]() {
      if (done || !barrier_passed(landed_at + FREED + to_slot * 8, (round ^ 1) & 1) || (left == 0 && !take_part())) return false;
      const int boxes = min(WIDE, left);
      const bool scaled = boxes > 0 && !of_shared && !p.bf16;
      const uint32_t to = ring + to_slot * S::SLOT, barrier = landed_at + to_slot * 8;
      barrier_expect(barrier, boxes * stream::kBoxBytes + (scaled ? S::PIECE : 0));
      if (boxes == WIDE) copy_pair(to, of_shared ? &all.shared_pairs : &all.pairs, box, first_row, barrier);
      else if (boxes > 0) copy_box(to, of_shared ? &q.shared : &q.weights, box * 128, first_row, barrier);
      if (scaled) copy_box(pieces + to_slot * S::PIECE, &q.scales, box * 16, first_row, barrier);
      box += WIDE, left -= boxes;
      if (++to_slot == DEPTH) to_slot = 0, round ^= 1;
      return true;
    };
    // Weights alone, so that they wait for nobody; the shared expert's.
#pragma unroll 1
    for (int i = 0; i < S::EARLY; ++i) copy_slot();
    __syncwarp();
    if (S::EARLY < DEPTH) barrier_wait(shared_address(&ready), 0);
    while (!__all_sync(kAll, done)) {
      if (!__any_sync(kAll, copy_slot())) __nanosleep(kPause);
    }
  } else {
    // What is older than the launch before this one, which has itself waited, may be read before the wait: x and the count of rows, where the
    // launch before is the router's, and by down the ids.
    const int counted = load_early(p.n_rows);
    const auto tell_chosen = [&]() {
      if (warp != WARPS - 1) return;
      if (!DOWN && all.chooses) {
        const RowChooser choose(all.choice.router);
        wait_for_previous();
        const bool writes = block == 0 && counted > 0;
        const int id = choose(all.choice, reinterpret_cast<float*>(rings + (WARPS - 2) * (DEPTH * S::SLOT)), &summed, writes);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine fills these rings next
        if (lane < p.top_k) expert[lane] = id;
        if (block == 0) {
          __syncwarp();
          if (lane == 0 && all.tickets != nullptr) ticket_add(&all.tickets->ahead, 1);
        }
      } else {
        if (!DOWN || all.apart) wait_for_previous();
        else if (all.tickets != nullptr) ticket_wait(&all.tickets->ahead, all.before);
        if (lane < p.top_k) expert[lane] = counted > 0 ? p.ids[lane] : 0;
      }
      KD_ASSERT(lane >= p.top_k || (expert[lane] >= 0 && expert[lane] < stream::kMostExperts), "moe: an expert id out of range");
      barrier_arrive(shared_address(&routed));
    };
    if constexpr (DOWN) {
      const auto stage = [&](int row, const uint16_t* act, int length, bool natural, int thread, int threads) {
        constexpr int AHEAD = 8;  // loads on their way
        for (int at = thread; at < length / 8; at += AHEAD * threads) {
          uint4 v[AHEAD];
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) {
            if (at + i * threads < length / 8) v[i] = __ldcg(reinterpret_cast<const uint4*>(act) + at + i * threads);
          }
#pragma unroll
          for (int i = 0; i < AHEAD; ++i) {
            if (at + i * threads < length / 8) *reinterpret_cast<uint4*>(staged + row * stride + (at + i * threads) * 16) = natural ? in_order(v[i]) : v[i];
          }
        }
      };
      tell_chosen();
      if (warp < WARPS - 1) {
        if (all.tickets == nullptr) wait_for_previous();
        else if (lane == 0) ticket_wait(&all.tickets->ahead, all.before);
        __syncwarp();
        if (p.shared_n > 0) stage(0, p.shared_act, p.shared_k, true, threadIdx.x, (WARPS - 1) * kWarp);
        barrier_arrive(shared_address(&ready));
      } else {
        wait_for_previous();
        const int from = first / tiles, rows = end > first ? (end - 1) / tiles - from + 1 : 0;
        for (int row = 0; row < rows; ++row) {
          const uint16_t* const act = p.bf16 ? p.act + static_cast<size_t>(from + row) * p.k : p.rows + static_cast<size_t>(from + row) * p.row_stride;
          stage(1 + row, act, p.k, p.bf16, lane, kWarp);
        }
        barrier_arrive(shared_address(&acts));
      }
    } else {
      if (warp < kSegments) {
        const RowNorm<stream::kRowNormed> norm(p.norm_w, p.k);
        if (!q.early) wait_for_previous();
        norm(p.x, p.eps, squares, [&](int e, uint2 four) { *reinterpret_cast<uint2*>(staged + e * 2) = four; });
        barrier_arrive(shared_address(&ready));
      }
      tell_chosen();
    }
    barrier_wait(shared_address(&ready), 0);
    const bool live = counted > 0;

    const uint32_t matrix = kept((lane & 15) * 128 + ((lane >> 4) ^ (lane & 7)) * 16);  // int4: a lane's row address of ldmatrix; of groups 2i and 2i + 1 at ^ 32i
    const uint32_t line = kept((lane >> 2) * 128 + ((lane & 3) ^ (lane >> 2)) * 16);  // bf16: 16 bytes of row lane/4's first unit; the second's at ^ 64
    const uint32_t scales_of = kept(pieces + ((lane >> 2) + (q.scales_differ ? 8 : 0)) * S::LINE);
    int slot = 0, phase = 0;
    // `seen`: of all words that the lane has read of the slot. A barrier does not wait for loads that are still under way, a branch on what they brought does;
    // all lanes have them then. The number is as good as any.
    const auto free_slot = [&](uint32_t seen) {
      if (__any_sync(kAll, seen == 0x9e3779b9u)) __nanosleep(kPause);
      if (elected()) barrier_arrive(landed_at + FREED + slot * 8);
    };
    const auto run = [&](auto kind, const RowPart& part, bool of_shared) {
      constexpr WeightKind KIND = decltype(kind)::value;
      constexpr int BOX = 2 * kUnitK<KIND> * 2, PIECES = BOX / 64;  // bytes of activations that meet a box; what a lane has 16 of
      const int k = of_shared ? p.shared_k : p.k, of_tile = of_shared ? SHARED_PARTS : PARTS;
      int unit = unit_at(part.segment, k, KIND == BF16), segment = part.segment, segment_end = unit_at(segment + 1, k, KIND == BF16);
      const int last = unit_at(part.segment + kSegments / of_tile, k, KIND == BF16);
      const int row = DOWN && !of_shared ? 1 + part.choice - first / tiles : 0;
      uint32_t b_at = shared_address(staged) + row * stride + unit * (kUnitK<KIND> * 2) + lane % 4 * 16;
      float2* const to = sums + part.place * (kSegments * 8) + lane / 4;
      float low_sum = 0.f, high_sum = 0.f;
      const auto end_unit = [&]() {
        if (++unit != segment_end) return;
        if (lane % 4 == 0) to[segment * 8] = make_float2(low_sum, high_sum);
        low_sum = high_sum = 0.f;
        ++segment;
        segment_end = unit_at(segment + 1, k, KIND == BF16);
      };
      const auto multiply_box = [&](uint32_t at, [[maybe_unused]] uint32_t scales, bool of_slot_last) {
        if constexpr (KIND == INT4) {
          const BoxInt4 box(at, matrix, scales, scales ^ (8 * S::LINE));
          if (of_slot_last) free_slot(box.words[0][0] ^ box.words[1][0] ^ box.words[2][0] ^ box.words[3][0] ^ box.low[0] ^ box.high[0]);
          const float zero[4] = {};
#pragma unroll
          for (int g = 0; g < PIECES; ++g) {
            uint32_t a[4], b[4];
            box.fragments(g, a, b);
            const float scale = box.scale(g), below = box.below(g);
            const uint4 x = load_shared16(b_at + g * 64);
            float sum[4];
            multiply_add(sum, a, x.x, x.y, zero);
            multiply_add(sum, b, x.z, x.w, sum);
            low_sum = __fmaf_rn(sum[0], scale, low_sum), high_sum = __fmaf_rn(sum[2], below, high_sum);
            if (g % 4 == 3) end_unit();
          }
        } else {
          uint4 w[2][2];
#pragma unroll
          for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int r = 0; r < 2; ++r) w[u][r] = load_shared16(at + r * 1024 + (line ^ (u * 64)));
          if (of_slot_last) free_slot(w[0][0].x ^ w[0][1].x ^ w[1][0].x ^ w[1][1].x);
#pragma unroll
          for (int u = 0; u < 2; ++u) {
            // Elements 8t..8t+7 of the rows, brought into the activations' order.
            const uint4 low = in_order(w[u][0]), high = in_order(w[u][1]);
            const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
            const uint4 x = load_shared16(b_at + u * 64);
            float sum[4] = {low_sum, 0.f, high_sum, 0.f};
            multiply_add(sum, a, x.x, x.y, sum);
            multiply_add(sum, b, x.z, x.w, sum);
            low_sum = sum[0], high_sum = sum[2];
            end_unit();
          }
        }
        b_at += BOX;
      };
#pragma unroll 1
      while (unit < last) {
        barrier_wait(landed_at + slot * 8, phase & 1);
        const uint32_t at = ring + slot * S::SLOT, scales = scales_of + slot * S::PIECE;
        const int boxes = min(WIDE, (last - unit) / 2);
#pragma unroll 1
        for (int j = 0; j < boxes; ++j) multiply_box(at + j * stream::kBoxBytes, scales + j * 16, j == boxes - 1);
        if (++slot == DEPTH) slot = 0, phase ^= 1;
      }
      // The warp that ends a tile's last part adds it up.
      const uint32_t arrived = shared_address(full + part.place);
      barrier_arrive(arrived);
      int before = 0;
      if (lane == 0) before = atomicAdd(ended + part.place, 1);
      if (__shfl_sync(kAll, before, 0) != of_tile - 1) return;
      barrier_wait(arrived, 0);
      float2 v = to[0];
#pragma unroll
      for (int s = 1; s < kSegments; ++s) v.x = __fadd_rn(v.x, to[s * 8].x), v.y = __fadd_rn(v.y, to[s * 8].y);
      if (KIND == INT4) v.x = __fmul_rn(v.x, 4.f), v.y = __fmul_rn(v.y, 4.f);
      const bool swap = !DOWN && (of_shared ? q.shared_up_first : q.up_first);
      if (lane % 4 == 0 && live) emit_column<DOWN>(p, 0, of_shared, of_shared ? 0 : part.choice, part.tile * OUTPUTS + lane / 4, swap ? v.y : v.x, swap ? v.x : v.y);
      if (!DOWN && of_shared && all.tickets != nullptr) {
        __syncwarp();
        if (lane == 0) ticket_add(&all.tickets->ahead, 1);
      }
    };

    for (int taken = 0;; ++taken) {
      barrier_wait(landed_at + slot * 8, phase & 1);  // with its first slot a part is known
      const RowPart part = parts[warp][taken % kBoxItems];
      if (part.choice < 0) break;
      const bool of_shared = part.choice == p.top_k;
      if (DOWN && !of_shared) barrier_wait(shared_address(&acts), 0);
      if (of_shared || p.bf16) run(std::integral_constant<WeightKind, BF16>{}, part, of_shared);
      else run(std::integral_constant<WeightKind, INT4>{}, part, of_shared);
    }
  }
  if constexpr (DOWN) combine_row(p.combine);
#endif
}

}  // namespace cuda
}  // namespace kdtree
