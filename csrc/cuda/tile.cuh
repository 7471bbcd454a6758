// Dot products of weight rows with a tile of activation rows: the core of linear, mla_value and the experts' gate and up.
//
// A warp owns two weight rows and multiplies them with TM activation rows that the block has staged in shared memory, so a
// weight is read once for TM rows. Weights stay packed: nibbles are turned into floats in registers.
// Reduction order of one product, the same for every TM and every row:
//   lane l adds k = l*E + e, e < E ascending, then the same places of the next step of 32*E elements (E = 4 or 1 for f32, by whether
//   K is a multiple of 4, for bf16 too; 8 for int4, where a group's eight products are added first and scaled once); then a butterfly over lanes.
//   Sums of squares: thread t adds its staged elements by ascending k; butterfly over lanes, then warps in order.
// Under Numerics::kBf16 a norm is applied whole and rounded before the products, from sums of squares taken in a pass of its own;
// in f32 its 1/rms multiplies the finished products.
// Bytes: each weight once a tile of TM rows; activations once a block, from L2. Bound by weight bytes for small M.
#pragma once
#include "device.cuh"

namespace kdtree {
namespace cuda {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / kWarp;
constexpr int kUnroll = 4;         // steps of a weight row a lane has in flight
constexpr int kTileFloats = 8192;  // staged activations: 32 KiB, so three blocks fit an SM of 100 KiB

// One row of a weight matrix. For int4, k is padded to whole groups of 32 with zero weights.
struct WeightRow {
  const void* data;
  const uint16_t* scale;
};

__device__ __forceinline__ int groups_of(int k) { return (k + 31) / 32; }

template <WeightKind KIND>
__device__ __forceinline__ WeightRow weight_row(const void* data, const uint16_t* scale, size_t row, int k) {
  if constexpr (KIND == WeightKind::kInt4) {
    const size_t groups = groups_of(k);
    return {static_cast<const uint8_t*>(data) + row * groups * 16, scale + row * groups};
  } else if constexpr (KIND == WeightKind::kBf16) {
    return {static_cast<const uint16_t*>(data) + row * k, nullptr};
  } else {
    return {static_cast<const float*>(data) + row * k, nullptr};
  }
}

// The kind of weights that stands beside INT4 ones, and how what only products read is held.
template <Numerics NUM> constexpr WeightKind kPlain = NUM == Numerics::kBf16 ? WeightKind::kBf16 : WeightKind::kF32;
template <Numerics NUM> struct HeldAs { using Type = float; };
template <> struct HeldAs<Numerics::kBf16> { using Type = uint16_t; };
template <Numerics NUM> using Held = typename HeldAs<NUM>::Type;

// What a lane holds of kUnroll steps of one weight row.
template <WeightKind KIND, int VEC>
struct Fragment {
  static constexpr int kLane = VEC;  // elements a lane takes of a step
  static constexpr int kStep = kLane * kWarp;
  float v[kUnroll][VEC];

  __device__ __forceinline__ void load(const WeightRow& w, int k0, int k, int lane) {
    const float* p = static_cast<const float*>(w.data);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k0 + u * kStep + lane * VEC;
      if constexpr (VEC == 4) {
        const float4 q = at < k ? __ldg(reinterpret_cast<const float4*>(p + at)) : make_float4(0.f, 0.f, 0.f, 0.f);
        v[u][0] = q.x, v[u][1] = q.y, v[u][2] = q.z, v[u][3] = q.w;
      } else {
        v[u][0] = at < k ? __ldg(p + at) : 0.f;
      }
    }
  }
  __device__ __forceinline__ float fold(float acc, int u, const float (&x)[kLane]) const {
#pragma unroll
    for (int e = 0; e < kLane; ++e) acc = __fmaf_rn(v[u][e], x[e], acc);
    return acc;
  }
};

template <int VEC>
struct Fragment<WeightKind::kBf16, VEC> {
  static constexpr int kLane = VEC;
  static constexpr int kStep = kLane * kWarp;
  uint16_t v[kUnroll][VEC];

  __device__ __forceinline__ void load(const WeightRow& w, int k0, int k, int lane) {
    const uint16_t* p = static_cast<const uint16_t*>(w.data);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k0 + u * kStep + lane * VEC;
      if constexpr (VEC == 4) {
        const uint2 q = at < k ? __ldg(reinterpret_cast<const uint2*>(p + at)) : make_uint2(0u, 0u);
        v[u][0] = static_cast<uint16_t>(q.x), v[u][1] = static_cast<uint16_t>(q.x >> 16);
        v[u][2] = static_cast<uint16_t>(q.y), v[u][3] = static_cast<uint16_t>(q.y >> 16);
      } else {
        v[u][0] = at < k ? __ldg(p + at) : static_cast<uint16_t>(0);
      }
    }
  }
  __device__ __forceinline__ float fold(float acc, int u, const float (&x)[kLane]) const {
#pragma unroll
    for (int e = 0; e < kLane; ++e) acc = __fmaf_rn(bf16_to_float(v[u][e]), x[e], acc);
    return acc;
  }
};

template <int VEC>
struct Fragment<WeightKind::kInt4, VEC> {
  static constexpr int kLane = 8;
  static constexpr int kStep = kLane * kWarp;
  uint32_t nibbles[kUnroll];
  uint16_t scale[kUnroll];

  __device__ __forceinline__ void load(const WeightRow& w, int k0, int k, int lane) {
    const uint32_t* p = static_cast<const uint32_t*>(w.data);
    const int padded = groups_of(k) * 32;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = k0 + u * kStep + lane * kLane;
      nibbles[u] = at < padded ? __ldg(p + at / 8) : 0x88888888u;
      scale[u] = at < padded ? __ldg(w.scale + at / 32) : static_cast<uint16_t>(0);
    }
  }
  __device__ __forceinline__ float fold(float acc, int u, const float (&x)[kLane]) const {
    float part = 0.f;
#pragma unroll
    for (int e = 0; e < kLane; ++e) {
      // 2^23 + nibble is exact in f32, so the difference is exactly q = nibble - 8.
      const float q = __fsub_rn(__uint_as_float(0x4b000000u | ((nibbles[u] >> (4 * e)) & 0xfu)), 8388616.0f);
      part = __fmaf_rn(q, x[e], part);
    }
    return __fmaf_rn(part, bf16_to_float(scale[u]), acc);
  }
};

// A lane's x of one step.
template <int N>
__device__ __forceinline__ void load_lane(float (&x)[N], const float* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float4 q = reinterpret_cast<const float4*>(p)[i];
      x[4 * i] = q.x, x[4 * i + 1] = q.y, x[4 * i + 2] = q.z, x[4 * i + 3] = q.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = p[i];
  }
}

template <int N>
__device__ __forceinline__ void load_lane(float (&x)[N], const uint16_t* p) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const uint2 q = reinterpret_cast<const uint2*>(p)[i];
      x[4 * i] = __uint_as_float(q.x << 16), x[4 * i + 1] = __uint_as_float(q.x & 0xffff0000u);
      x[4 * i + 2] = __uint_as_float(q.y << 16), x[4 * i + 3] = __uint_as_float(q.y & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = bf16_to_float(p[i]);
  }
}

// Floats of dynamic shared memory for a tile of `rows` rows of k elements: a chunk, padded to whole steps.
inline __host__ __device__ int tile_chunk(int rows) { return kTileFloats / rows; }
inline size_t tile_shared_bytes(int rows, int k, WeightKind kind) {
  const int step = kind == WeightKind::kInt4 ? 256 : 128;  // the widest Fragment::kStep of the kind
  const int padded = (k + step - 1) / step * step;
  return sizeof(float) * static_cast<size_t>(rows) * (padded < tile_chunk(rows) ? padded : tile_chunk(rows));
}

// Products of two weight rows (one pair a warp) with TM activation rows (the whole block).
// Use: construct (starts the weight loads, which wait for nobody), wait_for_previous(), run(), then read of_lane() and inverse().
template <WeightKind KIND, int VEC, int TM, Numerics NUM>
struct PairTile {
  using Piece = Fragment<KIND, VEC>;
  static constexpr int kChunk = kTileFloats / TM;
  static_assert(kChunk % (kUnroll * Piece::kStep) == 0, "a chunk is a whole number of weight batches");

  float acc[2][TM];
  WeightRow w[2];
  Piece next[2];
  int k, lane, warp;

  __device__ __forceinline__ PairTile(const WeightRow& w0, const WeightRow& w1, int k_)
      : k(k_), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp) {
    w[0] = w0, w[1] = w1;
    next[0].load(w[0], 0, k, lane);
    next[1].load(w[1], 0, k, lane);
  }

  // x: TM row pointers to f32 or, what is held for products, bf16; norm_w: null, or the norm's weights (in f32 the rows' 1/rms is
  // applied by whoever reads the products). xs: tile_shared_bytes; squares: [kTileWarps][TM] in shared memory, complete when run
  // returns.
  template <class X>
  __device__ __forceinline__ void run(const X* const (&x)[TM], const float* norm_w, float eps, float* xs, float (*squares)[TM]) {
    float ss[TM], scale[TM];
#pragma unroll
    for (int r = 0; r < TM; ++r) acc[0][r] = acc[1][r] = ss[r] = 0.f, scale[r] = 1.f;
    constexpr bool kWhole = NUM == Numerics::kBf16;  // the norm comes whole before the products
    if (kWhole && norm_w != nullptr) {
      for (int i = threadIdx.x * VEC; i < k; i += kTileThreads * VEC) {
#pragma unroll
        for (int r = 0; r < TM; ++r) {
          float v[VEC];
          load_lane(v, x[r] + i);
#pragma unroll
          for (int e = 0; e < VEC; ++e) ss[r] = __fmaf_rn(v[e], v[e], ss[r]);
        }
      }
      publish(ss, squares);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < TM; ++r) scale[r] = inverse(r, eps, squares);
    }
    for (int k0 = 0; k0 < k; k0 += kChunk) {
      const int length = min(kChunk, k - k0);
      const int padded = (length + Piece::kStep - 1) / Piece::kStep * Piece::kStep;
      if (k0 > 0) __syncthreads();  // everyone is done with the chunk before
      stage(x, norm_w, scale, xs, k0, length, padded, ss);
      if (!kWhole && norm_w != nullptr && k0 + kChunk >= k) publish(ss, squares);
      __syncthreads();
      multiply(xs, k0, padded);
    }
#pragma unroll
    for (int r = 0; r < TM; ++r) acc[0][r] = warp_sum(acc[0][r]), acc[1][r] = warp_sum(acc[1][r]);
  }

  // The products of row `lane`, for lanes below TM: so that a warp stores its rows side by side.
  __device__ __forceinline__ float2 of_lane() const {
    float y0 = acc[0][0], y1 = acc[1][0];
#pragma unroll
    for (int r = 1; r < TM; ++r) {
      const float r0 = acc[0][r], r1 = acc[1][r];  // read first, then chosen: a chosen address would put acc into memory
      y0 = lane == r ? r0 : y0, y1 = lane == r ? r1 : y1;
    }
    return make_float2(y0, y1);
  }

  // 1/rms of row r; every thread of the block gets the same bits.
  __device__ __forceinline__ float inverse(int r, float eps, const float (*squares)[TM]) const {
    float total = squares[0][r];
#pragma unroll
    for (int i = 1; i < kTileWarps; ++i) total = __fadd_rn(total, squares[i][r]);
    return inverse_rms(total, k, eps);
  }

 private:
  template <class X>
  __device__ __forceinline__ void stage(const X* const (&x)[TM], const float* norm_w, const float (&scale)[TM], float* xs, int k0,
                                        int length, int padded, float (&ss)[TM]) {
    for (int i = threadIdx.x * VEC; i < padded; i += kTileThreads * VEC) {
      float g[VEC], v[VEC];
      const bool inside = i < length;
#pragma unroll
      for (int e = 0; e < VEC; ++e) g[e] = 1.f;
      if (norm_w != nullptr && inside) load_lane(g, norm_w + k0 + i);
#pragma unroll
      for (int r = 0; r < TM; ++r) {
#pragma unroll
        for (int e = 0; e < VEC; ++e) v[e] = 0.f;
        if (inside) load_lane(v, x[r] + k0 + i);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
          float& place = xs[r * min(kChunk, round_step(k)) + i + e];
          if constexpr (NUM == Numerics::kBf16) {
            place = norm_w == nullptr ? v[e] : as_held<uint16_t>(__fmul_rn(__fmul_rn(v[e], scale[r]), g[e]));
          } else {
            ss[r] = __fmaf_rn(v[e], v[e], ss[r]);
            place = __fmul_rn(v[e], g[e]);
          }
        }
      }
    }
  }
  __device__ __forceinline__ static int round_step(int n) { return (n + Piece::kStep - 1) / Piece::kStep * Piece::kStep; }

  __device__ __forceinline__ void publish(const float (&ss)[TM], float (*squares)[TM]) const {
#pragma unroll
    for (int r = 0; r < TM; ++r) {
      const float total = warp_sum(ss[r]);
      if (lane == 0) squares[warp][r] = total;
    }
  }

  __device__ __forceinline__ void multiply(const float* xs, int k0, int padded) {
    const int stride = min(kChunk, round_step(k));
    for (int at = 0; at < padded; at += kUnroll * Piece::kStep) {
      const Piece p0 = next[0], p1 = next[1];
      const int ahead = k0 + at + kUnroll * Piece::kStep;
      if (ahead < round_step(k)) {
        next[0].load(w[0], ahead, k, lane);
        next[1].load(w[1], ahead, k, lane);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int step = at + u * Piece::kStep;
        if (step >= padded) break;
#pragma unroll
        for (int r = 0; r < TM; ++r) {
          float v[Piece::kLane];
          load_lane(v, xs + r * stride + step + lane * Piece::kLane);
          acc[0][r] = p0.fold(acc[0][r], u, v);
          acc[1][r] = p1.fold(acc[1][r], u, v);
        }
      }
    }
  }
};

// Whether rows of k elements at p may be read sixteen bytes at a time.
inline bool vector_ready(const void* p, int k) { return k % 4 == 0 && reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace cuda
}  // namespace kdtree
