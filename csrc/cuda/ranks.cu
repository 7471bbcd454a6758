// What several ranks need beside the model's own operations: outside lets a library exchange, unshard puts an all-gather's pieces side by
// side, checksum sums words.
//
// Bytes: every one once in, unshard also once out. Bound by launch latency at the sizes of a step. A checksum's terms are integers,
// so that neither the grid nor the order in which blocks add decides the sum.
#include <algorithm>

#include "../checksum.h"
#include "backend.h"
#include "stream.cuh"

namespace kdtree {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr unsigned kMaxBlocks = 1056;  // eight a multiprocessor of the largest devices

struct UnshardParams {
  const char* src;
  size_t rank_units;
  int ranks;
  struct {
    char* dst;
    size_t offset, row_units;
    int per_row;
  } part[2];
  int max_rows;
  const int32_t* n_rows;
};

// A block takes `kThreads` units of one row of one rank and part. Unit: what a thread copies. ORDERED: the first part's are brought into
// the multiplication's order.
template <typename Unit, bool ORDERED>
__global__ __launch_bounds__(kThreads) void unshard_kernel(const __grid_constant__ UnshardParams p) {
  wait_for_previous();
  const auto& part = p.part[blockIdx.z];
  const int row = blockIdx.x, rank = blockIdx.y % p.ranks;
  const size_t i = blockIdx.y / p.ranks * static_cast<size_t>(kThreads) + threadIdx.x;
  if (row >= active_rows(p.n_rows, p.max_rows) * part.per_row || i >= part.row_units) return;
  const Unit* in = reinterpret_cast<const Unit*>(p.src) + rank * p.rank_units + part.offset + row * part.row_units;
  Unit* out = reinterpret_cast<Unit*>(part.dst) + (static_cast<size_t>(row) * p.ranks + rank) * part.row_units;
  if constexpr (ORDERED) out[i] = blockIdx.z == 0 ? in_order(in[i]) : in[i];
  else out[i] = in[i];
}

// Ends when everything before it has, and lets nothing in sooner.
__global__ void settle_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__global__ void checksum_kernel(unsigned long long* out, const uint32_t* data, size_t row_words, int max_rows, const int32_t* n_rows) {
  wait_for_previous();
  const size_t words = row_words * static_cast<size_t>(n_rows != nullptr ? active_rows(n_rows, max_rows) : max_rows);
  unsigned long long sum = 0;
  for (size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x; i < words; i += static_cast<size_t>(gridDim.x) * kThreads) {
    sum += checksum_term(data[i], i);
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
  if (threadIdx.x % kWarp == 0) atomicAdd(out, sum);
}

// The largest unit that divides every size and address.
int unit_of(const UnshardArgs& a) {
  size_t all = reinterpret_cast<size_t>(a.src) | a.rank_bytes;
  for (int i = 0; i < a.parts; ++i) all |= reinterpret_cast<size_t>(a.part[i].dst) | a.part[i].offset | a.part[i].row_bytes;
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

}  // namespace

// A library's launch may ask to begin when the kernel before it lets it, and then read at once what that kernel still writes: NCCL's
// symmetric kernels do from 2.28 on (they do not wait until 2.30.7). Every kernel here lets the next one in early, so that one that does
// not stands between.
void CudaBackend::outside(const char* counter, const std::function<void(void*)>& work) {
  enter(counter, true);
  if (overlaps_ && after_kernel_) launch("settle", settle_kernel, dim3(1), kWarp, 0);
  work(stream_);
  after_kernel_ = false;
  ++(*counting_)[counter];
}

void CudaBackend::unshard(const UnshardArgs& a) { put_side_by_side(a, false); }

void CudaBackend::put_side_by_side(const UnshardArgs& a, bool ordered) {
  if (a.max_rows <= 0) return;
  const size_t unit = static_cast<size_t>(unit_of(a));
  UnshardParams p{};
  p.src = static_cast<const char*>(a.src), p.rank_units = a.rank_bytes / unit, p.ranks = a.ranks;
  p.max_rows = a.max_rows, p.n_rows = a.n_rows;
  int rows = 0;
  size_t units = 0;
  for (int i = 0; i < a.parts; ++i) {
    const UnshardArgs::Part& part = a.part[i];
    p.part[i] = {static_cast<char*>(part.dst), part.offset / unit, part.row_bytes / unit, part.per_row};
    rows = std::max(rows, part.per_row), units = std::max(units, p.part[i].row_units);
  }
  const unsigned pieces = static_cast<unsigned>((units + kThreads - 1) / kThreads);
  const dim3 grid(static_cast<unsigned>(a.max_rows * rows), static_cast<unsigned>(a.ranks) * pieces, static_cast<unsigned>(a.parts));
  const auto kernel = ordered      ? unshard_kernel<uint4, true>
                      : unit == 16 ? unshard_kernel<uint4, false>
                      : unit == 4  ? unshard_kernel<uint32_t, false>
                                   : unshard_kernel<uint16_t, false>;
  launch("unshard", kernel, grid, kThreads, 0, p);
}

void CudaBackend::checksum(const ChecksumArgs& a) {
  const size_t blocks = (a.row_words * static_cast<size_t>(a.max_rows) + 8 * kThreads - 1) / (8 * kThreads);
  if (blocks == 0) return;
  launch("checksum", checksum_kernel, dim3(blocks < kMaxBlocks ? static_cast<unsigned>(blocks) : kMaxBlocks), kThreads, 0,
         reinterpret_cast<unsigned long long*>(a.out), static_cast<const uint32_t*>(a.data), a.row_words, a.max_rows, a.n_rows);
}

}  // namespace kdtree
