// router: sigmoid scores, choice by score plus bias within the kept groups, weights from the unbiased scores. A block a row.
//
// Bound by latency; how the choice is made stands in choice.cuh. Where the router's product streams, both are one launch (route_stream.cu).
#include "backend.h"
#include "choice.cuh"

namespace kdtree {
namespace {

using namespace cuda;

__global__ __launch_bounds__(kChoiceThreads) void router_kernel(const __grid_constant__ RouterArgs a) {
  extern __shared__ __align__(8) uint8_t memory[];
  const int m = blockIdx.x;
  wait_for_previous();
  if (m > 0 && m >= a.state->n_rows) return;
  choose_experts(a, m, memory, [&](int e) { return a.logits[static_cast<size_t>(m) * a.experts + e]; }, [](int, float l) { return l; },
                 [&](int e) { return __ldg(a.bias + e); }, [](int, int) {});
}

}  // namespace

void CudaBackend::router(const RouterArgs& a) {
  if (a.max_rows <= 0) return;
  const size_t shared = ChoiceMemory::bytes(a.experts, a.n_group, a.top_k);
  reserve_shared(reinterpret_cast<const void*>(router_kernel), "router", shared);
  launch("router", router_kernel, dim3(a.max_rows), kChoiceThreads, shared, a);
}

}  // namespace kdtree
