// mla_value: o[m,h,:] = W_UV[h] o_lat[m,h], the value half of kv_b. A block takes one head and up to sixteen of its outputs.
//
// Bytes: H*V*R weights once a tile of 8 rows; flops 2*M*H*V*R. Reduction order: tile.cuh with K = R.
#include "backend.h"
#include "mla_plan.h"
#include "tile.cuh"

namespace kdtree {
namespace {

using namespace cuda;

template <int VEC, int TM, Numerics NUM>
__global__ __launch_bounds__(kTileThreads, 1) void value_kernel(MlaDims dims, const Held<NUM>* o_lat, const void* kv_b,
                                                                Held<NUM>* o, int max_rows, const int32_t* count, int blocks_per_head) {
  extern __shared__ __align__(16) float xs[];
  const int lane = threadIdx.x % kWarp;
  const int head = blockIdx.x / blocks_per_head;
  const int v0 = 2 * ((blockIdx.x % blocks_per_head) * kTileWarps + threadIdx.x / kWarp);
  const size_t first = static_cast<size_t>(head) * (dims.nope + dims.v) + dims.nope;
  PairTile<kPlain<NUM>, VEC, TM, NUM> tile(
      weight_row<kPlain<NUM>>(kv_b, nullptr, first + min(v0, dims.v - 1), dims.rank),
      weight_row<kPlain<NUM>>(kv_b, nullptr, first + min(v0 + 1, dims.v - 1), dims.rank), dims.rank);
  wait_for_previous();
  const int m0 = blockIdx.y * TM, n_rows = active_rows(count, max_rows);
  if (m0 > 0 && m0 >= n_rows) return;
  const Held<NUM>* x[TM];
#pragma unroll
  for (int r = 0; r < TM; ++r) x[r] = o_lat + (static_cast<size_t>(min(m0 + r, max_rows - 1)) * dims.heads + head) * dims.rank;
  tile.run(x, nullptr, 0.f, xs, nullptr);
  if (lane >= TM || m0 + lane >= n_rows) return;
  const float2 y = tile.of_lane();
  Held<NUM>* out = o + (static_cast<size_t>(m0 + lane) * dims.heads + head) * dims.v + v0;
  if (v0 < dims.v) out[0] = to_held<Held<NUM>>(y.x);
  if (v0 + 1 < dims.v) out[1] = to_held<Held<NUM>>(y.y);
}

template <int VEC, Numerics NUM>
auto value_for(int tm) {
  switch (tm) {
    case 1: return value_kernel<VEC, 1, NUM>;
    case 2: return value_kernel<VEC, 2, NUM>;
    case 4: return value_kernel<VEC, 4, NUM>;
    default: return value_kernel<VEC, 8, NUM>;
  }
}

}  // namespace

void CudaBackend::mla_value(const MlaValueArgs& a) {
  if (a.max_rows <= 0) return;
  if (values_on_tensor_cores(a.dims, device_shape_.clusters)) {
    launch_values(a, nullptr);
    return;
  }
  const int tm = a.max_rows >= 5 ? 8 : a.max_rows >= 3 ? 4 : a.max_rows;
  const bool vector = vector_ready(a.o_lat, a.dims.rank) && vector_ready(a.kv_b.data, a.dims.rank);
  const int blocks_per_head = (a.dims.v + 2 * kTileWarps - 1) / (2 * kTileWarps);
  const dim3 grid(a.dims.heads * blocks_per_head, (a.max_rows + tm - 1) / tm);
  const size_t shared = tile_shared_bytes(tm, a.dims.rank, WeightKind::kF32);
  if (a.dims.numerics == Numerics::kBf16) {
    launch("mla_value_bf16", vector ? value_for<4, Numerics::kBf16>(tm) : value_for<1, Numerics::kBf16>(tm), grid, kTileThreads,
           shared, a.dims, static_cast<const uint16_t*>(a.o_lat), a.kv_b.data, static_cast<uint16_t*>(a.o), a.max_rows, a.n_rows,
           blocks_per_head);
  } else {
    launch("mla_value", vector ? value_for<4, Numerics::kF32>(tm) : value_for<1, Numerics::kF32>(tm), grid, kTileThreads, shared,
           a.dims, static_cast<const float*>(a.o_lat), a.kv_b.data, static_cast<float*>(a.o), a.max_rows, a.n_rows, blocks_per_head);
  }
}

}  // namespace kdtree
