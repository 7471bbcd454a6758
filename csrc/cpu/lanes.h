// Loads and stores of fewer than 16 lanes, and the halving tree, for any V (see kernels_body.h).

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

inline float tree_sum(V v) {
  float lane[16];
  v.store(lane);
  for (int h = 8; h > 0; h /= 2) {
    for (int t = 0; t < h; ++t) lane[t] += lane[t + h];
  }
  return lane[0];
}
