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

constexpr int kMr = 3, kNr = 2, kNrOnce = 2, kNrFew = 2, kNrRest = 2;  // within 16 registers of 8 lanes
constexpr int kMrInt4 = 2, kNrInt4 = 1, kNrInt4One = 2, kStreamsInt4 = 8, kMrSum = 4;

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
  struct Words;
  static KDTREE_INLINE V scales(const uint16_t* p) {  // four bf16, each for four lanes
    int64_t bits;
    std::memcpy(&bits, p, sizeof bits);
    const int a = 0x01008080, b = 0x03028080, c = 0x05048080, d = 0x07068080;  // bytes of the result; 80 is a zero
    const __m256i four = _mm256_set1_epi64x(bits);
    return {_mm256_castsi256_ps(_mm256_shuffle_epi8(four, _mm256_setr_epi32(a, a, a, a, b, b, b, b))),
            _mm256_castsi256_ps(_mm256_shuffle_epi8(four, _mm256_setr_epi32(c, c, c, c, d, d, d, d)))};
  }
  static KDTREE_INLINE __m256 power(__m256 t) {
    const __m256i n = _mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127 - 0x4B400000));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  }
  static KDTREE_INLINE V power_of_two(V t) { return {power(t.lo), power(t.hi)}; }
};
// 16 words of 8 nibbles.
struct V::Words {
  __m256i lo, hi;
  static KDTREE_INLINE Words load(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
  }
  // Nibble S less 8: put into the mantissa of a float whose unit is its place, from which the rest is subtracted; both are exact.
  template <int S>
  static KDTREE_INLINE __m256 nibble(__m256i w) {
    constexpr int at = S % 5 * 4;
    if (S >= 5) w = _mm256_srli_epi32(w, 20);
    w = _mm256_or_si256(_mm256_and_si256(w, _mm256_set1_epi32(15 << at)), _mm256_set1_epi32((127 + 23 - at) << 23));
    return _mm256_sub_ps(_mm256_castsi256_ps(w), _mm256_set1_ps(static_cast<float>((1 << (23 - at)) + 8)));
  }
  template <int S>
  KDTREE_INLINE V at() const { return {nibble<S>(lo), nibble<S>(hi)}; }
};
inline KDTREE_INLINE V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline KDTREE_INLINE V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }

inline KDTREE_INLINE float tree_sum(V v) {
  const __m256 eight = _mm256_add_ps(v.lo, v.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Four halving trees in one: every step adds the halves of what is left of two vectors, side by side.
inline KDTREE_INLINE __m256 halves(const V& x, const V& y) {
  const __m256 a = _mm256_add_ps(x.lo, x.hi), b = _mm256_add_ps(y.lo, y.hi);
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline KDTREE_INLINE void sum4(const V* x, float* out) {
  const __m256 ab = halves(x[0], x[1]), cd = halves(x[2], x[3]);  // four lanes of each
  const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  const __m256 acbd = _mm256_add_ps(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xDD));
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(acbd), _mm256_extractf128_ps(acbd, 1)));
}

#include "lanes.h"

#include "int4_body.h"

#include "kernels_body.h"

}  // namespace kdtree::cpu::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
