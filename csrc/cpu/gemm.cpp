// linear(): y = W x for f32 and INT4 weights, the input normed on the way, with its epilogues.
//
// Bytes: the weights once (4 or 0.5625 a weight), as rows share them within a strip; flops 2*M*N*K. At few rows bound by
// memory, so outputs are cut into strips of kStrip that threads take one by one. Reduction order: kernels.h.
#include "gemm.h"

#include <cstring>

#include "backend.h"

namespace kdtree::cpu {

Packed::Packed(const Kernels& k, const Weight& w, float* scratch) : k_(k), int4_(w.kind == WeightKind::kInt4), scratch_(scratch) {
  stride_ = int4_ ? int4_groups(w.k) * kGroup : w.k;
}

const float* Packed::row(const float* x, int k, int at) {
  if (!int4_) return x;
  float* out = scratch_ + static_cast<size_t>(at) * stride_;
  k_.pack_int4(out, x, k);
  return out;
}

void gemm_strip(const Kernels& k, const Weight& w, int expert, const float* const* x, int m, int first, int n, float* y, int ldy) {
  const size_t row = static_cast<size_t>(expert) * w.step() + first;
  if (w.kind == WeightKind::kInt4) {
    const int groups = int4_groups(w.k);
    const auto* q = static_cast<const uint8_t*>(w.data) + row * groups * kGroupBytes;
    k.gemm_int4(x, m, q, w.scale + row * groups, n, groups, y, ldy);
    return;
  }
  const float* rows[kStrip];
  for (int j = 0; j < n; ++j) rows[j] = static_cast<const float*>(w.data) + (row + j) * w.k;
  k.gemm_f32(x, m, rows, n, w.k, y, ldy);
}

size_t CpuBackend::linear_scratch(int, int k, int max_rows) const {
  // The normed rows, the packed rows, and a pointer to each row of either.
  return static_cast<size_t>(max_rows) * (sizeof(float) * (k + int4_groups(k) * kGroup) + sizeof(float*)) + 64;
}

void CpuBackend::linear(const LinearArgs& a) {
  const int m = active_rows(a.n_rows, a.max_rows), k = a.w[0].k;
  const bool int4 = a.w[0].kind == WeightKind::kInt4;
  auto** x = static_cast<const float**>(a.scratch);
  float* normed = reinterpret_cast<float*>(x + a.max_rows);
  Packed packed(k_, a.w[0], normed + static_cast<size_t>(a.max_rows) * k);
  for (int i = 0; i < m; ++i) {
    const float* row = static_cast<const float*>(a.x) + static_cast<size_t>(i) * a.ldx;
    if (a.norm_w != nullptr) {
      float* out = normed + static_cast<size_t>(i) * k;
      norm_row(out, row, a.norm_w, a.eps, k);
      row = out;
    }
    x[i] = packed.row(row, k, i);
  }
  const bool gated = a.epilogue == Epilogue::kSiluMul;
  int strips[2] = {0, 0}, columns = 0;
  for (int p = 0; p < a.parts; ++p) {
    strips[p] = (a.w[p].n + kStrip - 1) / kStrip;
    columns += a.w[p].n;
  }
  const auto strip = [&](int task) {
    const int part = gated || task < strips[0] ? 0 : 1;
    const int first = (part == 0 ? task : task - strips[0]) * kStrip;
    const int n = a.w[part].n - first < kStrip ? a.w[part].n - first : kStrip;
    float y[kBlock * kStrip], up[kBlock * kStrip];
    for (int i = 0; i < m; i += kBlock) {
      const int rows = m - i < kBlock ? m - i : kBlock;
      gemm_strip(k_, a.w[part], 0, x + i, rows, first, n, y, kStrip);
      if (gated) gemm_strip(k_, a.w[1], 0, x + i, rows, first, n, up, kStrip);
      for (int r = 0; r < rows; ++r) {
        float* out = static_cast<float*>(a.out[part]) + static_cast<size_t>(i + r) * a.ldo[part] + first;
        const float* from = y + r * kStrip;
        if (gated) {
          k_.silu_mul(out, from, up + r * kStrip, n);
        } else if (a.epilogue == Epilogue::kResidual) {
          for (int j = 0; j < n; ++j) out[j] += from[j];
        } else {
          std::memcpy(out, from, sizeof(float) * n);
        }
      }
    }
  };
  threads_.run(gated ? strips[0] : strips[0] + strips[1], static_cast<double>(m) * columns * k, strip);
  count(int4 ? "linear_int4" : "linear_f32");
}

}  // namespace kdtree::cpu
