// What the launches of tree_build share: where their results lie in scratch, the depth limit, and the order of draft tokens.
#pragma once
#include "device.cuh"

namespace kdtree {
namespace cuda {

constexpr int kTreeThreads = 256;
constexpr int kTreeLanes = 256;  // of docs/model.md's log-sum-exp
constexpr int kTreeSegment = 4096;
constexpr int kTreeMaxBest = 4096;  // tokens a depth may rank: a segment's worth
constexpr int kFewBest = 128;       // up to so many are ranked by bound and count, more by radix

// A token's place in its depth as one number, greater is better: the logit, then the lower token. 0 is no token.
using Key = unsigned long long;

__device__ __forceinline__ uint32_t order_of_logit(float logit) {
  const uint32_t bits = __float_as_uint(logit == 0.f ? 0.f : logit);  // -0 and +0 are equal logits
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float logit_of_order(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
__device__ __forceinline__ Key key_of(float logit, int token) {
  return static_cast<Key>(order_of_logit(logit)) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ int token_of(Key key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
__device__ __forceinline__ float logit_of(Key key) { return logit_of_order(static_cast<uint32_t>(key >> 32)); }

// Scratch of tree_build; depth d counts from 0 for the level below the root. A list is the best of a block's segments in descending
// order, then zeros. Surprisals are -log-probabilities; each depth's end with a NaN, which no sum of them outlives.
struct TreePlan {
  Key* keys;         // [depths, lists, best]; absent when there is one list
  float* tops;       // [depths, segments] greatest logit, NaN where one is a NaN
  float* sums;       // [depths, segments] sum of exp32(logit - top)
  int32_t* bad;      // [depths] NaN or +inf among the logits
  double* surprisal; // [depths, best + 1] ascending
  int32_t* tokens;   // [depths, best + 1]
  int segments, lists, best, depths;
  int group;           // segments a block ranks
  int rounds, maxima;  // what each warp gives to the maxima that a bound is taken from (0: each segment gives one), and how many they are
};

inline size_t lay_out(TreePlan& p, char* base, int vocab, int block_size, int budget) {
  p.segments = (vocab + kTreeSegment - 1) / kTreeSegment;
  p.lists = p.segments;
  p.best = budget < vocab ? budget : vocab;
  p.depths = block_size > 1 ? block_size - 1 : 0;
  size_t at = 0;
  const auto take = [&](auto*& pointer, size_t n) {
    pointer = base == nullptr ? nullptr : reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + at);
    at += (n * sizeof(*pointer) + 63) / 64 * 64;
  };
  const size_t d = static_cast<size_t>(p.depths), best = static_cast<size_t>(p.best), cells = d * p.segments;
  take(p.keys, p.segments > 1 ? cells * best : 0);
  take(p.tops, cells);
  take(p.sums, cells);
  take(p.bad, d);
  take(p.surprisal, d * (best + 1));
  take(p.tokens, d * (best + 1));
  return at;
}

// What tree_build reads of the state, side by side: a field that waited for another would cost as much time again.
struct StateRead {
  int bonus, kv_len, committed, most, draft_first, draft_rows;

  __device__ __forceinline__ explicit StateRead(const StepState* s)
      : bonus(read(&s->bonus)), kv_len(read(&s->kv_len)), committed(read(&s->committed)), most(read(&s->limit)),
        draft_first(read(&s->draft_first)), draft_rows(read(&s->draft_rows)) {}
  static __device__ __forceinline__ int read(const int32_t* field) {
    int value;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(field) : "memory");
    return value;
  }
  __device__ __forceinline__ int first() const { return kv_len + 1 - draft_first; }  // the draft row of depth 1
  // Depths the tree may have: the block, the draft's reach, the tokens still allowed after the bonus; none below EOS.
  __device__ __forceinline__ int limit(const TreeBuildArgs& a) const {
    const bool none = (bonus == a.eos_id) | (a.budget < 1) | (first() < 0) | (first() >= draft_rows);
    return none ? 0 : max(0, min(min(a.block_size - 1, draft_rows - first()), most - committed - 1));
  }
};

__device__ __forceinline__ double surprisal_of(Key key, float lse) { return fabs(static_cast<double>(__fsub_rn(logit_of(key), lse))); }

// A depth's result from its sorted keys, by the first `threads` of a block. top: its greatest logit.
__device__ inline void publish(const TreePlan& plan, int depth, const Key* keys, int found, float lse, float top, int threads) {
  const int at = depth * (plan.best + 1);
  for (int i = threadIdx.x; i <= plan.best; i += threads) {
    const Key key = i < found ? keys[i] : 0;
    plan.tokens[at + i] = token_of(key);
    plan.surprisal[at + i] = key != 0 ? surprisal_of(key, lse) : __longlong_as_double(-1);
  }
  if (threadIdx.x == 0) plan.bad[depth] = top < INFINITY ? 0 : 1;
}

}  // namespace cuda
}  // namespace kdtree
