// draw_experts: the stated experts of docs/model.md. Bound by the 2.25 Philox calls a group; rows are independent tasks.
#include "../stated.h"

#include "backend.h"
#include "gemm.h"

namespace kdtree::cpu {

void CpuBackend::draw_experts(const DrawExpertsArgs& a) {
  const int groups = int4_groups(a.k);
  const auto row = [&](int task) {
    const auto expert = static_cast<uint32_t>(a.first + task / a.n), r = static_cast<uint32_t>(a.row + task % a.n);
    uint8_t* q = a.q + static_cast<size_t>(task) * groups * kGroupBytes;
    uint16_t* scale = a.scale + static_cast<size_t>(task) * groups;
    for (int quad = 0; quad * kStatedQuad < groups; ++quad) {
      const Words words = philox(static_cast<uint32_t>(quad), r, expert, 2, a.stated.key0, a.stated.key1);
      for (int i = 0, g = quad * kStatedQuad; i < kStatedQuad && g < groups; ++i, ++g) {
        const StatedGroup group = stated_group(a.stated, words.w[i], static_cast<uint32_t>(g), r, expert, a.k - g * kGroup);
        for (int b = 0; b < kGroupBytes; ++b) {
          q[g * kGroupBytes + b] = static_cast<uint8_t>(group.nibbles[b / 4] >> (8 * (b % 4)));
        }
        scale[g] = group.scale;
      }
    }
  };
  threads_.run(a.e * a.n, 40.0 * a.e * a.n * a.k, row);
  count("draw_experts");
}

}  // namespace kdtree::cpu
