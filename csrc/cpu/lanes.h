// What products share: loads and stores of fewer than 16 lanes for any V (see kernels_body.h), and asking for memory ahead.

inline float value_of(float x) { return x; }
inline float value_of(uint16_t bits) { return bf16_value(bits); }

// Into the second cache: the first would drop what is asked for this early, and a page's first line may take a walk of its own.
constexpr int kAhead = 4096;  // bytes
inline KDTREE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

inline V load_tail(const float* p, int lanes) {
  float padded[16] = {};
  std::memcpy(padded, p, sizeof(float) * static_cast<size_t>(lanes));
  return V::load(padded);
}

inline V load_tail(const uint16_t* p, int lanes) {
  uint16_t padded[16] = {};
  std::memcpy(padded, p, sizeof(uint16_t) * static_cast<size_t>(lanes));
  return V::load(padded);
}

inline void store_tail(float* p, V v, int lanes) {
  float padded[16];
  v.store(padded);
  std::memcpy(p, padded, sizeof(float) * static_cast<size_t>(lanes));
}
