// Descriptions of arrays for Hopper's bulk copy engine, made by the driver.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <vector>

namespace kdtree {
namespace cuda {

// Of a bf16 array, dense, dims innermost first (at most 5, the innermost a multiple of 8; `base` on 16 bytes): boxes of 64 x rows
// elements of the two innermost, their 128-byte rows swizzled as wgmma.cuh says. What lies outside the array reads as zeros.
// pitch: elements from a row to the next, a multiple of 8, where that is not dims[0].
CUtensorMap bf16_map(const void* base, const std::vector<uint64_t>& dims, int rows, uint64_t pitch = 0);

// Of `rows` rows of `pitch` bytes at a and, unless they are the same, as many at b (both and the pitch on 16 bytes): boxes of `wide` bytes x `high`
// rows of each of the two, of which the one that lies lower in memory comes first. Swizzled as above, then 128 bytes wide, or the
// same with half as many pieces, then 64 (piece c of row r at c ^ r/2 % 4), or not at all. What lies outside the rows reads as zeros.
// segments: of so many equal parts of a row (multiples of 16 bytes), a box has the same bytes of each, one part's rows after the other's.
// lines: L2 is to bring whole 128 bytes. taken: of so many neighbouring parts alone, where that is not 0.
CUtensorMap row_map(const void* a, const void* b, uint64_t pitch, uint64_t rows, int wide, int high, bool swizzled, int segments = 1, bool lines = false, int taken = 0);

// Of `rows` rows of `blocks` blocks of 64 bf16 numbers (`base` and `pitch`, the bytes from a row to the next, on 16 bytes): boxes of `wide` blocks of
// `high` rows each, block after block, whose 128-byte rows are swizzled as above or not. What lies outside reads as zeros.
CUtensorMap block_map(const void* base, uint64_t blocks, uint64_t pitch, uint64_t rows, int high, int wide, bool swizzled);

}  // namespace cuda
}  // namespace kdtree
