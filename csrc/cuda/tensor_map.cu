// The driver's function is asked for by name at run time, so that nothing links against the driver and the engine loads without one.
#include "tensor_map.h"

#include <string>

#include "check.h"

namespace kdtree {
namespace cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  KD_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
  KD_CUDA(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    throw Error("DeviceError",
                "the CUDA driver has no cuTensorMapEncodeTiled; it is older than 12.0: update it or set KDTREE_CUDA_TENSOR=0");
  }
  return reinterpret_cast<Encode>(found);
}

}  // namespace

CUtensorMap bf16_map(const void* base, const std::vector<uint64_t>& dims, int rows, uint64_t pitch) {
  static const Encode encode = encoder();
  const auto rank = static_cast<uint32_t>(dims.size());
  std::vector<cuuint64_t> sizes(dims.begin(), dims.end()), strides;  // strides in bytes, of all but the innermost
  std::vector<cuuint32_t> box(rank, 1), steps(rank, 1);
  cuuint64_t stride = sizeof(uint16_t);
  for (uint32_t i = 0; i + 1 < rank; ++i) strides.push_back(stride *= i == 0 && pitch > 0 ? pitch : sizes[i]);
  box[0] = 64, box[1] = static_cast<cuuint32_t>(rows);
  CUtensorMap map{};
  const CUresult code = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(base), sizes.data(), strides.data(),
                               box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    std::string shape;
    for (uint64_t d : dims) shape = std::to_string(d) + (shape.empty() ? "" : ", ") + shape;
    throw Error("DeviceError", "cuTensorMapEncodeTiled refuses bf16 [" + shape + "] in boxes of " + std::to_string(rows) +
                                   " rows: error " + std::to_string(static_cast<int>(code)));
  }
  return map;
}

}  // namespace cuda
}  // namespace kdtree
