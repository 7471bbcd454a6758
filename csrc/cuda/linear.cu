// linear: y = w x for up to two weights that share the input, with the input's norm and the epilogue in the same launch.
//
// Bytes: N*K weights (4 bytes, 2 for bf16, 1/2 + 1/16 for int4) once a tile of 8 rows; flops 2*M*N*K. Bound by weight bytes up to about
// M = 8. Reduction order: tile.cuh, a function of K alone; the norm's 1/rms multiplies the finished sum.
#include "backend.h"
#include "tile.cuh"

namespace kdtree {
namespace {

using namespace cuda;

struct LinearParams {
  const void* x;
  int ldx, k;
  const float* norm_w;
  float eps;
  const void* data[2];
  const uint16_t* scale[2];
  int n[2];
  void* out[2];
  int ldo[2];
  Epilogue epilogue;
  int max_rows;
  const int32_t* n_rows;
};

// Which output a warp's column is: part and row of that part's weight. SiLU pairs gate and up rows; otherwise the parts follow each other.
struct Column {
  int part, row;
  bool there;
};

__device__ __forceinline__ Column column(const LinearParams& p, int pair, int i) {
  if (p.epilogue == Epilogue::kSiluMul) return {i, min(pair, p.n[0] - 1), pair < p.n[0]};
  const int c = 2 * pair + i, total = p.n[0] + p.n[1];
  const int clamped = min(c, total - 1);
  return clamped < p.n[0] ? Column{0, clamped, c < total} : Column{1, clamped - p.n[0], c < total};
}

// The block's rows of x, of type X. Rows that do not count harm nobody.
template <class X, int TM, class Tile>
__device__ __forceinline__ void multiply(Tile& tile, const LinearParams& p, int m0, float* xs, float (*squares)[TM]) {
  const X* x[TM];
#pragma unroll
  for (int r = 0; r < TM; ++r) x[r] = static_cast<const X*>(p.x) + static_cast<size_t>(min(m0 + r, p.max_rows - 1)) * p.ldx;
  tile.run(x, p.norm_w, p.eps, xs, squares);
}

template <WeightKind KIND, int VEC, int TM, Numerics NUM>
__global__ __launch_bounds__(kTileThreads, 1) void linear_kernel(const __grid_constant__ LinearParams p) {
  extern __shared__ __align__(16) float xs[];
  __shared__ float squares[kTileWarps][TM];
  const int lane = threadIdx.x % kWarp, pair = blockIdx.x * kTileWarps + threadIdx.x / kWarp;
  const Column c0 = column(p, pair, 0), c1 = column(p, pair, 1);
  PairTile<KIND, VEC, TM, NUM> tile(weight_row<KIND>(p.data[c0.part], p.scale[c0.part], c0.row, p.k),
                                    weight_row<KIND>(p.data[c1.part], p.scale[c1.part], c1.row, p.k), p.k);
  wait_for_previous();
  const int m0 = blockIdx.y * TM, n_rows = active_rows(p.n_rows, p.max_rows);
  if (m0 > 0 && m0 >= n_rows) return;  // tile 0 always has a row, and need not wait for the count to arrive
  const int m = m0 + lane;
  const bool mine = lane < TM && m < n_rows;
  const size_t at0 = static_cast<size_t>(m) * p.ldo[c0.part] + c0.row, at1 = static_cast<size_t>(m) * p.ldo[c1.part] + c1.row;
  float *o0 = static_cast<float*>(p.out[c0.part]) + at0, *o1 = static_cast<float*>(p.out[c1.part]) + at1;
  float2 before = make_float2(0.f, 0.f);
  if (p.epilogue == Epilogue::kResidual && mine) {  // in flight while the product is formed
    before = make_float2(c0.there ? *o0 : 0.f, c1.there ? *o1 : 0.f);
  }
  if (NUM == Numerics::kBf16 && p.norm_w == nullptr) {
    multiply<Held<NUM>>(tile, p, m0, xs, squares);
  } else {
    multiply<float>(tile, p, m0, xs, squares);
  }

  if (!mine) return;
  float2 y = tile.of_lane();
  if (NUM == Numerics::kF32 && p.norm_w != nullptr) {
    const float inverse = tile.inverse(lane, p.eps, squares);
    y = make_float2(__fmul_rn(y.x, inverse), __fmul_rn(y.y, inverse));
  }
  if (p.epilogue == Epilogue::kSiluMul) {
    if (c0.there) static_cast<Held<NUM>*>(p.out[0])[at0] = to_held<Held<NUM>>(__fmul_rn(silu(y.x), y.y));
  } else if (p.epilogue == Epilogue::kResidual) {
    if (c0.there) *o0 = __fadd_rn(before.x, y.x);
    if (c1.there) *o1 = __fadd_rn(before.y, y.y);
  } else {
    if (c0.there) *o0 = y.x;
    if (c1.there) *o1 = y.y;
  }
}

using Kernel = void (*)(LinearParams);

template <WeightKind KIND, int VEC, Numerics NUM>
Kernel by_rows(int tm) {
  switch (tm) {
    case 1: return linear_kernel<KIND, VEC, 1, NUM>;
    case 2: return linear_kernel<KIND, VEC, 2, NUM>;
    case 4: return linear_kernel<KIND, VEC, 4, NUM>;
    default: return linear_kernel<KIND, VEC, 8, NUM>;
  }
}

template <WeightKind KIND, Numerics NUM>
Kernel kernel_for(bool vector, int tm) {
  return vector ? by_rows<KIND, 4, NUM>(tm) : by_rows<KIND, 1, NUM>(tm);
}

}  // namespace

size_t CudaBackend::linear_scratch(int k, int max_rows) const { return stream::wide_normed(device_shape_, k, max_rows); }

void CudaBackend::linear(const LinearArgs& a) {
  if (a.max_rows <= 0) return;
  const bool paired = a.epilogue == Epilogue::kSiluMul;
  const int k = a.w[0].k;
  if (a.parts < 1 || a.parts > 2 || (paired && (a.parts != 2 || a.w[0].n != a.w[1].n)) ||
      (a.parts == 2 && (a.w[1].k != k || a.w[1].kind != a.w[0].kind))) {
    throw Error("RequestError", "linear: two weights must share kind and K, and for silu N: got n " + std::to_string(a.w[0].n) +
                                    " and " + std::to_string(a.w[1].n) + ", k " + std::to_string(k) + " and " +
                                    std::to_string(a.w[1].k));
  }
  if (linear_stream(a)) return;
  LinearParams p{};
  p.x = a.x, p.ldx = a.ldx, p.k = k, p.norm_w = a.norm_w, p.eps = a.eps, p.epilogue = a.epilogue, p.max_rows = a.max_rows,
  p.n_rows = a.n_rows;
  bool vector = vector_ready(a.x, k) && a.ldx % 4 == 0 && vector_ready(a.norm_w, k);
  const bool int4 = a.w[0].kind == WeightKind::kInt4, bf16 = a.numerics == Numerics::kBf16;
  for (int i = 0; i < 2; ++i) {
    const int j = i < a.parts ? i : 0;
    p.data[i] = a.w[j].data, p.scale[i] = a.w[j].scale, p.n[i] = i < a.parts ? a.w[i].n : 0;
    p.out[i] = a.out[paired ? 0 : j], p.ldo[i] = a.ldo[paired ? 0 : j];
    vector = vector && (int4 || vector_ready(p.data[i], k));
  }
  const int tm = a.max_rows >= 5 ? 8 : a.max_rows >= 3 ? 4 : a.max_rows;
  const Kernel kernel = int4 && bf16 ? kernel_for<WeightKind::kInt4, Numerics::kBf16>(vector, tm)
                        : int4       ? kernel_for<WeightKind::kInt4, Numerics::kF32>(vector, tm)
                        : bf16       ? kernel_for<WeightKind::kBf16, Numerics::kBf16>(vector, tm)
                                     : kernel_for<WeightKind::kF32, Numerics::kF32>(vector, tm);
  const int pairs = paired ? p.n[0] : (p.n[0] + p.n[1] + 1) / 2;
  const dim3 grid((pairs + kTileWarps - 1) / kTileWarps, (a.max_rows + tm - 1) / tm);
  const char* name = int4 && bf16 ? "linear_int4_bf16" : int4 ? "linear_int4" : bf16 ? "linear_bf16" : "linear_f32";
  launch(name, kernel, grid, kTileThreads, tile_shared_bytes(tm, k, a.w[0].kind), p);
}

}  // namespace kdtree
