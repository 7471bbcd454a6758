// draw_experts: the stated experts of docs/model.md. A thread draws four neighbouring groups: nine Philox calls for 72 bytes
// written, so bound by integer arithmetic. Runs once, when a model is loaded.
#include "../stated.h"

#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

__global__ void draw_experts_kernel(DrawExpertsArgs a, int groups, int quads, int64_t count) {
  wait_for_previous();
  const int64_t task = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (task >= count) return;
  const int64_t row = task / quads;  // over all experts
  const int quad = static_cast<int>(task % quads);
  const auto expert = static_cast<uint32_t>(a.first + row / a.n), r = static_cast<uint32_t>(a.row + row % a.n);
  const Words scales = philox(static_cast<uint32_t>(quad), r, expert, 2, a.stated.key0, a.stated.key1);
#pragma unroll
  for (int i = 0; i < kStatedQuad; ++i) {
    const int g = quad * kStatedQuad + i;
    if (g >= groups) return;
    const StatedGroup group = stated_group(a.stated, scales.w[i], static_cast<uint32_t>(g), r, expert, a.k - 32 * g);
    const int64_t at = row * groups + g;
    reinterpret_cast<uint4*>(a.q)[at] = make_uint4(group.nibbles[0], group.nibbles[1], group.nibbles[2], group.nibbles[3]);
    a.scale[at] = group.scale;
  }
}

}  // namespace

void CudaBackend::draw_experts(const DrawExpertsArgs& a) {
  const int groups = (a.k + 31) / 32, quads = (groups + kStatedQuad - 1) / kStatedQuad;
  const int64_t count = static_cast<int64_t>(a.e) * a.n * quads;
  if (count == 0) return;
  launch("draw_experts", draw_experts_kernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), kThreads, 0, a,
         groups, quads, count);
}

}  // namespace kdtree
