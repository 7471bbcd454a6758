// Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011) for host and device: integers alone, so the same
// words everywhere.
#pragma once
#include <cstdint>

#include "both.h"

namespace kdtree {

struct Words {
  uint32_t w[4];
};

// The four words of a counter under a key of two words.
KDTREE_BOTH Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace kdtree
