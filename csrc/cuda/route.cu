// route: the router's logits for bf16 activations and the choice of experts in one launch, on tensor cores.
//
// Bytes: the router's weights once for up to 64 rows; bound by latency: what counts is how soon the first and the last byte arrive. A
// cluster of eight blocks owns kRows experts; a block has an eighth of K and a warp an eighth of that, whose weights it asks for before
// the launch ahead has ended. When all blocks have written their logits, they share out the rows and choose; all of them run at a time, so
// that waiting for each other ends: whatever is launched behind starts only when every block of this launch has begun.
// Reduction order of a logit, a function of K alone: an eighth's eighth by 32 elements ascending (two mma each), then the eight sums of a
// block ascending, then the eight blocks' ascending. The norm's sum of squares is stream.cuh's. No other row has a say in either.
#include "backend.h"
#include "router.cuh"
#include "stream.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kBlocks = kSegments, kWarps = stream::kRouteWarps;     // blocks a cluster, a segment of K each; warps a block
constexpr int kRows = stream::kRouteRows, kTiles = kRows / kTileRows;  // experts a cluster
constexpr int kUnit = stream::kRouteUnit, kAhead = 4;                  // elements of K a step; steps whose weights a lane holds at a time
constexpr int kMostRows = stream::kRouteColumns;                       // of the step, for one set of clusters
constexpr int kFewRows = 4;                                            // whose squares every block adds up itself

struct RouteParams {
  const float* x;
  int ldx, k;
  const float* norm_w;
  float eps;
  const uint16_t* w;  // [experts, k]
  float* logits;
  unsigned* meeting;  // for each 64 rows: blocks whose logits are written, blocks that have left; zeros between launches
  int stride;      // bytes between staged rows
  const int32_t* n_rows;
  RouterArgs choice;
};

// NT: tiles of eight rows.
template <int NT>
__global__ __launch_bounds__(kWarps * kWarp) void route_kernel(const __grid_constant__ RouteParams p) {
  constexpr int COLUMNS = NT * kColumns;
  extern __shared__ __align__(128) uint8_t smem[];
  float* const partial = reinterpret_cast<float*>(smem);              // [warp][row][column]
  float* const sums = partial + kWarps * kRows * COLUMNS;             // [row][column]: of this block
  uint8_t* const staged = reinterpret_cast<uint8_t*>(sums + kRows * COLUMNS);
  __shared__ float squares[COLUMNS < kFewRows * kSegments ? kFewRows * kSegments : COLUMNS], inverse[COLUMNS];

  const RouterArgs& a = p.choice;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int rank = cluster_rank<kBlocks>(), first_row = static_cast<int>(blockIdx.x) / kBlocks * kRows;
  const int units = (p.k + kUnit - 1) / kUnit, block_first = segment_begin(rank, units), block_units = segment_begin(rank + 1, units) - block_first;
  const int mine = block_first + segment_begin(warp, block_units), steps = block_first + segment_begin(warp + 1, block_units) - mine;

  // Lane (g, t) holds elements 8t..8t+7 of a unit, of expert g and of the one eight below; past K zeros, past the last expert the last.
  uint4 held[kAhead][kTiles][2];
  const auto ask = [&](int from) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int at = (mine + from + s) * kUnit + lane % 4 * 8;
      const bool there = from + s < steps && at < p.k;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = min(first_row + tile * kTileRows + r * 8 + lane / 4, a.experts - 1);
          const uint4* from_row = reinterpret_cast<const uint4*>(p.w + static_cast<size_t>(row) * p.k + at);
          held[s][tile][r] = there ? __ldg(from_row) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  ask(0);

  wait_for_previous();
  const int m0 = blockIdx.y * kMostRows, max_rows = min(a.max_rows - m0, kMostRows);
  const int rows = min(active_rows(p.n_rows, a.max_rows) - m0, kMostRows);
  if (m0 > 0 && rows <= 0) return;  // the whole cluster alike
  const float* x = p.x + static_cast<size_t>(m0) * p.ldx;
  if (max_rows <= kFewRows) {  // every block for itself: the same sums without waiting for the others
    square_rows<kSegments>(squares, x, p.ldx, max_rows, p.k, kUnit, 0);
    __syncthreads();
    inverse_rows<1, kSegments>(inverse, squares, max_rows, p.k, p.eps);
  } else {
    square_rows<1>(squares, x, p.ldx, max_rows, p.k, kUnit, rank);
    inverse_rows<kBlocks, 1>(inverse, squares, max_rows, p.k, p.eps);
  }
  stage_normed_rows(staged, p.stride, x, p.ldx, max_rows, COLUMNS, p.k, block_first * kUnit, block_units * kUnit, p.norm_w, inverse);
  __syncthreads();

  float acc[kTiles][NT][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) acc[tile][nt][0] = acc[tile][nt][1] = acc[tile][nt][2] = acc[tile][nt][3] = 0.f;
  const uint32_t b_row = shared_address(staged) + (lane / 4) * p.stride + (mine - block_first) * (kUnit * 2) + lane % 4 * 16;
  for (int step = 0; step < steps; step += kAhead) {
    if (step > 0) ask(step);
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (step + s >= steps) break;
      uint32_t low[kTiles][4], high[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint4 w = in_order(held[s][tile][r]);
          low[tile][r] = w.x, low[tile][r + 2] = w.y, high[tile][r] = w.z, high[tile][r + 2] = w.w;
        }
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint4 b = load_shared16(b_row + nt * kColumns * p.stride + (step + s) * (kUnit * 2));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          multiply_add(acc[tile][nt], low[tile], b.x, b.y, acc[tile][nt]);
          multiply_add(acc[tile][nt], high[tile], b.z, b.w, acc[tile][nt]);
        }
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float* to = partial + (warp * kRows + tile * kTileRows + lane / 4) * COLUMNS + nt * kColumns + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) = make_float2(acc[tile][nt][0], acc[tile][nt][1]);
      *reinterpret_cast<float2*>(to + 8 * COLUMNS) = make_float2(acc[tile][nt][2], acc[tile][nt][3]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * COLUMNS; i += kWarps * kWarp) {
    float sum = partial[i];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sum = __fadd_rn(sum, partial[w * kRows * COLUMNS + i]);
    sums[i] = sum;
  }
  cluster_arrive<kBlocks>();
  cluster_wait<kBlocks>();
  constexpr int SHARE = kRows / kBlocks;  // experts whose logits this block writes
  for (int i = threadIdx.x; i < SHARE * rows; i += kWarps * kWarp) {
    const int row = rank * SHARE + i % SHARE, m = i / SHARE;
    float part[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) part[b] = load_cluster4<kBlocks>(shared_address(sums + row * COLUMNS + m), b);
#pragma unroll
    for (int b = 1; b < kBlocks; ++b) part[0] = __fadd_rn(part[0], part[b]);
    if (first_row + row < a.experts) p.logits[static_cast<size_t>(m0 + m) * a.experts + first_row + row] = part[0];
  }
  cluster_arrive<kBlocks>();

  unsigned* const written = p.meeting + 2 * blockIdx.y;
  unsigned* const left = written + 1;
  __threadfence();
  cluster_wait<kBlocks>();  // the others have read this block's sums, where the choice works
  __syncthreads();
  const int chooses = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);  // the rows go to the first warps of all blocks first
  if (threadIdx.x == 0) {
    atomicAdd(written, 1u);
    if (static_cast<int>(blockIdx.x) < rows) {
      while (*reinterpret_cast<volatile unsigned*>(written) < gridDim.x) {
      }
      __threadfence();
    }
    if (atomicAdd(left, 1u) == gridDim.x - 1) *written = 0, *left = 0;
  }
  __syncthreads();
  float* const shared = reinterpret_cast<float*>(smem) + warp * (2 * a.experts + 2 * a.n_group + a.top_k);
  for (int m = chooses; m < rows; m += kWarps * static_cast<int>(gridDim.x)) {
    choose_experts(a, m0 + m, shared);
    __syncwarp();
  }
}

using Kernel = void (*)(RouteParams);

}  // namespace

bool CudaBackend::route_on_tensor_cores(const LinearArgs& l, const RouterArgs& a) {
  const int k = l.w[0].k;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (l.numerics != Numerics::kBf16 || l.w[0].kind != WeightKind::kBf16 || l.norm_w == nullptr) return false;
  if (!aligned(l.x) || l.ldx % 4 != 0 || !aligned(l.norm_w) || !aligned(l.w[0].data) || l.ldo[0] != a.experts) return false;
  const size_t words = stream::choice_words(a.experts, a.n_group, a.top_k);
  if (!stream::serves_route(device_shape_, k, a.experts, words)) return false;
  const int clusters = stream::route_clusters(a.experts);
  const size_t widest = stream::route_shared(k, kMostRows, words);
  if (resident_clusters(reinterpret_cast<const void*>(&route_kernel<8>), "route", kBlocks, kWarps * kWarp, widest) < clusters) return false;
  const int groups = (a.max_rows + kMostRows - 1) / kMostRows, nt = a.max_rows <= 8 ? 1 : a.max_rows <= 16 ? 2 : 8;
  if (groups > kMostGroups) throw Error("RequestError", "route: " + std::to_string(a.max_rows) + " rows in a step");
  const size_t shared = stream::route_shared(k, nt * kColumns, words);
  const int stride = stream::staged_stride(stream::staged_length(k, kBlocks, kUnit));
  const Kernel kernel = nt == 1 ? route_kernel<1> : nt == 2 ? route_kernel<2> : route_kernel<8>;
  reserve_shared(reinterpret_cast<const void*>(kernel), "route", shared);
  const RouteParams p{static_cast<const float*>(l.x), l.ldx, k, l.norm_w, l.eps, static_cast<const uint16_t*>(l.w[0].data),
                      static_cast<float*>(l.out[0]), meeting_, stride, l.n_rows, a};
  launch_clusters("route", kernel, kBlocks, dim3(static_cast<unsigned>(clusters * kBlocks), static_cast<unsigned>(groups)), kWarps * kWarp, shared, p);
  ++(*counting_)["linear_bf16"];
  ++(*counting_)["router"];
  return true;
}

void CudaBackend::route(const LinearArgs& product, const RouterArgs& choice) {
  if (choice.max_rows <= 0) return;
  if (!route_on_tensor_cores(product, choice)) Backend::route(product, choice);
}

}  // namespace kdtree
