// moe: the chosen experts of every row and the shared expert, in two launches driven by the expert ids.
//
//   gate_up: a block takes one distinct expert and eight of its inner outputs for all rows that chose it (a warp: one gate row and
//     one up row), so an expert's weights are read once for up to TM rows; further blocks do the shared expert. Norm in the prologue.
//   down: a block takes one row and a few of its outputs; warps take (choice, outputs), and the products are added in the order of
//     choice, then the shared expert's, then the residual.
// Bytes: the distinct experts' gate and up once (TM rows at a time), down once a row, neighbours sharing it through L2.
// Bound by weight bytes. Reduction order: tile.cuh with K = D for gate and up, K = I for down; no other row has a say.
#include "backend.h"
#include "tile.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kExpertWords = 32;  // 32-bit words of the set of distinct experts: at most 1024 experts
constexpr int kMaxExperts = 32 * kExpertWords;

struct GateUpParams {
  const float* x;
  int dim;
  const float* norm_w;
  float eps;
  const int32_t* ids;
  int top_k;
  Weight gate, up, shared_gate, shared_up;
  void* act;
  void* shared_act;
  int max_rows;
  const int32_t* n_rows;
  int tiles;                        // blocks an expert
  int shared_tiles, shared_blocks;  // blocks of the shared expert: a row tile, and all of them
};

// The slot-th distinct expert of the step in ascending order, or -1. Called by one warp; set: kExpertWords of shared memory.
__device__ int distinct_expert(const int32_t* ids, int count, int slot, uint32_t* set) {
  const int lane = threadIdx.x % kWarp;
  set[lane] = 0;
  __syncwarp();
  for (int i = lane; i < count; i += kWarp) atomicOr(set + ids[i] / 32, 1u << (ids[i] % 32));
  __syncwarp();
  const uint32_t word = set[lane];
  const int mine = __popc(word);
  int upto = mine;
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int below = __shfl_up_sync(kAll, upto, d);
    if (lane >= d) upto += below;
  }
  const bool here = upto - mine <= slot && slot < upto;
  uint32_t rest = word;
  for (int below = upto - mine; here && below < slot; ++below) rest &= rest - 1;  // drops the lowest bit
  const unsigned owner = __ballot_sync(kAll, here);
  if (owner == 0) return -1;
  return __shfl_sync(kAll, lane * 32 + __ffs(static_cast<int>(rest)) - 1, __ffs(static_cast<int>(owner)) - 1);
}

// Lists the places row*top_k + choice where `expert` was chosen, rows ascending; returns how many. Called by one warp.
__device__ int places_of(const int32_t* ids, int n_rows, int top_k, int expert, int32_t* list) {
  const int lane = threadIdx.x % kWarp;
  int n = 0;
  for (int base = 0; base < n_rows; base += kWarp) {
    const int m = base + lane;
    int place = -1;
#pragma unroll 4
    for (int j = 0; j < top_k; ++j) {
      if (m < n_rows && ids[m * top_k + j] == expert) place = m * top_k + j;
    }
    const unsigned chosen = __ballot_sync(kAll, place >= 0);
    if (place >= 0) list[n + __popc(chosen & ((1u << lane) - 1))] = place;
    n += __popc(chosen);
  }
  return n;
}

// silu(gate)*up of the row that is this lane's.
template <WeightKind KIND, int VEC, int TM, Numerics NUM>
__device__ __forceinline__ float activation(const PairTile<KIND, VEC, TM, NUM>& tile, float eps, const float (*squares)[TM]) {
  const float2 y = tile.of_lane();
  if (NUM == Numerics::kBf16) return __fmul_rn(silu(y.x), y.y);
  const float inverse = tile.inverse(tile.lane, eps, squares);
  return __fmul_rn(silu(__fmul_rn(y.x, inverse)), __fmul_rn(y.y, inverse));
}

template <WeightKind KIND, int VEC, int TM, Numerics NUM>
__global__ __launch_bounds__(kTileThreads, 1) void gate_up_kernel(const __grid_constant__ GateUpParams p) {
  extern __shared__ __align__(16) float xs[];
  __shared__ float squares[kTileWarps][TM];
  __shared__ uint32_t set[kExpertWords];
  __shared__ int found, length;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float* x[TM];

  if (static_cast<int>(blockIdx.x) < p.shared_blocks) {
    const int m0 = static_cast<int>(blockIdx.x) / p.shared_tiles * TM;
    const int i = static_cast<int>(blockIdx.x) % p.shared_tiles * kTileWarps + warp, row = min(i, p.shared_gate.n - 1);
    PairTile<kPlain<NUM>, VEC, TM, NUM> tile(weight_row<kPlain<NUM>>(p.shared_gate.data, nullptr, row, p.dim),
                                             weight_row<kPlain<NUM>>(p.shared_up.data, nullptr, row, p.dim), p.dim);
    wait_for_previous();
    const int n_rows = active_rows(p.n_rows, p.max_rows);
    if (m0 > 0 && m0 >= n_rows) return;
#pragma unroll
    for (int r = 0; r < TM; ++r) x[r] = p.x + static_cast<size_t>(min(m0 + r, p.max_rows - 1)) * p.dim;
    tile.run(x, p.norm_w, p.eps, xs, squares);
    const int m = m0 + lane;
    if (lane < TM && m < n_rows && i < p.shared_gate.n)
      static_cast<Held<NUM>*>(p.shared_act)[static_cast<size_t>(m) * p.shared_gate.n + i] =
          to_held<Held<NUM>>(activation(tile, p.eps, squares));
    return;
  }

  wait_for_previous();
  const int n_rows = active_rows(p.n_rows, p.max_rows);
  const int slot = (static_cast<int>(blockIdx.x) - p.shared_blocks) / p.tiles;
  const int i = (static_cast<int>(blockIdx.x) - p.shared_blocks) % p.tiles * kTileWarps + warp;
  if (slot >= n_rows * p.top_k) return;
  int expert, rows;
  __shared__ int32_t only;
  int32_t* list = &only;
  if constexpr (TM == 1) {  // one row: its choices are distinct, slot and choice are the same
    expert = p.ids[slot];
    if (threadIdx.x == 0) only = slot;
    rows = 1;
    __syncthreads();
  } else {
    list = reinterpret_cast<int32_t*>(xs + kTileFloats);  // [max_rows], after the tile
    if (warp == 0) {
      const int chosen = distinct_expert(p.ids, n_rows * p.top_k, slot, set);
      const int n = chosen < 0 ? 0 : places_of(p.ids, n_rows, p.top_k, chosen, list);
      if (lane == 0) found = chosen, length = n;
    }
    __syncthreads();
    expert = found, rows = length;
    if (expert < 0) return;
  }
  KD_ASSERT(expert >= 0 && expert < p.gate.e, "moe: an expert id out of range");
  const size_t row = static_cast<size_t>(expert) * p.gate.n + min(i, p.gate.n - 1);
  for (int first = 0; first < rows; first += TM) {
    PairTile<KIND, VEC, TM, NUM> tile(weight_row<KIND>(p.gate.data, p.gate.scale, row, p.dim),
                                      weight_row<KIND>(p.up.data, p.up.scale, row, p.dim), p.dim);
    if (first > 0) __syncthreads();  // everyone has read the tile before and its sums of squares
#pragma unroll
    for (int r = 0; r < TM; ++r) x[r] = p.x + static_cast<size_t>(list[min(first + r, rows - 1)] / p.top_k) * p.dim;
    tile.run(x, p.norm_w, p.eps, xs, squares);
    const int r = first + lane;
    if (lane < TM && r < rows && i < p.gate.n)
      static_cast<Held<NUM>*>(p.act)[static_cast<size_t>(list[r]) * p.gate.n + i] =
          to_held<Held<NUM>>(activation(tile, p.eps, squares));
  }
}

struct DownParams {
  const int32_t* ids;
  const float* weights;
  int top_k, dim;
  Weight down, shared_down;
  const void* act;
  const void* shared_act;
  float* out;
  int max_rows;
  const int32_t* n_rows;
};

// Products of COLUMNS consecutive weight rows with one activation row; every lane gets them.
template <WeightKind KIND, int VEC, int COLUMNS, class X>
__device__ __forceinline__ void row_products(float (&acc)[COLUMNS], const Weight& w, size_t first, int last, const X* x,
                                             int lane) {
  using Piece = Fragment<KIND, VEC>;
  const int k = w.k;
  WeightRow row[COLUMNS];
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    row[c] = weight_row<KIND>(w.data, w.scale, first + min(c, last), k);
    acc[c] = 0.f;
  }
  for (int k0 = 0; k0 < k; k0 += kUnroll * Piece::kStep) {
    Piece piece[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) piece[c].load(row[c], k0, k, lane);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (k0 + u * Piece::kStep >= k) break;
      float v[Piece::kLane];
      const int at = k0 + u * Piece::kStep + lane * Piece::kLane;
      if (VEC == 4 ? at + Piece::kLane <= k : false) {
        load_lane(v, x + at);
      } else {
#pragma unroll
        for (int e = 0; e < Piece::kLane; ++e) v[e] = at + e < k ? from_held(x[at + e]) : 0.f;
      }
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) acc[c] = piece[c].fold(acc[c], u, v);
    }
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) acc[c] = warp_sum(acc[c]);
}

// OUTPUTS outputs of one row a block, COLUMNS of them a warp at a time.
template <WeightKind KIND, int VEC, int OUTPUTS, int COLUMNS, Numerics NUM>
__global__ __launch_bounds__(kTileThreads, 1) void down_kernel(const __grid_constant__ DownParams p) {
  extern __shared__ float product[];  // [top_k + 1, OUTPUTS]
  wait_for_previous();
  const int m = blockIdx.x, d0 = blockIdx.y * OUTPUTS, lane = threadIdx.x % kWarp;
  if (m > 0 && m >= active_rows(p.n_rows, p.max_rows)) return;
  const bool shared = p.shared_down.n > 0;
  constexpr int kGroups = OUTPUTS / COLUMNS;
  const int units = (p.top_k + (shared ? 1 : 0)) * kGroups;
  for (int unit = threadIdx.x / kWarp; unit < units; unit += kTileWarps) {
    const int j = unit / kGroups, offset = unit % kGroups * COLUMNS;
    const int d = min(d0 + offset, p.dim - 1), last = p.dim - 1 - d;
    float acc[COLUMNS];
    if (j < p.top_k) {
      const int place = m * p.top_k + j, expert = p.ids[place];
      KD_ASSERT(expert >= 0 && expert < p.down.e, "moe: an expert id out of range");
      row_products<KIND, VEC, COLUMNS>(acc, p.down, static_cast<size_t>(expert) * p.dim + d, last,
                                       static_cast<const Held<NUM>*>(p.act) + static_cast<size_t>(place) * p.down.k, lane);
    } else {
      row_products<kPlain<NUM>, VEC, COLUMNS>(
          acc, p.shared_down, d, last, static_cast<const Held<NUM>*>(p.shared_act) + static_cast<size_t>(m) * p.shared_down.k, lane);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (lane == c) product[j * OUTPUTS + offset + c] = acc[c];
    }
  }
  __syncthreads();
  const int d = d0 + threadIdx.x;
  if (threadIdx.x >= OUTPUTS || d >= p.dim) return;
  float sum = 0.f;
  for (int j = 0; j < p.top_k; ++j) sum = __fmaf_rn(p.weights[m * p.top_k + j], product[j * OUTPUTS + threadIdx.x], sum);
  if (shared) sum = __fadd_rn(sum, product[p.top_k * OUTPUTS + threadIdx.x]);
  float* out = p.out + static_cast<size_t>(m) * p.dim + d;
  *out = __fadd_rn(*out, sum);
}

using GateUp = void (*)(GateUpParams);
using Down = void (*)(DownParams);

template <WeightKind KIND, int VEC, Numerics NUM>
GateUp gate_up_by_rows(int tm) {
  return tm == 1   ? gate_up_kernel<KIND, VEC, 1, NUM>
         : tm == 2 ? gate_up_kernel<KIND, VEC, 2, NUM>
                   : gate_up_kernel<KIND, VEC, 4, NUM>;
}

template <WeightKind KIND, Numerics NUM>
GateUp gate_up_for(bool vector, int tm) {
  return vector ? gate_up_by_rows<KIND, 4, NUM>(tm) : gate_up_by_rows<KIND, 1, NUM>(tm);
}

template <WeightKind KIND, Numerics NUM>
Down down_for(bool vector, bool wide) {
  if (vector) return wide ? down_kernel<KIND, 4, 8, 4, NUM> : down_kernel<KIND, 4, 2, 2, NUM>;
  return wide ? down_kernel<KIND, 1, 8, 4, NUM> : down_kernel<KIND, 1, 2, 2, NUM>;
}

}  // namespace

void CudaBackend::moe(const MoeArgs& a) { moe(a, false, nullptr); }

void CudaBackend::moe(const MoeArgs& a, bool routed, const RouterArgs* choice) {
  if (a.max_rows <= 0) return;
  if (a.gate.e > kMaxExperts) {
    throw Error("ConfigError", name_ + ": n_routed_experts " + std::to_string(a.gate.e) + " is above the " +
                                   std::to_string(kMaxExperts) + " that moe is built for");
  }
  const bool int4 = a.gate.kind == WeightKind::kInt4, bf16 = a.numerics == Numerics::kBf16;
  const int tm = a.max_rows >= 3 ? 4 : a.max_rows, shared_n = a.shared_gate.n;
  const int slots = a.max_rows * a.top_k < a.gate.e ? a.max_rows * a.top_k : a.gate.e;

  GateUpParams g{};
  g.x = a.x, g.dim = a.dim, g.norm_w = a.norm_w, g.eps = a.eps, g.ids = a.ids, g.top_k = a.top_k;
  g.gate = a.gate, g.up = a.up, g.shared_gate = a.shared_gate, g.shared_up = a.shared_up;
  g.act = a.act, g.shared_act = a.shared_act, g.max_rows = a.max_rows, g.n_rows = a.n_rows;
  g.tiles = (a.gate.n + kTileWarps - 1) / kTileWarps;
  g.shared_tiles = (shared_n + kTileWarps - 1) / kTileWarps;
  g.shared_blocks = g.shared_tiles * ((a.max_rows + tm - 1) / tm);
  const bool plain = vector_ready(a.x, a.dim) && vector_ready(a.norm_w, a.dim) && vector_ready(a.shared_gate.data, a.dim) &&
                     vector_ready(a.shared_up.data, a.dim) &&
                     (int4 || (vector_ready(a.gate.data, a.dim) && vector_ready(a.up.data, a.dim)));
  const GateUp gate_up = int4 && bf16 ? gate_up_for<WeightKind::kInt4, Numerics::kBf16>(plain, tm)
                         : int4       ? gate_up_for<WeightKind::kInt4, Numerics::kF32>(plain, tm)
                         : bf16       ? gate_up_for<WeightKind::kBf16, Numerics::kBf16>(plain, tm)
                                      : gate_up_for<WeightKind::kF32, Numerics::kF32>(plain, tm);
  const size_t tile = tile_shared_bytes(tm, a.dim, WeightKind::kInt4);  // the wider of the two kinds a block may be
  const size_t shared = tm == 1 ? tile : sizeof(float) * kTileFloats + sizeof(int32_t) * static_cast<size_t>(a.max_rows);
  reserve_shared(reinterpret_cast<const void*>(gate_up), "experts", shared);
  if (a.phase != MoePhase::kDown && !gate_up_stream(a, routed, choice)) {
    const char* name = int4 && bf16 ? "experts_int4_bf16" : int4 ? "experts_int4" : bf16 ? "experts_bf16" : "experts_f32";
    launch(name, gate_up, dim3(g.shared_blocks + slots * g.tiles), kTileThreads, shared, g);
  }
  if (a.phase == MoePhase::kGateUp || down_stream(a, choice)) return;
  if (a.gathered != nullptr) unshard(acts_of(a));

  DownParams d{a.ids, a.weights, a.top_k, a.down.n, a.down, a.shared_down, a.act, a.shared_act, a.out, a.max_rows, a.n_rows};
  const bool vector =
      vector_ready(a.act, a.down.k) && (int4 || vector_ready(a.down.data, a.down.k)) &&
      (shared_n == 0 || (vector_ready(a.shared_act, a.shared_down.k) && vector_ready(a.shared_down.data, a.shared_down.k)));
  const bool wide = a.dim >= 1024;  // small models: more blocks and less work in each
  const Down down = int4 && bf16 ? down_for<WeightKind::kInt4, Numerics::kBf16>(vector, wide)
                    : int4       ? down_for<WeightKind::kInt4, Numerics::kF32>(vector, wide)
                    : bf16       ? down_for<WeightKind::kBf16, Numerics::kBf16>(vector, wide)
                                 : down_for<WeightKind::kF32, Numerics::kF32>(vector, wide);
  const int outputs = wide ? 8 : 2;
  const char* name = int4 && bf16 ? "experts_int4_bf16_down" : int4 ? "experts_int4_down" : bf16 ? "experts_bf16_down" : "experts_f32_down";
  launch(name, down, dim3(a.max_rows, (a.down.n + outputs - 1) / outputs), kTileThreads,
         sizeof(float) * (a.top_k + 1) * outputs, d);
}

}  // namespace kdtree
