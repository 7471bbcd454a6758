// Launches of moe_row.cuh.
#include "backend.h"
#include "moe_row.cuh"
#include "moe_scratch.h"
#include "tensor_map.h"

namespace kdtree {
namespace {

using namespace cuda;

template <bool DOWN>
const auto kKernel =
    &row_moe_kernel<RowMoeShape<DOWN, stream::row_variant(DOWN).warps, stream::row_variant(DOWN).copiers, stream::row_variant(DOWN).depth, stream::row_variant(DOWN).early>>;

const void* kernel_of(bool down) { return reinterpret_cast<const void*>(down ? kKernel<true> : kKernel<false>); }

}  // namespace

stream::RowLaunch CudaBackend::plan_row(const char* name, const MoeArgs& a, bool down) {
  if (a.max_rows != 1 || choose_boxes(a, down) < 0) return {};
  const int k = down ? a.down.k : a.dim, n = down ? a.down.n : a.gate.n, shared_n = down ? a.shared_down.n : a.shared_gate.n;
  const stream::RowLaunch plan = stream::plan_row(device_shape_, stream::row_variant(down), down, k, down && shared_n > 0 ? a.shared_down.k : k, n, shared_n, a.top_k);
  if (plan.tiles == 0) return {};
  const int resident = resident_clusters(kernel_of(down), name, 1, stream::row_threads(stream::row_variant(down)), plan.shared);
  return resident < plan.blocks ? stream::RowLaunch{} : plan;
}

bool CudaBackend::rows_serve(const MoeArgs& a) {
  return moe_streams(a) && plan_row("experts", a, false).tiles > 0 && plan_row("experts", a, true).tiles > 0;
}

void CudaBackend::launch_row(const char* name, const MoeArgs& a, bool down, const stream::RowLaunch& plan, bool routed, const RouterArgs* choice, const StreamMoeParams& p) {
  const int rows = down ? kTileRows : kTileRows / 2;
  const Weight& w = down ? a.down : a.gate;
  const uint64_t count = static_cast<uint64_t>(w.e - 1) * static_cast<uint64_t>(p.step) + static_cast<uint64_t>(p.n), k = static_cast<uint64_t>(p.k);
  const auto pairs = [&](const void* const (&data)[2], uint64_t pitch, uint64_t of) {
    return row_map(data[0], data[1], pitch, of, 128, rows, true, static_cast<int>(pitch / 128), false, stream::kRowWide);
  };
  RowMoeParams all{};
  all.boxes = box_params(a, down, stream::kRowWide, routed, p), all.places = plan.tiles, all.chooses = !down && choice != nullptr;
  all.pairs = pairs(p.data, p.bf16 ? k * 2 : k / 2, count);
  if (p.shared_n > 0) all.shared_pairs = pairs(p.shared, static_cast<uint64_t>(p.shared_k) * 2, static_cast<uint64_t>(p.shared_n));
  if (all.chooses) all.choice = {*choice, MoeScratch(a.scratch, a.max_rows, a.top_k, a.down.k, a.dim, a.gate.e).parts};
  all.apart = a.phase == MoePhase::kDown;
  if (a.phase == MoePhase::kBoth && rows_serve(a)) {  // then down waits for the choice and the shared expert's acts alone, until it is at the others'
    all.tickets = tickets_ + 1;
    all.before = (a.shared_gate.n + stream::moe_outputs(false) - 1) / stream::moe_outputs(false) + (choice != nullptr ? 1 : 0);
  }
  launch(name, down ? kKernel<true> : kKernel<false>, dim3(static_cast<unsigned>(plan.blocks)), stream::row_threads(stream::row_variant(down)), plan.shared, all);
}

}  // namespace kdtree
