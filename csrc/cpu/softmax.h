// Softmax over keys that come in chunks: a running maximum, and the sum of exponentials relative to it.
#pragma once
#include <cmath>

#include "kernels.h"

namespace kdtree::cpu {

constexpr int kChunk = 64;      // positions; fixed by docs/model.md
constexpr int kHeadBlock = 16;  // heads that share a walk over the keys

// Makes weights, not yet divided by their sum, of a chunk's n scores. `best` and `sum` are of the chunks before, and then of this one too;
// what came out of those is to be multiplied by the result, which means nothing after the first chunk.
inline float softmax_step(const Kernels& k, float* score, int n, bool first, float& best, float& sum) {
  float top = first ? -INFINITY : best, decay = 1.0f;
  for (int t = 0; t < n; ++t) top = score[t] > top ? score[t] : top;
  const float part = k.exp_sum(score, top, n);
  if (first) {
    sum = part;
  } else {
    float old = best;
    decay = k.exp_sum(&old, top, 1);
    sum = sum * decay + part;
  }
  best = top;
  return decay;
}

}  // namespace kdtree::cpu
