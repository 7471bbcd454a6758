// Chooses the kernel table once per process.
#include <cstdlib>
#include <vector>

#include "../error.h"
#include "kernels.h"

namespace kdtree::cpu {

namespace base { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

namespace {

std::vector<const Kernels*> usable() {  // worst first
  std::vector<const Kernels*> tables{&base::table};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back(&avx2::table);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      tables.push_back(&avx512::table);
    }
  }
#endif
  return tables;
}

}  // namespace

std::string isa_names() {
  std::string names;
  for (const Kernels* t : usable()) names += (names.empty() ? "" : " ") + std::string(t->isa);
  return names;
}

const Kernels& kernels() {
  const std::vector<const Kernels*> tables = usable();
  const char* wanted = std::getenv("KDTREE_ISA");
  if (wanted == nullptr || *wanted == '\0') return *tables.back();
  for (const Kernels* t : tables) {
    if (std::string(wanted) == t->isa) return *t;
  }
  throw Error("DeviceError", "KDTREE_ISA=" + std::string(wanted) + ": this processor has " + isa_names());
}

}  // namespace kdtree::cpu
