// The file's own drafter.
#pragma once
#include "arguments.h"
#include "call.h"

namespace kdtree {
namespace {

// index: i32, or empty for the rows in order.
void gather_rows(int64_t handle, Tensor dst, int64_t column, Tensor src, Tensor index, Tensor state) {
  Call call(handle, state);
  const int n = dim(src, 1), ldd = dim(dst, 1), m = dim(dst, 0);
  need(column >= 0 && column <= ldd - n, "column", "leaves dst");
  const int32_t* by = index.numel() == 0 ? nullptr : sized<int32_t>(index, m, "index");
  call.run(&Backend::gather_rows, {data<float>(dst, "dst") + column, ldd, data<float>(src, "src"), n, by, m, &step_state(state)->n_rows});
}

void draft_block(int64_t handle, Tensor tokens, int64_t mask_id, Tensor state) {
  Call call(handle, state);
  call.run(&Backend::draft_block, {data<int32_t>(tokens, "tokens"), dim(tokens, 0), static_cast<int>(mask_id), step_state(state)});
}

DraftDims draft_dims(const std::vector<int64_t>& d) {
  need(d.size() == 3, "dims", "is not heads, kv_heads, head_dim");
  return {static_cast<int>(d[0]), static_cast<int>(d[1]), static_cast<int>(d[2])};
}

// q: empty for none; it is changed in place. Row 0 stands at kv_len.
void draft_prepare(int64_t handle, std::vector<int64_t> dims, Tensor q, Tensor k, Tensor v, Tensor q_norm_w, Tensor k_norm_w, double eps,
                   Tensor cos_sin, Tensor keys, Tensor values, Tensor state) {
  Call call(handle, state);
  const DraftDims d = draft_dims(dims);
  const int64_t m = k.size(0), width = static_cast<int64_t>(d.kv_heads) * d.head_dim;
  StepState* s = step_state(state);
  call.run(&Backend::draft_prepare, {d, q.numel() == 0 ? nullptr : sized<float>(q, m * d.heads * d.head_dim, "q"), sized<float>(k,
        m * width, "k"), sized<float>(v, m * width, "v"), sized<float>(q_norm_w, d.head_dim, "q_norm_w"),
        sized<float>(k_norm_w, d.head_dim, "k_norm_w"), static_cast<float>(eps), data<float>(cos_sin, "cos_sin"),
        {data<float>(keys, "keys"), data<float>(values, "values")}, &s->kv_len, static_cast<int>(m), &s->n_rows});
}

void draft_attention(int64_t handle, std::vector<int64_t> dims, Tensor q, Tensor keys, Tensor values, Tensor o, Tensor state) {
  Call call(handle, state);
  const DraftDims d = draft_dims(dims);
  const int64_t m = q.size(0), width = static_cast<int64_t>(d.heads) * d.head_dim;
  StepState* s = step_state(state);
  call.run(&Backend::draft_attention, {d, sized<float>(q, m * width, "q"), {data<float>(keys, "keys"), data<float>(values, "values")},
        sized<float>(o, m * width, "o"), dim(keys, 0), static_cast<int>(m), &s->n_rows, s});
}

// Their signatures.
constexpr Bound kDrafter[] = {
    {"gather_rows", "(int backend, Tensor dst, int column, Tensor src, Tensor index, Tensor state) -> ()", boxed<gather_rows>},
    {"draft_block", "(int backend, Tensor tokens, int mask_id, Tensor state) -> ()", boxed<draft_block>},
    {"draft_prepare",
     "(int backend, int[] dims, Tensor q, Tensor k, Tensor v, Tensor q_norm_w, Tensor k_norm_w, float eps, Tensor "
     "cos_sin, Tensor keys, Tensor values, Tensor state) -> ()",
     boxed<draft_prepare>},
    {"draft_attention",
     "(int backend, int[] dims, Tensor q, Tensor keys, Tensor values, Tensor o, Tensor state) -> ()",
     boxed<draft_attention>},
};

}  // namespace
}  // namespace kdtree
