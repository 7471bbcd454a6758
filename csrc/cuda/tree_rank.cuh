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
constexpr int kMaxima = 512;                               // and for the maxima that a bound is taken from
constexpr int kDepthBlocks = 8;                            // blocks of a cluster that ranks a depth, at most
constexpr int kDepthKeys = 256;                            // candidates of each of them, at most
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
  uint32_t top[kRankWarps];
  float tops[kDepthBlocks * kRankGroups], sums[kDepthBlocks * kRankGroups];  // of the block's segments, or in a cluster's first block of the depth's
  __align__(16) uint32_t maxima[kMaxima];
  uint32_t bound;
  int counts[kDepthBlocks];
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

// The bound that `wanted` of the n maxima reach and as few more as may be, as the order of a logit; 0 if fewer are above it. They are
// greatest logits of disjoint parts, so as many keys reach it, and seldom many more. maxima: filled up to a multiple of four with zeros.
__device__ __forceinline__ uint32_t bound_of_maxima(const Team& block, const uint32_t* maxima, int n, int wanted, uint32_t& bound) {
  constexpr int kSharers = 4;  // threads that compare a value with all others
  const int t = threadIdx.x, part = t % kSharers, quads = (n + 3) / 4, values = block.threads / kSharers;
  const uint4* all = reinterpret_cast<const uint4*>(maxima);
  uint32_t least = 0xffffffffu;
  for (int first = t / kWarp * (kWarp / kSharers); first < n; first += values) {
    const int at = first + t % kWarp / kSharers;
    const uint32_t mine = at < n ? maxima[at] : 0xffffffffu;
    int greater = 0;
#pragma unroll 4
    for (int j = part; j < quads; j += kSharers) {
      const uint4 other = all[j];
      greater += (other.x > mine ? 1 : 0) + (other.y > mine ? 1 : 0) + (other.z > mine ? 1 : 0) + (other.w > mine ? 1 : 0);
    }
    greater += __shfl_xor_sync(kAll, greater, 1);
    greater += __shfl_xor_sync(kAll, greater, 2);
    if (greater < wanted) least = min(least, mine);
  }
  if (t / kWarp * (kWarp / kSharers) < n) {
    least = __reduce_min_sync(kAll, least);
    if (t % kWarp == 0) atomicMin(&bound, least);
  }
  block.sync();
  return bound;
}

// Element j of a share: registers have no index, but five choices find it.
__device__ __forceinline__ float element(const SegmentShare& share, int j) {
  float a[kRankShare / 2];
#pragma unroll
  for (int i = 0; i < kRankShare / 2; ++i) a[i] = j & 1 ? share.x[2 * i + 1] : share.x[2 * i];
#pragma unroll
  for (int i = 0; i < kRankShare / 4; ++i) a[i] = j & 2 ? a[2 * i + 1] : a[2 * i];
#pragma unroll
  for (int i = 0; i < kRankShare / 8; ++i) a[i] = j & 4 ? a[2 * i + 1] : a[2 * i];
#pragma unroll
  for (int i = 0; i < kRankShare / 16; ++i) a[i] = j & 8 ? a[2 * i + 1] : a[2 * i];
  return j & 16 ? a[1] : a[0];
}

// Gives the keys of a share that reach `order` to put(place, key), places from `length` on in any order. top: the thread's greatest logit.
template <typename Put>
__device__ __forceinline__ void collect(const SegmentShare& share, int first, float top, uint32_t order, int& length, Put put) {
  float bound = order == 0 ? -3.402823466e38f : logit_of_order(order);  // 0: all that are finite
  if (top < bound) return;
  if (bound == 0.f) bound = -0.f;  // from which no zero is below
  uint32_t below = 0;              // bit 31 - j: the difference of element j is negative
#pragma unroll
  for (int j = 0; j < kRankShare; ++j) below = __funnelshift_l(__float_as_uint(__fsub_rn(share.x[j], bound)), below, 1);
  for (uint32_t hits = ~below; hits != 0; hits &= hits - 1) {
    const int j = kRankShare - __ffs(static_cast<int>(hits));
    put(atomicAdd(&length, 1), key_of(element(share, j), first + share.t + j * kRankThreads));
  }
}

// What a lane of a warp gives to the maxima: in round r < rounds the warp's r-th greatest of its lanes' logits; the same in all lanes.
template <typename Put>
__device__ __forceinline__ void warp_maxima(uint32_t mine, int rounds, Put put) {
  const int lane = threadIdx.x % kWarp;
  for (int r = 0; r < rounds; ++r) {
    const uint32_t greatest = __reduce_max_sync(kAll, mine);
    put(r, greatest);
    if (r + 1 < rounds && lane == __ffs(static_cast<int>(__ballot_sync(kAll, mine == greatest))) - 1) mine = 0;
  }
}

}  // namespace cuda
}  // namespace kdtree
