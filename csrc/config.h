// A model's configuration: the fields of docs/model.md, checked, and what follows from them.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "kdtr.h"

namespace kdtree {

// What turns the pairs of a head's `dim` rotary dimensions; factor 1 is plain RoPE. cos and sin are multiplied by the amplitude.
struct Rotation {
  int dim;
  double theta, factor;
  int original;
  double beta_fast, beta_slow, amplitude;
};

struct ModelConfig {
  // Sizes fit an int, and so do the products that operations use as widths.
  int hidden_size, num_layers, first_k_dense, intermediate_size, moe_intermediate_size, vocab_size;
  int num_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
  int n_routed_experts, n_shared_experts, num_experts_per_tok, n_group, topk_group, norm_topk_prob;
  int rope_original_context, max_context, eos_id, mask_id;
  double routed_scaling_factor, rms_norm_eps, inner_norm_eps;
  double rope_theta, rope_factor, rope_beta_fast, rope_beta_slow, rope_mscale, rope_mscale_all_dim;

  bool has_moe() const { return first_k_dense < num_layers; }
  int q_width() const { return num_heads * (qk_nope_head_dim + qk_rope_head_dim); }
  int kv_width() const { return kv_lora_rank + qk_rope_head_dim; }
  int kv_b_width() const { return num_heads * (qk_nope_head_dim + v_head_dim); }
  int o_width() const { return num_heads * v_head_dim; }
  int shared_inner() const { return n_shared_experts * moe_intermediate_size; }
  double attention_scale() const;  // (N+P)^-1/2 * m(mscale_all_dim)^2
  Rotation rotation() const;
};

// The drafter that a file may hold beside its model; taps are layers of the model, ascending.
struct DrafterConfig {
  int num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, block_size, rope_original_context;
  double rms_norm_eps, rope_theta, rope_factor, rope_beta_fast, rope_beta_slow, rope_amplitude;
  std::vector<int> taps;

  int q_width() const { return num_heads * head_dim; }
  int kv_width() const { return num_kv_heads * head_dim; }
  Rotation rotation() const;
};

// ConfigError (`FILE: FIELD: reason`) for a field that is unknown, missing, of the wrong kind or out of range.
ModelConfig read_config(const KdtrView& file);

// ConfigError naming the field unless `ranks` divides what they share: heads, inner sizes, hidden size, vocabulary.
void check_ranks(const ModelConfig& config, int ranks, const std::string& label);

// Nothing if the file has no field of a drafter; MissingTensor for its list of taps.
std::optional<DrafterConfig> read_drafter(const KdtrView& file, const ModelConfig& model);

// cos and sin of the positions first, first + 1, ...: [positions, dim/2, 2], computed in double, the amplitude included.
std::vector<float> rope_table(const Rotation& rotation, int first, int positions);

}  // namespace kdtree
