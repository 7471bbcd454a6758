// What the experts' kernels by boxes (moe_boxes.cuh, moe_row.cuh) are given.
#pragma once
#include <cuda.h>

#include "moe_items.cuh"

namespace kdtree {
namespace cuda {

struct BoxMoeParams {
  CUtensorMap weights, scales, shared;  // boxes of both tensors, of which the first is the one that lies lower in memory
  StreamMoeParams p;
  bool up_first, shared_up_first;
  bool scales_differ;  // the scales' tensors lie in the other order
  bool early;          // gate and up, staged: the launch before is the router, so that nothing older reads shared_act or writes x
  int columns;         // that a group's sums have room for
};

// p with the tensor maps of gate and up or of down, which are made when a launch is enqueued; `wide` boxes of scales at a time.
BoxMoeParams box_params(const MoeArgs& a, bool down, int wide, bool routed, const StreamMoeParams& p);

constexpr unsigned kPause = 40;  // nanoseconds between looks, where no slot is free
constexpr int kBoxItems = 8;  // places for a warp's items: those asked for, at least a slot each, the one at hand and the end

}  // namespace cuda
}  // namespace kdtree
