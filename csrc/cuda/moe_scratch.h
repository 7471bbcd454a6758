// What the experts of bf16 activations keep in scratch between their launches; all of it in the padded rows of stream_plan.h.
#pragma once
#include "../stream_plan.h"

namespace kdtree {
namespace cuda {

struct MoeScratch {
  float* products;    // [M*(top_k + 1), dim]: of every row's choices, then of the shared expert
  uint16_t* normed;   // [M, padded(dim)]: rows normed and rounded, in the multiplication's order
  uint16_t* ordered;  // [M*top_k, padded(inner)]: act in the multiplication's order
  float* parts;       // [kSegments, M, experts]: of the router's logits
  size_t bytes;

  MoeScratch(void* scratch, int max_rows, int top_k, int inner, int dim, int experts) {
    const size_t rows = static_cast<size_t>(max_rows);
    char* const base = static_cast<char*>(scratch);
    bytes = 0;
    const auto take = [&](size_t count, size_t size) {
      char* const at = base + bytes;
      bytes += (count * size + 255) / 256 * 256;
      return at;
    };
    products = reinterpret_cast<float*>(take(rows * (top_k + 1) * dim, sizeof(float)));
    normed = reinterpret_cast<uint16_t*>(take(rows * stream::padded(dim), sizeof(uint16_t)));
    ordered = reinterpret_cast<uint16_t*>(take(rows * top_k * stream::padded(inner), sizeof(uint16_t)));
    parts = reinterpret_cast<float*>(take(rows * stream::kSegments * experts, sizeof(float)));
  }
};

}  // namespace cuda
}  // namespace kdtree
