// INT4 products of kernels.h over V (see kernels_body.h), which reads nibbles as V::Words and scales as V::scales.
//
// Bytes: 0.5625 a weight. At one row AVX-512 takes 21 instructions a unit of 128 weights, about the time that memory takes
// for its 72 bytes; from four rows on fused multiply-adds are the bound. Order: kernels.h.

// Adds nibbles S to 7 of 16 words, times their activations, to part.
template <int S, int Mr, int Nr>
inline KDTREE_INLINE void add_nibbles(V (&part)[Mr][Nr], const V::Words (&word)[Nr], const float* const* x, int at) {
  V w[Nr];
  for (int j = 0; j < Nr; ++j) w[j] = word[j].template at<S>();
  for (int i = 0; i < Mr; ++i) {
    const V a = V::load(x[i] + at + 16 * S);
    for (int j = 0; j < Nr; ++j) part[i][j] = S == 0 ? mul(a, w[j]) : fma(a, w[j], part[i][j]);
  }
  if constexpr (S < 7) add_nibbles<S + 1>(part, word, x, at);
}

// Asks for memory while unit `first` of a tile is used up. Many outputs: each row's own, into the second cache and again into the
// first. Few: the tile that follows in memory, line by line; one short enough into the first cache, if one row is all that it serves.
template <int Mr, int Nr, int Streams>
inline KDTREE_INLINE void fetch_int4(const uint8_t* q, const uint16_t* scale, int groups, int first) {
  constexpr int kGroups = kUnit / kGroup, kBytes = kGroups * kGroupBytes;
  const int64_t step = static_cast<int64_t>(groups) * kGroupBytes, used = static_cast<int64_t>(first) * Streams;
  if constexpr (Streams > Nr) {
    const auto from = [&](int ahead) KDTREE_INLINE {
      const int64_t at = static_cast<int64_t>(first) * kGroupBytes + ahead;
      return q + at + (at < step ? 0 : (Streams - 1) * step);
    };
    for (int j = 0; j < Streams; ++j) {
      prefetch(from(kAheadInt4) + j * step);
      prefetch_soon(from(kAheadSoon) + j * step);
    }
  } else {
    const uint8_t* next = q + Streams * step + used * kGroupBytes;
    for (int j = 0; j < Streams; ++j) {
      if (Mr == 1 && step <= kShortRow) {
        prefetch_soon(next + j * kBytes);
      } else {
        prefetch(next + j * kBytes + kAhead);
      }
    }
  }
  for (int64_t at = used; at < used + Streams * kGroups; at += 32) prefetch(scale + Streams * groups + at + kAhead / kGroupBytes);
}

// Mr rows by Streams outputs, Nr of them at a time: so many streams of weights, each read on a little at a time, are what keeps
// memory at work, and registers hold no more than Nr outputs' nibbles.
template <int Mr, int Nr, int Streams>
inline KDTREE_INLINE void tile_int4(const float* const* x, const uint8_t* q, const uint16_t* scale, int groups, float* y, int ldy) {
  constexpr int kGroups = kUnit / kGroup, kBytes = kGroups * kGroupBytes;
  V acc[Mr][Streams];
  for (int i = 0; i < Mr; ++i) {
    for (int j = 0; j < Streams; ++j) acc[i][j] = V::zero();
  }
  uint8_t last_q[Streams][kBytes];
  uint16_t last_scale[Streams][kGroups];
  for (int first = 0; first < groups; first += kGroups) {
    const uint8_t* from = q + static_cast<int64_t>(first) * kGroupBytes;
    const uint16_t* scales = scale + first;
    int64_t step = static_cast<int64_t>(groups) * kGroupBytes, scale_step = groups;
    fetch_int4<Mr, Nr, Streams>(q, scale, groups, first);
    if (const int some = groups - first; some < kGroups) {  // a unit that is not full ends with scales of zero
      std::memset(last_q, 0, sizeof last_q);
      std::memset(last_scale, 0, sizeof last_scale);
      for (int j = 0; j < Streams; ++j) {
        std::memcpy(last_q[j], from + j * step, static_cast<size_t>(some) * kGroupBytes);
        std::memcpy(last_scale[j], scales + j * scale_step, static_cast<size_t>(some) * sizeof(uint16_t));
      }
      from = last_q[0], scales = last_scale[0], step = kBytes, scale_step = kGroups;
    }
    for (int at = 0; at < Streams; at += Nr, from += Nr * step, scales += Nr * scale_step) {
      V::Words word[Nr];
      V part[Mr][Nr];
      for (int j = 0; j < Nr; ++j) word[j] = V::Words::load(from + j * step);
      add_nibbles<0>(part, word, x, first * kGroup);
      for (int j = 0; j < Nr; ++j) {
        const V s = V::scales(scales + j * scale_step);
        for (int i = 0; i < Mr; ++i) acc[i][at + j] = fma(part[i][j], s, acc[i][at + j]);
      }
    }
  }
  float sums[Mr][Streams];
  tree_sums(acc, sums);
  for (int i = 0; i < Mr; ++i) {
    for (int j = 0; j < Streams; ++j) y[i * ldy + j] = sums[i][j];
  }
}

// kStreamsInt4 outputs are fetched once for all rows; tiles of more rows take fewer of them at a time.
void gemm_int4(const float* const* x, int m, const uint8_t* q, const uint16_t* scale, int n, int groups, float* y, int ldy) {
  const int64_t row_bytes = static_cast<int64_t>(groups) * kGroupBytes;
  const auto q_of = [&](int j) { return q + j * row_bytes; };
  const auto scale_of = [&](int j) { return scale + static_cast<int64_t>(j) * groups; };
  int j = 0;
  for (; j + kStreamsInt4 <= n; j += kStreamsInt4) {
    int i = 0;
    for (; i + kMrInt4 <= m; i += kMrInt4) {
      for (int part = j; part < j + kStreamsInt4; part += kNrInt4) {
        tile_int4<kMrInt4, kNrInt4, kNrInt4>(x + i, q_of(part), scale_of(part), groups, y + i * ldy + part, ldy);
      }
    }
    if constexpr (kMrInt4 > 2) {
      for (; i + 2 <= m; i += 2) {
        for (int part = j; part < j + kStreamsInt4; part += kNrInt4One) {
          tile_int4<2, kNrInt4One, kNrInt4One>(x + i, q_of(part), scale_of(part), groups, y + i * ldy + part, ldy);
        }
      }
    }
    for (; i < m; ++i) {
      if (row_bytes > kShortRow) {
        tile_int4<1, kNrInt4One, kStreamsInt4>(x + i, q_of(j), scale_of(j), groups, y + i * ldy + j, ldy);
        continue;
      }
      for (int part = j; part < j + kStreamsInt4; part += kNrInt4One) {
        tile_int4<1, kNrInt4One, kNrInt4One>(x + i, q_of(part), scale_of(part), groups, y + i * ldy + part, ldy);
      }
    }
  }
  for (; j < n; ++j) {
    for (int i = 0; i < m; ++i) tile_int4<1, 1, 1>(x + i, q_of(j), scale_of(j), groups, y + i * ldy + j, ldy);
  }
}

// out[unit][j][t] = element 8t + j of the unit, as words hold nibbles; zeros beyond k.
template <class T>
void pack_units(float* out, const T* x, int k) {
  for (int first = 0; first < k; first += kUnit, out += kUnit) {
    const int some = k - first < kUnit ? k - first : kUnit;
    if (some < kUnit) std::memset(out, 0, sizeof(float) * kUnit);
    for (int e = 0; e < some; ++e) out[e % 8 * 16 + e / 8] = value_of(x[first + e]);
  }
}
