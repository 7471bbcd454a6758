// Which kernel serves a product of bf16 activations, and in which shape: a pure function of sizes and device, no CUDA in it.
//
// Guarantees: whether the streaming kernels serve a product depends on K (and top_k, experts) and the device alone, never on
// rows or outputs, because their sums have another order than the generic kernels'. The variant changes no bit, so it may.
#pragma once
#include <cstddef>
#include <cstdint>

#include "both.h"
#include "ops.h"

namespace kdtree {
namespace stream {

struct Device {
  bool clusters = false;    // blocks can share their memory: Hopper and newer, and code compiled for it
  int multiprocessors = 0;
  size_t shared = 0;        // bytes a block may have
  bool wgmma = false;       // warpgroup products: Hopper, and code compiled for it alone
};

// The shape of a kernel: tiles of 16 weight rows a warp, tiles of 8 activation rows, blocks a cluster, warps a block, units a warp's ring
// holds, blocks a multiprocessor that the registers leave room for. held: tiles of activation rows a launch serves.
struct Variant {
  int mt, nt, cl, warps, depth, resident, held;
};

constexpr int kTileRows = 16, kColumns = 8, kSegments = 8;
constexpr int kRingBytes = 1024 + 128;  // a tile's unit and its scales
constexpr int kMostTopK = 16, kMostExperts = 1024;
constexpr size_t kStatic = 10 << 10, kMoeStatic = 16 << 10;  // static shared memory of the kernels, at most

// Elements of K between segments of linear.
constexpr int unit_of(WeightKind kind) { return kind == WeightKind::kInt4 ? 128 : 32; }

// First unit of segment s of K cut into `units`; segment kSegments begins at the end.
KDTREE_BOTH constexpr int segment_begin(int s, int units) { return s * units / kSegments; }

// Bytes from the first weight row's first group to group `group` of row first + row, where a row has `groups` of `bytes` each: sixteen
// of weights, or a scale. One layer's gate projections of K2.6 are 2.8e9 bytes in INT4 and 11.3e9 in bf16: 32 bits hold no place in them.
KDTREE_BOTH constexpr size_t byte_at(size_t first, int row, int groups, int group, size_t bytes) {
  return ((first + static_cast<size_t>(row)) * static_cast<size_t>(groups) + static_cast<size_t>(group)) * bytes;
}

// What the workers of a launch of moe share out: the shared expert's items in turn (worker, worker + workers, ...), the others in
// contiguous ranges, so cut that all read about the same number of bytes. A cost is in any unit.
struct Items {
  int workers;
  int shared;  // items of the shared expert
  int64_t shared_cost;
  int count;  // the others
  int64_t cost;
};
// The first of the others that worker w takes; worker w + 1's first is its end. first_item(., 0) is 0, first_item(., workers) is count.
KDTREE_BOTH constexpr int first_item(const Items& n, int w) {
  if (w >= n.workers) return n.count;
  const int rest = n.shared % n.workers;
  const int64_t before = static_cast<int64_t>(w) * (n.shared / n.workers) + (w < rest ? w : rest);  // shared items of the workers below
  const int64_t at = ((n.shared * n.shared_cost + n.count * n.cost) * w / n.workers - before * n.shared_cost) / n.cost;
  return static_cast<int>(at < 0 ? 0 : at > n.count ? n.count : at);
}
// Of `items` of the shared expert, how many worker w of `workers` has.
KDTREE_BOTH constexpr int shared_items(int items, int workers, int w) { return w < items ? (items - w + workers - 1) / workers : 0; }

// Blocks share out first, then the groups of warps of a block what it has: the first of the others that group `group` takes.
KDTREE_BOTH constexpr int first_item(const Items& all, int block, int groups, int group) {
  const int first = first_item(all, block);
  const Items own{groups, shared_items(all.shared, all.workers, block), all.shared_cost, first_item(all, block + 1) - first, all.cost};
  return first + first_item(own, group);
}
// A launch's items: a tile of the shared expert, for all turns of its rows, and a tile of another expert for one turn each.
KDTREE_BOTH constexpr Items moe_items(int blocks, int shared_tiles, int shared_turns, int shared_k, int items, int k, bool bf16) {
  return {blocks, shared_tiles, 32 * static_cast<int64_t>(shared_k) * shared_turns, items, (bf16 ? 32 : 9) * static_cast<int64_t>(k)};
}
// Item i of an expert whose turns are [first_turn, end_turn) of the launch's, each of `tiles` items: the turns of a tile follow each
// other, so that its weights come from near the second time.
struct ItemPlace {
  int tile, turn;
};
KDTREE_BOTH constexpr ItemPlace item_at(int i, int tiles, int first_turn, int end_turn) {
  const int own = i - first_turn * tiles, turns = end_turn - first_turn;
  return {own / turns, own % turns};
}

constexpr int rows_of(const Variant& v) { return v.mt * (v.warps * v.cl / kSegments) * kTileRows; }

// Elements of K that a block stages at most.
constexpr int staged_length(int k, int cl, int granule) {
  const int granules = (k + granule - 1) / granule, segments = kSegments / cl;
  return (granules * segments + kSegments - 1) / kSegments * granule;
}
// Bytes between two staged activation rows of k elements: an odd number of 64-byte lines, so that two rows lie in all banks.
KDTREE_BOTH constexpr int staged_stride(int k) { return k * 2 + (k / 32 % 2 == 0 ? 64 : 0); }

constexpr size_t kZeros = 256;  // a unit's bytes of activations for columns that have no row

constexpr size_t ring_bytes(const Variant& v) { return static_cast<size_t>(v.warps) * v.depth * v.mt * kRingBytes; }
// Whether the segments' sums take the ring's place: for many rows there is no room for both beside the activations.
constexpr bool sums_in_ring(int nt) { return nt >= 8; }
constexpr size_t linear_shared(const Variant& v, WeightKind kind, int k, int rows) {
  const int columns = v.nt == 1 && rows < kColumns ? rows : v.nt * kColumns;
  const size_t ring = ring_bytes(v), sums = static_cast<size_t>(kSegments / v.cl) * rows_of(v) * v.nt * kColumns * 4;
  return (sums_in_ring(v.nt) ? (ring > sums ? ring : sums) : ring + sums) + kZeros +
         static_cast<size_t>(columns) * staged_stride(staged_length(k, v.cl, unit_of(kind)));
}
// A row of k elements in whole units of int4.
KDTREE_BOTH constexpr int padded(int k) { return (k + 127) / 128 * 128; }

KDTREE_BOTH constexpr int moe_rows(bool staged) { return staged ? kColumns : 64; }  // rows of the step a launch serves at a time
KDTREE_BOTH constexpr int moe_outputs(bool down) { return down ? kTileRows : kTileRows / 2; }  // of an item
// The experts' kernels for every device: warps of a block, and units that the ring of each holds.
constexpr int kMoeWarps = 16, kMoeDepth = 4;
constexpr size_t kMoeShared = static_cast<size_t>(kMoeWarps) * kMoeDepth * kRingBytes;

constexpr int kBoxWeightBytes = 2048, kBoxScaleBytes = 256;  // 16 rows x 128 bytes, and int4's scales of them

// linear for 17 to 64 rows by warpgroup products (linear_wide.cu): a block has a segment of K, each of its warpgroups one tile of 64 weight
// rows after the other, a warp sixteen of them. Activations of kWideChunk of K are put in order at a time, beside the next ones as they come.
constexpr int kWideRows = 64, kWideFewer = 32, kWideLeast = 17, kWideWarps = 16, kWideGroups = kWideWarps / 4, kWideTile = 64, kWideChunk = 128;
constexpr int kWideCluster = 2;  // blocks of one segment that are sent the same activations; an H200 has room for 66 pairs, but 30 fours
constexpr size_t kWideStatic = 1 << 10;
constexpr int wide_depth(WeightKind kind) { return kind == WeightKind::kInt4 ? 4 : 5; }  // units of a warp's ring
constexpr int wide_slot(WeightKind kind) { return kind == WeightKind::kInt4 ? kRingBytes : 1024; }
constexpr size_t wide_shared(WeightKind kind, int k) {
  const int chunks = (staged_length(k, kSegments, unit_of(kind)) + kWideChunk - 1) / kWideChunk;
  return static_cast<size_t>(kWideWarps) * wide_depth(kind) * wide_slot(kind) + static_cast<size_t>(chunks + 1) * (kWideChunk * kWideRows * 2);
}
// Rows of blocks at a time, each of kSegments resident blocks that wait for each other.
constexpr int wide_groups(int blocks) { return blocks / (kSegments * kWideCluster) * kWideCluster; }
// Bytes in which `groups` of them exchange sums: of two rounds, since a warpgroup may be a round ahead of those that still read.
constexpr size_t wide_exchange(int groups) {
  return static_cast<size_t>(2 * groups * kSegments * kWideGroups * kWideTile) * kWideRows * sizeof(float);
}
// Whether it serves: its bits are the other variants', so rows may have a say.
constexpr bool serves_wide(const Device& device, WeightKind kind, int k, int rows) {
  return device.wgmma && wide_groups(device.multiprocessors) > 0 && rows >= kWideLeast && wide_shared(kind, k) + kWideStatic <= device.shared;
}
// The same for int4 with weights in boxes (wide_boxes.cuh), where a warpgroup has few tiles: kWideBoxGroups warpgroups multiply, each with a ring of boxes of
// a tile's rows and their scales. Rows are whole boxes, and scales are copied sixteen bytes at a time.
constexpr int kWideBoxGroups = 2, kWideWeightSlot = kWideTile * 128, kWideScaleSlot = kWideTile * 16;
constexpr size_t wide_rings(int depth) { return static_cast<size_t>(kWideBoxGroups * depth) * (kWideWeightSlot + kWideScaleSlot); }
constexpr bool serves_boxed(const Device& device, WeightKind kind, int k, bool paired) {
  return device.wgmma && kind == WeightKind::kInt4 && !paired && k % 256 == 0;
}
// linear_wide_boxes.cu: boxes of a ring that are asked for before the launch before has ended, tiles of a warpgroup and chunks of activations at most. Shorter
// rows have too many tiles for what is exchanged with each.
constexpr int kWideBoxEarly = 1, kWideBoxRounds = 2, kWideBoxChunks = 8, kWideBoxMostDepth = 4;
constexpr size_t wide_box_shared(int k, int depth) {
  const int chunks = (staged_length(k, kSegments, unit_of(WeightKind::kInt4)) + kWideChunk - 1) / kWideChunk;
  return static_cast<size_t>(chunks) * (kWideChunk * kWideRows * 2) + wide_rings(depth);
}
// Slots of a ring, 0 where there is no room for two.
constexpr int wide_box_depth(const Device& device, int k) {
  int depth = kWideBoxMostDepth;
  while (depth > 1 && wide_box_shared(k, depth) + kWideStatic + 1024 > device.shared) --depth;
  return depth > 1 ? depth : 0;
}
// linear_whole.cu: a cluster shares K and has a tile for each of its blocks, whose two segments' activations and the sums that come from the others it has room
// for beside rings of kWholeDepth boxes; kWholeEarly of them are asked for before the launch before has ended.
constexpr int kWholeCluster = 4, kWholeK = 2048, kWholeUnits = kWholeK / unit_of(WeightKind::kInt4) / kWholeCluster, kWholeDepth = 3, kWholeEarly = 2;
constexpr size_t whole_shared() {
  const size_t sums = static_cast<size_t>((kWholeCluster - 1) * (kSegments / kWholeCluster) * kWideTile * kWideRows) * sizeof(float);
  return static_cast<size_t>(kWholeUnits) * (kWideChunk * kWideRows * 2) + sums + wide_rings(kWholeDepth);
}
constexpr size_t wide_counters(int groups) { return static_cast<size_t>(groups * kWideBoxGroups * 4 * kWideBoxRounds) * sizeof(uint32_t); }
static_assert(kWideBoxRounds * kWideBoxGroups <= 2 * kWideGroups, "room in wide_exchange for both");
constexpr bool serves_wide_boxes(const Device& device, WeightKind kind, int k, int tiles, bool paired) {
  return serves_boxed(device, kind, k, paired) && k > kWholeK && k <= kWideBoxChunks * kWideChunk * kSegments &&
         tiles <= kWideBoxRounds * kWideBoxGroups * wide_groups(device.multiprocessors) && wide_box_depth(device, k) > 0;
}
// Bytes of scratch for its rows where they have a norm: they are normed once, by a launch of their own.
constexpr size_t wide_normed(const Device& device, int k, int rows) {
  const bool serves = serves_wide(device, WeightKind::kInt4, k, rows) || serves_wide(device, WeightKind::kBf16, k, rows);
  return serves ? static_cast<size_t>(rows) * k * sizeof(uint16_t) : 0;
}

// linear for up to kBoxRows rows by the bulk copy engine's boxes (cuda/linear_boxes.cu). rows: places of activation rows, 1, 4, 8 or 16. A
// cluster of cl blocks shares K; a warp multiplies mt tiles side by side and has a ring of `depth` slots of `boxes` boxes of each; registers leave room
// for `resident` blocks a multiprocessor, of which `spread` are of one launch. held: of a product with a norm, tasks a warp holds of `pieces` * 128
// elements (cuda/held_rows.cuh); 0: without one, then threads stage activations or the bulk copy engine does. It is for rows of up to `longest` values and
// up to `most` outputs.
struct LinearBoxes {
  int rows, mt, cl, warps, boxes, depth, resident, held, pieces, longest, spread = 1, most = 1 << 30;
  bool by_threads = false;
};
constexpr int kBoxRows = 16, kAnyK = 1 << 30;
constexpr int kBlock = 64, kBlockBytes = 128;  // elements of a block of activations, bytes of its row
constexpr size_t kLinearBoxStatic = 1 << 10;                       // static shared memory of the kernels, at most

// Where worker w's share begins: each has `each`, the first `rest` of them one more. That of the worker behind the last is the end.
KDTREE_BOTH constexpr int share_begin(int each, int rest, int w) { return each * w + (w < rest ? w : rest); }

// Whether a warp of its own asks for activations, beside those that multiply: in a cluster's block of bf16 weights that fills its multiprocessor, where
// the bulk copy engine brings them. (Of int4 ones it is no gain: docs/kernels_linear.md.)
KDTREE_BOTH constexpr bool asks_apart(WeightKind kind, int cl, int resident, int held, bool by_threads) {
  return kind == WeightKind::kBf16 && cl > 1 && resident == 1 && held == 0 && !by_threads;
}

// Up to four int4 rows stand at the even columns of a tile of eight, so that a lane has half as many sums to scale.
KDTREE_BOTH constexpr bool at_even_columns(WeightKind kind, int rows) { return kind == WeightKind::kInt4 && rows <= kColumns / 2; }
// Otherwise columns 2i and 2i + 1 of a tile are rows i and i + 4, and a set of sums is of two columns.
KDTREE_BOTH constexpr int row_of_column(int column) { return column / 2 + column % 2 * (kColumns / 2); }
KDTREE_BOTH constexpr int row_of_set(int set, int odd) { return set / 4 * kColumns + row_of_column(set % 4 * 2 + odd); }
// Sets that have a row.
KDTREE_BOTH constexpr int box_sets(bool even, int rows) {
  const int rest = rows % kColumns;
  return even ? rows : rows / kColumns * 4 + (rest < 4 ? rest : 4);
}
constexpr int box_tile_sets(const LinearBoxes& v, WeightKind kind, int rows) {
  return v.by_threads ? (rows + 1) / 2 : box_sets(at_even_columns(kind, v.rows), rows);
}
// Bytes of a tile's sums: eight segments of 16 weight rows by its columns.
constexpr int box_tile_sums(const LinearBoxes& v, WeightKind kind, int rows) {
  return kSegments * box_tile_sets(v, kind, rows) * (at_even_columns(kind, v.rows) ? 64 : 128);
}
// Bytes that a block keeps of the activations of a segment: the most blocks of them that one reaches into, which is an even number, so that all
// begin where the bulk copy engine can swizzle.
constexpr size_t box_area(const LinearBoxes& v, WeightKind kind, int k) {
  const int unit = unit_of(kind), units = (k + unit - 1) / unit;
  int most = 0;
  for (int s = 0; s < kSegments; ++s) {
    const int begin = segment_begin(s, units) * unit / kBlock, end = (segment_begin(s + 1, units) * unit + kBlock - 1) / kBlock;
    if (most < end - begin) most = end - begin;
  }
  const size_t even = static_cast<size_t>(v.rows == 1 ? (most + 7) / 8 * 8 : (most + 1) / 2 * 2);
  return even * v.rows * kBlockBytes;
}
// Whether threads stage int4 rows without a gap between them, of which every other one has its halves of 128 bytes exchanged, so
// that two rows lie in all banks: two tiles a warp leave no room for gaps.
KDTREE_BOTH constexpr bool flips_rows(WeightKind kind, int mt, bool by_threads) { return kind == WeightKind::kInt4 && by_threads && mt > 1; }
constexpr int box_stride(const LinearBoxes& v, WeightKind kind, int k) {
  const int length = staged_length(k, v.cl, unit_of(kind));
  return flips_rows(kind, v.mt, v.by_threads) ? length * 2 : staged_stride(length);
}
// Bytes that it keeps of activations: segments, or rows that threads stage, in 128s, to which the engine copies what follows.
constexpr size_t box_activations(const LinearBoxes& v, WeightKind kind, int k, int rows) {
  const size_t staged = (flips_rows(kind, v.mt, v.by_threads) ? 0 : kZeros) + static_cast<size_t>(v.rows <= kColumns ? rows : v.rows) * box_stride(v, kind, k);
  return v.by_threads ? (staged + 127) / 128 * 128 : kSegments / v.cl * box_area(v, kind, k);
}
constexpr size_t linear_box_shared(const LinearBoxes& v, WeightKind kind, int k, int rows, int batch, bool paired) {
  const size_t box = kBoxWeightBytes + (kind == WeightKind::kInt4 ? kBoxScaleBytes : 0);
  const size_t ring = static_cast<size_t>(v.warps) * v.depth * v.boxes * v.mt * box;
  const size_t sums = static_cast<size_t>((batch + v.cl - 1) / v.cl * (paired ? 2 : 1)) * box_tile_sums(v, kind, rows);
  return ring + box_activations(v, kind, k, rows) + sums;
}

// Clusters of cl blocks that fill a multiprocessor each of which run at a time: those of four and eight take places that belong together, of which
// an H200 leaves a dozen multiprocessors.
constexpr int clusters_at_once(const Device& device, int cl) {
  return cl <= 2 ? device.multiprocessors / cl : (device.multiprocessors / kSegments - 1) * kSegments / cl;
}

// Where linear_whole.cu's clusters find room at the same time.
constexpr bool serves_whole(const Device& device, WeightKind kind, int k, int tiles, bool paired) {
  return serves_boxed(device, kind, k, paired) && k <= kWholeK && tiles <= clusters_at_once(device, kWholeCluster) * kWholeCluster &&
         whole_shared() + kWideStatic + 1024 <= device.shared;
}

// What a launch is: a variant of the table (-1: none), clusters that share the outputs (tiles or pairs of tiles), of which each adds `batch` at a time.
struct BoxLaunch {
  int variant = -1, clusters = 0, batch = 0;
  size_t shared = 0;
};

// In the order in which they are preferred, the widest number of rows last but for one that fits small shared memories; measured in docs/kernels.md.
constexpr Variant kLinearInt4[] = {{2, 1, 1, 8, 3, 2, 1}, {1, 1, 1, 16, 4, 1, 1}, {1, 2, 1, 16, 4, 1, 2}, {1, 2, 2, 16, 4, 1, 2},
                                   {1, 2, 8, 8, 7, 2, 2}, {2, 4, 8, 8, 5, 1, 4},  {2, 8, 8, 8, 4, 1, 8},  {1, 1, 8, 4, 4, 2, 1}};
constexpr Variant kLinearBf16[] = {{1, 1, 1, 8, 8, 2, 1}, {1, 1, 8, 8, 8, 2, 1}, {1, 2, 1, 16, 4, 1, 2}, {2, 2, 8, 8, 6, 2, 2},
                                   {2, 4, 8, 8, 5, 1, 4}, {2, 8, 8, 8, 4, 1, 8}, {1, 1, 8, 4, 4, 2, 1}};
// In the order in which they are preferred; measured in docs/kernels.md.
constexpr int kMany = 1 << 30, kFew = 512;  // outputs; few: clusters of eight, of which an H200 holds 15, read so much as fast as others
constexpr LinearBoxes kBoxesInt4[] = {{4, 2, 2, 8, 1, 2, 2, 0, 0, 4096},
                                      {1, 1, 1, 16, 1, 2, 2, 0, 0, kAnyK},
                                      {4, 2, 2, 8, 1, 2, 2, 0, 0, kAnyK},
                                      {8, 2, 2, 8, 1, 2, 2, 0, 0, 4096},
                                      {8, 2, 2, 8, 1, 3, 1, 0, 0, kAnyK},
                                      {16, 2, 8, 8, 1, 2, 2, 0, 0, 2048, 1, kMany, true},
                                      {16, 1, 8, 8, 1, 3, 2, 0, 0, 4096, 1, kMany, true},
                                      {16, 2, 2, 8, 1, 2, 1, 0, 0, kAnyK}};
constexpr LinearBoxes kBoxesBf16[] = {{1, 1, 1, 8, 2, 3, 2, 0, 0, 4096, 2},
                                      {1, 1, 2, 16, 2, 2, 1, 0, 0, kAnyK},
                                      {4, 1, 2, 16, 2, 2, 1, 0, 0, kAnyK},
                                      {8, 1, 2, 16, 2, 2, 1, 0, 0, kAnyK},
                                      {16, 1, 2, 16, 1, 3, 1, 0, 0, 4096, 1, kMany, true},
                                      {16, 2, 2, 8, 1, 3, 1, 0, 0, 7168},
                                      {16, 1, 8, 18, 1, 3, 1, 0, 0, kAnyK, 1, kMany, true},
                                      {8, 1, 1, 16, 1, 2, 2, 2, 2, 2048, 2},
                                      {8, 1, 2, 16, 1, 2, 2, 2, 2, 2048, 2},
                                      {16, 1, 4, 16, 1, 2, 2, 2, 2, 2048, 2},
                                      {1, 1, 1, 8, 2, 4, 1, 1, 7, 7168},
                                      {8, 1, 8, 9, 2, 2, 2, 1, 7, 7168, 1, kFew},
                                      {8, 1, 2, 16, 2, 2, 1, 2, 7, 7168},
                                      {16, 1, 8, 9, 2, 3, 1, 2, 7, 7168}};
constexpr int kShort = 4096;  // int4 rows up to this are short enough for two blocks of eight warps; longer ones are one's with sixteen
constexpr int kOwnNorm = 2;   // more rows are normed by the blocks of a cluster together, not by every block for itself

// Whether rows of k values can be copied sixteen bytes at a time.
constexpr bool serves(const Device& device, int k) { return device.clusters && k > 0 && k % 8 == 0; }
constexpr bool serves_moe(const Device& device, int k, int shared_k, int top_k, int experts) {
  return serves(device, k) && shared_k % 8 == 0 && top_k <= kMostTopK && experts <= kMostExperts && kMoeShared + kMoeStatic <= device.shared;
}

// The router's product and choice in one launch (route_stream.cu), for rows up to kMostRouted long: blocks that choose a row's experts, and
// those of down that combine. They wait for the others of their launch, so they leave half of a device's places and more to these.
constexpr int kMostRouted = 8192;
KDTREE_BOTH constexpr int at_most_half(int wanted, int places) { return wanted * 2 <= places ? wanted : places > 1 ? places / 2 : 1; }
constexpr int choosing(const Device& device, int rows) { return at_most_half(rows < 64 ? rows : 64, device.multiprocessors); }
constexpr int combining(int rows) { return rows <= 2 ? 16 : rows <= 8 ? 32 : 128; }
constexpr bool leaves_normed(int rows) { return rows > kOwnNorm; }  // in scratch, for gate and up
// Times 16 experts that a block has. Blocks, with those that choose, are fewer than multiprocessors at K2.6's sizes, and leave room for gate and up's: up to
// 64 blocks choose for many rows.
constexpr int kFewRouted = 32;
constexpr int route_tiles(int rows) { return rows <= kFewRouted ? 2 : 3; }
// A block's segment of its experts' bf16 weight rows and of the rows it norms itself; the choice takes the same place.
constexpr size_t route_shared(int k, int rows, size_t choice) {
  const int own_rows = rows <= kOwnNorm ? rows : 0;
  const int units = (k + 31) / 32 / kSegments + 1;
  const size_t needed = static_cast<size_t>(route_tiles(rows) * units) * 1024 + static_cast<size_t>(own_rows) * staged_stride(units * 32);
  return needed > choice ? needed : choice;
}
constexpr bool serves_route(const Device& device, int k, int experts, int n_group, int top_k) {
  const size_t choice = 16 * static_cast<size_t>(experts) + 4 * static_cast<size_t>(experts / 32 + 2 + n_group + 2 * top_k);
  const size_t few = route_shared(k, kOwnNorm, choice), many = route_shared(k, kFewRouted + 1, choice);
  return serves(device, k) && k <= kMostRouted && experts > 1 && experts <= kMostExperts && (few > many ? few : many) + kStatic <= device.shared;
}

// Whether as many blocks as the registers leave room for find shared memory on a multiprocessor, which keeps 1 KB of each for itself;
// bytes and what little is static are in units of 128.
constexpr bool fits_resident(const Device& device, const Variant& v, size_t bytes) {
  return (bytes + 128 + 1024) * static_cast<size_t>(v.resident) <= device.shared + 1024;
}
// The first variant that takes all rows at once; if none fits the device, one for half as many, and so on; -1 if none does.
template <int COUNT, typename Bytes>
constexpr int choose(const Variant (&table)[COUNT], const Device& device, int rows, bool paired, const Bytes& bytes) {
  for (int columns = rows < 64 ? rows : 64; columns > 0; columns = columns > kColumns ? (columns + 1) / 2 : 0) {
    for (int i = 0; i < COUNT; ++i) {
      const Variant& v = table[i];
      if (v.held * kColumns < columns || (paired && rows_of(v) / kTileRows % 2 != 0)) continue;
      if (bytes(v) + kStatic <= device.shared) return i;
    }
  }
  return -1;
}
constexpr int choose_linear(const Device& device, WeightKind kind, int k, int rows, bool paired, bool normed) {
  const auto bytes = [=](const Variant& v) {
    const size_t needed = linear_shared(v, kind, k, rows);
    const bool crowded = v.cl == 1 && !fits_resident(device, v, needed), shared_norm = normed && rows > kOwnNorm && v.cl < kSegments;
    const bool too_long = kind == WeightKind::kInt4 && v.cl == 1 && v.resident > 1 && k > kShort;
    return crowded || shared_norm || too_long ? SIZE_MAX / 2 : needed;
  };
  return kind == WeightKind::kInt4 ? choose(kLinearInt4, device, rows, paired, bytes) : choose(kLinearBf16, device, rows, paired, bytes);
}
// Outputs to add at a time, fewer than `batch`: tiles that a warp multiplies side by side are added together.
constexpr int smaller_batch(int batch, int mt) {
  const int half = (batch + 2 * mt - 1) / (2 * mt) * mt;
  return half < batch ? half : 0;
}
// The first variant that takes all rows, and the norm if there is one, and of which as many blocks fit a multiprocessor as registers leave room
// for; each cluster has the same number of outputs or one less.
constexpr bool fits_linear_boxes(const LinearBoxes& v, WeightKind kind, int k, int rows, int outputs, bool normed) {
  if (rows > v.rows || k > v.longest || outputs > v.most || normed != (v.held > 0)) return false;
  return !normed || (rows * (kSegments / v.cl) <= v.warps * v.held && staged_length(k, kSegments, unit_of(kind)) <= v.pieces * 128);
}
template <int COUNT>
constexpr BoxLaunch plan_linear_boxes(const LinearBoxes (&table)[COUNT], const Device& device, WeightKind kind, int k, int rows, int outputs, bool paired, bool normed) {
  for (int i = 0; i < COUNT; ++i) {
    const LinearBoxes& v = table[i];
    const int most = clusters_at_once(device, v.cl) * v.spread;
    if (most <= 0 || !fits_linear_boxes(v, kind, k, rows, outputs, normed)) continue;
    const int each = (outputs + most - 1) / most;
    for (int batch = each; batch > 0; batch = smaller_batch(batch, v.mt)) {
      const size_t bytes = linear_box_shared(v, kind, k, rows, batch, paired);
      if ((bytes + kLinearBoxStatic + 1024) * static_cast<size_t>(v.resident) <= device.shared + 1024) return {i, (outputs + each - 1) / each, batch, bytes};
    }
  }
  return {};
}
// int4: scales are copied sixteen bytes at a time, eight groups of a row.
constexpr BoxLaunch plan_linear_boxes(const Device& device, WeightKind kind, int k, int rows, int outputs, bool paired, bool normed) {
  const bool int4 = kind == WeightKind::kInt4;
  if (!device.wgmma || rows > kBoxRows || outputs <= 0 || k <= 0 || k % (int4 ? 256 : normed ? 8 : kBlock) != 0) return {};
  return int4 ? plan_linear_boxes(kBoxesInt4, device, kind, k, rows, outputs, paired, normed)
              : plan_linear_boxes(kBoxesBf16, device, kind, k, rows, outputs, paired, normed);
}

}  // namespace stream
}  // namespace kdtree
