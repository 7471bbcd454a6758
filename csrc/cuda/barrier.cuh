// Barriers in shared memory (mbarrier), by their shared addresses: they count arrivals, and bytes that the bulk copy engine or other blocks still send.
// Hopper and newer.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {
namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ void barrier_init(uint32_t at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(at) : "memory");
}
// What the thread has read stands in registers: before it arrives where others learn that they may write there. The compiler would put the
// arrival ahead of whatever waits for the reads, and who writes next, the copy engine or another warp, may come before them.
__device__ __forceinline__ void reads_done() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }
// Arrives, and so many bytes are still to come.
__device__ __forceinline__ void barrier_expect(uint32_t at, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
// A wait for a phase, told by its parity, gives back as soon as it has ended, and until the next one has.
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(at), "r"(parity)
      : "memory");
}
__device__ __forceinline__ bool barrier_passed(uint32_t at, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(at), "r"(parity)
               : "memory");
  return done != 0;
}

#endif

}  // namespace cuda
}  // namespace kdtree
