// MLA, and the cache.
#pragma once
#include "arguments.h"
#include "call.h"

namespace kdtree {
namespace {

MlaDims dims_of(const std::vector<int64_t>& d) {
  need(d.size() == 5, "dims", "is not heads, rank, nope, rope, v");
  const auto at = [&](int i) { return static_cast<int>(d[i]); };
  return {at(0), at(1), at(2), at(3), at(4)};
}

// What only products read decides for the whole of an MLA operation: f32, or bf16 as u16.
MlaDims dims_of(const std::vector<int64_t>& d, const Tensor& read) {
  MlaDims dims = dims_of(d);
  dims.numerics = numerics_of(is_bf16(read));
  return dims;
}

MlaCache cache_of(const Tensor& latent, const Tensor& k_rope, Numerics numerics) {
  return {activation(latent, latent.numel(), numerics, "latent"), activation(k_rope, k_rope.numel(), numerics, "k_rope"),
          dim(latent, 0)};
}

Weight absorbed(const Tensor& kv_b, const MlaDims& d) {
  need(kv_b.numel() == static_cast<int64_t>(d.heads) * (d.nope + d.v) * d.rank, "kv_b", "has the wrong size");
  return weight_of(kv_b, d.rank);
}

void mla_prepare(int64_t handle, std::vector<int64_t> dims, Tensor q, Tensor kv, Tensor norm_w, double eps, Tensor kv_b, Tensor cos_sin,
                 Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, q_lat);
  const Rows r = rows_of(rows);
  const int64_t m = r.max_rows, h = d.heads;
  call.run(&Backend::mla_prepare, {d, sized<float>(q, m * h * (d.nope + d.rope), "q"), sized<float>(kv, m * (d.rank + d.rope), "kv"),
        sized<float>(norm_w, d.rank, "norm_w"), static_cast<float>(eps), absorbed(kv_b, d), data<float>(cos_sin,
        "cos_sin"), activation(q_lat, m * h * d.rank, d.numerics, "q_lat"), activation(q_rope, m * h * d.rope, d.numerics,
        "q_rope"), cache_of(latent, k_rope, d.numerics), r, step_state(state)});
}

MlaAttentionArgs attention_args(Call& call, const MlaDims& d, double scale, const Tensor& q_lat, const Tensor& q_rope, const Tensor& latent,
                                const Tensor& k_rope, const Tensor& o_lat, int64_t max_keys, const Rows& r, const Tensor& state) {
  const int64_t m = r.max_rows, h = d.heads;
  const int keys = static_cast<int>(max_keys);
  void* const scratch = call.scratch(call.backend().attention_scratch(d, r.max_rows, keys));
  return {d, static_cast<float>(scale), activation(q_lat, m * h * d.rank, d.numerics, "q_lat"), activation(q_rope, m * h * d.rope,
          d.numerics, "q_rope"), cache_of(latent, k_rope, d.numerics), activation(o_lat, m * h * d.rank, d.numerics, "o_lat"), keys,
          scratch, r, step_state(state)};
}

// Of m rows.
MlaValueArgs value_args(const MlaDims& d, const Tensor& o_lat, const Tensor& kv_b, const Tensor& o, int m, const Tensor& state) {
  const int64_t rows = m, h = d.heads;
  return {d, activation(o_lat, rows * h * d.rank, d.numerics, "o_lat"), absorbed(kv_b, d), activation(o, rows * h * d.v, d.numerics, "o"),
          m, &step_state(state)->n_rows};
}

void mla_attention(int64_t handle, std::vector<int64_t> dims, double scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope,
                   Tensor o_lat, int64_t max_keys, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, q_lat);
  call.run(&Backend::mla_attention, attention_args(call, d, scale, q_lat, q_rope, latent, k_rope, o_lat, max_keys, rows_of(rows), state));
}

void mla_value(int64_t handle, std::vector<int64_t> dims, Tensor o_lat, Tensor kv_b, Tensor o, Tensor state) {
  Call call(handle, state);
  call.run(&Backend::mla_value, value_args(dims_of(dims, o_lat), o_lat, kv_b, o, dim(o, 0), state));
}

void mla_output(int64_t handle, std::vector<int64_t> dims, double scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope,
                Tensor o_lat, int64_t max_keys, Tensor kv_b, Tensor o, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, q_lat);
  const Rows r = rows_of(rows);
  const MlaAttentionArgs a = attention_args(call, d, scale, q_lat, q_rope, latent, k_rope, o_lat, max_keys, r, state);
  const MlaValueArgs v = value_args(d, o_lat, kv_b, o, r.max_rows, state);
  call.run([=](Backend& b) { b.mla_output(a, v); });
}

void kv_commit(int64_t handle, std::vector<Tensor> latents, std::vector<Tensor> k_ropes, Tensor accepted, Tensor state) {
  Call call(handle, state);
  need(!latents.empty() && latents.size() == k_ropes.size(), "latents", "do not pair with k_ropes");
  const Numerics numerics = numerics_of(is_bf16(latents[0]));
  std::vector<MlaCache> layers;
  for (size_t i = 0; i < latents.size(); ++i) layers.push_back(cache_of(latents[i], k_ropes[i], numerics));
  const int n = static_cast<int>(layers.size()), rank = dim(latents[0], 1), rope = dim(k_ropes[0], 1);
  const int32_t* const rows = data<int32_t>(accepted, "accepted");
  const StepState* const s = step_state(state);
  call.run([=](Backend& b) { b.kv_commit({layers.data(), n, rank, rope, rows, s, numerics}); });
}

// Their signatures.
constexpr Bound kMla[] = {
    {"mla_prepare",
     "(int backend, int[] dims, Tensor q, Tensor kv, Tensor norm_w, float eps, Tensor kv_b, Tensor cos_sin, Tensor "
     "q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor[] rows, Tensor state) -> ()",
     boxed<mla_prepare>},
    {"mla_attention",
     "(int backend, int[] dims, float scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor "
     "o_lat, int max_keys, Tensor[] rows, Tensor state) -> ()",
     boxed<mla_attention>},
    {"mla_value", "(int backend, int[] dims, Tensor o_lat, Tensor kv_b, Tensor o, Tensor state) -> ()", boxed<mla_value>},
    {"mla_output",
     "(int backend, int[] dims, float scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor "
     "o_lat, int max_keys, Tensor kv_b, Tensor o, Tensor[] rows, Tensor state) -> ()",
     boxed<mla_output>},
    {"kv_commit", "(int backend, Tensor[] latents, Tensor[] k_ropes, Tensor accepted, Tensor state) -> ()", boxed<kv_commit>},
};

}  // namespace
}  // namespace kdtree
