// MLA tree attention on Hopper's tensor cores: 64 heads of a row are one tile, the latent cache is read as keys and as values.
//
// A unit of work is (row, 64 heads, split of the row's keys). A block takes units in turn: one warpgroup copies, two compute. Where
// multiprocessors are left over, two blocks share a unit, each for half of the 512 columns.
// A split's chunks of 64 keys lie in two buffers by turns, its last one, which may have 72, in the second; a buffer's warpgroup forms its
// scores and its weights, both warpgroups add weights x latent, each for its half of the block's columns. The weights reach the other half through the buffer's rope panel, which
// nobody needs once the scores are there.
// Reduction order, all of it fixed by position (mla_plan.h): a score adds latent then rope, 16 at a time; chunks of a split
// ascend, each with weights relative to the greatest score so far, or to an older one that it does not exceed by more than `slack`;
// a split's sums are rounded to scaled f16, a scale for each head and 128
// columns (mla_fold.cuh); splits meet around their greatest maximum, ascending. A key's place in the tile is its position, whether it
// was committed or is one of this step's rows, and no column's sums take anything from another's, so a row's bits depend on the row
// alone: not on other rows, their number, or how many blocks share its units.
#pragma once
#include "mla_hopper_copy.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup's share of the work: G 0 owns the first buffer's chunks, called even here, and the block's first COLUMNS columns, G 1 the
// second buffer's, called odd, and the next COLUMNS.
template <int G, int COLUMNS>
struct HopperGroup {
  const HopperParams& p;
  HopperShared& s;
  float o[COLUMNS / 2];
  float top[2];   // of this thread's two heads: what weights are relative to after the last chunk, raw scores
  float own[2];   // the same after this warpgroup's own last chunk: what `sum` is relative to
  float sum[2];   // this thread's columns of this warpgroup's chunks
  int head;       // the lower of the two; the other is 8 further
  int part = 0;   // of the columns, where a unit is shared by blocks
  int q_uses = 0;
  int more_uses = 0;
  int parity = 0;  // of this warpgroup's buffer: how often it was used, modulo 2

  __device__ HopperGroup(const HopperParams& params, HopperShared& shared) : p(params), s(shared) {
    const int t = threadIdx.x % kGroup;
    head = t / kWarp * 16 + t % kWarp / 4;
  }

  // score = q . key over latent then rope, as they arrive, with MORE of keys 64 .. 71 too. `first`: of the unit, here.
  template <bool MORE>
  __device__ void multiply_keys(float (&score)[32], float (&more)[4], bool first) {
    const uint32_t q = tile_descriptor(shared_address(s.q), 16), k = tile_descriptor(tile_of(s, G), 16);
    if constexpr (MORE) {
      barrier_wait(&s.more, more_uses & 1);
      ++more_uses;
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (first) barrier_wait(&s.q_full[panel], q_uses & 1);
      // A wait a panel, though halves arrive whole: with fewer the compiler takes the products one by one, as without a fence after each.
      barrier_wait(&s.full[G][panel < kHalfPanels ? 0 : 1], parity);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a = q + panel * (kPanelBytes >> 4) + i * 2, b = k + panel * (panel_bytes(G) >> 4) + i * 2;
        if constexpr (MORE) {
          wgmma_scores(score, more, a, b, panel + i > 0);
        } else {
          wgmma_scores(score, a, b, panel + i > 0);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  // A chunk's scores, -inf past the row's keys. `first`, `last`: of the unit, here. An even chunk is none of a row's last ones.
  __device__ void form_scores(float (&score)[32], float (&more)[4], int valid, bool first, bool last) {
#pragma unroll
    for (int i = 0; i < 4; ++i) more[i] = -INFINITY;
    if (G == 1 && holds_more(valid)) {
      multiply_keys<true>(score, more, first);
    } else {
      multiply_keys<false>(score, more, first);
    }
    parity ^= 1;
    if constexpr (2 * COLUMNS < kHopperRank) arrive(&s.scored[G]);
    if (last) arrive(&s.q_empty);
    if (G == 0 || valid == kKeyChunk || valid >= kKeyChunk + kMoreKeys) return;
    const int after = valid - 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + i % 2 >= after) score[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kKeyChunk + i % 2 >= after) more[i] = -INFINITY;
    }
  }

  // For the warp.
  __device__ void arrive(unsigned long long* barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }

  // Multiplies the sums by exp(from - to); by 1 in nearly every chunk, which is left out where it holds for a whole warp.
  __device__ void rescale(const float (&from)[2], const float (&to)[2]) {
    const float a = exp2_fast((from[0] - to[0]) * p.scale_log2), b = exp2_fast((from[1] - to[1]) * p.scale_log2);
    if (__all_sync(kAll, a == 1.0f && b == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i += 4) o[i] *= a, o[i + 1] *= a, o[i + 2] *= b, o[i + 3] *= b;
  }

  // From the scores of a chunk to its weights, in registers and, for the other warpgroup, in the rope panel.
  // The scores stay as they are: registers of a finished product must not be written while the next one runs.
  __device__ void form_weights(const float (&score)[32], const float (&more)[4], uint32_t (&weight)[4][4], uint32_t (&rest)[4], bool longer,
                               bool first) {
    float most[4] = {score[0], score[2], score[4], score[6]};  // two a head: half as long a chain
    if constexpr (G == 1) most[0] = fmaxf(more[0], more[1]), most[1] = fmaxf(more[2], more[3]);
#pragma unroll
    for (int i = 0; i < 32; ++i) most[i / 2 % 4] = fmaxf(most[i / 2 % 4], score[i]);
    float next[2] = {top[0], top[1]}, greatest[2] = {fmaxf(most[0], most[2]), fmaxf(most[1], most[3])};
    // What weights are relative to moves only where a score is far above it: shuffles wait for the shared memory that products read.
    if (__any_sync(kAll, greatest[0] > top[0] + p.slack || greatest[1] > top[1] + p.slack)) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) {
        const float a = __shfl_xor_sync(kAll, greatest[0], mask), b = __shfl_xor_sync(kAll, greatest[1], mask);
        greatest[0] = fmaxf(greatest[0], a), greatest[1] = fmaxf(greatest[1], b);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (greatest[r] > top[r] + p.slack) next[r] = greatest[r];
      }
    }
    if (threadIdx.x % 4 == 0) s.top[G][head] = next[0], s.top[G][head + 8] = next[1];
    const float shift[2] = {-next[0] * p.scale_log2, -next[1] * p.scale_log2};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = first ? 0.f : sum[r] * exp2_fast((own[r] - next[r]) * p.scale_log2);
      top[r] = own[r] = next[r];
    }
    meet<G == 0 ? kMeetEven : kMeetOdd, kGroup>();  // the whole warpgroup is done with the rope panel as keys
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 4 * k; i < 4 * k + 4; ++i) {
        const float low = exp2_fast(__fmaf_rn(score[2 * i], p.scale_log2, shift[i % 2]));
        const float high = exp2_fast(__fmaf_rn(score[2 * i + 1], p.scale_log2, shift[i % 2]));
        sum[i % 2] += low, sum[i % 2] += high;
        weight[k][i % 4] = pack_bf16(low, high);
      }
      store_matrices(weight_row(G, k), weight[k]);
    }
    if (G == 1 && longer) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = exp2_fast(__fmaf_rn(more[2 * i], p.scale_log2, shift[i]));
        const float high = exp2_fast(__fmaf_rn(more[2 * i + 1], p.scale_log2, shift[i]));
        sum[i] += low, sum[i] += high;
        rest[i] = pack_bf16(low, high);
      }
      store_matrices(rest_row(), rest[0], rest[1]);
    }
    if (G == 0) fence_tensor_cores();  // the other warpgroup's products read the weights where they lie
  }

  // Where this lane's row of two matrices of weights of keys 64 .. 71 lies: behind the rope panel's 64 rows, 16 bytes a head.
  __device__ uint32_t rest_row() const {
    return tile_of(s, 1) + kRopePanel * kLastPanelBytes + kPanelBytes + (threadIdx.x % kGroup / kWarp * 16 + threadIdx.x % 16) * 16;
  }

  // Where this lane's row of the k-th four matrices of a chunk's weights lies.
  __device__ uint32_t weight_row(int buffer, int k) const {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x % kGroup / kWarp * 16 + lane % 16;
    return tile_of(s, buffer) + kRopePanel * panel_bytes(buffer) + row * 128 + ((2 * k + lane / 16) ^ (row % 8)) * 16;
  }

  // The first of this warpgroup's columns, in units of 64.
  __device__ int column() const { return part * (2 * COLUMNS / 64) + G * (COLUMNS / 64); }
  __device__ uint32_t values(int buffer) const {
    return tile_descriptor(tile_of(s, buffer) + column() * panel_bytes(buffer), panel_bytes(buffer));
  }

  // o += weight . values of a chunk, with LONGER of keys 64 .. 71 too, whose product takes sixteen keys: the second eight are the first
  // again and have no weight.
  __device__ void multiply_values(const uint32_t (&weight)[4][4], const uint32_t (&rest)[4], uint32_t v, bool longer, bool first) {
    if (longer) {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_values(o, weight[i], v + i * (2048 >> 4), !first || i > 0);
      wgmma_values(o, rest, v + 4 * (2048 >> 4), 1, kSwizzled);
    } else {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_values(o, weight[i], v + i * (2048 >> 4), !first || i > 0);
    }
    wgmma_commit();
  }

  __device__ void add_own(const uint32_t (&weight)[4][4], const uint32_t (&rest)[4], bool longer, bool first) {
    multiply_values(weight, rest, values(G), G == 1 && longer, first);
    // The weights in the rope panel were ordinary writes, and the other warpgroup reads them with ordinary loads; but the bulk copy engine
    // is to come after them. Here the fence costs nothing: products are under way.
    if (G == 1) fence_tensor_cores();
  }

  // The second warpgroup has its own softmax to do meanwhile, so its products take the weights from shared memory. The first has not, and
  // takes them through registers, which spares the other one a fence between its softmax and the signal.
  __device__ void add_other(bool longer, bool first) {
    const uint32_t v = values(1 - G);
    if constexpr (G == 1) {
      const uint32_t w = tile_descriptor(tile_of(s, 0) + kRopePanel * kPanelBytes, 16);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_values(o, w + i * 2, v + i * (2048 >> 4), !first || i > 0);
      wgmma_commit();
    } else {
      uint32_t weight[4][4], rest[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) load_matrices(weight[i], weight_row(1, i));
      if (longer) load_matrices(rest[0], rest[1], rest_row());
      multiply_values(weight, rest, v, longer, first);
    }
  }

  // This warp has read its half of the buffer.
  __device__ void finish_add(int buffer) {
    wgmma_wait<0>();
    arrive(&s.empty[buffer][G]);
  }

  __device__ void read_other_top(float (&from)[2]) {
    from[0] = top[0], from[1] = top[1];
    top[0] = s.top[1 - G][head], top[1] = s.top[1 - G][head + 8];
  }

  __device__ void even_chunk(int step, bool last) {
    float score[32], more[4], before[2] = {top[0], top[1]};
    uint32_t weight[4][4], rest[4];
    form_scores(score, more, kKeyChunk, step < 2, last);
    form_weights(score, more, weight, rest, false, step < 2);
    signal<kEvenReady, 2 * kGroup>();
    if (step > 0) rescale(before, top);
    add_own(weight, rest, false, step == 0);
    finish_add(0);
  }

  // Chunks of the first buffer, then of the second: step and step + 1, the first of them missing once where their number is odd.
  __device__ void run(const HopperUnit& u, int keys, int steps) {
    top[0] = top[1] = own[0] = own[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
    if (G == 0 && steps == 1) arrive(&s.q_empty);
    for (int step = -(steps & 1); step < steps; step += 2) {
      const bool even = step >= 0, last = step + 2 == steps;
      const int valid = keys - (u.first + step + 1) * kKeyChunk;  // keys of the row from the second buffer's chunk on
      const bool longer = holds_more(valid);
      float before[2];
      if constexpr (G == 0) {
        if (even) even_chunk(step, last);
        meet<kOddReady, 2 * kGroup>();
        read_other_top(before);
        if (even) rescale(before, top);
        add_other(longer, !even);
        finish_add(1);
      } else {
        float score[32], more[4];
        uint32_t weight[4][4], rest[4] = {};
        form_scores(score, more, valid, step <= 0, last);
        if (even) {
          meet<kEvenReady, 2 * kGroup>();
          read_other_top(before);
          if (step > 0) rescale(before, top);
          add_other(false, step == 0);
        }
        before[0] = top[0], before[1] = top[1];
        form_weights(score, more, weight, rest, longer, step <= 0);
        signal<kOddReady, 2 * kGroup>();
        if (even) {
          finish_add(0);
          rescale(before, top);
        }
        add_own(weight, rest, longer, !even);
        finish_add(1);
      }
    }
    ++q_uses;
  }

  __device__ void write(size_t unit, bool any) {
    const int t = threadIdx.x % kGroup;
    constexpr int kBlocks = COLUMNS / 128;
    float most[kBlocks][2] = {};  // of this thread's columns, a head
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) most[i / 64][i / 2 % 2] = fmaxf(most[i / 64][i / 2 % 2], fabsf(o[i]));
    uint4* sums = p.parts.sums + (unit * kHopperHeads + head) * kOctets + column() * 8 + t % 4;
    float* scales = p.parts.scales + (unit * kPartScales + column() / 2) * kHopperHeads + head;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float greatest = most[block][r];
        greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, 1));
        greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, 2));
        const float2 scale = half_scale(greatest);
        if (t % 4 == 0) scales[block * kHopperHeads + 8 * r] = scale.y;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* octet = o + block * 64 + j * 16 + 2 * r;
          sums[8 * r * kOctets + (block * 4 + j) * 4] =
              make_uint4(pack_half(octet[0] * scale.x, octet[1] * scale.x), pack_half(octet[4] * scale.x, octet[5] * scale.x),
                         pack_half(octet[8] * scale.x, octet[9] * scale.x), pack_half(octet[12] * scale.x, octet[13] * scale.x));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAll, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAll, sum[r], 2);
    }
    if (t % 4 != 0 || part > 0) return;
    float2* norm = p.parts.norms + (unit * 2 + G) * kHopperHeads + head;
#pragma unroll
    for (int r = 0; r < 2; ++r) norm[8 * r] = any ? make_float2(own[r] * p.scale_log2, sum[r]) : make_float2(-INFINITY, 0.f);
  }
};

template <int G, int COLUMNS>
__device__ __forceinline__ void compute_units(const HopperParams& p, HopperShared& s) {
  HopperGroup<G, COLUMNS> group(p, s);
  for (int i = 0; i < s.count; ++i) {
    const HopperUnit u = s.units[i];
    if (u.steps == 0) continue;
    group.part = u.part;
    // Says that a warp's branches are one, so that descriptors stay in uniform registers.
    const int keys = __reduce_max_sync(kAll, u.keys), steps = static_cast<int>(__reduce_max_sync(kAll, static_cast<unsigned>(u.steps)));
    group.run(u, keys, steps);
    group.write(p.parts.unit(u.split, u.row, u.first_head), G == 1 || steps > 1);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

__global__ __launch_bounds__(kHopperThreads, 1) void hopper_attention_kernel(const __grid_constant__ HopperParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw[];
  HopperShared& s = *reinterpret_cast<HopperShared*>(raw);
  if (threadIdx.x == 2 * kWarp) {
    init_barriers(s);
  } else if (threadIdx.x == 3 * kWarp) {
    fetch_map(p.q_lat), fetch_map(p.q_rope), fetch_map(p.latents), fetch_map(p.k_ropes);
    for (int i = 0; i < 2; ++i) fetch_map(p.some_latents[i]), fetch_map(p.some_k_ropes[i]);
  }
  // A step's weights have driven the paths out of L2: there is time to have them back before the gatherers ask. A hint, so they may be old.
  const int row = static_cast<int>(threadIdx.x) - kGroup;
  if (row >= 0 && row < p.parts.rows) prefetch(p.path + static_cast<size_t>(p.parts.first_row + row) * p.path_stride);
  __syncwarp();
  switch (threadIdx.x / kGroup) {
    case 0:
      asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
      copy_units(p, s);
      break;
    case 1:
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
      wait_for_previous();
      meet<kPlanned, kHopperThreads - kGatherers>();
      s.parts == 1 ? compute_units<0, 256>(p, s) : compute_units<0, 128>(p, s);
      break;
    default:
      asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
      wait_for_previous();
      meet<kPlanned, kHopperThreads - kGatherers>();
      s.parts == 1 ? compute_units<1, 256>(p, s) : compute_units<1, 128>(p, s);
      break;
  }
#endif
}

}  // namespace cuda
}  // namespace kdtree
