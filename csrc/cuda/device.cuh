// What every kernel file needs on the device: programmatic dependent launch, warp reductions in a fixed order, checked assumptions.
//
// Arithmetic whose bits must not depend on the template it is compiled into is written with __fmaf_rn, __fadd_rn and __fmul_rn,
// so that the compiler has no choice of contraction.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "../ops.h"

// KD_ASSERT states what a kernel takes for granted. In a debug build (KDTREE_DEBUG) it is checked and names the place, the block
// and the thread before it stops the kernel; in a release build it costs nothing.
#ifdef KDTREE_DEBUG
#include <cstdio>
#define KD_ASSERT(condition, message)                                                                                \
  do {                                                                                                               \
    if (!(condition)) {                                                                                              \
      printf("%s:%d: block (%u,%u,%u) thread %u: %s [%s]\n", __FILE__, __LINE__, blockIdx.x, blockIdx.y, blockIdx.z, \
             threadIdx.x, message, #condition);                                                                      \
      __trap();                                                                                                      \
    }                                                                                                                \
  } while (0)
#else
#define KD_ASSERT(condition, message) \
  do {                                \
  } while (0)
#endif

namespace kdtree {
namespace cuda {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

// Waits until every earlier kernel of the stream has ended and its writes are seen, then lets the next one start its prologue.
// Every thread of every kernel passes here before it touches anything but weights, and before it returns: a grid that ended
// without waiting would let the grid after it run ahead of the one before it. The next kernel is let in after the wait and not
// before: with a chain of kernels all waiting, each takes longer to be woken (docs/cuda.md has the figures).
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Butterfly: lane i holds ((v_i + v_i^16) + ...), the same bits in every lane, whatever else the kernel does.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) v = __fadd_rn(v, __shfl_xor_sync(kAll, v, mask));
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) v = fmaxf(v, __shfl_xor_sync(kAll, v, mask));
  return v;
}

// Rows of a step that count. A captured step replayed with more rows than it was captured for must not write past its buffers.
__device__ __forceinline__ int active_rows(const int32_t* n_rows, int max_rows) { return min(*n_rows, max_rows); }

// Starts a load that nothing waits for before its value is used; the compiler would do what it can with the value at once.
__device__ __forceinline__ int load_early(const int32_t* p) {
  int v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ float silu(float z) { return __fdiv_rn(z, __fadd_rn(1.0f, expf(-z))); }

__device__ __forceinline__ float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

// The nearest bf16, ties to even; a NaN stays one.
__device__ __forceinline__ uint16_t float_to_bf16(float v) {
  const uint32_t bits = __float_as_uint(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// What only products read is held as T: float, or uint16_t for bf16. as_held<T> is the value a product then sees.
template <class T> __device__ __forceinline__ T to_held(float v);
template <> __device__ __forceinline__ float to_held<float>(float v) { return v; }
template <> __device__ __forceinline__ uint16_t to_held<uint16_t>(float v) { return float_to_bf16(v); }
__device__ __forceinline__ float from_held(float v) { return v; }
__device__ __forceinline__ float from_held(uint16_t v) { return bf16_to_float(v); }
template <class T> __device__ __forceinline__ float as_held(float v) { return from_held(to_held<T>(v)); }

__device__ __forceinline__ float inverse_rms(float sum_of_squares, int n, float eps) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of_squares, static_cast<float>(n)), eps)));
}

}  // namespace cuda
}  // namespace kdtree
