// select: every row's choice - the argmax, or at temperature > 0 the argmax of logit/T plus Gumbel noise in f64 (docs/model.md).
//
// A block a row and slice of the vocabulary; with more than one slice a second launch takes the best of the slices. The greatest
// value and the lowest index among equals do not depend on how a row is cut. Bytes: V logits a row, once.
#include "../philox.h"
#include "backend.h"
#include "fault.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kSlice = 8192;

struct Pick {
  double value;
  int32_t index;
  int32_t bad;  // a NaN or an infinity was among the logits
};

__device__ __forceinline__ Pick better(const Pick& a, const Pick& b) {
  const bool first = a.value > b.value || (a.value == b.value && a.index < b.index);
  Pick best = first ? a : b;
  best.bad = a.bad | b.bad;
  return best;
}

// The best of the block's picks, in thread 0.
__device__ Pick block_best(Pick mine) {
  __shared__ Pick warps[kThreads / kWarp];
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    mine = better(mine, {__shfl_xor_sync(kAll, mine.value, mask), __shfl_xor_sync(kAll, mine.index, mask),
                         __shfl_xor_sync(kAll, mine.bad, mask)});
  }
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / kWarp; ++i) mine = better(mine, warps[i]);
  }
  return mine;
}

struct SelectParams {
  const float* logits;
  int vocab;
  double temperature;
  int32_t* choice;
  Pick* slices;  // [M, slices], null when one block sees the whole row
  const int32_t* depths;
  StepState* state;
};

__device__ void conclude(const SelectParams& p, int m, const Pick& best) {
  if (best.bad) record_fault(p.state, kFaultLogitsNonFinite, m, 0);
  p.choice[m] = best.bad ? 0 : best.index;
}

template <bool SAMPLE>
__global__ __launch_bounds__(kThreads) void select_kernel(const __grid_constant__ SelectParams p) {
  wait_for_previous();
  const int m = blockIdx.y;
  if (m > 0 && m >= p.state->n_rows) return;
  const float* row = p.logits + static_cast<size_t>(m) * p.vocab;
  const int begin = blockIdx.x * kSlice, end = min(p.vocab, begin + kSlice);
  const uint32_t position = static_cast<uint32_t>(p.state->kv_len + p.depths[m]);
  Pick mine{-INFINITY, INT32_MAX, 0};
#pragma unroll 4
  for (int v = begin + static_cast<int>(threadIdx.x); v < end; v += kThreads) {
    const float logit = row[v];
    mine.bad |= isfinite(logit) ? 0 : 1;
    double value = static_cast<double>(logit);
    if constexpr (SAMPLE) {
      const double u = (philox(static_cast<uint32_t>(v), position, 0, 0, p.state->seed_lo, p.state->seed_hi).w[0] + 0.5) / 4294967296.0;
      value = value / p.temperature - log(-log(u));
    }
    if (value > mine.value) mine.value = value, mine.index = v;  // a thread sees its indices ascending
  }
  const Pick best = block_best(mine);
  if (threadIdx.x != 0) return;
  if (p.slices != nullptr) {
    p.slices[static_cast<size_t>(m) * gridDim.x + blockIdx.x] = best;
  } else {
    conclude(p, m, best);
  }
}

__global__ __launch_bounds__(kThreads) void select_slices_kernel(const __grid_constant__ SelectParams p, int slices) {
  wait_for_previous();
  const int m = blockIdx.x;
  if (m > 0 && m >= p.state->n_rows) return;
  Pick mine{-INFINITY, INT32_MAX, 0};
  for (int i = threadIdx.x; i < slices; i += kThreads) mine = better(mine, p.slices[static_cast<size_t>(m) * slices + i]);
  const Pick best = block_best(mine);
  if (threadIdx.x == 0) conclude(p, m, best);
}

}  // namespace

size_t CudaBackend::select_scratch(int max_rows, int vocab) const {
  return vocab <= kSlice ? 0 : sizeof(Pick) * static_cast<size_t>(max_rows) * ((vocab + kSlice - 1) / kSlice);
}

void CudaBackend::select(const SelectArgs& a) {
  const int rows = a.rows.max_rows;
  if (rows <= 0) return;
  const int slices = (a.vocab + kSlice - 1) / kSlice;
  const SelectParams p{a.logits,      a.vocab, a.temperature, a.choice, slices > 1 ? static_cast<Pick*>(a.scratch) : nullptr,
                       a.rows.depths, a.state};
  launch("select", a.temperature > 0.0 ? select_kernel<true> : select_kernel<false>, dim3(slices, rows), kThreads, 0, p);
  if (slices > 1) launch("select_slices", select_slices_kernel, dim3(rows), kThreads, 0, p, slices);
}

}  // namespace kdtree
