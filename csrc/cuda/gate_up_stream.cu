// The gate and up products of the chosen experts and the shared one, for bf16 activations: moe_stream.cuh with K = D.
//
// More rows than stand in shared memory are normed once by a launch of their own, in scratch: from there every block reads the few rows of
// the experts that it has.
#include "../box_plan.h"
#include "backend.h"
#include "moe_scratch.h"
#include "moe_stream.cuh"

namespace kdtree {

using namespace cuda;

// Both products or neither: down reads what gate and up leave in scratch.
bool CudaBackend::moe_streams(const MoeArgs& a) const {
  const int shared_k = a.shared_down.n > 0 ? a.shared_down.k : a.down.k;
  if (a.numerics != Numerics::kBf16 || !stream::serves_moe(device_shape_, a.dim, a.dim, a.top_k, a.gate.e) ||
      !stream::serves_moe(device_shape_, a.down.k, shared_k, a.top_k, a.down.e)) {
    return false;
  }
  bool ready = a.up.step() == a.gate.step() && aligned(a.x) && aligned(a.norm_w) && aligned(a.act) && aligned(a.shared_act) && aligned(a.scratch);
  for (const Weight* w : {&a.gate, &a.up, &a.down, &a.shared_gate, &a.shared_up, &a.shared_down}) ready = ready && aligned(w->data) && aligned(w->scale, 8);
  return ready;
}

bool CudaBackend::gate_up_stream(const MoeArgs& a, bool routed, const RouterArgs* choice) {
  if (!moe_streams(a)) return false;
  const bool int4 = a.gate.kind == WeightKind::kInt4;
  const char* const name = int4 ? "experts_int4_bf16" : "experts_bf16";
  const bool in_tiles = tiles_serve(a, false);
  const int in_boxes = in_tiles ? -1 : choose_boxes(a, false);
  const stream::RowLaunch of_row = plan_row(name, a, false);
  const bool staged = of_row.tiles > 0 || (in_boxes >= 0 && stream::kGateUpBoxes[in_boxes].staged);
  const MoeScratch scratch(a.scratch, a.max_rows, a.top_k, a.down.k, a.dim, a.gate.e);
  StreamMoeParams p{};
  p.x = a.x, p.norm_w = a.norm_w, p.eps = a.eps, p.k = p.shared_k = a.dim, p.bf16 = !int4;
  p.rows = scratch.normed, p.row_stride = stream::padded(a.dim);
  p.data[0] = a.gate.data, p.data[1] = a.up.data, p.scale[0] = a.gate.scale, p.scale[1] = a.up.scale;
  p.shared[0] = a.shared_gate.data, p.shared[1] = a.shared_up.data;
  p.n = a.gate.n, p.shared_n = a.shared_gate.n, p.step = a.gate.step();
  p.ids = a.ids, p.top_k = a.top_k, p.experts = a.gate.e, p.max_rows = a.max_rows, p.n_rows = a.n_rows;
  p.act = static_cast<uint16_t*>(a.act), p.shared_act = static_cast<uint16_t*>(a.shared_act);
  if (int4 && a.phase == MoePhase::kBoth && stream::padded(a.gate.n) == a.gate.n) p.ordered = scratch.ordered;
  if (!staged && !(routed && stream::leaves_normed(a.max_rows))) {
    norm_rows("experts_norm", scratch.normed, p.row_stride, a.x, a.dim, a.dim, a.norm_w, a.eps, stream::unit_of(WeightKind::kInt4), a.max_rows, a.n_rows);
  }
  if (of_row.tiles > 0) {
    launch_row(name, a, false, of_row, routed, choice, p);
  } else if (in_tiles) {
    launch_tiles(name, a, false, routed, p);
  } else if (in_boxes >= 0) {
    launch_boxes(name, a, false, in_boxes, routed, p);
  } else {
    const int blocks = resident_clusters(reinterpret_cast<const void*>(&stream_moe_kernel<false>), name, 1, kMoeThreads, stream::kMoeShared);
    launch(name, stream_moe_kernel<false>, dim3(blocks, (a.max_rows + kMoeRows - 1) / kMoeRows), kMoeThreads, stream::kMoeShared, p);
  }
  ++(*counting_)[int4 ? "experts_int4_bf16_stream" : "experts_bf16_stream"];
  return true;
}

}  // namespace kdtree
