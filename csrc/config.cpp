// See config.h; docs/model.md states the fields, their ranges and the RoPE formulas.
#include "cold.h"

#include "config.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kdtree {
namespace {

constexpr int64_t kMaxInt = INT32_MAX;
constexpr int64_t kMostLayers = 1 << 16, kMostExperts = 1 << 16;  // a file has no room for the tensors of more layers
constexpr double kPi = 3.14159265358979323846;

template <class Config>
struct IntField {
  const char* name;
  int Config::*member;
  int64_t low, high;
};

constexpr IntField<ModelConfig> kInts[] = {
    {"hidden_size", &ModelConfig::hidden_size, 1, kMaxInt},
    {"num_layers", &ModelConfig::num_layers, 1, kMostLayers},
    {"first_k_dense", &ModelConfig::first_k_dense, 0, kMaxInt},
    {"intermediate_size", &ModelConfig::intermediate_size, 1, kMaxInt},
    {"moe_intermediate_size", &ModelConfig::moe_intermediate_size, 1, kMaxInt},
    {"vocab_size", &ModelConfig::vocab_size, 1, kMaxInt},
    {"num_heads", &ModelConfig::num_heads, 1, kMaxInt},
    {"q_lora_rank", &ModelConfig::q_lora_rank, 1, kMaxInt},
    {"kv_lora_rank", &ModelConfig::kv_lora_rank, 1, kMaxInt},
    {"qk_nope_head_dim", &ModelConfig::qk_nope_head_dim, 1, kMaxInt},
    {"qk_rope_head_dim", &ModelConfig::qk_rope_head_dim, 1, kMaxInt},
    {"v_head_dim", &ModelConfig::v_head_dim, 1, kMaxInt},
    {"n_routed_experts", &ModelConfig::n_routed_experts, 1, kMostExperts},
    {"n_shared_experts", &ModelConfig::n_shared_experts, 0, kMaxInt},
    {"num_experts_per_tok", &ModelConfig::num_experts_per_tok, 1, kMaxInt},
    {"n_group", &ModelConfig::n_group, 1, kMaxInt},
    {"topk_group", &ModelConfig::topk_group, 1, kMaxInt},
    {"norm_topk_prob", &ModelConfig::norm_topk_prob, 0, 1},
    {"rope_original_context", &ModelConfig::rope_original_context, 1, kMaxInt},
    {"max_context", &ModelConfig::max_context, 1, kMaxInt},
    {"eos_id", &ModelConfig::eos_id, -1, kMaxInt},
    {"mask_id", &ModelConfig::mask_id, -1, kMaxInt},
};

template <class Config>
struct FloatField {
  const char* name;
  double Config::*member;
};

constexpr FloatField<ModelConfig> kFloats[] = {
    {"routed_scaling_factor", &ModelConfig::routed_scaling_factor},
    {"rms_norm_eps", &ModelConfig::rms_norm_eps},
    {"inner_norm_eps", &ModelConfig::inner_norm_eps},
    {"rope_theta", &ModelConfig::rope_theta},
    {"rope_factor", &ModelConfig::rope_factor},
    {"rope_beta_fast", &ModelConfig::rope_beta_fast},
    {"rope_beta_slow", &ModelConfig::rope_beta_slow},
    {"rope_mscale", &ModelConfig::rope_mscale},
    {"rope_mscale_all_dim", &ModelConfig::rope_mscale_all_dim},
};

constexpr char kDrafterPrefix[] = "draft_";

constexpr IntField<DrafterConfig> kDrafterInts[] = {
    {"draft_num_layers", &DrafterConfig::num_layers, 1, kMostLayers},
    {"draft_num_heads", &DrafterConfig::num_heads, 1, kMaxInt},
    {"draft_num_kv_heads", &DrafterConfig::num_kv_heads, 1, kMaxInt},
    {"draft_head_dim", &DrafterConfig::head_dim, 1, kMaxInt},
    {"draft_intermediate_size", &DrafterConfig::intermediate_size, 1, kMaxInt},
    {"draft_block_size", &DrafterConfig::block_size, 2, kMaxInt},
    {"draft_rope_original_context", &DrafterConfig::rope_original_context, 1, kMaxInt},
};

constexpr FloatField<DrafterConfig> kDrafterFloats[] = {
    {"draft_rms_norm_eps", &DrafterConfig::rms_norm_eps},     {"draft_rope_theta", &DrafterConfig::rope_theta},
    {"draft_rope_factor", &DrafterConfig::rope_factor},       {"draft_rope_beta_fast", &DrafterConfig::rope_beta_fast},
    {"draft_rope_beta_slow", &DrafterConfig::rope_beta_slow}, {"draft_rope_amplitude", &DrafterConfig::rope_amplitude},
};

class Checker {
 public:
  explicit Checker(const KdtrView& file) : file_(file) {}

  [[noreturn]] void fail(const std::string& field, const std::string& reason) const {
    throw Error("ConfigError", file_.label() + ": " + field + ": " + reason);
  }
  void need(bool good, const char* field, const std::string& reason) const {
    if (!good) fail(field, reason);
  }
  FieldView get(const char* name, bool is_float) const {
    const auto field = file_.find_field(name);
    if (!field) fail(name, "missing");
    if (field->is_float != is_float) fail(name, is_float ? "is an i64, must be an f64" : "is an f64, must be an i64");
    return *field;
  }
  template <class Config>
  int integer(const IntField<Config>& f) const {
    const int64_t v = get(f.name, false).i64;
    if (v < f.low || v > f.high) {
      fail(f.name, std::to_string(v) + " is not in " + std::to_string(f.low) + ".." + std::to_string(f.high));
    }
    return static_cast<int>(v);
  }
  // YaRN's ramp has its edges at logarithms of these turns.
  void ramp(const char* field, int original, double beta) const {
    const double turns = original / (2.0 * kPi * beta);
    need(beta > 0 && turns > 0 && std::isfinite(turns), field, "gives YaRN's ramp no edge");
  }
  // A width that operations keep in an int.
  void width(const char* field, int64_t a, int64_t b) const {
    if (b != 0 && a > kMaxInt / b) fail(field, std::to_string(a) + " * " + std::to_string(b) + " exceeds 2^31-1");
  }

 private:
  const KdtrView& file_;
};

template <size_t N, size_t M, class Config>
bool known(const std::string& name, const IntField<Config> (&ints)[N], const FloatField<Config> (&floats)[M]) {
  const auto same = [&](const auto& f) { return name == f.name; };
  return std::any_of(std::begin(ints), std::end(ints), same) || std::any_of(std::begin(floats), std::end(floats), same);
}

bool of_drafter(const std::string& name) { return name.rfind(kDrafterPrefix, 0) == 0; }

double mscale(const ModelConfig& c, double s) { return c.rope_factor > 1.0 ? 0.1 * s * std::log(c.rope_factor) + 1.0 : 1.0; }

void check_relations(const ModelConfig& c, const Checker& check) {
  const auto text = [](int v) { return std::to_string(v); };
  check.need(c.first_k_dense <= c.num_layers, "first_k_dense",
             text(c.first_k_dense) + " exceeds num_layers " + text(c.num_layers));
  check.need(c.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", text(c.qk_rope_head_dim) + " is odd");
  check.need(c.n_routed_experts % c.n_group == 0, "n_group",
             text(c.n_group) + " does not divide n_routed_experts " + text(c.n_routed_experts));
  check.need(c.topk_group <= c.n_group, "topk_group", text(c.topk_group) + " exceeds n_group " + text(c.n_group));
  const int group = c.n_routed_experts / c.n_group;
  check.need(c.n_group == 1 || group >= 2, "n_group", text(c.n_group) + " groups of one expert, a group needs two");
  check.need(c.num_experts_per_tok <= static_cast<int64_t>(c.topk_group) * group, "num_experts_per_tok",
             text(c.num_experts_per_tok) + " exceeds the experts of topk_group groups");
  check.need(c.eos_id < c.vocab_size, "eos_id", text(c.eos_id) + " lies outside vocab_size " + text(c.vocab_size));
  check.need(c.mask_id < c.vocab_size, "mask_id", text(c.mask_id) + " lies outside vocab_size " + text(c.vocab_size));
  check.need(c.rms_norm_eps > 0, "rms_norm_eps", "must be above 0");
  check.need(c.inner_norm_eps > 0, "inner_norm_eps", "must be above 0");
  check.need(c.rope_theta > 1, "rope_theta", "must be above 1");
  check.need(c.rope_factor >= 1, "rope_factor", "must be at least 1");
  if (c.rope_factor > 1) {
    check.ramp("rope_beta_fast", c.rope_original_context, c.rope_beta_fast);
    check.ramp("rope_beta_slow", c.rope_original_context, c.rope_beta_slow);
    check.need(mscale(c, c.rope_mscale_all_dim) > 0, "rope_mscale_all_dim", "makes the attention scale vanish");
  }
  const int64_t heads = c.num_heads;
  check.width("num_heads", heads, static_cast<int64_t>(c.qk_nope_head_dim) + c.qk_rope_head_dim);
  check.width("num_heads", heads, static_cast<int64_t>(c.qk_nope_head_dim) + c.v_head_dim);
  check.width("num_heads", heads, c.kv_lora_rank);
  check.width("kv_lora_rank", static_cast<int64_t>(c.kv_lora_rank) + c.qk_rope_head_dim, 1);
  check.width("n_shared_experts", c.moe_intermediate_size, c.n_shared_experts);
  check.width("num_experts_per_tok", c.moe_intermediate_size, static_cast<int64_t>(c.num_experts_per_tok) + c.n_shared_experts);
  check.width("n_routed_experts", std::max(c.moe_intermediate_size, c.hidden_size), c.n_routed_experts);
  check.width("intermediate_size", c.intermediate_size, 2);
  check.width("q_lora_rank", static_cast<int64_t>(c.q_lora_rank) + c.kv_width(), 1);
}

}  // namespace

double ModelConfig::attention_scale() const {
  const double m = mscale(*this, rope_mscale_all_dim);
  return m * m / std::sqrt(static_cast<double>(qk_nope_head_dim) + qk_rope_head_dim);
}

ModelConfig read_config(const KdtrView& file) {
  const Checker check(file);
  for (uint32_t i = 0; i < file.field_count(); ++i) {
    const std::string name = file.field(i).name;
    if (!of_drafter(name) && !known(name, kInts, kFloats)) check.fail(name, "unknown field");
  }
  ModelConfig config{};
  for (const auto& f : kInts) config.*f.member = check.integer(f);
  for (const auto& f : kFloats) config.*f.member = check.get(f.name, true).f64;
  check_relations(config, check);
  return config;
}

void check_ranks(const ModelConfig& c, int ranks, const std::string& label) {
  const auto need = [&](const char* field, int value, bool used) {
    if (!used || value % ranks == 0) return;
    throw Error("ConfigError", label + ": " + field + ": " + std::to_string(ranks) + " ranks cannot share " + std::to_string(value) +
                                   " evenly; take a number of ranks that divides it");
  };
  need("num_heads", c.num_heads, true);
  need("hidden_size", c.hidden_size, true);
  need("vocab_size", c.vocab_size, true);
  need("intermediate_size", c.intermediate_size, c.first_k_dense > 0);
  need("moe_intermediate_size", c.moe_intermediate_size, c.has_moe());
}

std::optional<DrafterConfig> read_drafter(const KdtrView& file, const ModelConfig& model) {
  const Checker check(file);
  bool there = false;
  for (uint32_t i = 0; i < file.field_count(); ++i) {
    const std::string name = file.field(i).name;
    if (!of_drafter(name)) continue;
    there = true;
    if (!known(name, kDrafterInts, kDrafterFloats)) check.fail(name, "unknown field");
  }
  if (!there) return std::nullopt;
  DrafterConfig c{};
  for (const auto& f : kDrafterInts) c.*f.member = check.integer(f);
  for (const auto& f : kDrafterFloats) {
    c.*f.member = check.get(f.name, true).f64;
    check.need(c.*f.member > 0, f.name, "must be above 0");
  }
  check.need(c.num_heads % c.num_kv_heads == 0, "draft_num_kv_heads", "does not divide draft_num_heads");
  check.need(c.head_dim % 2 == 0, "draft_head_dim", std::to_string(c.head_dim) + " is odd");
  check.need(c.rope_theta > 1, "draft_rope_theta", "must be above 1");
  check.need(c.rope_factor >= 1, "draft_rope_factor", "must be at least 1");
  if (c.rope_factor > 1) {
    check.ramp("draft_rope_beta_fast", c.rope_original_context, c.rope_beta_fast);
    check.ramp("draft_rope_beta_slow", c.rope_original_context, c.rope_beta_slow);
  }
  check.need(model.mask_id >= 0, "mask_id", "a drafter needs a mask token");
  check.width("draft_num_heads", c.num_heads, c.head_dim);
  check.width("draft_num_kv_heads", static_cast<int64_t>(c.num_kv_heads) * c.head_dim, 2);
  check.width("draft_intermediate_size", c.intermediate_size, 2);
  const auto taps = file.find_tensor("drafter.taps");
  if (!taps || taps->dtype != DType::kI32 || taps->shape.size() != 1) {
    throw Error("MissingTensor", file.label() + ": drafter.taps: a drafter needs this tensor, i32 with one dimension");
  }
  const auto* layers = static_cast<const int32_t*>(taps->data);
  c.taps.assign(layers, layers + taps->shape[0]);
  for (size_t i = 0; i < c.taps.size(); ++i) {
    const bool good = c.taps[i] < model.num_layers && c.taps[i] >= 0 && (i == 0 || c.taps[i] > c.taps[i - 1]);
    check.need(good, "drafter.taps", "layer " + std::to_string(c.taps[i]) + " does not ascend or is not in 0.." +
                                         std::to_string(model.num_layers - 1));
  }
  check.width("drafter.taps", static_cast<int64_t>(c.taps.size()), model.hidden_size);
  return c;
}

Rotation ModelConfig::rotation() const {
  return {qk_rope_head_dim, rope_theta,     rope_factor,    rope_original_context,
          rope_beta_fast,   rope_beta_slow, mscale(*this, rope_mscale) / mscale(*this, rope_mscale_all_dim)};
}

Rotation DrafterConfig::rotation() const {
  return {head_dim, rope_theta, rope_factor, rope_original_context, rope_beta_fast, rope_beta_slow, rope_amplitude};
}

std::vector<float> rope_table(const Rotation& r, int first, int positions) {
  const double d = r.dim;
  const int pairs = r.dim / 2;
  const auto dim = [&](double turns) {
    return d * std::log(r.original / (2.0 * kPi * turns)) / (2.0 * std::log(r.theta));
  };
  std::vector<double> inv_freq(pairs);
  for (int i = 0; i < pairs; ++i) {
    const double extra = std::pow(r.theta, -2.0 * i / d);
    if (r.factor <= 1.0) {
      inv_freq[i] = extra;
      continue;
    }
    const double low = std::max(std::floor(dim(r.beta_fast)), 0.0);
    double high = std::min(std::ceil(dim(r.beta_slow)), d - 1.0);
    if (low == high) high += 0.001;
    const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = extra / r.factor * ramp + extra * (1.0 - ramp);
  }
  std::vector<float> table(static_cast<size_t>(positions) * pairs * 2);
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < pairs; ++i) {
      const double angle = (static_cast<double>(first) + p) * inv_freq[i];
      float* out = table.data() + (static_cast<size_t>(p) * pairs + i) * 2;
      out[0] = static_cast<float>(std::cos(angle) * r.amplitude);
      out[1] = static_cast<float>(std::sin(angle) * r.amplitude);
    }
  }
  return table;
}

}  // namespace kdtree
