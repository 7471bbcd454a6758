// Bulk copies of boxes of weights, the barriers in shared memory that count their bytes, and nibbles as they come with them.
//
// A nibble becomes q/4, exactly, since bf16's smallest numbers need no exponent to be set: of the low nibble of a byte by (128 + n)/4 - 34, of the
// high one, whose bits are the number n * 2^-129, by a multiplication with 2^127. Whoever has added a segment multiplies its sums by 4.
#pragma once
#include <cuda.h>

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
// True in one lane of a warp that is together, always the same; unlike a comparison with its number it tells the compiler that there is but one.
__device__ __forceinline__ bool elected() {
  uint32_t is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is));
  return is != 0;
}
// The box whose first byte of a row is `byte` and whose first row is `row`. byte is a multiple of 16.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int byte, int row, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(byte), "r"(row), "r"(0)
               : "memory");
}

// The same of bytes that no block reads again: L2 is to forget them first, before activations and what else a step comes back to.
__device__ __forceinline__ void copy_box_once(uint32_t to, const CUtensorMap* map, int byte, int row, uint32_t barrier) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // what createpolicy.fractional.L2::evict_first makes, of all of a copy
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(byte), "r"(row), "r"(0), "l"(kEvictFirst)
      : "memory");
}

#endif

// The nibbles of a word's bytes 0 and 2, low or high, as two bf16 numbers q/4.
__device__ __forceinline__ uint32_t low_pair(uint32_t word) {
  uint32_t v;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(v) : "r"(word));
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x3e803e80u), "r"(0xc208c208u));
  return v;
}
__device__ __forceinline__ uint32_t high_pair(uint32_t word) {
  uint32_t v = word & 0x00f000f0u;
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x7f007f00u), "r"(0xc000c000u));
  return v;
}

}  // namespace cuda
}  // namespace kdtree
