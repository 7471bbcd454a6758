// The driver's function is asked for by name at run time, so that nothing links against the driver and the engine loads without one.
#include "tensor_map.h"

#include <algorithm>
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

// dims and box: elements, innermost first; strides: bytes, of all but the innermost.
CUtensorMap encoded(CUtensorMapDataType type, const char* type_name, const void* base, const std::vector<cuuint64_t>& dims,
                    const std::vector<cuuint64_t>& strides, const std::vector<cuuint32_t>& box, CUtensorMapSwizzle swizzle,
                    CUtensorMapL2promotion promotion) {
  static const Encode encode = encoder();
  const std::vector<cuuint32_t> steps(dims.size(), 1);
  CUtensorMap map{};
  const CUresult code = encode(&map, type, static_cast<uint32_t>(dims.size()), const_cast<void*>(base), dims.data(), strides.data(), box.data(),
                               steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    std::string shape;
    for (const cuuint64_t d : dims) shape = std::to_string(d) + (shape.empty() ? "" : ", ") + shape;
    throw Error("DeviceError", std::string("cuTensorMapEncodeTiled refuses ") + type_name + " [" + shape + "] in boxes of " + std::to_string(box[1]) +
                                   " rows: error " + std::to_string(static_cast<int>(code)));
  }
  return map;
}

}  // namespace

CUtensorMap bf16_map(const void* base, const std::vector<uint64_t>& dims, int rows, uint64_t pitch) {
  std::vector<cuuint64_t> strides;
  std::vector<cuuint32_t> box(dims.size(), 1);
  cuuint64_t stride = sizeof(uint16_t);
  for (size_t i = 0; i + 1 < dims.size(); ++i) strides.push_back(stride *= i == 0 && pitch > 0 ? pitch : dims[i]);
  box[0] = 64, box[1] = static_cast<cuuint32_t>(rows);
  return encoded(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "bf16", base, {dims.begin(), dims.end()}, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap row_map(const void* a, const void* b, uint64_t pitch, uint64_t rows, int wide, int high, bool swizzled, int segments, bool lines, int taken) {
  const char* const low = std::min(static_cast<const char*>(a), static_cast<const char*>(b));
  const char* const up = std::max(static_cast<const char*>(a), static_cast<const char*>(b));
  const cuuint64_t two = low == up ? 1 : 2, apart = low == up ? pitch * rows : static_cast<cuuint64_t>(up - low);
  std::vector<cuuint64_t> dims{pitch, rows, two}, strides{pitch, apart};
  std::vector<cuuint32_t> box{static_cast<cuuint32_t>(wide), static_cast<cuuint32_t>(high), static_cast<cuuint32_t>(two)};
  if (segments > 1) {
    dims[0] /= static_cast<cuuint64_t>(segments);
    strides.push_back(dims[0]);
    dims.push_back(static_cast<cuuint64_t>(segments));
    box.push_back(static_cast<cuuint32_t>(taken > 0 ? taken : segments));
  }
  return encoded(CU_TENSOR_MAP_DATA_TYPE_UINT8, "bytes", low, dims, strides, box,
                 !swizzled ? CU_TENSOR_MAP_SWIZZLE_NONE : wide == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                 lines ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

CUtensorMap block_map(const void* base, uint64_t blocks, uint64_t pitch, uint64_t rows, int high, int wide, bool swizzled) {
  return encoded(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "bf16", base, {64, rows, blocks}, {pitch, 128},
                 {64, static_cast<cuuint32_t>(high), static_cast<cuuint32_t>(wide)},
                 swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace cuda
}  // namespace kdtree
