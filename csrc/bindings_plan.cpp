// torch.ops.kdtree: what stream_plan.h decides, on any machine and for any device's sizes, for tests.
#include "bindings.h"
#include "stream_plan.h"

namespace kdtree {
namespace {

// product: linear, normed for one with a norm, wide for one without where warpgroup products are known, gate_up or down. The variant as
// `mt nt cl warps depth resident held shared`, shared in bytes a block; or `wide shared`; or `generic`.
std::string product_plan(std::string product, bool int4, int64_t k, int64_t rows, bool paired, bool clusters, int64_t shared) {
  const bool wide = product == "wide", normed = product == "normed";
  if (wide || normed) product = "linear";
  const stream::Device device{clusters, 132, static_cast<size_t>(shared), wide};
  const WeightKind kind = int4 ? WeightKind::kInt4 : WeightKind::kBf16;
  const int in = static_cast<int>(k), m = static_cast<int>(rows);
  const stream::Variant* chosen = nullptr;
  size_t bytes = 0;
  if (!stream::serves(device, in)) return "generic";
  if (stream::serves_wide(device, kind, in, m, false)) return "wide " + std::to_string(stream::wide_shared(kind, in));
  if (product == "linear") {
    const int at = stream::choose_linear(device, kind, in, m, paired, normed);
    if (at >= 0) chosen = int4 ? &stream::kLinearInt4[at] : &stream::kLinearBf16[at], bytes = stream::linear_shared(*chosen, kind, in, m);
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

int as_int(int64_t value, const char* what) {
  need(value >= 0 && value <= INT32_MAX, what, "is not a size");
  return static_cast<int>(value);
}

// [clusters + 1]: where each cluster's items other than the shared expert's begin (stream::Items).
std::vector<int64_t> expert_shares(int64_t clusters, int64_t shared, int64_t shared_cost, int64_t count, int64_t cost) {
  need(clusters > 0, "clusters", "is not positive");
  need(cost > 0, "cost", "is not positive");
  const stream::Items items{as_int(clusters, "clusters"), as_int(shared, "shared"), shared_cost, as_int(count, "count"), cost};
  std::vector<int64_t> begins;
  for (int c = 0; c <= items.clusters; ++c) begins.push_back(stream::first_item(items, c));
  return begins;
}

// Where the segments of K begin, in elements, the end last; and, last of all, how many elements a block stages at most.
std::vector<int64_t> product_segments(int64_t k, int64_t granule, int64_t cluster) {
  need(granule > 0, "granule", "is not positive");
  need(cluster > 0 && stream::kSegments % cluster == 0, "cluster", "does not divide the segments");
  const int in = as_int(k, "k"), unit = as_int(granule, "granule"), units = (in + unit - 1) / unit;
  std::vector<int64_t> found;
  for (int s = 0; s <= stream::kSegments; ++s) found.push_back(stream::segment_begin(s, units) * unit);
  found.push_back(stream::staged_length(in, static_cast<int>(cluster), unit));
  return found;
}

int64_t weight_byte(int64_t first, int64_t row, int64_t groups, int64_t group, int64_t bytes) {
  need(first >= 0, "first", "is negative");
  return static_cast<int64_t>(stream::byte_at(static_cast<size_t>(first), as_int(row, "row"), as_int(groups, "groups"),
                                              as_int(group, "group"), static_cast<size_t>(as_int(bytes, "bytes"))));
}

}  // namespace
}  // namespace kdtree

KDTREE_LIBRARY_FRAGMENT(KDTREE_LIBRARY, m) {
  m.def("product_plan(str product, bool int4, int k, int rows, bool paired, bool clusters, int shared) -> str");
  m.def("expert_shares(int clusters, int shared, int shared_cost, int count, int cost) -> int[]");
  m.def("product_segments(int k, int granule, int cluster) -> int[]");
  m.def("weight_byte(int first, int row, int groups, int group, int bytes) -> int");
}

KDTREE_LIBRARY_IMPL(KDTREE_LIBRARY, m) {
  m.impl("product_plan", kdtree::boxed<kdtree::product_plan>);
  m.impl("expert_shares", kdtree::boxed<kdtree::expert_shares>);
  m.impl("product_segments", kdtree::boxed<kdtree::product_segments>);
  m.impl("weight_byte", kdtree::boxed<kdtree::weight_byte>);
}
