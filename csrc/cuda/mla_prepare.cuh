// What both kernels of mla_prepare are given, and the rotation that they share.
#pragma once
#include "device.cuh"

namespace kdtree {
namespace cuda {

struct PrepareParams {
  MlaDims dims;
  const float* q;
  const float* kv;
  const float* kv_norm_w;
  float eps;
  const void* kv_b;
  const float* cos_sin;
  void* q_lat;
  void* q_rope;
  MlaCache cache;
  const int32_t* depths;
  int max_rows;
  const StepState* state;

  explicit PrepareParams(const MlaPrepareArgs& a)
      : dims(a.dims), q(a.q), kv(a.kv), kv_norm_w(a.kv_norm_w), eps(a.eps), kv_b(a.kv_b.data), cos_sin(a.cos_sin), q_lat(a.q_lat),
        q_rope(a.q_rope), cache(a.cache), depths(a.rows.depths), max_rows(a.rows.max_rows), state(a.state) {}
};

__device__ __forceinline__ float2 angle(const PrepareParams& p, int position, int pair) {
  return __ldg(reinterpret_cast<const float2*>(p.cos_sin) + static_cast<size_t>(position) * (p.dims.rope / 2) + pair);
}

// (a, b) -> (a cos - b sin, a sin + b cos)
__device__ __forceinline__ float2 rotate(float2 pair, float2 cos_sin) {
  return make_float2(__fmaf_rn(pair.x, cos_sin.x, -__fmul_rn(pair.y, cos_sin.y)),
                     __fmaf_rn(pair.x, cos_sin.y, __fmul_rn(pair.y, cos_sin.x)));
}

}  // namespace cuda
}  // namespace kdtree
