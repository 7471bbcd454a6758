// Launches of moe_tiles.cuh, with the tensor maps, which are made when a launch is enqueued and lie in its parameters.
#include "backend.h"
#include "moe_tiles.cuh"
#include "tensor_map.h"

namespace kdtree {

using namespace cuda;

bool CudaBackend::tiles_serve(const MoeArgs& a, bool down) const {
  const Weight &own = down ? a.down : a.gate, &around = down ? a.shared_down : a.shared_gate;
  if (own.kind != WeightKind::kInt4) return false;
  for (const Weight* w : {&a.gate, &a.up, &a.down}) {
    if (!aligned(w->scale)) return false;
  }
  const int groups = stream::tile_groups(down, around.n);
  if (groups > stream::kMostGroups || stream::tile_parts(groups, a.max_rows) > stream::wide_exchange(stream::wide_groups(device_shape_.multiprocessors))) return false;
  return stream::serves_tiles(device_shape_, down, own.k, own.n, around.n > 0 ? around.k : 0, a.max_rows);
}

Tickets* CudaBackend::unit_tickets(bool down) const { return tickets_ + (down ? 3 : 2); }

bool CudaBackend::tiles_together(const MoeArgs& a) const {
  return a.phase == MoePhase::kBoth && a.gathered == nullptr && tiles_serve(a, false) && tiles_serve(a, true);
}

void CudaBackend::launch_tiles(const char* name, const MoeArgs& a, bool down, bool routed, const StreamMoeParams& p) {
  constexpr stream::TileShape V = stream::kTiles;
  const int rows = stream::moe_outputs(down);
  const Weight& w = down ? a.down : a.gate;
  const uint64_t all = static_cast<uint64_t>(w.e - 1) * static_cast<uint64_t>(p.step) + static_cast<uint64_t>(p.n), k = static_cast<uint64_t>(p.k);
  TileMoeParams q{};
  q.p = p, q.shared_columns = (a.max_rows + kColumns - 1) / kColumns;
  q.weights = row_map(p.data[0], p.data[1], k / 2, all, 128, rows * stream::kTileWarps, true, 1, true);
  q.scales = row_map(p.scale[0], p.scale[1], k / 16, all, V.span * 16, rows * stream::kTileWarps, false, 1, true);
  q.tile_weights = row_map(p.data[0], p.data[1], k / 2, all, 128, rows, true, 1, true);
  q.tile_scales = row_map(p.scale[0], p.scale[1], k / 16, all, V.span * 16, rows, false, 1, true);
  if (p.shared_n > 0) {
    const void* const around = down ? static_cast<const void*>(p.shared_act) : p.rows;
    const uint64_t pitch = static_cast<uint64_t>(down ? p.shared_k : p.row_stride) * 2;
    q.shared = row_map(p.shared[0], p.shared[1], static_cast<uint64_t>(p.shared_k) * 2, static_cast<uint64_t>(p.shared_n), 128, rows * stream::kTileWarps, true, 1, true);
    q.shared_rows = row_map(around, around, pitch, static_cast<uint64_t>(a.max_rows), 128, q.shared_columns * kColumns, true, 1, true);
  }
  q.parts = static_cast<float4*>(exchange_), q.met = multiplied_ + stream::kMostExperts;
  q.up_first = p.data[1] < p.data[0], q.shared_up_first = p.shared[1] < p.shared[0];
  q.scales_differ = q.up_first != (p.scale[1] < p.scale[0]);
  q.tickets = unit_tickets(down);
  q.normed = !down && routed ? a.max_rows : 0, q.chosen = chosen_;
  if (tiles_together(a)) {
    q.routes = multiplied_ + stream::kMostExperts + stream::kMostGroups;
    q.multiplied = multiplied_, q.shared_multiplied = &unit_tickets(true)->ahead;
    q.before = a.gate.n / stream::moe_outputs(false), q.shared_before = stream::tile_groups(false, a.shared_gate.n) + 1;
  }
  const auto kernel = down ? &tile_moe_kernel<TileMoeShape<true, V.depth, V.span, V.resident>> : &tile_moe_kernel<TileMoeShape<false, V.depth, V.span, V.resident>>;
  const size_t shared = stream::tile_shared(V);
  const int blocks = resident_clusters(reinterpret_cast<const void*>(kernel), name, 1, kTileMoeThreads, shared);
  launch(name, kernel, dim3(blocks), kTileMoeThreads, shared, q);
}

}  // namespace kdtree
