// tree_build: the DDTree of a round (arXiv 2604.12989, Algorithm 1), bit for bit the tree of docs/model.md.
//
//   rank: a block a depth and `group` segments of 4096 logits: their shares of the log-sum-exp and their K best tokens.
//   merge: with more than one block a depth, a block a depth: its log-sum-exp and K best from those of the segments.
//   grow: one block: a warp grows the tree in registers, or a thread pops and pushes a heap, then all threads write the rows.
// Bytes: L*V logits once. Bound by latency for small vocabularies.
#include <algorithm>

#include "backend.h"
#include "tree_grow.cuh"
#include "tree_heap.cuh"
#include "tree_radix.cuh"
#include "tree_rank.cuh"
#include "tree_rows.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr bool STAGGER = false;
constexpr int kMergeThreads = 256 + kWarp;  // the last warp forms the log-sum-exp meanwhile
constexpr int kMergeKeys = 4096;            // of all lists of a depth, what merge_kernel has shared memory for

__device__ __forceinline__ double surprisal_of(Key key, float lse) { return fabs(static_cast<double>(__fsub_rn(logit_of(key), lse))); }

// A depth's result from its sorted keys, by the first `threads` of a block. top: its greatest logit.
__device__ void publish(const TreePlan& plan, int depth, const Key* keys, int found, float lse, float top, int threads) {
  const int at = depth * (plan.best + 1);
  for (int i = threadIdx.x; i <= plan.best; i += threads) {
    const Key key = i < found ? keys[i] : 0;
    plan.tokens[at + i] = token_of(key);
    plan.surprisal[at + i] = key != 0 ? surprisal_of(key, lse) : __longlong_as_double(-1);
  }
  if (threadIdx.x == 0) plan.bad[depth] = top < INFINITY ? 0 : 1;
}

// A block's segments: their greatest logits and sums into s.tops and s.sums, their best keys in order into s.sorted.
__device__ __forceinline__ void rank_segments(const TreeBuildArgs& a, const TreePlan& plan, const StateRead& state, int depth, RankShared& s) {
  const Team block{static_cast<int>(blockDim.x), 0};
  const int group = threadIdx.x / kRankThreads, t = threadIdx.x % kRankThreads, warp = threadIdx.x / kWarp;
  const Team sharers{kRankThreads, 1 + group};
  const int segment = blockIdx.x * plan.group + group, begin = segment * kTreeSegment;
  if (STAGGER && group > 0) Team{2 * kRankThreads, kRankGroups + group}.sync();
  const SegmentShare share(a.draft + static_cast<size_t>(state.first() + depth) * a.vocab + begin, min(max(a.vocab - begin, 0), kTreeSegment), t);
  if (STAGGER && group + 1 < plan.group) Team{2 * kRankThreads, kRankGroups + group + 1}.arrive();
  float own = -INFINITY;
#pragma unroll
  for (int j = 0; j < kRankShare; ++j) own = max_or_nan(own, share.x[j]);
  const uint32_t order = order_of_logit(own), warp_top = __reduce_max_sync(kAll, order);
  const uint32_t least = warp_bound(own > -INFINITY ? order : 0u, plan.rounds);
  if (threadIdx.x % kWarp == 0) s.top[warp] = warp_top, s.least[warp] = least;
  if (threadIdx.x == 0) s.candidates.length = 0;
  sharers.sync();
  const uint32_t* tops = s.top + group * (kRankThreads / kWarp);
  const float top = logit_of_order(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
  const float sum = top > -INFINITY && top < INFINITY ? segment_sum(share, top, s.lane[group], sharers, t) : 0.f;
  if (t == 0) s.tops[group] = top, s.sums[group] = sum;
  block.sync();
  rank_share(block, share, begin, own, plan.best, s);
}

__global__ __launch_bounds__(kRankGroups * kRankThreads, 1) void rank_kernel(TreeBuildArgs a, TreePlan plan) {
  __shared__ RankShared s;
  wait_for_previous();
  const int depth = blockIdx.y, t = threadIdx.x;
  const StateRead state(a.state);
  if (depth >= state.limit(a)) return;
  rank_segments(a, plan, state, depth, s);
  if (plan.lists == 1) {
    float top;
    const float lse = row_lse(s.tops, s.sums, plan.segments, top);
    publish(plan, depth, s.sorted, plan.best, lse, top, blockDim.x);
    return;
  }
  const int segment = blockIdx.x * plan.group + t;
  if (t < plan.group && segment < plan.segments) {
    plan.tops[depth * plan.segments + segment] = s.tops[t], plan.sums[depth * plan.segments + segment] = s.sums[t];
  }
  Key* out = plan.keys + (static_cast<size_t>(depth) * plan.lists + blockIdx.x) * plan.best;
  for (int i = t; i < plan.best; i += blockDim.x) out[i] = s.sorted[i];
}

// The keys of a depth's lists, brought to shared memory by a team.
__device__ void fetch_lists(const Team& team, const TreePlan& plan, int depth, Key* keys) {
  constexpr int kAhead = 4;
  const int n = plan.lists * plan.best;
  const Key* lists = plan.keys + static_cast<size_t>(depth) * n;
  for (int base = team.thread(); base < n; base += kAhead * team.threads) {
    Key key[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) key[i] = base + i * team.threads < n ? lists[base + i * team.threads] : 0;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * team.threads < n) keys[base + i * team.threads] = key[i];
    }
  }
}

// The `best` greatest keys of some sorted lists, in order, into `sorted`; by the team that has fetched them. c.length is 0 before.
__device__ void merge_lists(const Team& team, const Key* keys, int lists, int best, Candidates& c, Key* sorted) {
  // As many keys of every list as are together enough reach the least of those lists' last.
  const int n = lists * best, part = (best + lists - 1) / lists;
  Key bound = ~Key{0};
  for (int i = team.thread() % kWarp; i < lists; i += kWarp) bound = min(bound, keys[i * best + part - 1]);
  bound = static_cast<Key>(__reduce_min_sync(kAll, static_cast<uint32_t>(bound >> 32))) << 32;
  for (int i = team.thread(); i < n; i += team.threads) {
    if (keys[i] >= bound && keys[i] != 0) {
      const int at = atomicAdd(&c.length, 1);
      if (at < kCandidates) c.key[at] = keys[i];
    }
  }
  team.sync();
  if (c.length > kCandidates) {
    bound = exact_bound(team, best, c, [&](Key raised) {
      int reach = 0;
      for (int i = team.thread(); i < n; i += team.threads) reach += keys[i] >= raised ? 1 : 0;
      return reach;
    });
    if (team.thread() == 0) c.length = 0;
    team.sync();
    for (int i = team.thread(); i < n; i += team.threads) {
      if (keys[i] != 0 && keys[i] >= bound) c.key[atomicAdd(&c.length, 1)] = keys[i];
    }
    team.sync();
  }
  sort_candidates(team, c, best, sorted);
}

__global__ __launch_bounds__(kMergeThreads, 1) void merge_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Candidates candidates;
  __shared__ Key sorted[kFewBest];
  __shared__ float row_sum, row_top;
  Key* keys = reinterpret_cast<Key*>(shared);
  wait_for_previous();
  const int depth = blockIdx.x;
  const StateRead state(a.state);
  const Team team{kMergeThreads - kWarp, 1};
  if (threadIdx.x >= team.threads) {
    const size_t cell = static_cast<size_t>(depth) * plan.segments;
    float top;
    const float lse = row_lse(plan.tops + cell, plan.sums + cell, plan.segments, top);
    if (threadIdx.x % kWarp == 0) row_sum = lse, row_top = top;
  } else {
    if (threadIdx.x == 0) candidates.length = 0;
    fetch_lists(team, plan, depth, keys);
    team.sync();
    merge_lists(team, keys, plan.lists, plan.best, candidates, sorted);
  }
  __syncthreads();
  if (depth < state.limit(a)) publish(plan, depth, sorted, plan.best, row_sum, row_top, kMergeThreads);
}

// A cluster's barrier in two halves: what a block wrote to any of its blocks' shared memory before it arrives is there after the wait.
__device__ __forceinline__ void arrive_at_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Shared memory of block `rank` of the cluster, at the place that `here` is in this one.
template <typename T>
__device__ __forceinline__ T load_from_block(const T* here, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(here))), "r"(rank));
  if constexpr (sizeof(T) == 8) {
    unsigned long long v;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(there) : "memory");
    return v;
  } else {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    return v;
  }
#else
  (void)rank;
  return *here;
#endif
}

// Rank and merge in one launch: a cluster a depth, whose first block merges what the others have ranked.
constexpr int kDepthBlocks = 8;

__global__ __launch_bounds__(kRankGroups * kRankThreads, 1) void depth_kernel(TreeBuildArgs a, TreePlan plan) {
  __shared__ RankShared s;
  __shared__ Key keys[kDepthBlocks * kFewBest];
  __shared__ float tops[kDepthBlocks * kRankGroups], sums[kDepthBlocks * kRankGroups];
  __shared__ float row_sum, row_top;
  wait_for_previous();
  const int depth = blockIdx.y, t = threadIdx.x;
  const StateRead state(a.state);
  if (depth >= state.limit(a)) return;  // the whole cluster alike
  rank_segments(a, plan, state, depth, s);
  arrive_at_cluster();
  wait_for_cluster();
  if (blockIdx.x == 0) {
    const int n = plan.lists * plan.best;
    for (int i = t; i < n; i += blockDim.x) keys[i] = load_from_block(s.sorted + i % plan.best, i / plan.best);
    for (int i = t; i < plan.segments; i += blockDim.x) {
      tops[i] = load_from_block(s.tops + i % plan.group, i / plan.group), sums[i] = load_from_block(s.sums + i % plan.group, i / plan.group);
    }
    if (t == 0) s.candidates.length = 0;
  }
  __syncthreads();
  arrive_at_cluster();  // the other blocks may end once theirs were read
  if (blockIdx.x == 0) {
    const int mergers = blockDim.x - kWarp;
    if (t >= mergers) {
      float top;
      const float lse = row_lse(tops, sums, plan.segments, top);
      if (t % kWarp == 0) row_sum = lse, row_top = top;
    } else {
      merge_lists(Team{mergers, 1}, keys, plan.lists, plan.best, s.candidates, s.sorted);
    }
    __syncthreads();
    publish(plan, depth, s.sorted, plan.best, row_sum, row_top, blockDim.x);
  }
  wait_for_cluster();
}

// The same for trees that rank more than kFewBest tokens a depth: a block a segment, then a block a depth.
__global__ __launch_bounds__(kTreeThreads) void rank_many_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ Key keys[];
  __shared__ RadixShared s;
  wait_for_previous();
  const int segment = blockIdx.x, depth = blockIdx.y, begin = segment * kTreeSegment, t = threadIdx.x;
  const StateRead state(a.state);
  if (depth >= state.limit(a)) return;
  const float* x = a.draft + static_cast<size_t>(state.first() + depth) * a.vocab + begin;
  const int n = min(kTreeSegment, a.vocab - begin), cell = depth * plan.segments + segment;
  float top = -INFINITY;
  for (int i = t; i < n; i += kTreeThreads) top = max_or_nan(top, x[i]);
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) top = max_or_nan(top, __shfl_xor_sync(kAll, top, mask));
  if (t % kWarp == 0) s.warp_top[t / kWarp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kTreeWarps; ++w) top = max_or_nan(top, s.warp_top[w]);
  const bool empty = !(top > -INFINITY && top < INFINITY);
  float sum = 0.f;
  if (!empty) {
    for (int i = t; i < n; i += kTreeThreads) sum = __fadd_rn(sum, exp32(__fsub_rn(x[i], top)));
  }
  s.lane[t] = sum;
  for (int h = kTreeLanes / 2; h > 0; h /= 2) {
    __syncthreads();
    if (t < h) s.lane[t] = __fadd_rn(s.lane[t], s.lane[t + h]);
  }
  if (t == 0) plan.tops[cell] = top, plan.sums[cell] = s.lane[0], s.top = top;
  const int wanted = min(plan.best, n);
  int found = 0;
  if (!empty) found = best_keys([&](int i) { return x[i] > -INFINITY ? key_of(x[i], begin + i) : Key{0}; }, n, wanted, keys, s);
  __syncthreads();
  if (plan.lists == 1) {
    const float lse = row_lse(&s.top, s.lane, 1, top);
    publish(plan, depth, keys, found, lse, top, kTreeThreads);
    return;
  }
  Key* out = plan.keys + static_cast<size_t>(cell) * plan.best;
  for (int i = t; i < plan.best; i += kTreeThreads) out[i] = i < found ? keys[i] : 0;
}

__global__ __launch_bounds__(kTreeThreads) void merge_many_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ Key keys[];
  __shared__ RadixShared s;
  wait_for_previous();
  const int depth = blockIdx.x;
  if (depth >= StateRead(a.state).limit(a)) return;
  const size_t cell = static_cast<size_t>(depth) * plan.segments;
  const Key* in = plan.keys + cell * plan.best;
  const int found = best_keys([&](int i) { return in[i]; }, plan.segments * plan.best, plan.best, keys, s);
  float top;
  const float lse = row_lse(plan.tops + cell, plan.sums + cell, plan.segments, top);
  publish(plan, depth, keys, found, lse, top, kTreeThreads);
}

__global__ __launch_bounds__(kTreeThreads, 1) void grow_heap_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int n_rows;
  wait_for_previous();
  Growth g(shared, a.budget);
  if (threadIdx.x < kWarp) {
    const int limit = StateRead(a.state).limit(a), bad = __reduce_min_sync(kAll, first_bad(plan, first_flag(plan)));
    int n = 0;
    if (threadIdx.x == 0) n = grow_by_heap(plan, g, bad < limit ? 0 : limit, min(a.budget + 1, a.rows.max_rows));
    n = conclude(a, limit, bad, __shfl_sync(kAll, n, 0), g.score, reinterpret_cast<double*>(g.heap));
    if (threadIdx.x == 0) n_rows = n;
  }
  __syncthreads();
  for (int m = threadIdx.x; m < n_rows; m += kTreeThreads) {
    const int depth = g.depth[m];
    write_row(a, m, m == 0 ? a.state->bonus : plan.tokens[(depth - 1) * (plan.best + 1) + g.rank[m]], g.parent[m], depth, g.score[m]);
    int32_t* path = a.rows.path + static_cast<size_t>(m) * a.rows.path_stride;
    for (int row = m, d = depth; d >= 0; --d, row = g.parent[row]) path[d] = row;
  }
}

// A block's dynamic shared memory where it grows a tree in registers.
struct Grown {
  double* table;     // [depths + 2, best + 1]: every depth's surprisals, and two rows of NaN below the last that may be used
  double* scores;    // [kGrownRows]
  int32_t* tokens;   // [depths + 2, best + 1]
  uint32_t* nodes;   // [kGrownRows]
  char* rest;

  __host__ __device__ Grown(char* base, const TreePlan& plan) {
    const size_t entries = (static_cast<size_t>(plan.depths) + 2) * (plan.best + 1);
    table = reinterpret_cast<double*>(base), scores = table + entries;
    tokens = reinterpret_cast<int32_t*>(scores + kGrownRows);
    nodes = reinterpret_cast<uint32_t*>(tokens + (entries + 1) / 2 * 2);
    rest = reinterpret_cast<char*>(nodes + kGrownRows);
  }
};
size_t grow_shared(const TreePlan& plan) { return static_cast<size_t>(Grown(nullptr, plan).rest - static_cast<char*>(nullptr)); }
bool grows_in_registers(const TreeBuildArgs& a, const TreePlan& plan) {
  return a.budget < kGrownRows && grow_shared(plan) <= (96u << 10);
}

// By a whole block, which has filled the table: grows the tree and writes its rows. bad: the lowest depth that cannot be ranked, in the
// first warp.
__device__ void grow_rows(const TreeBuildArgs& a, const StateRead& state, int bad, const Grown& s, int width) {
  __shared__ int n_rows;
  if (threadIdx.x < kWarp) {
    const int limit = state.limit(a);
    const int n = bad < limit ? 1 : grow_in_registers(s.table, width, min(a.budget + 1, a.rows.max_rows), s.nodes, s.scores);
    for (int m = threadIdx.x; m < n; m += kWarp) s.scores[m] = m == 0 ? 0.0 : __dsub_rn(0.0, s.scores[m]);  // no -0
    __syncwarp();
    const int kept = conclude(a, limit, bad, n, s.scores, s.table);
    if (threadIdx.x == 0) n_rows = kept;
  }
  __syncthreads();
  for (int m = threadIdx.x; m < n_rows; m += blockDim.x) {
    const uint32_t node = s.nodes[m];
    const int depth = m == 0 ? 0 : level_of(node) / width + 1;
    const int token = m == 0 ? state.bonus : s.tokens[level_of(node) + rank_of(node)];
    write_row(a, m, token, m == 0 ? -1 : parent_of(node), depth, s.scores[m]);
    int32_t* path = a.rows.path + static_cast<size_t>(m) * a.rows.path_stride;
    path[depth] = m;
    for (int row = m, d = depth - 1; d >= 0; --d) path[d] = row = parent_of(s.nodes[row]);
  }
}

__global__ __launch_bounds__(kTreeThreads, 1) void grow_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ __align__(16) char shared[];
  constexpr int kAhead = 8;
  const Grown s(shared, plan);
  const int width = plan.best + 1, given = plan.depths * width, entries = given + 2 * width;
  wait_for_previous();
  const StateRead state(a.state);
  const int flag = first_flag(plan);
  for (int base = threadIdx.x; base < entries; base += kAhead * kTreeThreads) {
    double surprisal[kAhead];
    int32_t token[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // what lies below the limit is not used, but to wait for the limit first would take longer
      const int at = base + i * kTreeThreads;
      surprisal[i] = at < given ? plan.surprisal[at] : 0.0, token[i] = at < given ? plan.tokens[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * kTreeThreads;
      if (at < entries) s.table[at] = at < state.limit(a) * width ? surprisal[i] : __longlong_as_double(-1), s.tokens[at] = token[i];
    }
  }
  __syncthreads();
  const int bad = threadIdx.x < kWarp ? __reduce_min_sync(kAll, first_bad(plan, flag)) : 0;
  grow_rows(a, state, bad, s, width);
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
  if (plan.depths > 0 && plan.best > 0) {
    // As many segments a block as make one wave of blocks, and so many that a cluster holds a depth.
    const int64_t cells = static_cast<int64_t>(plan.depths) * plan.segments, multiprocessors = device_shape_.multiprocessors;
    const int wave = static_cast<int>((cells + multiprocessors - 1) / multiprocessors), held = (plan.segments + kDepthBlocks - 1) / kDepthBlocks;
    const int group = std::min({std::max(wave, held), kRankGroups, plan.segments}), threads = group * kRankThreads;
    const int lists = (plan.segments + group - 1) / group;
    if (plan.best <= kFewBest && lists * plan.best <= kMergeKeys) {
      plan.group = group, plan.lists = lists, plan.rounds = (plan.best + threads / kWarp - 1) / (threads / kWarp);
      const dim3 grid(static_cast<unsigned>(lists), static_cast<unsigned>(plan.depths));
      if (lists > 1 && lists <= kDepthBlocks && overlaps_) {  // what can overlap launches has clusters too
        launch_clusters("tree_rank", depth_kernel, lists, grid, threads, 0, a, plan);
      } else {
        launch("tree_rank", rank_kernel, grid, threads, 0, a, plan);
        if (lists > 1) launch("tree_merge", merge_kernel, dim3(plan.depths), kMergeThreads, sizeof(Key) * lists * plan.best, a, plan);
      }
    } else {
      size_t keys = 1;
      while (keys < static_cast<size_t>(plan.best)) keys *= 2;
      launch("tree_rank", rank_many_kernel, dim3(plan.segments, plan.depths), kTreeThreads, sizeof(Key) * keys, a, plan);
      if (plan.segments > 1) launch("tree_merge", merge_many_kernel, dim3(plan.depths), kTreeThreads, sizeof(Key) * keys, a, plan);
    }
  }
  const bool in_registers = grows_in_registers(a, plan);
  const size_t shared = in_registers ? grow_shared(plan) : Growth::bytes(a.budget);
  const auto grow = in_registers ? grow_kernel : grow_heap_kernel;
  reserve_shared(reinterpret_cast<const void*>(grow), "tree_build", shared);
  launch("tree_build", grow, dim3(1), kTreeThreads, shared, a, plan);
}

}  // namespace kdtree
