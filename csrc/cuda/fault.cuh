// Recording a data-dependent fault in StepState: the first operation that met one, and of its rows the lowest.
#pragma once
#include "device.cuh"

namespace kdtree {
namespace cuda {

// One lock a kernel file: only one kernel at a time records, blocks of it in any order.
static __device__ int fault_lock = 0;

// Called by one thread a warp at most. Deterministic: whichever block comes first, the lowest row of the launch stays.
__device__ inline void record_fault(StepState* state, Fault code, int row, int detail) {
  volatile StepState* s = state;
  while (atomicCAS(&fault_lock, 0, 1) != 0) {
  }
  __threadfence();
  const bool same_launch = s->error == code && s->error_detail == detail;
  if (s->error == kFaultNone || (same_launch && row < s->error_row)) {
    s->error = code;
    s->error_row = row;
    s->error_detail = detail;
  }
  __threadfence();
  atomicExch(&fault_lock, 0);
}

}  // namespace cuda
}  // namespace kdtree
