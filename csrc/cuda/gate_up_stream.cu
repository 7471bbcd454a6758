// The gate and up products of the chosen experts and the shared one, for bf16 activations: moe_stream.cuh with K = D.
#include "backend.h"
#include "moe_stream.cuh"

namespace kdtree {

using namespace cuda;

bool CudaBackend::gate_up_stream(const MoeArgs& a) {
  if (a.numerics != Numerics::kBf16 || !stream::serves_moe(device_shape_, a.dim, a.dim, a.top_k, a.gate.e)) return false;
  const int variant = stream::choose_gate_up(device_shape_, a.dim, a.max_rows);
  const bool int4 = a.gate.kind == WeightKind::kInt4;
  StreamMoeParams p{};
  p.x = a.x, p.norm_w = a.norm_w, p.eps = a.eps, p.k = p.shared_k = a.dim, p.bf16 = !int4;
  p.data[0] = a.gate.data, p.data[1] = a.up.data, p.scale[0] = a.gate.scale, p.scale[1] = a.up.scale;
  p.shared[0] = a.shared_gate.data, p.shared[1] = a.shared_up.data;
  p.n = a.gate.n, p.shared_n = a.shared_gate.n, p.step = a.gate.step();
  p.ids = a.ids, p.top_k = a.top_k, p.max_rows = a.max_rows, p.n_rows = a.n_rows;
  p.act = static_cast<uint16_t*>(a.act), p.shared_act = static_cast<uint16_t*>(a.shared_act);
  bool ready = variant >= 0 && aligned(a.x) && aligned(a.norm_w) && a.up.step() == a.gate.step();
  for (int i = 0; i < 2; ++i) ready = ready && aligned(p.data[i]) && aligned(p.shared[i]) && aligned(p.scale[i], 8);
  if (!ready) return false;
  const stream::Variant& v = stream::kGateUp[variant];
  const StreamMoeKernel kernel = moe_kernel<false, stream::kGateUp>(variant);
  const char* const name = int4 ? "experts_int4_bf16" : "experts_bf16";
  const size_t shared = stream::moe_shared(v, a.dim, false);
  const int clusters = resident_clusters(reinterpret_cast<const void*>(kernel), name, v.cl, v.warps * kWarp, shared);
  p.stride = stream::staged_stride(stream::staged_length(a.dim, v.cl, stream::kMoeGranule));
  const int columns = v.held * kColumns;
  launch_clusters(name, kernel, v.cl, dim3(clusters * v.cl, (a.max_rows + columns - 1) / columns), v.warps * kWarp, shared, p);
  ++(*counting_)[int4 ? "experts_int4_bf16_stream" : "experts_bf16_stream"];
  return true;
}

}  // namespace kdtree
