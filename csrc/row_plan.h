// Which shape the experts' kernels of Hopper have for one row (cuda/moe_row.cuh): a pure function of sizes and device, no CUDA in it.
//
// Guarantees: a shape that is chosen fits the device and these sizes. No bit depends on the choice, nor on whether one is found.
#pragma once
#include "box_plan.h"

namespace kdtree {
namespace stream {

// Warps that multiply, each with a ring of `depth` slots of two boxes, and that copy. early: slots that are asked for before the row stands in shared memory.
struct RowVariant {
  int warps, copiers, depth, early;
};

constexpr int kRowWide = 2;                         // boxes of a slot
constexpr int kRowNormed = 7168;                    // gate and up: values of the row that registers have room for
constexpr int kRowTiles = 40;                       // of a block, at most
constexpr int kRowExperts = 448;                    // of which gate and up choose: the router's sums have room where two warps' rings will be
constexpr int kRowActs = 3;                         // of down: the shared expert's and two experts', which is as far as a block's tiles reach
constexpr int kRowTileSums = kSegments * kTileRows * 4;
constexpr size_t kRowStatic = 2560;                 // static shared memory of a kernel, at most

constexpr RowVariant row_variant(bool down) { return down ? RowVariant{8, 2, 2, 2} : RowVariant{8, 2, 2, 1}; }  // measured in docs/kernels_experts.md
constexpr int row_parts(bool down) { return down ? 2 : 4; }         // of a tile's K that warps take, of an expert's,
constexpr int row_shared_parts(bool down) { return down ? 4 : 8; }  // and of the shared expert's
constexpr int row_threads(const RowVariant& v) { return (v.warps + v.copiers) * 32; }

// A block's first of the experts' tiles. All blocks have as many, whatever they have of the shared expert: that is multiplied while the block would wait,
// of gate and up for the router, of down for the acts. count * blocks fits.
KDTREE_BOTH constexpr int first_row_tile(int count, int blocks, int b) { return static_cast<int>(static_cast<unsigned>(count) * static_cast<unsigned>(b) / static_cast<unsigned>(blocks)); }

// The most tiles that a block has, the shared expert's and the others.
constexpr int row_tiles(int count, int shared, int blocks) {
  int most = 0;
  for (int b = 0, first = 0; b < blocks; ++b) {
    const int end = first_row_tile(count, blocks, b + 1), own = shared_items(shared, blocks, b) + end - first;
    most = own > most ? own : most, first = end;
  }
  return most;
}
constexpr size_t row_staged(bool down, int k, int shared_k) {
  return static_cast<size_t>(down ? kRowActs : 1) * static_cast<size_t>(staged_stride(k > shared_k ? k : shared_k));
}
constexpr size_t row_shared(const RowVariant& v, bool down, int k, int shared_k, int tiles) {
  return kBoxAlign + box_ring(v.warps, kRowWide, v.depth, 1) + static_cast<size_t>(tiles * kRowTileSums) + row_staged(down, k, shared_k);
}
// Whether every block of gate and up chooses for itself, so that no block of the router's launch has to wait for the others.
constexpr bool row_chooses(const RowVariant& v, int experts, int n_group) {
  const int room = 2 * v.depth * kRowWide * kBoxBytes;
  return n_group == 1 && experts <= kRowExperts && kSegments * experts * 4 <= room && experts % 4 == 0;
}
// Of a launch: blocks, two a multiprocessor; tiles of a block at most, 0: the kernels do not serve it; and bytes of shared memory.
struct RowLaunch {
  int blocks = 0, tiles = 0;
  size_t shared = 0;
};
// n, shared_n: outputs. No segment is without a unit, at whose end its sum is left, and parts of K begin at boxes; of gate and up a warp norms a segment.
constexpr RowLaunch plan_row(const Device& device, const RowVariant& v, bool down, int k, int shared_k, int n, int shared_n, int top_k) {
  if (!serves_boxes(device, k, shared_k) || k % (kSegments * unit_of(WeightKind::kInt4)) != 0 || shared_k % (kBoxK * 2) != 0 || (!down && k > kRowNormed)) return {};
  const int blocks = 2 * device.multiprocessors, each = moe_outputs(down), tiles = (n + each - 1) / each, shared_tiles = (shared_n + each - 1) / each;
  const int most = row_tiles(top_k * tiles, shared_tiles, blocks);
  const size_t bytes = row_shared(v, down, k, shared_k, most);
  if (most > kRowTiles || most > tiles || (bytes + kRowStatic + 1024) * 2 > device.shared + 1024) return {};
  return {blocks, most, bytes};
}

}  // namespace stream
}  // namespace kdtree
