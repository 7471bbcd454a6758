// torch.ops.kdtree: every operation of ops.h alone, on tensors in the memory of the backend named by a handle, for tests and
// benchmarks. Registration only; the families are in bindings/, headers that this file alone includes: torch's headers take the compiler
// a second each time.
#include "bindings/call.h"
#include "bindings/draft.h"
#include "bindings/mla.h"
#include "bindings/products.h"
#include "bindings/ranks.h"
#include "bindings/tree.h"

namespace kdtree {
namespace {

template <class F>
void each(const F& f) {
  for (const Bound& b : kBackends) f(b);
  for (const Bound& b : kProducts) f(b);
  for (const Bound& b : kMla) f(b);
  for (const Bound& b : kTrees) f(b);
  for (const Bound& b : kDrafter) f(b);
  for (const Bound& b : kRanks) f(b);
}

}  // namespace
}  // namespace kdtree

KDTREE_LIBRARY_FRAGMENT(KDTREE_LIBRARY, m) {
  kdtree::each([&](const kdtree::Bound& b) { m.def((std::string(b.name) + b.signature).c_str()); });
}

KDTREE_LIBRARY_IMPL(KDTREE_LIBRARY, m) {
  kdtree::each([&](const kdtree::Bound& b) { m.impl(b.name, b.call); });
}
