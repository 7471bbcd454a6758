// What follows the growth of a tree, by whichever way: the fault of a depth that cannot be ranked, the cut by costs, the rows.
#pragma once
#include "fault.cuh"
#include "tree_lse.cuh"

namespace kdtree {
namespace cuda {

// The lowest depth with a NaN or +inf of those that a lane looks at, which are all of them in a warp; no depth if there is none.
// flag: bad[lane], read ahead.
__device__ inline int first_bad(const TreePlan& plan, int flag) {
  int depth = threadIdx.x % kWarp;
  while (flag == 0 && depth < plan.depths) depth += kWarp, flag = depth < plan.depths ? plan.bad[depth] : 0;
  return flag != 0 ? depth : INT32_MAX;
}
__device__ __forceinline__ int first_flag(const TreePlan& plan) {
  const int lane = threadIdx.x % kWarp;
  return lane < plan.depths ? plan.bad[lane] : 0;
}

// The first rows of a best-first tree, as many as make expected accepted rows over cost greatest; by one warp, the same in all lanes.
// expected: [n], anything. Terms and quotients are formed side by side, the sum in order; of equal quotients the first counts.
__device__ inline int rows_worth_their_cost(const double* scores, int n, const double* costs, double* expected) {
  const int lane = threadIdx.x % kWarp;
  for (int m = lane; m < n; m += kWarp) expected[m] = m == 0 ? 1.0 : static_cast<double>(exp32(__double2float_rn(scores[m])));
  __syncwarp();
  if (lane == 0) {
    double sum = 0.0;
    for (int m = 0; m < n; ++m) expected[m] = sum = __dadd_rn(sum, expected[m]);
  }
  __syncwarp();
  double best = 0.0;
  int kept = INT32_MAX;
  const auto take = [&](double rate, int rows) {
    if (rate > best || (rate == best && rows < kept)) best = rate, kept = rows;
  };
  for (int m = lane; m < n; m += kWarp) take(expected[m] / costs[m], m + 1);
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) {
    const double rate = __shfl_xor_sync(kAll, best, mask);
    take(rate, __shfl_xor_sync(kAll, kept, mask));
  }
  return min(kept, n);
}

// Between growing and writing, by one warp: the fault if there is one, the cut. Returns the rows of the step in every lane. spare: room for n.
__device__ inline int conclude(const TreeBuildArgs& a, int limit, int bad, int n, const double* scores, double* spare) {
  if (a.costs != nullptr) n = rows_worth_their_cost(scores, n, a.costs, spare);
  if (threadIdx.x % kWarp == 0) {
    if (bad < limit) record_fault(a.state, kFaultDraftNonFinite, 0, bad + 1);
    a.state->n_rows = n;
  }
  return n;
}

__device__ __forceinline__ void write_row(const TreeBuildArgs& a, int m, int token, int parent, int depth, double score) {
  a.rows.tokens[m] = token;
  a.rows.parents[m] = parent;
  a.rows.depths[m] = depth;
  a.scores[m] = score;
}

}  // namespace cuda
}  // namespace kdtree
