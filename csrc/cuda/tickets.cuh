// What is left to do when all blocks of a launch have done their part is done by a few of them, in place of a launch more.
//
// All but these few leave when they have arrived. The few hold their places while they wait for blocks that may not have begun, so they are
// few beside the places that a device has: then those find theirs, also where several sessions share it.
// The counters are zero between launches, because the last block that waited puts them back; so a replayed graph finds them zero.
#pragma once
#include "device.cuh"

namespace kdtree {
namespace cuda {

struct Tickets {
  unsigned arrived;  // blocks that have done their part
  unsigned left;     // of those that wait, the ones that no longer look at `arrived`
  unsigned ahead;    // of an earlier meeting: things done, by this launch or by the one before it
  unsigned unused;
};

__device__ __forceinline__ int ticket_add(unsigned* at, int count) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(count) : "memory");
  return static_cast<int>(before);
}
__device__ __forceinline__ void ticket_wait(const unsigned* at, int all) {
  unsigned seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
  } while (static_cast<int>(seen) < all);
}

// What a word says that is zero until somebody sets it. Nothing else that was written is seen by that.
__device__ __forceinline__ void set_word(int32_t* at, int v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory"); }
__device__ __forceinline__ int look_at_word(const int32_t* at) {
  int v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// The next of a launch's numbered units for a block: its first has the block's number, the others come as they are asked for.
__device__ __forceinline__ int next_unit(Tickets* tickets, int blocks) { return blocks + static_cast<int>(atomicAdd(&tickets->arrived, 1u)); }
// Called once by every block of the launch, by the thread that asked for units when it has been given one that is not there. True for the last one,
// which has put the counters back.
__device__ __forceinline__ bool leave_units(Tickets* tickets, int blocks) {
  if (ticket_add(&tickets->left, 1) != blocks - 1) return false;
  tickets->arrived = 0, tickets->left = 0, tickets->ahead = 0;
  return true;
}

// The block has done its part.
__device__ __forceinline__ void arrive(Tickets* tickets) {
  __syncthreads();  // one thread publishes for all
  if (threadIdx.x == 0) ticket_add(&tickets->arrived, 1);
}

// Waits for `blocks` to have arrived; then the block sees what they wrote. Called by the whole block, of which one thread counts it out then: ahead of its
// warp's loads of what they wrote that would be a round trip to L2 more.
__device__ __forceinline__ void await(Tickets* tickets, int blocks) {
  if (threadIdx.x == 0) ticket_wait(&tickets->arrived, blocks);
  __syncthreads();
}
// Counts the block out of the `waiting` that look at `arrived`, by one thread; how many were before it. The last one's count is zero again. An addition, of
// whose answers the compiler would make one for the warp, would be waited for here.
__device__ __forceinline__ unsigned count_out(Tickets* tickets, int waiting) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(&tickets->left), "r"(waiting - 1) : "memory");
  return before;
}
// By the thread that counted: the last one puts back what all have looked at.
__device__ __forceinline__ void put_back(Tickets* tickets, unsigned before, int waiting) {
  if (before == static_cast<unsigned>(waiting - 1)) tickets->arrived = 0, tickets->ahead = 0;
}

// Tells of `count` things that the block has done, also at `further` unless it is null, and waits until `all` are done, by anyone: by blocks of
// lower numbers than those that have nothing to tell, so that they have found their places before.
__device__ __forceinline__ void meet_ahead(Tickets* tickets, unsigned* further, int count, int all) {
  __syncthreads();
  if (threadIdx.x == 0) {
    if (count > 0) {
      ticket_add(&tickets->ahead, count);
      if (further != nullptr) ticket_add(further, count);
    }
    ticket_wait(&tickets->ahead, all);
  }
  __syncthreads();
}

}  // namespace cuda
}  // namespace kdtree
