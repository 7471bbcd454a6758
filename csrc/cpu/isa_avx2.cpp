// Kernels for x86-64 with AVX2 and FMA: 16 lanes are two registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../bf16.h"
#include "kernels.h"

#define KDTREE_ISA_NAME "avx2"
#define KDTREE_INLINE __attribute__((always_inline))

// From here to the end of the file everything is compiled for these instructions; the standard headers above are not.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace kdtree::cpu::avx2 {
namespace {

constexpr int kMr = 3, kNr = 2, kMrInt4 = 3, kNrInt4 = 1, kNrInt4One = 2, kMrSum = 4;  // within 16 registers of 8 lanes

struct V {
  __m256 lo, hi;
  static KDTREE_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static KDTREE_INLINE V set(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
  static KDTREE_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static KDTREE_INLINE __m256 widen_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static KDTREE_INLINE V load(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
  KDTREE_INLINE void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  static KDTREE_INLINE __m256 widen(__m128i bytes) {
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(bytes), _mm256_set1_epi32(8)));
  }
  static KDTREE_INLINE void nibbles(const uint8_t* p, V& even, V& odd) {
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i e = _mm_and_si128(b, mask), o = _mm_and_si128(_mm_srli_epi16(b, 4), mask);
    even = {widen(e), widen(_mm_srli_si128(e, 8))};
    odd = {widen(o), widen(_mm_srli_si128(o, 8))};
  }
  static KDTREE_INLINE __m256 power(__m256 t) {
    const __m256i n = _mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127 - 0x4B400000));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  }
  static KDTREE_INLINE V power_of_two(V t) { return {power(t.lo), power(t.hi)}; }
};
inline KDTREE_INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }

#include "lanes.h"

#include "kernels_body.h"

}  // namespace kdtree::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
