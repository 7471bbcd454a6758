// Embedding rows and RMS norms. Bound by memory; 4 bytes read and written an element.
#include <cmath>
#include <cstring>

#include "backend.h"

namespace kdtree::cpu {

void CpuBackend::embed(const EmbedArgs& a) {
  const int m = active_rows(a.n_rows, a.rows.max_rows);
  for (int i = 0; i < m; ++i) {
    const float* row = static_cast<const float*>(a.table.data) + static_cast<size_t>(a.rows.tokens[i]) * a.stride;
    std::memcpy(a.out + static_cast<size_t>(i) * a.table.k, row, sizeof(float) * a.table.k);
  }
  count("embed");
}

void CpuBackend::norm_row(float* out, const float* x, const float* w, float eps, int dim) const {
  const float mean = k_.sum_squares(x, dim) / static_cast<float>(dim);
  k_.scale_by(out, x, 1.0f / std::sqrt(mean + eps), w, dim);
}

void CpuBackend::rms_norm(float* out, const float* x, const float* w, float eps, int dim, int max_rows, const int32_t* n_rows) {
  const int m = active_rows(n_rows, max_rows);
  for (int i = 0; i < m; ++i) norm_row(out + static_cast<size_t>(i) * dim, x + static_cast<size_t>(i) * dim, w, eps, dim);
  count("rms_norm");
}

}  // namespace kdtree::cpu
