// Launches of moe_boxes.cuh: the choice of a shape, and the tensor maps, which are made when a launch is enqueued and lie in its parameters.
#include "backend.h"
#include "moe_boxes.cuh"
#include "tensor_map.h"

namespace kdtree {
namespace {

using namespace cuda;

using Kernel = void (*)(BoxMoeParams);

template <bool DOWN, const auto& TABLE, size_t... I>
Kernel kernel_at(int index, std::index_sequence<I...>) {
  constexpr Kernel kernels[] = {
      &box_moe_kernel<BoxMoeShape<DOWN, TABLE[I].staged, TABLE[I].split, TABLE[I].warps, TABLE[I].wide, TABLE[I].depth, TABLE[I].span, TABLE[I].resident>>...};
  return kernels[index];
}
template <bool DOWN, const auto& TABLE>
Kernel kernel_of(int index) {
  return kernel_at<DOWN, TABLE>(index, std::make_index_sequence<std::size(TABLE)>());
}

}  // namespace

int CudaBackend::choose_boxes(const MoeArgs& a, bool down) const {
  for (const Weight* w : {&a.gate, &a.up, &a.down}) {
    if (!aligned(w->scale)) return -1;
  }
  if (!down) return stream::choose_gate_up_boxes(device_shape_, a.dim, a.max_rows);
  return stream::choose_down_boxes(device_shape_, a.down.k, a.shared_down.n > 0 ? a.shared_down.k : a.down.k, a.max_rows);
}

BoxMoeParams cuda::box_params(const MoeArgs& a, bool down, int wide, bool routed, const StreamMoeParams& p) {
  const int rows = down ? kTileRows : kTileRows / 2;
  const Weight& w = down ? a.down : a.gate;
  const uint64_t all = static_cast<uint64_t>(w.e - 1) * static_cast<uint64_t>(p.step) + static_cast<uint64_t>(p.n), k = static_cast<uint64_t>(p.k);
  BoxMoeParams q{};
  q.p = p;
  q.weights = row_map(p.data[0], p.data[1], p.bf16 ? k * 2 : k / 2, all, 128, rows, true);
  if (!p.bf16) q.scales = row_map(p.scale[0], p.scale[1], k / 16, all, wide * 16, rows, false);
  if (p.shared_n > 0) q.shared = row_map(p.shared[0], p.shared[1], static_cast<uint64_t>(p.shared_k) * 2, static_cast<uint64_t>(p.shared_n), 128, rows, true);
  q.up_first = p.data[1] < p.data[0], q.shared_up_first = p.shared[1] < p.shared[0];
  q.scales_differ = !p.bf16 && q.up_first != (p.scale[1] < p.scale[0]);
  q.early = routed, q.columns = stream::sum_columns(a.max_rows);
  return q;
}

void CudaBackend::launch_boxes(const char* name, const MoeArgs& a, bool down, int variant, bool routed, const StreamMoeParams& p) {
  const stream::BoxVariant& v = down ? stream::kDownBoxes[variant] : stream::kGateUpBoxes[variant];
  const Kernel kernel = down ? kernel_of<true, stream::kDownBoxes>(variant) : kernel_of<false, stream::kGateUpBoxes>(variant);
  const size_t shared = stream::box_shared(v, p.k, a.max_rows);
  const int blocks = resident_clusters(reinterpret_cast<const void*>(kernel), name, 1, stream::box_threads(v.warps), shared), step = stream::moe_rows(v.staged);
  launch(name, kernel, dim3(blocks, (a.max_rows + step - 1) / step), stream::box_threads(v.warps), shared, box_params(a, down, v.wide * v.span, routed, p));
}

}  // namespace kdtree
