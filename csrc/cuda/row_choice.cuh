// The choice of one row's experts by a warp, where a block of a later launch makes it for itself: choice.cuh's, in every bit, without groups.
//
// The segments' sums of the router's logits come by the bulk copy engine, all at once: behind a stream of weights a load takes microseconds.
// Then the best by score plus bias is found top_k times; of equal ones the lowest id is first.
#pragma once
#include "barrier.cuh"
#include "choice.cuh"
#include "stream.cuh"

namespace kdtree {
namespace cuda {

struct RowChoice {
  RouterArgs router;
  const float* parts;  // [kSegments, experts]
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// A warp's; from before the launch ahead has ended, which leaves the parts.
struct RowChooser {
  static constexpr int EACH = stream::kRowExperts / kWarp;  // experts of a lane
  float bias[EACH];

  __device__ __forceinline__ explicit RowChooser(const RouterArgs& a) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) bias[i] = __ldg(a.bias + min(i * kWarp + static_cast<int>(threadIdx.x % kWarp), a.experts - 1));
  }

  // Lane t gives back choice t, of top_k. memory: 16-aligned, for all the parts; barrier: for one arrival, not yet used. Writes logits, ids and weights where
  // `writes` says so.
  __device__ __forceinline__ int operator()(const RowChoice& c, float* memory, uint64_t* barrier, bool writes) const {
    const RouterArgs& a = c.router;
    const int lane = threadIdx.x % kWarp;
    const uint32_t bytes = kSegments * a.experts * sizeof(float);
    if (lane == 0) {
      barrier_expect(shared_address(barrier), bytes);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(memory)), "l"(c.parts), "r"(bytes),
                   "r"(shared_address(barrier))
                   : "memory");
    }
    barrier_wait(shared_address(barrier), 0);
    int order[EACH];
    float score[EACH];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int e = i * kWarp + lane;
      order[i] = kGone, score[i] = 0.f;
      if (e >= a.experts) continue;
      float sum = memory[e];
#pragma unroll
      for (int s = 1; s < kSegments; ++s) sum = __fadd_rn(sum, memory[s * a.experts + e]);
      if (writes) const_cast<float*>(a.logits)[e] = sum;
      score[i] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-sum)));
      const float biased = __fadd_rn(score[i], bias[i]);
      finite = finite && isfinite(sum) && isfinite(biased);
      order[i] = order_of(biased);
    }
    int id = lane;  // something in range for whatever runs before the host hears of a fault
    float weight = 0.f;
    if (__all_sync(kAll, finite)) {
      float chosen = 0.f, all = 0.f;
#pragma unroll 1
      for (int t = 0; t < a.top_k; ++t) {
        int best = kGone, at = 0;
        float own = 0.f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          if (order[i] > best) best = order[i], at = i, own = score[i];
        }
        const int top = __reduce_max_sync(kAll, best);
        const int e = __reduce_min_sync(kAll, best == top ? at * kWarp + lane : INT32_MAX);
        const float its = __shfl_sync(kAll, own, e % kWarp);
        all = __fadd_rn(all, its);
        if (lane == t) id = e, chosen = its;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          if (i * kWarp + lane == e) order[i] = kGone;
        }
      }
      weight = a.norm_topk ? __fdiv_rn(chosen, __fadd_rn(all, 1e-20f)) : chosen;
      weight = __fmul_rn(weight, a.scaling);
    } else if (writes && lane == 0) {
      record_fault(a.state, kFaultRouterNonFinite, 0, a.layer);
    }
    if (writes && lane < a.top_k) a.ids[lane] = id, a.weights[lane] = weight;
    return id;
  }
};

#endif

}  // namespace cuda
}  // namespace kdtree
