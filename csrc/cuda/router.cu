// router: sigmoid scores, choice by score plus bias within the kept groups, weights from the unbiased scores. A warp a row.
//
// The k rounds each take the greatest remaining score plus bias, ties to the lowest id; a lane owns experts lane, lane+32, ... and
// only the lane that lost its best looks for another. Bound by latency.
#include "backend.h"
#include "fault.cuh"

namespace kdtree {
namespace {

using namespace cuda;

struct Best {
  float value;
  int id;
};

// The greater value, and of equal ones the lower id, over the warp. Compared as integers in the order of the floats, -0 as +0,
// because the hardware reduces integers over a warp in one instruction.
__device__ __forceinline__ Best warp_best(Best mine) {
  const int bits = __float_as_int(mine.value == 0.f ? 0.f : mine.value);
  const int order = bits < 0 ? bits ^ 0x7fffffff : bits;
  const int top = __reduce_max_sync(kAll, order);
  const int id = __reduce_min_sync(kAll, order == top ? mine.id : INT32_MAX);
  return {__int_as_float(top < 0 ? top ^ 0x7fffffff : top), id};
}

// A lane's best of entries lane, lane+32, ... of n; an entry at -inf counts as gone. Nothing left: id n.
__device__ __forceinline__ Best lane_best(const float* values, int n, int lane) {
  Best best{-INFINITY, n};
  for (int i = lane; i < n; i += kWarp) {
    if (values[i] > best.value) best = {values[i], i};
  }
  return best;
}

// Takes the `count` best of n entries one after the other, telling `chosen(round, id)`, and marks them gone.
template <typename Chosen>
__device__ __forceinline__ void take_best(float* values, int n, int count, int lane, Chosen chosen) {
  Best mine = lane_best(values, n, lane);
  for (int round = 0; round < count; ++round) {
    const Best best = warp_best(mine);
    chosen(round, best.id);
    if (best.id < n && best.id % kWarp == lane) {
      values[best.id] = -INFINITY;
      mine = lane_best(values, n, lane);
    }
  }
}

__global__ __launch_bounds__(kWarp) void router_kernel(RouterArgs a) {
  extern __shared__ float shared[];
  float* score = shared;                                  // [experts]
  float* choice = score + a.experts;                      // [experts] score + bias, -inf when out of the running
  float* group = choice + a.experts;                      // [n_group] sum of its two best
  int* kept = reinterpret_cast<int*>(group + a.n_group);  // [n_group]
  int* taken = kept + a.n_group;                          // [top_k]
  const int lane = threadIdx.x, m = blockIdx.x;
  wait_for_previous();
  if (m > 0 && m >= a.state->n_rows) return;

  bool finite = true;
  for (int e = lane; e < a.experts; e += kWarp) {
    const float logit = a.logits[static_cast<size_t>(m) * a.experts + e];
    score[e] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-logit)));
    choice[e] = __fadd_rn(score[e], __ldg(a.bias + e));
    finite = finite && isfinite(logit) && isfinite(choice[e]);
  }
  if (!__all_sync(kAll, finite)) {
    if (lane == 0) record_fault(a.state, kFaultRouterNonFinite, m, a.layer);
    for (int j = lane; j < a.top_k; j += kWarp) {
      a.ids[m * a.top_k + j] = j;  // something in range for whatever runs before the host hears of it
      a.weights[m * a.top_k + j] = 0.f;
    }
    return;
  }
  __syncwarp();

  if (a.n_group > 1) {
    const int size = a.experts / a.n_group;
    for (int g = lane; g < a.n_group; g += kWarp) {
      float first = -INFINITY, second = -INFINITY;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        const float c = choice[e];
        if (c > first) {
          second = first, first = c;
        } else if (c > second) {
          second = c;
        }
      }
      group[g] = __fadd_rn(first, second);
      kept[g] = 0;
    }
    __syncwarp();
    take_best(group, a.n_group, a.topk_group, lane, [&](int, int g) {
      if (lane == 0) kept[g] = 1;
    });
    __syncwarp();
    for (int e = lane; e < a.experts; e += kWarp) {
      if (!kept[e / size]) choice[e] = -INFINITY;
    }
    __syncwarp();
  }

  float sum = 0.f;
  take_best(choice, a.experts, a.top_k, lane, [&](int j, int e) {
    KD_ASSERT(e < a.experts, "router: fewer experts in the running than top_k");
    sum = __fadd_rn(sum, score[e]);
    if (lane == 0) taken[j] = e;
  });
  __syncwarp();
  for (int j = lane; j < a.top_k; j += kWarp) {
    float weight = score[taken[j]];
    if (a.norm_topk) weight = __fdiv_rn(weight, __fadd_rn(sum, 1e-20f));
    a.ids[m * a.top_k + j] = taken[j];
    a.weights[m * a.top_k + j] = __fmul_rn(weight, a.scaling);
  }
}

}  // namespace

void CudaBackend::router(const RouterArgs& a) {
  if (a.max_rows <= 0) return;
  const size_t shared = sizeof(float) * (2 * static_cast<size_t>(a.experts) + 2 * a.n_group + a.top_k);
  reserve_shared(reinterpret_cast<const void*>(router_kernel), "router", shared);
  launch("router", router_kernel, dim3(a.max_rows), kWarp, shared, a);
}

}  // namespace kdtree
