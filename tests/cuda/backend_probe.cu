// What only C++ can ask of CudaBackend: guard zones, poison, accounting, and steps whose body fails. Prints what is wrong.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/ops.h"

namespace {

int failures = 0;

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("wrong: %s\n", what);
  ++failures;
}

template <typename Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const kdtree::Error& error) {
    return error.what();
  }
  return "";
}

void guards(bool poison) {
  const auto backend = kdtree::make_cuda_backend(0, poison);
  auto* small = static_cast<char*>(backend->alloc(101, "small"));
  auto* large = static_cast<char*>(backend->alloc(5000, "large"));
  auto* none = static_cast<char*>(backend->alloc(0, "none"));
  expect(reinterpret_cast<size_t>(small) % 64 == 0 && reinterpret_cast<size_t>(large) % 64 == 0, "alignment");
  expect(backend->memory().allocated == 5101 && backend->memory().peak == 5101, "bytes held");
  expect(backend->broken_guard().empty(), "untouched guards");
  std::vector<unsigned char> bytes(101);
  backend->download(bytes.data(), small, bytes.size());
  const unsigned char pattern[4] = {0xad, 0xdb, 0xfa, 0x7f};
  for (size_t i = 0; i < 101; ++i)
    expect(bytes[i] == (!poison ? 0 : i < 100 ? pattern[i % 4] : 0xff), "what fresh memory holds");
  float number;
  std::memcpy(&number, bytes.data(), sizeof number);
  expect(!poison || number != number, "poison is a NaN");
  const std::vector<std::pair<char*, const char*>> places = {{small + 101, "small"},  {small - 1, "small"},
                                                             {large + 5000, "large"}, {large + 5255, "large"},
                                                             {large - 256, "large"},  {none, "none"}};
  for (const auto& [outside, owner] : places) {
    char before;
    cudaMemcpy(&before, outside, 1, cudaMemcpyDeviceToHost);
    cudaMemset(outside, before ^ 1, 1);
    cudaDeviceSynchronize();
    expect(backend->broken_guard() == owner, "a byte written outside a buffer is told, with the buffer's name");
    cudaMemset(outside, before, 1);
    cudaDeviceSynchronize();
  }
  expect(backend->broken_guard().empty(), "mended guards");
  backend->free(small);
  backend->free(nullptr);
  expect(backend->memory().allocated == 5000 && backend->memory().peak == 5101, "bytes held after a free");
  const std::string text = error_of([&] { backend->alloc(size_t{1} << 45, "too much"); });
  expect(text.rfind("OutOfMemory: cuda:0: too much: 35184372088832 bytes asked, ", 0) == 0, "out of memory");
  backend->free(backend->alloc(1 << 20, "after"));
}

void steps() {
  const auto backend = kdtree::make_cuda_backend(0, true);
  auto* state = static_cast<kdtree::StepState*>(backend->alloc(sizeof(kdtree::StepState), "state"));
  auto* rows = static_cast<int32_t*>(backend->alloc(4 * sizeof(int32_t), "rows"));
  kdtree::StepState host{};
  const auto root = [&] { backend->tree_root({rows, rows + 1, rows + 2, rows + 3, 1, 1}, state); };
  const auto token = [&](int bonus) {
    host.bonus = bonus;
    backend->upload(state, &host, sizeof host);
    backend->step("root", root);
    int32_t seen = 0;
    backend->download(&seen, rows, sizeof seen);
    return seen;
  };
  expect(token(5) == 5 && token(6) == 6 && token(7) == 7, "a replay reads what is there when it runs");
  expect(backend->counters().at("tree_root") == 3, "replays are counted");
  for (int i = 0; i < 2; ++i) {
    const auto fails = [&] {
      root();
      throw kdtree::Error("RequestError", "on purpose");
    };
    expect(error_of([&] { backend->step("fails", fails); }) == "RequestError: on purpose", "a body's own error");
  }
  const auto uploads = [&] { backend->upload(state, &host, sizeof host); };
  expect(error_of([&] { backend->step("uploads", uploads); }).find("upload inside a step") != std::string::npos,
         "an upload in a step");
  expect(token(8) == 8 && backend->counters().at("tree_root") == 4,
         "steps after one that failed; what was not run is not counted");
  for (int i = 0; i < 600; ++i) backend->step("one of many " + std::to_string(i), root);
  expect(token(11) == 11 && backend->counters().at("tree_root") == 605, "more keys than graphs are kept");
  backend->drop_graphs();
  expect(token(9) == 9, "captured anew after drop_graphs");
  backend->set_graphs(false);
  expect(token(10) == 10, "eager");
}

__global__ void copy_early(unsigned long long* to, const unsigned long long* from) { *to = *from; }

// Work from outside that may begin before the launch before it has ended, and does not wait: as NCCL's symmetric kernels were from 2.28 on.
void outside() {
  constexpr size_t kWords = 16 << 20;
  const auto backend = kdtree::make_cuda_backend(0, false);
  auto* words = static_cast<uint32_t*>(backend->alloc(kWords * sizeof(uint32_t), "words"));
  auto* sums = static_cast<unsigned long long*>(backend->alloc(2 * sizeof(unsigned long long), "sums"));
  const auto body = [&] {
    backend->fill_zero(sums, 2 * sizeof *sums);
    backend->checksum({reinterpret_cast<uint64_t*>(sums), 1, {{words, kWords, 1, nullptr}}});
    backend->outside("copy", [&](void* stream) {
      cudaLaunchAttribute early{};
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
      cudaLaunchConfig_t config{};
      config.gridDim = config.blockDim = dim3(1);
      config.stream = static_cast<cudaStream_t>(stream);
      config.attrs = &early, config.numAttrs = 1;
      if (cudaLaunchKernelEx(&config, copy_early, sums + 1, static_cast<const unsigned long long*>(sums)) != cudaSuccess) {
        throw kdtree::Error("DeviceError", "copy");
      }
    });
  };
  for (const bool graphs : {true, false}) {
    backend->set_graphs(graphs);
    for (int i = 0; i < 20; ++i) {
      backend->step("outside", body);
      unsigned long long seen[2] = {0, 0};
      backend->download(seen, sums, sizeof seen);
      expect(seen[0] != 0 && seen[0] == seen[1], graphs ? "what comes from outside waits, in a graph" : "what comes from outside waits");
    }
  }
}

}  // namespace

int main() {
  outside();
  guards(false);
  guards(true);
  steps();
  std::printf("%d wrong\n", failures);
  return failures == 0 ? 0 : 1;
}
