// Who goes to which expert in a step, found by every block for itself in shared memory.
//
// Guarantees: experts ascend, and the rows of one expert ascend; so the lists are the same in every block.
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
  int found;                   // distinct experts, ascending:
  uint16_t expert[PLACES];     // [slot]
  uint16_t start[PLACES + 1];  // [slot]: its part of `place`
  uint16_t place[PLACES];      // row * top_k + choice, rows ascending
  uint16_t turn[PLACES + 1];   // [slot]: turns of the slots before
  uint16_t slot[PLACES];       // [turn]
  uint16_t id[PLACES];
  uint32_t set[kMostExperts / 32];
  int below[kMostExperts / 32];  // experts of the words before
};

// Called by the whole block or, ALONE, by one warp; `count` ids of the step's rows, row by row; a turn takes `most` rows. Ends with a
// barrier of its callers.
template <bool ALONE = false, int PLACES>
__device__ __forceinline__ void find_routes(Routes<PLACES>& r, const int32_t* ids, int count, int most) {
  const int lane = threadIdx.x % kWarp, thread = ALONE ? lane : static_cast<int>(threadIdx.x), threads = ALONE ? kWarp : static_cast<int>(blockDim.x);
  const auto meet = [] {
    if constexpr (ALONE) __syncwarp();
    else __syncthreads();
  };
  for (int i = thread; i < kMostExperts / 32; i += threads) r.set[i] = 0;
  meet();
  for (int i = thread; i < count; i += threads) {
    const int id = ids[i];
    KD_ASSERT(id >= 0 && id < kMostExperts, "moe: an expert id out of range");
    r.id[i] = static_cast<uint16_t>(id);
    atomicOr(r.set + id / 32, 1u << (id % 32));
  }
  meet();
  const auto upto = [&](int mine) {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int below = __shfl_up_sync(kAll, mine, d);
      if (lane >= d) mine += below;
    }
    return mine;
  };
  if (thread < kWarp) {
    uint32_t word = r.set[lane];
    const int all = upto(__popc(word)), found = __shfl_sync(kAll, all, kWarp - 1);
    r.below[lane] = all - __popc(word);
    for (int at = r.below[lane]; word != 0; word &= word - 1) {
      r.expert[at++] = static_cast<uint16_t>(lane * 32 + __ffs(static_cast<int>(word)) - 1);
    }
    for (int i = lane; i <= found; i += kWarp) r.start[i] = 0;
    __syncwarp();
    // First how many go to each slot, then, from where its part begins, their places in order.
    for (int pass = 0; pass < 2; ++pass) {
      for (int base = 0; base < count; base += kWarp) {
        const unsigned here = __ballot_sync(kAll, base + lane < count);
        if (base + lane < count) {
          const int id = r.id[base + lane], slot = r.below[id / 32] + __popc(r.set[id / 32] & ((1u << (id % 32)) - 1));
          const unsigned same = __match_any_sync(here, slot);
          const int before = __popc(same & ((1u << lane) - 1)), begin = r.start[slot];
          if (pass == 1) r.place[begin + before] = static_cast<uint16_t>(base + lane);
          __syncwarp(here);
          if (before == 0) r.start[slot] = static_cast<uint16_t>(begin + __popc(same));
        }
        __syncwarp();
      }
      if (pass == 1) break;
      int carry = 0;
      for (int base = 0; base < found; base += kWarp) {
        const int mine = base + lane < found ? r.start[base + lane] : 0, sum = carry + upto(mine);
        __syncwarp();
        if (base + lane < found) r.start[base + lane] = static_cast<uint16_t>(sum - mine);
        carry = __shfl_sync(kAll, sum, kWarp - 1);
      }
      __syncwarp();
    }
    // The second pass left every slot's end: shift them into beginnings.
    for (int base = (found - 1) / kWarp * kWarp; base >= 0; base -= kWarp) {
      const int end = base + lane < found ? r.start[base + lane] : 0;
      __syncwarp();
      if (base + lane < found) r.start[base + lane + 1] = static_cast<uint16_t>(end);
      __syncwarp();
    }
    if (lane == 0) r.start[0] = 0, r.found = found;
    __syncwarp();
    int turns = 0;
    for (int base = 0; base < found; base += kWarp) {
      const int slot = base + lane, mine = slot < found ? (r.start[slot + 1] - r.start[slot] + most - 1) / most : 0, sum = turns + upto(mine);
      if (slot < found) r.turn[slot] = static_cast<uint16_t>(sum - mine);
      for (int i = sum - mine; i < sum; ++i) r.slot[i] = static_cast<uint16_t>(slot);
      turns = __shfl_sync(kAll, sum, kWarp - 1);
    }
    if (lane == 0) r.turn[found] = static_cast<uint16_t>(turns);
  }
  meet();
}

}  // namespace cuda
}  // namespace kdtree
