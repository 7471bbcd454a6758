// The copying warpgroup of Hopper's MLA attention: queries, keys that every row has in common, and the ends of rows.
// mla_hopper.cuh says how the whole works.
#pragma once
#include "mla_hopper_block.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// By one thread of a block, while the kernel ahead still runs: the keys of the block's first unit, to L2. Nothing is read but where they
// are; where the state is not this step's yet, other keys come, and no harm.
__device__ __forceinline__ void fetch_ahead(const HopperParams& p) {
  const int kv_len = min(max(__ldcg(&p.parts.state->kv_len), 0), p.slots), n_rows = max(1, __ldcg(&p.parts.state->n_rows));
  const int row_blocks = p.parts.rows * p.parts.head_blocks, length = split_chunks(kv_len + 1), parts = parts_of(p, n_rows, kv_len);
  const int unit = blockIdx.x / parts;
  if (blockIdx.x % parts > 0) return;
  // The rows of a split share its first two chunks.
  for (int i = unit % row_blocks; i < min(length, 2); i += n_rows) {
    const int slot = (unit / row_blocks * length + i) * kKeyChunk, keys = min(kKeyChunk, p.slots - slot);
    if (slot > kv_len || keys <= 0) return;
    fetch_to_l2(p.latent + static_cast<size_t>(slot) * kHopperRank, keys * kHopperRank * 2);
    fetch_to_l2(p.k_rope + static_cast<size_t>(slot) * kHopperRope, keys * kHopperRope * 2);
  }
}

// By one thread: queries, panel after panel, as the keys come at the same time.
__device__ __forceinline__ void copy_queries(const HopperParams& p, HopperShared& s, int n_rows, int kv_len, int parts) {
  int uses = 0;
  HopperUnit u;
  const uint32_t to = shared_address(s.q);
  for (int index = blockIdx.x; index < units_of(p) * parts; index += gridDim.x) {
    if (!take_unit(p, s, index / parts, n_rows, kv_len, u)) continue;
    barrier_wait(&s.q_empty, (uses++ & 1) ^ 1);
    for (int panel = 0; panel < kPanels; ++panel) {
      barrier_expect(&s.q_full[panel], kPanelBytes);
      if (panel < kRopePanel) {
        copy_box(p.q_lat, to + panel * kPanelBytes, &s.q_full[panel], panel * 64, u.first_head, u.row);
      } else {
        copy_box(p.q_rope, to + panel * kPanelBytes, &s.q_full[panel], 0, u.first_head, u.row);
      }
    }
  }
}

// By one thread: the chunks that every row has in common, by the bulk copy engine, panel after panel. It waits for every buffer to become
// free, and says so to the gatherers where a chunk is theirs: a barrier tells one phase from the next but not from the one after, so
// only whoever takes part in every use of a buffer may wait for it.
__device__ __forceinline__ void copy_keys(const HopperParams& p, HopperShared& s, int n_rows, int kv_len, int parts) {
  int uses = 0;  // bit b: how often buffer b was filled, modulo 2
  HopperUnit u;
  for (int index = blockIdx.x; index < units_of(p) * parts; index += gridDim.x) {
    if (!take_unit(p, s, index / parts, n_rows, kv_len, u)) continue;
    for (int step = 0; step < u.steps; ++step) {
      const int b = step & 1, parity = (uses >> b & 1) ^ 1, chunk = u.first + step;
      uses ^= 1 << b;
      const bool committed = chunk < kv_len / kKeyChunk;
      const uint32_t to = shared_address(s.keys[b]);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&s.empty[b][half], parity);
        // A half of the latent columns is a warpgroup's own, unless the block has one of the halves alone.
        if (parts > 1) barrier_wait(&s.empty[b][1 - half], parity);
        if (!committed) {
          barrier_arrive(&s.gather[b][half]);
          continue;
        }
#pragma unroll 1
        for (int panel = half * kHalfPanels; panel < (half + 1) * kHalfPanels; ++panel) {
          barrier_expect(&s.full[b][panel], kPanelBytes);
          copy_box(p.latents, to + panel * kPanelBytes, &s.full[b][panel], panel * 64, chunk * kKeyChunk);
        }
      }
      if (!committed) continue;
      // As weights, the rope panel was read by one warpgroup, as keys by the other.
      barrier_expect(&s.full[b][kRopePanel], kPanelBytes);
      copy_box(p.k_ropes, to + kRopePanel * kPanelBytes, &s.full[b][kRopePanel], 0, chunk * kKeyChunk);
    }
  }
}

// What this thread has copied into panels first .. last - 1 has landed; once that is true of all gatherers, the panels are full.
__device__ __forceinline__ void say_gathered(HopperShared& s, int buffer, int first, int last) {
  fence_tensor_cores();
  meet<kGathered, kGatherers>();
  if (threadIdx.x % kGatherers == 0) {
    for (int panel = first; panel < last; ++panel) barrier_arrive(&s.full[buffer][panel]);
  }
  __syncwarp();
}

// Half the latent columns of a chunk at a row's end, and with the second half its rope: key by key, each at the place of its position,
// zeros after the last.
__device__ __forceinline__ void gather_half(const HopperParams& p, HopperShared& s, const HopperUnit& u, int step, int half, int kv_len) {
  const int t = threadIdx.x % kGatherers, piece = t % 8, line = t / 8;  // 16-byte piece of a panel row; one of 8 rows
  // Rows line, line + 8, .. all have the same place in the swizzle.
  const uint32_t to = shared_address(s.keys[step & 1]) + line * 128 + (piece ^ line) * 16;
  const int32_t* path = p.path + static_cast<size_t>(u.row) * p.path_stride;
  constexpr int kLines = 4;  // at a time: as many as the registers hold
#pragma unroll 1
  for (int line_0 = 0; line_0 < kKeyChunk; line_0 += 8 * kLines) {
    const int first = (u.first + step) * kKeyChunk + line_0 + line;
    int slot[kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int position = first + 8 * i;
      slot[i] = position >= u.keys ? 0 : position < kv_len ? position : kv_len + path[position - kv_len];
    }
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const bool there = first + 8 * i < u.keys;
      const uint32_t row = to + (line_0 + 8 * i) * 128;
      const __nv_bfloat16* lat = p.latent + static_cast<size_t>(slot[i]) * kHopperRank + half * (kHopperRank / 2) + piece * 8;
#pragma unroll
      for (int panel = 0; panel < kHalfPanels; ++panel) copy16(row + (half * kHalfPanels + panel) * kPanelBytes, lat + panel * 64, there);
      if (half == 1) {
        copy16(row + kRopePanel * kPanelBytes, p.k_rope + static_cast<size_t>(slot[i]) * kHopperRope + piece * 8, there);
      }
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// The chunks at the rows' ends.
__device__ __forceinline__ void gather_keys(const HopperParams& p, HopperShared& s, int n_rows, int kv_len, int parts) {
  int uses = 0;  // bit b: how often buffer b was filled here, modulo 2
  HopperUnit u;
  for (int index = blockIdx.x; index < units_of(p) * parts; index += gridDim.x) {
    if (!take_unit(p, s, index / parts, n_rows, kv_len, u)) continue;
    for (int step = max(0, kv_len / kKeyChunk - u.first); step < u.steps; ++step) {
      const int b = step & 1, parity = uses >> b & 1;
      uses ^= 1 << b;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&s.gather[b][half], parity);
        gather_half(p, s, u, step, half, kv_len);
      }
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      say_gathered(s, b, 0, kHalfPanels);
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      say_gathered(s, b, kHalfPanels, kPanels);
    }
  }
}

// The copying warpgroup: a thread for the keys, one for the queries, two warps that gather.
__device__ __forceinline__ void copy_units(const HopperParams& p, HopperShared& s, int n_rows, int kv_len, int parts) {
  switch (threadIdx.x % kGroup) {
    case 0: copy_keys(p, s, n_rows, kv_len, parts); break;
    case kWarp: copy_queries(p, s, n_rows, kv_len, parts); break;
    default:
      if (threadIdx.x % kGroup >= kGroup - kGatherers) gather_keys(p, s, n_rows, kv_len, parts);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
