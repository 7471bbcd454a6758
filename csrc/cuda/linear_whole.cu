// linear for steps of many rows (17 to 64 a launch) of short K on Hopper: y = w x for up to two weights, by warpgroup products, and no
// block waits for another.
//
// Bytes: each weight once, all activations once a block; flops 2*M*N*K on tensor cores. Bound by what a multiprocessor takes in: 64 rows of
// activations and 64 of weights for the same K, of which the activations are the more.
// A block has a tile of 64 weight rows and all of K, each of its four warpgroups two segments, one after the other, through rings of its
// own: weights as in linear_stream.cu, activations kAhead halves of an int4 unit ahead as they lie in memory, in order where they are
// multiplied. The eight sums meet in shared memory, in the rings' place.
// Reduction order: stream.cuh; the bits are linear_wide.cu's.
#include "backend.h"
#include "stream_wide.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kWholeAhead;
using stream::kWideGroups;
using stream::kWideWarps;

struct Params : WideParams {
  const uint16_t* x;  // bf16
  int ldx;
};

template <WeightKind KIND>
__global__ __launch_bounds__(kWideWarps * kWarp, 1) void whole_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool INT4 = KIND == WeightKind::kInt4;
  constexpr int UNIT = kUnitK<KIND>, DEPTH = kWholeDepth<KIND>, SLOT = kWideSlot<KIND>, PLACES = kWholeAhead + 2;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ int counted;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warpgroup = warp / 4, quarter = warp % 4;
  const int units = (p.k + UNIT - 1) / UNIT, unit = segment_begin(2 * warpgroup, units);
  const int second = segment_begin(2 * warpgroup + 1, units) - unit, steps = segment_begin(2 * warpgroup + 2, units) - unit;
  const int boxes = INT4 ? 2 * steps : (steps + 1) / 2;  // of kBox of K
  const bool whole = (p.k + 31) / 32 % 4 == 0;

  const uint32_t ring = shared_address(smem) + warp * (DEPTH * SLOT), mine = piece_offset(lane / 4, lane % 4);
  TileSource from = source_of<KIND>(p, sixteen_of(p, static_cast<int>(blockIdx.x), quarter), unit, lane);
  int left = steps;
  uint32_t to = ring;
  const auto fetch = [&] {
    if (left > 0) copy_unit<KIND>(to, from, mine, lane, whole);
    --left, to = to + SLOT == ring + DEPTH * SLOT ? ring : to + SLOT;
  };
#pragma unroll 1
  for (int i = 0; i < DEPTH - (INT4 ? 1 : 2); ++i) fetch();
  copy_commit();
  wait_for_previous();

  // Box h in order in place h of the warpgroup's PLACES, as it came in place h + 1: eight rows of a group of 32 a warp at a time, a piece of
  // eight elements a lane, which it puts in order itself.
  uint8_t* const staged = smem + kWideWarps * DEPTH * SLOT + warpgroup * (PLACES * kBoxBytes);
  const uint32_t b = shared_address(staged);
  constexpr int EACH = kBoxBytes / 512 / 4;
  const auto ask = [&](int box) {
    if (box < boxes) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const int at = i * 4 + quarter, row = at % 8 * 8 + lane / 4, k = unit * UNIT + box * kBox + at / 8 * 32 + lane % 4 * 8;
        const bool there = row < p.max_rows && k < p.k;
        copy16(b + (box + 1) % PLACES * kBoxBytes + at * 512 + lane * 16, p.x + (there ? static_cast<size_t>(row) * p.ldx + k : 0), there ? 16 : 0);
      }
    }
    copy_commit();
  };
  const auto order_box = [&](int box) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = i * 4 + quarter;
      const uint4 v = load_shared16(b + (box + 1) % PLACES * kBoxBytes + at * 512 + lane * 16);
      store_ordered(staged + box % PLACES * kBoxBytes + at / 8 * kGroupBytes + at % 8 * kColumnsBytes + lane * 4, v, p.ordered);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads what was stored
    meet_warpgroup(warpgroup);
  };
#pragma unroll 1
  for (int box = 0; box < kWholeAhead; ++box) ask(box);
  if (threadIdx.x == 0) counted = *p.n_rows;  // for the end; the loop leaves no register

  const LaneOffsets at(lane);
  float before[32], acc[32];  // sums of the two segments
#pragma unroll
  for (int e = 0; e < 32; ++e) before[e] = acc[e] = 0.f;
  const auto next_segment = [&] {
#pragma unroll
    for (int e = 0; e < 32; ++e) before[e] = acc[e], acc[e] = 0.f;
  };
  for (int box = 0; box < boxes; ++box) {
    copy_wait<kWholeAhead - 1>();
    order_box(box);  // and whatever was read a box ago may be written over
    if (!INT4 || box % 2 == 0) fetch();
    if (!INT4) fetch();
    ask(box + kWholeAhead);
    const uint32_t b_box = b + box % PLACES * kBoxBytes;
    if constexpr (INT4) {
      if (box == 2 * second) next_segment();
      multiply_int4<1>(acc, ring + box / 2 % DEPTH * SLOT, at, b_box, box % 2);
    } else {
#pragma unroll 1
      for (int step = 2 * box; step < min(2 * box + 2, steps); ++step) {
        if (step == second) next_segment();
        uint32_t a[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        multiply_bf16(acc, a, ring + step % DEPTH * SLOT, at, b_box + step % 2 * kGroupBytes);
        wgmma_wait<0>(acc, a);
      }
    }
  }
  // Where the second segment is empty, its zeros stand before the first's sums in place of after them, which changes no bit.
  copy_wait<0>();
  __syncthreads();  // the rings were read

  // [7][fragment][lane]: the sum of segments 0 and 1, then one a segment.
  float4* const sums = reinterpret_cast<float4*>(smem) + lane;
#pragma unroll
  for (int nt = 0; nt < 8; ++nt) {
    const float4 first = make_float4(before[4 * nt], before[4 * nt + 1], before[4 * nt + 2], before[4 * nt + 3]);
    const float4 next = make_float4(acc[4 * nt], acc[4 * nt + 1], acc[4 * nt + 2], acc[4 * nt + 3]);
    float4* const to = sums + (quarter * 8 + nt) * kWarp;
    if (warpgroup == 0) {
      *to = add(first, next);
    } else {
      to[(2 * warpgroup - 1) * (kFragments * kWarp)] = first, to[2 * warpgroup * (kFragments * kWarp)] = next;
    }
  }
  __syncthreads();
  const int rows = min(counted - p.first_row, p.max_rows);
  int tile;  // read again, so that nothing of it is held while registers are few
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(tile));
  const Sixteen of = sixteen_of(p, tile, quarter);
  const bool paired = p.epilogue == Epilogue::kSiluMul;
  if (!of.live || (paired && quarter >= 2)) return;
  const auto total_of = [&](int fragment) {
    float4 total = sums[fragment * kWarp];
#pragma unroll
    for (int s = 1; s < kSegments - 1; ++s) total = add(total, sums[(s * kFragments + fragment) * kWarp]);
    return total;
  };
#pragma unroll
  for (int nt = 2 * warpgroup; nt < 2 * warpgroup + 2; ++nt) {
    const float4 y = total_of(quarter * 8 + nt);
    write_fragment(p, of, nt * kColumns, rows, y, paired ? total_of((quarter + 2) * 8 + nt) : y, lane);
  }
#endif
}

}  // namespace

void CudaBackend::linear_whole(const LinearArgs& a, const uint16_t* x, int ldx) {
  const bool int4 = a.w[0].kind == WeightKind::kInt4;
  const auto kernel = int4 ? &whole_kernel<WeightKind::kInt4> : &whole_kernel<WeightKind::kBf16>;
  const char* const name = int4 ? "linear_int4_bf16" : "linear_bf16";
  reserve_shared(reinterpret_cast<const void*>(kernel), name, stream::whole_shared(a.w[0].kind));
  Params p{};
  set_wide(p, a);
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    set_rows(p, a);
    p.x = x + static_cast<size_t>(p.first_row) * ldx, p.ldx = ldx;
    launch(name, kernel, dim3(static_cast<unsigned>(p.tiles)), kWideWarps * kWarp, stream::whole_shared(a.w[0].kind), p);
  }
}

}  // namespace kdtree
