// The draft tree: its root alone (AR), the best-first build (DDTree, arXiv 2604.12989), and the walk that accepts.
// The arithmetic of log-sum-exp is docs/model.md's to the operation, none fused, so that every backend builds the same tree.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend.h"

namespace kdtree::cpu {
namespace {

constexpr int kSegment = 4096, kLanes = 256;  // docs/model.md

float exp32(float x) {
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even, as rint does for |x| < 2^22.
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float y = p * (r * r);
  y = y + r;
  y = y + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

float exp32_or_zero(float x) { return x < -87.0f ? 0.0f : exp32(x); }

float log32(float s) {
  int e;
  float f = std::frexp(s, &e);
  if (f < 0.707106781186547524f) {
    e -= 1;
    f = f + f;
  }
  const float z = f - 1.0f, n = static_cast<float>(e);
  float p = 7.0376836292e-2f;
  p = p * z + -1.1514610310e-1f;
  p = p * z + 1.1676998740e-1f;
  p = p * z + -1.2420140846e-1f;
  p = p * z + 1.4249322787e-1f;
  p = p * z + -1.6668057665e-1f;
  p = p * z + 2.0000714765e-1f;
  p = p * z + -2.4999993993e-1f;
  p = p * z + 3.3333331174e-1f;
  const float q = z * z;
  float y = z * q;
  y = y * p;
  y = y + n * -2.12194440e-4f;
  y = y - 0.5f * q;
  const float r = z + y;
  return r + n * 0.693359375f;
}

float segment_sum(const float* x, int n, float top) {
  float lane[kLanes] = {};
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    for (int t = 0; t < lanes; ++t) lane[t] += exp32_or_zero(x[i + t] - top);
  }
  for (int h = kLanes / 2; h > 0; h /= 2) {
    for (int t = 0; t < h; ++t) lane[t] += lane[t + h];
  }
  return lane[0];
}

}  // namespace

float lse32(const float* x, int n) {
  float top = -INFINITY;
  for (int i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
  float sum = 0.0f;
  for (int s = 0; s < n; s += kSegment) {
    const int len = n - s < kSegment ? n - s : kSegment;
    float m = -INFINITY;
    for (int i = 0; i < len; ++i) m = x[s + i] > m ? x[s + i] : m;
    if (m > -INFINITY) sum += segment_sum(x + s, len, m) * exp32_or_zero(m - top);
  }
  return top + log32(sum);
}

namespace {

struct Ranked {
  float logit;
  int32_t token;
};

// Greater logit first, then the lower token.
bool ranks_before(const Ranked& a, const Ranked& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// A node that may join the tree: the rank-th token at the depth below `parent`.
struct Candidate {
  double score;
  int32_t parent, rank;
};

struct Level {  // one depth of the draft
  int32_t count;  // tokens that may be used: the K best without those of logit -inf
  int32_t bad;    // NaN or +inf among the logits
};

struct TreePlan {
  Level* level;      // [depths]
  Ranked* best;      // [depths][K]
  float* log_prob;   // [depths][K]
  int32_t* ranks;    // [budget+1][depths]: the ranks along a node's path
  Candidate* heap;   // [2*budget+1]

  size_t lay_out(char* base, int top, int depths, int budget) {
    size_t at = 0;
    const auto take = [&](auto*& p, size_t n) {
      p = base == nullptr ? nullptr : reinterpret_cast<std::remove_reference_t<decltype(p)>>(base + at);
      at += (n * sizeof(*p) + 63) / 64 * 64;
    };
    const size_t d = static_cast<size_t>(depths), b = static_cast<size_t>(budget);
    take(level, d);
    take(best, d * static_cast<size_t>(top));
    take(log_prob, d * static_cast<size_t>(top));
    take(ranks, (b + 1) * d);
    take(heap, 2 * b + 1);
    return at;
  }
};

void rank_level(const float* logits, int vocab, int top, Level* level, Ranked* best, float* log_prob) {
  int n = 0;
  bool bad = false;
  for (int v = 0; v < vocab; ++v) {
    const float x = logits[v];
    bad = bad || !(x < INFINITY);
    if (!(x > -INFINITY)) continue;
    // A heap whose front is the worst of the best so far; a later token never displaces an equal earlier one.
    if (n < top) {
      best[n++] = {x, v};
      std::push_heap(best, best + n, ranks_before);
    } else if (x > best[0].logit) {
      std::pop_heap(best, best + n, ranks_before);
      best[n - 1] = {x, v};
      std::push_heap(best, best + n, ranks_before);
    }
  }
  level->bad = bad ? 1 : 0;
  level->count = bad ? 0 : n;
  if (level->count == 0) return;
  std::sort_heap(best, best + n, ranks_before);
  const float lse = lse32(logits, vocab);
  for (int r = 0; r < n; ++r) log_prob[r] = best[r].logit - lse;
}

void set_root(const Rows& rows, StepState* s) {
  rows.tokens[0] = s->bonus;
  rows.parents[0] = -1;
  rows.depths[0] = 0;
  rows.path[0] = 0;
  s->n_rows = 1;
}

// Depths the tree may have: the draft's reach, the block, and the tokens that are still allowed after the bonus.
int depth_limit(const TreeBuildArgs& a) {
  const StepState& s = *a.state;
  if (s.bonus == a.eos_id || a.budget < 1) return 0;
  const int first = s.kv_len + 1 - s.draft_first;  // the draft row of depth 1
  if (first < 0 || first >= s.draft_rows) return 0;
  return std::max(0, std::min({a.block_size - 1, s.draft_rows - first, s.limit - s.committed - 1}));
}

// The first rows of a best-first tree, as many as make expected accepted rows over cost greatest.
int rows_worth_their_cost(const double* scores, int n, const double* costs) {
  double expected = 1.0, best = 1.0 / costs[0];
  int kept = 1;
  for (int row = 1; row < n; ++row) {
    expected += static_cast<double>(exp32_or_zero(static_cast<float>(scores[row])));
    if (expected / costs[row] > best) {
      best = expected / costs[row];
      kept = row + 1;
    }
  }
  return kept;
}

}  // namespace

void CpuBackend::tree_root(const Rows& rows, StepState* state) {
  set_root(rows, state);
  count("tree_root");
}

size_t CpuBackend::tree_scratch(int vocab, int block_size, int budget) const {
  return TreePlan{}.lay_out(nullptr, std::min(budget, vocab), std::max(0, block_size - 1), budget);
}

void CpuBackend::tree_build(const TreeBuildArgs& a) {
  StepState* s = a.state;
  count("tree_build");
  set_root(a.rows, s);
  a.scores[0] = 0.0;
  const int top = std::min(a.chain ? 1 : a.budget, a.vocab), depths = depth_limit(a), stride = std::max(0, a.block_size - 1);
  if (depths == 0) return;
  TreePlan plan{};
  plan.lay_out(static_cast<char*>(a.scratch), top, stride, a.budget);
  const float* draft = a.draft + static_cast<size_t>(s->kv_len + 1 - s->draft_first) * a.vocab;
  threads_.run(depths, 8.0 * depths * a.vocab, [&](int d) {
    const size_t at = static_cast<size_t>(d) * top;
    rank_level(draft + static_cast<size_t>(d) * a.vocab, a.vocab, top, plan.level + d, plan.best + at, plan.log_prob + at);
  });
  for (int d = 0; d < depths; ++d) {
    if (plan.level[d].bad) {
      raise_fault(s, kFaultDraftNonFinite, 0, d + 1);
      return;
    }
  }

  // Higher score first, then the lexicographically lower path of ranks, a prefix before its extensions.
  const auto comes_before = [&](const Candidate& x, const Candidate& y) {
    if (x.score != y.score) return x.score > y.score;
    const int dx = a.rows.depths[x.parent], dy = a.rows.depths[y.parent];
    const int32_t* px = plan.ranks + static_cast<size_t>(x.parent) * stride;
    const int32_t* py = plan.ranks + static_cast<size_t>(y.parent) * stride;
    for (int d = 0; d <= dx && d <= dy; ++d) {
      const int rx = d == dx ? x.rank : px[d], ry = d == dy ? y.rank : py[d];
      if (rx != ry) return rx < ry;
    }
    return dx < dy;
  };
  const auto goes_later = [&](const Candidate& x, const Candidate& y) { return comes_before(y, x); };
  int waiting = 0;
  const auto push = [&](int parent, int rank) {
    const int depth = a.rows.depths[parent];  // the level below the parent, counted from 0
    if (depth >= depths || rank >= plan.level[depth].count) return;
    const double score = a.scores[parent] + static_cast<double>(plan.log_prob[static_cast<size_t>(depth) * top + rank]);
    plan.heap[waiting++] = {score, parent, rank};
    std::push_heap(plan.heap, plan.heap + waiting, goes_later);
  };
  push(0, 0);
  while (waiting > 0 && s->n_rows <= a.budget && s->n_rows < a.rows.max_rows) {
    std::pop_heap(plan.heap, plan.heap + waiting, goes_later);
    const Candidate c = plan.heap[--waiting];
    const int row = s->n_rows++, depth = a.rows.depths[c.parent];
    a.rows.tokens[row] = plan.best[static_cast<size_t>(depth) * top + c.rank].token;
    a.rows.parents[row] = c.parent;
    a.rows.depths[row] = depth + 1;
    a.scores[row] = c.score;
    int32_t* path = a.rows.path + static_cast<size_t>(row) * a.rows.path_stride;
    std::memcpy(path, a.rows.path + static_cast<size_t>(c.parent) * a.rows.path_stride, sizeof(int32_t) * (depth + 1));
    path[depth + 1] = row;
    int32_t* ranks = plan.ranks + static_cast<size_t>(row) * stride;
    std::memcpy(ranks, plan.ranks + static_cast<size_t>(c.parent) * stride, sizeof(int32_t) * depth);
    ranks[depth] = c.rank;
    push(c.parent, c.rank + 1);
    push(row, 0);
  }
  if (a.costs != nullptr) s->n_rows = rows_worth_their_cost(a.scores, s->n_rows, a.costs);
}

void CpuBackend::accept(const AcceptArgs& a) {
  StepState* s = a.state;
  count("accept");
  s->n_accepted = 0;
  s->base = s->kv_len;
  if (s->error == kFaultNone) {
    int row = 0, n = 0;
    while (row >= 0) {
      a.accepted[n] = row;
      a.out->tokens[n++] = a.rows.tokens[row];
      const int32_t choice = a.choice[row];
      const bool ends = a.rows.tokens[row] == a.eos_id || s->committed + n >= s->limit;
      s->bonus = choice;
      int next = -1;
      for (int c = row + 1; !ends && next < 0 && c < s->n_rows; ++c) {
        if (a.rows.parents[c] == row && a.rows.tokens[c] == choice) next = c;
      }
      row = next;
    }
    s->n_accepted = n;
    s->kv_len += n;
    s->committed += n;
    s->rounds += 1;
    s->done = a.out->tokens[n - 1] == a.eos_id ? 2 : s->committed >= s->limit ? 1 : 0;
  }
  RoundOut& o = *a.out;
  o.n_accepted = s->n_accepted;
  o.done = s->done;
  o.bonus = s->bonus;
  o.committed = s->committed;
  o.kv_len = s->kv_len;
  o.n_rows = s->n_rows;
  o.error = s->error;
  o.error_row = s->error_row;
  o.error_detail = s->error_detail;
  o.reserved = 0;
}

}  // namespace kdtree::cpu
