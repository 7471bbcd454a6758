// What several ranks need beside the model's own operations: outside lets a library exchange, unshard puts an all-gather's pieces side by
// side, exchange is all-gather and unshard in one, checksum sums words.
//
// Bytes: every one once in, unshard also once out; an exchange's go twice their number over the link. Bound by launch latency and the link's at
// the sizes of a step. A checksum's terms are integers, so that neither the grid nor the order in which blocks add decides the sum.
//
// An exchange is the backend's own kernel so that it has a place in the chain of launches: it waits for the one before, and the next one's
// weights stream meanwhile. Every rank stores its contribution into the windows of the others and takes theirs out of its own. A word of a window is
// half data, half the exchange's number, stored and loaded as one, so that a word with the right number is all the signal there is:
// nothing is fenced, reset or acknowledged. Numbers only grow, and are counted on the device, for replays of a graph: by every block for
// itself, which stay equal because every exchange has the same grid. Words alternate between two halves of the window: a rank that makes exchange e
// has had all of e-1 from every other rank, each of which had therefore ended e-2, the last to read the half that e writes.
#include <algorithm>

#include "../checksum.h"
#include "backend.h"
#include "device.cuh"
#include "nibbles.cuh"

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

// The window of a rank: a counter a block, then [2 halves, ranks, words].
constexpr int kExchangeBlocks = 64, kExchangeThreads = 512;
constexpr size_t kWord = 16, kCounters = kExchangeBlocks * sizeof(uint64_t);
constexpr size_t kMostExchanged = 4 << 20;  // bytes of a contribution: more than that the library carries as fast, in half the bytes

struct ExchangeParams {
  UnshardParams pieces;  // src: this rank's
  unsigned units;        // in it
  uint64_t* counters;    // this rank's
  struct {
    int rank;
    char* to;          // this rank's words in the first half of its window,
    const char* from;  // and its words in this one's
  } other[kWindowRanks - 1];
  size_t half;           // bytes
  int rank, first, last; // the ranks first .. last-1 are taken
  unsigned* missed;
  uint64_t patience;     // ns
};

__device__ __forceinline__ void store_word(char* to, uint64_t data, uint64_t number) {
  asm volatile("{.reg .b128 w; mov.b128 w, {%1, %2}; st.relaxed.sys.global.b128 [%0], w;}" ::"l"(to), "l"(data), "l"(number) : "memory");
}

__device__ __forceinline__ void load_word(const char* from, uint64_t& data, uint64_t& number) {
  asm volatile("{.reg .b128 w; ld.relaxed.sys.global.b128 w, [%2]; mov.b128 {%0, %1}, w;}" : "=l"(data), "=l"(number) : "l"(from) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

template <typename Unit>
__device__ __forceinline__ void split(uint64_t (&data)[sizeof(Unit) / 8 + (sizeof(Unit) < 8)], const Unit& unit) {
  if constexpr (sizeof(Unit) == 16) {
    data[0] = unit.x | static_cast<uint64_t>(unit.y) << 32, data[1] = unit.z | static_cast<uint64_t>(unit.w) << 32;
  } else {
    data[0] = unit;
  }
}

template <typename Unit>
__device__ __forceinline__ Unit joined(const uint64_t (&data)[sizeof(Unit) / 8 + (sizeof(Unit) < 8)]) {
  if constexpr (sizeof(Unit) == 16) {
    return make_uint4(static_cast<unsigned>(data[0]), static_cast<unsigned>(data[0] >> 32), static_cast<unsigned>(data[1]),
                      static_cast<unsigned>(data[1] >> 32));
  } else {
    return static_cast<Unit>(data[0]);
  }
}

// Unit `at` of a rank's contribution, in its place of dst.
template <typename Unit, bool ORDERED>
__device__ __forceinline__ void put_in_place(const ExchangeParams& p, unsigned at, int rank, const Unit& unit) {
  const bool second = at >= p.pieces.part[1].offset;
  const auto& part = p.pieces.part[second];
  const unsigned i = at - static_cast<unsigned>(part.offset), width = static_cast<unsigned>(part.row_units), row = i / width;
  Unit* const to = reinterpret_cast<Unit*>(part.dst) + (static_cast<size_t>(row) * (p.last - p.first) + rank - p.first) * width + (i - row * width);
  if constexpr (ORDERED) *to = second ? unit : in_order(unit);
  else *to = unit;
}

// A thread sends and takes the same units; warps take turns by block, so that a short contribution is many multiprocessors' to store and
// to look for. Every block passes here with the same numbers, whether it has units or not. The next launch is let in before the wait: what
// it may read before its own is older than the launch before this one, which has waited.
template <typename Unit, bool ORDERED>
__global__ __launch_bounds__(kExchangeThreads) void exchange_kernel(const __grid_constant__ ExchangeParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  wait_for_previous();
  constexpr int kWords = sizeof(Unit) == 16 ? 2 : 1;
  constexpr unsigned kStep = kExchangeBlocks * kExchangeThreads;
  const unsigned begin = (threadIdx.x / kWarp * kExchangeBlocks + blockIdx.x) * kWarp + threadIdx.x % kWarp;
  const auto taken = [&](int rank) { return p.first <= rank && rank < p.last; };
  const Unit* const src = reinterpret_cast<const Unit*>(p.pieces.src);
  Unit unit{};
  if (begin < p.units) unit = src[begin];  // in flight together with the number
  const uint64_t number = *static_cast<volatile uint64_t*>(p.counters + blockIdx.x) + 1;
  const size_t half = (number & 1) * p.half;
  // Word w of unit u: a warp's words follow each other.
  const auto word = [&](unsigned u, int w) { return half + (static_cast<size_t>(w) * p.units + u) * kWord; };
  uint64_t data[kWords];
  for (unsigned u = begin; u < p.units; u += kStep) {
    if (u != begin) unit = src[u];
    split<Unit>(data, unit);
#pragma unroll 1
    for (int i = 0; i < p.pieces.ranks - 1; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) store_word(p.other[i].to + word(u, w), data[w], number);
    }
    if (taken(p.rank)) put_in_place<Unit, ORDERED>(p, u, p.rank, unit);
  }
  for (unsigned u = begin; u < p.units; u += kStep) {
#pragma unroll 1
    for (int i = 0; i < p.pieces.ranks - 1; ++i) {
      uint64_t since = 0;
      bool came = false;
      for (unsigned tries = 1; !came; ++tries) {
        came = true;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          uint64_t seen;
          load_word(p.other[i].from + word(u, w), data[w], seen);
          came = came && seen == number;
        }
        if (came || tries % 1024 != 0) continue;
        const uint64_t t = nanoseconds();
        if (since == 0) since = t;
        if (t - since > p.patience) *static_cast<volatile unsigned*>(p.missed) = 1;
        if (*static_cast<volatile unsigned*>(p.missed) != 0) break;  // later ones then wait no longer either
      }
      if (came && taken(p.other[i].rank)) put_in_place<Unit, ORDERED>(p, u, p.other[i].rank, joined<Unit>(data));
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) p.counters[blockIdx.x] = number;
}

// Ends when everything before it has, and lets nothing in sooner.
__global__ void settle_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A row of blocks a span.
__global__ void checksum_kernel(const __grid_constant__ ChecksumArgs a) {
  wait_for_previous();
  const ChecksumArgs::Span& span = a.span[blockIdx.y];
  const uint32_t* const data = static_cast<const uint32_t*>(span.data);
  const size_t words = span.row_words * static_cast<size_t>(span.n_rows != nullptr ? active_rows(span.n_rows, span.max_rows) : span.max_rows);
  unsigned long long sum = 0;
  for (size_t i = blockIdx.x * static_cast<size_t>(kThreads) + threadIdx.x; i < words; i += static_cast<size_t>(gridDim.x) * kThreads) {
    sum += checksum_term(data[i], i);
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAll, sum, mask);
  if (threadIdx.x % kWarp == 0) atomicAdd(reinterpret_cast<unsigned long long*>(a.out), sum);
}

// The largest unit that divides every size and address.
int unit_of(const UnshardArgs& a) {
  size_t all = reinterpret_cast<size_t>(a.src) | a.rank_bytes;
  for (int i = 0; i < a.parts; ++i) all |= reinterpret_cast<size_t>(a.part[i].dst) | a.part[i].offset | a.part[i].row_bytes;
  return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 2;
}

UnshardParams pieces_of(const UnshardArgs& a) {
  const size_t unit = static_cast<size_t>(unit_of(a));
  UnshardParams p{};
  p.src = static_cast<const char*>(a.src), p.rank_units = a.rank_bytes / unit, p.ranks = a.ranks;
  p.max_rows = a.max_rows, p.n_rows = a.n_rows;
  for (int i = 0; i < a.parts; ++i) {
    const UnshardArgs::Part& part = a.part[i];
    p.part[i] = {static_cast<char*>(part.dst), part.offset / unit, part.row_bytes / unit, part.per_row};
  }
  return p;
}

// Words of a contribution, and room for those of one in a half of a window.
size_t words_of(const UnshardArgs& a) {
  const int unit = unit_of(a);
  return a.rank_bytes / static_cast<size_t>(unit) * (unit == 16 ? 2 : 1);
}

size_t window_words(const Window& w) {
  return w.bytes <= kCounters ? 0 : (w.bytes - kCounters) / (2 * static_cast<size_t>(w.count) * kWord);
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

// Devices whose atomic operations reach each other's memory are linked by NVLink; across PCIe they do not.
bool cuda_linked(int device, int other) {
  int atomics = 0;
  const cudaError_t code = cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other);
  if (code != cudaSuccess) cudaGetLastError();
  return device == other || (code == cudaSuccess && atomics != 0);
}

void CudaBackend::open(const Window& window) {
  KD_CUDA(cudaMallocHost(reinterpret_cast<void**>(&missed_), sizeof *missed_));
  *missed_ = 0;
  window_ = window;
}

void CudaBackend::check_exchanges() const {
  if (missed_ == nullptr || *static_cast<volatile unsigned*>(missed_) == 0) return;
  throw Error("RankError", "rank " + std::to_string(window_.rank) + " of " + std::to_string(window_.count) +
                               ": another rank is gone, or did not come to an exchange in time");
}

bool CudaBackend::gathers(const UnshardArgs& a) const {
  return window_.count == a.ranks && a.rank_bytes > 0 && a.rank_bytes <= kMostExchanged && words_of(a) <= window_words(window_);
}

void CudaBackend::exchange(const UnshardArgs& a, bool ordered) {
  const size_t unit = static_cast<size_t>(unit_of(a));
  ExchangeParams p{};
  p.pieces = pieces_of(a);
  if (a.parts < 2) p.pieces.part[1].offset = SIZE_MAX;
  p.units = static_cast<unsigned>(a.rank_bytes / unit);
  p.rank = window_.rank, p.first = 0, p.last = a.origin == Origin::kLead ? 1 : a.ranks;
  const size_t share = window_words(window_) * kWord;
  const auto words = [&](int owner, int sender) { return static_cast<char*>(window_.of[owner]) + kCounters + share * static_cast<size_t>(sender); };
  p.counters = static_cast<uint64_t*>(window_.of[p.rank]);
  p.half = share * static_cast<size_t>(a.ranks);
  for (int i = 0; i < a.ranks - 1; ++i) {
    const int other = (p.rank + 1 + i) % a.ranks;  // not all of them to the same one first
    p.other[i] = {other, words(other, p.rank), words(p.rank, other)};
  }
  p.missed = missed_, p.patience = static_cast<uint64_t>(1e9 * window_.seconds);
  const auto kernel = ordered      ? exchange_kernel<uint4, true>
                      : unit == 16 ? exchange_kernel<uint4, false>
                      : unit == 4  ? exchange_kernel<uint32_t, false>
                                   : exchange_kernel<uint16_t, false>;
  launch(a.origin == Origin::kLead ? "broadcast" : "all_gather", kernel, dim3(kExchangeBlocks), kExchangeThreads, 0, p);
}

void CudaBackend::put_side_by_side(const UnshardArgs& a, bool ordered) {
  if (a.max_rows <= 0) return;
  if (a.origin != Origin::kGathered) return exchange(a, ordered);
  const int unit = unit_of(a);
  const UnshardParams p = pieces_of(a);
  int rows = 0;
  size_t units = 0;
  for (int i = 0; i < a.parts; ++i) rows = std::max(rows, a.part[i].per_row), units = std::max(units, p.part[i].row_units);
  const unsigned pieces = static_cast<unsigned>((units + kThreads - 1) / kThreads);
  const dim3 grid(static_cast<unsigned>(a.max_rows * rows), static_cast<unsigned>(a.ranks) * pieces, static_cast<unsigned>(a.parts));
  const auto kernel = ordered      ? unshard_kernel<uint4, true>
                      : unit == 16 ? unshard_kernel<uint4, false>
                      : unit == 4  ? unshard_kernel<uint32_t, false>
                                   : unshard_kernel<uint16_t, false>;
  launch("unshard", kernel, grid, kThreads, 0, p);
}

void CudaBackend::checksum(const ChecksumArgs& a) {
  size_t words = 0;
  for (int i = 0; i < a.spans; ++i) words = std::max(words, a.span[i].row_words * static_cast<size_t>(a.span[i].max_rows));
  const size_t blocks = std::min<size_t>((words + 8 * kThreads - 1) / (8 * kThreads), kMaxBlocks);
  if (blocks > 0) launch("checksum", checksum_kernel, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(a.spans)), kThreads, 0, a);
}

}  // namespace kdtree
