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

template <bool FEW>
__global__ __launch_bounds__(kTreeThreads, FEW ? 5 : 1) void rank_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ Key keys[];
  __shared__ RankShared s;
  wait_for_previous();
  const int segment = blockIdx.x, depth = blockIdx.y, begin = segment * kTreeSegment;
  if (depth >= depth_limit(a)) return;
  const float* x = draft_row(a, depth) + begin;
  const int n = min(kTreeSegment, a.vocab - begin), cell = depth * plan.segments + segment;
  const SegmentShare share(x, n);
  float top = -INFINITY;
  int bad = 0;
#pragma unroll
  for (int j = 0; j < kTreeShare; ++j) {
    bad |= share.x[j] < INFINITY ? 0 : 1;
    top = fmaxf(top, share.x[j]);
  }
  top = warp_max(top);
  if (threadIdx.x % kWarp == 0) s.warp_top[threadIdx.x / kWarp] = top;
  bad = __syncthreads_or(bad);
#pragma unroll
  for (int w = 0; w < kTreeWarps; ++w) top = fmaxf(top, s.warp_top[w]);
  const bool empty = bad != 0 || !(top > -INFINITY);
  const float sum = empty ? 0.f : segment_sum(share, top, s);
  if (threadIdx.x == 0) plan.tops[cell] = top, plan.sums[cell] = sum, plan.bad[cell] = bad;
  const int wanted = min(plan.best, n);
  int found = 0;
  if (!empty) {
    if constexpr (FEW) {
      SegmentKeys own(share, begin);
      found = best_of_shares(own, wanted, keys, s);
    } else {
      found = best_keys([&](int i) { return x[i] > -INFINITY ? key_of(x[i], begin + i) : Key{0}; }, n, wanted, keys, s);
    }
  }
  if (plan.segments == 1) {
    __syncthreads();  // thread 0's sum is there for the whole block
    publish(plan, depth, keys, found, found > 0 ? row_lse(plan.tops + cell, plan.sums + cell, 1, s) : 0.f);
    return;
  }
  Key* out = plan.keys + static_cast<size_t>(cell) * plan.best;
  for (int i = threadIdx.x; i < plan.best; i += kTreeThreads) out[i] = i < found ? keys[i] : 0;
}

template <bool FEW>
__global__ __launch_bounds__(kTreeThreads) void merge_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ Key keys[];
  __shared__ RankShared s;
  wait_for_previous();
  const int depth = blockIdx.x;
  if (depth >= depth_limit(a)) return;
  const size_t cell = static_cast<size_t>(depth) * plan.segments;
  const Key* in = plan.keys + cell * plan.best;
  const int n = plan.segments * plan.best;
  int found;
  if constexpr (FEW) {
    ListShare share(in, plan.segments, plan.best);
    found = best_of_shares(share, plan.best, keys, s);
  } else {
    found = best_keys([&](int i) { return in[i]; }, n, plan.best, keys, s);
  }
  publish(plan, depth, keys, found, found > 0 ? row_lse(plan.tops + cell, plan.sums + cell, plan.segments, s) : 0.f);
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

  static __host__ __device__ size_t bytes(int budget) {
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

// A score as a number whose order is that of the scores; 0 is no score.
__device__ __forceinline__ Key order_of(double score) {
  const Key bits = static_cast<Key>(__double_as_longlong(__dadd_rn(score, 0.0)));  // -0 becomes +0
  return bits >> 63 ? ~bits : bits | Key{1} << 63;
}
__device__ __forceinline__ double score_of(Key order) {
  return __longlong_as_double(static_cast<long long>(order >> 63 ? order & ~(Key{1} << 63) : ~order));
}

// The same for small trees, by one warp. A node's next child waits in a register of the lane that keeps the node (node i: lane i % 32,
// place i / 32), so a pop is the warp's maximum, and what it frees and what it adds are formed side by side.
template <int PLACES>
__device__ int grow_in_registers(const TreePlan& plan, const Growth& g, const float* log_prob, const int32_t* count, int depths,
                                 int rows) {
  const int lane = threadIdx.x % kWarp;
  Key order[PLACES];
  int next[PLACES];  // rank of the waiting child, and from bit 12 the node's depth
#pragma unroll
  for (int i = 0; i < PLACES; ++i) order[i] = 0, next[i] = 0;
  const auto waiting = [](int packed, int keeper) { return Candidate{0.0, (packed >> 24) * kWarp + keeper, packed & 0xfff}; };
  const auto child = [&](double score, int level, int rank) {
    const bool there = level < depths && rank < count[level];
    return there ? order_of(__dadd_rn(score, static_cast<double>(log_prob[level * plan.best + rank]))) : Key{0};
  };
  if (lane == 0) {
    g.score[0] = 0.0, g.parent[0] = -1, g.rank[0] = 0, g.depth[0] = 0;
    order[0] = child(0.0, 0, 0);
  }
  int n = 1;
  while (n < rows) {
    __syncwarp();  // what lane 0 wrote of the last node is seen
    Key top = order[0];
    int mine = next[0];  // and from bit 24 the place
#pragma unroll
    for (int i = 1; i < PLACES; ++i) {
      const int other = next[i] | i << 24;
      if (order[i] > top || (order[i] == top && top != 0 && g.path_before(waiting(other, lane), waiting(mine, lane)))) {
        top = order[i], mine = other;
      }
    }
    const uint32_t high = __reduce_max_sync(kAll, static_cast<uint32_t>(top >> 32));
    const uint32_t low = __reduce_max_sync(kAll, top >> 32 == high ? static_cast<uint32_t>(top) : 0u);
    const Key best = static_cast<Key>(high) << 32 | low;
    if (best == 0) break;
    unsigned winners = __ballot_sync(kAll, top == best);
    int owner = __ffs(static_cast<int>(winners)) - 1;
    int chosen = __shfl_sync(kAll, mine, owner);
    for (winners &= winners - 1; winners != 0; winners &= winners - 1) {  // equal scores: the path that comes first
      const int other = __ffs(static_cast<int>(winners)) - 1, candidate = __shfl_sync(kAll, mine, other);
      if (g.path_before(waiting(candidate, other), waiting(chosen, owner))) owner = other, chosen = candidate;
    }
    const Candidate pop = waiting(chosen, owner);
    const int parent = pop.parent, rank = pop.rank, level = chosen >> 12 & 0xfff;
    const double score = score_of(best);
    const Key sibling = child(g.score[parent], level, rank + 1), first = child(score, level + 1, 0);
    if (lane == 0) g.score[n] = score, g.parent[n] = parent, g.rank[n] = rank, g.depth[n] = level + 1;
#pragma unroll
    for (int i = 0; i < PLACES; ++i) {
      if (parent == i * kWarp + lane) order[i] = sibling, next[i] = level << 12 | (rank + 1);
      if (n == i * kWarp + lane) order[i] = first, next[i] = (level + 1) << 12;
    }
    ++n;
  }
  __syncwarp();
  return n;
}

constexpr int kRegisterRows = 4 * kWarp;  // rows of a tree that grow_in_registers takes

// Shared memory of the growing block: the tree, then, where it grows in registers, every depth's log-probabilities and counts.
size_t grow_shared(const TreeBuildArgs& a, const TreePlan& plan) {
  const size_t ranks = a.budget < kRegisterRows ? (static_cast<size_t>(plan.best) + 1) * plan.depths * sizeof(float) : 0;
  return Growth::bytes(a.budget) + ranks;
}
// Deeper than this a tree of few rows does not reach; the table stays within what any device gives a block.
bool grows_in_registers(const TreeBuildArgs& a, const TreePlan& plan) {
  return a.budget < kRegisterRows && grow_shared(a, plan) <= (64u << 10);
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

__global__ __launch_bounds__(kTreeThreads, 1) void grow_kernel(TreeBuildArgs a, TreePlan plan, bool in_registers) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int depths, n_rows, worst;
  wait_for_previous();
  Growth g(shared, a.budget);
  float* log_prob = reinterpret_cast<float*>(shared + Growth::bytes(a.budget));
  int32_t* count = reinterpret_cast<int32_t*>(log_prob + plan.depths * plan.best);
  const int limit = depth_limit(a);
  if (threadIdx.x == 0) depths = limit, worst = INT32_MAX;
  if (in_registers) {
    for (int i = threadIdx.x; i < limit * plan.best; i += kTreeThreads) log_prob[i] = plan.log_prob[i];
    for (int i = threadIdx.x; i < limit; i += kTreeThreads) count[i] = plan.count[i];
  }
  // The lowest depth with a NaN or +inf, if any.
  int bad = INT32_MAX;
  for (int i = threadIdx.x; i < limit * plan.segments; i += kTreeThreads) {
    if (plan.bad[i]) bad = min(bad, i / plan.segments);
  }
  __syncthreads();
  if (bad != INT32_MAX) atomicMin(&worst, bad);
  __syncthreads();
  if (threadIdx.x < kWarp) {
    const bool broken = worst != INT32_MAX;
    const int levels = broken ? 0 : depths, rows = min(a.budget + 1, a.rows.max_rows);
    int n = 0;
    if (in_registers) {
      n = a.budget < kWarp       ? grow_in_registers<1>(plan, g, log_prob, count, levels, rows)
          : a.budget < 3 * kWarp ? grow_in_registers<3>(plan, g, log_prob, count, levels, rows)
                                 : grow_in_registers<4>(plan, g, log_prob, count, levels, rows);
    } else if (threadIdx.x == 0) {
      n = grow(plan, g, levels, rows);
    }
    if (threadIdx.x == 0) {
      if (broken) record_fault(a.state, kFaultDraftNonFinite, 0, worst + 1);
      if (a.costs != nullptr) n = rows_worth_their_cost(g.score, n, a.costs);
      a.state->n_rows = n_rows = n;
    }
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
  const bool in_registers = grows_in_registers(a, plan);
  const size_t grown = in_registers ? grow_shared(a, plan) : Growth::bytes(a.budget);
  reserve_shared(reinterpret_cast<const void*>(grow_kernel), "tree_build", grown);
  if (plan.depths > 0 && plan.best > 0) {
    size_t keys = 1;
    while (keys < static_cast<size_t>(plan.best)) keys *= 2;
    const size_t shared = sizeof(Key) * keys;
    const bool few = plan.best <= kTreeThreads, few_lists = few && plan.segments * plan.best <= kTreeSegment;
    launch("tree_rank", few ? rank_kernel<true> : rank_kernel<false>, dim3(plan.segments, plan.depths), kTreeThreads, shared, a, plan);
    if (plan.segments > 1) {
      launch("tree_merge", few_lists ? merge_kernel<true> : merge_kernel<false>, dim3(plan.depths), kTreeThreads, shared, a, plan);
    }
  }
  launch("tree_build", grow_kernel, dim3(1), kTreeThreads, grown, a, plan, in_registers);
}

}  // namespace kdtree
