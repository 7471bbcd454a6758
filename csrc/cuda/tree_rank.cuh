// Ranking up to kFewBest tokens of a depth, exactly and in order: a bound that enough keys reach leaves few candidates, and a
// candidate's place is the number of greater ones.
#pragma once
#include "tree_lse.cuh"

namespace kdtree {
namespace cuda {

constexpr int kRankThreads = 128;                          // that share a segment
constexpr int kRankShare = kTreeSegment / kRankThreads;    // elements a thread holds
constexpr int kRankGroups = 7;                             // segments a block ranks at most
constexpr int kRankWarps = kRankGroups * kRankThreads / kWarp;
constexpr int kCandidates = 512;                           // room for what reaches a bound
constexpr int kAtOnce = 4;                                 // candidates that a warp places side by side
static_assert(kRankShare == 32, "a bit an element");
static_assert(kRankThreads == 128 && kTreeLanes == 256, "segment_sum spells out the halving of 256 lanes");

// Threads of a block that work together: `threads` from `begin` on, whole warps, which meet at barrier `barrier`.
struct Team {
  int threads, barrier, begin = 0;

  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x) - begin; }

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
  __device__ __forceinline__ void arrive() const { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
  __device__ __forceinline__ int warps() const { return threads / kWarp; }
};

struct Candidates {
  int length;               // how many there are, also if they do not fit
  int reach[kRankWarps];    // of a bound that is tried, by warp
  __align__(16) Key key[kCandidates + kAtOnce];
};

// The greatest bound that at least `wanted` of the team's keys reach, a bit at a time; 0 if there are fewer. reach(bound): how many of the
// thread's own do.
template <typename Reach>
__device__ Key exact_bound(const Team& team, int wanted, Candidates& c, Reach reach) {
  Key bound = 0;
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    const Key raised = bound | Key{1} << bit;
    const int mine = __reduce_add_sync(kAll, reach(raised));
    if (team.thread() % kWarp == 0) c.reach[team.thread() / kWarp] = mine;
    team.sync();
    int all = 0;
    for (int w = 0; w < team.warps(); ++w) all += c.reach[w];
    if (all >= wanted) bound = raised;
    team.sync();
  }
  return bound;
}

// The `wanted` greatest candidates in descending order, then zeros, into out. The candidates are in place for the whole team.
__device__ inline void sort_candidates(const Team& team, Candidates& c, int wanted, Key* out) {
  const int t = team.thread(), lane = t % kWarp, warp = t / kWarp, length = c.length;
  for (int i = length + t; i < wanted; i += team.threads) out[i] = 0;
  for (int first = warp * kAtOnce; first < length; first += team.warps() * kAtOnce) {
    Key key[kAtOnce];
    int greater[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) key[i] = c.key[first + i], greater[i] = 0;  // past the length: not placed
#pragma unroll 2
    for (int j = lane; j < length; j += kWarp) {
      const Key other = c.key[j];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) greater[i] += other > key[i] ? 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) greater[i] = __reduce_add_sync(kAll, greater[i]);
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < length && greater[i] < wanted) out[greater[i]] = key[i];
      }
    }
  }
}

// Shared memory of one block that ranks.
struct RankShared {
  float lane[kRankGroups][kRankThreads];
  uint32_t top[kRankWarps], least[kRankWarps];
  float tops[kRankGroups], sums[kRankGroups];
  Candidates candidates;
  Key sorted[kFewBest];
};

// A thread's share of a segment of n elements: those at t, t + 128, ..; what is past the segment's end is -inf.
struct SegmentShare {
  const float* segment;
  int n, t;
  float x[kRankShare];

  __device__ __forceinline__ SegmentShare(const float* at, int length, int thread) : segment(at), n(length), t(thread) {
    if (n == kTreeSegment) {
#pragma unroll
      for (int j = 0; j < kRankShare; ++j) x[j] = segment[t + j * kRankThreads];
    } else {
#pragma unroll
      for (int j = 0; j < kRankShare; ++j) x[j] = t + j * kRankThreads < n ? segment[t + j * kRankThreads] : -INFINITY;
    }
  }
  // Calls use(key) for every key, read again: through what seldom runs no registers are to be held. first: the token of the segment's first.
  template <typename Use>
  __device__ __forceinline__ void each(int first, Use use) const {
#pragma unroll 1
    for (int i = t; i < n; i += kRankThreads) {
      const float v = segment[i];
      if (v > -INFINITY) use(key_of(v, first + i));
    }
  }
};

// sum + term where x >= -87, else the sum. One instruction under a predicate: the compiler would branch around the term's formation too,
// and then could not form several side by side.
__device__ __forceinline__ float add_in_range(float sum, float term, float x) {
  asm("{\n\t.reg .pred in;\n\tsetp.ge.f32 in, %2, 0fC2AE0000;\n\t@in add.rn.f32 %0, %0, %1;\n\t}" : "+f"(sum) : "f"(term), "f"(x));
  return sum;
}

// sum of exp32(x_i - top) over a segment in docs/model.md's order; in thread 0 of those that share it. A thread is the lanes t and t + 128.
__device__ __forceinline__ float segment_sum(const SegmentShare& share, float top, float* lanes, const Team& sharers, int t) {
  float even = 0.f, odd = 0.f;
#pragma unroll
  for (int j = 0; j < kRankShare; j += 2) {
    const float a = __fsub_rn(share.x[j], top), b = __fsub_rn(share.x[j + 1], top);
    even = add_in_range(even, exp32_in_range(a), a), odd = add_in_range(odd, exp32_in_range(b), b);
  }
  lanes[t] = __fadd_rn(even, odd);
  sharers.sync();
  if (t >= kWarp) return 0.f;
  float v = __fadd_rn(__fadd_rn(lanes[t], lanes[t + 64]), __fadd_rn(lanes[t + 32], lanes[t + 96]));
#pragma unroll
  for (int h = kWarp / 2; h > 0; h /= 2) v = __fadd_rn(v, __shfl_down_sync(kAll, v, h));
  return v;
}

// Puts the keys of a share that reach `bound` among the candidates, in any order. top: the thread's greatest logit. Most warps have a few
// such keys, most lanes none or one; it is read again, because registers have no index.
__device__ __forceinline__ void collect(const SegmentShare& share, int first, float top, float bound, Candidates& c) {
  if (!__any_sync(kAll, top >= bound)) return;
  if (bound == 0.f) bound = -0.f;  // from which no zero is below
  uint32_t below = 0;              // bit 31 - j: the difference of element j is negative
#pragma unroll
  for (int j = 0; j < kRankShare; ++j) below = __funnelshift_l(__float_as_uint(__fsub_rn(share.x[j], bound)), below, 1);
  uint32_t hits = ~below;
  const int lane = threadIdx.x % kWarp, all = __reduce_add_sync(kAll, __popc(hits));
  int at = 0;
  if (lane == 0) at = atomicAdd(&c.length, all);
  at = __shfl_sync(kAll, at, 0);
  for (unsigned some = __ballot_sync(kAll, hits != 0); some != 0; some = __ballot_sync(kAll, hits != 0)) {
    const int place = at + __popc(some & ((1u << lane) - 1));
    if (hits != 0 && place < kCandidates) {
      const int i = share.t + (kRankShare - __ffs(static_cast<int>(hits))) * kRankThreads;
      c.key[place] = key_of(share.segment[i], first + i);
    }
    hits &= hits - 1;
    at += __popc(some);
  }
}

// The `wanted` best of a block's segments, sorted, into s.sorted; zeros where there are fewer. mine: the order of the thread's greatest
// logit, 0 if that is -inf. s.candidates.length is 0 before. In each warp so many lanes' greatest logits reach its bound that
// together they are `wanted`; so the least of the bounds is reached by as many, and seldom by many more.
__device__ __forceinline__ uint32_t warp_bound(uint32_t mine, int rounds) {
  const int lane = threadIdx.x % kWarp;
  uint32_t least = 0;
  for (int i = 0; i < rounds; ++i) {
    least = __reduce_max_sync(kAll, mine);
    if (lane == __ffs(static_cast<int>(__ballot_sync(kAll, mine == least))) - 1) mine = 0;
  }
  return least;
}

__device__ __forceinline__ void rank_share(const Team& block, const SegmentShare& share, int first, float top, int wanted, RankShared& s) {
  uint32_t least = threadIdx.x % kWarp < static_cast<unsigned>(block.warps()) ? s.least[threadIdx.x % kWarp] : 0xffffffffu;
  least = __reduce_min_sync(kAll, least);
  collect(share, first, top, least == 0 ? -3.402823466e38f : logit_of_order(least), s.candidates);  // the least finite one
  block.sync();
  if (s.candidates.length > kCandidates) {
    const Key bound = exact_bound(block, wanted, s.candidates, [&](Key raised) {
      int reach = 0;
      share.each(first, [&](Key key) { reach += key >= raised ? 1 : 0; });
      return reach;
    });
    if (threadIdx.x == 0) s.candidates.length = 0;
    block.sync();
    share.each(first, [&](Key key) {
      if (key >= bound) s.candidates.key[atomicAdd(&s.candidates.length, 1)] = key;
    });
    block.sync();
  }
  sort_candidates(block, s.candidates, wanted, s.sorted);
  block.sync();
}

}  // namespace cuda
}  // namespace kdtree
