// Stated experts (docs/model.md): INT4 weights that a file describes by a key and a few numbers, drawn group by group. The one
// place of the rule, for host and device.
#pragma once
#include "ops.h"
#include "philox.h"

namespace kdtree {

constexpr int kStatedQuad = 4;  // groups that share one counter's words for their scales

// The 32 nibbles of a group, 8 a word from the lowest on; `lot` and the scale come from the group's own word.
struct StatedGroup {
  uint32_t nibbles[4];
  uint16_t scale;
};

// Eight averages of nibbles, each rounded up.
KDTREE_BOTH uint32_t average_nibbles(uint32_t a, uint32_t b) { return (a | b) - (((a ^ b) >> 1) & 0x77777777u); }

// valid: elements of the group that lie within the row, the others are padding.
KDTREE_BOTH StatedGroup stated_group(const Stated& s, uint32_t word, uint32_t group, uint32_t row, uint32_t expert, int valid) {
  const Words a = philox(group, row, expert, 0, s.key0, s.key1);
  const Words b = philox(group, row, expert, 1, s.key0, s.key1);
  const int lot = static_cast<int>(word >> 7 & (kStatedLots - 1));
  const bool zero = lot < s.zero, extreme = !zero && lot < s.zero + s.extreme;
  const bool loud = !zero && !extreme && lot < s.zero + s.extreme + s.loud;
  StatedGroup out;
  for (int i = 0; i < 4; ++i) {
    uint32_t q = average_nibbles(a.w[i], b.w[i]);
    if (extreme) q = (a.w[i] & 0x11111111u) * 15u;
    const int here = valid - 8 * i;
    const uint32_t kept = zero || here <= 0 ? 0u : here >= 8 ? 0xFFFFFFFFu : (1u << (4 * here)) - 1u;
    out.nibbles[i] = (q & kept) | (0x88888888u & ~kept);
  }
  out.scale = zero ? uint16_t{0} : static_cast<uint16_t>((s.scale | (word & 127u)) + (loud ? 4u << 7 : 0u));
  return out;
}

}  // namespace kdtree
