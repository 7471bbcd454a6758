// Router and mixture of experts.
//
// Experts: bytes are the weights of the distinct experts once (a strip of an expert serves all rows that chose it), flops
// 2*M*k*3*I*D. Products are kept per (row, choice) and added in the order of choice, so no other row has a say in a row's sum.
#include <cmath>
#include <cstring>

#include "backend.h"
#include "gemm.h"

namespace kdtree::cpu {
namespace {

// The index of the greatest value in [first, last) that is not taken; ties go to the lowest index.
int best_of(const float* value, const unsigned char* taken, int first, int last) {
  int best = -1;
  for (int e = first; e < last; ++e) {
    if (!taken[e] && (best < 0 || value[e] > value[best])) best = e;
  }
  return best;
}

// Marks as taken every expert of the groups that are not kept. `value` are the biased scores.
void mask_groups(const RouterArgs& a, const float* value, unsigned char* taken, float* group_score, unsigned char* kept) {
  const int size = a.experts / a.n_group;
  for (int g = 0; g < a.n_group; ++g) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      if (value[e] > first) {
        second = first;
        first = value[e];
      } else if (value[e] > second) {
        second = value[e];
      }
    }
    group_score[g] = first + second;
    kept[g] = 0;
  }
  for (int i = 0; i < a.topk_group; ++i) kept[best_of(group_score, kept, 0, a.n_group)] = 1;
  for (int e = 0; e < a.experts; ++e) taken[e] = kept[e / size] ? 0 : 1;
}

}  // namespace

void CpuBackend::router(const RouterArgs& a) {
  const int m = active_rows(&a.state->n_rows, a.max_rows), experts = a.experts;
  floats_.resize(static_cast<size_t>(2 * experts + a.n_group));  // grows at the first call only
  flags_.resize(static_cast<size_t>(experts + a.n_group));
  float *score = floats_.data(), *value = score + experts, *group_score = value + experts;
  unsigned char *taken = flags_.data(), *kept = taken + experts;
  for (int i = 0; i < m; ++i) {
    const float* logits = a.logits + static_cast<size_t>(i) * experts;
    int32_t* ids = a.ids + static_cast<size_t>(i) * a.top_k;
    float* weights = a.weights + static_cast<size_t>(i) * a.top_k;
    k_.sigmoid(score, logits, experts);
    bool finite = true;
    for (int e = 0; e < experts; ++e) {
      value[e] = score[e] + a.bias[e];
      finite = finite && std::isfinite(logits[e]) && std::isfinite(value[e]);
    }
    if (!finite) {
      raise_fault(a.state, kFaultRouterNonFinite, i, a.layer);
      for (int j = 0; j < a.top_k; ++j) {
        ids[j] = j;
        weights[j] = 0.0f;
      }
      continue;
    }
    std::memset(taken, 0, static_cast<size_t>(experts));
    if (a.n_group > 1) mask_groups(a, value, taken, group_score, kept);
    float sum = 0.0f;
    for (int j = 0; j < a.top_k; ++j) {
      const int e = best_of(value, taken, 0, experts);
      taken[e] = 1;
      ids[j] = e;
      weights[j] = score[e];
      sum += score[e];
    }
    for (int j = 0; j < a.top_k; ++j) {
      if (a.norm_topk) weights[j] /= sum + 1e-20f;
      weights[j] *= a.scaling;
    }
  }
  count("router");
}

namespace {

// Where moe() keeps what it needs between its phases; all in the scratch it is handed.
struct MoePlan {
  float *normed, *packed, *packed_act, *product, *shared;
  uint16_t* narrow;  // the normed rows as bf16, for a shared expert beside INT4 ones
  const void **x, **act, **shared_x;
  const float** products;  // of one row
  int32_t *slots, *starts, *active;  // slots (row*top_k + choice) ordered by expert; first slot of each; experts in use

  // base null: only the size is wanted.
  size_t lay_out(char* base, int rows, int top_k, int experts, int inner, int dim) {
    size_t at = 0;
    const auto take = [&](auto*& p, size_t n) {
      p = base == nullptr ? nullptr : reinterpret_cast<std::remove_reference_t<decltype(p)>>(base + at);
      at += (n * sizeof(*p) + 63) / 64 * 64;
    };
    const size_t m = static_cast<size_t>(rows), all = m * static_cast<size_t>(top_k);
    take(normed, m * dim);
    take(packed, m * packed_floats(dim));
    take(packed_act, all * packed_floats(inner));
    take(product, all * dim);
    take(shared, m * dim);
    take(narrow, m * dim);
    take(x, all);
    take(act, all);
    take(shared_x, 2 * m);
    take(products, static_cast<size_t>(top_k));
    take(slots, all);
    take(starts, static_cast<size_t>(experts) + 1);
    take(active, static_cast<size_t>(experts));
    return at;
  }

  // Orders the slots by expert; returns how many experts are in use.
  int group(const int32_t* ids, int m, int top_k, int experts) const {
    std::memset(starts, 0, sizeof(int32_t) * (static_cast<size_t>(experts) + 1));
    for (int s = 0; s < m * top_k; ++s) ++starts[ids[s] + 1];
    int used = 0;
    for (int e = 0; e < experts; ++e) {
      if (starts[e + 1] > 0) active[used++] = e;
      starts[e + 1] += starts[e];
    }
    for (int s = m * top_k - 1; s >= 0; --s) slots[--starts[ids[s] + 1]] = s;
    // The countdown moved each start one place up: slots of expert e are [starts[e+1], starts[e+2]).
    for (int e = 0; e < experts; ++e) starts[e] = starts[e + 1];
    starts[experts] = m * top_k;
    return used;
  }
};

// One strip of one expert's (or the shared one's) outputs for all its rows, handed to `store` in blocks.
template <class Store>
void strip(const Weight& w, int expert, const void* const* x, int rows, int first, const Store& store) {
  const int width = strip_of(w), n = w.n - first < width ? w.n - first : width;
  for (int r = 0; r < rows; r += kBlock) store(x + r, r, rows - r < kBlock ? rows - r : kBlock, first, n, expert);
}

}  // namespace

size_t CpuBackend::moe_scratch(int max_rows, int top_k, int experts, int inner, int dim) const {
  return MoePlan{}.lay_out(nullptr, max_rows, top_k, experts, inner, dim);
}

void CpuBackend::moe(const MoeArgs& a) {
  if (a.phase != MoePhase::kDown) moe_gate_up(a);
  if (a.gathered != nullptr) unshard(acts_of(a));
  if (a.phase != MoePhase::kGateUp) moe_down(a);
  const bool bf16 = a.numerics == Numerics::kBf16;
  count(a.gate.kind == WeightKind::kInt4 ? (bf16 ? "experts_int4_bf16" : "experts_int4") : bf16 ? "experts_bf16" : "experts_f32");
}

void CpuBackend::moe_gate_up(const MoeArgs& a) {
  const int m = active_rows(a.n_rows, a.max_rows), dim = a.dim, inner = a.gate.n, k = a.top_k;
  const int shared_inner = a.shared_gate.n;
  MoePlan plan{};
  plan.lay_out(static_cast<char*>(a.scratch), a.max_rows, k, a.gate.e, a.down.k, dim);
  Packed packed(k_, a.gate, a.numerics, plan.packed);
  const int used = plan.group(a.ids, m, k, a.gate.e);
  const void** row = plan.shared_x;
  const auto narrowed = [&](int i, const float* b) {
    uint16_t* out = plan.narrow + static_cast<size_t>(i) * dim;
    k_.to_bf16(out, b, dim);
    return out;
  };
  for (int i = 0; i < m; ++i) {
    float* b = plan.normed + static_cast<size_t>(i) * dim;
    norm_row(b, a.x + static_cast<size_t>(i) * dim, a.norm_w, a.eps, dim);
    const void* x = packed.normed(b, i);
    // The shared expert is never INT4: its rows are the normed ones, or for bf16 what the experts get unless they are INT4.
    row[i] = a.numerics == Numerics::kF32 ? b : a.gate.kind == WeightKind::kBf16 ? x : narrowed(i, b);
    for (int j = 0; j < k; ++j) plan.act[i * k + j] = x;  // by slot, for the moment
  }
  for (int p = 0; p < m * k; ++p) plan.x[p] = plan.act[plan.slots[p]];  // in the order of plan.slots

  const auto gate_up = [&](const Weight& gate, const Weight& up, const int32_t* slots, void* act) {
    return [&gate, &up, &a, slots, act, this](const void* const* x, int r, int rows, int first, int n, int expert) {
      float g[kBlock * kStrip], u[kBlock * kStrip];
      gemm_strip(k_, gate, expert, x, rows, first, n, g, kStrip);
      gemm_strip(k_, up, expert, x, rows, first, n, u, kStrip);
      for (int i = 0; i < rows; ++i) {
        const size_t slot = static_cast<size_t>(slots == nullptr ? r + i : slots[r + i]);
        float* both = g + i * kStrip;
        k_.silu_mul(both, both, u + i * kStrip, n);
        store_held(k_, act, slot * gate.n + first, both, n, a.numerics);
      }
    };
  };
  const int gate_strips = strips_of(a.gate), shared_strips = strips_of(a.shared_gate);
  threads_.run(used * gate_strips + shared_strips, 2.0 * m * dim * (k * inner + shared_inner), [&](int task) {
    const int u = task / gate_strips;
    if (u >= used) {
      const int first = (task - used * gate_strips) * strip_of(a.shared_gate);
      strip(a.shared_gate, 0, row, m, first, gate_up(a.shared_gate, a.shared_up, nullptr, a.shared_act));
      return;
    }
    const int e = plan.active[u], begin = plan.starts[e], rows = plan.starts[e + 1] - begin;
    strip(a.gate, e, plan.x + begin, rows, task % gate_strips * strip_of(a.gate), gate_up(a.gate, a.up, plan.slots + begin, a.act));
  });
}

void CpuBackend::moe_down(const MoeArgs& a) {
  const int m = active_rows(a.n_rows, a.max_rows), dim = a.down.n, inner = a.down.k, k = a.top_k;
  const bool has_shared = a.shared_down.n > 0;
  MoePlan plan{};
  plan.lay_out(static_cast<char*>(a.scratch), a.max_rows, k, a.down.e, inner, a.dim);
  Packed packed_act(k_, a.down, a.numerics, plan.packed_act);
  const size_t item = held_bytes(a.numerics);
  const int used = plan.group(a.ids, m, k, a.down.e);
  const void** shared_act = plan.shared_x;
  for (int i = 0; i < m; ++i) shared_act[i] = static_cast<const char*>(a.shared_act) + static_cast<size_t>(i) * a.shared_down.k * item;
  for (int p = 0; p < m * k; ++p) {
    plan.act[p] = packed_act.held(static_cast<const char*>(a.act) + static_cast<size_t>(plan.slots[p]) * inner * item, p);
  }
  const auto down = [&](const Weight& w, const int32_t* slots, float* out) {
    return [&w, slots, out, this](const void* const* x, int r, int rows, int first, int n, int expert) {
      float y[kBlock * kStrip];
      gemm_strip(k_, w, expert, x, rows, first, n, y, kStrip);
      for (int i = 0; i < rows; ++i) {
        const size_t slot = static_cast<size_t>(slots == nullptr ? r + i : slots[r + i]);
        std::memcpy(out + slot * w.n + first, y + i * kStrip, sizeof(float) * n);
      }
    };
  };
  const int down_strips = strips_of(a.down), shared_strips = has_shared ? strips_of(a.shared_down) : 0;
  threads_.run(used * down_strips + shared_strips, 1.0 * m * dim * (k * inner + a.shared_down.k), [&](int task) {
    const int u = task / down_strips;
    if (u >= used) {
      const int first = (task - used * down_strips) * strip_of(a.shared_down);
      strip(a.shared_down, 0, shared_act, m, first, down(a.shared_down, nullptr, plan.shared));
      return;
    }
    const int e = plan.active[u], begin = plan.starts[e], rows = plan.starts[e + 1] - begin;
    strip(a.down, e, plan.act + begin, rows, task % down_strips * strip_of(a.down), down(a.down, plan.slots + begin, plan.product));
  });

  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < k; ++j) plan.products[j] = plan.product + (static_cast<size_t>(i) * k + j) * dim;
    float* sum = plan.normed;  // free by now
    k_.weighted_sum(a.weights + static_cast<size_t>(i) * k, k, 1, plan.products, k, dim, nullptr, sum, dim);
    const float* shared = plan.shared + static_cast<size_t>(i) * dim;
    float* out = a.out + static_cast<size_t>(i) * dim;
    for (int d = 0; d < dim; ++d) out[d] += has_shared ? sum[d] + shared[d] : sum[d];
  }
}

}  // namespace kdtree::cpu
