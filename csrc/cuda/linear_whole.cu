// linear for steps of many rows (17 to 64 a launch) and short rows of INT4 on Hopper: y = w x for up to two weights, by warpgroup products,
// and no block waits for another.
//
// Bytes: each weight once, all activations once a block; flops 2*M*N*K on tensor cores. Bound by what a multiprocessor takes in: 64 rows of
// activations and 64 of weights for the same K, of which the activations are the more.
// A block has a tile of 64 weight rows and all of K, each of its four warpgroups two segments, one after the other. All of the tile's weights
// are asked for at once; activations come kWholeAhead boxes of 64 of K ahead and are put in order where they stand. The eight sums meet in
// shared memory, in their place.
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
  CUtensorMap x;  // bf16 [max_rows, k], in boxes of kBox x kWideRows
};

__global__ __launch_bounds__(kWideWarps * kWarp, 1) void whole_kernel(const __grid_constant__ Params p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr WeightKind KIND = WeightKind::kInt4;
  constexpr int UNIT = kUnitK<KIND>, PLACES = kWholeAhead + 1;
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ uint64_t full_of[kWideGroups * PLACES];
  __shared__ int counted;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warpgroup = warp / 4, quarter = warp % 4;
  const int units = (p.k + UNIT - 1) / UNIT, unit = segment_begin(2 * warpgroup, units);
  const int second = segment_begin(2 * warpgroup + 1, units) - unit, steps = segment_begin(2 * warpgroup + 2, units) - unit;
  const bool whole = (p.k + 31) / 32 % 4 == 0;

  const uint32_t weights = shared_address(smem) + kWideGroups * PLACES * kBoxBytes + warp * (stream::kWholeUnits * kRingBytes);
  TileSource from = source_of<KIND>(p, sixteen_of(p, static_cast<int>(blockIdx.x), quarter), unit, lane);
  for (int i = 0; i < steps; ++i) copy_unit<KIND>(weights + i * kRingBytes, from, piece_offset(lane / 4, lane % 4), lane, whole);
  copy_commit();
  if (threadIdx.x < kWideGroups * PLACES) full_init(full_of + threadIdx.x);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  wait_for_previous();

  // Box h stands in place h % PLACES of the warpgroup's, as it comes and, put in order, again.
  uint8_t* const staged = smem + warpgroup * (PLACES * kBoxBytes);
  uint64_t* const full = full_of + warpgroup * PLACES;
  const uint32_t b = shared_address(staged);
  const auto ask = [&](int box) {
    if (threadIdx.x % (4 * kWarp) != 0 || box >= 2 * steps) return;
    full_expect(full + box % PLACES, kBoxBytes);
    copy_rows(b + box % PLACES * kBoxBytes, &p.x, unit * UNIT + box * kBox, full + box % PLACES);
  };
  for (int box = 0; box < kWholeAhead; ++box) ask(box);
  if (threadIdx.x == 0) counted = *p.n_rows;  // for the end; the loop leaves no register
  copy_wait<0>();

  const LaneOffsets at(lane);
  float before[32], acc[32];  // sums of the two segments
#pragma unroll
  for (int e = 0; e < 32; ++e) before[e] = acc[e] = 0.f;
  for (int box = 0; box < 2 * steps; ++box) {
    full_wait(full + box % PLACES, box / PLACES & 1);
    Pieces<4, kBoxBytes / 512 / 4> pieces;
    pieces.load(b + box % PLACES * kBoxBytes, quarter, lane);
    meet_warpgroup(warpgroup);  // the box is read, and the one before multiplied: its place is free
    ask(box + kWholeAhead);
    pieces.store(staged + box % PLACES * kBoxBytes, quarter, lane, p.ordered);
    fence_to_tensor_cores();
    meet_warpgroup(warpgroup);
    if (box == 2 * second) {
#pragma unroll
      for (int e = 0; e < 32; ++e) before[e] = acc[e], acc[e] = 0.f;
    }
    multiply_int4<1>(acc, weights + box / 2 * kRingBytes, at, b + box % PLACES * kBoxBytes, box % 2);
  }
  // Where the second segment is empty, its zeros stand before the first's sums in place of after them, which changes no bit.
  __syncthreads();  // weights and activations were read

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
  const size_t shared = stream::whole_shared();
  reserve_shared(reinterpret_cast<const void*>(whole_kernel), "linear_int4_bf16", shared);
  Params p{};
  set_wide(p, a);
  for (p.first_row = 0; p.first_row < a.max_rows; p.first_row += stream::kWideRows) {
    set_rows(p, a);
    p.x = rows_map(p, x, ldx, stream::kWideRows);
    launch("linear_int4_bf16", whole_kernel, dim3(static_cast<unsigned>(p.tiles)), kWideWarps * kWarp, shared, p);
  }
}

}  // namespace kdtree
