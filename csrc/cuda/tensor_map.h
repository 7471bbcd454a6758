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

}  // namespace cuda
}  // namespace kdtree
