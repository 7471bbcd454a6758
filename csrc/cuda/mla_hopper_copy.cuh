// What the blocks of Hopper's MLA attention have in common with their copying warpgroup: units of work, shared memory, barriers, copies.
// mla_hopper.cuh says how the whole works.
#pragma once
#include <cuda.h>
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
  CUtensorMap latent_map;       // of the cache's latent [slots, 512], boxes of 64 columns and 64 / CLUSTER slots
  CUtensorMap k_rope_map;       // of [slots, 64], the same
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

// What a block does of a unit: chunks first .. first + steps - 1 of the row it stands for; 0 steps if there is nothing of it.
struct HopperUnit {
  int row, first_head, keys, first, steps;
  int all_steps;     // of the cluster's block with the most, which all of them keep up with
  int shared_first;  // chunk at which the steps copied together begin
  int shared_steps;  // so many steps from the first on are copied by the cluster's blocks together
};

__device__ __forceinline__ void own_part(const HopperParams& p, int row_block, int split, int n_rows, int kv_len, HopperUnit& u) {
  u.row = p.parts.first_row + row_block / p.parts.head_blocks;
  u.first_head = row_block % p.parts.head_blocks * kHopperHeads;
  u.first = u.steps = u.keys = 0;
  if (row_block >= p.parts.rows * p.parts.head_blocks || u.row >= n_rows) return;
  u.keys = kv_len + p.parts.depths[u.row] + 1;
  const int chunks = (u.keys + kKeyChunk - 1) / kKeyChunk, length = split_chunks(u.keys);
  u.first = split * length;
  u.steps = max(0, min(length, chunks - u.first));
}

// Blocks of a cluster take neighbouring (row, 64 heads) of one split.
template <int CLUSTER>
__device__ __forceinline__ int groups_of(const HopperParams& p) {
  return (p.parts.rows * p.parts.head_blocks + CLUSTER - 1) / CLUSTER;
}

template <int CLUSTER>
__device__ __forceinline__ HopperUnit take_unit(const HopperParams& p, int index, int rank, int n_rows, int kv_len) {
  const int groups = groups_of<CLUSTER>(p), split = index / groups;
  const int row_block = index % groups * CLUSTER;
  HopperUnit u;
  own_part(p, row_block + rank, split, n_rows, kv_len, u);
  const int committed = kv_len / kKeyChunk;  // whole chunks that every row has in common
  u.all_steps = u.steps, u.shared_first = u.first, u.shared_steps = max(0, min(u.steps, committed - u.first));
  if constexpr (CLUSTER == 2) {
    HopperUnit other;
    own_part(p, row_block + 1 - rank, split, n_rows, kv_len, other);
    u.all_steps = max(u.steps, other.steps);
    if (u.steps == 0) {  // nothing of its own: helps to copy
      u.shared_first = other.first, u.shared_steps = max(0, min(other.steps, committed - other.first));
    } else if (other.steps > 0) {
      u.shared_steps = u.first == other.first ? min(u.shared_steps, other.steps) : 0;
    }
  }
  return u;
}

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
__device__ __forceinline__ void barrier_arrive_expecting(unsigned long long* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// Arrives at the same barrier of a block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(unsigned long long* b, int block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(b)),
      "r"(block)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(unsigned long long* b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra wait;\ndone:\n}\n" ::"r"(
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

constexpr int kMeetEven = 1, kMeetOdd = 2, kEvenReady = 3, kOddReady = 4, kEvenScored = 5;

__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// A box of a tensor map into shared memory, of this block or, by the same offset, of both blocks of the cluster.
template <int CLUSTER>
__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, unsigned long long* full, int column, int slot) {
  if constexpr (CLUSTER == 1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(shared_address(full)), "r"(column), "r"(slot)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], "
        "[%2], %5;" ::"r"(to),
        "l"(&map), "r"(shared_address(full)), "r"(column), "r"(slot), "h"(static_cast<uint16_t>((1 << CLUSTER) - 1))
        : "memory");
  }
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
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

// The copying warpgroup: queries, then chunks, half a chunk at a time, as buffers become free. Chunks that every row has in common
// are copied by the bulk copy engine, each block of the cluster its share of the keys into both; those of the row's own end are
// gathered key by key, each at the place of its position, zeros after the last.
template <int CLUSTER>
__device__ __forceinline__ void copy_units(const HopperParams& p, HopperShared& s, int rank, int n_rows, int kv_len) {
  const int t = threadIdx.x % kGroup, piece = t % 8, line = t / 8;  // 16-byte piece of a panel row; one of 16 rows
  const int units = p.splits * groups_of<CLUSTER>(p);
  // Rows line, line + 16, .. all have the same place in the swizzle.
  const uint32_t place = static_cast<uint32_t>(line * 128 + ((piece ^ (line % 8)) * 16));
  int q_uses = 0;
  int uses = 0;  // bit b: how often buffer b was filled, modulo 2
  for (int index = blockIdx.x / CLUSTER; index < units; index += gridDim.x / CLUSTER) {
    const HopperUnit u = take_unit<CLUSTER>(p, index, rank, n_rows, kv_len);
    if (u.steps > 0) {
      barrier_wait(&s.q_empty, (q_uses++ & 1) ^ 1);
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
    for (int step = 0; step < u.all_steps; ++step) {
      const int b = step & 1, parity = (uses >> b & 1) ^ 1;
      uses ^= 1 << b;
      if (step < u.shared_steps) {
        const int keys = kKeyChunk / CLUSTER, slot = (u.shared_first + step) * kKeyChunk + rank * keys;
        const uint32_t to = shared_address(s.keys[b]) + rank * keys * 128;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          barrier_wait(&s.empty[b][half], parity);
          unsigned long long* full = &s.full[b][half];
          // The rope panel comes with the half whose warpgroup is the last to read it: as weights, for the other's chunk.
          const bool rope = half != b;
          if (t > 0) {
            barrier_arrive(full);
          } else {
            barrier_arrive_expecting(full, (rope ? 5 : 4) * kPanelBytes);
#pragma unroll 1
            for (int panel = 4 * half; panel < 4 * half + 4; ++panel) {
              copy_box<CLUSTER>(p.latent_map, to + panel * kPanelBytes, full, panel * 64, slot);
            }
            if (rope) copy_box<CLUSTER>(p.k_rope_map, to + kRopePanel * kPanelBytes, full, 0, slot);
          }
        }
        continue;
      }
      const bool own = step < u.steps;
      const uint32_t to = shared_address(s.keys[b]) + place;
      int slot[4];
      bool there[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = (u.first + step) * kKeyChunk + line + 16 * i;
        there[i] = position < u.keys;
        slot[i] = !own || !there[i] ? 0 : position < kv_len ? position : kv_len + path[position - kv_len];
      }
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&s.empty[b][half], parity);
        if (!own) {
          barrier_arrive(&s.full[b][half]);
          continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __nv_bfloat16* lat = p.latent + static_cast<size_t>(slot[i]) * kHopperRank + half * 256 + piece * 8;
#pragma unroll
          for (int panel = 0; panel < 4; ++panel) {
            copy16(to + (4 * half + panel) * kPanelBytes + i * 2048, lat + panel * 64, there[i]);
          }
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
