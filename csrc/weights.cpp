// Finds the tensors of docs/model.md in a file, checks type and shape, and makes them resident.
#include "model.h"

namespace kdtree {
namespace {

using Shape = std::vector<uint64_t>;

std::string text(const Shape& shape) {
  std::string s;
  for (const uint64_t d : shape) s += (s.empty() ? "[" : ", ") + std::to_string(d);
  return s + "]";
}

class Finder {
 public:
  Finder(Backend& backend, const KdtrView& file) : backend_(backend), file_(file) {}

  const void* raw(const std::string& name, DType dtype, const Shape& shape) const {
    const auto fail = [&](const std::string& reason) {
      throw Error("MissingTensor", file_.label() + ": " + name + ": " + reason);
    };
    const auto t = file_.find_tensor(name);
    if (!t) fail("the file has no such tensor");
    if (t->dtype != dtype) fail(std::string("is ") + dtype_name(t->dtype) + ", must be " + dtype_name(dtype));
    if (t->shape != shape) fail("has shape " + text(t->shape) + ", must be " + text(shape));
    return backend_.resident(t->data, t->bytes, name.c_str());
  }
  const float* f32(const std::string& name, const Shape& shape) const {
    return static_cast<const float*>(raw(name, DType::kF32, shape));
  }
  Weight matrix(const std::string& name, int n, int k) const {
    return {WeightKind::kF32, f32(name, {u(n), u(k)}), nullptr, n, k, 1};
  }
  // e matrices [n, k]; stem is the name without `.w`, `.qw`, `.sc`.
  Weight experts(const std::string& stem, int e, int n, int k, WeightKind kind) const {
    if (kind == WeightKind::kF32) return {kind, f32(stem + ".w", {u(e), u(n), u(k)}), nullptr, n, k, e};
    const uint64_t groups = (u(k) + 31) / 32;
    const void* q = raw(stem + ".qw", DType::kU8, {u(e), u(n), 16 * groups});
    const void* scale = raw(stem + ".sc", DType::kBf16, {u(e), u(n), groups});
    return {kind, q, static_cast<const uint16_t*>(scale), n, k, e};
  }

 private:
  static uint64_t u(int v) { return static_cast<uint64_t>(v); }
  Backend& backend_;
  const KdtrView& file_;
};

LayerWeights load_layer(const Finder& find, const ModelConfig& c, int index, WeightKind kind) {
  const std::string at = "layers." + std::to_string(index) + ".";
  const int d = c.hidden_size;
  const auto size = [](int n) { return Shape{static_cast<uint64_t>(n)}; };
  LayerWeights w{};
  w.moe = index >= c.first_k_dense;
  w.attn_norm = find.f32(at + "attn_norm.w", size(d));
  w.mlp_norm = find.f32(at + "mlp_norm.w", size(d));
  w.q_a = find.matrix(at + "attn.q_a.w", c.q_lora_rank, d);
  w.q_a_norm = find.f32(at + "attn.q_a_norm.w", size(c.q_lora_rank));
  w.q_b = find.matrix(at + "attn.q_b.w", c.q_width(), c.q_lora_rank);
  w.kv_a = find.matrix(at + "attn.kv_a.w", c.kv_width(), d);
  w.kv_a_norm = find.f32(at + "attn.kv_a_norm.w", size(c.kv_lora_rank));
  w.kv_b = find.matrix(at + "attn.kv_b.w", c.kv_b_width(), c.kv_lora_rank);
  w.o = find.matrix(at + "attn.o.w", d, c.o_width());
  if (!w.moe) {
    w.gate = find.matrix(at + "mlp.gate.w", c.intermediate_size, d);
    w.up = find.matrix(at + "mlp.up.w", c.intermediate_size, d);
    w.down = find.matrix(at + "mlp.down.w", d, c.intermediate_size);
    return w;
  }
  const int e = c.n_routed_experts, inner = c.moe_intermediate_size;
  w.router = find.matrix(at + "router.w", e, d);
  w.router_bias = find.f32(at + "router.bias", size(e));
  w.expert_gate = find.experts(at + "experts.gate", e, inner, d, kind);
  w.expert_up = find.experts(at + "experts.up", e, inner, d, kind);
  w.expert_down = find.experts(at + "experts.down", e, d, inner, kind);
  if (c.n_shared_experts > 0) {
    w.shared_gate = find.matrix(at + "shared.gate.w", c.shared_inner(), d);
    w.shared_up = find.matrix(at + "shared.up.w", c.shared_inner(), d);
    w.shared_down = find.matrix(at + "shared.down.w", d, c.shared_inner());
  }
  return w;
}

}  // namespace

ModelWeights load_weights(Backend& backend, const KdtrView& file, const ModelConfig& c, WeightKind experts) {
  const Finder find(backend, file);
  ModelWeights w{};
  w.embed = find.matrix("embed.w", c.vocab_size, c.hidden_size);
  w.final_norm = find.f32("final_norm.w", {static_cast<uint64_t>(c.hidden_size)});
  w.lm_head = find.matrix("lm_head.w", c.vocab_size, c.hidden_size);
  for (int i = 0; i < c.num_layers; ++i) w.layers.push_back(load_layer(find, c, i, experts));
  return w;
}

}  // namespace kdtree
