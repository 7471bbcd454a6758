// What follows an accept: cache compaction for all layers, and the logs of a recorded run. Bytes: each accepted row in and out.
#include <algorithm>

#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kLayers = 64;  // a launch; their pointers travel as the kernel's parameter
constexpr int kBatch = 8;    // rows a thread has in flight

struct CommitParams {
  void* latent[kLayers];
  void* k_rope[kLayers];
  int rank, rope;
  const int32_t* accepted;
  const StepState* state;
};

// A thread moves one column of one layer, rows ascending: sources ascend and lie at or after their targets, and a batch is read
// before it is written, so no source is overwritten before it was read.
template <class T>
__global__ __launch_bounds__(kThreads) void commit_kernel(const __grid_constant__ CommitParams p) {
  wait_for_previous();
  const int column = blockIdx.x * kThreads + threadIdx.x, layer = blockIdx.y;
  if (column >= p.rank + p.rope) return;
  const bool in_latent = column < p.rank;
  const int width = in_latent ? p.rank : p.rope, n = p.state->n_accepted;
  T* base = (in_latent ? static_cast<T*>(p.latent[layer]) + column : static_cast<T*>(p.k_rope[layer]) + column - p.rank) +
            static_cast<size_t>(p.state->base) * width;
  for (int j0 = 0; j0 < n; j0 += kBatch) {
    T v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = j0 + i < n ? base[static_cast<size_t>(p.accepted[j0 + i]) * width] : T(0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (j0 + i < n) base[static_cast<size_t>(j0 + i) * width] = v[i];
    }
  }
}

__global__ __launch_bounds__(kThreads) void record_kernel(RecordArgs a) {
  wait_for_previous();
  const int j = blockIdx.y, n = a.state->n_accepted;
  if (j >= n) return;
  const int row = a.state->committed - n + j + a.offset;
  if (row < 0 || row >= a.dst_rows) return;
  const float* src = a.src + static_cast<size_t>(a.accepted[j]) * a.dim;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < a.dim; i += gridDim.x * kThreads)
    a.dst[static_cast<size_t>(row) * a.dim + i] = src[i];
}

__global__ __launch_bounds__(kThreads) void record_tree_kernel(RecordTreeArgs a) {
  wait_for_previous();
  const int entry = a.state->rounds - 1, n_rows = a.state->n_rows, n_accepted = a.state->n_accepted;
  if (entry < 0 || entry >= a.entries) return;
  int32_t* out = a.dst + static_cast<size_t>(entry) * (2 + 3 * static_cast<size_t>(a.max_rows));
  if (threadIdx.x == 0) out[0] = n_rows, out[1] = n_accepted;
  int32_t *tokens = out + 2, *parents = tokens + a.max_rows, *accepted = parents + a.max_rows;
  for (int i = threadIdx.x; i < a.max_rows; i += kThreads) {
    tokens[i] = i < n_rows ? a.rows.tokens[i] : -1;
    parents[i] = i < n_rows ? a.rows.parents[i] : -1;
    accepted[i] = i < n_accepted ? a.accepted[i] : -1;
  }
}

}  // namespace

void CudaBackend::kv_commit(const KvCommitArgs& a) {
  for (int first = 0; first < a.n_layers; first += kLayers) {
    CommitParams p{};
    const int layers = std::min(kLayers, a.n_layers - first);
    for (int i = 0; i < layers; ++i) p.latent[i] = a.layers[first + i].latent, p.k_rope[i] = a.layers[first + i].k_rope;
    p.rank = a.rank, p.rope = a.rope, p.accepted = a.accepted, p.state = a.state;
    launch("kv_commit", a.numerics == Numerics::kBf16 ? commit_kernel<uint16_t> : commit_kernel<float>, dim3((a.rank + a.rope + kThreads - 1) / kThreads, layers), kThreads, 0, p);
  }
}

void CudaBackend::record(const RecordArgs& a) {
  const int blocks = std::min((a.dim + 4 * kThreads - 1) / (4 * kThreads), 128);
  launch("record", record_kernel, dim3(blocks, a.max_rows), kThreads, 0, a);
}

void CudaBackend::record_tree(const RecordTreeArgs& a) { launch("record_tree", record_tree_kernel, dim3(1), kThreads, 0, a); }

}  // namespace kdtree
