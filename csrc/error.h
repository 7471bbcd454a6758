// Errors by name. The message crosses the binding as "<name>: <text>"; engine/errors.py has one class per name.
#pragma once
#include <stdexcept>
#include <string>

namespace kdtree {

class Error : public std::runtime_error {
 public:
  // name: FormatError, ConfigError, MissingTensor, TokenError, ContextOverflow, RequestError, DrafterError,
  //       NonFiniteError, DeviceError, OutOfMemory, RankError, RankDiverged
  Error(const std::string& name, const std::string& text) : std::runtime_error(name + ": " + text) {}
};

}  // namespace kdtree
