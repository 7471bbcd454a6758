// libFuzzer target: the KDTR reader, the configuration and the weights table on arbitrary bytes.
//
// Every input must be refused by an Error of a known name or be read completely; the buffer is exactly as long as the input, so
// that AddressSanitizer sees a read past it. Mutations have their CRC made right, or nothing behind the CRC would ever be reached.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/config.h"
#include "../../csrc/dflash.h"
#include "../../csrc/kdtr.h"
#include "../../csrc/model.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

uint32_t crc32(uint32_t crc, const uint8_t* p, size_t n) {
  crc = ~crc;
  for (size_t i = 0; i < n; ++i) {
    crc ^= p[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

void seal(uint8_t* data, size_t size) {
  if (size < 64) return;
  uint64_t offset;
  std::memcpy(&offset, data + 32, sizeof offset);
  const size_t end = offset < 64 ? 64 : offset > size ? size : static_cast<size_t>(offset);
  const uint32_t crc = crc32(crc32(0, data, 40), data + 64, end - 64);
  std::memcpy(data + 40, &crc, sizeof crc);
}

// What the reader promises about a file that it accepted.
void read_all(const kdtree::KdtrView& file, const uint8_t* begin, size_t size) {
  volatile uint8_t sink = 0;
  for (uint32_t i = 0; i < file.field_count(); ++i) {
    const auto field = file.field(i);
    if (!file.find_field(field.name)) std::abort();
  }
  for (uint32_t i = 0; i < file.tensor_count(); ++i) {
    const auto tensor = file.tensor(i);
    if (!file.find_tensor(file.tensor_name(i))) std::abort();
    static const uint64_t item[] = {0, 8, 4, 2, 4, 8, 1};
    uint64_t bytes = item[static_cast<uint32_t>(tensor.dtype)];
    for (const uint64_t dim : tensor.shape) bytes *= dim;
    if (bytes != tensor.bytes || tensor.shape.empty()) std::abort();
    const auto* data = static_cast<const uint8_t*>(tensor.data);
    if (data < begin || tensor.bytes == 0 || data + tensor.bytes > begin + size) std::abort();
    sink = data[0];
    sink = data[tensor.bytes - 1];
  }
  (void)sink;
}

bool is_named(const std::string& text) {
  for (const char* name : {"FormatError: input: ", "ConfigError: input: ", "MissingTensor: input: "}) {
    if (text.rfind(name, 0) == 0) return true;
  }
  return false;
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (size >= 24 && seed % 4 != 0) {
    const uint64_t real = size;
    std::memcpy(data + 16, &real, sizeof real);
  }
  if (seed % 16 != 1) seal(data, size);
  return size;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> copy(data, data + size);
  try {
    const kdtree::KdtrView file(copy.data(), copy.size(), "input");
    read_all(file, copy.data(), copy.size());
    const kdtree::ModelConfig config = kdtree::read_config(file);
    static const std::unique_ptr<kdtree::Backend> backend = kdtree::make_cpu_backend(1, false);
    using kdtree::Numerics;
    using kdtree::WeightKind;
    const kdtree::Precision precisions[] = {{Numerics::kF32, WeightKind::kF32},
                                            {Numerics::kF32, WeightKind::kInt4},
                                            {Numerics::kBf16, WeightKind::kBf16},
                                            {Numerics::kBf16, WeightKind::kInt4}};
    for (const kdtree::Precision& precision : precisions) {
      const auto weights = kdtree::load_weights(*backend, file, config, precision, kdtree::Ranks{});
      if (weights.layers.size() != static_cast<size_t>(config.num_layers)) std::abort();
      const auto drafter = kdtree::read_drafter(file, config);
      if (drafter) kdtree::load_drafter(*backend, file, config, *drafter, precision, &weights);
    }
    kdtree::rope_table(config.rotation(), 0, config.max_context < 4 ? config.max_context : 4);
  } catch (const kdtree::Error& error) {
    if (!is_named(error.what())) std::abort();
  }
  return 0;
}
