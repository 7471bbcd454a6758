// Kernels in plain C++ (any processor; NEON where it is part of the baseline).
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../bf16.h"
#include "kernels.h"
#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define KDTREE_NEON 1
#endif

#define KDTREE_INLINE __attribute__((always_inline))

namespace kdtree::cpu::base {
namespace {

#ifdef KDTREE_NEON
#define KDTREE_ISA_NAME "neon"
constexpr int kMr = 2, kNr = 3, kNrOnce = 3, kNrFew = 3, kNrRest = 3;
constexpr int kMrInt4 = 2, kNrInt4 = 1, kNrInt4One = 2, kStreamsInt4 = 2, kMrSum = 4;

struct V {
  float32x4_t q[4];
  static V zero() { return set(0.0f); }
  static V set(float v) {
    V r;
    for (int i = 0; i < 4; ++i) r.q[i] = vdupq_n_f32(v);
    return r;
  }
  static V load(const float* p) {
    V r;
    for (int i = 0; i < 4; ++i) r.q[i] = vld1q_f32(p + 4 * i);
    return r;
  }
  static V load(const uint16_t* p) {  // bf16
    V r;
    for (int i = 0; i < 4; ++i) r.q[i] = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    return r;
  }
  void store(float* p) const {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, q[i]);
  }
  struct Words;
  static V scales(const uint16_t* p) {  // four bf16, each for four lanes
    const float32x4_t s = vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
    return {{vdupq_laneq_f32(s, 0), vdupq_laneq_f32(s, 1), vdupq_laneq_f32(s, 2), vdupq_laneq_f32(s, 3)}};
  }
  static V power_of_two(V t) {
    V r;
    for (int i = 0; i < 4; ++i) {
      const int32x4_t n = vaddq_s32(vreinterpretq_s32_f32(t.q[i]), vdupq_n_s32(127 - 0x4B400000));
      r.q[i] = vreinterpretq_f32_s32(vshlq_n_s32(n, 23));
    }
    return r;
  }
};
// 16 words of 8 nibbles.
struct V::Words {
  uint32x4_t w[4];
  static Words load(const uint8_t* p) {
    Words r;
    for (int i = 0; i < 4; ++i) r.w[i] = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
    return r;
  }
  // Nibble S less 8: put into the mantissa of a float whose unit is its place, from which the rest is subtracted; both are exact.
  template <int S>
  V at() const {
    constexpr int at = S % 5 * 4;
    V r;
    for (int i = 0; i < 4; ++i) {
      const uint32x4_t from = S < 5 ? w[i] : vshrq_n_u32(w[i], 20);
      const uint32x4_t wide = vbslq_u32(vdupq_n_u32(15u << at), from, vdupq_n_u32((127u + 23 - at) << 23));
      r.q[i] = vsubq_f32(vreinterpretq_f32_u32(wide), vdupq_n_f32(static_cast<float>((1 << (23 - at)) + 8)));
    }
    return r;
  }
};
inline float tree_sum(V v) {
  const float32x4_t four = vaddq_f32(vaddq_f32(v.q[0], v.q[2]), vaddq_f32(v.q[1], v.q[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
#define KDTREE_LANES(name, a_, b_, expression)     \
  inline V name(V a_, V b_) {                      \
    V r;                                           \
    for (int i = 0; i < 4; ++i) r.q[i] = expression; \
    return r;                                      \
  }
KDTREE_LANES(add, a, b, vaddq_f32(a.q[i], b.q[i]))
KDTREE_LANES(sub, a, b, vsubq_f32(a.q[i], b.q[i]))
KDTREE_LANES(mul, a, b, vmulq_f32(a.q[i], b.q[i]))
KDTREE_LANES(div, a, b, vdivq_f32(a.q[i], b.q[i]))
KDTREE_LANES(max, a, b, vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]))
KDTREE_LANES(min, a, b, vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]))
#undef KDTREE_LANES
inline V fma(V a, V b, V c) {
  V r;
  for (int i = 0; i < 4; ++i) r.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]);
  return r;
}

#else
#define KDTREE_ISA_NAME "base"
constexpr int kMr = 1, kNr = 1, kNrOnce = 1, kNrFew = 1, kNrRest = 1;
constexpr int kMrInt4 = 1, kNrInt4 = 1, kNrInt4One = 1, kStreamsInt4 = 1, kMrSum = 1;

struct V {
  float v[16];
  static V zero() { return set(0.0f); }
  static V set(float x) {
    V r;
    for (float& lane : r.v) lane = x;
    return r;
  }
  static V load(const float* p) {
    V r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static V load(const uint16_t* p) {  // bf16
    V r;
    for (int i = 0; i < 16; ++i) r.v[i] = bf16_value(p[i]);
    return r;
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  struct Words;
  static V scales(const uint16_t* p) {  // four bf16, each for four lanes
    V r;
    for (int i = 0; i < 16; ++i) r.v[i] = bf16_value(p[i / 4]);
    return r;
  }
  static V power_of_two(V t) {
    V r;
    for (int i = 0; i < 16; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &t.v[i], 4);
      bits = (bits + (127u - 0x4B400000u)) << 23;
      std::memcpy(&r.v[i], &bits, 4);
    }
    return r;
  }
};
// 16 words of 8 nibbles.
struct V::Words {
  uint8_t b[64];
  static Words load(const uint8_t* p) {
    Words r;
    std::memcpy(r.b, p, sizeof r.b);
    return r;
  }
  template <int S>
  V at() const {  // nibble S of each, less 8
    V r;
    for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>((b[4 * i + S / 2] >> S % 2 * 4 & 15) - 8);
    return r;
  }
};
inline float tree_sum(V v) {
  for (int h = 8; h > 0; h /= 2) {
    for (int t = 0; t < h; ++t) v.v[t] += v.v[t + h];
  }
  return v.v[0];
}
#define KDTREE_LANES(name, expression)              \
  inline V name(V a, V b) {                         \
    V r;                                            \
    for (int i = 0; i < 16; ++i) r.v[i] = expression; \
    return r;                                       \
  }
KDTREE_LANES(add, a.v[i] + b.v[i])
KDTREE_LANES(sub, a.v[i] - b.v[i])
KDTREE_LANES(mul, a.v[i] * b.v[i])
KDTREE_LANES(div, a.v[i] / b.v[i])
KDTREE_LANES(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
KDTREE_LANES(min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef KDTREE_LANES
inline V fma(V a, V b, V c) {
  V r;
  for (int i = 0; i < 16; ++i) r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
#endif

inline void sum4(const V* x, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = tree_sum(x[i]);
}

#include "lanes.h"

#include "int4_body.h"

#include "kernels_body.h"

}  // namespace kdtree::cpu::base
