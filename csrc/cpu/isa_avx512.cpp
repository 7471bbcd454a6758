// Kernels for x86-64 with AVX-512 (F, BW, DQ, VL): 16 lanes are one register.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../bf16.h"
#include "kernels.h"

#define KDTREE_ISA_NAME "avx512"
#define KDTREE_INLINE __attribute__((always_inline))

// From here to the end of the file everything is compiled for these instructions; the standard headers above are not.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
// GCC 12's own intrinsics leave undefined what they then warn of (its bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif

namespace kdtree::cpu::avx512 {
namespace {

constexpr int kMr = 4, kNr = 6, kNrOnce = 7, kNrFew = 8, kNrRest = 4;  // within 32 registers of 16 lanes
constexpr int kMrInt4 = 4, kNrInt4 = 2, kNrInt4One = 4, kStreamsInt4 = 16, kMrSum = 8;

struct V {
  __m512 v;
  static KDTREE_INLINE V zero() { return {_mm512_setzero_ps()}; }
  static KDTREE_INLINE V set(float x) { return {_mm512_set1_ps(x)}; }
  static KDTREE_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static KDTREE_INLINE V load(const uint16_t* p) {  // bf16
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  KDTREE_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
  struct Words;
  static KDTREE_INLINE V scales(const uint16_t* p) {  // four bf16, each for four lanes
    int64_t bits;
    std::memcpy(&bits, p, sizeof bits);
    const int a = 0x01008080, b = 0x03028080, c = 0x05048080, d = 0x07068080;  // bytes of the result; 80 is a zero
    const __m512i from = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
    return {_mm512_castsi512_ps(_mm512_shuffle_epi8(_mm512_set1_epi64(bits), from))};
  }
  static KDTREE_INLINE V power_of_two(V t) {
    const __m512i n = _mm512_add_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(127 - 0x4B400000));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
  }
};
// 16 words of 8 nibbles.
struct V::Words {
  __m512i w;
  static KDTREE_INLINE Words load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  template <int S>
  KDTREE_INLINE V at() const {  // nibble S of each, less 8
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i low = S % 4 == 0 ? w : _mm512_srli_epi32(w, S % 4 * 4);  // nibble S % 4, and S % 4 + 4 in the upper half
    if (S < 4) return {_mm512_permutexvar_ps(low, values)};                // reads the low four bits of each lane
    // A small integer's f32 is zero but for its upper half. Reads the low five bits of each half: the fifth chooses between equals.
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(values), 16));
    return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, low, _mm512_broadcast_i64x4(halves)))};
  }
};
inline KDTREE_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline KDTREE_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline KDTREE_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline KDTREE_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline KDTREE_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline KDTREE_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline KDTREE_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

inline KDTREE_INLINE float tree_sum(V v) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm512_extractf32x8_ps(v.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#define KDTREE_OWN_TAILS
inline KDTREE_INLINE __mmask16 first(int lanes) { return static_cast<__mmask16>((1u << lanes) - 1u); }
inline KDTREE_INLINE V load_tail(const float* p, int lanes) { return {_mm512_maskz_loadu_ps(first(lanes), p)}; }
inline KDTREE_INLINE V load_tail(const uint16_t* p, int lanes) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(lanes), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline KDTREE_INLINE void store_tail(float* p, V v, int lanes) { _mm512_mask_storeu_ps(p, first(lanes), v.v); }

// Four halving trees in one: every step adds the halves of what is left of two vectors, side by side.
inline KDTREE_INLINE __m512 halves(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
}
inline KDTREE_INLINE void sum4(const V* x, float* out) {
  const __m512 ab = halves(x[0].v, x[1].v), cd = halves(x[2].v, x[3].v);  // 8 lanes of each
  const __m512 quads = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  const __m512 pairs = _mm512_add_ps(quads, _mm512_permute_ps(quads, 0xEE));
  const __m512 sums = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0x55));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, sums)));
}

#include "lanes.h"

#include "int4_body.h"

#include "kernels_body.h"

}  // namespace kdtree::cpu::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
