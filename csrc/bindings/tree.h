// The choice of tokens, draft trees, what is accepted and recorded of them.
#pragma once
#include "arguments.h"
#include "call.h"

namespace kdtree {
namespace {

void select(int64_t handle, Tensor logits, double temperature, Tensor choice, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  const int vocab = dim(logits, 1);
  void* const scratch = call.scratch(call.backend().select_scratch(r.max_rows, vocab));
  call.run(&Backend::select, {sized<float>(logits, static_cast<int64_t>(r.max_rows) * vocab, "logits"), vocab, temperature,
        sized<int32_t>(choice, r.max_rows, "choice"), scratch, r, step_state(state)});
}

void tree_root(int64_t handle, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  StepState* const s = step_state(state);
  call.run([=](Backend& b) { b.tree_root(r, s); });
}

// costs: f64 [budget + 1] in the backend's memory, or empty.
void tree_build(int64_t handle, Tensor draft, int64_t block_size, int64_t budget, int64_t eos_id, bool chain, Tensor costs,
                std::vector<Tensor> rows, Tensor scores, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  need(budget >= 0 && budget < r.max_rows, "budget", "needs one row more than rows has");
  need(block_size >= 1 && block_size <= r.path_stride, "block_size", "exceeds the stride of path");
  const int vocab = dim(draft, 1), block = static_cast<int>(block_size), nodes = static_cast<int>(budget);
  void* const scratch = call.scratch(call.backend().tree_scratch(vocab, block, nodes));
  call.run(&Backend::tree_build, {data<float>(draft, "draft"), vocab, block, nodes, static_cast<int>(eos_id), chain,
        costs.numel() == 0 ? nullptr : sized<double>(costs, budget + 1, "costs"), scratch, r, sized<double>(scores,
        r.max_rows, "scores"), step_state(state)});
}

// out: RoundOut as i32 [10 + M].
void accept(int64_t handle, std::vector<Tensor> rows, Tensor choice, int64_t eos_id, Tensor accepted, Tensor out, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  call.run(&Backend::accept, {r, sized<int32_t>(choice, r.max_rows, "choice"), static_cast<int>(eos_id), sized<int32_t>(accepted,
        r.max_rows, "accepted"), reinterpret_cast<RoundOut*>(sized<int32_t>(out, 10 + static_cast<int64_t>(r.max_rows),
        "out")), step_state(state)});
}

void record(int64_t handle, Tensor dst, Tensor src, int64_t offset, Tensor accepted, Tensor state) {
  Call call(handle, state);
  call.run(&Backend::record, {data<float>(dst, "dst"), data<float>(src, "src"), dim(src, 1), static_cast<int>(offset), dim(dst, 0),
        data<int32_t>(accepted, "accepted"), dim(accepted, 0), step_state(state)});
}

void record_tree(int64_t handle, Tensor dst, std::vector<Tensor> rows, Tensor accepted, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  need(dst.dim() == 2 && dst.size(1) == 2 + 3 * static_cast<int64_t>(r.max_rows), "dst", "is not [entries, 2 + 3*M]");
  call.run(&Backend::record_tree, {data<int32_t>(dst, "dst"), dim(dst, 0), r.max_rows, r, data<int32_t>(accepted, "accepted"),
        step_state(state)});
}

// Their signatures.
constexpr Bound kTrees[] = {
    {"select",
     "(int backend, Tensor logits, float temperature, Tensor choice, Tensor[] rows, Tensor state) -> ()",
     boxed<select>},
    {"tree_root", "(int backend, Tensor[] rows, Tensor state) -> ()", boxed<tree_root>},
    {"tree_build",
     "(int backend, Tensor draft, int block_size, int budget, int eos_id, bool chain, Tensor costs, Tensor[] rows, "
     "Tensor scores, Tensor state) -> ()",
     boxed<tree_build>},
    {"accept",
     "(int backend, Tensor[] rows, Tensor choice, int eos_id, Tensor accepted, Tensor out, Tensor state) -> ()",
     boxed<accept>},
    {"record", "(int backend, Tensor dst, Tensor src, int offset, Tensor accepted, Tensor state) -> ()", boxed<record>},
    {"record_tree", "(int backend, Tensor dst, Tensor[] rows, Tensor accepted, Tensor state) -> ()", boxed<record_tree>},
};

}  // namespace
}  // namespace kdtree
