// Embedding, norm, products, router and experts.
#pragma once
#include "arguments.h"
#include "call.h"

namespace kdtree {
namespace {

// stated: as the tensor of docs/model.md, five i64. scale: the bytes of bf16 numbers, u8 [e, n, 2*groups].
void draw_experts(int64_t handle, std::vector<int64_t> stated, int64_t first, int64_t row, int64_t k, Tensor q, Tensor scale) {
  Backend& b = backend(handle);
  need(stated.size() == 5 && q.dim() == 3, "stated", "is not five numbers, or q not [e, n, 16*groups]");
  const int64_t groups = (k + 31) / 32, outputs = q.size(0) * q.size(1);
  const Stated s = read_stated(stated.data(), "draw_experts", "stated");
  b.draw_experts({s, static_cast<int>(first), static_cast<int>(row), dim(q, 0), dim(q, 1), static_cast<int>(k), sized<uint8_t>(q, outputs * groups * 16, "q"),
                  reinterpret_cast<uint16_t*>(sized<uint8_t>(scale, outputs * groups * 2, "scale"))});
  uint8_t last;
  b.download(&last, q.data_ptr(), sizeof last);
}

void embed(int64_t handle, Tensor out, Tensor table, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  call.run(&Backend::embed, {sized<float>(out, static_cast<int64_t>(r.max_rows) * dim(table, 1), "out"), weight_of(table, dim(table, 1)),
        dim(table, 1), r, &step_state(state)->n_rows});
}

void rms_norm(int64_t handle, Tensor out, Tensor x, Tensor w, double eps, Tensor state) {
  Call call(handle, state);
  float* const to = sized<float>(out, x.numel(), "out");
  const float *const from = data<float>(x, "x"), *const weight = sized<float>(w, x.size(1), "w");
  const int m = dim(x, 0), d = dim(x, 1);
  const int32_t* const n_rows = &step_state(state)->n_rows;
  call.run([=](Backend& b) { b.rms_norm(to, from, weight, static_cast<float>(eps), d, m, n_rows); });
}

// norm_w, scales: empty for none. epilogue: 0 store, 1 residual, 2 silu(first) * second. scratch(k, m): linear_scratch's.
template <typename Scratch>
LinearArgs linear_args(const Tensor& x, const Tensor& norm_w, double eps, const std::vector<Tensor>& weights, const std::vector<Tensor>& scales,
                       const std::vector<Tensor>& outs, int64_t epilogue, const Tensor& state, bool bf16, const Scratch& scratch) {
  need(!weights.empty() && weights.size() <= 2 && scales.size() == weights.size(), "weights", "are not one or two with a scale each");
  need(epilogue >= 0 && epilogue <= 2, "epilogue", "is not 0, 1 or 2");
  const bool gated = epilogue == 2;
  need(outs.size() == (gated ? 1 : weights.size()), "outs", "does not fit the weights");
  const int m = dim(x, 0), k = dim(x, 1);
  LinearArgs a{};
  a.numerics = numerics_of(bf16);
  const bool normed = norm_w.numel() > 0;
  a.x = activation(x, x.numel(), normed ? Numerics::kF32 : a.numerics, "x");
  a.ldx = k;
  a.norm_w = normed ? sized<float>(norm_w, k, "norm_w") : nullptr;
  a.eps = static_cast<float>(eps);
  a.parts = static_cast<int>(weights.size());
  for (int i = 0; i < a.parts; ++i) {
    a.w[i] = weight_of(weights[i], scales[i], k);
    a.out[i] = activation(outs[gated ? 0 : i], static_cast<int64_t>(m) * a.w[i].n, gated ? a.numerics : Numerics::kF32, "out");
    a.ldo[i] = a.w[i].n;
  }
  a.epilogue = static_cast<Epilogue>(epilogue);
  a.max_rows = m;
  a.n_rows = &step_state(state)->n_rows;
  a.scratch = scratch(k, m);
  return a;
}

RouterArgs router_args(const Tensor& logits, const Tensor& bias, const Tensor& ids, const Tensor& weights, int64_t n_group, int64_t topk_group,
                       bool norm_topk, double scaling, int64_t layer, const Tensor& state) {
  const int m = dim(logits, 0), e = dim(logits, 1), k = dim(ids, 1);
  return {data<float>(logits, "logits"), sized<float>(bias, e, "bias"), e, k, static_cast<int>(n_group), static_cast<int>(topk_group), norm_topk,
          static_cast<float>(scaling), sized<int32_t>(ids, static_cast<int64_t>(m) * k, "ids"),
          sized<float>(weights, static_cast<int64_t>(m) * k, "weights"), static_cast<int>(layer), m, step_state(state)};
}

// experts: gate, up [E, I, D], down [E, D, I]; scales as for linear; shared: the same three as matrices, or empty.
// bf16 here and in linear: the numerics; weights that are not nibbles are then u16. scratch(m, k, e, inner, d): moe_scratch's.
template <typename Scratch>
MoeArgs moe_args(const Tensor& x, const Tensor& norm_w, double eps, const Tensor& ids, const Tensor& weights, const std::vector<Tensor>& experts,
                 const std::vector<Tensor>& scales, const std::vector<Tensor>& shared, const Tensor& act, const Tensor& shared_act, const Tensor& out,
                 const Tensor& state, bool bf16, const Scratch& scratch) {
  need(experts.size() == 3 && scales.size() == 3, "experts", "are not gate, up and down with a scale each");
  need(shared.empty() || shared.size() == 3, "shared", "is not gate, up and down");
  const int m = dim(x, 0), d = dim(x, 1), k = dim(ids, 1), inner = dim(experts[0], 1);
  const int64_t slots = static_cast<int64_t>(m) * k;
  MoeArgs a{};
  a.x = data<float>(x, "x");
  a.dim = d;
  a.norm_w = sized<float>(norm_w, d, "norm_w");
  a.eps = static_cast<float>(eps);
  a.ids = sized<int32_t>(ids, slots, "ids");
  a.weights = sized<float>(weights, slots, "weights");
  a.top_k = k;
  a.gate = weight_of(experts[0], scales[0], d);
  a.up = weight_of(experts[1], scales[1], d);
  a.down = weight_of(experts[2], scales[2], inner);
  if (!shared.empty()) {
    a.shared_gate = weight_of(shared[0], d);
    a.shared_up = weight_of(shared[1], d);
    a.shared_down = weight_of(shared[2], dim(shared[0], 0));
  }
  a.numerics = numerics_of(bf16);
  a.act = activation(act, slots * inner, a.numerics, "act");
  a.shared_act = activation(shared_act, static_cast<int64_t>(m) * a.shared_gate.n, a.numerics, "shared_act");
  a.out = sized<float>(out, static_cast<int64_t>(m) * d, "out");
  a.max_rows = m;
  a.n_rows = &step_state(state)->n_rows;
  a.scratch = scratch(m, k, a.gate.e, inner, d);
  return a;
}

void linear(int64_t handle, Tensor x, Tensor norm_w, double eps, std::vector<Tensor> weights, std::vector<Tensor> scales,
            std::vector<Tensor> outs, int64_t epilogue, Tensor state, bool bf16) {
  Call call(handle, state);
  call.run(&Backend::linear, linear_args(x, norm_w, eps, weights, scales, outs, epilogue, state, bf16,
                                         [&](int k, int m) { return call.scratch(call.backend().linear_scratch(k, m)); }));
}

void router(int64_t handle, Tensor logits, Tensor bias, Tensor ids, Tensor weights, int64_t n_group, int64_t topk_group, bool norm_topk,
            double scaling, int64_t layer, Tensor state) {
  Call(handle, state).run(&Backend::router, router_args(logits, bias, ids, weights, n_group, topk_group, norm_topk, scaling, layer, state));
}

void moe(int64_t handle, Tensor x, Tensor norm_w, double eps, Tensor ids, Tensor weights, std::vector<Tensor> experts,
         std::vector<Tensor> scales, std::vector<Tensor> shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16) {
  Call call(handle, state);
  call.run(&Backend::moe, moe_args(x, norm_w, eps, ids, weights, experts, scales, shared, act, shared_act, out, state, bf16,
                                   [&](int m, int k, int e, int inner, int d) { return call.scratch(call.backend().moe_scratch(m, k, e, inner, d)); }));
}

// router_w: f32, or u16 with bf16. The router's product, its choice and the experts as one operation.
void routed_moe(int64_t handle, Tensor x, Tensor norm_w, double eps, Tensor router_w, Tensor bias, Tensor logits, Tensor ids, Tensor weights,
                int64_t n_group, int64_t topk_group, bool norm_topk, double scaling, int64_t layer, std::vector<Tensor> experts,
                std::vector<Tensor> scales, std::vector<Tensor> shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16) {
  Call call(handle, state);
  void* scratch = nullptr;
  const MoeArgs moe = moe_args(x, norm_w, eps, ids, weights, experts, scales, shared, act, shared_act, out, state, bf16, [&](int m, int k, int e, int inner, int d) {
    const size_t product = call.backend().linear_scratch(d, m), own = call.backend().moe_scratch(m, k, e, inner, d);
    return scratch = call.scratch(product > own ? product : own);
  });
  const RouterArgs choice = router_args(logits, bias, ids, weights, n_group, topk_group, norm_topk, scaling, layer, state);
  need(choice.experts == moe.gate.e && choice.max_rows == moe.max_rows, "logits", "are not [M, E]");
  LinearArgs product{};
  product.x = moe.x, product.ldx = moe.dim, product.norm_w = moe.norm_w, product.eps = moe.eps;
  product.w[0] = weight_of(router_w, moe.dim);
  need(product.w[0].n == choice.experts, "router_w", "is not [E, D]");
  product.out[0] = data<float>(logits, "logits"), product.ldo[0] = choice.experts;
  product.parts = 1, product.epilogue = Epilogue::kStore, product.scratch = scratch, product.max_rows = moe.max_rows, product.n_rows = moe.n_rows;
  product.numerics = moe.numerics;
  call.run([=](Backend& b) { b.routed_moe(product, choice, moe); });
}

// gathered: u8 [ranks, bytes], what an all-gather left of act and shared_act, for down alone.
void moe_down(int64_t handle, Tensor x, Tensor norm_w, double eps, Tensor ids, Tensor weights, std::vector<Tensor> experts,
              std::vector<Tensor> scales, std::vector<Tensor> shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16,
              Tensor gathered) {
  Call call(handle, state);
  MoeArgs a = moe_args(x, norm_w, eps, ids, weights, experts, scales, shared, act, shared_act, out, state, bf16,
                       [&](int m, int k, int e, int inner, int d) { return call.scratch(call.backend().moe_scratch(m, k, e, inner, d)); });
  a.phase = MoePhase::kDown;
  a.gathered = data<uint8_t>(gathered, "gathered");
  a.ranks = dim(gathered, 0);
  a.rank_bytes = static_cast<size_t>(gathered.size(1));
  call.run(&Backend::moe, a);
}

// Their signatures.
constexpr Bound kProducts[] = {
    {"draw_experts",
     "(int backend, int[] stated, int first, int row, int k, Tensor q, Tensor scale) -> ()",
     boxed<draw_experts>},
    {"embed", "(int backend, Tensor out, Tensor table, Tensor[] rows, Tensor state) -> ()", boxed<embed>},
    {"rms_norm", "(int backend, Tensor out, Tensor x, Tensor w, float eps, Tensor state) -> ()", boxed<rms_norm>},
    {"linear",
     "(int backend, Tensor x, Tensor norm_w, float eps, Tensor[] weights, Tensor[] scales, Tensor[] outs, int "
     "epilogue, Tensor state, bool bf16=False) -> ()",
     boxed<linear>},
    {"router",
     "(int backend, Tensor logits, Tensor bias, Tensor ids, Tensor weights, int n_group, int topk_group, bool "
     "norm_topk, float scaling, int layer, Tensor state) -> ()",
     boxed<router>},
    {"moe",
     "(int backend, Tensor x, Tensor norm_w, float eps, Tensor ids, Tensor weights, Tensor[] experts, Tensor[] "
     "scales, Tensor[] shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16=False) -> ()",
     boxed<moe>},
    {"routed_moe",
     "(int backend, Tensor x, Tensor norm_w, float eps, Tensor router_w, Tensor bias, Tensor logits, Tensor ids, Tensor weights, int n_group, "
     "int topk_group, bool norm_topk, float scaling, int layer, Tensor[] experts, Tensor[] scales, Tensor[] shared, Tensor act, Tensor "
     "shared_act, Tensor out, Tensor state, bool bf16=False) -> ()",
     boxed<routed_moe>},
    {"moe_down",
     "(int backend, Tensor x, Tensor norm_w, float eps, Tensor ids, Tensor weights, Tensor[] experts, Tensor[] "
     "scales, Tensor[] shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16, Tensor gathered) -> ()",
     boxed<moe_down>},
};

}  // namespace
}  // namespace kdtree
