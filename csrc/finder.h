// Finds the tensors that a model asks for in a file, checks type and shape, and makes a rank's part of them resident.
#pragma once
#include <string>
#include <vector>

#include "model.h"

namespace kdtree {

using Shape = std::vector<uint64_t>;

class Finder {
 public:
  Finder(Backend& backend, const KdtrView& file, Precision precision, Ranks ranks, std::vector<ResidentWeight>& made)
      : backend_(backend), file_(file), precision_(precision), ranks_(ranks), made_(made) {}

  int share(int n) const { return n / ranks_.count; }

  // Of each of `count` equal blocks that the tensor consists of, this rank's part of `parts`.
  Resident raw(const std::string& name, DType dtype, const Shape& shape, size_t count, int parts) const {
    const auto fail = [&](const std::string& reason) {
      throw Error("MissingTensor", file_.label() + ": " + name + ": " + reason);
    };
    const auto t = file_.find_tensor(name);
    if (!t) fail("the file has no such tensor");
    if (t->dtype != dtype) fail(std::string("is ") + dtype_name(t->dtype) + ", must be " + dtype_name(dtype));
    if (t->shape != shape) fail("has shape " + text(t->shape) + ", must be " + text(shape));
    const size_t pitch = t->bytes / count, bytes = pitch / static_cast<size_t>(parts);
    const auto* first = static_cast<const unsigned char*>(t->data) + (parts > 1 ? bytes * static_cast<size_t>(ranks_.rank) : 0);
    const Resident placed = backend_.resident(first, bytes, count, pitch, name.c_str());
    made_.push_back({name, placed, bytes, count});
    return placed;
  }
  const float* f32(const std::string& name, const Shape& shape) const {
    return static_cast<const float*>(raw(name, DType::kF32, shape, 1, 1).data);
  }
  // stem, here and below: the name without `.w`, `.bw`, `.qw`, `.sc`.
  Weight matrix(const std::string& stem, int n, int k) const {
    return {kind(), plain(stem, {u(n), u(k)}, 1, 1).data, nullptr, n, k, 1};
  }
  // This rank's rows of a matrix [n, k].
  Weight rows(const std::string& stem, int n, int k) const {
    return {kind(), plain(stem, {u(n), u(k)}, 1, ranks_.count).data, nullptr, share(n), k, 1};
  }
  // This rank's columns of a matrix [n, k], as n matrices of one row.
  Weight columns(const std::string& stem, int n, int k) const {
    const Resident w = plain(stem, {u(n), u(k)}, u(n), ranks_.count);
    return {kind(), w.data, nullptr, 1, share(k), n, static_cast<int>(w.pitch / (element() * u(share(k))))};
  }
  // This rank's rows of each of e matrices [n, k], not quantised.
  Weight plain_experts(const std::string& stem, int e, int n, int k) const {
    const Resident w = plain(stem, {u(e), u(n), u(k)}, u(e), ranks_.count);
    return {kind(), w.data, nullptr, share(n), k, e, static_cast<int>(w.pitch / (element() * u(k)))};
  }
  // The same, as the precision has experts.
  Weight experts(const std::string& stem, int e, int n, int k) const {
    if (precision_.experts != WeightKind::kInt4) return plain_experts(stem, e, n, k);
    const auto stride = [&](const Resident& w, size_t row_bytes) { return static_cast<int>(w.pitch / row_bytes); };
    const uint64_t groups = (u(k) + 31) / 32;
    if (file_.find_tensor(stem + ".draw")) return drawn(stem, e, n, k, groups);
    const Resident q = raw(stem + ".qw", DType::kU8, {u(e), u(n), 16 * groups}, u(e), ranks_.count);
    const Resident scale = raw(stem + ".sc", DType::kBf16, {u(e), u(n), groups}, u(e), ranks_.count);
    return {WeightKind::kInt4, q.data, static_cast<const uint16_t*>(scale.data), share(n), k, e, stride(q, 16 * groups)};
  }

 private:
  bool bf16() const { return precision_.numerics == Numerics::kBf16; }
  WeightKind kind() const { return bf16() ? WeightKind::kBf16 : WeightKind::kF32; }
  size_t element() const { return bf16() ? sizeof(uint16_t) : sizeof(float); }
  Resident plain(const std::string& stem, const Shape& shape, size_t count, int parts) const {
    return bf16() ? raw(stem + ".bw", DType::kBf16, shape, count, parts) : raw(stem + ".w", DType::kF32, shape, count, parts);
  }
  // This rank's rows of experts that the file states, drawn into memory of the backend.
  Weight drawn(const std::string& stem, int e, int n, int k, size_t groups) const {
    const std::string name = stem + ".draw";
    const auto t = file_.find_tensor(name);
    if (t->dtype != DType::kI64 || t->shape != Shape{5}) {
      throw Error("MissingTensor",
                  file_.label() + ": " + name + ": is " + dtype_name(t->dtype) + " " + text(t->shape) + ", must be i64 [5]");
    }
    for (const char* twin : {".qw", ".sc"}) {
      if (file_.find_tensor(stem + twin)) throw Error("ConfigError", file_.label() + ": " + name + ": stands beside " + stem + twin);
    }
    const Stated stated = read_stated(static_cast<const int64_t*>(t->data), file_.label(), name);
    const size_t block = groups * u(share(n));
    const auto place = [&](const char* suffix, size_t bytes) {
      void* at = backend_.alloc(bytes * u(e), (stem + suffix).c_str());
      made_.push_back({stem + suffix, {at, bytes}, bytes, u(e)});
      return at;
    };
    auto* q = static_cast<uint8_t*>(place(".qw", 16 * block));
    auto* scale = static_cast<uint16_t*>(place(".sc", sizeof(uint16_t) * block));
    backend_.draw_experts({stated, 0, share(n) * ranks_.rank, e, share(n), k, q, scale});
    return {WeightKind::kInt4, q, scale, share(n), k, e, share(n)};
  }
  static std::string text(const Shape& shape) {
    std::string s;
    for (const uint64_t d : shape) s += (s.empty() ? "[" : ", ") + std::to_string(d);
    return s + "]";
  }
  static uint64_t u(int v) { return static_cast<uint64_t>(v); }
  Backend& backend_;
  const KdtrView& file_;
  const Precision precision_;
  const Ranks ranks_;
  std::vector<ResidentWeight>& made_;
};

}  // namespace kdtree
