// Which kernels serve MLA in bf16, and how attention cuts a row's keys: pure functions of sizes, the device and the row's own length, for
// the host and for kernels. Which one serves depends on nothing that differs between steps, because sums have another order elsewhere.
//
// Keys stand at their logical positions 0 .. keys-1, in chunks of 64, the last one of up to 72. A split is a run of chunks that one block adds up in order;
// where splits begin depends on the row's keys alone, so the same row is cut the same way in every step, alone or in any tree.
// More splits are more blocks for few rows and more sums to write and fold for many.
#pragma once
#include "../both.h"
#include "../ops.h"

namespace kdtree {

constexpr int kKeyChunk = 64;

constexpr int kMaxSplits = 33;

// Keys that a row's last chunk may have beyond the others': a few keys more than whole chunks, as a step of a tree behind so many has them,
// would otherwise take as long as a chunk.
constexpr int kMoreKeys = 8;

KDTREE_BOTH constexpr int chunks_of(int keys) { return keys <= kKeyChunk ? 1 : (keys - kMoreKeys + kKeyChunk - 1) / kKeyChunk; }

// Two chunks a split until there are 16 of them, which for 8 rows are a round of an H200's 132 multiprocessors and for 16 rows two; with 33
// any multiple of four rows is whole rounds. It does not fall with the keys.
KDTREE_BOTH constexpr int splits_of(int keys) {
  const int chunks = chunks_of(keys);
  return chunks <= 32 ? (chunks + 1) / 2 : chunks <= 640 ? 16 : kMaxSplits;
}

// First chunk of a split: all have as many chunks, or one more. Split splits_of(keys) begins at the end.
KDTREE_BOTH constexpr int split_begin(int split, int splits, int chunks) { return split * chunks / splits; }

// No row of up to max_keys keys has more splits than this.
constexpr int splits_bound(int max_keys) { return splits_of(max_keys); }

// Blocks that share a unit of attention (row, 64 heads, split), each for as many of the 512 columns: two where that leaves a third of the
// multiprocessors free, because each reads all of the unit's keys, and L2 gives no more; of units of kLongUnit chunks and more, whose
// products outlast that, wherever there are blocks for all. A column's sums take nothing from another's, so no bit depends on it and the
// number of rows may decide.
constexpr int kLongUnit = 16;
KDTREE_BOTH constexpr int column_parts(int units, int keys, int multiprocessors) {
  const bool lengthy = chunks_of(keys) >= kLongUnit * splits_of(keys);
  return (lengthy ? 2 : 3) * units <= multiprocessors ? 2 : 1;
}

constexpr int kPartHeads = 64;  // heads of a unit of attention
constexpr int kPartRank = 512;
constexpr size_t kMostParts = 256u << 20;  // bytes of splits that a launch may leave; a step of more rows is taken a part at a time

constexpr int head_blocks_of(int heads) { return (heads + kPartHeads - 1) / kPartHeads; }
constexpr int kPartScales = kPartRank / 128;  // of a head's sums
// Bytes that a row's splits take: sums of 16 bits, and in f32 for even and odd chunks the greatest score and the sum of weights, and scales.
constexpr size_t part_bytes(int heads, int splits) {
  return static_cast<size_t>(splits) * static_cast<size_t>(head_blocks_of(heads)) * kPartHeads *
         (kPartRank * sizeof(uint16_t) + (2 * 2 + kPartScales) * sizeof(float));
}
constexpr int kMostUnits = 64;  // of a block, parts of shared ones counted each
constexpr int rows_a_launch(int heads, int rows, int splits, int multiprocessors) {
  const size_t by_bytes = kMostParts / part_bytes(heads, splits);
  const auto by_units = static_cast<size_t>(kMostUnits / 2 * multiprocessors / (splits * head_blocks_of(heads)));
  const size_t most = by_bytes < by_units ? by_bytes : by_units;
  return most < 1 ? 1 : most < static_cast<size_t>(rows) ? static_cast<int>(most) : rows;
}
// Enough for every launch of up to so many rows that see up to so many keys. One of fewer splits may have more rows and come nearer to
// kMostParts than the one of all.
constexpr size_t parts_scratch(int heads, int max_rows, int max_keys) {
  const size_t row = part_bytes(heads, splits_bound(max_keys)), all = row * static_cast<size_t>(max_rows);
  return all <= kMostParts ? all : row < kMostParts ? kMostParts : row;
}

// Attention: 64 heads are the rows of Hopper's matrix instruction, rank and rope fill its shared memory.
constexpr bool attends_on_hopper(const MlaDims& d, bool wgmma) {
  return wgmma && d.numerics == Numerics::kBf16 && d.rank == 512 && d.rope == 64;
}
// Projections on tensor cores: whole heads and whole column blocks.
constexpr bool prepares_on_tensor_cores(const MlaDims& d) {
  return d.numerics == Numerics::kBf16 && d.nope == 128 && d.rank % 128 == 0 && d.rope % 2 == 0;
}
constexpr bool values_on_tensor_cores(const MlaDims& d, bool clusters) {
  return clusters && d.numerics == Numerics::kBf16 && d.rank == 512 && d.v == 128;
}

// The values fold attention's splits themselves, which spares a launch, while their rows fit one tile; beyond, a kernel that does nothing
// else folds faster. The bits are the same.
constexpr bool values_fold(int rows) { return rows <= 16; }

}  // namespace kdtree
