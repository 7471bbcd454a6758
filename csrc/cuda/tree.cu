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

// A cluster's barrier in two halves: what a block wrote to any of its blocks' shared memory before it arrives is there after the wait.
__device__ __forceinline__ void arrive_at_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Shared memory of block `rank` of the cluster, at the place that `here` is in this one; stores to it.
__device__ __forceinline__ uint32_t block_address(const void* here, int rank) {
  uint32_t there = static_cast<uint32_t>(__cvta_generic_to_shared(here));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(rank));
#endif
  return there;
}
__device__ __forceinline__ void store_to_block(uint32_t there, Key value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(there), "l"(value) : "memory");
#endif
}
__device__ __forceinline__ void store_to_block(uint32_t there, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
#endif
}

// A block's segments, and the bound that at least plan.best keys reach: of the block's, or in a cluster (CLUSTER) of the depth's.
struct Segments {
  SegmentShare share;
  Team block;
  int first;       // token of the segment's first
  float own;       // the thread's greatest logit
  uint32_t bound;  // as an order

  template <bool CLUSTER>
  __device__ __forceinline__ void rank(const TreePlan& plan, RankShared& s) {
    const int t = threadIdx.x, group = t / kRankThreads, warp = t / kWarp, lane = t % kWarp;
    const Team sharers{kRankThreads, 1 + group};
    for (int i = t; i < (plan.maxima + 3) / 4 * 4; i += block.threads) s.maxima[i] = 0;
    if (t == 0) s.candidates.length = 0, s.bound = 0xffffffffu;
    if (CLUSTER) {
      arrive_at_cluster();
    } else {
      block.sync();
    }
    own = -INFINITY;
#pragma unroll
    for (int j = 0; j < kRankShare; ++j) own = max_or_nan(own, share.x[j]);
    const uint32_t order = order_of_logit(own), warp_top = __reduce_max_sync(kAll, order);
    if (lane == 0) s.top[warp] = warp_top;
    sharers.sync();
    const uint32_t* tops = s.top + group * (kRankThreads / kWarp);
    const float top = logit_of_order(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    if (CLUSTER) wait_for_cluster();  // every block has begun and cleared its maxima
    // A maximum goes to every block that takes a bound from it.
    const auto give = [&](int at, uint32_t greatest) {
      if (CLUSTER) {
        if (lane < plan.lists) store_to_block(block_address(s.maxima + at, lane), greatest);
      } else if (lane == 0) {
        s.maxima[at] = greatest;
      }
    };
    const int blocks_before = CLUSTER ? static_cast<int>(blockIdx.x) : 0;
    if (plan.rounds == 0) {
      if (t % kRankThreads < kWarp) give(blocks_before * plan.group + group, top > -INFINITY ? order_of_logit(top) : 0u);
    } else {
      const int at = (blocks_before * block.warps() + warp) * plan.rounds;
      warp_maxima(own > -INFINITY ? order : 0u, plan.rounds, [&](int r, uint32_t greatest) { give(at + r, greatest); });
    }
    if (CLUSTER) arrive_at_cluster();
    const float sum = top > -INFINITY && top < INFINITY ? segment_sum(share, top, s.lane[group], sharers, t % kRankThreads) : 0.f;
    if (t % kRankThreads == 0) {
      if (CLUSTER) {
        const int segment = blockIdx.x * plan.group + group;
        store_to_block(block_address(s.tops + segment, 0), __float_as_uint(top));
        store_to_block(block_address(s.sums + segment, 0), __float_as_uint(sum));
      } else {
        s.tops[group] = top, s.sums[group] = sum;
      }
    }
    if (CLUSTER) {
      wait_for_cluster();
    } else {
      block.sync();
    }
    bound = bound_of_maxima(block, s.maxima, plan.maxima, plan.best, s.bound);
  }

  // The keys that reach the bound to put(place, key), counted in s.candidates.length; where they are more than `room` the block's plan.best
  // greatest alone.
  template <typename Put>
  __device__ __forceinline__ void gather(const TreePlan& plan, int room, RankShared& s, Put put) {
    int& length = s.candidates.length;
    collect(share, first, own, bound, length, [&](int place, Key key) {
      if (place < room) put(place, key);
    });
    block.sync();
    if (length <= room) return;
    const Key exact = exact_bound(block, plan.best, s.candidates, [&](Key raised) {
      int reach = 0;
      share.each(first, [&](Key key) { reach += key >= raised ? 1 : 0; });
      return reach;
    });
    if (threadIdx.x == 0) length = 0;
    block.sync();
    share.each(first, [&](Key key) {
      if (key >= exact) put(atomicAdd(&length, 1), key);
    });
    block.sync();
  }
};

// The segments of this block; false if the tree does not reach its depth.
__device__ __forceinline__ bool reaches_depth(const TreeBuildArgs& a, const TreePlan& plan, const float*& row) {
  const StateRead state(a.state);
  const int depth = blockIdx.y;
  row = a.draft + static_cast<size_t>(state.first() + depth) * a.vocab;
  return depth < state.limit(a);
}
__device__ __forceinline__ Segments segments_of(const TreeBuildArgs& a, const TreePlan& plan, const float* row) {
  const int group = threadIdx.x / kRankThreads, begin = (blockIdx.x * plan.group + group) * kTreeSegment;
  return {SegmentShare(row + begin, min(max(a.vocab - begin, 0), kTreeSegment), threadIdx.x % kRankThreads),
          Team{static_cast<int>(blockDim.x), 0}, begin, 0.f, 0u};
}

__global__ __launch_bounds__(kRankGroups * kRankThreads, 1) void rank_kernel(TreeBuildArgs a, TreePlan plan) {
  __shared__ RankShared s;
  wait_for_previous();
  const float* row;
  if (!reaches_depth(a, plan, row)) return;
  Segments segments = segments_of(a, plan, row);
  segments.rank<false>(plan, s);
  segments.gather(plan, kCandidates, s, [&](int place, Key key) { s.candidates.key[place] = key; });
  sort_candidates(segments.block, s.candidates, plan.best, s.sorted);
  __syncthreads();
  const int depth = blockIdx.y, t = threadIdx.x;
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

// The best of what the blocks of a cluster have given, in order, into s.sorted; by a team.
__device__ void merge_given(const Team& team, const Key (*given)[kDepthKeys], const TreePlan& plan, RankShared& s) {
  const int t = team.thread(), lane = t % kWarp;
  Candidates& c = s.candidates;
  int all = 0;
  for (int b = 0; b < plan.lists; ++b) all += s.counts[b];
  if (all <= kCandidates) {
    for (int b = t / kWarp; b < plan.lists; b += team.warps()) {
      int at = 0;
      for (int before = 0; before < b; ++before) at += s.counts[before];
      for (int i = lane; i < s.counts[b]; i += kWarp) c.key[at + i] = given[b][i];
    }
    if (t == 0) c.length = all;
    team.sync();
  } else {
    const auto each = [&](auto use) {
      for (int i = t; i < plan.lists * kDepthKeys; i += team.threads) {
        if (i % kDepthKeys < s.counts[i / kDepthKeys]) use(given[i / kDepthKeys][i % kDepthKeys]);
      }
    };
    const Key bound = exact_bound(team, plan.best, c, [&](Key raised) {
      int reach = 0;
      each([&](Key key) { reach += key >= raised ? 1 : 0; });
      return reach;
    });
    if (t == 0) c.length = 0;
    team.sync();
    each([&](Key key) {
      if (key >= bound) c.key[atomicAdd(&c.length, 1)] = key;
    });
    team.sync();
  }
  sort_candidates(team, c, plan.best, s.sorted);
}

// Rank and merge in one launch: a cluster a depth, whose blocks share a bound and give what reaches it to the first.
__global__ __launch_bounds__(kRankGroups * kRankThreads, 1) void depth_kernel(TreeBuildArgs a, TreePlan plan) {
  __shared__ RankShared s;
  __shared__ Key given[kDepthBlocks][kDepthKeys];
  __shared__ float row_sum, row_top;
  wait_for_previous();
  const float* row;
  if (!reaches_depth(a, plan, row)) return;  // the whole cluster alike
  Segments segments = segments_of(a, plan, row);
  segments.rank<true>(plan, s);
  const uint32_t mine = block_address(given[blockIdx.x], 0);
  segments.gather(plan, kDepthKeys, s, [&](int place, Key key) { store_to_block(mine + place * sizeof(Key), key); });
  if (threadIdx.x == 0) store_to_block(block_address(s.counts + blockIdx.x, 0), static_cast<uint32_t>(s.candidates.length));
  arrive_at_cluster();
  wait_for_cluster();
  if (blockIdx.x != 0) return;
  const Team team{segments.block.threads - kWarp, 1};
  if (static_cast<int>(threadIdx.x) >= team.threads) {
    float top;
    const float lse = row_lse(s.tops, s.sums, plan.segments, top);
    if (threadIdx.x % kWarp == 0) row_sum = lse, row_top = top;
  } else {
    merge_given(team, given, plan, s);
  }
  __syncthreads();
  publish(plan, blockIdx.y, s.sorted, plan.best, row_sum, row_top, blockDim.x);
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
template <int PLACES>
__device__ __forceinline__ void grow_rows(const TreeBuildArgs& a, const StateRead& state, int bad, const Grown& s, int width) {
  __shared__ int n_rows;
  if (threadIdx.x < kWarp) {
    const int limit = state.limit(a);
    const int n = bad < limit ? 1 : grow_in_registers<PLACES>(s.table, width, min(a.budget + 1, a.rows.max_rows), s.nodes, s.scores);
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

template <int PLACES>
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
  grow_rows<PLACES>(a, state, bad, s, width);
}

// What a bound is taken from: the segments' greatest logits if they are plenty, else some of every warp's.
void take_bound_from(TreePlan& plan, int group, int lists, bool cluster) {
  plan.group = group, plan.lists = lists;
  const int segments = cluster ? lists * group : group, warps = segments * (kRankThreads / kWarp);
  plan.rounds = segments >= 2 * plan.best ? 0 : std::min((5 * plan.best + 4 * warps - 1) / (4 * warps), kWarp);
  plan.maxima = plan.rounds == 0 ? segments : plan.rounds * warps;
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
      const bool cluster = lists > 1 && lists <= kDepthBlocks && overlaps_;  // what can overlap launches has clusters too
      take_bound_from(plan, group, lists, cluster);
      const dim3 grid(static_cast<unsigned>(lists), static_cast<unsigned>(plan.depths));
      if (cluster) {
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
  // A node of the last row has no child, so the budget alone needs places.
  const auto grow = !in_registers          ? grow_heap_kernel
                    : a.budget <= kWarp     ? grow_kernel<1>
                    : a.budget <= 2 * kWarp ? grow_kernel<2>
                                            : grow_kernel<4>;
  reserve_shared(reinterpret_cast<const void*>(grow), "tree_build", shared);
  launch("tree_build", grow, dim3(1), kTreeThreads, shared, a, plan);
}

}  // namespace kdtree
