// What products share: loads and stores of fewer than 16 lanes for any V (see kernels_body.h) that has none of its own, the halving
// trees of a tile, and asking for memory ahead.

inline float value_of(float x) { return x; }
inline float value_of(uint16_t bits) { return bf16_value(bits); }

// Into the second cache: the first would drop what is asked for this early, and a page's first line may take a walk of its own.
constexpr int kAhead = 4096, kAheadInt4 = 1024;  // bytes
inline KDTREE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
// Into the first: many multiply-adds that wait for their operands leave no room for the loads behind them.
constexpr int kAheadSoon = 256;
constexpr int kShortRow = 1024;  // bytes of INT4: few of them are no more than the first cache has room for beside what is in use
inline KDTREE_INLINE void prefetch_soon(const void* p) { __builtin_prefetch(p, 0, 3); }

#ifndef KDTREE_OWN_TAILS
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
#endif

// out = tree_sum of every vector of a tile; sum4 of the instruction set does four at a time.
template <int Mr, int Nr>
inline KDTREE_INLINE void tree_sums(const V (&v)[Mr][Nr], float (&out)[Mr][Nr]) {
  const auto at = [&](int i) KDTREE_INLINE -> const V& { return v[i / Nr][i % Nr]; };
  for (int i = 0; i < Mr * Nr / 4 * 4; i += 4) {
    const V four[4] = {at(i), at(i + 1), at(i + 2), at(i + 3)};
    float sums[4];
    sum4(four, sums);
    for (int t = i; t < i + 4; ++t) out[t / Nr][t % Nr] = sums[t - i];
  }
  for (int i = Mr * Nr / 4 * 4; i < Mr * Nr; ++i) out[i / Nr][i % Nr] = tree_sum(at(i));
}
