// bf16 on the host: the upper half of an f32.
//
// One rounding, to nearest with ties to even, as docs/model.md has it. A NaN stays one (its payload is cut, and made quiet).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kdtree {

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t bf16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}

inline void to_bf16(uint16_t* out, const float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = bf16_bits(x[i]);
}

// As to_bf16, the result kept as f32.
inline void round_bf16(float* x, size_t n) {
  for (size_t i = 0; i < n; ++i) x[i] = bf16_value(bf16_bits(x[i]));
}

inline void from_bf16(float* out, const uint16_t* x, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = bf16_value(x[i]);
}

}  // namespace kdtree
