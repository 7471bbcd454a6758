// expect: weights on their way to L2 while this device waits for others, so that an exchange's time is not the memory's too.
//
// Every part gives the same share of its tiles, evenly spaced, as many as fit the limit: whoever streams a part finds some of it
// near wherever it reads. Nothing is written, and a fetch that comes too late or is evicted costs a read.
#include "backend.h"
#include "device.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kFetchBlocks = 64, kFetchThreads = 128;
constexpr size_t kFetch = 4096;  // bytes a thread asks for at a time

__global__ __launch_bounds__(kFetchThreads) void fetch_kernel(const __grid_constant__ Expected e, float share) {
  const size_t first = blockIdx.x * static_cast<size_t>(kFetchThreads) + threadIdx.x, step = static_cast<size_t>(gridDim.x) * kFetchThreads;
  for (int i = 0; i < e.parts; ++i) {
    const ExpectedPart& p = e.part[i];
    const int taken = static_cast<int>(p.tiles * share);  // of each matrix: tile floor(j / share) is the j-th
    const size_t pieces = (p.tile_bytes + kFetch - 1) / kFetch, all = pieces * taken * p.matrices;
    for (size_t at = first; at < all; at += step) {
      const size_t piece = at % pieces, tile = at / pieces % taken, matrix = at / pieces / taken;
      const size_t which = p.ids == nullptr ? 0 : static_cast<size_t>(p.ids[matrix]);
      const size_t begin = piece * kFetch, place = static_cast<size_t>(static_cast<float>(tile) / share);
      const size_t row = place < static_cast<size_t>(p.tiles) ? place : p.tiles - 1;
      const char* from = p.data + which * p.matrix_bytes + row * p.tile_bytes + begin;
      const uint32_t size = static_cast<uint32_t>(p.tile_bytes - begin < kFetch ? p.tile_bytes - begin : kFetch);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(size) : "memory");
#else
      for (uint32_t line = 0; line < size; line += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line) : "memory");
#endif
    }
  }
}

}  // namespace

void CudaBackend::expect(const Weight& w, const int32_t* ids, int count) {
  if (ahead_ == 0 || w.n < 16 || expected_.parts == kExpectedParts) return;
  const size_t row = w.kind == WeightKind::kInt4 ? (static_cast<size_t>(w.k) + 31) / 32 * 16 : static_cast<size_t>(w.k) * (w.kind == WeightKind::kBf16 ? 2 : 4);
  if (reinterpret_cast<uintptr_t>(w.data) % 16 != 0 || row % 16 != 0) return;  // what asks in sixteens
  expected_.part[expected_.parts++] = {static_cast<const char*>(w.data), 16 * row, row * w.step(), w.n / 16, ids, ids != nullptr ? count : 1};
}

void CudaBackend::fetch_expected() {
  size_t bytes = 0;
  for (int i = 0; i < expected_.parts; ++i) {
    const ExpectedPart& p = expected_.part[i];
    bytes += p.tile_bytes * p.tiles * p.matrices;
  }
  const float share = bytes <= ahead_ ? 1.f : static_cast<float>(ahead_) / static_cast<float>(bytes);
  KD_CUDA(cudaEventRecord(forked_, stream_));
  KD_CUDA(cudaStreamWaitEvent(beside_, forked_));
  fetch_kernel<<<kFetchBlocks, kFetchThreads, 0, beside_>>>(expected_, share);
  KD_CUDA(cudaGetLastError());
  KD_CUDA(cudaEventRecord(joined_, beside_));
  expected_.parts = 0;
}

}  // namespace kdtree
