// The drafter's two passes, operation by operation; see dflash.h.
#include "cold.h"

#include "dflash.h"

#include <algorithm>

#include "finder.h"

namespace kdtree {

DrafterWeights load_drafter(Backend& backend, const KdtrView& file, const ModelConfig& model, const DrafterConfig& c,
                            Precision precision, const ModelWeights* target) {
  std::vector<ResidentWeight> made;
  const Finder find(backend, file, {Numerics::kF32, WeightKind::kF32}, Ranks{}, made);
  const int d = model.hidden_size, inner = c.intermediate_size;
  const auto norm = [&](const std::string& name, int n) { return find.f32(name, {static_cast<uint64_t>(n)}); };
  DrafterWeights w{};
  if (target != nullptr) {
    w.embed = target->embed;
    w.embed_stride = target->embed_stride;
    w.lm_head = target->lm_head;
  } else {
    const Finder whole(backend, file, precision, Ranks{}, made);
    w.embed = whole.columns("embed", model.vocab_size, d);
    w.embed_stride = w.embed.step() * w.embed.k;
    w.lm_head = whole.matrix("lm_head", model.vocab_size, d);
  }
  w.fc = find.matrix("drafter.fc", d, static_cast<int>(c.taps.size()) * d);
  w.hidden_norm = norm("drafter.hidden_norm.w", d);
  w.norm = norm("drafter.norm.w", d);
  for (int i = 0; i < c.num_layers; ++i) {
    const std::string at = "drafter.layers." + std::to_string(i) + ".";
    DrafterLayer l{};
    l.attn_norm = norm(at + "attn_norm.w", d);
    l.mlp_norm = norm(at + "mlp_norm.w", d);
    l.q_norm = norm(at + "attn.q_norm.w", c.head_dim);
    l.k_norm = norm(at + "attn.k_norm.w", c.head_dim);
    l.q = find.matrix(at + "attn.q", c.q_width(), d);
    l.k = find.matrix(at + "attn.k", c.kv_width(), d);
    l.v = find.matrix(at + "attn.v", c.kv_width(), d);
    l.o = find.matrix(at + "attn.o", d, c.q_width());
    l.gate = find.matrix(at + "mlp.gate", inner, d);
    l.up = find.matrix(at + "mlp.up", inner, d);
    l.down = find.matrix(at + "mlp.down", d, inner);
    w.layers.push_back(l);
  }
  return w;
}

Drafter::Drafter(Backend& backend, const ModelConfig& model, DrafterConfig config, DrafterWeights weights, int context, int max_rows,
                 StepState* state)
    : backend_(backend),
      model_(model),
      config_(std::move(config)),
      weights_(std::move(weights)),
      max_rows_(max_rows),
      state_(state) {
  const DrafterConfig& c = config_;
  const auto floats = [&](int rows, int64_t dim, const char* what) {
    return Buffer(backend, sizeof(float) * static_cast<size_t>(rows) * static_cast<size_t>(dim), what);
  };
  const int d = model.hidden_size, block = c.block_size, taps = static_cast<int>(c.taps.size());
  const int32_t counts[] = {block, block - 1};
  counts_ = Buffer(backend, sizeof counts, "draft.counts");
  backend.upload(counts_.get(), counts, sizeof counts);
  tokens_ = Buffer(backend, sizeof(int32_t) * static_cast<size_t>(block), "draft.tokens");
  features_ = floats(max_rows, static_cast<int64_t>(taps) * d, "draft.features");
  accepted_features_ = floats(max_rows, static_cast<int64_t>(taps) * d, "draft.accepted");
  hidden_ = floats(max_rows, d, "draft.hidden");
  context_k_ = floats(max_rows, c.kv_width(), "draft.context.k");
  context_v_ = floats(max_rows, c.kv_width(), "draft.context.v");
  x_ = floats(block, d, "draft.residual");
  q_ = floats(block, c.q_width(), "draft.q");
  k_ = floats(block, c.kv_width(), "draft.k");
  v_ = floats(block, c.kv_width(), "draft.v");
  o_ = floats(block, c.q_width(), "draft.o");
  act_ = floats(block, c.intermediate_size, "draft.act");
  logits_ = floats(block - 1, model.vocab_size, "draft.logits");
  const int slots = context + block;
  for (int i = 0; i < c.num_layers; ++i) {
    keys_.push_back(floats(slots, c.kv_width(), "draft.cache.k"));
    values_.push_back(floats(slots, c.kv_width(), "draft.cache.v"));
  }
  cos_sin_ = rope_buffer(backend, c.rotation(), slots, "draft.rope");
}

size_t Drafter::scratch_bytes() const {
  const DrafterConfig& c = config_;
  const int d = model_.hidden_size, block = c.block_size, taps = static_cast<int>(c.taps.size());
  return std::max({backend_.linear_scratch(taps * d, max_rows_), backend_.linear_scratch(d, max_rows_), backend_.linear_scratch(d, block),
                   backend_.linear_scratch(c.q_width(), block), backend_.linear_scratch(c.intermediate_size, block)});
}

void Drafter::linear(const float* x, int width, const int32_t* n_rows, const float* norm,
                     std::vector<std::pair<const Weight*, float*>> parts, Epilogue epilogue, void* scratch) {
  LinearArgs a{};
  a.x = x;
  a.ldx = parts[0].first->k;
  a.norm_w = norm;
  a.eps = static_cast<float>(config_.rms_norm_eps);
  a.parts = static_cast<int>(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    a.w[i] = *parts[i].first;
    a.out[i] = parts[i].second;
    a.ldo[i] = parts[i].first->n;
  }
  a.epilogue = epilogue;
  a.scratch = scratch;
  a.max_rows = width;
  a.n_rows = n_rows;
  if (a.w[0].kind == WeightKind::kBf16) a.numerics = Numerics::kBf16;  // the target's head
  backend_.linear(a);
}

void Drafter::tap(int layer, const float* x, int width) {
  const auto found = std::find(config_.taps.begin(), config_.taps.end(), layer);
  if (found == config_.taps.end()) return;
  const int d = model_.hidden_size, taps = static_cast<int>(config_.taps.size());
  const auto place = static_cast<int>(found - config_.taps.begin());
  backend_.gather_rows({features_.f32() + static_cast<size_t>(place) * d, taps * d, x, d, nullptr, width, &state_->n_rows});
}

void Drafter::extend(int width, void* scratch) {
  project(features_.f32(), &state_->kv_len, &state_->n_rows, width, scratch);
}

void Drafter::extend_accepted(const int32_t* accepted, int width, void* scratch) {
  const int dim = static_cast<int>(config_.taps.size()) * model_.hidden_size;
  backend_.gather_rows({accepted_features_.f32(), dim, features_.f32(), dim, accepted, width, &state_->n_accepted});
  project(accepted_features_.f32(), &state_->base, &state_->n_accepted, width, scratch);
}

// The target's features pass the one norm of their own, not the layers' input norms.
void Drafter::project(const float* features, const int32_t* first, const int32_t* n_rows, int width, void* scratch) {
  linear(features, width, n_rows, nullptr, {{&weights_.fc, hidden_.f32()}}, Epilogue::kStore, scratch);
  for (size_t i = 0; i < weights_.layers.size(); ++i) {
    const DrafterLayer& l = weights_.layers[i];
    linear(hidden_.f32(), width, n_rows, weights_.hidden_norm, {{&l.k, context_k_.f32()}, {&l.v, context_v_.f32()}},
           Epilogue::kStore, scratch);
    backend_.draft_prepare({dims(), nullptr, context_k_.f32(), context_v_.f32(), nullptr, l.k_norm,
                            static_cast<float>(config_.rms_norm_eps), cos_sin_.f32(), {keys_[i].f32(), values_[i].f32()}, first,
                            width, n_rows});
  }
}

void Drafter::draft(int max_keys, void* scratch) {
  const int d = model_.hidden_size, block = config_.block_size;
  const int32_t* n = block_rows();
  backend_.draft_block({tokens_.i32(), block, model_.mask_id, state_});
  Rows rows{};
  rows.tokens = tokens_.i32();
  rows.max_rows = block;
  backend_.embed({x_.f32(), weights_.embed, weights_.embed_stride, rows, n});
  for (size_t i = 0; i < weights_.layers.size(); ++i) {
    const DrafterLayer& l = weights_.layers[i];
    const DraftCache cache{keys_[i].f32(), values_[i].f32()};
    linear(x_.f32(), block, n, l.attn_norm, {{&l.q, q_.f32()}}, Epilogue::kStore, scratch);
    linear(x_.f32(), block, n, l.attn_norm, {{&l.k, k_.f32()}, {&l.v, v_.f32()}}, Epilogue::kStore, scratch);
    backend_.draft_prepare({dims(), q_.f32(), k_.f32(), v_.f32(), l.q_norm, l.k_norm, static_cast<float>(config_.rms_norm_eps),
                            cos_sin_.f32(), cache, &state_->kv_len, block, n});
    backend_.draft_attention({dims(), q_.f32(), cache, o_.f32(), max_keys + block, block, n, state_});
    linear(o_.f32(), block, n, nullptr, {{&l.o, x_.f32()}}, Epilogue::kResidual, scratch);
    linear(x_.f32(), block, n, l.mlp_norm, {{&l.gate, act_.f32()}, {&l.up, act_.f32()}}, Epilogue::kSiluMul, scratch);
    linear(act_.f32(), block, n, nullptr, {{&l.down, x_.f32()}}, Epilogue::kResidual, scratch);
  }
  linear(x_.f32() + d, block - 1, drafted_rows(), weights_.norm, {{&weights_.lm_head, logits_.f32()}}, Epilogue::kStore, scratch);
}

}  // namespace kdtree
