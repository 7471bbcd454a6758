// A unit's products from a box of weights (box_copy.cuh) as linear has them, and sums sent between the blocks of a cluster.
//
// A unit's products are multiply_unit's (stream.cuh) in every bit; a segment's sum is whole_sum's.
#pragma once
#include "box_copy.cuh"
#include "stream.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ void store_shared(uint32_t at, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t at, const float (&v)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
}
// The address that block `rank` of the cluster has for what stands at `at` in this block.
__device__ __forceinline__ uint32_t cluster_address(uint32_t at, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Writes to another block's shared memory; its barrier there counts the bytes as they come.
__device__ __forceinline__ void send(uint32_t to, const float (&v)[4], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, const float (&v)[2], uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(to), "f"(v[0]), "f"(v[1]), "r"(barrier)
               : "memory");
}

// The wait of a barrier of CL > 1 blocks; a block alone has nothing to wait for.
template <int CL>
__device__ __forceinline__ void cluster_wait_others() {
  if constexpr (CL > 1) cluster_wait<CL>();
}

// A segment's sum from what its units gave.
template <WeightKind KIND>
__device__ __forceinline__ float whole_sum(float v) {
  return KIND == WeightKind::kInt4 ? __fmul_rn(v, 4.f) : v;
}

// Where a lane's weights stand in a box of 128 bytes a row (unit 0; unit 1 is at ^ 64) and in one of 64.
struct BoxOffsets {
  uint32_t wide, narrow;
};
template <WeightKind KIND>
__device__ __forceinline__ BoxOffsets box_offsets(int lane) {
  // int4: its row address of ldmatrix, groups 0 and 1, ^ 32 for groups 2 and 3. bf16: piece lane%4 of row lane/4.
  const int row = KIND == WeightKind::kInt4 ? lane & 15 : lane >> 2, piece = KIND == WeightKind::kInt4 ? lane >> 4 : lane & 3;
  return {static_cast<uint32_t>(row * 128 + (piece ^ (row & 7)) * 16), static_cast<uint32_t>(row * 64 + (piece ^ (row >> 1 & 3)) * 16)};
}

// One unit of a tile: at the lane's place in the box, of bf16 also at the row eight below; int4: `scale`, two words of four groups' each, of
// row lane/4 and `below` of the one eight below. b(nt, part): sixteen bytes of activations of the unit's part-th 32 elements. acc: of VALUES 4 a
// fragment of each tile of eight columns, of 2 its even columns.
template <WeightKind KIND, int NT, int VALUES, typename Activations>
__device__ __forceinline__ void multiply_box_unit(float (&acc)[NT][VALUES], uint32_t at, const uint32_t (&scale)[2], const uint32_t (&below)[2],
                                                  uint32_t at_below, const Activations& b) {
  if constexpr (KIND == WeightKind::kInt4) {
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];  // rows 0-7 and 8-15 of one group, then of the next
      load_matrices(words, at ^ (half * 32));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t low = words[2 * j], high = words[2 * j + 1];
        const uint32_t first[4] = {low_pair(low), low_pair(high), high_pair(low), high_pair(high)};
        const uint32_t second[4] = {low_pair(low >> 8), low_pair(high >> 8), high_pair(low >> 8), high_pair(high >> 8)};
        const float s[2] = {__uint_as_float(j == 0 ? scale[half] << 16 : scale[half] & 0xffff0000u),
                            __uint_as_float(j == 0 ? below[half] << 16 : below[half] & 0xffff0000u)};
        float sum[NT][4];
        uint4 x[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          x[nt] = b(nt, 2 * half + j);
          multiply_add(sum[nt], first, x[nt].x, x[nt].y, zero);
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply_add(sum[nt], second, x[nt].z, x[nt].w, sum[nt]);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < VALUES; ++i) {
            const int from = VALUES == 2 ? 2 * i : i;
            acc[nt][i] = __fmaf_rn(sum[nt][from], s[from / 2], acc[nt][i]);
          }
      }
    }
  } else {
    uint32_t first[4], second[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 w = in_order(load_shared16(r == 0 ? at : at_below));
      first[r] = w.x, first[r + 2] = w.y, second[r] = w.z, second[r + 2] = w.w;
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint4 x = b(nt, 0);
      multiply_add(acc[nt], first, x.x, x.y, acc[nt]);
      multiply_add(acc[nt], second, x.z, x.w, acc[nt]);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
