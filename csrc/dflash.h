// The DFlash drafter over a backend (docs/model.md, Drafter): its weights, its context and the pass that drafts a block.
//
// Slot p of its cache holds the keys and values of the target's features at position p, projected once; the rows of a block stand
// behind them and are overwritten by whatever comes next. Every call is made of operations, so that it may be part of a step.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "model.h"

namespace kdtree {

struct DrafterLayer {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm;
  Weight q, k, v, o, gate, up, down;
};

struct DrafterWeights {
  Weight embed, lm_head;  // the target's
  int embed_stride;       // values from one token's row to the next
  Weight fc;
  const float *hidden_norm, *norm;
  std::vector<DrafterLayer> layers;
};

// The drafter is whole wherever it runs. target: the model's weights if they are whole too, else null, and the file's are read again
// as `precision` has them. MissingTensor if a tensor is absent or has another type or shape. The file must outlive what is returned.
DrafterWeights load_drafter(Backend& backend, const KdtrView& file, const ModelConfig& model, const DrafterConfig& config,
                            Precision precision, const ModelWeights* target);

class Drafter {
 public:
  // For steps of up to max_rows rows of a target whose cache has `context` positions and whose state is `state`.
  Drafter(Backend& backend, const ModelConfig& model, DrafterConfig config, DrafterWeights weights, int context, int max_rows,
          StepState* state);

  const DrafterConfig& config() const { return config_; }
  size_t scratch_bytes() const;  // that the calls below ask for
  // Rows a block holds that draft something.
  int depths() const { return config_.block_size - 1; }

  // Keeps a tapped layer's rows x [width, D] of the target's step; other layers are none of its business.
  void tap(int layer, const float* x, int width);
  // The step's rows, at positions kv_len ..., join the context: of a prefill, all of which is committed.
  void extend(int width, void* scratch);
  // The rows that the last accept committed, at positions base ..., join the context.
  void extend_accepted(const int32_t* accepted, int width, void* scratch);
  // logits(): row d for depth d + 1 below the bonus; sets draft_first and draft_rows of the state.
  void draft(int max_keys, void* scratch);
  const float* logits() const { return logits_.f32(); }  // [depths, V]

 private:
  void project(const float* features, const int32_t* first, const int32_t* n_rows, int width, void* scratch);
  void linear(const float* x, int width, const int32_t* n_rows, const float* norm,
              std::vector<std::pair<const Weight*, float*>> parts, Epilogue epilogue, void* scratch);
  DraftDims dims() const { return {config_.num_heads, config_.num_kv_heads, config_.head_dim}; }
  const int32_t* block_rows() const { return counts_.i32(); }      // block_size
  const int32_t* drafted_rows() const { return counts_.i32() + 1; }  // block_size - 1

  Backend& backend_;
  const ModelConfig& model_;
  const DrafterConfig config_;
  const DrafterWeights weights_;
  const int max_rows_;
  StepState* state_;
  Buffer counts_, tokens_, cos_sin_;
  Buffer features_, accepted_features_, context_k_, context_v_, hidden_;  // [max_rows, ...]
  Buffer x_, q_, k_, v_, o_, act_, logits_;                               // [block_size, ...]
  std::vector<Buffer> keys_, values_;
};

}  // namespace kdtree
