// The kernels that rank up to kFewBest tokens of every depth: by a cluster a depth, or by launches that follow each other.
#pragma once
#include <algorithm>

#include "tree_rank.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kMergeThreads = 256 + kWarp;  // the last warp forms the log-sum-exp meanwhile
constexpr int kMergeKeys = 4096;            // of all lists of a depth, what merge_kernel has shared memory for

// A cluster's barrier in two halves: what a block wrote to any of its blocks' shared memory before it arrives is there after the wait.
__device__ __forceinline__ void arrive_at_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __syncwarp();
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

// The row of logits of this block's depth; false if the tree does not reach it.
__device__ __forceinline__ bool reaches_depth(const TreeBuildArgs& a, const float*& row) {
  const StateRead state(a.state);
  const int depth = blockIdx.y;
  row = a.draft + static_cast<size_t>(state.first() + depth) * a.vocab;
  return depth < state.limit(a);
}
// The segments of this block, their logits on the way.
__device__ __forceinline__ Segments segments_of(const TreeBuildArgs& a, const TreePlan& plan, const float* row) {
  const int group = threadIdx.x / kRankThreads, begin = (blockIdx.x * plan.group + group) * kTreeSegment;
  return {SegmentShare(row + begin, min(max(a.vocab - begin, 0), kTreeSegment), threadIdx.x % kRankThreads),
          Team{static_cast<int>(blockDim.x), 0}, begin, 0.f, 0u};
}

__global__ __launch_bounds__(kRankGroups * kRankThreads, 1) void rank_kernel(TreeBuildArgs a, TreePlan plan) {
  __shared__ RankShared s;
  wait_for_previous();
  const float* row;
  if (!reaches_depth(a, row)) return;
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
  if (!reaches_depth(a, row)) return;  // the whole cluster alike
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

// What a bound is taken from: the segments' greatest logits if they are plenty, else some of every warp's.
void take_bound_from(TreePlan& plan, int group, int lists, bool cluster) {
  plan.group = group, plan.lists = lists;
  const int segments = cluster ? lists * group : group, warps = segments * (kRankThreads / kWarp);
  plan.rounds = segments >= 2 * plan.best ? 0 : std::min((5 * plan.best + 4 * warps - 1) / (4 * warps), kWarp);
  plan.maxima = plan.rounds == 0 ? segments : plan.rounds * warps;
}

}  // namespace
}  // namespace kdtree
