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
constexpr int kMr = 2, kNr = 3, kMrInt4 = 2, kNrInt4 = 1, kNrInt4One = 2, kMrSum = 4;

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
  static void nibbles(const uint8_t* p, V& even, V& odd) {
    const uint8x16_t b = vld1q_u8(p);
    widen(vandq_u8(b, vdupq_n_u8(15)), even);
    widen(vshrq_n_u8(b, 4), odd);
  }
  static void widen(uint8x16_t b, V& out) {
    const int8x16_t s = vsubq_s8(vreinterpretq_s8_u8(b), vdupq_n_s8(8));
    const int16x8_t lo = vmovl_s8(vget_low_s8(s)), hi = vmovl_s8(vget_high_s8(s));
    out.q[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo)));
    out.q[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo)));
    out.q[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi)));
    out.q[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)));
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
constexpr int kMr = 1, kNr = 1, kMrInt4 = 1, kNrInt4 = 1, kNrInt4One = 1, kMrSum = 1;

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
  static void nibbles(const uint8_t* p, V& even, V& odd) {
    for (int i = 0; i < 16; ++i) {
      even.v[i] = static_cast<float>((p[i] & 15) - 8);
      odd.v[i] = static_cast<float>((p[i] >> 4) - 8);
    }
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

#include "lanes.h"

#include "kernels_body.h"

}  // namespace kdtree::cpu::base
