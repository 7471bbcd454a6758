// The copying warpgroup of Hopper's MLA attention: queries, keys that every row has in common, and the ends of rows.
// mla_hopper.cuh says how the whole works.
#pragma once
#include "mla_hopper_block.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// By one warp: this block's units, a lane a unit. All that needs no state is done while the kernel ahead still runs.
__device__ __forceinline__ void plan_units(const HopperParams& p, HopperShared& s) {
  const int lane = threadIdx.x % kWarp;
  const UnitPlace alone = place_of(p, lane, 1), shared = place_of(p, lane, 2);
  wait_for_previous();
  // Depths of both rows that it may be, so that they come together with the state.
  const int depth_alone = load_early(p.parts.depths + alone.row), depth_shared = load_early(p.parts.depths + shared.row);
  const int n_rows = load_early(&p.parts.state->n_rows), kv_len = load_early(&p.parts.state->kv_len);
  const int parts = parts_of(p, n_rows, kv_len), count = count_units(p, parts);
  if (lane == 0) s.parts = parts, s.kv_len = kv_len, s.count = count;
  s.units[lane] = unit_at(parts == 1 ? alone : shared, n_rows, kv_len, parts == 1 ? depth_alone : depth_shared);
  for (int t = lane + kWarp; t < count; t += kWarp) {
    const UnitPlace at = place_of(p, t, parts);
    s.units[t] = unit_at(at, n_rows, kv_len, p.parts.depths[at.row]);
  }
  __syncwarp();
}

// By one thread of a block, while the kernel ahead still runs: the keys of the block's first unit, to L2. Nothing is read but where they
// are; where the state is not this step's yet, other keys come, and no harm.
__device__ __forceinline__ void fetch_ahead(const HopperParams& p) {
  const int kv_len = min(max(__ldcg(&p.parts.state->kv_len), 0), p.slots), n_rows = max(1, __ldcg(&p.parts.state->n_rows));
  const HopperUnit u = unit_at(place_of(p, 0, parts_of(p, n_rows, kv_len)), n_rows, kv_len, 0);
  if (u.part > 0) return;
  // The rows of a split share its first two chunks.
  for (int i = u.row - p.parts.first_row; i < min(u.steps, 2); i += n_rows) {
    const int slot = (u.first + i) * kKeyChunk, keys = min(kKeyChunk, p.slots - slot);
    if (slot >= u.keys || keys <= 0) return;
    fetch_to_l2(p.latent + static_cast<size_t>(slot) * kHopperRank, keys * kHopperRank * 2);
    fetch_to_l2(p.k_rope + static_cast<size_t>(slot) * kHopperRope, keys * kHopperRope * 2);
  }
}

// By one thread: queries, panel after panel, as the keys come at the same time.
__device__ __forceinline__ void copy_queries(const HopperParams& p, HopperShared& s) {
  int uses = 0;
  const uint32_t to = shared_address(s.q);
  for (int i = 0; i < s.count; ++i) {
    const HopperUnit& u = s.units[i];
    if (u.steps == 0) continue;
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
__device__ __forceinline__ void copy_keys(const HopperParams& p, HopperShared& s) {
  int uses = 0;  // bit b: how often buffer b was filled, modulo 2
  for (int i = 0; i < s.count; ++i) {
    const HopperUnit& u = s.units[i];
    if (u.steps == 0) continue;
    for (int step = 0; step < u.steps; ++step) {
      const int b = step & 1, parity = (uses >> b & 1) ^ 1, chunk = u.first + step;
      uses ^= 1 << b;
      const bool committed = chunk < s.kv_len / kKeyChunk;
      const uint32_t to = shared_address(s.keys[b]);
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        // A half of the latent columns is a warpgroup's own, unless the block has one of the halves alone: the other one is free, and
        // filled first, as soon as the scores are there.
        const int half = s.parts > 1 && u.part == 0 ? 1 - i : i;
        if (s.parts == 1) {
          barrier_wait(&s.empty[b][half], parity);
        } else if (i == 0) {
          barrier_wait(&s.scored[b], parity);
        } else {
          barrier_wait(&s.empty[b][0], parity);
          barrier_wait(&s.empty[b][1], parity);
        }
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

constexpr int kLines = kKeyChunk / 8;  // keys of a chunk that a gatherer has a piece of: a panel's row takes eight of them

// Slots of this gatherer's keys of a chunk, -1 after the last.
__device__ __forceinline__ void find_slots(const HopperParams& p, const HopperShared& s, const HopperUnit& u, int step, int (&slot)[kLines]) {
  const int first = (u.first + step) * kKeyChunk + threadIdx.x % kGatherers / 8;
  const int32_t* path = p.path + static_cast<size_t>(u.row) * p.path_stride;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const int position = first + 8 * i;
    slot[i] = position >= u.keys ? -1 : position < s.kv_len ? position : s.kv_len + path[position - s.kv_len];
  }
}

// Half the latent columns of a chunk at a row's end, and with the second half its rope: key by key, each at the place of its position,
// zeros after the last.
template <int HALF>
__device__ __forceinline__ void gather_half(const HopperParams& p, HopperShared& s, int buffer, const int (&slot)[kLines], bool few) {
  const int t = threadIdx.x % kGatherers, piece = t % 8, line = t / 8;  // 16-byte piece of a panel row; one of 8 rows
  // Rows line, line + 8, .. all have the same place in the swizzle.
  const uint32_t to = shared_address(s.keys[buffer]) + line * 128 + (piece ^ line) * 16;
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    if (few && i >= kFewKeys / 8) break;
    const bool there = slot[i] >= 0;
    const int from = max(slot[i], 0);
    const uint32_t row = to + 8 * i * 128;
    const __nv_bfloat16* lat = p.latent + static_cast<size_t>(from) * kHopperRank + HALF * (kHopperRank / 2) + piece * 8;
#pragma unroll
    for (int panel = 0; panel < kHalfPanels; ++panel) copy16(row + (HALF * kHalfPanels + panel) * kPanelBytes, lat + panel * 64, there);
    if constexpr (HALF == 1) {
      copy16(row + kRopePanel * kPanelBytes, p.k_rope + static_cast<size_t>(from) * kHopperRope + piece * 8, there);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// The chunks at the rows' ends.
__device__ __forceinline__ void gather_keys(const HopperParams& p, HopperShared& s) {
  int uses = 0;  // bit b: how often buffer b was filled here, modulo 2
  for (int i = 0; i < s.count; ++i) {
    const HopperUnit& u = s.units[i];
    if (u.steps == 0) continue;
    for (int step = max(0, s.kv_len / kKeyChunk - u.first); step < u.steps; ++step) {
      const int b = step & 1, parity = uses >> b & 1;
      uses ^= 1 << b;
      int slot[kLines];
      find_slots(p, s, u, step, slot);
      const bool few = u.keys - (u.first + step) * kKeyChunk <= kFewKeys;
      barrier_wait(&s.gather[b][0], parity);
      gather_half<0>(p, s, b, slot, few);
      barrier_wait(&s.gather[b][1], parity);
      gather_half<1>(p, s, b, slot, few);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      say_gathered(s, b, 0, kHalfPanels);
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      say_gathered(s, b, kHalfPanels, kPanels);
    }
  }
}

// The copying warpgroup: a thread for the keys, in the warp that plans, one for the queries, two warps that gather.
__device__ __forceinline__ void copy_units(const HopperParams& p, HopperShared& s) {
  const int t = threadIdx.x % kGroup;
  if (t < kWarp) {
    plan_units(p, s);
    signal<kPlanned, kHopperThreads - kGatherers>();
    signal<kPlannedGather, kWarp + kGatherers>();
    if (t == 0) copy_keys(p, s);
  } else if (t < 2 * kWarp) {
    wait_for_previous();
    meet<kPlanned, kHopperThreads - kGatherers>();
    if (t == kWarp) copy_queries(p, s);
  } else {
    if (t == 2 * kWarp) fetch_ahead(p);
    __syncwarp();
    wait_for_previous();
    meet<kPlannedGather, kWarp + kGatherers>();
    gather_keys(p, s);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
