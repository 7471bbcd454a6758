// MLA in absorbed form: prepare the query and the cache rows, attend over the latent cache, project the values.
//
// Attention: bytes (rank+rope) elements a key and row block, flops 2*H*(2*rank+rope) a key and row; bound by arithmetic as all
// heads share a key. Keys are walked in logical order in chunks of 64 positions counted from 0; within a chunk the weighted sum takes
// keys in ascending order, between chunks the running maximum rescales. So nothing depends on M or on where a key lies.
//
// Each operation is written once over T, the type of what only products read: float, or uint16_t for bf16.
#include <cstring>

#include "../bf16.h"
#include "backend.h"
#include "softmax.h"

namespace kdtree::cpu {
namespace {

constexpr int kSlice = 256;  // latent columns of a row block that are summed on the stack

void store(float& out, float value) { out = value; }
void store(uint16_t& out, float value) { out = bf16_bits(value); }
void store(const Kernels&, float* out, const float* x, int n) { std::memcpy(out, x, sizeof(float) * static_cast<size_t>(n)); }
void store(const Kernels& k, uint16_t* out, const float* x, int n) { k.to_bf16(out, x, n); }

// What a product reads, held as f32.
float rounded(float value, const float*) { return value; }
float rounded(float value, const uint16_t*) { return bf16_value(bf16_bits(value)); }

void gemm(const Kernels& k, const float* const* x, int m, const float* const* w, int n, int depth, float* y, int ldy) {
  k.gemm_f32(x, m, w, n, depth, y, ldy);
}
void gemm(const Kernels& k, const uint16_t* const* x, int m, const uint16_t* const* w, int n, int depth, float* y, int ldy) {
  k.gemm_bf16(x, m, w, n, depth, y, ldy);
}
void weigh(const Kernels& k, const float* coef, int ldc, int m, const float* const* row, int t, int n, const float* decay, float* y,
           int ldy) {
  k.weighted_sum(coef, ldc, m, row, t, n, decay, y, ldy);
}
void weigh(const Kernels& k, const float* coef, int ldc, int m, const uint16_t* const* row, int t, int n, const float* decay,
           float* y, int ldy) {
  k.weighted_sum_bf16(coef, ldc, m, row, t, n, decay, y, ldy);
}

template <class T>
void rotate(T* out, const float* x, const float* cos_sin, int dim) {
  for (int i = 0; i < dim / 2; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1], a = x[2 * i], b = x[2 * i + 1];
    store(out[2 * i], a * c - b * s);
    store(out[2 * i + 1], a * s + b * c);
  }
}

}  // namespace

template <class T>
void CpuBackend::prepare(const MlaPrepareArgs& a) {
  const MlaDims& d = a.dims;
  const int m = active_rows(&a.state->n_rows, a.rows.max_rows), base = a.state->kv_len;
  auto *latent = static_cast<T*>(a.cache.latent), *k_rope = static_cast<T*>(a.cache.k_rope);
  auto *q_lat = static_cast<T*>(a.q_lat), *q_rope = static_cast<T*>(a.q_rope);
  const auto angles = [&](int row) {
    return a.cos_sin + static_cast<size_t>(base + a.rows.depths[row]) * d.rope;
  };
  for (int i = 0; i < m; ++i) {
    const float* kv = a.kv + static_cast<size_t>(i) * (d.rank + d.rope);
    const size_t slot = static_cast<size_t>(base) + i;
    const float factor = norm_factor(kv, a.eps, d.rank);
    for (int r = 0; r < d.rank; r += kSlice) {
      const int n = d.rank - r < kSlice ? d.rank - r : kSlice;
      float part[kSlice];
      k_.scale_by(part, kv + r, factor, a.kv_norm_w + r, n);
      store(k_, latent + slot * d.rank + r, part, n);
    }
    rotate(k_rope + slot * d.rope, kv + d.rank, angles(i), d.rope);
  }
  const int width = d.nope + d.rope;
  const auto head = [&](int h) {
    const T* rows[kChunk];
    const T* w = static_cast<const T*>(a.kv_b.data) + static_cast<size_t>(h) * (d.nope + d.v) * d.rank;
    for (int i = 0; i < m; ++i) {
      const float* q = a.q + (static_cast<size_t>(i) * d.heads + h) * width;
      rotate(q_rope + (static_cast<size_t>(i) * d.heads + h) * d.rope, q + d.nope, angles(i), d.rope);
    }
    float one[kHeadBlock], coef[kHeadBlock * kChunk], sum[kHeadBlock * kSlice];
    for (float& v : one) v = 1.0f;
    for (int i = 0; i < m; i += kHeadBlock) {
      const int some = m - i < kHeadBlock ? m - i : kHeadBlock;
      for (int r = 0; r < d.rank; r += kSlice) {
        const int columns = d.rank - r < kSlice ? d.rank - r : kSlice;
        for (int n = 0; n < d.nope; n += kChunk) {  // the sum over nope goes on from chunk to chunk: times one, plus the next
          const int count = d.nope - n < kChunk ? d.nope - n : kChunk;
          for (int j = 0; j < count; ++j) rows[j] = w + static_cast<size_t>(n + j) * d.rank + r;
          for (int s = 0; s < some; ++s) {
            const float* q = a.q + (static_cast<size_t>(i + s) * d.heads + h) * width + n;
            for (int j = 0; j < count; ++j) coef[s * kChunk + j] = rounded(q[j], w);
          }
          weigh(k_, coef, kChunk, some, rows, count, columns, n == 0 ? nullptr : one, sum, kSlice);
        }
        for (int s = 0; s < some; ++s) {
          store(k_, q_lat + (static_cast<size_t>(i + s) * d.heads + h) * d.rank + r, sum + s * kSlice, columns);
        }
      }
    }
  };
  threads_.run(d.heads, static_cast<double>(m) * d.heads * d.nope * d.rank, head);
}

void CpuBackend::mla_prepare(const MlaPrepareArgs& a) {
  const bool bf16 = a.dims.numerics == Numerics::kBf16;
  bf16 ? prepare<uint16_t>(a) : prepare<float>(a);
  count(bf16 ? "mla_prepare_bf16" : "mla_prepare");
}

size_t CpuBackend::attention_scratch(const MlaDims& d, int max_rows, int) const {
  // bf16 results are summed in f32 here before they are rounded.
  return d.numerics == Numerics::kBf16 ? sizeof(float) * static_cast<size_t>(max_rows) * d.heads * d.rank : 0;
}

template <class T>
void CpuBackend::attend(const MlaAttentionArgs& a) {
  const MlaDims& d = a.dims;
  constexpr bool kHeld = sizeof(T) != sizeof(float);
  const int m = active_rows(&a.state->n_rows, a.rows.max_rows), base = a.state->kv_len;
  const int blocks = (d.heads + kHeadBlock - 1) / kHeadBlock;
  const auto task = [&](int index) {
    const int row = index / blocks, first = index % blocks * kHeadBlock;
    const int heads = d.heads - first < kHeadBlock ? d.heads - first : kHeadBlock;
    const size_t at = static_cast<size_t>(row) * d.heads + first;
    const int32_t* path = a.rows.path + static_cast<size_t>(row) * a.rows.path_stride;
    const int keys = base + a.rows.depths[row] + 1;
    float* o_lat = static_cast<float*>(kHeld ? a.scratch : a.o_lat) + at * d.rank;
    const T *latent[kChunk], *k_rope[kChunk], *q_lat[kHeadBlock], *q_rope[kHeadBlock];
    float score[kHeadBlock * kChunk], rope[kHeadBlock * kChunk], best[kHeadBlock], sum[kHeadBlock], decay[kHeadBlock];
    for (int h = 0; h < heads; ++h) {
      q_lat[h] = static_cast<const T*>(a.q_lat) + (at + h) * d.rank;
      q_rope[h] = static_cast<const T*>(a.q_rope) + (at + h) * d.rope;
    }
    for (int t0 = 0; t0 < keys; t0 += kChunk) {
      const int n = keys - t0 < kChunk ? keys - t0 : kChunk;
      for (int t = 0; t < n; ++t) {
        const int position = t0 + t;
        const size_t slot = position < base ? position : base + path[position - base];
        latent[t] = static_cast<const T*>(a.cache.latent) + slot * d.rank;
        k_rope[t] = static_cast<const T*>(a.cache.k_rope) + slot * d.rope;
      }
      gemm(k_, q_lat, heads, latent, n, d.rank, score, kChunk);
      gemm(k_, q_rope, heads, k_rope, n, d.rope, rope, kChunk);
      for (int h = 0; h < heads; ++h) {
        float* s = score + h * kChunk;
        for (int t = 0; t < n; ++t) s[t] = a.scale * (s[t] + rope[h * kChunk + t]);
        decay[h] = softmax_step(k_, s, n, t0 == 0, best[h], sum[h]);
        if (kHeld) round_bf16(s, static_cast<size_t>(n));
      }
      weigh(k_, score, kChunk, heads, latent, n, d.rank, t0 == 0 ? nullptr : decay, o_lat, d.rank);
    }
    for (int h = 0; h < heads; ++h) {
      k_.divide(o_lat + h * d.rank, sum[h], d.rank);
      if (kHeld) store(k_, static_cast<T*>(a.o_lat) + (at + h) * d.rank, o_lat + h * d.rank, d.rank);
    }
  };
  threads_.run(m * blocks, static_cast<double>(m) * (base + m) * d.heads * (2.0 * d.rank + d.rope), task);
}

void CpuBackend::mla_attention(const MlaAttentionArgs& a) {
  const bool bf16 = a.dims.numerics == Numerics::kBf16;
  bf16 ? attend<uint16_t>(a) : attend<float>(a);
  count(bf16 ? "mla_attention_bf16" : "mla_attention");
}

template <class T>
void CpuBackend::values(const MlaValueArgs& a) {
  const MlaDims& d = a.dims;
  const int m = active_rows(a.n_rows, a.max_rows);
  const auto head = [&](int h) {
    const T *rows[kChunk], *x[kChunk];
    const T* w = static_cast<const T*>(a.kv_b.data) + (static_cast<size_t>(h) * (d.nope + d.v) + d.nope) * d.rank;
    float y[kChunk * kChunk];
    for (int i = 0; i < m; i += kChunk) {
      const int some = m - i < kChunk ? m - i : kChunk;
      for (int r = 0; r < some; ++r) x[r] = static_cast<const T*>(a.o_lat) + (static_cast<size_t>(i + r) * d.heads + h) * d.rank;
      T* out = static_cast<T*>(a.o) + (static_cast<size_t>(i) * d.heads + h) * d.v;
      for (int j = 0; j < d.v; j += kChunk) {
        const int n = d.v - j < kChunk ? d.v - j : kChunk;
        for (int t = 0; t < n; ++t) rows[t] = w + static_cast<size_t>(j + t) * d.rank;
        gemm(k_, x, some, rows, n, d.rank, y, kChunk);
        for (int r = 0; r < some; ++r) store(k_, out + static_cast<size_t>(r) * d.heads * d.v + j, y + r * kChunk, n);
      }
    }
  };
  threads_.run(d.heads, static_cast<double>(m) * d.heads * d.v * d.rank, head);
}

void CpuBackend::mla_value(const MlaValueArgs& a) {
  const bool bf16 = a.dims.numerics == Numerics::kBf16;
  bf16 ? values<uint16_t>(a) : values<float>(a);
  count(bf16 ? "mla_value_bf16" : "mla_value");
}

}  // namespace kdtree::cpu
