// The choice of a row's experts by a block: sigmoid scores, the best by score plus bias within the kept groups, weights from the scores.
//
// No round waits for the one before it: the top_k-th greatest of disjoint subsets' maxima is a bound that at least top_k experts reach and
// few more, and the place of each of these is the number of those that come before it: greater ones, and equal ones of lower id. So ties
// go to the lowest id by the same comparison. Where many are equal many reach the bound, and the list is longer; nothing else changes.
#pragma once
#include "device.cuh"
#include "fault.cuh"

namespace kdtree {
namespace cuda {

constexpr int kChoiceThreads = 256;
constexpr int kGone = INT32_MIN;  // below every float's order

// Floats as integers of the same order, -0 as +0.
__device__ __forceinline__ int order_of(float v) {
  const int bits = __float_as_int(v == 0.f ? 0.f : v);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
__device__ __forceinline__ float value_of(int order) { return __int_as_float(order < 0 ? order ^ 0x7fffffff : order); }

// What a block needs in shared memory for it, from an address that is a multiple of 8.
struct ChoiceMemory {
  int2* listed;   // [experts] order and id of those that reach the bound
  float* score;   // [experts]
  int* order;     // [experts] of score + bias; kGone: out of the running
  int* greatest;  // [ceil(experts/32)] of 32 neighbours
  int* group;     // [n_group] order of the sum of its two best
  int* taken;     // [top_k] in the order of choice
  float* chosen;  // [top_k] their scores
  int* count;     // of listed

  __host__ __device__ static constexpr size_t bytes(int experts, int n_group, int top_k) {
    return 4 * (4 * static_cast<size_t>(experts) + static_cast<size_t>(experts + kWarp - 1) / kWarp + static_cast<size_t>(n_group) +
                2 * static_cast<size_t>(top_k) + 1);
  }
  __device__ ChoiceMemory(void* at, int experts, int n_group, int top_k) {
    listed = static_cast<int2*>(at);
    score = reinterpret_cast<float*>(listed + experts);
    order = reinterpret_cast<int*>(score + experts);
    greatest = order + experts;
    group = greatest + (experts + kWarp - 1) / kWarp;
    taken = group + n_group;
    chosen = reinterpret_cast<float*>(taken + top_k);
    count = reinterpret_cast<int*>(chosen + top_k);
  }
};

// Takes the experts of all but the best topk_group groups out of the running; a group counts by the sum of its two best.
__device__ __forceinline__ void keep_groups(const RouterArgs& a, const ChoiceMemory& at) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, size = a.experts / a.n_group;
  __syncthreads();
  for (int g = warp; g < a.n_group; g += kChoiceThreads / kWarp) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = g * size + lane; e < (g + 1) * size; e += kWarp) {
      const float c = value_of(at.order[e]);
      second = fmaxf(second, fminf(first, c)), first = fmaxf(first, c);
    }
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      const float other = __shfl_xor_sync(kAll, first, mask), next = __shfl_xor_sync(kAll, second, mask);
      second = fmaxf(fminf(first, other), fmaxf(second, next)), first = fmaxf(first, other);
    }
    if (lane == 0) at.group[g] = order_of(__fadd_rn(first, second));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.experts; e += kChoiceThreads) {
    const int g = e / size, mine = at.group[g];
    int before = 0;
    for (int i = 0; i < a.n_group; ++i) before += at.group[i] > mine || (at.group[i] == mine && i < g);
    if (before >= a.topk_group) at.order[e] = kGone;
  }
}

// Chooses for row m; where m is negative, which is no row, without effect. bias(e), logit(e, ask(e)): of expert e, by one thread, thread e % kChoiceThreads,
// which asks for several before it looks at one. tell(j, e): choice j is expert e, before its weight is found. Called by kChoiceThreads threads; ends with no
// barrier.
template <typename Ask, typename Logit, typename Bias, typename Tell>
__device__ __forceinline__ void choose_experts(const RouterArgs& a, int m, void* memory, const Ask& ask, const Logit& logit, const Bias& bias, const Tell& tell) {
  constexpr int AHEAD = 2;  // of a thread's experts whose logits are on their way at a time
  const ChoiceMemory at(memory, a.experts, a.n_group, a.top_k);
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp, subsets = (a.experts + kWarp - 1) / kWarp;
  bool finite = true;
  for (int base = thread; base < a.experts; base += AHEAD * kChoiceThreads) {
    decltype(ask(0)) asked[AHEAD];
    float b[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int e = min(base + i * kChoiceThreads, a.experts - 1);
      asked[i] = ask(e), b[i] = bias(e);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int e = base + i * kChoiceThreads;
      if (e >= a.experts) break;
      const float l = logit(e, asked[i]), s = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-l))), c = __fadd_rn(s, b[i]);
      finite = finite && isfinite(l) && isfinite(c);
      at.score[e] = s, at.order[e] = order_of(c);
    }
  }
  if (a.n_group > 1) keep_groups(a, at);
  for (int subset = warp; subset < subsets; subset += kChoiceThreads / kWarp) {  // of this thread's own experts
    const int e = subset * kWarp + lane, top = __reduce_max_sync(kAll, e < a.experts ? at.order[e] : kGone);
    if (lane == 0) at.greatest[subset] = top;
  }
  if (thread == 0) *at.count = 0;
  if (!__syncthreads_and(finite)) {
    if (m < 0) return;
    if (thread == 0) record_fault(a.state, kFaultRouterNonFinite, m, a.layer);
    for (int j = thread; j < a.top_k; j += kChoiceThreads) {
      a.ids[m * a.top_k + j] = j;  // something in range for whatever runs before the host hears of it
      tell(j, j);
      a.weights[m * a.top_k + j] = 0.f;
    }
    return;
  }

  int mine = kGone, before = 0;  // lanes have unions of subsets
  for (int i = lane; i < subsets; i += kWarp) mine = max(mine, at.greatest[i]);
#pragma unroll 8
  for (int i = 0; i < kWarp; ++i) {
    const int other = __shfl_sync(kAll, mine, i);
    before += other > mine || (other == mine && i < lane);
  }
  const unsigned owner = __ballot_sync(kAll, before == a.top_k - 1);
  const int bound = owner == 0 ? kGone : __shfl_sync(kAll, mine, __ffs(static_cast<int>(owner)) - 1);
  for (int base = warp * kWarp; base < a.experts; base += kChoiceThreads) {
    const int e = base + lane, order = e < a.experts ? at.order[e] : kGone;
    const bool reaches = order != kGone && order >= bound;
    const unsigned all = __ballot_sync(kAll, reaches);
    if (all == 0) continue;
    int first = 0;
    if (lane == 0) first = atomicAdd(at.count, __popc(all));
    first = __shfl_sync(kAll, first, 0);
    if (reaches) at.listed[first + __popc(all & ((1u << lane) - 1))] = make_int2(order, e);
  }
  __syncthreads();
  const int listed = *at.count;
  KD_ASSERT(listed >= a.top_k, "router: fewer experts in the running than top_k");
  for (int i = thread; i < listed; i += kChoiceThreads) {
    const int2 own = at.listed[i];
    int place = 0;
#pragma unroll 8
    for (int j = 0; j < listed; ++j) {
      const int2 other = at.listed[j];
      place += other.x > own.x || (other.x == own.x && other.y < own.y);
    }
    if (place < a.top_k) at.taken[place] = own.y, at.chosen[place] = at.score[own.y];
  }
  __syncthreads();
  for (int j = thread; j < a.top_k; j += kChoiceThreads) {
    const int id = at.taken[j];
    if (m >= 0) tell(j, id);
    float weight = at.chosen[j];
    if (a.norm_topk) {
      float sum = 0.f;
#pragma unroll 8
      for (int i = 0; i < a.top_k; ++i) sum = __fadd_rn(sum, at.chosen[i]);
      weight = __fdiv_rn(weight, __fadd_rn(sum, 1e-20f));
    }
    if (m < 0) break;
    a.ids[m * a.top_k + j] = id;
    a.weights[m * a.top_k + j] = __fmul_rn(weight, a.scaling);
  }
}

}  // namespace cuda
}  // namespace kdtree
