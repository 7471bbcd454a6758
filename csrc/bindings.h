// Plain pointers out of torch tensors, checked; what both binding files share.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <vector>

#include "error.h"

// The namespace in torch.ops; the build sets it, one for each device, so that the builds do not collide in a process.
#ifndef KDTREE_LIBRARY
#define KDTREE_LIBRARY kdtree
#endif
// One step of macro expansion, so that KDTREE_LIBRARY is a name by the time torch's macros paste it.
#define KDTREE_LIBRARY_FRAGMENT(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define KDTREE_LIBRARY_IMPL(ns, m) STABLE_TORCH_LIBRARY_IMPL(ns, CompositeExplicitAutograd, m)

namespace kdtree {

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

template <class T> struct ScalarOf;
template <> struct ScalarOf<float> { static constexpr ScalarType value = ScalarType::Float; };
template <> struct ScalarOf<double> { static constexpr ScalarType value = ScalarType::Double; };
template <> struct ScalarOf<int32_t> { static constexpr ScalarType value = ScalarType::Int; };
template <> struct ScalarOf<uint8_t> { static constexpr ScalarType value = ScalarType::Byte; };
template <> struct ScalarOf<uint16_t> { static constexpr ScalarType value = ScalarType::UInt16; };

inline void need(bool good, const char* what, const char* reason) {
  if (!good) throw Error("RequestError", std::string("argument ") + what + " " + reason);
}

// The data of a contiguous tensor of T.
template <class T>
T* data(const Tensor& t, const char* what) {
  need(t.scalar_type() == ScalarOf<T>::value, what, "has the wrong type");
  need(t.is_contiguous(), what, "is not contiguous");
  return static_cast<T*>(t.data_ptr());
}

// As data(), of exactly n elements.
template <class T>
T* sized(const Tensor& t, int64_t n, const char* what) {
  T* p = data<T>(t, what);
  need(t.numel() == n, what, "has the wrong size");
  return p;
}

inline std::vector<int32_t> ints(const Tensor& t, const char* what) {
  const int32_t* p = data<int32_t>(t, what);
  need(t.is_cpu(), what, "is not on the CPU");
  return {p, p + t.numel()};
}

}  // namespace kdtree
