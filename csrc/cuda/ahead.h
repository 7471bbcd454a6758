// What the operations behind an exchange will read, for a kernel that asks L2 to have it by then (ahead.cu).
#pragma once
#include <cstddef>
#include <cstdint>

namespace kdtree {
namespace cuda {

// Tiles of 16 rows of a matrix, or of those of several matrices that ids names.
struct ExpectedPart {
  const char* data;
  size_t tile_bytes, matrix_bytes;  // matrix_bytes: from one matrix to the next
  int tiles;                        // of a matrix
  const int32_t* ids;               // null: the one matrix there is
  int matrices;                     // as many of ids, else 1
};

constexpr int kExpectedParts = 6;
struct Expected {
  ExpectedPart part[kExpectedParts];
  int parts;
};

}  // namespace cuda
}  // namespace kdtree
