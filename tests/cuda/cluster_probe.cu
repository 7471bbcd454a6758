// Whether blocks of a cluster find what the others wrote behind cluster.cuh's barrier, while rings fill from memory that is not in L2. For
// comparison the same behind a block's fence, and behind none. Prints `NAME WRONG OF` a line; fails if the engine's own barrier does.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "../../csrc/cuda/cluster.cuh"
#include "../../csrc/cuda/stream.cuh"

namespace {

using namespace kdtree::cuda;

constexpr int kBlocks = 8, kThreads = 256, kDepth = 8, kUnits = 4;  // blocks a cluster; units between two exchanges
constexpr int kExchanges = 1000, kLaunches = 60;
constexpr size_t kBytes = size_t{2} << 30;  // many times the L2
constexpr int kRing = kThreads / kWarp * kDepth * kUnitBytes;

enum class Barrier { kEngine, kBlockFence, kNoFence };

template <Barrier KIND>
__device__ void arrive() {
  if constexpr (KIND == Barrier::kEngine) {
    cluster_arrive<kBlocks>();
  } else {
    if constexpr (KIND == Barrier::kBlockFence) __threadfence_block();
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}

__device__ float4 written(int exchange, int rank) {
  const float v = static_cast<float>((exchange * kBlocks + rank) * kThreads + threadIdx.x);  // below 2^24, so exact
  return make_float4(v, -v, v + 1.f, v + 2.f);
}

// What the linear product does, without its arithmetic: units through a ring, then an exchange.
template <Barrier KIND>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads) exchange_kernel(const uint8_t* memory, unsigned long long* wrong, uint32_t* sink) {
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ volatile unsigned long long found[kThreads];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, rank = cluster_rank<kBlocks>();
  const uint32_t ring = shared_address(smem) + warp * kDepth * kUnitBytes, partial = shared_address(smem) + kRing;
  size_t at = (static_cast<size_t>(blockIdx.x) * (kThreads / kWarp) + warp) * kUnitBytes + lane * 16;
  int filled = 0, read = 0;
  const auto fetch = [&]() {
    const uint32_t slot = ring + filled++ % kDepth * kUnitBytes + lane * 16;
    copy16(slot, memory + at, 16);
    copy16(slot + 512, memory + at + 512, 16);
    copy_commit();
    at = (at + static_cast<size_t>(gridDim.x) * (kThreads / kWarp) * kUnitBytes) % kBytes;
  };
  for (int i = 0; i < kDepth - 1; ++i) fetch();
  unsigned long long bad = 0;
  uint32_t seen = 0;
  for (int exchange = 0; exchange < kExchanges; ++exchange) {
    for (int unit = 0; unit < kUnits; ++unit) {
      copy_wait<kDepth - 2>();
      __syncwarp();
      fetch();
      seen += load_shared16(ring + read++ % kDepth * kUnitBytes + lane * 32).x;
    }
    if (exchange > 0) cluster_wait<kBlocks>();
    *reinterpret_cast<float4*>(smem + kRing + threadIdx.x * 16) = written(exchange, rank);
    arrive<KIND>();
    cluster_wait<kBlocks>();
    for (int other = 0; other < kBlocks; ++other) {
      const float4 got = load_cluster16<kBlocks>(partial + threadIdx.x * 16, other), want = written(exchange, other);
      bad += got.x != want.x || got.y != want.y || got.z != want.z || got.w != want.w;
    }
    found[threadIdx.x] = bad;  // a store before the arrival waits for the loads; after it a block may write, or leave
    arrive<KIND>();
  }
  copy_wait<0>();
  cluster_wait<kBlocks>();
  if (bad > 0) atomicAdd(wrong, bad);
  if (seen == 0xffffffffu) *sink = seen;  // keeps the ring's reads
}

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(code));
  std::exit(2);
}

template <Barrier KIND>
unsigned long long run(const char* name, const uint8_t* memory, unsigned long long* wrong, int clusters) {
  constexpr int kShared = kRing + kThreads * 16;
  check(cudaFuncSetAttribute(exchange_kernel<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "shared memory");
  check(cudaMemset(wrong, 0, sizeof *wrong), "memset");
  for (int i = 0; i < kLaunches; ++i) {
    exchange_kernel<KIND><<<clusters * kBlocks, kThreads, kShared>>>(memory, wrong, reinterpret_cast<uint32_t*>(wrong + 1));
  }
  check(cudaGetLastError(), name);
  unsigned long long found = 0;
  check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost), name);
  std::printf("%s %llu %llu\n", name, found, static_cast<unsigned long long>(clusters) * kBlocks * kThreads * kBlocks * kExchanges * kLaunches);
  return found;
}

}  // namespace

int main() {
  int multiprocessors = 0;
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "device");
  uint8_t* memory = nullptr;
  unsigned long long* wrong = nullptr;
  check(cudaMalloc(&memory, kBytes), "memory");
  check(cudaMemset(memory, 1, kBytes), "memory");
  check(cudaMalloc(&wrong, 2 * sizeof *wrong), "memory");
  const int clusters = 2 * multiprocessors / kBlocks;
  const unsigned long long found = run<Barrier::kEngine>("engine", memory, wrong, clusters);
  run<Barrier::kBlockFence>("block-fence", memory, wrong, clusters);
  run<Barrier::kNoFence>("no-fence", memory, wrong, clusters);
  return found > 0 ? 1 : 0;
}
