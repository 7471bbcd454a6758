// Ranking any number of tokens of a depth: radix selection, then a bitonic sort.
#pragma once
#include "tree_lse.cuh"

namespace kdtree {
namespace cuda {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == kTreeThreads, "a thread a digit");
constexpr int kTreeWarps = kTreeThreads / kWarp;

// Shared memory of one block of kTreeThreads that ranks by radix.
struct RadixShared {
  float lane[kTreeLanes];
  float warp_top[kTreeWarps];
  int digit[kDigits];  // keys with each value of the digit, then how many have that value or a greater one
  int warp_total[kTreeWarps];
  int chosen, above;  // the digit of the K-th key, and how many keys have a greater digit
  int length;
  float lse, top;
};

// Collects the `wanted` greatest of n distinct keys in descending order into out (room for a power of two >= wanted); absent keys are
// 0. Returns how many there are. Radix selection, eight bits a pass from the top; the order is that of the keys alone.
template <typename KeyAt>
__device__ int best_keys(KeyAt key_at, int n, int wanted, Key* out, RadixShared& s) {
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  Key prefix = 0;
  int need = wanted;
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const int above = shift + kDigitBits;
    s.digit[t] = 0;
    __syncthreads();
    for (int i = t; i < n; i += kTreeThreads) {
      const Key key = key_at(i);
      if (key != 0 && (above == 64 || key >> (above & 63) == prefix >> (above & 63)))
        atomicAdd(&s.digit[(key >> shift) % kDigits], 1);
    }
    __syncthreads();
    // Thread t holds digit 255 - t, so that an ascending scan counts the keys with that digit or a greater one.
    const int mine = s.digit[kDigits - 1 - t];
    int upto = mine;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int before = __shfl_up_sync(kAll, upto, d);
      if (lane >= d) upto += before;
    }
    if (lane == kWarp - 1) s.warp_total[warp] = upto;
    if (t == 0) s.chosen = -1;
    __syncthreads();
    for (int w = 0; w < warp; ++w) upto += s.warp_total[w];
    if (upto >= need && upto - mine < need) s.chosen = kDigits - 1 - t, s.above = upto - mine;
    __syncthreads();
    if (s.chosen < 0) {  // fewer keys than wanted (first pass only): all of them
      prefix = 1;
      break;
    }
    need -= s.above;
    prefix |= static_cast<Key>(s.chosen) << shift;
    const bool whole = s.digit[s.chosen] == need;  // the rest of this digit is wanted too
    __syncthreads();
    if (whole) break;
  }
  if (t == 0) s.length = 0;
  __syncthreads();
  for (int i = t; i < n; i += kTreeThreads) {
    const Key key = key_at(i);
    if (key >= prefix && key != 0) out[atomicAdd(&s.length, 1)] = key;
  }
  __syncthreads();
  const int length = s.length;
  int size = 1;
  while (size < length) size *= 2;
  for (int i = length + t; i < size; i += kTreeThreads) out[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {  // bitonic, descending
    for (int gap = run / 2; gap > 0; gap /= 2) {
      for (int i = t; i < size / 2; i += kTreeThreads) {
        const int low = (i / gap) * 2 * gap + i % gap, high = low + gap;
        const Key a = out[low], b = out[high];
        if ((a < b) == ((low & run) == 0)) out[low] = b, out[high] = a;
      }
      __syncthreads();
    }
  }
  return length;
}

}  // namespace cuda

namespace {

using namespace cuda;

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

}  // namespace
}  // namespace kdtree
