// What follows an accept: compaction of the cache, and the logs of a recorded run. Bound by memory.
#include <cstring>

#include "backend.h"

namespace kdtree::cpu {

void CpuBackend::kv_commit(const KvCommitArgs& a) {
  const StepState& s = *a.state;
  const size_t item = a.numerics == Numerics::kBf16 ? sizeof(uint16_t) : sizeof(float);
  // Sources ascend and lie at or after their targets, so an ascending copy in place never overwrites what it has yet to read.
  for (int l = 0; l < a.n_layers; ++l) {
    const MlaCache& c = a.layers[l];
    for (int j = 0; j < s.n_accepted; ++j) {
      const int from = a.accepted[j];
      if (from == j) continue;
      const size_t source = static_cast<size_t>(s.base) + from, target = static_cast<size_t>(s.base) + j;
      const auto move = [&](void* rows, size_t bytes) {
        std::memcpy(static_cast<char*>(rows) + target * bytes, static_cast<char*>(rows) + source * bytes, bytes);
      };
      move(c.latent, item * a.rank);
      move(c.k_rope, item * a.rope);
    }
  }
  count("kv_commit");
}

void CpuBackend::record(const RecordArgs& a) {
  const StepState& s = *a.state;
  for (int j = 0; j < s.n_accepted; ++j) {
    const int row = s.committed - s.n_accepted + j + a.offset;
    if (row < 0 || row >= a.dst_rows) continue;
    std::memcpy(a.dst + static_cast<size_t>(row) * a.dim, a.src + static_cast<size_t>(a.accepted[j]) * a.dim,
                sizeof(float) * a.dim);
  }
  count("record");
}

void CpuBackend::record_tree(const RecordTreeArgs& a) {
  const StepState& s = *a.state;
  count("record_tree");
  const int entry = s.rounds - 1;
  if (entry < 0 || entry >= a.entries) return;
  int32_t* out = a.dst + static_cast<size_t>(entry) * (2 + 3 * static_cast<size_t>(a.max_rows));
  out[0] = s.n_rows;
  out[1] = s.n_accepted;
  int32_t *tokens = out + 2, *parents = tokens + a.max_rows, *accepted = parents + a.max_rows;
  for (int i = 0; i < a.max_rows; ++i) {
    tokens[i] = i < s.n_rows ? a.rows.tokens[i] : -1;
    parents[i] = i < s.n_rows ? a.rows.parents[i] : -1;
    accepted[i] = i < s.n_accepted ? a.accepted[i] : -1;
  }
}

}  // namespace kdtree::cpu
