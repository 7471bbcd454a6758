// The kernels of kernels.h over a vector type V of 16 f32 lanes. Included by one source file per instruction set, which defines
// V, the tile sizes and KDTREE_ISA_NAME first. V's operations are IEEE operations lane by lane; max(a, b) is a > b ? a : b.
//
// Bound by memory at one row (each weight is read once and used once); tiles of kMr rows by kNr outputs reuse it otherwise.

template <int Mr, int Nr, class T>
inline __attribute__((always_inline)) void tile_plain(const T* const* x, const T* const* w, int k, float* y, int ldy) {
  V acc[Mr][Nr];
  for (int i = 0; i < Mr; ++i) {
    for (int j = 0; j < Nr; ++j) acc[i][j] = V::zero();
  }
  int p = 0;
  constexpr int kFar = kAhead / static_cast<int>(sizeof(T)), kSoon = kAheadSoon / static_cast<int>(sizeof(T));
  const int64_t after = static_cast<int64_t>(Nr - 1) * k;  // past a row's end the next tile's is asked for, if it follows in memory
  for (; p + 16 <= k; p += 16) {
    V b[Nr];
    for (int j = 0; j < Nr; ++j) {
      b[j] = V::load(w[j] + p);
      prefetch(w[j] + p + kFar + (p + kFar < k ? 0 : after));
      if (Mr == kMr && Nr > kNrRest) prefetch_soon(w[j] + p + kSoon + (p + kSoon < k ? 0 : after));
    }
    for (int i = 0; i < Mr; ++i) {
      const V a = V::load(x[i] + p);
      for (int j = 0; j < Nr; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
    }
  }
  if (p < k) {
    V b[Nr];
    for (int j = 0; j < Nr; ++j) b[j] = load_tail(w[j] + p, k - p);
    for (int i = 0; i < Mr; ++i) {
      const V a = load_tail(x[i] + p, k - p);
      for (int j = 0; j < Nr; ++j) acc[i][j] = fma(a, b[j], acc[i][j]);
    }
  }
  float sums[Mr][Nr];
  tree_sums(acc, sums);
  for (int i = 0; i < Mr; ++i) {
    for (int j = 0; j < Nr; ++j) y[i * ldy + j] = sums[i][j];
  }
}

template <int Nr, class T>
inline __attribute__((always_inline)) void strip_plain(const T* const* x, int m, const T* const* w, int k, float* y, int ldy) {
  int i = 0;
  if constexpr (Nr <= kNrOnce) {  // more outputs leave no registers for kMr rows
    for (; i + kMr <= m; i += kMr) tile_plain<kMr, Nr>(x + i, w, k, y + i * ldy, ldy);
  }
  for (; kMr > 2 && i + 2 <= m; i += 2) tile_plain<2, Nr>(x + i, w, k, y + i * ldy, ldy);
  for (; i < m; ++i) tile_plain<1, Nr>(x + i, w, k, y + i * ldy, ldy);
}

// T float or uint16_t (bf16). Outputs at a time: each is a stream of weights, and memory serves several faster than one. kNrOnce
// where a weight serves one tile of kMr rows, kNr where several tiles find it in a cache, kNrFew at fewer rows.
template <class T>
void gemm_plain(const T* const* x, int m, const T* const* w, int n, int k, float* y, int ldy) {
  int j = 0;
  if (m < kMr) {
    for (; j + kNrFew <= n; j += kNrFew) strip_plain<kNrFew>(x, m, w + j, k, y + j, ldy);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    if constexpr (kNrOnce != kNr) {
      for (; m < 2 * kMr && j + kNrOnce <= n; j += kNrOnce) strip_plain<kNrOnce>(x, m, w + j, k, y + j, ldy);
    }
    for (; j + kNr <= n; j += kNr) strip_plain<kNr>(x, m, w + j, k, y + j, ldy);
  }
  for (; j + kNrRest <= n; j += kNrRest) strip_plain<kNrRest>(x, m, w + j, k, y + j, ldy);
  for (; j < n; ++j) {
    for (int i = 0; i < m; ++i) tile_plain<1, 1>(x + i, w + j, k, y + i * ldy + j, ldy);
  }
}

template <int Mr, class T>
inline __attribute__((always_inline)) void tile_sum(const float* coef, int ldc, const T* const* row, int t, int at, int lanes,
                                                    const float* decay, float* y, int ldy) {
  V acc[Mr];
  for (int i = 0; i < Mr; ++i) {
    acc[i] = decay == nullptr ? V::zero() : mul(load_tail(y + i * ldy + at, lanes), V::set(decay[i]));
  }
  if (lanes == 16) {
    for (int s = 0; s < t; ++s) {
      const V r = V::load(row[s] + at);
      for (int i = 0; i < Mr; ++i) acc[i] = fma(V::set(coef[i * ldc + s]), r, acc[i]);
    }
  } else {
    for (int s = 0; s < t; ++s) {
      const V r = load_tail(row[s] + at, lanes);
      for (int i = 0; i < Mr; ++i) acc[i] = fma(V::set(coef[i * ldc + s]), r, acc[i]);
    }
  }
  for (int i = 0; i < Mr; ++i) store_tail(y + i * ldy + at, acc[i], lanes);
}

template <class T>
void weighted_rows(const float* coef, int ldc, int m, const T* const* row, int t, int n, const float* decay, float* y, int ldy) {
  for (int at = 0; at < n; at += 16) {
    const int lanes = n - at < 16 ? n - at : 16;
    int i = 0;
    for (; i + kMrSum <= m; i += kMrSum) {
      tile_sum<kMrSum>(coef + i * ldc, ldc, row, t, at, lanes, decay == nullptr ? nullptr : decay + i, y + i * ldy, ldy);
    }
    for (; i < m; ++i) {
      tile_sum<1>(coef + i * ldc, ldc, row, t, at, lanes, decay == nullptr ? nullptr : decay + i, y + i * ldy, ldy);
    }
  }
}

float sum_squares(const float* x, int n) {
  V acc = V::zero();
  int p = 0;
  for (; p + 16 <= n; p += 16) {
    const V a = V::load(x + p);
    acc = fma(a, a, acc);
  }
  if (p < n) {
    const V a = load_tail(x + p, n - p);
    acc = fma(a, a, acc);
  }
  return tree_sum(acc);
}

// out[i] = f(i-th vector), the tail by way of a padded vector so that it takes the very same operations.
template <class F>
inline __attribute__((always_inline)) void each(float* out, int n, const F& f) {
  int p = 0;
  for (; p + 16 <= n; p += 16) f(p, 16).store(out + p);
  if (p < n) store_tail(out + p, f(p, n - p), n - p);
}

inline __attribute__((always_inline)) V load_some(const float* p, int lanes) {
  return lanes == 16 ? V::load(p) : load_tail(p, lanes);
}

void scale_by(float* out, const float* x, float factor, const float* w, int n) {
  const V f = V::set(factor);
  each(out, n, [&](int p, int lanes) KDTREE_INLINE { return mul(mul(load_some(x + p, lanes), f), load_some(w + p, lanes)); });
}

void divide(float* x, float divisor, int n) {
  const V d = V::set(divisor);
  each(x, n, [&](int p, int lanes) KDTREE_INLINE { return div(load_some(x + p, lanes), d); });
}

// e^x to about 1 ulp for x in [-87, 88], clamped outside, NaN for NaN: x = n ln2 + r, a polynomial in r, times 2^n.
inline __attribute__((always_inline)) V exp(V x) {
  x = max(V::set(-87.0f), x);
  x = min(V::set(88.0f), x);
  const V magic = V::set(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const V t = fma(x, V::set(1.44269504f), magic);
  const V n = sub(t, magic);
  V r = fma(n, V::set(-0.693359375f), x);
  r = fma(n, V::set(2.12194440e-4f), r);
  V p = V::set(1.9875691500e-4f);
  p = fma(p, r, V::set(1.3981999507e-3f));
  p = fma(p, r, V::set(8.3334519073e-3f));
  p = fma(p, r, V::set(4.1665795894e-2f));
  p = fma(p, r, V::set(1.6666665459e-1f));
  p = fma(p, r, V::set(5.0000001201e-1f));
  p = fma(p, mul(r, r), r);
  p = add(p, V::set(1.0f));
  return mul(p, V::power_of_two(t));
}

void silu_mul(float* out, const float* gate, const float* up, int n) {
  const V one = V::set(1.0f);
  each(out, n, [&](int p, int lanes) KDTREE_INLINE {
    const V g = load_some(gate + p, lanes);
    return mul(div(g, add(one, exp(sub(V::zero(), g)))), load_some(up + p, lanes));
  });
}

void to_bf16(uint16_t* out, const float* x, int n) {
  for (int i = 0; i < n; ++i) out[i] = bf16_bits(x[i]);
}

void sigmoid(float* out, const float* x, int n) {
  const V one = V::set(1.0f);
  each(out, n, [&](int p, int lanes) KDTREE_INLINE {
    return div(one, add(one, exp(sub(V::zero(), load_some(x + p, lanes)))));
  });
}

float max_value(const float* x, int n, bool* finite) {
  V best = V::set(-INFINITY), probe = V::zero();
  int p = 0;
  for (; p + 16 <= n; p += 16) {
    const V a = V::load(x + p);
    best = max(a, best);
    probe = fma(a, V::zero(), probe);  // NaN as soon as an element is NaN or infinite
  }
  float lanes[16], probes[16];
  best.store(lanes);
  probe.store(probes);
  float result = -INFINITY, check = 0.0f;
  for (int t = 0; t < 16; ++t) {
    result = lanes[t] > result ? lanes[t] : result;
    check += probes[t];
  }
  for (; p < n; ++p) {
    result = x[p] > result ? x[p] : result;
    check += x[p] * 0.0f;
  }
  *finite = check == 0.0f;
  return result;
}

float exp_sum(float* x, float shift, int n) {
  V acc = V::zero();
  const V s = V::set(shift);
  int p = 0;
  for (; p + 16 <= n; p += 16) {
    const V e = exp(sub(V::load(x + p), s));
    e.store(x + p);
    acc = add(acc, e);
  }
  if (p < n) {
    float tail[16] = {};
    exp(sub(load_tail(x + p, n - p), s)).store(tail);
    for (int t = n - p; t < 16; ++t) tail[t] = 0.0f;
    acc = add(acc, V::load(tail));
    for (int t = 0; t < n - p; ++t) x[p + t] = tail[t];
  }
  return tree_sum(acc);
}

}  // namespace

extern const Kernels table;
const Kernels table = {KDTREE_ISA_NAME,
                       gemm_plain<float>,
                       gemm_plain<uint16_t>,
                       gemm_int4,
                       pack_units<float>,
                       pack_units<uint16_t>,
                       weighted_rows<float>,
                       weighted_rows<uint16_t>,
                       sum_squares,
                       scale_by,
                       divide,
                       silu_mul,
                       to_bf16,
                       sigmoid,
                       max_value,
                       exp_sum};
