// The router for bf16 activations in one launch: norm, product and choice; then the experts.
//
// Bytes: the router's weights once, E*K*2, asked for before the launch before has ended; flops 2*M*E*K on tensor cores. Bound by latency.
// A block takes one segment of K of 32 experts, which it holds in shared memory; a warp multiplies 16 with eight rows. Of more than 32 rows it takes 48, and a
// warp multiplies all of them with eight rows, which come to each block from L2. Of one or two rows every block norms its own; more are normed once, a block a
// row, in scratch, where gate and up find them too. The segments' sums meet in scratch (L2), where blocks that do nothing else wait for them, add up a row each
// and choose its experts. Gate and up in tiles, which run meanwhile, look for the ids where they are set word by word.
// Reduction order: stream.cuh, the same as linear's, with the norm's squares by segments of whole units of int4, as the experts' are.
#include <algorithm>

#include "backend.h"
#include "choice.cuh"
#include "moe_scratch.h"
#include "row_norm.cuh"
#include "stream.cuh"
#include "tickets.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = kChoiceThreads, kWarps = kThreads / kWarp;
constexpr int kOwnRows = stream::kOwnNorm;  // so many rows a block norms for itself
constexpr WeightKind kKind = WeightKind::kBf16;
// Of a multiprocessor's memory in percent: two blocks. What was carved out as shared memory for more of them, gate and up would find so,
// and with half of the cache from which they read many rows.
constexpr int kLittleShared = 28;
static_assert(kWarps == kSegments, "a warp a segment of the norm");

struct Params {
  const float* x;  // [M, k]
  int k;
  const float* norm_w;
  float eps;
  const void* weights;  // [experts, k]
  uint16_t* normed;     // [M, row_stride] in the multiplication's order
  int row_stride;
  int stride;     // bytes between staged rows
  float* parts;   // [kSegments, M, experts]
  float* logits;  // [M, experts]
  RouterArgs choice;
  Tickets* tickets;
  int choosing;  // blocks, the first ones
  unsigned* normed_rows;  // where gate and up, which multiply the shared expert meanwhile, count the rows that stand normed; or null
  int32_t* chosen;        // likewise [M, top_k] where they look for the ids, one more each; zero from before a row counts as normed until it is chosen for
};

// A segment's sums of an expert's logit.
struct LogitParts {
  float of[kSegments];
};

// Adds up the segments' sums of the block's rows and chooses their experts.
__device__ __forceinline__ void choose(const Params& p, void* memory, int blocks) {
  const int rows = p.choice.max_rows, experts = p.choice.experts;
  constexpr int HELD = 2;  // of a thread's biases, which no launch changes: behind the wait they would queue with what gate and up ask for
  float held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) held[i] = __ldg(p.choice.bias + min(static_cast<int>(threadIdx.x) + i * kThreads, experts - 1));
  wait_for_previous();
  int counted = load_early(&p.choice.state->n_rows);
  unsigned left = 0;
  const int first = blockIdx.x;
  int end = 0;
  // Row -1 is nobody's: chosen for without effect while the sums are made, for the code to be there. Fetched behind the weights that gate and up ask for, one
  // part after the other takes microseconds.
#pragma unroll 1
  for (int m = -1; m < end; m = m < 0 ? first : m + p.choosing) {
    __syncthreads();  // everyone is done with the row before
    choose_experts(p.choice, m, memory, [&](int e) {
      const float* const from = p.parts + static_cast<size_t>(m) * experts + e;
      LogitParts part{};
      if (m < 0) return part;
      // Volatile, for the compiler to leave the loads of two experts side by side, in front of what it does with the first.
#pragma unroll
      for (int s = 0; s < kSegments; ++s) asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(part.of[s]) : "l"(from + static_cast<size_t>(s) * rows * experts) : "memory");
      if (e == 0 && m == first) left = count_out(p.tickets, p.choosing);  // behind the loads, which so wait for nothing
      return part;
    }, [&](int e, const LogitParts& part) {
      if (m < 0) return e % kWarp == 0 ? static_cast<float>(e) : -1.f;  // of neighbours one is ahead, so that few reach the bound
      float sum = part.of[0];
#pragma unroll
      for (int s = 1; s < kSegments; ++s) sum = __fadd_rn(sum, part.of[s]);
      p.logits[static_cast<size_t>(m) * experts + e] = sum;
      return sum;
    }, [&](int e) { return e < kThreads ? held[0] : e < HELD * kThreads ? held[1] : __ldg(p.choice.bias + e); },
       [&](int j, int e) {
         if (p.chosen != nullptr) set_word(p.chosen + m * p.choice.top_k + j, e + 1);
       });
    if (m < 0) {
      await(p.tickets, blocks);
      asm volatile("" : "+r"(counted));  // whose load nothing before this waits for
      end = min(counted, rows);
    }
  }
  if (threadIdx.x == 0) {  // who asked for expert 0
    if (first >= end) left = count_out(p.tickets, p.choosing);
    put_back(p.tickets, left, p.choosing);
  }
}

// OWN: at most kOwnRows rows. A block has TILES of 16 experts, a warp SIDE of them side by side.
template <bool OWN, int TILES, int SIDE>
__global__ __launch_bounds__(kThreads, 2) void route_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float squares[kOwnRows * kSegments];
  const int block = static_cast<int>(blockIdx.x) - p.choosing, blocks = static_cast<int>(gridDim.x) - p.choosing;
  if (block < 0) return choose(p, smem, blocks);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, tile = block / kSegments * TILES, segment = block % kSegments;
  const int experts = p.choice.experts, rows = p.choice.max_rows;
  const int units = (p.k + kUnitK<kKind> - 1) / kUnitK<kKind>, unit = segment_begin(segment, units), steps = segment_begin(segment + 1, units) - unit;
  const uint32_t weights = shared_address(smem);
  // A warp a row, so that it reads what lies side by side; units stand as multiply_unit wants them.
  const int tile_bytes = (units / kSegments + 1) * kUnitBytes;
  for (int row = warp; row < TILES * kTileRows; row += kWarps) {
    const int expert = min(tile * kTileRows + row, experts - 1), pieces = p.k / 8;
    const uint32_t to = weights + row / kTileRows * tile_bytes;
    for (int i = lane; i < steps * 4; i += kWarp) {
      const int piece = unit * 4 + i;
      const uint8_t* const from = static_cast<const uint8_t*>(p.weights) + byte_at(0, expert, pieces, min(piece, pieces - 1), 16);
      copy16(to + i / 4 * kUnitBytes + piece_offset(row % kTileRows, i % 4), from, piece < pieces ? 16 : 0);
    }
  }
  copy_commit();

  uint8_t* const staged = smem + TILES * tile_bytes;
  if constexpr (OWN) {
    const RowNorm<stream::kMostRouted> norm(p.norm_w, p.k);
    wait_for_previous();
    const int begin = unit * kUnitK<kKind>, end = begin + steps * kUnitK<kKind>;
#pragma unroll 1
    for (int m = 0; m < rows; ++m) {
      norm(p.x + static_cast<size_t>(m) * p.k, p.eps, squares + m * kSegments, [&](int e, uint2 four) {
        if (e >= begin && e < end) *reinterpret_cast<uint2*>(staged + m * p.stride + (e - begin) * 2) = four;
      });
    }
  } else {
    int done = 0;
    // The others do not ask for the norm's weights: what they ask for next would wait for registers that these have yet to reach.
    if (block >= rows) {
      wait_for_previous();
    } else {
      const RowNorm<stream::kMostRouted> norm(p.norm_w, p.k);
      wait_for_previous();
      for (int m = block; m < rows; m += blocks, ++done) {
        if (p.chosen != nullptr && threadIdx.x < p.choice.top_k) set_word(p.chosen + m * p.choice.top_k + threadIdx.x, 0);
        norm(p.x + static_cast<size_t>(m) * p.k, p.eps, squares + done % kOwnRows * kSegments,
             [&](int e, uint2 four) { *reinterpret_cast<uint2*>(p.normed + static_cast<size_t>(m) * p.row_stride + e) = four; });
      }
    }
    meet_ahead(p.tickets, p.normed_rows, done, rows);
  }
  copy_wait<0>();
  __syncthreads();

  constexpr int AHEAD = OWN ? 7 : 14, GROUPS = TILES / SIDE;  // units of activations that are on their way at a time
  const LaneOffsets at(lane);
  for (int task = warp; task / GROUPS * kColumns < rows; task += kWarps) {
    const int first = task / GROUPS * kColumns, own_tile = task % GROUPS * SIDE;
    const uint32_t tile_weights = weights + own_tile * tile_bytes;
    const int row = min(first + lane / 4, rows - 1);  // columns without a row are the last one again, and written by nobody
    [[maybe_unused]] const uint16_t* const from = p.normed + static_cast<size_t>(row) * p.row_stride + unit * kUnitK<kKind> + lane % 4 * 8;
    [[maybe_unused]] const uint32_t own = shared_address(staged) + row * p.stride + lane % 4 * 16;
    const auto unit_of_row = [&](int i) {
      if constexpr (OWN) return load_shared16(own + i * 64);
      else return __ldcg(reinterpret_cast<const uint4*>(from + i * kUnitK<kKind>));
    };
    float acc[SIDE][1][1][4] = {};
    uint4 x[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < steps) x[i] = unit_of_row(i);
    }
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += AHEAD) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (begin + i >= steps) break;
#pragma unroll
        for (int t = 0; t < SIDE; ++t) {
          multiply_unit<kKind, 1, 1, 4>(acc[t], tile_weights + t * tile_bytes + (begin + i) * kUnitBytes, at, [&](int, int) { return x[i]; });
        }
        if (begin + i + AHEAD < steps) x[i] = unit_of_row(begin + i + AHEAD);  // at once, not when all of these are multiplied
      }
    }
#pragma unroll
    for (int t = 0; t < SIDE; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = first + lane % 4 * 2 + i % 2, e = (tile + own_tile + t) * kTileRows + lane / 4 + i / 2 * 8;
        if (m < rows && e < experts) __stcg(p.parts + (static_cast<size_t>(segment) * rows + m) * experts + e, acc[t][0][0][i]);
      }
    }
  }
  if (p.choosing > 0) arrive(p.tickets);
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool CudaBackend::route_stream(const LinearArgs& a, const RouterArgs& r, const MoeArgs& experts, bool chooses) {
  const Weight& w = a.w[0];
  const bool ready = moe_streams(experts) && a.numerics == Numerics::kBf16 && w.kind == kKind && a.parts == 1 && a.epilogue == Epilogue::kStore &&
                     w.k == experts.dim && w.n == r.experts && a.x == experts.x && a.ldx == w.k && a.norm_w == experts.norm_w && a.norm_w != nullptr &&
                     a.eps == experts.eps && a.out[0] == r.logits && a.ldo[0] == w.n && r.max_rows == a.max_rows && r.max_rows == experts.max_rows && aligned(w.data);
  if (!ready || !stream::serves_route(device_shape_, w.k, w.n, r.n_group, r.top_k)) return false;
  const int units = (w.k + kUnitK<kKind> - 1) / kUnitK<kKind>, tiles = (w.n + kTileRows - 1) / kTileRows;
  const MoeScratch scratch(experts.scratch, a.max_rows, r.top_k, experts.down.k, experts.dim, w.n);
  Params p{};
  p.x = static_cast<const float*>(a.x), p.k = w.k, p.norm_w = a.norm_w, p.eps = a.eps, p.weights = w.data;
  p.normed = scratch.normed, p.row_stride = stream::padded(w.k), p.stride = stream::staged_stride((units / kSegments + 1) * kUnitK<kKind>);
  p.parts = scratch.parts, p.logits = static_cast<float*>(a.out[0]), p.choice = r, p.tickets = tickets_;
  const bool own = a.max_rows <= kOwnRows;
  if (!own && tiles_serve(experts, false)) p.normed_rows = &unit_tickets(false)->ahead, p.chosen = chosen_;
  const int each = stream::route_tiles(a.max_rows), blocks = (tiles + each - 1) / each * kSegments;
  p.choosing = chooses ? stream::choosing(device_shape_, a.max_rows) : 0;
  constexpr int FEW = stream::route_tiles(stream::kFewRouted), MANY = stream::route_tiles(stream::kFewRouted + 1);
  const auto kernel = own ? &route_kernel<true, FEW, 1> : a.max_rows <= stream::kFewRouted ? &route_kernel<false, FEW, 1> : &route_kernel<false, MANY, MANY>;
  const size_t shared = stream::route_shared(w.k, a.max_rows, ChoiceMemory::bytes(w.n, r.n_group, r.top_k));
  reserve_shared(reinterpret_cast<const void*>(kernel), "router", shared);
  leave_cache(reinterpret_cast<const void*>(kernel), kLittleShared);
  launch("router", kernel, dim3(static_cast<unsigned>(p.choosing + blocks)), kThreads, shared, p);
  ++(*counting_)["router_stream"];
  return true;
}

void CudaBackend::routed_moe(const LinearArgs& product, const RouterArgs& choice, const MoeArgs& experts) {
  if (experts.max_rows <= 0) return;
  const bool later = rows_serve(experts) && stream::row_chooses(stream::row_variant(false), choice.experts, choice.n_group);
  if (!route_stream(product, choice, experts, !later)) {
    Backend::routed_moe(product, choice, experts);
    return;
  }
  moe(experts, true, later ? &choice : nullptr);
}

}  // namespace kdtree
