// See kdtr.h. Offsets and checks in the order of docs/kdtr.md.
#include "cold.h"

#include "kdtr.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "KDTR files are little-endian and are used as they are mapped: this reader needs a little-endian machine"
#endif

namespace kdtree {
namespace {

constexpr uint64_t kHeader = 64, kField = 64, kTensor = 144, kAlign = 64;
constexpr uint64_t kFieldName = 48, kTensorName = 80;
constexpr uint32_t kMaxFields = 256, kMaxTensors = 1048576;
constexpr uint32_t kVersion = 1, kOrder = 0x01020304u, kSwapped = 0x04030201u;

template <class T>
T load(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

uint64_t align_up(uint64_t n) { return (n + (kAlign - 1)) / kAlign * kAlign; }

uint32_t crc32(uint32_t crc, const uint8_t* p, uint64_t n) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  crc = ~crc;
  for (uint64_t i = 0; i < n; ++i) crc = table[(crc ^ p[i]) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

bool all_zero(const uint8_t* p, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) {
    if (p[i] != 0) return false;
  }
  return true;
}

std::string hex(uint32_t v) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", v);
  return text;
}

std::string str(uint64_t v) { return std::to_string(v); }

// Length of a zero-padded name of [a-z0-9_] (and '.' for tensors), or 0 if it is none.
size_t name_length(const uint8_t* p, uint64_t room, bool dots) {
  uint64_t n = 0;
  while (n < room && p[n] != 0) {
    const uint8_t c = p[n];
    const bool good = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || (dots && c == '.');
    if (!good) return 0;
    ++n;
  }
  if (n == room || !all_zero(p + n, room - n)) return 0;
  return static_cast<size_t>(n);
}

std::string name_of(const uint8_t* p) { return reinterpret_cast<const char*>(p); }

uint64_t item_size(uint32_t dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF64: return 8;
    case DType::kF32: return 4;
    case DType::kBf16: return 2;
    case DType::kI32: return 4;
    case DType::kI64: return 8;
    case DType::kU8: return 1;
  }
  return 0;
}

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF64: return "f64";
    case DType::kF32: return "f32";
    case DType::kBf16: return "bf16";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
  }
  return "?";
}

KdtrView::KdtrView(const void* bytes, size_t size, std::string label)
    : bytes_(static_cast<const uint8_t*>(bytes)), size_(size), label_(std::move(label)) {
  check_header();
  check_fields();
  check_tensors();
}

void KdtrView::fail(const std::string& field, const std::string& reason) const {
  throw Error("FormatError", label_ + ": " + field + ": " + reason);
}

const uint8_t* KdtrView::field_at(uint32_t index) const { return bytes_ + kHeader + kField * index; }

const uint8_t* KdtrView::tensor_at(uint32_t index) const {
  return bytes_ + kHeader + kField * field_count_ + kTensor * index;
}

void KdtrView::check_header() {
  if (size_ < kHeader) fail("header", "the file has " + str(size_) + " bytes, a header alone has 64");
  if (std::memcmp(bytes_, "KDTR", 4) != 0) fail("header.magic", "not 'KDTR': this is no KDTR file");
  const uint32_t version = load<uint32_t>(bytes_ + 4), order = load<uint32_t>(bytes_ + 8);
  if (order == kSwapped) fail("header.order", "the file is big-endian, the format is little-endian");
  if (version != kVersion) fail("header.version", str(version) + ", this reader knows " + str(kVersion));
  if (order != kOrder) fail("header.order", hex(order) + " is not " + hex(kOrder));
  if (const uint32_t flags = load<uint32_t>(bytes_ + 12)) fail("header.flags", hex(flags) + ", must be 0");
  if (!all_zero(bytes_ + 44, 20)) fail("header.reserved", "not zero");
  const uint64_t file_size = load<uint64_t>(bytes_ + 16);
  if (file_size != size_) fail("header.file_size", str(file_size) + ", but the file has " + str(size_) + " bytes");
  field_count_ = load<uint32_t>(bytes_ + 24);
  tensor_count_ = load<uint32_t>(bytes_ + 28);
  if (field_count_ > kMaxFields) fail("header.field_count", str(field_count_) + ", at most " + str(kMaxFields));
  if (tensor_count_ > kMaxTensors) fail("header.tensor_count", str(tensor_count_) + ", at most " + str(kMaxTensors));
  data_offset_ = load<uint64_t>(bytes_ + 32);
  const uint64_t wanted = align_up(kHeader + kField * field_count_ + kTensor * tensor_count_);
  if (data_offset_ != wanted) fail("header.data_offset", str(data_offset_) + ", the counts ask for " + str(wanted));
  if (data_offset_ > size_) {
    fail("header.data_offset", str(data_offset_) + " lies beyond the file's " + str(size_) + " bytes");
  }
  const uint32_t stored = load<uint32_t>(bytes_ + 40);
  const uint32_t real = crc32(crc32(0, bytes_, 40), bytes_ + kHeader, data_offset_ - kHeader);
  if (stored != real) fail("header.crc", hex(stored) + ", the head's bytes give " + hex(real));
}

void KdtrView::check_fields() const {
  std::string last;
  for (uint32_t i = 0; i < field_count_; ++i) {
    const uint8_t* p = field_at(i);
    std::string where = "fields[" + str(i) + "]";
    if (name_length(p, kFieldName, false) == 0) fail(where + ".name", "no zero-padded name of 1 to 47 of [a-z0-9_]");
    const std::string name = name_of(p);
    where += " (" + name + ")";
    if (load<uint32_t>(p + 52) != 0) fail(where + ".reserved", "not zero");
    const uint32_t kind = load<uint32_t>(p + 48);
    if (kind != 1 && kind != 2) fail(where + ".kind", str(kind) + ", known are 1 (i64) and 2 (f64)");
    if (kind == 2 && !std::isfinite(load<double>(p + 56))) fail(where + ".value", "not finite");
    if (name <= last) fail("fields[" + str(i) + "].name", "'" + name + "' does not come after '" + last + "'");
    last = name;
  }
}

void KdtrView::check_tensors() const {
  std::string last;
  uint64_t end = data_offset_;
  for (uint32_t i = 0; i < tensor_count_; ++i) {
    const uint8_t* p = tensor_at(i);
    std::string where = "tensors[" + str(i) + "]";
    if (name_length(p, kTensorName, true) == 0) fail(where + ".name", "no zero-padded name of 1 to 79 of [a-z0-9_.]");
    const std::string name = name_of(p);
    where += " (" + name + ")";
    const uint32_t dtype = load<uint32_t>(p + 80), ndim = load<uint32_t>(p + 84);
    uint64_t wanted = item_size(dtype);
    if (wanted == 0) fail(where + ".dtype", str(dtype) + ", known are 1 to 6");
    if (ndim < 1 || ndim > 4) fail(where + ".ndim", str(ndim) + ", must be 1 to 4");
    for (uint32_t d = 0; d < 4; ++d) {
      const uint64_t dim = load<uint64_t>(p + 88 + 8 * d);
      if ((d < ndim) != (dim >= 1)) {
        fail(where + ".shape", "dimension " + str(d) + " is " + str(dim) + " with ndim " + str(ndim));
      }
      if (d < ndim && __builtin_mul_overflow(wanted, dim, &wanted)) fail(where + ".shape", "the size exceeds 64 bits");
    }
    const uint64_t offset = load<uint64_t>(p + 120), bytes = load<uint64_t>(p + 128);
    if (bytes != wanted) fail(where + ".size", str(bytes) + ", shape and type ask for " + str(wanted));
    if (offset != align_up(end)) {  // end <= size_, a real file's size, so this cannot wrap
      fail(where + ".offset", str(offset) + ", the tensor before ends at " + str(end) + ": must be " + str(align_up(end)));
    }
    if (offset > size_ || bytes > size_ - offset) {
      fail(where + ".size", str(bytes) + " bytes at " + str(offset) + " reach beyond the file's " + str(size_) + " bytes");
    }
    if (load<uint32_t>(p + 140) != 0) fail(where + ".reserved", "not zero");
    if (name <= last) fail("tensors[" + str(i) + "].name", "'" + name + "' does not come after '" + last + "'");
    last = name;
    end = offset + bytes;
  }
  const uint64_t used = kHeader + kField * field_count_ + kTensor * tensor_count_;
  if (!all_zero(bytes_ + used, data_offset_ - used)) {
    fail("tensors", "the bytes between the tensor table and the data are not zero");
  }
  if (end != size_) fail("header.file_size", str(size_) + ", but the last tensor ends at " + str(end));
}

FieldView KdtrView::field(uint32_t index) const {
  const uint8_t* p = field_at(index);
  return {name_of(p), load<uint32_t>(p + 48) == 2, load<int64_t>(p + 56), load<double>(p + 56)};
}

std::string KdtrView::tensor_name(uint32_t index) const { return name_of(tensor_at(index)); }

TensorView KdtrView::tensor(uint32_t index) const {
  const uint8_t* p = tensor_at(index);
  TensorView view{static_cast<DType>(load<uint32_t>(p + 80)), {}, bytes_ + load<uint64_t>(p + 120), load<uint64_t>(p + 128)};
  const uint32_t ndim = load<uint32_t>(p + 84);
  for (uint32_t d = 0; d < ndim; ++d) view.shape.push_back(load<uint64_t>(p + 88 + 8 * d));
  return view;
}

std::optional<FieldView> KdtrView::find_field(const std::string& name) const {
  for (uint32_t i = 0; i < field_count_; ++i) {
    if (name == reinterpret_cast<const char*>(field_at(i))) return field(i);
  }
  return std::nullopt;
}

std::optional<TensorView> KdtrView::find_tensor(const std::string& name) const {
  uint32_t low = 0, high = tensor_count_;  // the table is sorted: binary search
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const int order = std::strcmp(reinterpret_cast<const char*>(tensor_at(middle)), name.c_str());
    if (order == 0) return tensor(middle);
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return std::nullopt;
}

std::shared_ptr<const KdtrFile> KdtrFile::open(const std::string& path, const std::string& label) {
  const auto fail = [&](const std::string& what) {
    throw Error("FormatError", label + ": file: cannot be read: " + what);
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) fail(std::strerror(errno));
  std::shared_ptr<KdtrFile> file(new KdtrFile);
  file->fd_ = fd;
  struct stat info;
  if (::fstat(fd, &info) != 0) fail(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) fail("not a regular file");
  file->size_ = static_cast<size_t>(info.st_size);
  if (file->size_ > 0) {
    void* map = ::mmap(nullptr, file->size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) fail(std::strerror(errno));
    file->map_ = map;
  }
  file->view_ = std::make_unique<KdtrView>(file->map_, file->size_, label);
  file->header_.assign(static_cast<const char*>(file->map_), kHeader);
  return file;
}

void KdtrFile::check_unchanged() const {
  struct stat info;
  const bool known = ::fstat(fd_, &info) == 0;
  if (known && static_cast<size_t>(info.st_size) == size_ && std::memcmp(map_, header_.data(), header_.size()) == 0) return;
  throw Error("FormatError", view_->label() + ": file: was written to while it was in use; open it again, and let what writes it "
                                              "write another file and rename that");
}

bool KdtrFile::holds(const void* p) const {
  const auto first = reinterpret_cast<uintptr_t>(map_), at = reinterpret_cast<uintptr_t>(p);
  return at >= first && at - first < size_;
}

KdtrFile::~KdtrFile() {
  view_.reset();
  if (map_ != nullptr) ::munmap(map_, size_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace kdtree
