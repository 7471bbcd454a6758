// Checked CUDA calls: an error becomes DeviceError or OutOfMemory and names the call, the file and the line.
//
// An error that the device raises while it runs kernels (illegal address, device-side assert, ...) stays: every later call in
// the process fails with it. Its message then says "the CUDA context is lost", the words by which the harness replaces a worker.
#pragma once
#include <cuda_runtime.h>

#include <string>

#include "../error.h"

namespace kdtree {
namespace cuda {

// Errors after which the context still works are the ones that arise before anything runs on the device.
inline bool context_survives(cudaError_t code) {
  switch (code) {
    case cudaErrorInvalidValue:
    case cudaErrorMemoryAllocation:
    case cudaErrorInitializationError:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDevice:
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit: return true;
    default: return false;
  }
}

inline std::string describe(cudaError_t code, const char* call, const char* file, int line) {
  std::string where = file;
  where = where.substr(where.find_last_of('/') + 1);  // the build folder's part of the path says nothing
  std::string text = std::string(call) + " failed: " + cudaGetErrorName(code) + ", " + cudaGetErrorString(code) + " (" + where +
                     ":" + std::to_string(line) + ")";
  if (!context_survives(code)) text += "; the CUDA context is lost, end this process";
  return text;
}

inline void check(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // takes an error that does not stay out of the next call's way
  throw Error(code == cudaErrorMemoryAllocation ? "OutOfMemory" : "DeviceError", describe(code, call, file, line));
}

}  // namespace cuda
}  // namespace kdtree

#define KD_CUDA(call) ::kdtree::cuda::check((call), #call, __FILE__, __LINE__)
