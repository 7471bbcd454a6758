// What the experts' kernels for bf16 activations have in common: parameters, and where an item's sums go.
//
// Bytes: the distinct experts' weights once for up to eight rows of each, the shared expert's likewise; flops 2*3*M*(top_k*I + S)*D on
// tensor cores. Bound by weight bytes: an expert rarely has more than eight rows.
// An item is 16 weight rows of one expert, for one turn of the rows that chose it: 16 outputs of down, or 8 gate rows and the 8 up rows
// that meet them, so that the two values of an output stand in one lane.
#pragma once
#include "combine.cuh"
#include "nibbles.cuh"
#include "routes.cuh"
#include "stream.cuh"

namespace kdtree {
namespace cuda {

struct StreamMoeParams {
  const float* x;  // gate and up that norm their rows themselves: residual stream
  const float* norm_w;
  float eps;
  const uint16_t* rows;   // rows in the multiplication's order, row_stride apart: of gate and up [M], unless normed on the way; of int4's down [M*top_k]
  int row_stride;         // elements, whole units
  int k, shared_k;        // inner dimension of the product
  bool bf16;              // the experts' weights are bf16, else int4; the shared expert's are bf16
  const void* data[2];    // gate and up, or down
  const uint16_t* scale[2];
  const void* shared[2];
  int n, shared_n;        // weight rows of an expert; shared_n 0: none
  int step;               // weight rows from an expert to the next
  const int32_t* ids;
  int top_k, experts;
  uint16_t* act;         // [M*top_k, n or k] bf16: written by gate and up, read by down of bf16
  uint16_t* shared_act;  // [M, S]
  uint16_t* ordered;     // gate and up: act once more, in the multiplication's order; or null
  float* products;       // down: [M*(top_k + 1), n], a row's choices, then the shared expert
  int max_rows;
  const int32_t* n_rows;
  CombineParams combine;  // down
};

// Keeps a lane's constant in its register: the compiler would rather compute it anew at every use.
__device__ __forceinline__ uint32_t kept(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// An item's sums over K for one column, its place among the rows' choices or, of the shared expert, its row, counted from row m0 on: of down,
// outputs `out` and `out` + 8; else gate's and up's of output `out`.
template <bool DOWN>
__device__ __forceinline__ void emit_column(const StreamMoeParams& p, int m0, bool of_shared, int place, int out, float low, float high) {
  const int n = of_shared ? p.shared_n : p.n;
  if constexpr (DOWN) {
    const int m = m0 + (of_shared ? place : place / p.top_k), choice = of_shared ? p.top_k : place % p.top_k;
    float* const to = p.products + (static_cast<size_t>(m) * (p.top_k + 1) + choice) * p.n + out;
    if (out < n) to[0] = low;
    if (out + 8 < n) to[8] = high;
  } else if (out < n) {
    const uint16_t y = round_bf16(__fmul_rn(silu(low), high));
    const size_t row = static_cast<size_t>(m0) * (of_shared ? 1 : p.top_k) + place;
    (of_shared ? p.shared_act : p.act)[row * n + out] = y;
    if (!of_shared && p.ordered != nullptr) p.ordered[row * n + ordered_place(out)] = y;
  }
}

// The int4 weights of a box, 16 rows x 8 groups, as a lane has them, with the scales of its rows g and g + 8, pairs of bf16.
struct BoxInt4 {
  uint32_t words[4][4];  // rows 0-7 and 8-15 of one group, then of the next
  uint32_t low[4], high[4];

  // matrix: the lane's row of the box's first 32 bytes; low_at, high_at: the sixteen bytes of scales of its rows.
  __device__ __forceinline__ BoxInt4(uint32_t at, uint32_t matrix, uint32_t low_at, uint32_t high_at) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(words[i], at + (matrix ^ (i * 32)));
    const uint4 s_low = load_shared16(low_at), s_high = load_shared16(high_at);
    low[0] = s_low.x, low[1] = s_low.y, low[2] = s_low.z, low[3] = s_low.w;
    high[0] = s_high.x, high[1] = s_high.y, high[2] = s_high.z, high[3] = s_high.w;
  }
  // The two fragments of a product of group g, as q/4.
  __device__ __forceinline__ void fragments(int g, uint32_t (&a)[4], uint32_t (&b)[4]) const {
    const uint32_t upper = words[g / 2][g % 2 * 2], lower = words[g / 2][g % 2 * 2 + 1];
    quarter_fragments(a, b, upper, lower);
  }
  __device__ __forceinline__ static float of_pair(uint32_t pair, int g) { return __uint_as_float(g % 2 == 0 ? pair << 16 : pair & 0xffff0000u); }
  __device__ __forceinline__ float scale(int g) const { return of_pair(low[g / 2], g); }
  __device__ __forceinline__ float below(int g) const { return of_pair(high[g / 2], g); }
};

inline bool aligned(const void* p, uintptr_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace cuda
}  // namespace kdtree
