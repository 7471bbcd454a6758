// The term that one 32-bit word adds to a checksum: a bijection of (word + its place times an odd constant), so that neither a changed
// word nor two that changed places leave the sum as it was, but by a chance of 2^-64. The multiplier is that of the hash xmx.
#pragma once
#include <cstdint>

#include "both.h"

namespace kdtree {

KDTREE_BOTH uint64_t checksum_term(uint32_t word, uint64_t place) {
  uint64_t h = word + (place + 1) * 0x9e3779b97f4a7c15ULL;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ULL;
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ULL;
  return h ^ (h >> 32);
}

}  // namespace kdtree
