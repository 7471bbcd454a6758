// Copies into shared memory by the bulk copy engine, whose bytes a barrier there counts (barrier.cuh). Hopper and newer.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "barrier.cuh"

namespace kdtree {
namespace cuda {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

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

// A box of activations into L2 alone, for whoever copies it later. It may still be written when this is asked for: L2 is where all see the same.
__device__ __forceinline__ void fetch_box(const CUtensorMap* map, int k, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(k), "r"(row) : "memory");
}

// So many blocks of 64 elements of all rows of activations from block `first` on.
__device__ __forceinline__ void copy_blocks(uint32_t to, const CUtensorMap* map, int first, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %3, %4}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(0), "r"(first)
               : "memory");
}

// Bytes that follow each other, a multiple of 16.
__device__ __forceinline__ void copy_run(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

#endif

}  // namespace cuda
}  // namespace kdtree
