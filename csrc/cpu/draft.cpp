// The drafter's operations: rows gathered by an index, its block, its keys and values, and its attention without a mask.
//
// Attention: bytes 8*head_dim a key and head of keys, flops 4*head_dim a key and query; bound by arithmetic as a block's rows share
// the keys. Order: keys in chunks of 64 counted from 0, ascending within a chunk, a running maximum between chunks, so that a row's
// bits depend neither on the other rows nor on which keys are of the block.
#include <cmath>
#include <cstring>

#include "backend.h"
#include "softmax.h"

namespace kdtree::cpu {
namespace {

// Pairs (i, i + dim/2), in place.
void rotate_halves(float* x, const float* cos_sin, int dim) {
  for (int i = 0; i < dim / 2; ++i) {
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1], a = x[i], b = x[i + dim / 2];
    x[i] = a * c - b * s;
    x[i + dim / 2] = b * c + a * s;
  }
}

}  // namespace

void CpuBackend::gather_rows(const GatherArgs& a) {
  const int m = active_rows(a.n_rows, a.max_rows);
  for (int i = 0; i < m; ++i) {
    const int from = a.index != nullptr ? a.index[i] : i;
    std::memcpy(a.dst + static_cast<size_t>(i) * a.ldd, a.src + static_cast<size_t>(from) * a.dim, sizeof(float) * a.dim);
  }
  count("gather_rows");
}

void CpuBackend::draft_block(const DraftBlockArgs& a) {
  a.tokens[0] = a.state->bonus;
  for (int i = 1; i < a.block_size; ++i) a.tokens[i] = a.mask_id;
  a.state->draft_first = a.state->kv_len + 1;
  a.state->draft_rows = a.block_size - 1;
  count("draft_block");
}

void CpuBackend::draft_prepare(const DraftPrepareArgs& a) {
  const DraftDims& d = a.dims;
  const int m = active_rows(a.n_rows, a.max_rows), first = *a.first, w = d.head_dim;
  const int q_width = d.heads * w, kv_width = d.kv_heads * w;
  for (int i = 0; i < m; ++i) {
    const size_t slot = static_cast<size_t>(first) + i;
    const float* angles = a.cos_sin + slot * w;
    for (int h = 0; a.q != nullptr && h < d.heads; ++h) {
      float* q = a.q + static_cast<size_t>(i) * q_width + static_cast<size_t>(h) * w;
      norm_row(q, q, a.q_norm_w, a.eps, w);
      rotate_halves(q, angles, w);
    }
    for (int h = 0; h < d.kv_heads; ++h) {
      float* k = a.cache.k + slot * kv_width + static_cast<size_t>(h) * w;
      norm_row(k, a.k + static_cast<size_t>(i) * kv_width + static_cast<size_t>(h) * w, a.k_norm_w, a.eps, w);
      rotate_halves(k, angles, w);
    }
    std::memcpy(a.cache.v + slot * kv_width, a.v + static_cast<size_t>(i) * kv_width, sizeof(float) * kv_width);
  }
  count("draft_prepare");
}

void CpuBackend::draft_attention(const DraftAttentionArgs& a) {
  const DraftDims& d = a.dims;
  const int m = active_rows(a.n_rows, a.max_rows), keys = a.state->kv_len + m, w = d.head_dim;
  const int group = d.heads / d.kv_heads, blocks = (group + kHeadBlock - 1) / kHeadBlock, kv_width = d.kv_heads * w;
  const float scale = 1.0f / std::sqrt(static_cast<float>(w));
  const auto task = [&](int index) {
    const int row = index / (d.kv_heads * blocks), head = index / blocks % d.kv_heads, first = index % blocks * kHeadBlock;
    const int heads = group - first < kHeadBlock ? group - first : kHeadBlock;
    const size_t at = (static_cast<size_t>(row) * d.heads + static_cast<size_t>(head) * group + first) * w;
    const float *q[kHeadBlock], *k[kChunk], *v[kChunk];
    float score[kHeadBlock * kChunk], best[kHeadBlock], sum[kHeadBlock], decay[kHeadBlock];
    for (int h = 0; h < heads; ++h) q[h] = a.q + at + static_cast<size_t>(h) * w;
    for (int t0 = 0; t0 < keys; t0 += kChunk) {
      const int n = keys - t0 < kChunk ? keys - t0 : kChunk;
      for (int t = 0; t < n; ++t) {
        const size_t offset = static_cast<size_t>(t0 + t) * kv_width + static_cast<size_t>(head) * w;
        k[t] = a.cache.k + offset;
        v[t] = a.cache.v + offset;
      }
      k_.gemm_f32(q, heads, k, n, w, score, kChunk);
      for (int h = 0; h < heads; ++h) {
        float* s = score + h * kChunk;
        for (int t = 0; t < n; ++t) s[t] = scale * s[t];
        decay[h] = softmax_step(k_, s, n, t0 == 0, best[h], sum[h]);
      }
      k_.weighted_sum(score, kChunk, heads, v, n, w, t0 == 0 ? nullptr : decay, a.o + at, w);
    }
    for (int h = 0; h < heads; ++h) k_.divide(a.o + at + static_cast<size_t>(h) * w, sum[h], w);
  };
  threads_.run(m * d.kv_heads * blocks, 2.0 * m * keys * d.heads * w, task);
  count("draft_attention");
}

}  // namespace kdtree::cpu
