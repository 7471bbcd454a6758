// A unit of weights times 64 rows of activations by a warpgroup: the core of linear_wide.cu, sm_90a only.
//
// Four warps' tiles of 16 weight rows are the register operand of wgmma.m64n64k16; activations are read from shared memory, where they
// stand in the order of nibbles that stream.cuh's do. Reduction order and bits: stream.cuh's.
#pragma once
#include "stream.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace kdtree {
namespace cuda {

using stream::kWideTiles;

// Activations in shared memory: for each 32 of K, two steps of sixteen; a step has for each eight columns two 8 x 16-byte matrices.
constexpr int kGroupBytes = 4096, kStepBytes = 2048, kColumnsBytes = 256, kMatrixBytes = 128;

__device__ __forceinline__ uint64_t descriptor(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3ffff) >> 4) | static_cast<uint64_t>(kMatrixBytes >> 4) << 16 |
         static_cast<uint64_t>(kColumnsBytes >> 4) << 32;
}

// The products of one group of 32: two steps, started from zero or from d.
__device__ __forceinline__ void start_group(float (&d)[32], const uint32_t (&a)[8], uint32_t b, bool more) {
  const uint32_t first[4] = {a[0], a[1], a[2], a[3]}, second[4] = {a[4], a[5], a[6], a[7]};
  wgmma_fence();
  wgmma_columns(d, first, descriptor(b), more);
  wgmma_columns(d, second, descriptor(b + kStepBytes), true);
  wgmma_commit();
}

// A lane's words of two rows of a group as the register operands of its two steps.
__device__ __forceinline__ void nibble_fragments(uint32_t (&a)[8], uint32_t low, uint32_t high) {
#pragma unroll
  for (int e = 0; e < 4; ++e) a[2 * e] = nibble_pair(low >> (4 * e)), a[2 * e + 1] = nibble_pair(high >> (4 * e));
}

// A unit's two tiles; the next group's nibbles are turned and the last one's sums scaled while the tensor cores work.
__device__ __forceinline__ void multiply_int4(float (&acc)[kWideTiles][32], uint32_t slot, const LaneOffsets& at, uint32_t b) {
  uint2 scale[kWideTiles][2];
  uint32_t words[kWideTiles][2][4];
#pragma unroll
  for (int mt = 0; mt < kWideTiles; ++mt) {
    const uint32_t tile = slot + mt * kRingBytes;
    scale[mt][0] = load_shared8(tile + at.scale), scale[mt][1] = load_shared8(tile + at.scale + 64);
    load_matrices(words[mt][0], tile + at.matrix), load_matrices(words[mt][1], tile + (at.matrix ^ 32));
  }
  float sum[2][32];
  uint32_t a[2][8];
  const auto finish = [&](int i) {
    const int mt = i % kWideTiles, group = i / kWideTiles;
    float s[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t pair = group < 2 ? scale[mt][r].x : scale[mt][r].y;
      s[r] = __uint_as_float(group % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) acc[mt][e] = __fmaf_rn(sum[i % 2][e], s[e / 2 % 2], acc[mt][e]);
  };
  constexpr int JOBS = 4 * kWideTiles;
#pragma unroll
  for (int i = 0; i < JOBS; ++i) {
    const int mt = i % kWideTiles, group = i / kWideTiles;
    nibble_fragments(a[i % 2], words[mt][group / 2][2 * (group % 2)], words[mt][group / 2][2 * (group % 2) + 1]);
    start_group(sum[i % 2], a[i % 2], b + group * kGroupBytes, false);
    if (i > 0) wgmma_wait<1>(sum[(i - 1) % 2], a[(i - 1) % 2]), finish(i - 1);
  }
  wgmma_wait<0>(sum[(JOBS - 1) % 2], a[(JOBS - 1) % 2]), finish(JOBS - 1);
}

__device__ __forceinline__ void multiply_bf16(float (&acc)[kWideTiles][32], uint32_t (&a)[kWideTiles][8], uint32_t slot, const LaneOffsets& at,
                                              uint32_t b) {
#pragma unroll
  for (int mt = 0; mt < kWideTiles; ++mt) {
    wgmma_wait<kWideTiles - 1>(acc[mt], a[mt]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 w = in_order(load_shared16(slot + mt * kRingBytes + at.row + r * 512));
      a[mt][r] = w.x, a[mt][r + 2] = w.y, a[mt][r + 4] = w.z, a[mt][r + 6] = w.w;
    }
    start_group(acc[mt], a[mt], b, true);
  }
}

}  // namespace cuda
}  // namespace kdtree

#endif
