// tree_build: the DDTree of a round (arXiv 2604.12989, Algorithm 1), bit for bit the tree of docs/model.md.
//
//   rank and merge: every depth's log-sum-exp and its K best tokens in order; a cluster a depth, or a block a depth and `group` segments of
//   4096 logits and then a block a depth.
//   grow: one block: a warp grows the tree in registers, or a thread pops and pushes a heap, then all threads write the rows.
// Bytes: L*V logits once. Bound by latency: of the chain of phases, and of the pops of large trees (docs/kernels_mla.md).
#include <algorithm>

#include "backend.h"
#include "tree_depth.cuh"
#include "tree_grow.cuh"
#include "tree_heap.cuh"
#include "tree_radix.cuh"
#include "tree_rows.cuh"

namespace kdtree {
namespace {

using namespace cuda;

__global__ __launch_bounds__(kTreeThreads, 1) void grow_heap_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int n_rows;
  wait_for_previous();
  Growth g(shared, a.budget);
  if (threadIdx.x < kWarp) {
    const int limit = StateRead(a.state).limit(a), bad = __reduce_min_sync(kAll, first_bad(plan, first_flag(plan)));
    int n = 0;
    if (threadIdx.x == 0) n = grow_by_heap(plan, g, bad < limit ? 0 : limit, min(a.budget + 1, a.rows.max_rows));
    n = conclude(a, limit, bad, __shfl_sync(kAll, n, 0), g.score, reinterpret_cast<double*>(g.heap));
    if (threadIdx.x == 0) n_rows = n;
  }
  __syncthreads();
  for (int m = threadIdx.x; m < n_rows; m += kTreeThreads) {
    const int depth = g.depth[m];
    write_row(a, m, m == 0 ? a.state->bonus : plan.tokens[(depth - 1) * (plan.best + 1) + g.rank[m]], g.parent[m], depth, g.score[m]);
    int32_t* path = a.rows.path + static_cast<size_t>(m) * a.rows.path_stride;
    for (int row = m, d = depth; d >= 0; --d, row = g.parent[row]) path[d] = row;
  }
}

// A block's dynamic shared memory where it grows a tree in registers.
struct Grown {
  double* table;     // [depths + 2, best + 1]: every depth's surprisals, and two rows of NaN below the last that may be used
  double* scores;    // [kGrownRows]
  double* expected;  // [kGrownRows]: of the cut by costs
  int32_t* tokens;   // [depths + 2, best + 1]
  uint32_t* nodes;   // [kGrownRows]
  char* rest;

  __host__ __device__ Grown(char* base, const TreePlan& plan) {
    const size_t entries = (static_cast<size_t>(plan.depths) + 2) * (plan.best + 1);
    table = reinterpret_cast<double*>(base), scores = table + entries, expected = scores + kGrownRows;
    tokens = reinterpret_cast<int32_t*>(expected + kGrownRows);
    nodes = reinterpret_cast<uint32_t*>(tokens + (entries + 1) / 2 * 2);
    rest = reinterpret_cast<char*>(nodes + kGrownRows);
  }
};
size_t grow_shared(const TreePlan& plan) { return static_cast<size_t>(Grown(nullptr, plan).rest - static_cast<char*>(nullptr)); }
bool grows_in_registers(const TreeBuildArgs& a, const TreePlan& plan) {
  return a.budget < kGrownRows && grow_shared(plan) <= (96u << 10);
}

// By a whole block, which has filled the table: grows the tree and writes its rows. bad: the lowest depth that cannot be ranked, in the
// first warp.
template <int PLACES>
__device__ __forceinline__ void grow_rows(const TreeBuildArgs& a, const StateRead& state, int bad, const Grown& s, int width) {
  __shared__ int n_rows;
  if (threadIdx.x < kWarp) {
    const int limit = state.limit(a);
    const int n = bad < limit ? 1 : grow_in_registers<PLACES>(s.table, width, min(a.budget + 1, a.rows.max_rows), s.nodes, s.scores);
    for (int m = threadIdx.x; m < n; m += kWarp) s.scores[m] = m == 0 ? 0.0 : __dsub_rn(0.0, s.scores[m]);  // no -0
    __syncwarp();
    const int kept = conclude(a, limit, bad, n, s.scores, s.expected);
    if (threadIdx.x == 0) n_rows = kept;
  }
  __syncthreads();
  for (int m = threadIdx.x; m < n_rows; m += blockDim.x) {
    const uint32_t node = s.nodes[m];
    const int depth = m == 0 ? 0 : level_of(node) / width + 1;
    const int token = m == 0 ? state.bonus : s.tokens[level_of(node) + rank_of(node)];
    write_row(a, m, token, m == 0 ? -1 : parent_of(node), depth, s.scores[m]);
    int32_t* path = a.rows.path + static_cast<size_t>(m) * a.rows.path_stride;
    path[depth] = m;
    for (int row = m, d = depth - 1; d >= 0; --d) path[d] = row = parent_of(s.nodes[row]);
  }
}

template <int PLACES>
__global__ __launch_bounds__(kTreeThreads, 1) void grow_kernel(TreeBuildArgs a, TreePlan plan) {
  extern __shared__ __align__(16) char shared[];
  constexpr int kAhead = 8;
  const Grown s(shared, plan);
  const int width = plan.best + 1, given = plan.depths * width, entries = given + 2 * width;
  wait_for_previous();
  const StateRead state(a.state);
  const int flag = first_flag(plan);
  for (int base = threadIdx.x; base < entries; base += kAhead * kTreeThreads) {
    double surprisal[kAhead];
    int32_t token[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // what lies below the limit is not used, but to wait for the limit first would take longer
      const int at = base + i * kTreeThreads;
      surprisal[i] = at < given ? plan.surprisal[at] : 0.0, token[i] = at < given ? plan.tokens[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int at = base + i * kTreeThreads;
      if (at < entries) s.table[at] = at < state.limit(a) * width ? surprisal[i] : __longlong_as_double(-1), s.tokens[at] = token[i];
    }
  }
  __syncthreads();
  const int bad = threadIdx.x < kWarp ? __reduce_min_sync(kAll, first_bad(plan, flag)) : 0;
  grow_rows<PLACES>(a, state, bad, s, width);
}

}  // namespace

size_t CudaBackend::tree_scratch(int vocab, int block_size, int budget) const {
  TreePlan plan{};
  return lay_out(plan, nullptr, vocab, block_size, budget);
}

void CudaBackend::tree_build(const TreeBuildArgs& a) {
  TreePlan plan{};
  lay_out(plan, static_cast<char*>(a.scratch), a.vocab, a.block_size, a.budget);
  if (a.chain) plan.best = plan.best < 1 ? plan.best : 1;
  if (plan.best > kTreeMaxBest) {
    throw Error("RequestError", name_ + ": budget " + std::to_string(a.budget) + " is above the " +
                                    std::to_string(kTreeMaxBest) + " that tree_build is built for");
  }
  if (plan.depths > 0 && plan.best > 0) {
    // As many segments a block as make one wave of blocks, and so many that a cluster holds a depth.
    const int64_t cells = static_cast<int64_t>(plan.depths) * plan.segments, multiprocessors = device_shape_.multiprocessors;
    const int wave = static_cast<int>((cells + multiprocessors - 1) / multiprocessors), held = (plan.segments + kDepthBlocks - 1) / kDepthBlocks;
    const int group = std::min({std::max(wave, held), kRankGroups, plan.segments}), threads = group * kRankThreads;
    const int lists = (plan.segments + group - 1) / group;
    if (plan.best <= kFewBest && lists * plan.best <= kMergeKeys) {
      const bool cluster = lists > 1 && lists <= kDepthBlocks && overlaps_;  // what can overlap launches has clusters too
      take_bound_from(plan, group, lists, cluster);
      const dim3 grid(static_cast<unsigned>(lists), static_cast<unsigned>(plan.depths));
      if (cluster) {
        launch_clusters("tree_rank", depth_kernel, lists, grid, threads, 0, a, plan);
      } else {
        launch("tree_rank", rank_kernel, grid, threads, 0, a, plan);
        if (lists > 1) launch("tree_merge", merge_kernel, dim3(plan.depths), kMergeThreads, sizeof(Key) * lists * plan.best, a, plan);
      }
    } else {
      size_t keys = 1;
      while (keys < static_cast<size_t>(plan.best)) keys *= 2;
      launch("tree_rank", rank_many_kernel, dim3(plan.segments, plan.depths), kTreeThreads, sizeof(Key) * keys, a, plan);
      if (plan.segments > 1) launch("tree_merge", merge_many_kernel, dim3(plan.depths), kTreeThreads, sizeof(Key) * keys, a, plan);
    }
  }
  const bool in_registers = grows_in_registers(a, plan);
  const size_t shared = in_registers ? grow_shared(plan) : Growth::bytes(a.budget);
  // A node of the last row has no child, so the budget alone needs places.
  const auto grow = !in_registers          ? grow_heap_kernel
                    : a.budget <= kWarp     ? grow_kernel<1>
                    : a.budget <= 2 * kWarp ? grow_kernel<2>
                                            : grow_kernel<4>;
  reserve_shared(reinterpret_cast<const void*>(grow), "tree_build", shared);
  launch("tree_build", grow, dim3(1), kTreeThreads, shared, a, plan);
}

}  // namespace kdtree
