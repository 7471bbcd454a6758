// Finds the tensors of docs/model.md in a file, checks type and shape, and makes a rank's part of them resident.
#include "cold.h"
#include "finder.h"
#include "model.h"

namespace kdtree {
namespace {

LayerWeights load_layer(const Finder& find, const ModelConfig& c, int index) {
  const std::string at = "layers." + std::to_string(index) + ".";
  const int d = c.hidden_size;
  const auto size = [](int n) { return Shape{static_cast<uint64_t>(n)}; };
  LayerWeights w{};
  w.moe = index >= c.first_k_dense;
  w.attn_norm = find.f32(at + "attn_norm.w", size(d));
  w.mlp_norm = find.f32(at + "mlp_norm.w", size(d));
  w.q_a = find.matrix(at + "attn.q_a", c.q_lora_rank, d);
  w.q_a_norm = find.f32(at + "attn.q_a_norm.w", size(c.q_lora_rank));
  w.q_b = find.rows(at + "attn.q_b", c.q_width(), c.q_lora_rank);
  w.kv_a = find.matrix(at + "attn.kv_a", c.kv_width(), d);
  w.kv_a_norm = find.f32(at + "attn.kv_a_norm.w", size(c.kv_lora_rank));
  w.kv_b = find.rows(at + "attn.kv_b", c.kv_b_width(), c.kv_lora_rank);
  w.o = find.rows(at + "attn.o", d, c.o_width());
  if (!w.moe) {
    w.gate = find.rows(at + "mlp.gate", c.intermediate_size, d);
    w.up = find.rows(at + "mlp.up", c.intermediate_size, d);
    w.down = find.rows(at + "mlp.down", d, c.intermediate_size);
    return w;
  }
  const int e = c.n_routed_experts, inner = c.moe_intermediate_size;
  w.router = find.matrix(at + "router", e, d);
  w.router_bias = find.f32(at + "router.bias", size(e));
  w.expert_gate = find.experts(at + "experts.gate", e, inner, d);
  w.expert_up = find.experts(at + "experts.up", e, inner, d);
  w.expert_down = find.experts(at + "experts.down", e, d, inner);
  if (c.n_shared_experts > 0) {
    w.shared_gate = find.rows(at + "shared.gate", c.shared_inner(), d);
    w.shared_up = find.rows(at + "shared.up", c.shared_inner(), d);
    w.shared_down = find.rows(at + "shared.down", d, c.shared_inner());
  }
  return w;
}

}  // namespace

Stated read_stated(const int64_t* v, const std::string& file, const std::string& name) {
  const auto fail = [&](int i, const char* reason) {
    throw Error("ConfigError", file + ": " + name + "[" + std::to_string(i) + "]: " + std::to_string(v[i]) + ": " + reason);
  };
  // The greatest scale drawn is below 32 times the least; both are normal numbers.
  if (v[1] < 1 << 7 || v[1] > 249 << 7 || v[1] % 128 != 0) fail(1, "not the bits of a bf16 power of two from 2^-126 to 2^122");
  int64_t room = kStatedLots;
  for (int i = 2; i < 5; ++i) {
    if (v[i] < 0 || v[i] > room) fail(i, "shares are not negative and at most 1024 in all");
    room -= v[i];
  }
  return {static_cast<uint32_t>(v[0]), static_cast<uint32_t>(static_cast<uint64_t>(v[0]) >> 32), static_cast<uint16_t>(v[1]),
          static_cast<int32_t>(v[2]), static_cast<int32_t>(v[3]), static_cast<int32_t>(v[4])};
}

ModelWeights load_weights(Backend& backend, const KdtrView& file, const ModelConfig& c, Precision precision, Ranks ranks) {
  ModelWeights w{};
  const Finder find(backend, file, precision, ranks, w.resident);
  w.embed = find.columns("embed", c.vocab_size, c.hidden_size);
  w.embed_stride = w.embed.step() * w.embed.k;
  w.final_norm = find.f32("final_norm.w", {static_cast<uint64_t>(c.hidden_size)});
  w.lm_head = find.rows("lm_head", c.vocab_size, c.hidden_size);
  for (int i = 0; i < c.num_layers; ++i) w.layers.push_back(load_layer(find, c, i));
  return w;
}

}  // namespace kdtree
