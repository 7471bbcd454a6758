// tree_build: the DDTree of a round (arXiv 2604.12989, Algorithm 1), bit for bit the tree of docs/model.md.
//
//   rank: a block a depth and segment of 4096 logits: its share of the log-sum-exp and its K best tokens.
//   merge: with more than one segment, a block a depth: the depth's log-sum-exp and K best from those of the segments.
//   grow: one block: a thread pops and pushes the heap in shared memory, then all threads write the rows.
// Bytes: L*V logits once (later passes of the selection hit L1). Bound by latency for small vocabularies.
#include "backend.h"
#include "fault.cuh"
#include "tree_rank.cuh"

namespace kdtree {
namespace {

using namespace cuda;

// A depth's result: tokens and log-probabilities of its best keys.
__device__ void publish(const TreePlan& plan, int depth, const Key* keys, int n, float lse) {
  for (int i = threadIdx.x; i < n; i += kTreeThreads) {
    plan.tokens[depth * plan.best + i] = token_of(keys[i]);
    plan.log_prob[depth * plan.best + i] = __fsub_rn(logit_of(keys[i]), lse);
  }
  if (threadIdx.x == 0) plan.count[depth] = n;
}

__global__ __launch_bounds__(kTreeThreads) void rank_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ Key keys[];
  __shared__ RankShared s;
  wait_for_previous();
  const int segment = blockIdx.x, depth = blockIdx.y, begin = segment * kTreeSegment;
  if (depth >= depth_limit(a)) return;
  const float* x = draft_row(a, depth) + begin;
  const int n = min(kTreeSegment, a.vocab - begin), cell = depth * plan.segments + segment;
  float top = -INFINITY;
  int bad = 0;
  for (int i = threadIdx.x; i < n; i += kTreeThreads) {
    bad |= x[i] < INFINITY ? 0 : 1;
    top = fmaxf(top, x[i]);
  }
  top = warp_max(top);
  if (threadIdx.x % kWarp == 0) s.warp_top[threadIdx.x / kWarp] = top;
  bad = __syncthreads_or(bad);
#pragma unroll
  for (int w = 0; w < kTreeWarps; ++w) top = fmaxf(top, s.warp_top[w]);
  const bool empty = bad != 0 || !(top > -INFINITY);
  const float sum = empty ? 0.f : segment_sum(x, n, top, s);
  if (threadIdx.x == 0) plan.tops[cell] = top, plan.sums[cell] = sum, plan.bad[cell] = bad;
  const int wanted = min(plan.best, n);
  const auto key_at = [&](int i) { return x[i] > -INFINITY ? key_of(x[i], begin + i) : Key{0}; };
  const int found = empty ? 0 : best_keys(key_at, n, wanted, keys, s);
  if (plan.segments == 1) {
    publish(plan, depth, keys, found, empty ? 0.f : row_lse(&top, &sum, 1));
    return;
  }
  Key* out = plan.keys + static_cast<size_t>(cell) * plan.best;
  for (int i = threadIdx.x; i < plan.best; i += kTreeThreads) out[i] = i < found ? keys[i] : 0;
}

__global__ __launch_bounds__(kTreeThreads) void merge_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ Key keys[];
  __shared__ RankShared s;
  wait_for_previous();
  const int depth = blockIdx.x;
  if (depth >= depth_limit(a)) return;
  const size_t cell = static_cast<size_t>(depth) * plan.segments;
  const Key* in = plan.keys + cell * plan.best;
  const int found = best_keys([&](int i) { return in[i]; }, plan.segments * plan.best, plan.best, keys, s);
  publish(plan, depth, keys, found, found > 0 ? row_lse(plan.tops + cell, plan.sums + cell, plan.segments) : 0.f);
}

// A node that may join the tree: the rank-th token of the level below `parent`.
struct Candidate {
  double score;
  int32_t parent, rank;
};

// The tree under construction, in shared memory; row 0 is the root.
struct Growth {
  double* score;    // [budget + 1]
  Candidate* heap;  // [budget + 1]: a pop makes room for one of the two pushes that follow it
  int32_t* parent;  // [budget + 1]
  int32_t* rank;
  int32_t* depth;

  static size_t bytes(int budget) {
    return (static_cast<size_t>(budget) + 1) * (sizeof(double) + sizeof(Candidate) + 3 * sizeof(int32_t));
  }
  __device__ Growth(char* base, int budget) {
    score = reinterpret_cast<double*>(base);
    heap = reinterpret_cast<Candidate*>(score + budget + 1);
    parent = reinterpret_cast<int32_t*>(heap + budget + 1);
    rank = parent + budget + 1;
    depth = rank + budget + 1;
  }

  // Whether x's path of ranks is lexicographically before y's, a prefix before its extensions. Paths are walked upwards, so the
  // last difference seen is the first one from the root.
  __device__ bool path_before(const Candidate& x, const Candidate& y) const {
    int px = x.parent, py = y.parent, rx = x.rank, ry = y.rank;
    const int dx = depth[px], dy = depth[py];
    for (int d = dx; d > dy; --d) rx = rank[px], px = parent[px];
    for (int d = dy; d > dx; --d) ry = rank[py], py = parent[py];
    bool before = dx < dy;
    while (true) {
      if (rx != ry) before = rx < ry;
      if (px == py) return before;
      rx = rank[px], px = parent[px], ry = rank[py], py = parent[py];
    }
  }
  __device__ bool before(const Candidate& x, const Candidate& y) const {
    return x.score > y.score || (x.score == y.score && path_before(x, y));
  }

  __device__ void sift_up(int i, const Candidate& c) {
    while (i > 0 && before(c, heap[(i - 1) / 2])) heap[i] = heap[(i - 1) / 2], i = (i - 1) / 2;
    heap[i] = c;
  }
  __device__ void sift_down(int size, const Candidate& c) {
    int i = 0;
    while (true) {
      int child = 2 * i + 1;
      if (child >= size) break;
      if (child + 1 < size && before(heap[child + 1], heap[child])) ++child;
      if (!before(heap[child], c)) break;
      heap[i] = heap[child], i = child;
    }
    heap[i] = c;
  }
};

// Thread 0 alone. Returns the rows of the tree, the root included.
__device__ int grow(const TreePlan& plan, Growth& g, int depths, int rows) {
  g.score[0] = 0.0, g.parent[0] = -1, g.rank[0] = 0, g.depth[0] = 0;
  const auto candidate = [&](int parent, int rank, Candidate& c) {
    const int level = g.depth[parent];
    if (level >= depths || rank >= plan.count[level]) return false;
    c = {__dadd_rn(g.score[parent], static_cast<double>(plan.log_prob[level * plan.best + rank])), parent, rank};
    return true;
  };
  int waiting = 0, n = 1;
  Candidate c;
  if (candidate(0, 0, c)) g.heap[waiting++] = c;
  while (waiting > 0 && n < rows) {
    const Candidate top = g.heap[0];
    const int row = n++;
    g.score[row] = top.score, g.parent[row] = top.parent, g.rank[row] = top.rank, g.depth[row] = g.depth[top.parent] + 1;
    // The sibling takes the place of what was popped; without one the last of the heap does.
    if (candidate(top.parent, top.rank + 1, c)) {
      g.sift_down(waiting, c);
    } else if (--waiting > 0) {
      c = g.heap[waiting];
      g.sift_down(waiting, c);
    }
    if (n < rows && candidate(row, 0, c)) g.sift_up(waiting, c), ++waiting;
  }
  return n;
}

// The first rows of a best-first tree, as many as make expected accepted rows over cost greatest. Thread 0 alone.
__device__ int rows_worth_their_cost(const double* scores, int n, const double* costs) {
  double expected = 1.0, best = 1.0 / costs[0];
  int kept = 1;
  for (int row = 1; row < n; ++row) {
    expected = __dadd_rn(expected, static_cast<double>(exp32(__double2float_rn(scores[row]))));
    const double rate = expected / costs[row];
    if (rate > best) best = rate, kept = row + 1;
  }
  return kept;
}

__global__ __launch_bounds__(kTreeThreads, 1) void grow_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int depths, n_rows;
  wait_for_previous();
  Growth g(shared, a.budget);
  if (threadIdx.x == 0) depths = depth_limit(a);
  __syncthreads();
  // The lowest depth with a NaN or +inf, if any.
  int bad = INT32_MAX;
  for (int i = threadIdx.x; i < depths * plan.segments; i += kTreeThreads) {
    if (plan.bad[i]) bad = min(bad, i / plan.segments);
  }
  __shared__ int worst;
  if (threadIdx.x == 0) worst = INT32_MAX;
  __syncthreads();
  if (bad != INT32_MAX) atomicMin(&worst, bad);
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool broken = worst != INT32_MAX;
    if (broken) record_fault(a.state, kFaultDraftNonFinite, 0, worst + 1);
    n_rows = grow(plan, g, broken ? 0 : depths, min(a.budget + 1, a.rows.max_rows));
    if (a.costs != nullptr) n_rows = rows_worth_their_cost(g.score, n_rows, a.costs);
    a.state->n_rows = n_rows;
  }
  __syncthreads();
  for (int m = threadIdx.x; m < n_rows; m += kTreeThreads) {
    const int depth = g.depth[m];
    a.rows.tokens[m] = m == 0 ? a.state->bonus : plan.tokens[(depth - 1) * plan.best + g.rank[m]];
    a.rows.parents[m] = g.parent[m];
    a.rows.depths[m] = depth;
    a.scores[m] = g.score[m];
    int32_t* path = a.rows.path + static_cast<size_t>(m) * a.rows.path_stride;
    for (int row = m, d = depth; d >= 0; --d, row = g.parent[row]) path[d] = row;
  }
}

}  // namespace

size_t CudaBackend::tree_scratch(int vocab, int block_size, int budget) const {
  TreePlan plan{};
  return lay_out(plan, nullptr, vocab, block_size, budget);
}

void CudaBackend::tree_build(const TreeBuildArgs& a) {
  TreePlan plan{};
  lay_out(plan, static_cast<char*>(a.scratch), a.vocab, a.block_size, a.budget);
  if (a.chain) plan.best = plan.best < 1 ? plan.best : 1;
  if (plan.best > kTreeMaxBest) {
    throw Error("RequestError", name_ + ": budget " + std::to_string(a.budget) + " is above the " +
                                    std::to_string(kTreeMaxBest) + " that tree_build is built for");
  }
  const size_t grown = Growth::bytes(a.budget);
  reserve_shared(reinterpret_cast<const void*>(grow_kernel), "tree_build", grown);
  if (plan.depths > 0 && plan.best > 0) {
    size_t keys = 1;
    while (keys < static_cast<size_t>(plan.best)) keys *= 2;
    const size_t shared = sizeof(Key) * keys;
    launch("tree_rank", rank_kernel, dim3(plan.segments, plan.depths), kTreeThreads, shared, a, plan);
    if (plan.segments > 1) launch("tree_merge", merge_kernel, dim3(plan.depths), kTreeThreads, shared, a, plan);
  }
  launch("tree_build", grow_kernel, dim3(1), kTreeThreads, grown, a, plan);
}

}  // namespace kdtree
