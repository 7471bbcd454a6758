// The choice of each row: argmax, or a Gumbel draw keyed by seed, position and token (docs/model.md).
#include <cmath>

#include "../philox.h"
#include "backend.h"

namespace kdtree::cpu {
namespace {

int sample(const float* logits, int vocab, double temperature, uint32_t position, uint32_t seed_lo, uint32_t seed_hi) {
  int best = 0;
  double best_value = -INFINITY;
  for (int v = 0; v < vocab; ++v) {
    const double u = (philox(static_cast<uint32_t>(v), position, 0, 0, seed_lo, seed_hi).w[0] + 0.5) / 4294967296.0;
    const double value = logits[v] / temperature - std::log(-std::log(u));
    if (value > best_value) {
      best = v;
      best_value = value;
    }
  }
  return best;
}

}  // namespace

size_t CpuBackend::select_scratch(int max_rows, int) const { return static_cast<size_t>(max_rows); }

void CpuBackend::select(const SelectArgs& a) {
  const int m = active_rows(&a.state->n_rows, a.rows.max_rows);
  auto* bad = static_cast<unsigned char*>(a.scratch);
  const auto row = [&](int i) {
    const float* logits = a.logits + static_cast<size_t>(i) * a.vocab;
    bool finite = true;
    const float best = k_.max_value(logits, a.vocab, &finite);
    int choice = 0;
    if (finite && a.temperature > 0.0) {
      const auto position = static_cast<uint32_t>(a.state->kv_len + a.rows.depths[i]);
      choice = sample(logits, a.vocab, a.temperature, position, a.state->seed_lo, a.state->seed_hi);
    } else if (finite) {
      while (logits[choice] != best) ++choice;
    }
    bad[i] = finite ? 0 : 1;
    a.choice[i] = choice;
  };
  threads_.run(m, static_cast<double>(m) * a.vocab * (a.temperature > 0.0 ? 100.0 : 1.0), row);
  for (int i = 0; i < m; ++i) {
    if (bad[i]) raise_fault(a.state, kFaultLogitsNonFinite, i, 0);
  }
  count("select");
}

}  // namespace kdtree::cpu
