// The log-sum-exp of docs/model.md to its last bit: the exponential, the logarithm, a segment's sum and a row's.
#pragma once
#include "tree.cuh"

namespace kdtree {
namespace cuda {

// exp32 of -87 <= x <= 0. Adding 1.5 * 2^23 rounds to an integer as rint does and leaves it in the low bits; n * 0.693359375 is exact, so
// that one fused operation gives the two rounded ones; y * 2^n is a normal number, so that adding to the exponent gives the product.
__device__ __forceinline__ float exp32_in_range(float x) {
  const float magic = 12582912.f;
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), magic), n = __fsub_rn(shifted, magic);
  float r = __fmaf_rn(n, -0.693359375f, x);
  r = __fsub_rn(r, __fmul_rn(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
  float y = __fmul_rn(p, __fmul_rn(r, r));
  y = __fadd_rn(y, r);
  y = __fadd_rn(y, 1.0f);
  return __uint_as_float(__float_as_uint(y) + (__float_as_uint(shifted) << 23));
}
__device__ __forceinline__ float exp32(float x) { return x < -87.0f ? 0.0f : exp32_in_range(x); }

__device__ inline float log32(float s) {
  // s >= 1, so it is a normal number: its exponent field gives frexp's e, and the field of [1/2, 1) its f.
  const uint32_t bits = __float_as_uint(s);
  int e = static_cast<int>(bits >> 23) - 126;
  float f = __uint_as_float((bits & 0x007fffffu) | 0x3f000000u);
  if (f < 0.707106781186547524f) {
    e -= 1;
    f = __fadd_rn(f, f);
  }
  const float z = __fsub_rn(f, 1.0f), n = static_cast<float>(e);
  float p = 7.0376836292e-2f;
  p = __fadd_rn(__fmul_rn(p, z), -1.1514610310e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 1.1676998740e-1f);
  p = __fadd_rn(__fmul_rn(p, z), -1.2420140846e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 1.4249322787e-1f);
  p = __fadd_rn(__fmul_rn(p, z), -1.6668057665e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 2.0000714765e-1f);
  p = __fadd_rn(__fmul_rn(p, z), -2.4999993993e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 3.3333331174e-1f);
  const float q = __fmul_rn(z, z);
  float y = __fmul_rn(z, q);
  y = __fmul_rn(y, p);
  y = __fadd_rn(y, __fmul_rn(n, -2.12194440e-4f));
  y = __fsub_rn(y, __fmul_rn(0.5f, q));
  return __fadd_rn(__fadd_rn(z, y), __fmul_rn(n, 0.693359375f));
}

// The greater of two, NaN if one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float top;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(top) : "f"(a), "f"(b));
  return top;
}

// log-sum-exp of a row from its segments' greatest logits and sums, by one warp; in every lane. top: the row's greatest logit, NaN if a
// segment's is. A segment without finite logits has the sum 0 and adds +0, which changes nothing, as lanes past the end do. The terms
// are formed side by side and added in order.
__device__ inline float row_lse(const float* tops, const float* sums, int segments, float& top) {
  const int lane = threadIdx.x % kWarp;
  top = -INFINITY;
  for (int i = lane; i < segments; i += kWarp) top = max_or_nan(top, tops[i]);
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) top = max_or_nan(top, __shfl_xor_sync(kAll, top, mask));
  float sum = 0.f;
  for (int base = 0; base < segments; base += kWarp) {
    const int i = base + lane;
    const float term = i < segments ? __fmul_rn(sums[i], exp32(__fsub_rn(tops[i], top))) : 0.f;
#pragma unroll
    for (int j = 0; j < kWarp; ++j) sum = __fadd_rn(sum, __shfl_sync(kAll, term, j));
  }
  return __fadd_rn(top, log32(sum));
}

}  // namespace cuda
}  // namespace kdtree
