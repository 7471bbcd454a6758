// CudaBackend: device checks, memory between guard zones, step graphs, counters. See backend.h.
#include "backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../tile_plan.h"
#include "device.cuh"
#include "tickets.cuh"

namespace kdtree {
namespace {

constexpr size_t kGuard = 256;  // bytes before and at least as many after; keeps cudaMalloc's alignment
constexpr int kGuardByte = 0xa5;
constexpr uint32_t kPoison = 0x7ffadbad;     // NaN as f32 and, twice, as f64; out of every range as i32
constexpr size_t kStaging = 64 << 10;        // downloads up to this many bytes go through pinned memory
constexpr size_t kMaxGraphs = 256;         // keys hold temperatures and lengths, so a session may see any number of them
constexpr size_t kDefaultShared = 48 << 10;  // static and dynamic together, without asking for more

constexpr size_t round_up(size_t n) { return (n + kGuard - 1) / kGuard * kGuard; }

__global__ void poison_kernel(uint32_t* p, size_t words) {
  cuda::wait_for_previous();
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < words;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    p[i] = kPoison;
  }
}

std::string arch_name(int major, int minor) { return "sm_" + std::to_string(major) + std::to_string(minor); }

}  // namespace

CudaBackend::CudaBackend(int device, bool poison) : device_(device), poison_(poison), name_("cuda:" + std::to_string(device)) {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess || count == 0) {
    cudaGetLastError();
    const std::string why = found == cudaSuccess ? "none is visible" : cudaGetErrorString(found);
    throw Error("DeviceError", "no usable CUDA device: " + why + "; see nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  if (device < 0 || device >= count) {
    throw Error("DeviceError",
                name_ + " does not exist: " + std::to_string(count) + " CUDA device(s) visible, numbered from 0");
  }
  KD_CUDA(cudaSetDevice(device_));
  int major = 0, minor = 0, shared = 0;
  KD_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
  KD_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_));
  KD_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
  shared_limit_ = static_cast<size_t>(shared);
  int multiprocessors = 0;
  KD_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device_));
  if (major < 8) throw Error("DeviceError", name_ + " is " + arch_name(major, minor) + "; this engine needs sm_80 or newer");
  cudaFuncAttributes image{};
  const cudaError_t loaded = cudaFuncGetAttributes(&image, poison_kernel);
  if (loaded == cudaErrorNoKernelImageForDevice || loaded == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    throw Error("DeviceError", "this build has no code for " + name_ + " (" + arch_name(major, minor) +
                                   "); rebuild with `kdtree build --device cuda --arch " + std::to_string(major) + "." +
                                   std::to_string(minor) + "`");
  }
  KD_CUDA(loaded);
  // Code compiled for an older architecture lacks the wait that overlapping needs, even on a device that could overlap.
  const char* choice = std::getenv("KDTREE_CUDA_OVERLAP");
  overlaps_ = major >= 9 && image.ptxVersion >= 90 && !(choice != nullptr && std::strcmp(choice, "0") == 0);
  // Clusters need an image of Hopper's level as much as the wait does.
  const char* asked = std::getenv("KDTREE_CUDA_TENSOR");
  tensor_ = !(asked != nullptr && std::strcmp(asked, "0") == 0);
  device_shape_ = {tensor_ && major >= 9 && image.ptxVersion >= 90, multiprocessors, shared_limit_};
  wgmma_ = tensor_ && major == 9 && finds_wgmma();
  device_shape_.wgmma = wgmma_;
  KD_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  KD_CUDA(cudaMallocHost(reinterpret_cast<void**>(&staging_), kStaging));
  constexpr size_t tickets = 4 * sizeof(cuda::Tickets), multiplied = (stream::kMostExperts + stream::kMostGroups) * sizeof(unsigned) + stream::kRoutesBytes;
  constexpr size_t chosen = stream::moe_rows(false) * stream::kMostTopK * sizeof(int32_t);
  KD_CUDA(cudaMalloc(reinterpret_cast<void**>(&tickets_), tickets + multiplied + chosen));
  KD_CUDA(cudaMemsetAsync(tickets_, 0, tickets + multiplied + chosen, stream_));
  multiplied_ = reinterpret_cast<unsigned*>(tickets_ + 4);
  chosen_ = reinterpret_cast<int32_t*>(multiplied_) + multiplied / sizeof(int32_t);
  if (wgmma_) {
    const int groups = stream::wide_groups(multiprocessors);
    const size_t counters = stream::wide_counters(groups);
    KD_CUDA(cudaMalloc(&exchange_, stream::wide_exchange(groups)));
    KD_CUDA(cudaMalloc(reinterpret_cast<void**>(&arrivals_), counters));
    KD_CUDA(cudaMemsetAsync(arrivals_, 0, counters, stream_));
  }
}

CudaBackend::~CudaBackend() {
  // Nothing is checked here: after an error that stays, every call fails, and a destructor has nobody to tell.
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  for (auto& [key, graph] : graphs_) cudaGraphExecDestroy(graph.exec);
  for (auto& [payload, allocation] : allocations_) give_back(payload, allocation);
  cudaFreeHost(staging_);
  cudaFreeHost(missed_);
  cudaFree(exchange_);
  cudaFree(arrivals_);
  cudaFree(tickets_);
  cudaStreamDestroy(stream_);
}

void CudaBackend::enter(const char* call, bool capturable) {
  if (capturing_ && !capturable) {
    throw Error("DeviceError", name_ + ": " + call + " inside a step that is being captured; a step may only call operations");
  }
  KD_CUDA(cudaSetDevice(device_));  // the calling thread may have worked with another device since
}

void CudaBackend::fail_launch(cudaError_t code, const char* counter, dim3 grid, int threads, size_t shared_bytes) const {
  cudaGetLastError();
  const std::string call = std::string("launch of ") + counter + " with grid (" + std::to_string(grid.x) + "," +
                           std::to_string(grid.y) + "," + std::to_string(grid.z) + "), " + std::to_string(threads) +
                           " threads, " + std::to_string(shared_bytes) + " bytes of shared memory";
  throw Error("DeviceError", name_ + ": " + cuda::describe(code, call.c_str(), __FILE__, __LINE__));
}

void CudaBackend::reserve_shared(const void* kernel, const char* counter, size_t bytes) {
  size_t& reserved = shared_reserved_[kernel];
  if (bytes <= reserved) return;
  cudaFuncAttributes attributes{};
  KD_CUDA(cudaFuncGetAttributes(&attributes, kernel));
  const size_t whole = bytes + attributes.sharedSizeBytes;
  if (whole > shared_limit_) {
    throw Error("DeviceError", name_ + ": " + counter + " needs " + std::to_string(whole) +
                                   " bytes of shared memory a block, the device has " + std::to_string(shared_limit_));
  }
  if (whole <= kDefaultShared) return;
  KD_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  reserved = bytes;
}

void CudaBackend::leave_cache(const void* kernel, int percent) {
  int& carved = carved_[kernel];
  if (carved == percent) return;
  KD_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
  carved = percent;
}

int CudaBackend::resident_clusters(const void* kernel, const char* counter, int cluster, int threads, size_t shared_bytes) {
  int& known = resident_clusters_[{kernel, shared_bytes}];
  if (known > 0) return known;
  reserve_shared(kernel, counter, shared_bytes);
  int count = 0;
  if (cluster == 1) {
    KD_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, shared_bytes));
    count *= device_shape_.multiprocessors;
  } else {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    KD_CUDA(cudaOccupancyMaxActiveClusters(&count, kernel, &config));
  }
  return known = std::max(count, 1);
}

char* CudaBackend::take(size_t bytes, const char* what, bool told) {
  enter("alloc", false);
  if (bytes > SIZE_MAX / 2) throw Error("OutOfMemory", name_ + ": " + what + ": " + std::to_string(bytes) + " bytes asked");
  const size_t tail = round_up(bytes) + kGuard - bytes;
  char* base = nullptr;
  const cudaError_t code = told ? cudaHostAlloc(reinterpret_cast<void**>(&base), kGuard + bytes + tail, cudaHostAllocMapped)
                                : cudaMalloc(reinterpret_cast<void**>(&base), kGuard + bytes + tail);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0, total = 0;
    KD_CUDA(cudaMemGetInfo(&free_bytes, &total));
    throw Error("OutOfMemory", name_ + ": " + what + ": " + std::to_string(bytes) + " bytes asked, " +
                                   std::to_string(free_bytes) + " of " + std::to_string(total) + " free, " +
                                   std::to_string(memory_.allocated) + " held by this session");
  }
  KD_CUDA(code);
  char* payload = base + kGuard;
  allocations_.emplace(payload, Allocation{what, bytes, told});
  memory_.allocated += bytes;
  memory_.peak = std::max(memory_.peak, memory_.allocated);
  KD_CUDA(cudaMemsetAsync(base, kGuardByte, kGuard, stream_));
  KD_CUDA(cudaMemsetAsync(payload + bytes, kGuardByte, tail, stream_));
  after_kernel_ = false;
  return payload;
}

void* CudaBackend::alloc(size_t bytes, const char* what) { return filled(take(bytes, what), bytes); }

void* CudaBackend::alloc_told(size_t bytes, const char* what) { return filled(take(bytes, what, true), bytes); }

void* CudaBackend::filled(char* payload, size_t bytes) {
  if (!poison_) {
    fill_zero(payload, bytes);
    return payload;
  }
  const size_t words = bytes / sizeof(kPoison);
  if (words > 0) {
    const unsigned blocks = static_cast<unsigned>(std::min<size_t>((words + 255) / 256, 1024));
    poison_kernel<<<blocks, 256, 0, stream_>>>(reinterpret_cast<uint32_t*>(payload), words);
    KD_CUDA(cudaGetLastError());
  }
  if (bytes % sizeof(kPoison) != 0) {
    KD_CUDA(cudaMemsetAsync(payload + words * sizeof(kPoison), 0xff, bytes % sizeof(kPoison), stream_));
  }
  after_kernel_ = false;
  return payload;
}

void CudaBackend::free(void* p) {
  const auto found = allocations_.find(static_cast<char*>(p));
  if (found == allocations_.end()) return;
  const Allocation allocation = found->second;
  memory_.allocated -= allocation.bytes;
  allocations_.erase(found);
  // Unchecked: owners free in destructors, also after an error that stays and was reported by the call that met it.
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  give_back(static_cast<char*>(p), allocation);
}

void CudaBackend::give_back(char* payload, const Allocation& allocation) {
  if (allocation.told) cudaFreeHost(payload - kGuard);
  else cudaFree(payload - kGuard);
}

Resident CudaBackend::resident(const void* host, size_t bytes, size_t count, size_t pitch, const char* what) {
  char* payload = take(bytes * count, what);
  if (count == 1 || pitch == bytes) {
    KD_CUDA(cudaMemcpyAsync(payload, host, bytes * count, cudaMemcpyHostToDevice, stream_));
  } else {
    KD_CUDA(cudaMemcpy2DAsync(payload, bytes, host, pitch, bytes, count, cudaMemcpyHostToDevice, stream_));
  }
  KD_CUDA(cudaStreamSynchronize(stream_));
  after_kernel_ = false;
  return {payload, bytes};
}

void CudaBackend::upload(void* dst, const void* host, size_t bytes) {
  enter("upload", false);
  KD_CUDA(cudaMemcpyAsync(dst, host, bytes, cudaMemcpyHostToDevice, stream_));
  KD_CUDA(cudaStreamSynchronize(stream_));  // the caller may reuse its buffer, pinned or not
  after_kernel_ = false;
}

void CudaBackend::download(void* host, const void* src, size_t bytes) {
  enter("download", false);
  if (const auto found = allocations_.find(static_cast<char*>(const_cast<void*>(src))); found != allocations_.end() && found->second.told) {
    KD_CUDA(cudaStreamSynchronize(stream_));
    check_exchanges();
    std::memcpy(host, src, bytes);
    return;
  }
  const bool staged = bytes <= kStaging;  // a pageable target costs the driver a detour that a round would feel
  KD_CUDA(cudaMemcpyAsync(staged ? staging_ : host, src, bytes, cudaMemcpyDeviceToHost, stream_));
  KD_CUDA(cudaStreamSynchronize(stream_));
  check_exchanges();
  if (staged) std::memcpy(host, staging_, bytes);
  after_kernel_ = false;
}

void CudaBackend::fill_zero(void* dst, size_t bytes) {
  enter("fill_zero", true);
  if (bytes == 0) return;
  KD_CUDA(cudaMemsetAsync(dst, 0, bytes, stream_));
  after_kernel_ = false;
}

std::string CudaBackend::broken_guard() {
  enter("broken_guard", false);
  std::vector<unsigned char> zones(allocations_.size() * 3 * kGuard);
  size_t at = 0;
  for (const auto& [payload, allocation] : allocations_) {
    const size_t tail = round_up(allocation.bytes) + kGuard - allocation.bytes;
    KD_CUDA(cudaMemcpyAsync(zones.data() + at, payload - kGuard, kGuard, cudaMemcpyDefault, stream_));
    KD_CUDA(cudaMemcpyAsync(zones.data() + at + kGuard, payload + allocation.bytes, tail, cudaMemcpyDefault, stream_));
    std::fill(zones.begin() + static_cast<long>(at + kGuard + tail), zones.begin() + static_cast<long>(at + 3 * kGuard),
              static_cast<unsigned char>(kGuardByte));
    at += 3 * kGuard;
  }
  KD_CUDA(cudaStreamSynchronize(stream_));
  after_kernel_ = false;
  at = 0;
  for (const auto& [payload, allocation] : allocations_) {
    const auto begin = zones.begin() + static_cast<long>(at), end = begin + static_cast<long>(3 * kGuard);
    if (std::any_of(begin, end, [](unsigned char byte) { return byte != kGuardByte; })) return allocation.what;
    at += 3 * kGuard;
  }
  return "";
}

void CudaBackend::step(const std::string& key, const std::function<void()>& body) {
  enter("step", false);
  if (!graphs_on_) {
    body();
    return;
  }
  auto found = graphs_.find(key);
  if (found == graphs_.end()) {
    if (graphs_.size() >= kMaxGraphs) drop_graphs();
    capture(key, body);
    found = graphs_.find(key);
  }
  KD_CUDA(cudaGraphLaunch(found->second.exec, stream_));
  after_kernel_ = false;
  for (const auto& [name, launches] : found->second.launches) counters_[name] += launches;
}

void CudaBackend::capture(const std::string& key, const std::function<void()>& body) {
  Graph made{};
  // Thread-local mode: what other threads of the process do with CUDA neither breaks this capture nor ends up in it.
  KD_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  capturing_ = true;
  after_kernel_ = false;
  counting_ = &made.launches;
  cudaGraph_t graph = nullptr;
  const auto end = [&] {
    capturing_ = false;
    after_kernel_ = false;
    counting_ = &counters_;
    return cudaStreamEndCapture(stream_, &graph);
  };
  try {
    body();
  } catch (...) {
    if (end() == cudaSuccess) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  KD_CUDA(end());
  const cudaError_t code = cudaGraphInstantiate(&made.exec, graph, 0);
  cudaGraphDestroy(graph);
  KD_CUDA(code);
  graphs_.emplace(key, std::move(made));
}

void CudaBackend::drop_graphs() {
  enter("drop_graphs", false);
  KD_CUDA(cudaStreamSynchronize(stream_));
  for (auto& [key, graph] : graphs_) KD_CUDA(cudaGraphExecDestroy(graph.exec));
  graphs_.clear();
}

std::unique_ptr<Backend> make_cuda_backend(int device, bool poison) { return std::make_unique<CudaBackend>(device, poison); }

}  // namespace kdtree
