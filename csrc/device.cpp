// Backends by device name.
#include "ops.h"

namespace kdtree {

std::unique_ptr<Backend> make_backend(const std::string& device, bool poison) {
  if (device == "cpu") return make_cpu_backend(0, poison);
  const auto refuse = [&](const char* reason) { throw Error("DeviceError", "device '" + device + "': " + reason); };
  if (device.rfind("cuda", 0) != 0) refuse("known are cpu, cuda and cuda:N");
  const std::string rest = device.substr(4);
  const bool numbered = rest.size() >= 2 && rest.size() <= 4 && rest[0] == ':' &&
                        rest.find_first_not_of("0123456789", 1) == std::string::npos;
  if (!rest.empty() && !numbered) refuse("known are cpu, cuda and cuda:N");
#ifdef KDTREE_CUDA
  return make_cuda_backend(rest.empty() ? 0 : std::stoi(rest.substr(1)), poison);
#else
  refuse("this build has no CUDA");
  return nullptr;
#endif
}

}  // namespace kdtree
