// The model over a backend: its weights, the buffers of a step, and the forward pass of docs/model.md.
//
// Nothing here knows which backend it runs on: memory of the backend is never read or written except by its operations.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective.h"
#include "config.h"
#include "kdtr.h"
#include "ops.h"

namespace kdtree {

// A buffer in a backend's memory, freed with its owner.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Backend& backend, size_t bytes, const char* what) : backend_(&backend), p_(backend.alloc(bytes, what)), bytes_(bytes) {}
  // Of Backend::alloc_told.
  static Buffer told(Backend& backend, size_t bytes, const char* what) {
    Buffer made = view(backend.alloc_told(bytes, what), bytes);
    made.backend_ = &backend;
    return made;
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (backend_ != nullptr) backend_->free(p_);
  }
  // A part of another buffer, which must outlive it.
  static Buffer view(void* p, size_t bytes) {
    Buffer made;
    made.p_ = p;
    made.bytes_ = bytes;
    return made;
  }
  size_t bytes() const { return bytes_; }
  void* get() const { return p_; }
  float* f32() const { return static_cast<float*>(p_); }
  int32_t* i32() const { return static_cast<int32_t*>(p_); }

 private:
  void swap(Buffer& other) {
    std::swap(backend_, other.backend_);
    std::swap(p_, other.p_);
    std::swap(bytes_, other.bytes_);
  }
  Backend* backend_ = nullptr;
  void* p_ = nullptr;
  size_t bytes_ = 0;
};

struct LayerWeights {
  const float *attn_norm, *mlp_norm, *q_a_norm, *kv_a_norm;
  Weight q_a, q_b, kv_a, kv_b, o;
  Weight gate, up, down;                       // dense layers
  Weight router;                               // MoE layers, as all that follows
  const float* router_bias;
  Weight expert_gate, expert_up, expert_down;
  Weight shared_gate, shared_up, shared_down;  // n == 0 without shared experts
  bool moe;
};

// Weights as they lie in a rank's memory: `count` blocks of `bytes`, resident.pitch bytes apart.
struct ResidentWeight {
  std::string name;
  Resident resident;
  size_t bytes, count;
};

// A rank's part of the model: whole norms, router, q_a and kv_a; its heads of q_b and kv_b; its share of the outputs of every other
// matrix; and of embed its share of the columns, so that what is looked up is its part of the residual stream.
struct ModelWeights {
  Weight embed, lm_head;
  int embed_stride;  // values from one token's row to the next
  const float* final_norm;
  std::vector<LayerWeights> layers;
  std::vector<ResidentWeight> resident;  // all of the above
};

// What a model is loaded and run as: fp32, int4, bf16 or int4-bf16.
struct Precision {
  Numerics numerics;
  WeightKind experts;
};

// A `.draw` tensor's five numbers (docs/model.md, Stated experts). ConfigError naming file and tensor if one is out of range.
Stated read_stated(const int64_t* numbers, const std::string& file, const std::string& name);

// MissingTensor if a tensor is absent or has another type or shape; no data outside the rank's part is read. The file must outlive
// what is returned.
ModelWeights load_weights(Backend& backend, const KdtrView& file, const ModelConfig& config, Precision precision, Ranks ranks);

// What a step is about, and what came of it. With several ranks all of it is one buffer, so that the lead hands over its decisions
// in one broadcast; alone, every array stands between guard zones of its own. What came of it the host reads where operations write it for
// the host alone, if they can: alone the round itself, of several ranks what their last exchange gathers.
class StepMemory {
 public:
  StepMemory(Backend& backend, int max_rows, Ranks ranks);

  Buffer sum;  // this rank's checksum of its rounds; none alone
  Buffer out, accepted, choice, state, tokens, parents, depths, path;
  struct Span {
    void* at;
    size_t bytes;
  };
  Span chosen() const { return span(choice, state); }  // after a choice
  Span decided() const { return span(out, state); }    // after an accept
  Span planned() const { return span(state, path); }   // before a forward
  Span summed() const { return span(sum, out); }       // after a checksum, to be gathered in told()
  // What the host reads of a round: its outcome or, of several ranks, everyone's summed().
  Span told() const { return told_.bytes() > 0 ? span(told_, told_) : span(out, out); }

 private:
  static Span span(const Buffer& first, const Buffer& last);
  Buffer block_, told_;
};

// cos and sin of the positions 0 .. positions-1, see rope_table.
Buffer rope_buffer(Backend& backend, const Rotation& rotation, int positions, const char* what);

enum class Element { kF32, kI32, kBf16 };

// Called after an operation with the rows it wrote: name, address in the backend's memory, values a row, their type.
using Tap = std::function<void(const std::string& name, const void* rows, int dim, Element element)>;

// Called after each layer with the whole residual stream, part of the step: it may call operations.
using AfterLayer = std::function<void(int layer, const float* x)>;

// The rows of a step and everything computed from them, for steps of up to max_rows rows in a cache of `context` positions.
class Forward {
 public:
  Forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights, const StepMemory& step, Collective& collective,
          Numerics numerics, int context, int max_rows);

  // From rows (and state) to the residual stream after the last layer. width: bound on the rows of this step; max_keys: on the
  // keys a row sees. A tap needs kv_len, the position of row 0, to find the cache rows.
  void layers(int width, int max_keys, const Tap* tap = nullptr, int kv_len = 0, const AfterLayer* after = nullptr);

  // logits of the rows first .. first + width - 1 of the residual stream, of which state->n_rows count.
  void head(int width, int first = 0);

  Rows rows(int width, int first = 0) const;
  StepState* state() const { return static_cast<StepState*>(step_.state.get()); }
  float* logits() const { return logits_.f32(); }
  const std::vector<MlaCache>& cache() const { return cache_; }
  Numerics numerics() const { return numerics_; }
  // How values that only products read are held, the cache's among them.
  Element held() const { return numerics_ == Numerics::kBf16 ? Element::kBf16 : Element::kF32; }
  void* scratch() const { return scratch_.get(); }
  int max_rows() const { return max_rows_; }
  int slots() const { return slots_; }
  // Makes the scratch at least so large, and drops graphs that were captured with another one.
  void need_scratch(size_t bytes);

 private:
  void attention(int layer, int width, int max_keys, const Tap* tap, int kv_len);
  void dense(int layer, int width, const Tap* tap);
  void moe(int layer, int width, const Tap* tap);
  LinearArgs product(int width, const void* x, const float* norm, double eps, const std::vector<std::pair<const Weight*, void*>>& parts,
                     Epilogue epilogue);
  void linear(int width, const void* x, const float* norm, double eps, const std::vector<std::pair<const Weight*, void*>>& parts,
              Epilogue epilogue);
  // This rank's part of the residual stream: what products are added to. Alone it is the whole.
  float* residual() const { return alone() ? x_.f32() : x_part_.f32(); }
  // A rank's rows side by side with the others': whole [width, ranks * row_bytes]. Nothing to do alone, where part is whole.
  void gather(void* whole, const void* part, int width, size_t row_bytes);
  void gather_residual(int width) { gather(x_.get(), residual(), width, sizeof(float) * static_cast<size_t>(share(config_.hidden_size))); }
  void gather_acts(MoeArgs& experts, int width);
  // For taps: rows of which this rank has computed its share.
  void show(const Tap& tap, const std::string& name, const void* part, int width, int dim, Element element);
  size_t operand() const { return held() == Element::kBf16 ? sizeof(uint16_t) : sizeof(float); }  // bytes of a value that only products read
  int share(int n) const { return n / collective_.ranks().count; }
  bool alone() const { return collective_.ranks().alone(); }
  const int32_t* n_rows() const { return &state()->n_rows; }
  MlaDims dims() const;  // heads: this rank's

  Backend& backend_;
  const ModelConfig& config_;
  const ModelWeights& weights_;
  const StepMemory& step_;
  Collective& collective_;
  const Numerics numerics_;
  const int context_, max_rows_, slots_;
  Buffer cos_sin_;
  Buffer x_, q_a_, kv_, q_, q_lat_, q_rope_, o_lat_, o_, act_, logits_;
  Buffer router_logits_, ids_, expert_weights_, expert_act_, shared_act_;
  Buffer x_part_, act_part_, o_part_, logits_part_, gathered_;  // with several ranks: what a rank computes, and what a gather leaves
  Buffer scratch_;
  std::vector<Buffer> latent_, k_rope_;
  std::vector<MlaCache> cache_;
};

}  // namespace kdtree
