// Tensors as the structures of ops.h: `rows` is tokens, parents, depths [M] and path [M, stride]; `state` is StepState as 16 i32; what only
// products read is f32, or bf16 as u16, and a weight may be nibbles with scales.
#pragma once
#include "../bindings.h"
#include "../ops.h"

namespace kdtree {
namespace {

int dim(const Tensor& t, int64_t i) { return static_cast<int>(t.size(i)); }

StepState* step_state(const Tensor& t) { return reinterpret_cast<StepState*>(sized<int32_t>(t, 16, "state")); }

Rows rows_of(const std::vector<Tensor>& r) {
  need(r.size() == 4 && r[3].dim() == 2, "rows", "is not tokens, parents, depths and path");
  const int64_t m = r[0].numel();
  return {sized<int32_t>(r[0], m, "tokens"), sized<int32_t>(r[1], m, "parents"), sized<int32_t>(r[2], m, "depths"),
          sized<int32_t>(r[3], m * r[3].size(1), "path"), dim(r[3], 1), static_cast<int>(m)};
}

bool is_bf16(const Tensor& t) { return t.scalar_type() == ScalarType::UInt16; }

Numerics numerics_of(bool bf16) { return bf16 ? Numerics::kBf16 : Numerics::kF32; }

// What only products read: n elements of f32, or the bits of bf16 numbers as u16.
void* activation(const Tensor& t, int64_t n, Numerics numerics, const char* what) {
  return numerics == Numerics::kBf16 ? static_cast<void*>(sized<uint16_t>(t, n, what)) : sized<float>(t, n, what);
}

// The sizes of a matrix, or of a stack of them, whose rows have k values.
Weight sizes_of(const Tensor& w, int64_t k) {
  const bool batch = w.dim() == 3;
  need(batch || w.dim() == 2, "weight", "is not a matrix or a stack of them");
  Weight out;
  out.e = batch ? dim(w, 0) : 1;
  out.n = dim(w, batch ? 1 : 0);
  out.k = static_cast<int>(k);
  return out;
}

// A matrix, or a stack of them, of f32, or of bf16 as u16.
Weight weight_of(const Tensor& w, int64_t k) {
  Weight out = sizes_of(w, k);
  out.kind = is_bf16(w) ? WeightKind::kBf16 : WeightKind::kF32;
  out.data = activation(w, static_cast<int64_t>(out.e) * out.n * k, numerics_of(is_bf16(w)), "weight");
  return out;
}

// The same; or, with a scale that is not empty (the bytes of bf16 numbers, u8 [e,] n, 2*groups), nibbles u8 [e,] n, 16*groups.
Weight weight_of(const Tensor& w, const Tensor& scale, int64_t k) {
  if (scale.numel() == 0) return weight_of(w, k);
  Weight out = sizes_of(w, k);
  const int64_t outputs = static_cast<int64_t>(out.e) * out.n, groups = (k + 31) / 32;
  out.kind = WeightKind::kInt4;
  out.data = sized<uint8_t>(w, outputs * groups * 16, "weight");
  out.scale = reinterpret_cast<const uint16_t*>(sized<uint8_t>(scale, outputs * groups * 2, "scale"));
  return out;
}

}  // namespace
}  // namespace kdtree
