// What several ranks need beside the model's own operations. Bound by memory: every byte once in, unshard also once out.
#include <cstring>

#include "../checksum.h"
#include "backend.h"

namespace kdtree::cpu {

void CpuBackend::unshard(const UnshardArgs& a) {
  const int m = active_rows(a.n_rows, a.max_rows);
  for (int p = 0; p < a.parts; ++p) {
    const UnshardArgs::Part& part = a.part[p];
    auto* out = static_cast<unsigned char*>(part.dst);
    for (size_t row = 0; row < static_cast<size_t>(m) * part.per_row; ++row) {
      const auto* in = static_cast<const unsigned char*>(a.src) + part.offset + row * part.row_bytes;
      for (int r = 0; r < a.ranks; ++r, out += part.row_bytes) std::memcpy(out, in + r * a.rank_bytes, part.row_bytes);
    }
  }
  count("unshard");
}

void CpuBackend::checksum(const ChecksumArgs& a) {
  uint64_t sum = 0;
  for (int s = 0; s < a.spans; ++s) {
    const ChecksumArgs::Span& span = a.span[s];
    const int m = span.n_rows != nullptr ? active_rows(span.n_rows, span.max_rows) : span.max_rows;
    const auto* bytes = static_cast<const unsigned char*>(span.data);
    for (uint64_t i = 0; i < static_cast<uint64_t>(m) * span.row_words; ++i) {
      uint32_t word;
      std::memcpy(&word, bytes + 4 * i, sizeof word);
      sum += checksum_term(word, i);
    }
  }
  *a.out += sum;
  count("checksum");
}

}  // namespace kdtree::cpu
