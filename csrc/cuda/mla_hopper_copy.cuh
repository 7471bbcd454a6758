// What the blocks of Hopper's MLA attention have in common with their copying warpgroup: units of work, shared memory, barriers, copies.
// mla_hopper.cuh says how the whole works.
#pragma once
#include <cuda_bf16.h>

#include "mla_fold.cuh"
#include "wgmma.cuh"

namespace kdtree {
namespace cuda {

constexpr int kHopperRank = kPartRank, kHopperRope = 64, kHopperHeads = kPartHeads;
constexpr int kHopperThreads = 384;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kPanels = (kHopperRank + kHopperRope) / 64;
constexpr int kTileBytes = kPanels * 64 * 128;
constexpr int kRopePanel = kPanels - 1;

struct HopperParams {
  const __nv_bfloat16* q_lat;   // [M, heads, 512]
  const __nv_bfloat16* q_rope;  // [M, heads, 64]
  const __nv_bfloat16* latent;  // [slots, 512]
  const __nv_bfloat16* k_rope;  // [slots, 64]
  MlaParts parts;               // out
  const int32_t* path;
  int path_stride;
  float scale_log2;  // softmax scale * log2(e)
  int heads, splits;
};

struct HopperShared {
  unsigned char q[kTileBytes];
  unsigned char keys[2][kTileBytes];
  float top[2][kHopperHeads];  // running maximum after the last even and the last odd chunk
  unsigned long long q_full, q_empty;
  unsigned long long full[2][2], empty[2][2];  // [buffer][half of the latent columns]
};

// A unit: chunks first .. first + steps - 1 of a row, for 64 of its heads.
struct HopperUnit {
  int row, first_head, split, keys, first, steps;
};

// False where the row has no such split.
__device__ __forceinline__ bool take_unit(const HopperParams& p, int index, int n_rows, int kv_len, HopperUnit& u) {
  const int row_blocks = p.parts.rows * p.parts.head_blocks, row_block = index % row_blocks;
  u.split = index / row_blocks;
  u.row = p.parts.first_row + row_block / p.parts.head_blocks;
  u.first_head = row_block % p.parts.head_blocks * kHopperHeads;
  if (u.row >= n_rows) return false;
  u.keys = kv_len + p.parts.depths[u.row] + 1;
  const int chunks = (u.keys + kKeyChunk - 1) / kKeyChunk, length = split_chunks(u.keys);
  u.first = u.split * length;
  u.steps = min(length, chunks - u.first);
  return u.steps > 0;
}

__device__ __forceinline__ int units_of(const HopperParams& p) { return p.splits * p.parts.rows * p.parts.head_blocks; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(unsigned long long* b, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(unsigned long long* b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Arrives once this thread's copies so far have landed.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned long long* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned long long* b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra wait;\ndone:\n}\n" ::"r"(
          shared_address(b)),
      "r"(parity)
      : "memory");
}
template <int ID, int THREADS>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
template <int ID, int THREADS>
__device__ __forceinline__ void signal() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
// Orders ordinary shared-memory accesses and those of the tensor cores.
__device__ __forceinline__ void fence_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

constexpr int kMeetEven = 1, kMeetOdd = 2, kEvenReady = 3, kOddReady = 4;

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The copying warpgroup: queries, then chunks, half a chunk at a time, as buffers become free. Keys are gathered one by one, each at the
// place of its position, zeros after the last.
__device__ __forceinline__ void copy_units(const HopperParams& p, HopperShared& s, int n_rows, int kv_len) {
  const int t = threadIdx.x % kGroup, piece = t % 8, line = t / 8;  // 16-byte piece of a panel row; one of 16 rows
  // Rows line, line + 16, .. all have the same place in the swizzle.
  const uint32_t place = static_cast<uint32_t>(line * 128 + ((piece ^ (line % 8)) * 16));
  int q_uses = 0;
  int uses = 0;  // bit b: how often buffer b was filled, modulo 2
  HopperUnit u;
  for (int index = blockIdx.x; index < units_of(p); index += gridDim.x) {
    if (!take_unit(p, index, n_rows, kv_len, u)) continue;
    barrier_wait(&s.q_empty, (q_uses++ & 1) ^ 1);
    {
      const uint32_t to = shared_address(s.q) + place;
      const int first_head = u.first_head + line;
      const size_t row_head = static_cast<size_t>(u.row) * p.heads + first_head;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = first_head + 16 * i < p.heads;
        const size_t head = there ? row_head + 16 * i : 0;
        const __nv_bfloat16* lat = p.q_lat + head * kHopperRank + piece * 8;
#pragma unroll
        for (int panel = 0; panel < kRopePanel; ++panel) copy16(to + panel * kPanelBytes + i * 2048, lat + panel * 64, there);
        copy16(to + kRopePanel * kPanelBytes + i * 2048, p.q_rope + head * kHopperRope + piece * 8, there);
      }
      barrier_arrive_after_copies(&s.q_full);
    }
    const int32_t* path = p.path + static_cast<size_t>(u.row) * p.path_stride;
    for (int step = 0; step < u.steps; ++step) {
      const int b = step & 1, parity = (uses >> b & 1) ^ 1;
      uses ^= 1 << b;
      const uint32_t to = shared_address(s.keys[b]) + place;
      int slot[4];
      bool there[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = (u.first + step) * kKeyChunk + line + 16 * i;
        there[i] = position < u.keys;
        slot[i] = !there[i] ? 0 : position < kv_len ? position : kv_len + path[position - kv_len];
      }
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&s.empty[b][half], parity);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat16* lat = p.latent + static_cast<size_t>(slot[i]) * kHopperRank + half * 256 + piece * 8;
#pragma unroll
          for (int panel = 0; panel < 4; ++panel) {
            copy16(to + (4 * half + panel) * kPanelBytes + i * 2048, lat + panel * 64, there[i]);
          }
          // The rope panel comes with the half whose warpgroup is the last to read it: as weights, for the other's chunk.
          if (half != b) {
            copy16(to + kRopePanel * kPanelBytes + i * 2048, p.k_rope + static_cast<size_t>(slot[i]) * kHopperRope + piece * 8,
                   there[i]);
          }
        }
        barrier_arrive_after_copies(&s.full[b][half]);
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
