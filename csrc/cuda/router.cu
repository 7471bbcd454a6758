// router: sigmoid scores, choice by score plus bias within the kept groups, weights from the unbiased scores. A warp a row (router.cuh).
#include "backend.h"
#include "router.cuh"

namespace kdtree {
namespace {

using namespace cuda;

__global__ __launch_bounds__(kWarp) void router_kernel(RouterArgs a) {
  extern __shared__ float shared[];
  const int m = blockIdx.x;
  wait_for_previous();
  if (m > 0 && m >= a.state->n_rows) return;
  choose_experts(a, m, shared);
}

}  // namespace

void CudaBackend::router(const RouterArgs& a) {
  if (a.max_rows <= 0) return;
  const size_t shared = sizeof(float) * stream::choice_words(a.experts, a.n_group, a.top_k);
  reserve_shared(reinterpret_cast<const void*>(router_kernel), "router", shared);
  launch("router", router_kernel, dim3(a.max_rows), kWarp, shared, a);
}

}  // namespace kdtree
