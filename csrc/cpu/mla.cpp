// MLA in absorbed form: prepare the query and the cache rows, attend over the latent cache, project the values.
//
// Attention: bytes (rank+rope)*4 a key and row block, flops 2*H*(2*rank+rope) a key and row; bound by arithmetic as all heads
// share a key. Keys are walked in logical order in chunks of 64 positions counted from 0; within a chunk the weighted sum takes
// keys in ascending order, between chunks the running maximum rescales. So nothing depends on M or on where a key lies.
#include <cmath>
#include <cstring>

#include "backend.h"

namespace kdtree::cpu {
namespace {

constexpr int kChunk = 64;      // positions; fixed by docs/model.md
constexpr int kHeadBlock = 16;  // heads that share a walk over the keys

void rotate(float* out, const float* x, const float* cos_sin, int dim) {
  for (int i = 0; i < dim / 2; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1], a = x[2 * i], b = x[2 * i + 1];
    out[2 * i] = a * c - b * s;
    out[2 * i + 1] = a * s + b * c;
  }
}

}  // namespace

void CpuBackend::mla_prepare(const MlaPrepareArgs& a) {
  const MlaDims& d = a.dims;
  const int m = active_rows(&a.state->n_rows, a.rows.max_rows), base = a.state->kv_len;
  const auto angles = [&](int row) {
    return a.cos_sin + static_cast<size_t>(base + a.rows.depths[row]) * d.rope;
  };
  for (int i = 0; i < m; ++i) {
    const float* kv = a.kv + static_cast<size_t>(i) * (d.rank + d.rope);
    const size_t slot = static_cast<size_t>(base) + i;
    norm_row(static_cast<float*>(a.cache.latent) + slot * d.rank, kv, a.kv_norm_w, a.eps, d.rank);
    rotate(static_cast<float*>(a.cache.k_rope) + slot * d.rope, kv + d.rank, angles(i), d.rope);
  }
  const int width = d.nope + d.rope;
  const auto head = [&](int h) {
    const float* rows[kChunk];
    const float* w = static_cast<const float*>(a.kv_b.data) + static_cast<size_t>(h) * (d.nope + d.v) * d.rank;
    for (int i = 0; i < m; ++i) {
      const float* q = a.q + (static_cast<size_t>(i) * d.heads + h) * width;
      rotate(static_cast<float*>(a.q_rope) + (static_cast<size_t>(i) * d.heads + h) * d.rope, q + d.nope, angles(i), d.rope);
    }
    const float* q = a.q + static_cast<size_t>(h) * width;
    float* out = static_cast<float*>(a.q_lat) + static_cast<size_t>(h) * d.rank;
    float one[kChunk];
    for (float& v : one) v = 1.0f;
    for (int n = 0; n < d.nope; n += kChunk) {  // the sum over nope goes on from chunk to chunk: times one, plus the next
      const int count = d.nope - n < kChunk ? d.nope - n : kChunk;
      for (int j = 0; j < count; ++j) rows[j] = w + static_cast<size_t>(n + j) * d.rank;
      for (int i = 0; i < m; i += kChunk) {
        const int some = m - i < kChunk ? m - i : kChunk;
        k_.weighted_sum(q + static_cast<size_t>(i) * d.heads * width + n, d.heads * width, some, rows, count, d.rank,
                        n == 0 ? nullptr : one, out + static_cast<size_t>(i) * d.heads * d.rank, d.heads * d.rank);
      }
    }
  };
  threads_.run(d.heads, static_cast<double>(m) * d.heads * d.nope * d.rank, head);
  count("mla_prepare");
}

size_t CpuBackend::attention_scratch(const MlaDims&, int, int) const { return 0; }

void CpuBackend::mla_attention(const MlaAttentionArgs& a) {
  const MlaDims& d = a.dims;
  const int m = active_rows(&a.state->n_rows, a.rows.max_rows), base = a.state->kv_len;
  const int blocks = (d.heads + kHeadBlock - 1) / kHeadBlock;
  const auto task = [&](int index) {
    const int row = index / blocks, first = index % blocks * kHeadBlock;
    const int heads = d.heads - first < kHeadBlock ? d.heads - first : kHeadBlock;
    const size_t at = static_cast<size_t>(row) * d.heads + first;
    const int32_t* path = a.rows.path + static_cast<size_t>(row) * a.rows.path_stride;
    const int keys = base + a.rows.depths[row] + 1;
    float* o_lat = static_cast<float*>(a.o_lat) + at * d.rank;
    const float *latent[kChunk], *k_rope[kChunk], *q_lat[kHeadBlock], *q_rope[kHeadBlock];
    float score[kHeadBlock * kChunk], rope[kHeadBlock * kChunk], best[kHeadBlock], sum[kHeadBlock], decay[kHeadBlock];
    for (int h = 0; h < heads; ++h) {
      q_lat[h] = static_cast<const float*>(a.q_lat) + (at + h) * d.rank;
      q_rope[h] = static_cast<const float*>(a.q_rope) + (at + h) * d.rope;
    }
    for (int t0 = 0; t0 < keys; t0 += kChunk) {
      const int n = keys - t0 < kChunk ? keys - t0 : kChunk;
      for (int t = 0; t < n; ++t) {
        const int position = t0 + t;
        const size_t slot = position < base ? position : base + path[position - base];
        latent[t] = static_cast<const float*>(a.cache.latent) + slot * d.rank;
        k_rope[t] = static_cast<const float*>(a.cache.k_rope) + slot * d.rope;
      }
      k_.gemm_f32(q_lat, heads, latent, n, d.rank, score, kChunk);
      k_.gemm_f32(q_rope, heads, k_rope, n, d.rope, rope, kChunk);
      for (int h = 0; h < heads; ++h) {
        float* s = score + h * kChunk;
        float top = t0 == 0 ? -INFINITY : best[h];
        for (int t = 0; t < n; ++t) {
          s[t] = a.scale * (s[t] + rope[h * kChunk + t]);
          top = s[t] > top ? s[t] : top;
        }
        const float part = k_.exp_sum(s, top, n);
        if (t0 == 0) {
          sum[h] = part;
        } else {
          float old = best[h];
          decay[h] = k_.exp_sum(&old, top, 1);
          sum[h] = sum[h] * decay[h] + part;
        }
        best[h] = top;
      }
      k_.weighted_sum(score, kChunk, heads, latent, n, d.rank, t0 == 0 ? nullptr : decay, o_lat, d.rank);
    }
    for (int h = 0; h < heads; ++h) k_.divide(o_lat + h * d.rank, sum[h], d.rank);
  };
  threads_.run(m * blocks, static_cast<double>(m) * (base + m) * d.heads * (2.0 * d.rank + d.rope), task);
  count("mla_attention");
}

void CpuBackend::mla_value(const MlaValueArgs& a) {
  const MlaDims& d = a.dims;
  const int m = active_rows(a.n_rows, a.max_rows);
  const auto head = [&](int h) {
    const float *rows[kChunk], *x[kChunk];
    const float* w = static_cast<const float*>(a.kv_b.data) + (static_cast<size_t>(h) * (d.nope + d.v) + d.nope) * d.rank;
    for (int i = 0; i < m; i += kChunk) {
      const int some = m - i < kChunk ? m - i : kChunk;
      for (int r = 0; r < some; ++r) x[r] = static_cast<const float*>(a.o_lat) + (static_cast<size_t>(i + r) * d.heads + h) * d.rank;
      float* out = static_cast<float*>(a.o) + (static_cast<size_t>(i) * d.heads + h) * d.v;
      for (int j = 0; j < d.v; j += kChunk) {
        const int n = d.v - j < kChunk ? d.v - j : kChunk;
        for (int t = 0; t < n; ++t) rows[t] = w + static_cast<size_t>(j + t) * d.rank;
        k_.gemm_f32(x, some, rows, n, d.rank, out + j, d.heads * d.v);
      }
    }
  };
  threads_.run(d.heads, static_cast<double>(m) * d.heads * d.v * d.rank, head);
  count("mla_value");
}

}  // namespace kdtree::cpu
