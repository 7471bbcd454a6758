// torch.ops.kdtree: which kernel stream_plan.h chooses, on any machine and for any device's sizes, for tests.
#include "bindings.h"
#include "stream_plan.h"

namespace kdtree {
namespace {

// product: linear, gate_up or down. The variant as `mt nt cl warps depth resident held shared`, shared in bytes a block; or `generic`.
std::string product_plan(std::string product, bool int4, int64_t k, int64_t rows, bool paired, bool clusters, int64_t shared) {
  const stream::Device device{clusters, 132, static_cast<size_t>(shared)};
  const WeightKind kind = int4 ? WeightKind::kInt4 : WeightKind::kBf16;
  const int in = static_cast<int>(k), m = static_cast<int>(rows);
  const stream::Variant* chosen = nullptr;
  size_t bytes = 0;
  if (!stream::serves(device, in)) return "generic";
  if (product == "linear") {
    const int at = stream::choose_linear(device, kind, in, m, paired);
    if (at >= 0) chosen = int4 ? &stream::kLinearInt4[at] : &stream::kLinearBf16[at], bytes = stream::linear_shared(*chosen, kind, in);
  } else {
    const bool down = product == "down";
    need(down || product == "gate_up", "product", "is not linear, gate_up or down");
    const int at = down ? stream::choose_down(device, in, m) : stream::choose_gate_up(device, in, m);
    if (at >= 0) chosen = down ? &stream::kDown[at] : &stream::kGateUp[at], bytes = stream::moe_shared(*chosen, in, down);
  }
  if (chosen == nullptr) return "generic";
  const stream::Variant& v = *chosen;
  std::string text;
  for (const int n : {v.mt, v.nt, v.cl, v.warps, v.depth, v.resident, v.held}) text += std::to_string(n) + " ";
  return text + std::to_string(bytes);
}

}  // namespace
}  // namespace kdtree

KDTREE_LIBRARY_FRAGMENT(KDTREE_LIBRARY, m) {
  m.def("product_plan(str product, bool int4, int k, int rows, bool paired, bool clusters, int shared) -> str");
}

KDTREE_LIBRARY_IMPL(KDTREE_LIBRARY, m) { m.impl("product_plan", kdtree::boxed<kdtree::product_plan>); }
