// MLA tree attention on Hopper's tensor cores: 64 heads of a row are one tile, the latent cache is read as keys and as values.
//
// A unit of work is (row, 64 heads, split of the row's keys). A block takes units in turn: one warpgroup copies, two compute. Where
// multiprocessors are left over, two blocks share a unit, each for half of the 512 columns.
// Chunk c of 64 keys lies in buffer c % 2 of the split; warpgroup c % 2 forms its scores and its weights, both warpgroups add
// weights x latent, each for its half of the block's columns. The weights reach the other half through the buffer's rope panel, which
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

// A warpgroup's share of the work: G 0 owns even chunks and the block's first COLUMNS columns, G 1 odd chunks and the next COLUMNS.
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
  int parity = 0;  // of this warpgroup's buffer: how often it was used, modulo 2

  __device__ HopperGroup(const HopperParams& params, HopperShared& shared) : p(params), s(shared) {
    const int t = threadIdx.x % kGroup;
    head = t / kWarp * 16 + t % kWarp / 4;
  }

  // score = q . key over latent then rope, as their panels arrive; of the first 16 keys alone where N is 8. `first`: of the unit, here.
  template <int N>
  __device__ void multiply_keys(float (&score)[N], bool first) {
    const uint32_t q = tile_descriptor(shared_address(s.q), 16), k = tile_descriptor(shared_address(s.keys[G]), 16);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (first) barrier_wait(&s.q_full[panel], q_uses & 1);
      barrier_wait(&s.full[G][panel], parity);
      wgmma_fence();  // after every wait: without it the compiler takes the products one by one
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_scores(score, q + panel * (kPanelBytes >> 4) + i * 2, k + panel * (kPanelBytes >> 4) + i * 2, panel + i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  // A chunk's scores, -inf past the row's keys. `first`, `last`: of the unit, here.
  __device__ void form_scores(float (&score)[32], int valid, bool first, bool last) {
    if (valid > kFewKeys) {
      multiply_keys(score, first);
    } else {
      float few[8];
      multiply_keys(few, first);
#pragma unroll
      for (int i = 0; i < 8; ++i) score[i] = few[i];
    }
    parity ^= 1;
    if constexpr (2 * COLUMNS < kHopperRank) arrive(&s.scored[G]);
    if (last) arrive(&s.q_empty);
    if (valid >= kKeyChunk) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2 >= valid) score[i] = -INFINITY;
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
  __device__ void form_weights(const float (&score)[32], uint32_t (&weight)[4][4], bool first) {
    float most[4] = {score[0], score[2], score[4], score[6]};  // two a head: half as long a chain
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
    if (G == 0) fence_tensor_cores();  // the other warpgroup's products read the weights where they lie
  }

  // Where this lane's row of the k-th four matrices of a chunk's weights lies.
  __device__ uint32_t weight_row(int buffer, int k) const {
    const int lane = threadIdx.x % kWarp, row = threadIdx.x % kGroup / kWarp * 16 + lane % 16;
    return shared_address(s.keys[buffer]) + kRopePanel * kPanelBytes + row * 128 + ((2 * k + lane / 16) ^ (row % 8)) * 16;
  }

  // The first of this warpgroup's columns, in units of 64.
  __device__ int column() const { return part * (2 * COLUMNS / 64) + G * (COLUMNS / 64); }
  __device__ uint32_t values(int buffer) const {
    return tile_descriptor(shared_address(s.keys[buffer]) + column() * kPanelBytes, kPanelBytes);
  }

  // `few`: all but the first 16 of the chunk's keys have no weight.
  __device__ void add_own(const uint32_t (&weight)[4][4], bool few, bool first) {
    const uint32_t v = values(G);
    if (few) {
      wgmma_fence();
      wgmma_values(o, weight[0], v, !first);
    } else {
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) wgmma_values(o, weight[i], v + i * (2048 >> 4), !first || i > 0);
    }
    wgmma_commit();
    // The weights in the rope panel were ordinary writes, and the other warpgroup reads them with ordinary loads; but the bulk copy engine
    // is to come after them. Here the fence costs nothing: products are under way.
    if (G == 1) fence_tensor_cores();
  }

  // The second warpgroup has its own softmax to do meanwhile, so its products take the weights from shared memory. The first has not, and
  // takes them through registers, which spares the other one a fence between its softmax and the signal.
  __device__ void add_other(bool few, bool first) {
    const uint32_t v = values(1 - G);
    if constexpr (G == 1) {
      const uint32_t w = tile_descriptor(shared_address(s.keys[0]) + kRopePanel * kPanelBytes, 16);
      if (few) {
        wgmma_fence();
        wgmma_values(o, w, v, !first);
      } else {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_values(o, w + i * 2, v + i * (2048 >> 4), !first || i > 0);
      }
    } else {
      uint32_t weight[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) load_matrices(weight[i], weight_row(1, i));
      if (few) {
        wgmma_fence();
        wgmma_values(o, weight[0], v, !first);
      } else {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_values(o, weight[i], v + i * (2048 >> 4), !first || i > 0);
      }
    }
    wgmma_commit();
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

  __device__ void even_chunk(int valid, bool first, bool last) {
    float score[32], before[2] = {top[0], top[1]};
    uint32_t weight[4][4];
    form_scores(score, valid, first, last);
    form_weights(score, weight, first);
    signal<kEvenReady, 2 * kGroup>();
    if (!first) rescale(before, top);
    add_own(weight, valid <= kFewKeys, first);
    finish_add(0);
  }

  __device__ void run(const HopperUnit& u) {
    top[0] = top[1] = own[0] = own[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
    if (G == 1 && u.steps == 1) arrive(&s.q_empty);
    for (int step = 0; step < u.steps; step += 2) {
      const bool first = step == 0, pair = step + 1 < u.steps;
      const int valid = u.keys - (u.first + step) * kKeyChunk;
      if constexpr (G == 0) {
        even_chunk(valid, first, step + 2 >= u.steps);
        if (!pair) break;
        meet<kOddReady, 2 * kGroup>();
        float before[2];
        read_other_top(before);
        rescale(before, top);
        add_other(valid - kKeyChunk <= kFewKeys, false);
        finish_add(1);
      } else {
        float score[32], before[2];
        uint32_t weight[4][4];
        if (pair) form_scores(score, valid - kKeyChunk, first, step + 3 >= u.steps);
        meet<kEvenReady, 2 * kGroup>();
        read_other_top(before);
        if (!first) rescale(before, top);
        add_other(valid <= kFewKeys, first);
        if (!pair) {
          finish_add(0);
          break;
        }
        before[0] = top[0], before[1] = top[1];
        form_weights(score, weight, first);
        signal<kOddReady, 2 * kGroup>();
        finish_add(0);
        rescale(before, top);
        add_own(weight, valid - kKeyChunk <= kFewKeys, false);
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
    HopperUnit u = s.units[i];
    if (u.steps == 0) continue;
    group.part = u.part;
    // Says that a warp's branches are one, so that descriptors stay in uniform registers.
    u.keys = __reduce_max_sync(kAll, u.keys), u.steps = __reduce_max_sync(kAll, u.steps);
    group.run(u);
    group.write(p.parts.unit(u.split, u.row, u.first_head), u.steps > G);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

__global__ __launch_bounds__(kHopperThreads, 1) void hopper_attention_kernel(const __grid_constant__ HopperParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw[];
  HopperShared& s = *reinterpret_cast<HopperShared*>(raw);
  if (threadIdx.x == 0) {
    barrier_init(&s.q_empty, 2 * kGroup / kWarp);
    for (int panel = 0; panel < kPanels; ++panel) barrier_init(&s.q_full[panel], 1);
    for (int b = 0; b < 2; ++b) {
      for (int panel = 0; panel < kPanels; ++panel) barrier_init(&s.full[b][panel], 1);
      for (int group = 0; group < 2; ++group) barrier_init(&s.empty[b][group], kGroup / kWarp);
      for (int half = 0; half < 2; ++half) barrier_init(&s.gather[b][half], 1);
      barrier_init(&s.scored[b], kGroup / kWarp);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fetch_map(p.q_lat), fetch_map(p.q_rope), fetch_map(p.latents), fetch_map(p.k_ropes);
  }
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
