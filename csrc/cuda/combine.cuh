// out += sum_j weights_j products_j, ascending j, the shared expert's last: by a few blocks of down when all have arrived.
//
// Bytes: the products once, from L2.
#pragma once
#include "../stream_plan.h"
#include "tickets.cuh"

namespace kdtree {
namespace cuda {

struct CombineParams {
  const float* products;  // [M, top_k + 1, dim]
  const float* weights;   // [M, top_k]
  int top_k, dim;
  bool shared;
  float* out;  // [M, dim]
  int max_rows;
  const int32_t* n_rows;
  Tickets* tickets;
  int most;  // blocks that share it
};

// WIDTH outputs a thread at a time, 1 or 4.
template <int WIDTH>
__device__ __forceinline__ void combine_part(const CombineParams& c, int part, int parts) {
  using Group = std::conditional_t<WIDTH == 4, float4, float>;
  const int columns = c.dim / WIDTH, rows = active_rows(c.n_rows, c.max_rows), threads = blockDim.x;
  union Values {
    Group group;
    float v[WIDTH];
  };
  for (int i = part * threads + static_cast<int>(threadIdx.x); i < rows * columns; i += parts * threads) {
    const int m = i / columns, d = i - m * columns;
    const Group* const from = reinterpret_cast<const Group*>(c.products) + static_cast<size_t>(m) * (c.top_k + 1) * columns + d;
    Group* const to = reinterpret_cast<Group*>(c.out) + static_cast<size_t>(m) * columns + d;
    Values sum, out;
    out.group = *to;
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sum.v[e] = 0.f;
#pragma unroll 8
    for (int j = 0; j < c.top_k; ++j) {
      const float weight = c.weights[m * c.top_k + j];
      Values product;
      product.group = __ldcg(from + static_cast<size_t>(j) * columns);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sum.v[e] = __fmaf_rn(weight, product.v[e], sum.v[e]);
    }
    if (c.shared) {
      Values product;
      product.group = __ldcg(from + static_cast<size_t>(c.top_k) * columns);
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sum.v[e] = __fadd_rn(sum.v[e], product.v[e]);
    }
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) out.v[e] = __fadd_rn(out.v[e], sum.v[e]);
    *to = out.group;
  }
}

// Called by the whole block when all its products are written, by every block of the launch once.
__device__ __forceinline__ void combine(const CombineParams& c) {
  const int blocks = static_cast<int>(gridDim.x * gridDim.y), part = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x);
  const int most = stream::at_most_half(c.most, static_cast<int>(gridDim.x));
  arrive(c.tickets);
  if (part >= most) return;
  await(c.tickets, blocks, most);
  if (c.dim % 4 == 0 && reinterpret_cast<uintptr_t>(c.out) % 16 == 0) {
    combine_part<4>(c, part, most);
  } else {
    combine_part<1>(c, part, most);
  }
}

}  // namespace cuda
}  // namespace kdtree
