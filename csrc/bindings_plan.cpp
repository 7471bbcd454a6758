// torch.ops.kdtree: what stream_plan.h decides, on any machine and for any device's sizes, for tests.
#include "bindings.h"
#include "row_plan.h"
#include "tile_plan.h"

namespace kdtree {
namespace {

// product: linear, normed for one with a norm, wide and whole where warpgroup products are known,
// whole with one tile of weights or, of longer rows, 64, gate_up or down. Or route, of 384
// experts and 8 choices: `choosing combining shared`, the blocks that choose and those of down that combine. The variant as
// `mt nt cl warps depth resident held shared`, shared in bytes a block; or `wide shared`, `whole shared` or `boxes shared`; or `generic`. Of gate_up and down `stream shared`, and
// of Hopper's, gate_up_boxes and down_boxes, `staged split warps wide depth span resident shared` where boxes serve.
std::string product_plan(std::string product, bool int4, int64_t k, int64_t rows, bool paired, bool clusters, int64_t shared) {
  const bool whole = product == "whole", wide = whole || product == "wide", normed = product == "normed";
  const bool boxes = product == "gate_up_boxes" || product == "down_boxes";
  if (wide || normed) product = "linear";
  if (boxes) product.resize(product.size() - std::string("_boxes").size());
  const stream::Device device{clusters, 132, static_cast<size_t>(shared), wide || boxes};
  const WeightKind kind = int4 ? WeightKind::kInt4 : WeightKind::kBf16;
  const int in = static_cast<int>(k), m = static_cast<int>(rows);
  const auto line = [](std::initializer_list<int> shape, size_t bytes) {
    std::string text;
    for (const int n : shape) text += std::to_string(n) + " ";
    return text + std::to_string(bytes);
  };
  if (!stream::serves(device, in)) return "generic";
  if (product == "route") {
    if (!stream::serves_route(device, in, 384, 1, 8)) return "generic";
    return line({stream::choosing(device, m), stream::at_most_half(stream::combining(m), device.multiprocessors)}, stream::route_shared(in, m, 0));
  }
  if (wide && stream::serves_wide(device, kind, in, m)) {
    if (whole && stream::serves_whole(device, kind, in, 1, paired)) return "whole " + std::to_string(stream::whole_shared());
    if (whole && stream::serves_wide_boxes(device, kind, in, 64, paired)) return "boxes " + std::to_string(stream::wide_box_shared(in, stream::wide_box_depth(device, in)));
    return "wide " + std::to_string(stream::wide_shared(kind, in));
  }
  if (product == "linear") {
    const int at = stream::choose_linear(device, kind, in, m, paired, normed);
    if (at < 0) return "generic";
    const stream::Variant& v = int4 ? stream::kLinearInt4[at] : stream::kLinearBf16[at];
    return line({v.mt, v.nt, v.cl, v.warps, v.depth, v.resident, v.held}, stream::linear_shared(v, kind, in, m));
  }
  const bool down = product == "down";
  need(down || product == "gate_up", "product", "is not linear, gate_up or down");
  if (const int at = down ? stream::choose_down_boxes(device, in, in, m) : stream::choose_gate_up_boxes(device, in, m); at >= 0) {
    const stream::BoxVariant& v = down ? stream::kDownBoxes[at] : stream::kGateUpBoxes[at];
    return line({v.staged, v.split, v.warps, v.wide, v.depth, v.span, v.resident}, stream::box_shared(v, in, m));
  }
  return stream::serves_moe(device, in, in, 1, 1) ? "stream " + std::to_string(stream::kMoeShared) : "generic";
}

int as_int(int64_t value, const char* what) {
  need(value >= 0 && value <= INT32_MAX, what, "is not a size");
  return static_cast<int>(value);
}

// linear by boxes on Hopper: rows mt cl warps boxes depth resident held pieces spread, then clusters, outputs a cluster adds at a time, bytes of shared memory a
// block, and where the clusters' shares of the outputs begin, the end last. Empty where another kernel serves.
std::vector<int64_t> linear_box_plan(bool int4, int64_t k, int64_t rows, int64_t outputs, bool paired, bool normed, bool hopper, int64_t shared) {
  const stream::Device device{true, 132, static_cast<size_t>(shared), hopper};
  const WeightKind kind = int4 ? WeightKind::kInt4 : WeightKind::kBf16;
  const int all = as_int(outputs, "outputs");
  const stream::BoxLaunch launch = stream::plan_linear_boxes(device, kind, as_int(k, "k"), as_int(rows, "rows"), all, paired, normed);
  if (launch.variant < 0) return {};
  const stream::LinearBoxes& v = int4 ? stream::kBoxesInt4[launch.variant] : stream::kBoxesBf16[launch.variant];
  std::vector<int64_t> found{v.rows, v.mt, v.cl, v.warps, v.boxes, v.depth, v.resident, v.held, v.pieces, v.spread, launch.clusters, launch.batch, static_cast<int64_t>(launch.shared)};
  for (int i = 0; i <= launch.clusters; ++i) found.push_back(stream::share_begin(all / launch.clusters, all % launch.clusters, i));
  return found;
}

// Who does what in a launch of moe: for every item four numbers, the worker (block * groups + group), the expert (-1 the shared one,
// else a place in `turns`, the turns that its rows take), the tile and the turn.
std::vector<int64_t> expert_work(int64_t blocks, int64_t groups, int64_t tiles, int64_t shared_tiles, int64_t shared_turns, int64_t shared_k,
                                 std::vector<int64_t> turns, int64_t k, bool bf16) {
  need(blocks > 0 && groups > 0, "blocks, groups", "are not positive");
  need(k > 0, "k", "is not positive");
  std::vector<int> first{0}, slot;
  for (size_t i = 0; i < turns.size(); ++i) {
    first.push_back(first.back() + as_int(turns[i], "turns"));
    slot.resize(static_cast<size_t>(first.back()), static_cast<int>(i));
  }
  const int each = as_int(tiles, "tiles"), own_tiles = as_int(shared_tiles, "shared_tiles"), in_blocks = as_int(blocks, "blocks"), in_groups = as_int(groups, "groups");
  const stream::Items all = stream::moe_items(in_blocks, own_tiles, as_int(shared_turns, "shared_turns"), as_int(shared_k, "shared_k"),
                                              first.back() * each, as_int(k, "k"), bf16);
  std::vector<int64_t> work;
  for (int b = 0; b < in_blocks; ++b) {
    for (int g = 0; g < in_groups; ++g) {
      const int worker = b * in_groups + g, own = stream::shared_items(own_tiles, in_blocks, b);
      for (int i = g; i < own; i += in_groups) {
        for (int t = 0; t < shared_turns; ++t) work.insert(work.end(), {worker, -1, b + i * in_blocks, t});
      }
      const int end = stream::first_item(all, b, in_groups, g + 1);
      for (int i = stream::first_item(all, b, in_groups, g); i < end; ++i) {
        const int expert = slot[static_cast<size_t>(i / each)];
        const stream::ItemPlace at = stream::item_at(i, each, first[static_cast<size_t>(expert)], first[static_cast<size_t>(expert) + 1]);
        work.insert(work.end(), {worker, expert, at.tile, at.turn});
      }
    }
  }
  return work;
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

// Who has which of a launch's others on Hopper: the first item of each block, and within it of each group; the launch's end last.
std::vector<int64_t> box_work(int64_t blocks, int64_t groups, int64_t shared, int64_t weight, int64_t count) {
  need(blocks > 0 && groups > 0, "blocks, groups", "are not positive");
  const int in_blocks = as_int(blocks, "blocks"), in_groups = as_int(groups, "groups"), around = as_int(shared, "shared");
  const int w = as_int(weight, "weight"), all = as_int(count, "count");
  std::vector<int64_t> found;
  for (int b = 0; b < in_blocks; ++b) {
    const int first = stream::first_box_item(all, around, w, in_blocks, b), end = stream::first_box_item(all, around, w, in_blocks, b + 1);
    for (int g = 0; g < in_groups; ++g) {
      found.push_back(first + stream::first_box_item(end - first, stream::shared_items(around, in_blocks, b), w, in_groups, g));
    }
  }
  found.push_back(stream::first_box_item(all, around, w, in_blocks, in_blocks));
  return found;
}

// The experts of one row on Hopper: warps copiers depth early, blocks, bytes of shared memory a block, tiles that a block has places for; then each block's tiles
// of the shared expert, and of the others the first, the launch's end last. Empty where another kernel serves.
std::vector<int64_t> row_plan(bool down, int64_t k, int64_t shared_k, int64_t n, int64_t shared_n, int64_t top_k, bool hopper, int64_t shared) {
  const stream::Device device{true, 132, static_cast<size_t>(shared), hopper};
  const stream::RowVariant v = stream::row_variant(down);
  const int in = as_int(k, "k"), around = as_int(shared_k, "shared_k"), outputs = as_int(n, "n"), beside = as_int(shared_n, "shared_n"), chosen = as_int(top_k, "top_k");
  const stream::RowLaunch plan = stream::plan_row(device, v, down, in, around, outputs, beside, chosen);
  if (plan.tiles == 0) return {};
  std::vector<int64_t> found{v.warps, v.copiers, v.depth, v.early, plan.blocks, static_cast<int64_t>(plan.shared), plan.tiles};
  const int each = stream::moe_outputs(down), shared_tiles = (beside + each - 1) / each, count = chosen * ((outputs + each - 1) / each);
  for (int b = 0; b < plan.blocks; ++b) found.push_back(stream::shared_items(shared_tiles, plan.blocks, b));
  for (int b = 0; b <= plan.blocks; ++b) found.push_back(stream::first_row_tile(count, plan.blocks, b));
  return found;
}

// Whether the experts of Hopper go through K in tiles together, and in which shape: depth span resident, then bytes of shared memory a block; or nothing.
std::vector<int64_t> tile_plan(int64_t k, int64_t n, bool down, int64_t shared_k, int64_t rows, int64_t shared) {
  const stream::Device device{true, 132, static_cast<size_t>(shared), true};
  if (!stream::serves_tiles(device, down, as_int(k, "k"), as_int(n, "n"), as_int(shared_k, "shared_k"), as_int(rows, "rows"))) return {};
  return {stream::kTiles.depth, stream::kTiles.span, stream::kTiles.resident, static_cast<int64_t>(stream::tile_shared(stream::kTiles))};
}

// The units of a launch in the order in which blocks take them: for every unit four numbers, the expert (a place in `turns`, the turns that its
// rows take), the first tile, the turn and the count of tiles.
std::vector<int64_t> tile_work(int64_t blocks, int64_t tiles, std::vector<int64_t> turns) {
  need(blocks > 0, "blocks", "is not positive");
  const int each = as_int(tiles, "tiles"), in_blocks = as_int(blocks, "blocks");
  std::vector<int> first{0}, slot;
  for (size_t i = 0; i < turns.size(); ++i) {
    first.push_back(first.back() + as_int(turns[i], "turns"));
    slot.resize(static_cast<size_t>(first.back()), static_cast<int>(i));
  }
  std::vector<int64_t> work;
  for (int taken = 0;; ++taken) {
    const stream::TileUnit unit = stream::tile_unit(taken, first.back() * each, in_blocks);
    if (unit.item >= first.back() * each) return work;
    const size_t expert = static_cast<size_t>(slot[static_cast<size_t>(unit.item / each)]);
    const stream::ItemPlace place = stream::tile_item(unit.item - first[expert] * each, first[expert + 1] - first[expert]);
    work.insert(work.end(), {static_cast<int64_t>(expert), place.tile, place.turn, unit.count});
  }
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
  m.def("expert_work(int blocks, int groups, int tiles, int shared_tiles, int shared_turns, int shared_k, int[] turns, int k, bool bf16) -> int[]");
  m.def("box_work(int blocks, int groups, int shared, int weight, int count) -> int[]");
  m.def("tile_plan(int k, int n, bool down, int shared_k, int rows, int shared) -> int[]");
  m.def("tile_work(int blocks, int tiles, int[] turns) -> int[]");
  m.def("product_segments(int k, int granule, int cluster) -> int[]");
  m.def("linear_box_plan(bool int4, int k, int rows, int outputs, bool paired, bool normed, bool hopper, int shared) -> int[]");
  m.def("row_plan(bool down, int k, int shared_k, int n, int shared_n, int top_k, bool hopper, int shared) -> int[]");
  m.def("weight_byte(int first, int row, int groups, int group, int bytes) -> int");
}

KDTREE_LIBRARY_IMPL(KDTREE_LIBRARY, m) {
  m.impl("product_plan", kdtree::boxed<kdtree::product_plan>);
  m.impl("expert_work", kdtree::boxed<kdtree::expert_work>);
  m.impl("box_work", kdtree::boxed<kdtree::box_work>);
  m.impl("tile_plan", kdtree::boxed<kdtree::tile_plan>);
  m.impl("tile_work", kdtree::boxed<kdtree::tile_work>);
  m.impl("product_segments", kdtree::boxed<kdtree::product_segments>);
  m.impl("linear_box_plan", kdtree::boxed<kdtree::linear_box_plan>);
  m.impl("row_plan", kdtree::boxed<kdtree::row_plan>);
  m.impl("weight_byte", kdtree::boxed<kdtree::weight_byte>);
}
