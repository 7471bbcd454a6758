// Memory, counters and construction of the CPU backend.
#include "backend.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace kdtree::cpu {
namespace {

constexpr size_t kAlign = 64, kGuard = 256;  // bytes before and after a buffer that nobody may write
constexpr unsigned char kGuardByte = 0xA5;

// Memory the machine has; 0 if it does not say. An allocation above it can only end in the kernel killing the process.
size_t physical_memory() {
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && size > 0 ? static_cast<size_t>(pages) * static_cast<size_t>(size) : 0;
}

bool intact(const unsigned char* p, size_t n) {
  return std::all_of(p, p + n, [](unsigned char c) { return c == kGuardByte; });
}

size_t padded(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

CpuBackend::CpuBackend(int threads, bool poison)
    : k_(kernels()), isa_(std::string("isa_") + k_.isa), threads_(threads > 0 ? threads : default_threads()), poison_(poison) {}

CpuBackend::~CpuBackend() {
  for (auto& [p, block] : blocks_) std::free(block.raw);
}

void* CpuBackend::alloc(size_t bytes, const char* what) {
  const size_t machine = physical_memory();
  const auto refuse = [&] {
    throw Error("OutOfMemory", std::string(what) + ": " + std::to_string(bytes) + " bytes on top of " +
                                   std::to_string(memory_.allocated) + ", the machine has " + std::to_string(machine));
  };
  if (machine != 0 && (bytes > machine || memory_.allocated > machine - bytes)) refuse();
  // calloc, because zeros from the system cost nothing until they are touched.
  auto* raw = static_cast<unsigned char*>(std::calloc(1, padded(bytes) + 2 * kGuard + kAlign));
  if (raw == nullptr) refuse();
  const size_t skew = (kAlign - reinterpret_cast<uintptr_t>(raw) % kAlign) % kAlign;
  unsigned char* p = raw + skew + kGuard;
  std::memset(p - kGuard, kGuardByte, kGuard);
  std::memset(p + bytes, kGuardByte, padded(bytes) - bytes + kGuard);
  if (poison_) std::memset(p, 0xFF, bytes);  // NaN as f32 and f64, -1 as an integer
  blocks_[p] = {what, raw, bytes};
  memory_.allocated += bytes;
  memory_.peak = std::max(memory_.peak, memory_.allocated);
  return p;
}

void CpuBackend::free(void* p) {
  const auto found = blocks_.find(p);
  if (found == blocks_.end()) return;
  memory_.allocated -= found->second.bytes;
  std::free(found->second.raw);
  blocks_.erase(found);
}

void CpuBackend::upload(void* dst, const void* host, size_t bytes) { std::memcpy(dst, host, bytes); }

void CpuBackend::download(void* host, const void* src, size_t bytes) { std::memcpy(host, src, bytes); }

void CpuBackend::fill_zero(void* dst, size_t bytes) { std::memset(dst, 0, bytes); }

std::string CpuBackend::broken_guard() {
  for (const auto& [p, block] : blocks_) {
    const auto* bytes = static_cast<const unsigned char*>(p);
    if (!intact(bytes - kGuard, kGuard) || !intact(bytes + block.bytes, padded(block.bytes) - block.bytes + kGuard)) {
      return block.what;
    }
  }
  return "";
}

void raise_fault(StepState* state, Fault fault, int row, int detail) {
  if (state->error != kFaultNone) return;
  state->error = fault;
  state->error_row = row;
  state->error_detail = detail;
}

}  // namespace kdtree::cpu

namespace kdtree {

std::unique_ptr<Backend> make_cpu_backend(int threads, bool poison) {
  return std::make_unique<cpu::CpuBackend>(threads, poison);
}

}  // namespace kdtree
