// Who goes to which expert in a step, found by every block for itself in shared memory.
//
// Guarantees: experts ascend, and the rows of one expert ascend; so the lists are the same in every block.
// A row chooses an expert once, so who goes to one is a bit a row, and a place is the number of bits below: threads work side by side.
#pragma once
#include "device.cuh"
#include "../stream_plan.h"

namespace kdtree {
namespace cuda {

using stream::kMostExperts;
using stream::kMostTopK;

// Who goes to which expert. An expert's rows are multiplied in turns of at most so many at a time.
template <int PLACES>
struct Routes {
  static constexpr int ROWS = PLACES / kMostTopK;
  static_assert(ROWS == 8 || ROWS == 64, "an expert's rows are a byte or two words");

  int found;                   // distinct experts, ascending:
  uint16_t expert[PLACES];     // [slot]
  uint16_t start[PLACES + 1];  // [slot]: its part of `place`
  union {
    uint16_t place[PLACES];  // row * top_k + choice, rows ascending; before that:
    int2 total[kWarp];       // [warp]: distinct experts; places and, above 16 bits, turns
  };
  union {
    uint32_t chosen[kMostExperts * ROWS / 32];  // [expert]: a bit a row; until the turns are known:
    struct {
      uint16_t turn[PLACES + 1];  // [slot]: turns of the slots before
      uint16_t slot[PLACES];      // [turn]
    };
  };
  uint32_t set[kMostExperts / 32];    // distinct experts,
  uint16_t below[kMostExperts / 32];  // and how many are in the words before

  // Rows of an expert: all, or those below `row`.
  __device__ __forceinline__ int rows_of(int expert, int row = ROWS) const {
    const auto mask = [](int bits) { return bits >= 32 ? 0xffffffffu : bits <= 0 ? 0u : (1u << bits) - 1; };
    if constexpr (ROWS == 8) return __popc(chosen[expert / 4] >> (expert % 4 * 8) & mask(row));
    else return __popc(chosen[2 * expert] & mask(row)) + __popc(chosen[2 * expert + 1] & mask(row - 32));
  }
  __device__ __forceinline__ int slot_of(int expert) const {
    return below[expert / 32] + __popc(set[expert / 32] & ((1u << expert % 32) - 1));
  }
};

// The same lists, of no more choices than a warp has lanes and of no more rows than a turn takes, so that an expert has one turn: by one warp, with nothing
// but its registers between the ids and the lists. id: lane i's is that of choice i, of `count`. Ends with a barrier of the warp.
template <int PLACES>
__device__ __forceinline__ void find_few_routes(Routes<PLACES>& r, int id, int count) {
  const int lane = threadIdx.x % kWarp;
  if (lane >= count) id = INT32_MAX;
  unsigned lower = 0, same = 0;  // the choices whose id is
#pragma unroll
  for (int i = 0; i < kWarp; ++i) {
    const int other = __shfl_sync(kAll, id, i);
    if (other < id) lower |= 1u << i;
    if (other == id) same |= 1u << i;
  }
  const unsigned before = same & ((1u << lane) - 1), first = __ballot_sync(kAll, before == 0 && lane < count);
  if (lane < count) {
    const int slot = __popc(lower & first), start = __popc(lower);
    r.place[start + __popc(before)] = static_cast<uint16_t>(lane);
    if (before == 0) {
      r.expert[slot] = static_cast<uint16_t>(id), r.start[slot] = static_cast<uint16_t>(start);
      r.turn[slot] = r.slot[slot] = static_cast<uint16_t>(slot);
    }
  }
  if (lane == 0) {
    const int found = __popc(first);
    r.found = found, r.start[found] = static_cast<uint16_t>(count), r.turn[found] = static_cast<uint16_t>(found);
  }
  __syncwarp();
}

// Called by the whole block of THREADS or, kWarp of them, by one warp; the ids of the step's rows, row by row, all below `experts`; a turn takes
// MOST rows. Ends with a barrier of its callers.
template <int MOST, int THREADS, int PLACES>
__device__ __forceinline__ void find_routes(Routes<PLACES>& r, const int32_t* ids, int rows, int top_k, int experts) {
  constexpr int ROWS = Routes<PLACES>::ROWS, AHEAD = THREADS == kWarp ? 4 : 1;  // loads that a thread has on their way
  const int lane = threadIdx.x % kWarp, thread = THREADS == kWarp ? lane : static_cast<int>(threadIdx.x), warp = thread / kWarp, count = rows * top_k;
  const auto meet = [] {
    if constexpr (THREADS == kWarp) __syncwarp();
    else __syncthreads();
  };
#pragma unroll(AHEAD)
  for (int i = thread; i < (experts * ROWS + 31) / 32; i += THREADS) r.chosen[i] = 0;
  for (int i = thread; i < (experts + 31) / 32; i += THREADS) r.set[i] = 0;
  meet();
#pragma unroll(AHEAD)
  for (int i = thread; i < count; i += THREADS) {
    const int id = ids[i];
    KD_ASSERT(id >= 0 && id < experts, "moe: an expert id out of range");
    const int bit = id * ROWS + i / top_k;
    atomicOr(r.chosen + bit / 32, 1u << (bit % 32));
    atomicOr(r.set + id / 32, 1u << (id % 32));
  }
  meet();

  // A thread has some neighbouring experts, an odd number, for threads to read from different banks: how many are chosen, by how many rows, in how many turns; then the sums over those before.
  const int each = (experts + THREADS - 1) / THREADS | 1, begin = min(thread * each, experts), end = min(begin + each, experts);
  int own = 0, own_places = 0;
#pragma unroll(AHEAD)
  for (int e = begin; e < end; ++e) {
    const int n = r.rows_of(e);
    own += n > 0, own_places += n | (n + MOST - 1) / MOST << 16;
  }
  int slot = own, places = own_places;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int below = __shfl_up_sync(kAll, slot, d), below_places = __shfl_up_sync(kAll, places, d);
    if (lane >= d) slot += below, places += below_places;
  }
  if (lane == kWarp - 1) r.total[warp] = make_int2(slot, places);
  meet();
  const int2 total = lane < THREADS / kWarp ? r.total[lane] : make_int2(0, 0);
  slot += __reduce_add_sync(kAll, lane < warp ? total.x : 0) - own;
  places += __reduce_add_sync(kAll, lane < warp ? total.y : 0) - own_places;
  const int found = __reduce_add_sync(kAll, total.x), turns = __reduce_add_sync(kAll, total.y) >> 16;
#pragma unroll 1
  for (int e = begin, at = slot, start = places & 0xffff; e < end; ++e) {
    const int n = r.rows_of(e);
    if (e % 32 == 0) r.below[e / 32] = static_cast<uint16_t>(at);
    if (n == 0) continue;
    r.expert[at] = static_cast<uint16_t>(e), r.start[at++] = static_cast<uint16_t>(start);
    start += n;
  }
  if (thread == 0) r.found = found, r.start[found] = static_cast<uint16_t>(count);
  meet();
#pragma unroll(AHEAD)
  for (int i = thread; i < count; i += THREADS) {
    const int id = ids[i];
    r.place[r.start[r.slot_of(id)] + r.rows_of(id, i / top_k)] = static_cast<uint16_t>(i);
  }
  meet();
#pragma unroll 1
  for (int at = slot, turn = places >> 16; at < slot + own; ++at) {
    const int n = r.start[at + 1] - r.start[at];
    r.turn[at] = static_cast<uint16_t>(turn);
    for (int i = 0; i < n; i += MOST) r.slot[turn++] = static_cast<uint16_t>(at);
  }
  if (thread == 0) r.turn[found] = static_cast<uint16_t>(turns);
  meet();
}

}  // namespace cuda
}  // namespace kdtree
