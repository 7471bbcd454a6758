// tree_root and accept: the ends of a round. One block each; bound by latency.
#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;

__global__ void root_kernel(Rows rows, StepState* state) {
  wait_for_previous();
  if (threadIdx.x != 0) return;
  rows.tokens[0] = state->bonus;
  rows.parents[0] = -1;
  rows.depths[0] = 0;
  rows.path[0] = 0;
  state->n_rows = 1;
}

// The step's rows are brought to shared memory by the block; one warp then walks, 32 possible children at a time.
__global__ __launch_bounds__(kThreads) void accept_kernel(AcceptArgs a) {
  extern __shared__ int32_t shared[];  // tokens, parents, choices: [max_rows] each
  wait_for_previous();
  StepState* s = a.state;
  const int n_rows = active_rows(&s->n_rows, a.rows.max_rows), stride = a.rows.max_rows;
  int32_t *tokens = shared, *parents = tokens + stride, *choices = parents + stride;
  for (int i = threadIdx.x; i < n_rows; i += kThreads) {
    tokens[i] = a.rows.tokens[i];
    parents[i] = a.rows.parents[i];
    choices[i] = a.choice[i];
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const int lane = threadIdx.x, committed = s->committed, limit = s->limit, kv_len = s->kv_len;
  int n = 0, bonus = s->bonus, done = s->done;
  if (s->error == kFaultNone) {
    int row = 0;
    while (row >= 0) {
      const int token = tokens[row];
      bonus = choices[row];
      if (lane == 0) a.accepted[n] = row, a.out->tokens[n] = token;
      ++n;
      const bool eos = token == a.eos_id;
      const bool ends = eos || committed + n >= limit;
      done = eos ? 2 : ends ? 1 : 0;
      int next = -1;
      for (int base = row + 1; !ends && next < 0 && base < n_rows; base += kWarp) {
        const int c = base + lane;
        const unsigned hit = __ballot_sync(kAll, c < n_rows && parents[c] == row && tokens[c] == bonus);
        if (hit != 0) next = base + __ffs(static_cast<int>(hit)) - 1;
      }
      row = next;
    }
  }
  __syncwarp();  // every lane has read the state that lane 0 is about to change
  if (lane != 0) return;
  s->n_accepted = n;
  s->base = kv_len;
  s->bonus = bonus;
  s->done = done;
  s->kv_len = kv_len + n;
  s->committed = committed + n;
  if (n > 0) s->rounds += 1;
  RoundOut& o = *a.out;
  o.n_accepted = n;
  o.done = done;
  o.bonus = bonus;
  o.committed = committed + n;
  o.kv_len = kv_len + n;
  o.n_rows = s->n_rows;
  o.error = s->error;
  o.error_row = s->error_row;
  o.error_detail = s->error_detail;
  o.reserved = 0;
}

}  // namespace

void CudaBackend::tree_root(const Rows& rows, StepState* state) {
  launch("tree_root", root_kernel, dim3(1), kWarp, 0, rows, state);
}

void CudaBackend::accept(const AcceptArgs& a) {
  const size_t shared = 3 * sizeof(int32_t) * static_cast<size_t>(a.rows.max_rows);
  reserve_shared(reinterpret_cast<const void*>(accept_kernel), "accept", shared);
  launch("accept", accept_kernel, dim3(1), kThreads, shared, a);
}

}  // namespace kdtree
