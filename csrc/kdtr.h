// The KDTR reader (docs/kdtr.md): maps a file, checks its whole head, and hands out views into the mapping.
//
// Guarantees: a file that is not exactly valid raises `FormatError: FILE: FIELD: reason`; nothing is allocated in proportion to a
// number in the file (lookups search the mapped tables); the data of tensors is never read here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "error.h"

namespace kdtree {

enum class DType : uint32_t { kF64 = 1, kF32 = 2, kBf16 = 3, kI32 = 4, kI64 = 5, kU8 = 6 };

const char* dtype_name(DType dtype);

struct TensorView {
  DType dtype;
  std::vector<uint64_t> shape;  // outermost first, 1 to 4 dimensions
  const void* data;             // 64-byte aligned relative to the start of the file
  uint64_t bytes;
};

struct FieldView {
  std::string name;
  bool is_float;
  int64_t i64;  // valid when !is_float
  double f64;   // valid when is_float
};

// A checked file in memory that somebody else owns. `label` names the file in errors.
class KdtrView {
 public:
  KdtrView(const void* bytes, size_t size, std::string label);

  const std::string& label() const { return label_; }
  uint32_t field_count() const { return field_count_; }
  uint32_t tensor_count() const { return tensor_count_; }
  FieldView field(uint32_t index) const;
  std::string tensor_name(uint32_t index) const;
  TensorView tensor(uint32_t index) const;
  std::optional<FieldView> find_field(const std::string& name) const;
  std::optional<TensorView> find_tensor(const std::string& name) const;

 private:
  [[noreturn]] void fail(const std::string& field, const std::string& reason) const;
  void check_header();
  void check_fields() const;
  void check_tensors() const;
  const uint8_t* field_at(uint32_t index) const;
  const uint8_t* tensor_at(uint32_t index) const;

  const uint8_t* bytes_;
  uint64_t size_;
  std::string label_;
  uint32_t field_count_ = 0;
  uint32_t tensor_count_ = 0;
  uint64_t data_offset_ = 0;
};

// A file mapped read-only for as long as the object lives. One that is replaced by rename stays as it was here; one that is written
// over, or cut short, changes under the reader.
class KdtrFile {
 public:
  // path: bytes as the operating system wants them; label: how errors name the file.
  static std::shared_ptr<const KdtrFile> open(const std::string& path, const std::string& label);
  ~KdtrFile();
  KdtrFile(const KdtrFile&) = delete;
  KdtrFile& operator=(const KdtrFile&) = delete;
  const KdtrView& view() const { return *view_; }
  // FormatError if size or header are no longer what was opened. The header's CRC is of the table that holds the CRC of every tensor.
  void check_unchanged() const;
  bool holds(const void* p) const;  // in the mapping

 private:
  KdtrFile() = default;
  int fd_ = -1;
  void* map_ = nullptr;
  size_t size_ = 0;
  std::string header_;  // as it was opened
  std::unique_ptr<KdtrView> view_;
};

}  // namespace kdtree
