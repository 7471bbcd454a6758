// Embedding rows and RMS norms. Bound by memory; 4 bytes read and written an element.
#include <cmath>
#include <cstring>

#include "../bf16.h"
#include "backend.h"

namespace kdtree::cpu {

void CpuBackend::embed(const EmbedArgs& a) {
  const int m = active_rows(a.n_rows, a.rows.max_rows);
  for (int i = 0; i < m; ++i) {
    const size_t dim = static_cast<size_t>(a.table.k), at = static_cast<size_t>(a.rows.tokens[i]) * a.stride;
    float* out = a.out + static_cast<size_t>(i) * dim;
    if (a.table.kind == WeightKind::kBf16) {
      from_bf16(out, static_cast<const uint16_t*>(a.table.data) + at, dim);
    } else {
      std::memcpy(out, static_cast<const float*>(a.table.data) + at, sizeof(float) * dim);
    }
  }
  count("embed");
}

float CpuBackend::norm_factor(const float* x, float eps, int dim) const {
  const float mean = k_.sum_squares(x, dim) / static_cast<float>(dim);
  return 1.0f / std::sqrt(mean + eps);
}

void CpuBackend::norm_row(float* out, const float* x, const float* w, float eps, int dim) const {
  k_.scale_by(out, x, norm_factor(x, eps, dim), w, dim);
}

void CpuBackend::rms_norm(float* out, const float* x, const float* w, float eps, int dim, int max_rows, const int32_t* n_rows) {
  const int m = active_rows(n_rows, max_rows);
  for (int i = 0; i < m; ++i) norm_row(out + static_cast<size_t>(i) * dim, x + static_cast<size_t>(i) * dim, w, eps, dim);
  count("rms_norm");
}

}  // namespace kdtree::cpu
