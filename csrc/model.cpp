// The forward pass, operation by operation; see model.h.
#include "model.h"

#include <algorithm>

namespace kdtree {
namespace {

constexpr int kRopeChunk = 8192;  // positions computed on the host at a time, so that a long context costs no host memory

}  // namespace

Buffer rope_buffer(Backend& backend, const Rotation& rotation, int positions, const char* what) {
  const size_t angles = static_cast<size_t>(rotation.dim);  // cos and sin of dim/2 pairs
  Buffer table(backend, sizeof(float) * static_cast<size_t>(positions) * angles, what);
  for (int at = 0; at < positions;) {
    const int count = std::min(kRopeChunk, positions - at);
    const std::vector<float> part = rope_table(rotation, at, count);
    backend.upload(table.f32() + static_cast<size_t>(at) * angles, part.data(), sizeof(float) * part.size());
    at += count;
  }
  return table;
}

StepMemory::StepMemory(Backend& backend, int max_rows, Ranks ranks) {
  const size_t m = static_cast<size_t>(max_rows);
  const struct {
    Buffer& buffer;
    size_t bytes;
    const char* what;
  } parts[] = {{sum, ranks.alone() ? 0 : sizeof(uint64_t), "rank.sum"},
               {out, sizeof(RoundOut) + sizeof(int32_t) * m, "round"}, {accepted, sizeof(int32_t) * m, "accepted"},
               {choice, sizeof(int32_t) * m, "choice"},                {state, sizeof(StepState), "state"},
               {tokens, sizeof(int32_t) * m, "rows.tokens"},           {parents, sizeof(int32_t) * m, "rows.parents"},
               {depths, sizeof(int32_t) * m, "rows.depths"},           {path, sizeof(int32_t) * m * m, "rows.path"}};
  const auto padded = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  size_t total = 0;
  for (const auto& part : parts) total += padded(part.bytes);
  if (!ranks.alone()) block_ = Buffer(backend, total, "step");
  auto* at = static_cast<unsigned char*>(block_.get());
  for (const auto& part : parts) {
    if (part.bytes == 0) continue;
    const bool told = &part.buffer == &out;  // several ranks' is broadcast with the rest
    part.buffer = !ranks.alone() ? Buffer::view(at, part.bytes) : told ? Buffer::told(backend, part.bytes, part.what) : Buffer(backend, part.bytes, part.what);
    at += ranks.alone() ? 0 : padded(part.bytes);
  }
  if (ranks.alone()) return;
  backend.fill_zero(sum.get(), sum.bytes());
  const Span own = summed();
  const size_t all = own.bytes * static_cast<size_t>(ranks.count);
  // Only operations may write there, and no library.
  const bool within = backend.gathers({own.at, own.bytes, ranks.count, {{own.at, 0, own.bytes, 1}, {}}, 1, 1, nullptr, Origin::kOwn});
  told_ = within ? Buffer::told(backend, all, "rank.told") : Buffer(backend, all, "rank.told");
}

StepMemory::Span StepMemory::span(const Buffer& first, const Buffer& last) {
  auto* from = static_cast<unsigned char*>(first.get());
  return {from, static_cast<size_t>(static_cast<unsigned char*>(last.get()) + last.bytes() - from)};
}

Forward::Forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights, const StepMemory& step,
                 Collective& collective, Numerics numerics, int context, int max_rows)
    : backend_(backend),
      config_(config),
      weights_(weights),
      step_(step),
      collective_(collective),
      numerics_(numerics),
      context_(context),
      max_rows_(max_rows),
      slots_(context + max_rows) {
  const size_t m = static_cast<size_t>(max_rows);
  const auto floats = [&](int dim, const char* what) { return Buffer(backend, sizeof(float) * m * static_cast<size_t>(dim), what); };
  const auto held = [&](int dim, const char* what) { return Buffer(backend, operand() * m * static_cast<size_t>(dim), what); };
  const auto ints = [&](size_t n, const char* what) { return Buffer(backend, sizeof(int32_t) * n, what); };
  const ModelConfig& c = config;
  const int acts = c.has_moe() ? c.num_experts_per_tok * c.moe_intermediate_size + c.shared_inner() : 0;
  x_ = floats(c.hidden_size, "residual");
  o_ = held(c.o_width(), "o");
  logits_ = floats(c.vocab_size, "logits");
  if (c.first_k_dense > 0) act_ = held(c.intermediate_size, "mlp.act");
  if (!alone()) {
    const int act = std::max(acts, c.first_k_dense > 0 ? c.intermediate_size : 0);
    x_part_ = floats(share(c.hidden_size), "rank.residual");
    o_part_ = held(share(c.o_width()), "rank.o");
    act_part_ = held(share(act), "rank.act");
    logits_part_ = floats(share(c.vocab_size), "rank.logits");
    gathered_ = floats(std::max({act, c.hidden_size, c.o_width(), c.q_width(), c.num_heads * c.kv_lora_rank, c.vocab_size}), "gathered");
  }
  q_a_ = floats(c.q_lora_rank, "q_a");
  kv_ = floats(c.kv_width(), "kv");
  q_ = floats(share(c.q_width()), "q");
  q_lat_ = held(share(c.num_heads) * c.kv_lora_rank, "q_lat");
  q_rope_ = held(share(c.num_heads) * c.qk_rope_head_dim, "q_rope");
  o_lat_ = held(share(c.num_heads) * c.kv_lora_rank, "o_lat");
  size_t scratch = 0;
  const auto need = [&](size_t bytes) { scratch = std::max(scratch, bytes); };
  for (const int k : {c.hidden_size, c.q_lora_rank, c.o_width()}) need(backend.linear_scratch(k, max_rows));
  need(backend.attention_scratch(dims(), max_rows, context));
  need(backend.select_scratch(max_rows, c.vocab_size));
  if (c.first_k_dense > 0) need(backend.linear_scratch(c.intermediate_size, max_rows));
  if (c.has_moe()) {
    router_logits_ = floats(c.n_routed_experts, "router.logits");
    ids_ = ints(m * static_cast<size_t>(c.num_experts_per_tok), "router.ids");
    expert_weights_ = floats(c.num_experts_per_tok, "router.weights");
    expert_act_ = held(c.num_experts_per_tok * c.moe_intermediate_size, "experts.act");
    shared_act_ = held(c.shared_inner(), "shared.act");
    need(backend.moe_scratch(max_rows, c.num_experts_per_tok, c.n_routed_experts, c.moe_intermediate_size, c.hidden_size));
  }
  scratch_ = Buffer(backend, scratch, "scratch");
  for (int i = 0; i < c.num_layers; ++i) {
    const size_t slots = static_cast<size_t>(slots_);
    latent_.emplace_back(backend, operand() * slots * c.kv_lora_rank, "cache.latent");
    k_rope_.emplace_back(backend, operand() * slots * c.qk_rope_head_dim, "cache.k_rope");
    cache_.push_back({latent_.back().get(), k_rope_.back().get(), slots_});
  }
  cos_sin_ = rope_buffer(backend, config.rotation(), context, "rope");
}

void Forward::need_scratch(size_t bytes) {
  if (bytes <= scratch_.bytes()) return;
  Buffer larger(backend_, bytes, "scratch");  // while the other is there: without one nothing runs any more
  backend_.drop_graphs();
  scratch_ = std::move(larger);
}

MlaDims Forward::dims() const {
  const ModelConfig& c = config_;
  return {share(c.num_heads), c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, numerics_};
}

Rows Forward::rows(int width, int first) const {
  return {step_.tokens.i32() + first, step_.parents.i32() + first, step_.depths.i32() + first,
          step_.path.i32() + static_cast<size_t>(first) * max_rows_, max_rows_, width};
}

void Forward::gather(void* whole, const void* part, int width, size_t row_bytes) {
  if (alone()) return;
  const size_t bytes = row_bytes * static_cast<size_t>(width);
  UnshardArgs rows{part, bytes, collective_.ranks().count, {{whole, 0, row_bytes, 1}, {}}, 1, width, n_rows(), Origin::kOwn};
  if (width > 1 && collective_.within(rows)) return backend_.unshard(rows);
  if (width == 1) {  // one row of each rank after the other is the row
    collective_.all_gather(whole, part, bytes);
    return;
  }
  collective_.all_gather(gathered_.get(), part, bytes);
  rows.src = gathered_.get(), rows.origin = Origin::kGathered;
  backend_.unshard(rows);
}

// One exchange for the routed and the shared experts.
void Forward::gather_acts(MoeArgs& experts, int width) {
  const ModelConfig& c = config_;
  const int routed = share(c.moe_intermediate_size) * c.num_experts_per_tok, shared = share(c.shared_inner());
  experts.gathered = act_part_.get();
  experts.origin = Origin::kOwn;
  experts.ranks = collective_.ranks().count;
  experts.rank_bytes = operand() * static_cast<size_t>(width) * static_cast<size_t>(routed + shared);
  if (collective_.within(acts_of(experts))) return;
  experts.gathered = gathered_.get();
  experts.origin = Origin::kGathered;
  collective_.all_gather(gathered_.get(), act_part_.get(), experts.rank_bytes);
}

void Forward::show(const Tap& tap, const std::string& name, const void* part, int width, int dim, Element element) {
  if (alone()) {
    tap(name, part, dim, element);
    return;
  }
  const size_t row = (element == Element::kBf16 ? sizeof(uint16_t) : sizeof(float)) * static_cast<size_t>(dim);
  const Buffer whole(backend_, row * static_cast<size_t>(width), "tap");
  gather(whole.get(), part, width, row / static_cast<size_t>(collective_.ranks().count));
  tap(name, whole.get(), dim, element);
}

LinearArgs Forward::product(int width, const void* x, const float* norm, double eps,
                            const std::vector<std::pair<const Weight*, void*>>& parts, Epilogue epilogue) {
  LinearArgs a{};
  a.x = x;
  a.ldx = parts[0].first->k;
  a.norm_w = norm;
  a.eps = static_cast<float>(eps);
  a.parts = static_cast<int>(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    a.w[i] = *parts[i].first;
    a.out[i] = parts[i].second;
    a.ldo[i] = parts[i].first->n;
  }
  a.epilogue = epilogue;
  a.scratch = scratch();
  a.max_rows = width;
  a.n_rows = n_rows();
  a.numerics = numerics_;
  return a;
}

void Forward::linear(int width, const void* x, const float* norm, double eps,
                     const std::vector<std::pair<const Weight*, void*>>& parts, Epilogue epilogue) {
  backend_.linear(product(width, x, norm, eps, parts, epilogue));
}

void Forward::layers(int width, int max_keys, const Tap* tap, int kv_len, const AfterLayer* after) {
  backend_.embed({residual(), weights_.embed, weights_.embed_stride, rows(width), n_rows()});
  gather_residual(width);
  if (tap != nullptr) (*tap)("embed", x_.get(), config_.hidden_size, Element::kF32);
  for (int i = 0; i < config_.num_layers; ++i) {
    attention(i, width, max_keys, tap, kv_len);
    if (weights_.layers[i].moe) {
      moe(i, width, tap);
    } else {
      dense(i, width, tap);
    }
    if (tap != nullptr) (*tap)("layers." + std::to_string(i) + ".out", x_.get(), config_.hidden_size, Element::kF32);
    if (after != nullptr) (*after)(i, x_.f32());
  }
}

void Forward::attention(int layer, int width, int max_keys, const Tap* tap, int kv_len) {
  const LayerWeights& w = weights_.layers[layer];
  const ModelConfig& c = config_;
  const MlaDims d = dims();
  const MlaCache cache = cache_[layer];
  linear(width, x_.f32(), w.attn_norm, c.rms_norm_eps, {{&w.q_a, q_a_.f32()}, {&w.kv_a, kv_.f32()}}, Epilogue::kStore);
  linear(width, q_a_.f32(), w.q_a_norm, c.inner_norm_eps, {{&w.q_b, q_.f32()}}, Epilogue::kStore);
  backend_.mla_prepare({d, q_.f32(), kv_.f32(), w.kv_a_norm, static_cast<float>(c.inner_norm_eps), w.kv_b, cos_sin_.f32(),
                        q_lat_.get(), q_rope_.get(), cache, rows(width), state()});
  void* o = alone() ? o_.get() : o_part_.get();
  const MlaAttentionArgs attention{d, static_cast<float>(c.attention_scale()), q_lat_.get(), q_rope_.get(), cache, o_lat_.get(),
                                   max_keys, scratch(), rows(width), state()};
  const MlaValueArgs value{d, o_lat_.get(), w.kv_b, o, width, n_rows()};
  if (tap == nullptr) {
    backend_.mla_output(attention, value);
  } else {  // o_lat is to be seen
    backend_.mla_attention(attention);
    backend_.mla_value(value);
  }
  gather(o_.get(), o, width, operand() * static_cast<size_t>(d.heads) * d.v);
  linear(width, o_.get(), nullptr, 0.0, {{&w.o, residual()}}, Epilogue::kResidual);
  gather_residual(width);
  if (tap == nullptr) return;
  const std::string at = "layers." + std::to_string(layer) + ".mla.";
  const auto cached = [&](const void* p, int dim) {  // the rows of this step
    return static_cast<const char*>(p) + operand() * static_cast<size_t>(kv_len) * static_cast<size_t>(dim);
  };
  (*tap)(at + "q_a", q_a_.get(), c.q_lora_rank, Element::kF32);
  (*tap)(at + "kv", kv_.get(), c.kv_width(), Element::kF32);
  show(*tap, at + "q", q_.get(), width, c.q_width(), Element::kF32);
  show(*tap, at + "q_lat", q_lat_.get(), width, c.num_heads * d.rank, held());
  show(*tap, at + "q_rope", q_rope_.get(), width, c.num_heads * d.rope, held());
  (*tap)(at + "latent", cached(cache.latent, d.rank), d.rank, held());
  (*tap)(at + "k_rope", cached(cache.k_rope, d.rope), d.rope, held());
  show(*tap, at + "o_lat", o_lat_.get(), width, c.num_heads * d.rank, held());
  (*tap)(at + "o", o_.get(), c.o_width(), held());
  (*tap)(at + "out", x_.get(), c.hidden_size, Element::kF32);
}

void Forward::dense(int layer, int width, const Tap* tap) {
  const LayerWeights& w = weights_.layers[layer];
  void* act = alone() ? act_.get() : act_part_.get();
  linear(width, x_.f32(), w.mlp_norm, config_.rms_norm_eps, {{&w.gate, act}, {&w.up, act}}, Epilogue::kSiluMul);
  gather(act_.get(), act, width, operand() * static_cast<size_t>(share(config_.intermediate_size)));
  linear(width, act_.get(), nullptr, 0.0, {{&w.down, residual()}}, Epilogue::kResidual);
  gather_residual(width);
  if (tap != nullptr) (*tap)("layers." + std::to_string(layer) + ".mlp.act", act_.get(), config_.intermediate_size, held());
}

void Forward::moe(int layer, int width, const Tap* tap) {
  const LayerWeights& w = weights_.layers[layer];
  const ModelConfig& c = config_;
  const int k = c.num_experts_per_tok;
  const LinearArgs scores = product(width, x_.f32(), w.mlp_norm, c.rms_norm_eps, {{&w.router, router_logits_.f32()}}, Epilogue::kStore);
  const RouterArgs choice{router_logits_.f32(), w.router_bias, c.n_routed_experts, k, c.n_group, c.topk_group, c.norm_topk_prob != 0,
                          static_cast<float>(c.routed_scaling_factor), ids_.i32(), expert_weights_.f32(), layer, width, state()};
  MoeArgs experts{x_.f32(), c.hidden_size, w.mlp_norm, static_cast<float>(c.rms_norm_eps), ids_.i32(), expert_weights_.f32(), k,
                  w.expert_gate, w.expert_up, w.expert_down, w.shared_gate, w.shared_up, w.shared_down, expert_act_.get(),
                  shared_act_.get(), residual(), scratch(), width, n_rows(), numerics_};
  if (alone()) {
    backend_.routed_moe(scores, choice, experts);
  } else {
    experts.phase = MoePhase::kGateUp;
    experts.act = act_part_.get();
    experts.shared_act = static_cast<char*>(act_part_.get()) + operand() * static_cast<size_t>(width) * k * share(c.moe_intermediate_size);
    backend_.routed_moe(scores, choice, experts);
    experts.phase = MoePhase::kDown;
    experts.act = expert_act_.get();
    experts.shared_act = shared_act_.get();
    gather_acts(experts, width);
    if (tap != nullptr) {  // act is to be seen
      backend_.unshard(acts_of(experts));
      experts.gathered = nullptr;
    }
    backend_.moe(experts);
    gather_residual(width);
  }
  if (tap == nullptr) return;
  const std::string at = "layers." + std::to_string(layer) + ".moe.";
  (*tap)(at + "router_logits", router_logits_.get(), c.n_routed_experts, Element::kF32);
  (*tap)(at + "ids", ids_.get(), k, Element::kI32);
  (*tap)(at + "weights", expert_weights_.get(), k, Element::kF32);
  (*tap)(at + "act", expert_act_.get(), k * c.moe_intermediate_size, held());
  if (c.n_shared_experts > 0) (*tap)(at + "shared_act", shared_act_.get(), c.shared_inner(), held());
}

void Forward::head(int width, int first) {
  linear(width, x_.f32() + static_cast<size_t>(first) * config_.hidden_size, weights_.final_norm, config_.rms_norm_eps,
         {{&weights_.lm_head, alone() ? logits_.f32() : logits_part_.f32()}}, Epilogue::kStore);
  gather(logits_.get(), logits_part_.get(), width, sizeof(float) * static_cast<size_t>(share(config_.vocab_size)));
}

}  // namespace kdtree
