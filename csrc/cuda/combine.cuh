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

// Beside it, the last warp counts the block out, so that no sum waits for that.
__device__ __forceinline__ int combining_threads() { return static_cast<int>(blockDim.x) - kWarp; }

constexpr int kCombined = 8;  // products of an output that are asked for at a time: one after the other each would wait for the way to L2 and back

// WIDTH outputs a thread at a time, 1 or 4.
template <int WIDTH>
__device__ __forceinline__ void combine_part(const CombineParams& c, int part, int parts) {
  using Group = std::conditional_t<WIDTH == 4, float4, float>;
  const int columns = c.dim / WIDTH, rows = active_rows(c.n_rows, c.max_rows), threads = combining_threads();
  union Values {
    Group group;
    float v[WIDTH];
  };
  for (int i = part * threads + static_cast<int>(threadIdx.x); i < rows * columns; i += parts * threads) {
    const int m = i / columns, d = i - m * columns;
    const Group* const from = reinterpret_cast<const Group*>(c.products) + static_cast<size_t>(m) * (c.top_k + 1) * columns + d;
    Group* const to = reinterpret_cast<Group*>(c.out) + static_cast<size_t>(m) * columns + d;
    Values sum, out, last;
    out.group = *to;
    if (c.shared) last.group = __ldcg(from + static_cast<size_t>(c.top_k) * columns);
#pragma unroll
    for (int e = 0; e < WIDTH; ++e) sum.v[e] = 0.f;
#pragma unroll 1
    for (int first = 0; first < c.top_k; first += kCombined) {
      float weight[kCombined];
      Values product[kCombined];
#pragma unroll
      for (int j = 0; j < kCombined; ++j) {
        const int choice = min(first + j, c.top_k - 1);  // beyond the last one that again, of which nothing is added
        weight[j] = c.weights[m * c.top_k + choice], product[j].group = __ldcg(from + static_cast<size_t>(choice) * columns);
      }
#pragma unroll
      for (int j = 0; j < kCombined; ++j) {
        const bool there = first + j < c.top_k;  // no branch, behind which the compiler would put the loads
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) sum.v[e] = there ? __fmaf_rn(weight[j], product[j].v[e], sum.v[e]) : sum.v[e];
      }
    }
    if (c.shared) {
#pragma unroll
      for (int e = 0; e < WIDTH; ++e) sum.v[e] = __fadd_rn(sum.v[e], last.v[e]);
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
  await(c.tickets, blocks);
  if (static_cast<int>(threadIdx.x) >= combining_threads()) {
    if (threadIdx.x == blockDim.x - 1) put_back(c.tickets, count_out(c.tickets, most), most);
    return;
  }
  if (c.dim % 4 == 0 && reinterpret_cast<uintptr_t>(c.out) % 16 == 0) {
    combine_part<4>(c, part, most);
  } else {
    combine_part<1>(c, part, most);
  }
}

// The same for one row. What is older than the products is asked for before all have arrived: behind the weights that the next launch asks for meanwhile a
// load takes microseconds.
__device__ __forceinline__ void combine_row(const CombineParams& c) {
  const int columns = c.dim / 4, most = stream::at_most_half(c.most, static_cast<int>(gridDim.x)), i = static_cast<int>(blockIdx.x) * combining_threads() + static_cast<int>(threadIdx.x);
  if (c.dim % 4 != 0 || reinterpret_cast<uintptr_t>(c.out) % 16 != 0 || columns > most * combining_threads()) return combine(c);
  arrive(c.tickets);
  if (static_cast<int>(blockIdx.x) >= most) return;
  const bool counts = static_cast<int>(threadIdx.x) >= combining_threads(), mine = !counts && i < columns && active_rows(c.n_rows, 1) > 0;
  float4* const to = reinterpret_cast<float4*>(c.out) + i;
  const float4* const from = reinterpret_cast<const float4*>(c.products) + i;
  float4 out = mine ? *to : make_float4(0.f, 0.f, 0.f, 0.f), sum = make_float4(0.f, 0.f, 0.f, 0.f);
  constexpr int AT_A_TIME = kCombined;
  float weights[AT_A_TIME];
  const auto weigh = [&](int first) {
#pragma unroll
    for (int j = 0; j < AT_A_TIME; ++j) weights[j] = first + j < c.top_k ? c.weights[first + j] : 0.f;
  };
  weigh(0);
  await(c.tickets, static_cast<int>(gridDim.x));
  if (threadIdx.x == blockDim.x - 1) put_back(c.tickets, count_out(c.tickets, most), most);
  if (!mine) return;
  const float4 last = c.shared ? __ldcg(from + static_cast<size_t>(c.top_k) * columns) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int first = 0; first < c.top_k; first += AT_A_TIME) {
    float4 v[AT_A_TIME];
#pragma unroll
    for (int j = 0; j < AT_A_TIME; ++j) {
      v[j] = __ldcg(from + static_cast<size_t>(min(first + j, c.top_k - 1)) * columns);
    }
#pragma unroll
    for (int j = 0; j < AT_A_TIME; ++j) {
      const bool there = first + j < c.top_k;
      sum.x = there ? __fmaf_rn(weights[j], v[j].x, sum.x) : sum.x, sum.y = there ? __fmaf_rn(weights[j], v[j].y, sum.y) : sum.y;
      sum.z = there ? __fmaf_rn(weights[j], v[j].z, sum.z) : sum.z, sum.w = there ? __fmaf_rn(weights[j], v[j].w, sum.w) : sum.w;
    }
    weigh(first + AT_A_TIME);
  }
  if (c.shared) sum = make_float4(__fadd_rn(sum.x, last.x), __fadd_rn(sum.y, last.y), __fadd_rn(sum.z, last.z), __fadd_rn(sum.w, last.w));
  *to = make_float4(__fadd_rn(out.x, sum.x), __fadd_rn(out.y, sum.y), __fadd_rn(out.z, sum.z), __fadd_rn(out.w, sum.w));
}

}  // namespace cuda
}  // namespace kdtree
