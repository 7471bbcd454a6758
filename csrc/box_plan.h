// Which shape the experts' kernels of Hopper have (cuda/moe_boxes.cuh): a pure function of sizes and device, no CUDA in it.
//
// Guarantees: a shape that is chosen fits the device and these sizes. No bit depends on the choice, nor on whether one is found: the
// kernels of moe_stream.cuh add in the same order.
#pragma once
#include "stream_plan.h"

namespace kdtree {
namespace stream {

// Weights come in boxes of 16 rows x 128 bytes: two units of K. staged: the step's rows stand in shared memory, which takes gate and up.
// split: warps that share a tile's K. A warp's ring has `depth` slots of `wide` boxes; `span` slots share a piece of scales, of which there
// are `depth` too. resident: blocks a multiprocessor, of which one may be the next launch's, already copying. rows: up to how many it is the choice. An expert's rows take turns of eight.
struct BoxVariant {
  bool staged;
  int split, warps, wide, depth, span, resident, rows;
};

constexpr int kBoxBytes = 2048, kBoxScales = 256;  // 16 rows x 128 bytes, and int4's scales of them
constexpr int kBoxK = 256;                         // elements of an int4 row's box; K is a multiple, whatever the kind
constexpr int kSharedTiles = 4;                    // tiles of activation rows that the shared expert's weights meet at a time, unless staged or split
constexpr int kSumSlots = 4;                       // tiles of a group of warps whose segments' sums meet at a time
constexpr size_t kBoxAlign = 1024;                 // swizzled boxes begin at multiples
KDTREE_BOTH constexpr size_t box_static(bool staged) { return (staged ? 7 : 20) << 10; }  // static shared memory of a kernel, at most

KDTREE_BOTH constexpr int box_most(bool staged, int split) { return staged || split > 1 ? 1 : kSharedTiles; }
constexpr int box_threads(int warps) { return (warps + 1) * 32; }  // one warp more copies
constexpr size_t box_ring(int warps, int wide, int depth, int span) {
  return static_cast<size_t>(warps) * depth * wide * (kBoxBytes + span * kBoxScales);
}
// Columns that a group's sums have room for: up to four take half a place each.
KDTREE_BOTH constexpr int sum_columns(int rows) { return rows <= kColumns / 2 ? rows : kColumns; }
KDTREE_BOTH constexpr int box_sum_bytes(int split, int most, int warps, int columns) {
  return split > 1 ? warps / split * kSumSlots * kSegments * columns * 64 : most > 1 ? warps * most * 512 : 0;
}
constexpr size_t box_shared(const BoxVariant& v, int k, int rows) {
  return kBoxAlign + box_ring(v.warps, v.wide, v.depth, v.span) +
         static_cast<size_t>(box_sum_bytes(v.split, box_most(v.staged, v.split), v.warps, sum_columns(rows))) +
         (v.staged ? static_cast<size_t>(rows) * staged_stride(k) : 0);
}

// Measured in docs/kernels.md; the last of each fits any Hopper and any rows.
constexpr BoxVariant kGateUpBoxes[] = {{true, 2, 6, 2, 3, 1, 2, 1}, {true, 2, 6, 2, 2, 1, 2, 2}, {false, 1, 7, 2, 2, 1, 2, 64}};
constexpr BoxVariant kDownBoxes[] = {{false, 1, 7, 2, 2, 1, 2, 64}};

// How a launch's workers share its items, as moe_items, in 32 bits: a worker's first of the others, of which the shared expert's items cost
// `weight` sixteenths each, all turns of their rows included. Items are fewer than 2^26. Beside int4 experts a tile of the shared one is 3.6
// times the bytes, but about 1.5 times a warp's time: by bytes, warps with such a tile had ended at half of a launch of one row.
KDTREE_BOTH constexpr int shared_weight(int shared_turns, int shared_k, int k, bool bf16) { return shared_turns * (shared_k / kBoxK) * (bf16 ? 16 : 25) / (k / kBoxK); }
KDTREE_BOTH constexpr int first_box_item(int count, int shared, int weight, int workers, int w) {
  const unsigned total = static_cast<unsigned>(count * 16 + shared * weight), all = static_cast<unsigned>(workers), before = static_cast<unsigned>(w);
  const unsigned share = total / all * before + total % all * before / all;
  const int rest = shared % workers, own = w * (shared / workers) + (w < rest ? w : rest);  // shared items of the workers below
  const int at = (static_cast<int>(share) - own * weight) / 16;
  return w >= workers ? count : at < 0 ? 0 : at > count ? count : at;
}

constexpr bool serves_boxes(const Device& device, int k, int shared_k) {
  return device.wgmma && k > 0 && k % kBoxK == 0 && shared_k > 0 && shared_k % kBoxK == 0;
}
// Whether the warps that share K begin at boxes, of rows of k values of either kind.
constexpr bool splits_at_boxes(int split, int k) {
  for (int part = 1; part < split; ++part) {
    for (const WeightKind kind : {WeightKind::kInt4, WeightKind::kBf16}) {
      if (segment_begin(part * kSegments / split, k / unit_of(kind)) % 2 != 0) return false;
    }
  }
  return true;
}
// The first that is for so many rows, fits and can share these K; -1 if none does.
template <int COUNT>
constexpr int choose_boxes(const BoxVariant (&table)[COUNT], const Device& device, int k, int shared_k, int rows) {
  if (!serves_boxes(device, k, shared_k)) return -1;
  for (int i = 0; i < COUNT; ++i) {
    const BoxVariant& v = table[i];
    if ((v.rows < rows && v.rows != moe_rows(false)) || !splits_at_boxes(v.split, k) || !splits_at_boxes(v.split, shared_k)) continue;
    // A multiprocessor keeps 1 KB of each block for itself.
    if ((box_shared(v, k, rows) + box_static(v.staged) + 1024) * v.resident <= device.shared + 1024) return i;
  }
  return -1;
}
constexpr int choose_gate_up_boxes(const Device& device, int k, int rows) { return choose_boxes(kGateUpBoxes, device, k, k, rows); }
constexpr int choose_down_boxes(const Device& device, int k, int shared_k, int rows) { return choose_boxes(kDownBoxes, device, k, shared_k, rows); }

}  // namespace stream
}  // namespace kdtree
