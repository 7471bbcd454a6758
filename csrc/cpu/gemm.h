// What linear() and moe() share: strips of outputs, and rows packed for INT4.
#pragma once
#include "../ops.h"
#include "kernels.h"

namespace kdtree::cpu {

constexpr int kStrip = 16;  // outputs a task computes: few enough to share out, enough to stream whole cache lines
constexpr int kBlock = 64;  // rows a strip handles at a time, so that its results stay on the stack

inline int int4_groups(int k) { return (k + kGroup - 1) / kGroup; }

// Rows as the kernel of a weight wants them: themselves for f32, packed into scratch for INT4.
class Packed {
 public:
  Packed(const Kernels& k, const Weight& w, float* scratch);
  const float* row(const float* x, int k, int at);  // `at` numbers the row's place in the scratch

 private:
  const Kernels& k_;
  bool int4_;
  float* scratch_;
  int stride_;
};

// y[i, j] = w[expert, first + j] . x[i] for n <= kStrip outputs.
void gemm_strip(const Kernels& k, const Weight& w, int expert, const float* const* x, int m, int first, int n, float* y, int ldy);

}  // namespace kdtree::cpu
