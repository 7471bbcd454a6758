// The down products of the chosen experts and the shared one, for bf16 activations (moe_stream.cuh with K = I), and their combination.
#include "backend.h"
#include "moe_scratch.h"
#include "moe_stream.cuh"

namespace kdtree {
namespace {

using namespace cuda;

struct OrderParams {
  uint16_t* to;  // [M*per_row, stride]
  int stride;
  const uint16_t* from;  // [M*per_row, k]
  int k, per_row;
  int max_rows;
  const int32_t* n_rows;
};

constexpr int kOrderThreads = 256;

// Rows in the order in which int4 weights are multiplied with them; zeros from k on. A block a row.
__global__ __launch_bounds__(kOrderThreads) void order_kernel(const __grid_constant__ OrderParams p) {
  wait_for_previous();
  if (static_cast<int>(blockIdx.x) >= active_rows(p.n_rows, p.max_rows) * p.per_row) return;
  const uint16_t* const from = p.from + static_cast<size_t>(blockIdx.x) * p.k;
  uint4* const to = reinterpret_cast<uint4*>(p.to + static_cast<size_t>(blockIdx.x) * p.stride);
  for (int i = threadIdx.x; i < p.stride / 8; i += kOrderThreads) {
    to[i] = i * 8 < p.k ? in_order(*reinterpret_cast<const uint4*>(from + i * 8)) : make_uint4(0, 0, 0, 0);
  }
}

// Whether what is put side by side can come in order at once: rows of whole units, of which every rank has whole pieces.
bool unshards_in_order(const MoeArgs& a) {
  return stream::padded(a.down.k) == a.down.k && a.down.k / a.ranks % 8 == 0 && a.shared_down.k / a.ranks % 8 == 0 &&
         aligned(a.gathered) && a.rank_bytes % 16 == 0;
}

}  // namespace

size_t CudaBackend::moe_scratch(int max_rows, int top_k, int experts, int inner, int dim) const {
  return MoeScratch(nullptr, max_rows, top_k, inner, dim, experts).bytes;
}

bool CudaBackend::down_stream(const MoeArgs& a, const RouterArgs* choice) {
  if (!moe_streams(a)) return false;
  const bool int4 = a.down.kind == WeightKind::kInt4;
  const MoeScratch scratch(a.scratch, a.max_rows, a.top_k, a.down.k, a.dim, a.gate.e);
  StreamMoeParams p{};
  p.k = a.down.k, p.shared_k = a.shared_down.n > 0 ? a.shared_down.k : a.down.k, p.bf16 = !int4;
  p.rows = scratch.ordered, p.row_stride = stream::padded(a.down.k);
  p.data[0] = p.data[1] = a.down.data, p.scale[0] = p.scale[1] = a.down.scale, p.shared[0] = p.shared[1] = a.shared_down.data;
  p.n = a.down.n, p.shared_n = a.shared_down.n, p.step = a.down.step();
  p.ids = a.ids, p.top_k = a.top_k, p.experts = a.down.e, p.max_rows = a.max_rows, p.n_rows = a.n_rows;
  p.act = static_cast<uint16_t*>(a.act), p.shared_act = static_cast<uint16_t*>(a.shared_act);
  p.products = scratch.products;
  p.combine = {p.products, a.weights, a.top_k, a.down.n, a.shared_down.n > 0, a.out, a.max_rows, a.n_rows, tickets_ + 1, stream::combining(a.max_rows)};
  const bool orders = a.gathered != nullptr && int4 && unshards_in_order(a);
  if (a.gathered != nullptr) {
    UnshardArgs acts = acts_of(a);
    if (orders) acts.part[0].dst = scratch.ordered;
    put_side_by_side(acts, orders);
  }
  if (int4 && !orders && (a.phase == MoePhase::kDown || p.row_stride != a.down.k)) {  // gate and up have left none
    const OrderParams o{scratch.ordered, p.row_stride, p.act, a.down.k, a.top_k, a.max_rows, a.n_rows};
    launch("experts_order", order_kernel, dim3(a.max_rows * a.top_k), kOrderThreads, 0, o);
  }
  const char* const name = int4 ? "experts_int4_bf16_down" : "experts_bf16_down";
  if (const stream::RowLaunch of_row = plan_row(name, a, true); of_row.tiles > 0) {
    launch_row(name, a, true, of_row, false, choice, p);
  } else if (tiles_serve(a, true)) {
    launch_tiles(name, a, true, false, p);
  } else if (const int in_boxes = choose_boxes(a, true); in_boxes >= 0) {
    launch_boxes(name, a, true, in_boxes, false, p);
  } else {
    const int blocks = resident_clusters(reinterpret_cast<const void*>(&stream_moe_kernel<true>), name, 1, kMoeThreads, stream::kMoeShared);
    launch(name, stream_moe_kernel<true>, dim3(blocks, (a.max_rows + kMoeRows - 1) / kMoeRows), kMoeThreads, stream::kMoeShared, p);
  }
  return true;
}

}  // namespace kdtree
