// The copying warpgroup of Hopper's MLA attention: queries, keys that every row has in common, and the ends of rows.
// mla_hopper.cuh says how the whole works.
#pragma once
#include "mla_hopper_block.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Of a unit: chunks that hold keys of this step's rows, or end between committed ones, or have more than 64 keys, are the gatherers' from
// the first of these on. The bulk copy engine brings the first 64 keys where all are committed, and whole eights of committed ones else.
__device__ __forceinline__ bool committed(const HopperShared& s, int chunk) { return chunk < s.kv_len / kKeyChunk; }
__device__ __forceinline__ bool has_more(const HopperUnit& u, int step) { return holds_more(u.keys - (u.first + step) * kKeyChunk); }

// Keys of a chunk that is not all committed, which the bulk copy engine brings.
__device__ __forceinline__ int whole_eights(const HopperShared& s, int chunk) {
  return max(0, s.kv_len - chunk * kKeyChunk) / kFewSlots * kFewSlots;
}

// Starts a load of what is older than the kernel ahead, past the first cache, which may hold what was there before.
__device__ __forceinline__ int load_settled(const int32_t* p) {
  int v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// By one thread, while another warp fetches the state. They take uniform registers, so that a warp's lanes would go one after the other.
__device__ __forceinline__ void init_barriers(HopperShared& s) {
  barrier_init(&s.q_empty, 2 * kGroup / kWarp);
  for (int panel = 0; panel < kPanels; ++panel) barrier_init(&s.q_full[panel], 1);
  for (int b = 0; b < 2; ++b) {
    for (int group = 0; group < 2; ++group) barrier_init(&s.empty[b][group], kGroup / kWarp);
    for (int half = 0; half < 2; ++half) barrier_init(&s.full[b][half], 1), barrier_init(&s.gather[b][half], 1);
    barrier_init(&s.scored[b], kGroup / kWarp);
  }
  barrier_init(&s.more, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one warp: this block's units, a lane a unit. What the kernel ahead does not write may be read while it runs, because what came before
// it has ended (device.cuh).
__device__ __forceinline__ void plan_units(const HopperParams& p, HopperShared& s) {
  const int lane = threadIdx.x % kWarp;
  if (!p.early) wait_for_previous();
  // All that has to be fetched is asked for at once: the depths of the first 32 rows, a lane a row.
  const int n_rows = load_settled(&p.parts.state->n_rows), kv_len = load_settled(&p.parts.state->kv_len);
  const int near = load_settled(p.parts.depths + p.parts.first_row + min(lane, p.parts.rows - 1));
  const UnitPlace alone = place_of(p, lane, 1), shared = place_of(p, lane, 2);
  const int parts = parts_of(p, n_rows, kv_len), count = count_units(p, parts);
  if (lane == 0) s.parts = parts, s.kv_len = kv_len, s.count = count;
  const UnitPlace place{parts == 1 ? alone.part : shared.part, parts == 1 ? alone.split : shared.split, parts == 1 ? alone.row : shared.row,
                        parts == 1 ? alone.first_head : shared.first_head};
  const int row = place.row - p.parts.first_row, depth_near = __shfl_sync(kAll, near, row % kWarp);
  if (lane < count) s.units[lane] = unit_at(place, n_rows, kv_len, row < kWarp ? depth_near : load_settled(p.parts.depths + place.row));
  for (int t = lane + kWarp; t < count; t += kWarp) {
    const UnitPlace at = place_of(p, t, parts);
    s.units[t] = unit_at(at, n_rows, kv_len, load_settled(p.parts.depths + at.row));
  }
  __syncwarp();
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

// By one thread: the chunks that every row has in common, by the bulk copy engine, half of the columns after half, with a barrier each: the fewer
// instructions stand between a half's release and its copies, the sooner these come. It waits for every buffer to become
// free, and says so to the gatherers where a chunk is theirs: a barrier tells one phase from the next but not from the one after, so
// only whoever takes part in every use of a buffer may wait for it.
__device__ __forceinline__ void copy_keys(const HopperParams& p, HopperShared& s) {
  int uses = 0;  // bit b: how often buffer b was filled, modulo 2
  const int count = s.count, parts = s.parts, whole_chunks = s.kv_len / kKeyChunk;
  for (int i = 0; i < count; ++i) {
    const HopperUnit u = s.units[i];
    if (u.steps == 0) continue;
    for (int step = 0; step < u.steps; ++step) {
      const int b = buffer_of(step, u.steps), parity = (uses >> b & 1) ^ 1, chunk = u.first + step;
      uses ^= 1 << b;
      const bool mine = chunk < whole_chunks, theirs = !mine || has_more(u, step);
      const uint32_t to = tile_of(s, b);
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        // A half of the latent columns is a warpgroup's own, unless the block has one of the halves alone: the other one is free, and
        // filled first, as soon as the scores are there.
        const int half = parts > 1 && u.part == 0 ? 1 - i : i;
        if (parts == 1) {
          barrier_wait(&s.empty[b][half], parity);
        } else if (i == 0) {
          barrier_wait(&s.scored[b], parity);
        } else {
          barrier_wait(&s.empty[b][0], parity);
          barrier_wait(&s.empty[b][1], parity);
        }
        if (theirs) barrier_arrive(&s.gather[b][half]);
        if (!mine) continue;
        barrier_expect(&s.full[b][half], (kHalfPanels + i) * kPanelBytes);
#pragma unroll
        for (int j = 0; j < kHalfPanels; ++j) {
          const int panel = half * kHalfPanels + j;
          copy_box(p.latents, to + panel * panel_bytes(b), &s.full[b][half], panel * 64, chunk * kKeyChunk);
        }
        // As weights, the rope panel was read by one warpgroup, as keys by the other.
        if (i == 1) copy_box(p.k_ropes, to + kRopePanel * panel_bytes(b), &s.full[b][half], 0, chunk * kKeyChunk);
      }
    }
  }
}

// What this thread has copied has landed; `full` once that is true of all gatherers.
__device__ __forceinline__ void say_gathered(unsigned long long* full) {
  fence_tensor_cores();
  meet<kGathered, kGatherers>();
  if (threadIdx.x % kGatherers == 0) barrier_arrive(full);
  __syncwarp();
}

// Keys first .. last - 1 of a chunk, half of the latent columns and with the second half the rope: each to the place of its position, zeros
// after the row's last. A loop, because where a step's weights have driven the code out of L2 little of it is sooner there.
__device__ __forceinline__ void gather_half(const HopperParams& p, HopperShared& s, int buffer, int half, const int32_t* path, int position, int keys,
                                            int first, int last) {
  const int t = threadIdx.x % kGatherers, piece = t % 8, line = t / 8;  // 16-byte piece of a panel row; one of 8 rows
  // Rows line, line + 8, .. all have the same place in the swizzle.
  const uint32_t to = tile_of(s, buffer) + line * 128 + (piece ^ line) * 16;
#pragma unroll 1
  for (int key = first; key < last; key += 8) {
    const int at = position + key + line;
    const uint32_t there = at < keys ? 16 : 0;
    const int slot = there == 0 ? 0 : at < s.kv_len ? at : s.kv_len + path[at - s.kv_len];
    const uint32_t row = to + key * 128;
    const __nv_bfloat16* lat = p.latent + static_cast<size_t>(slot) * kHopperRank + half * (kHopperRank / 2) + piece * 8;
#pragma unroll
    for (int panel = 0; panel < kHalfPanels; ++panel) copy16(row + (half * kHalfPanels + panel) * panel_bytes(buffer), lat + panel * 64, there);
    if (half == 1) copy16(row + kRopePanel * panel_bytes(buffer), p.k_rope + static_cast<size_t>(slot) * kHopperRope + piece * 8, there);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// By one thread: the first keys of half of the latent columns and with the second half of the rope, a multiple of eight of them, committed ones.
__device__ __forceinline__ void copy_eights(const HopperParams& p, HopperShared& s, int buffer, int half, int slot, int keys) {
  unsigned long long* full = &s.full[buffer][half];
  const uint32_t to = tile_of(s, buffer);
  const int panels = kHalfPanels + half;
  barrier_expect_too(full, panels * keys * 128);
#pragma unroll 1
  for (int at = 0; at < keys;) {
    const int more = at + kMoreSlots <= keys;
#pragma unroll 1
    for (int j = 0; j < panels; ++j) {
      const int panel = half * kHalfPanels + j;
      const CUtensorMap& map = panel == kRopePanel ? p.some_k_ropes[more] : p.some_latents[more];
      copy_box(map, to + panel * panel_bytes(buffer) + at * 128, full, panel == kRopePanel ? 0 : panel * 64, slot + at);
    }
    at += more ? kMoreSlots : kFewSlots;
  }
}

// The chunks at the rows' ends.
__device__ __forceinline__ void gather_keys(const HopperParams& p, HopperShared& s) {
  int uses = 0;  // bit b: how often buffer b was filled here, modulo 2
  for (int i = 0; i < s.count; ++i) {
    const HopperUnit& u = s.units[i];
    if (u.steps == 0) continue;
    const int last = u.steps - 1;
    for (int step = min(max(0, s.kv_len / kKeyChunk - u.first), has_more(u, last) ? last : u.steps); step < u.steps; ++step) {
      const int b = buffer_of(step, u.steps), parity = uses >> b & 1, chunk = u.first + step;
      uses ^= 1 << b;
      const bool more = has_more(u, step), whole = !committed(s, chunk);
      const int some = whole ? whole_eights(s, chunk) : 0, from = whole ? some : kKeyChunk, to = more ? kKeyChunk + kMoreKeys : kKeyChunk;
      const int32_t* path = p.path + static_cast<size_t>(u.row) * p.path_stride;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        barrier_wait(&s.gather[b][half], parity);
        if (some > 0 && threadIdx.x % kGatherers < kWarp) {
          __syncwarp();
          if (elected()) copy_eights(p, s, b, half, chunk * kKeyChunk, some);
          __syncwarp();
        }
        gather_half(p, s, b, half, path, chunk * kKeyChunk, u.keys, from, to);
      }
      if (whole) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        say_gathered(&s.full[b][0]);
      }
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      say_gathered(whole ? &s.full[b][1] : &s.more);
      if (whole && more && threadIdx.x % kGatherers == 0) barrier_arrive(&s.more);
    }
  }
}

// The copying warpgroup: a thread for the keys, in the warp that plans, one for the queries, two warps that gather.
__device__ __forceinline__ void copy_units(const HopperParams& p, HopperShared& s) {
  const int t = threadIdx.x % kGroup;
  if (t < kWarp) {
    plan_units(p, s);
    meet<kInitialized, 2 * kWarp>();
    signal<kPlanned, kHopperThreads - kGatherers>();
    signal<kPlannedGather, kWarp + kGatherers>();
    if (elected()) copy_keys(p, s);
    __syncwarp();
    wait_for_previous();
  } else if (t < 2 * kWarp) {
    wait_for_previous();
    meet<kPlanned, kHopperThreads - kGatherers>();
    if (elected()) copy_queries(p, s);
    __syncwarp();
  } else {
    if (t < 3 * kWarp) signal<kInitialized, 2 * kWarp>();
    wait_for_previous();
    meet<kPlannedGather, kWarp + kGatherers>();
    gather_keys(p, s);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
