// What linear() and moe() share: strips of outputs, and rows as products read them.
#pragma once
#include "../ops.h"
#include "kernels.h"

namespace kdtree::cpu {

constexpr int kStrip = 28;  // outputs a task computes, at most
constexpr int kBlock = 64;  // rows a strip handles at a time, so that its results stay on the stack

// Outputs that a task computes for so many rows: few enough to share out, and filled by the kernels' tiles. INT4 has those of 8 and 16
// outputs, f32 7 for four to seven rows, 6 for more and 8 for fewer.
inline int strip_of(const Weight& w, int rows = 1) { return w.kind == WeightKind::kInt4 ? 16 : rows >= 4 && rows < 8 ? 28 : 24; }

inline int strips_of(const Weight& w, int rows = 1) { return (w.n + strip_of(w, rows) - 1) / strip_of(w, rows); }

inline int int4_groups(int k) { return (k + kGroup - 1) / kGroup; }

inline size_t packed_floats(int k) { return static_cast<size_t>((k + kUnit - 1) / kUnit) * kUnit; }  // of a row

inline size_t held_bytes(Numerics numerics) { return numerics == Numerics::kBf16 ? sizeof(uint16_t) : sizeof(float); }

// Rows as the kernel of a weight wants them: f32 or bf16 as they are, packed into scratch for INT4.
class Packed {
 public:
  // scratch: packed_floats(w.k) a row, from a multiple of 64 bytes.
  Packed(const Kernels& k, const Weight& w, Numerics numerics, float* scratch);
  const void* normed(float* x, int at);      // x fresh from a norm, which may change it; `at` numbers the row's place in the scratch
  const void* held(const void* x, int at);   // x as an operation stored it for products

 private:
  const Kernels& k_;
  const bool int4_, bf16_;
  const int width_;
  float* scratch_;
};

// y[i, j] = w[expert, first + j] . x[i] for n <= kStrip outputs; x as Packed gives them.
void gemm_strip(const Kernels& k, const Weight& w, int expert, const void* const* x, int m, int first, int n, float* y, int ldy);

// n activations as they are held: f32, or rounded to bf16.
void store_held(const Kernels& k, void* out, size_t at, const float* x, int n, Numerics numerics);

}  // namespace kdtree::cpu
