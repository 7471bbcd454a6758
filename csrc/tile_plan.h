// Whether and how the warps of a block go through K together for the experts of Hopper (cuda/moe_tiles.cuh): pure functions of sizes and
// device, no CUDA in them.
//
// Guarantees: every tile of an expert is in one unit for each turn of its rows. No bit depends on how units are cut or on who takes them, nor
// on whether this kernel serves: those of moe_boxes.cuh and moe_stream.cuh add in the same order.
#pragma once
#include "box_plan.h"

namespace kdtree {
namespace stream {

// A block's ring has `depth` stages of kBoxK of K for a tile a warp; `span` of them share a piece of scales. resident: blocks a multiprocessor.
struct TileShape {
  int depth, span, resident;
};

constexpr int kTileWarps = kSegments;                       // the shared expert's segments are a warp's each
constexpr int kFewTiles = kTileWarps / 2;                   // of a launch's last units
constexpr int kTileRow = kBoxK * 2 + 64;                    // bytes from a row's activations of a stage to the next one's: two rows lie in all banks
constexpr int kTileColumns = 2 * kColumns;                  // rows of an expert that are multiplied at a time
constexpr int kTileRun = kTileColumns * kTileRow;
constexpr int kTileStage = kTileWarps * kBoxBytes;
constexpr int kSharedStage = kSegments * 64;                // of K a stage of the shared expert: 128 bytes of each segment
constexpr size_t kTileStatic = 19 << 10;                    // static shared memory of a kernel, at most
constexpr TileShape kTiles{3, 2, 2};                        // measured in docs/kernels.md

// Pieces of scales: one is asked for when at most depth stages are in use.
constexpr int tile_pieces(const TileShape& v) { return (v.depth - 1 + v.span - 1) / v.span + 1; }
constexpr int tile_piece(const TileShape& v) { return kTileWarps * kTileRows * v.span * 16; }
constexpr size_t tile_shared(const TileShape& v) {
  return kBoxAlign + static_cast<size_t>(v.depth) * (kTileStage + kTileRun) + static_cast<size_t>(tile_pieces(v)) * tile_piece(v);
}

// The shared expert's tiles go in groups of kTileWarps, of which a block has a segment of K; bytes in which the segments' sums meet.
constexpr size_t kRoutesBytes = 16 << 10;  // of a step's routes, which gate and up leave for down, at most
constexpr int kMostGroups = 1024;
constexpr int tile_groups(bool down, int n) { return (n + kTileWarps * moe_outputs(down) - 1) / (kTileWarps * moe_outputs(down)); }
constexpr size_t tile_parts(int groups, int rows) {
  return static_cast<size_t>(groups) * kSegments * kTileWarps * kTileRows * ((rows + kColumns - 1) / kColumns * kColumns) * sizeof(float);
}

// Whether it serves int4 experts of n weight rows of k values; shared_k 0: there is no shared expert. Gate and up need rows that stand normed in
// scratch, and one row of down has a kernel of its own.
constexpr bool serves_tiles(const Device& device, bool down, int k, int n, int shared_k, int rows) {
  return device.wgmma && rows > (down ? 1 : kOwnNorm) && rows <= moe_rows(false) && k > 0 && k % (kBoxK * kTiles.span) == 0 && n % (kTileWarps * moe_outputs(down)) == 0 &&
         shared_k % kSharedStage == 0 && (tile_shared(kTiles) + kTileStatic + 1024) * kTiles.resident <= device.shared + 1024;
}

// Items are tiles of an expert for one turn of its rows; of several turns the same kTileWarps tiles follow each other, since their weights come
// from near then. Blocks take units of kTileWarps items and, of the last ones, one for four blocks, halves, for all to end at about the same time.
struct TileUnit {
  int item, count;
};
KDTREE_BOTH constexpr TileUnit tile_unit(int taken, int items, int blocks) {
  const int all = items / kTileWarps, last = blocks / 4, whole = all > last ? all - last : 0;
  return taken < whole ? TileUnit{taken * kTileWarps, kTileWarps} : TileUnit{whole * kTileWarps + (taken - whole) * kFewTiles, kFewTiles};
}
// Item `own` of an expert with so many turns.
KDTREE_BOTH constexpr ItemPlace tile_item(int own, int turns) {
  if (turns == 1) return {own, 0};
  const int group = own / (kTileWarps * turns), within = own - group * (kTileWarps * turns);
  return {group * kTileWarps + within % kTileWarps, within / kTileWarps};
}

}  // namespace stream
}  // namespace kdtree
