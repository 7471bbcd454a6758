// MLA tree attention on Hopper's tensor cores: 64 heads of a row are one tile, the latent cache is read as keys and as values.
//
// A unit of work is (row, 64 heads, split of the row's keys). A block takes units in turn: one warpgroup copies, two compute.
// Chunk c of 64 keys lies in buffer c % 2 of the split; warpgroup c % 2 forms its scores and its weights, both warpgroups add
// weights x latent, each for its half of the 512 columns. The weights reach the other half through the buffer's rope panel, which
// nobody needs once the scores are there.
// Reduction order, all of it fixed by position (mla_plan.h): a score adds latent then rope, 16 at a time; chunks of a split
// ascend, with the running maximum of an online softmax; splits meet around their greatest maximum, ascending. A key's place in
// the tile is its position, whether it was committed or is one of this step's rows, so a row's bits depend on the row alone.
#pragma once
#include "mla_hopper_copy.cuh"

namespace kdtree {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup's share of the work: G 0 owns even chunks and the first 256 columns, G 1 odd chunks and the last 256.
template <int G>
struct HopperGroup {
  const HopperParams& p;
  HopperShared& s;
  float o[128];
  float top[2];   // of this thread's two heads: the running maximum after the last chunk, raw scores
  float own[2];   // the same after this warpgroup's own last chunk: what `sum` is relative to
  float sum[2];   // this thread's columns of this warpgroup's chunks
  int head;       // the lower of the two; the other is 8 further
  int q_uses = 0;
  int uses = 0;  // bit b: how often buffer b was used, modulo 2

  __device__ HopperGroup(const HopperParams& params, HopperShared& shared) : p(params), s(shared) {
    const int t = threadIdx.x % kGroup;
    head = t / kWarp * 16 + t % kWarp / 4;
  }

  // score = q . key over latent then rope; -inf past the row's keys.
  __device__ void form_scores(float (&score)[32], int valid) {
    const uint64_t q = tile_descriptor(shared_address(s.q), 16), k = tile_descriptor(shared_address(s.keys[G]), 16);
    const int parity = uses >> G & 1;
    barrier_wait(&s.full[G][0], parity);
    fence_tensor_cores();
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel == 4) {
        barrier_wait(&s.full[G][1], parity);
        fence_tensor_cores();
        wgmma_fence();
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_scores(score, q + panel * (kPanelBytes >> 4) + i * 2, k + panel * (kPanelBytes >> 4) + i * 2, panel + i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (valid >= kKeyChunk) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2 >= valid) score[i] = -INFINITY;
    }
  }

  // Multiplies the sums by exp(from - to); by 1 in nearly every chunk, which is left out where it holds for a whole warp.
  __device__ void rescale(const float (&from)[2], const float (&to)[2]) {
    const float a = exp2_fast((from[0] - to[0]) * p.scale_log2), b = exp2_fast((from[1] - to[1]) * p.scale_log2);
    if (__all_sync(kAll, a == 1.0f && b == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 128; i += 4) o[i] *= a, o[i + 1] *= a, o[i + 2] *= b, o[i + 3] *= b;
  }

  // From the scores of a chunk to its weights, in registers and, for the other warpgroup, in the rope panel.
  // The scores stay as they are: registers of a finished product must not be written while the next one runs.
  __device__ void form_weights(const float (&score)[32], uint32_t (&weight)[4][4], bool first) {
    const int column = 2 * (threadIdx.x % 4);
    float next[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < 32; ++i) next[i / 2 % 2] = fmaxf(next[i / 2 % 2], score[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      next[r] = fmaxf(next[r], __shfl_xor_sync(kAll, next[r], 1));
      next[r] = fmaxf(next[r], __shfl_xor_sync(kAll, next[r], 2));
      sum[r] = first ? 0.f : sum[r] * exp2_fast((own[r] - next[r]) * p.scale_log2);
      top[r] = own[r] = next[r];
    }
    if (column == 0) s.top[G][head] = next[0], s.top[G][head + 8] = next[1];
    const float shift[2] = {-next[0] * p.scale_log2, -next[1] * p.scale_log2};
    unsigned char* panel = s.keys[G] + kRopePanel * kPanelBytes;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float low = exp2_fast(__fmaf_rn(score[2 * i], p.scale_log2, shift[i % 2]));
      const float high = exp2_fast(__fmaf_rn(score[2 * i + 1], p.scale_log2, shift[i % 2]));
      sum[i % 2] += low, sum[i % 2] += high;
      const uint32_t pair = pack_bf16(low, high);
      weight[i / 4][i % 4] = pair;
      const int row = head + i % 2 * 8, piece = i / 2;
      *reinterpret_cast<uint32_t*>(panel + row * 128 + (piece ^ (row % 8)) * 16 + column * 2) = pair;
    }
    fence_tensor_cores();
  }

  __device__ uint64_t values(int buffer) const { return tile_descriptor(shared_address(s.keys[buffer]) + G * 4 * kPanelBytes, kPanelBytes); }

  __device__ void add_own(const uint32_t (&weight)[4][4], bool first) {
    const uint64_t v = values(G);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_values(o, weight[i], v + i * (2048 >> 4), !first || i > 0);
    wgmma_commit();
  }

  __device__ void add_other(bool first) {
    const uint64_t v = values(1 - G), w = tile_descriptor(shared_address(s.keys[1 - G]) + kRopePanel * kPanelBytes, 16);
    fence_tensor_cores();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_values(o, w + i * 2, v + i * (2048 >> 4), !first || i > 0);
    wgmma_commit();
  }

  __device__ void finish_add(int buffer) {
    wgmma_wait<0>();
    __syncwarp();
    release(buffer);
  }

  // This warp has read its half of the buffer.
  __device__ void release(int buffer) {
    uses ^= 1 << buffer;
    if (threadIdx.x % kWarp == 0) barrier_arrive(&s.empty[buffer][G]);
  }

  __device__ void read_other_top(float (&from)[2]) {
    from[0] = top[0], from[1] = top[1];
    top[0] = s.top[1 - G][head], top[1] = s.top[1 - G][head + 8];
  }

  __device__ void even_chunk(int valid, bool first) {
    float score[32], before[2] = {top[0], top[1]};
    uint32_t weight[4][4];
    form_scores(score, valid);
    meet<kMeetEven, kGroup>();  // the whole warpgroup is done with the rope panel
    form_weights(score, weight, first);
    signal<kEvenReady, 2 * kGroup>();
    if (!first) rescale(before, top);
    add_own(weight, first);
    finish_add(0);
  }

  __device__ void run(const HopperUnit& u) {
    barrier_wait(&s.q_full, q_uses++ & 1);
    top[0] = top[1] = own[0] = own[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
    for (int step = 0; step < u.steps; step += 2) {
      const bool first = step == 0, pair = step + 1 < u.steps;
      const int valid = u.keys - (u.first + step) * kKeyChunk;
      if constexpr (G == 0) {
        even_chunk(valid, first);
        if (!pair) break;
        meet<kOddReady, 2 * kGroup>();
        float before[2];
        read_other_top(before);
        rescale(before, top);
        add_other(false);
        finish_add(1);
      } else {
        float score[32], before[2];
        uint32_t weight[4][4];
        if (pair) form_scores(score, valid - kKeyChunk);
        meet<kEvenReady, 2 * kGroup>();
        read_other_top(before);
        if (!first) rescale(before, top);
        add_other(first);
        if (!pair) {
          finish_add(0);
          break;
        }
        before[0] = top[0], before[1] = top[1];
        meet<kMeetOdd, kGroup>();
        form_weights(score, weight, first);
        signal<kOddReady, 2 * kGroup>();
        finish_add(0);
        rescale(before, top);
        add_own(weight, false);
        finish_add(1);
      }
    }
    if (threadIdx.x % kWarp == 0) barrier_arrive(&s.q_empty);
  }

  __device__ void write(size_t unit, bool any) {
    const int t = threadIdx.x % kGroup;
    float* sums = p.parts.sums + (unit * kHopperHeads + head) * kHopperRank + G * (kHopperRank / 2) + t % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      *reinterpret_cast<float2*>(sums + i * 8) = make_float2(o[4 * i], o[4 * i + 1]);
      *reinterpret_cast<float2*>(sums + 8 * kHopperRank + i * 8) = make_float2(o[4 * i + 2], o[4 * i + 3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAll, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAll, sum[r], 2);
    }
    if (t % 4 != 0) return;
    float2* norm = p.parts.norms + (unit * 2 + G) * kHopperHeads + head;
#pragma unroll
    for (int r = 0; r < 2; ++r) norm[8 * r] = any ? make_float2(own[r] * p.scale_log2, sum[r]) : make_float2(-INFINITY, 0.f);
  }
};

template <int G>
__device__ __forceinline__ void compute_units(const HopperParams& p, HopperShared& s, int n_rows, int kv_len) {
  HopperGroup<G> group(p, s);
  HopperUnit u;
  for (int index = blockIdx.x; index < units_of(p); index += gridDim.x) {
    if (!take_unit(p, index, n_rows, kv_len, u)) continue;
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
    barrier_init(&s.q_full, kGroup);
    barrier_init(&s.q_empty, 2 * kGroup / kWarp);
    for (int b = 0; b < 2; ++b) {
      for (int half = 0; half < 2; ++half) barrier_init(&s.full[b][half], kGroup), barrier_init(&s.empty[b][half], kGroup / kWarp);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  const int n_rows = p.parts.state->n_rows, kv_len = p.parts.state->kv_len;
  switch (threadIdx.x / kGroup) {
    case 0:
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      copy_units(p, s, n_rows, kv_len);
      break;
    case 1:
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      compute_units<0>(p, s, n_rows, kv_len);
      break;
    default:
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      compute_units<1>(p, s, n_rows, kv_len);
      break;
  }
#endif
}

}  // namespace cuda
}  // namespace kdtree
