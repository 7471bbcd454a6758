// Plain pointers out of torch tensors, checked, and functions as torch calls them; what the binding files share.
#pragma once
#include "cold.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <string>
#include <tuple>
#include <utility>
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

// These are functions and not inlined, because there are hundreds of calls that nobody waits for.
[[noreturn]] void refuse(const char* what, const char* reason);
[[noreturn]] void wrong_call(uint64_t args, uint64_t wanted);
void* contiguous(const Tensor& t, ScalarType type, const char* what);
void* contiguous(const Tensor& t, ScalarType type, int64_t n, const char* what);
std::vector<int32_t> ints(const Tensor& t, const char* what);

struct Window;
// windows: every rank's address; none: there is no window.
Window window_of(int64_t rank, const std::vector<int64_t>& windows, int64_t bytes, double seconds);

inline void need(bool good, const char* what, const char* reason) {
  if (!good) refuse(what, reason);
}

// The data of a contiguous tensor of T.
template <class T>
T* data(const Tensor& t, const char* what) {
  return static_cast<T*>(contiguous(t, ScalarOf<T>::value, what));
}

// As data(), of exactly n elements.
template <class T>
T* sized(const Tensor& t, int64_t n, const char* what) {
  return static_cast<T*>(contiguous(t, ScalarOf<T>::value, n, what));
}

// A function as torch calls it: its arguments on the stack, then its results in their place. TORCH_BOX does the same by way of a
// tuple for every signature, which takes the compiler three times as long.
template <auto F>
struct Boxed;
template <class R, class... A, R (*F)(A...)>
struct Boxed<F> {
  static void call(StableIValue* stack, uint64_t args, uint64_t) {
    if (args != sizeof...(A)) wrong_call(args, sizeof...(A));
    at(stack, std::index_sequence_for<A...>());
  }

 private:
  template <size_t... I>
  static void at([[maybe_unused]] StableIValue* stack, std::index_sequence<I...>) {
    using torch::stable::detail::to;
    if constexpr (std::is_void_v<R>) {
      F(to<A>(stack[I])...);
    } else {
      give(stack, F(to<A>(stack[I])...));
    }
  }
  template <class T>
  static void give(StableIValue* stack, T&& value) {
    stack[0] = torch::stable::detail::from(std::forward<T>(value));
  }
  template <class... T>
  static void give(StableIValue* stack, std::tuple<T...>&& values) {
    std::apply([&](T&... value) { ((*stack++ = torch::stable::detail::from(std::move(value))), ...); }, values);
  }
};
template <auto F>
constexpr auto boxed = &Boxed<F>::call;

// A function under its name in torch.ops.
struct Bound {
  const char *name, *signature;
  void (*call)(StableIValue* stack, uint64_t args, uint64_t outputs);
};

}  // namespace kdtree
