// What the launches of tree_build share: where their results lie in scratch, the depth limit, and the order of draft tokens.
#pragma once
#include "device.cuh"

namespace kdtree {
namespace cuda {

constexpr int kTreeThreads = 256;  // also the lanes of docs/model.md's log-sum-exp
constexpr int kTreeSegment = 4096;
constexpr int kTreeMaxBest = 4096;  // tokens a depth may rank: a segment's worth

// A token's place in its depth as one number, greater is better: the logit, then the lower token. 0 is no token.
using Key = unsigned long long;

__device__ __forceinline__ uint32_t order_of_logit(float logit) {
  const uint32_t bits = __float_as_uint(logit == 0.f ? 0.f : logit);  // -0 and +0 are equal logits
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ Key key_of(float logit, int token) {
  return static_cast<Key>(order_of_logit(logit)) << 32 | ~static_cast<uint32_t>(token);
}
__device__ __forceinline__ int token_of(Key key) { return static_cast<int>(~static_cast<uint32_t>(key)); }
__device__ __forceinline__ float logit_of(Key key) {
  const uint32_t order = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Scratch of tree_build; depth d counts from 0 for the level below the root.
struct TreePlan {
  Key* keys;        // [depths, segments, best]: a segment's best, in descending order; absent when there is one segment
  float* tops;      // [depths, segments] greatest logit
  float* sums;      // [depths, segments] sum of exp32(logit - top)
  int32_t* bad;     // [depths, segments] NaN or +inf among the logits
  int32_t* tokens;  // [depths, best]
  float* log_prob;  // [depths, best]
  int32_t* count;   // [depths] tokens that may be used
  int segments, best, depths;
};

inline size_t lay_out(TreePlan& p, char* base, int vocab, int block_size, int budget) {
  p.segments = (vocab + kTreeSegment - 1) / kTreeSegment;
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
  take(p.bad, cells);
  take(p.tokens, d * best);
  take(p.log_prob, d * best);
  take(p.count, d);
  return at;
}

// Depths the tree may have: the block, the draft's reach, the tokens still allowed after the bonus; none below EOS.
__device__ __forceinline__ int depth_limit(const TreeBuildArgs& a) {
  const StepState& s = *a.state;
  const int first = s.kv_len + 1 - s.draft_first;  // the draft row of depth 1
  if (s.bonus == a.eos_id || a.budget < 1 || first < 0 || first >= s.draft_rows) return 0;
  return max(0, min(min(a.block_size - 1, s.draft_rows - first), s.limit - s.committed - 1));
}

__device__ __forceinline__ const float* draft_row(const TreeBuildArgs& a, int depth) {
  return a.draft + static_cast<size_t>(a.state->kv_len + 1 - a.state->draft_first + depth) * a.vocab;
}

}  // namespace cuda
}  // namespace kdtree
