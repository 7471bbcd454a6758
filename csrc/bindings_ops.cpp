// torch.ops.kdtree: every operation of ops.h alone, on tensors in the memory of the backend named by a handle, for tests and
// benchmarks. Registration only. `rows` is tokens, parents, depths [M] and path [M, stride]; `state` is StepState as 16 i32.
//
// Between sequence_begin and sequence_end calls are noted and not run; sequence_run runs what was noted as one step, so as a graph where
// there are graphs, and does not wait. The caller keeps the tensors of noted calls.
#include <functional>
#include <map>
#include <mutex>

#include "bindings.h"
#include "cpu/kernels.h"
#include "model.h"

namespace kdtree {
namespace {

struct Sequence {
  std::vector<std::function<void(Backend&)>> calls;
  std::vector<Buffer> scratch;  // the last one is the largest
};

struct Opened {
  std::unique_ptr<Backend> backend;
  std::map<int64_t, Sequence> sequences;  // freed before the backend is
  int64_t noting = 0, next = 1;           // noting: the sequence that calls go to, 0 for none
};

std::mutex g_mutex;
std::map<int64_t, Opened> g_backends;
int64_t g_next = 1;

Opened& opened(int64_t handle) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_backends.find(handle);
  if (found == g_backends.end()) throw Error("RequestError", "the backend is closed");
  return found->second;
}

Backend& backend(int64_t handle) { return *opened(handle).backend; }

Sequence& sequence(Opened& to, int64_t number) {
  const auto found = to.sequences.find(number);
  if (found == to.sequences.end()) throw Error("RequestError", "sequence " + std::to_string(number) + ": there is none such");
  return found->second;
}

int dim(const Tensor& t, int64_t i) { return static_cast<int>(t.size(i)); }

StepState* step_state(const Tensor& t) { return reinterpret_cast<StepState*>(sized<int32_t>(t, 16, "state")); }

Rows rows_of(const std::vector<Tensor>& r) {
  need(r.size() == 4 && r[3].dim() == 2, "rows", "is not tokens, parents, depths and path");
  const int64_t m = r[0].numel();
  return {sized<int32_t>(r[0], m, "tokens"), sized<int32_t>(r[1], m, "parents"), sized<int32_t>(r[2], m, "depths"),
          sized<int32_t>(r[3], m * r[3].size(1), "path"), dim(r[3], 1), static_cast<int>(m)};
}

bool is_bf16(const Tensor& t) { return t.scalar_type() == ScalarType::UInt16; }

Numerics numerics_of(bool bf16) { return bf16 ? Numerics::kBf16 : Numerics::kF32; }

// What only products read: n elements of f32, or the bits of bf16 numbers as u16.
void* activation(const Tensor& t, int64_t n, Numerics numerics, const char* what) {
  return numerics == Numerics::kBf16 ? static_cast<void*>(sized<uint16_t>(t, n, what)) : sized<float>(t, n, what);
}

// The sizes of a matrix, or of a stack of them, whose rows have k values.
Weight sizes_of(const Tensor& w, int64_t k) {
  const bool batch = w.dim() == 3;
  need(batch || w.dim() == 2, "weight", "is not a matrix or a stack of them");
  Weight out;
  out.e = batch ? dim(w, 0) : 1;
  out.n = dim(w, batch ? 1 : 0);
  out.k = static_cast<int>(k);
  return out;
}

// A matrix, or a stack of them, of f32, or of bf16 as u16.
Weight weight_of(const Tensor& w, int64_t k) {
  Weight out = sizes_of(w, k);
  out.kind = is_bf16(w) ? WeightKind::kBf16 : WeightKind::kF32;
  out.data = activation(w, static_cast<int64_t>(out.e) * out.n * k, numerics_of(is_bf16(w)), "weight");
  return out;
}

// The same; or, with a scale that is not empty (the bytes of bf16 numbers, u8 [e,] n, 2*groups), nibbles u8 [e,] n, 16*groups.
Weight weight_of(const Tensor& w, const Tensor& scale, int64_t k) {
  if (scale.numel() == 0) return weight_of(w, k);
  Weight out = sizes_of(w, k);
  const int64_t outputs = static_cast<int64_t>(out.e) * out.n, groups = (k + 31) / 32;
  out.kind = WeightKind::kInt4;
  out.data = sized<uint8_t>(w, outputs * groups * 16, "weight");
  out.scale = reinterpret_cast<const uint16_t*>(sized<uint8_t>(scale, outputs * groups * 2, "scale"));
  return out;
}

// One operation through its binding: run at once, and then everything launched before has ended; or noted.
class Call {
 public:
  Call(int64_t handle, Tensor state) : to_(opened(handle)), state_(std::move(state)) {}

  Backend& backend() const { return *to_.backend; }
  // Noted calls share scratch, as operations of a step do.
  void* scratch(size_t bytes) {
    if (to_.noting == 0) {
      own_ = Buffer(backend(), bytes, "scratch");
      return own_.get();
    }
    std::vector<Buffer>& made = sequence(to_, to_.noting).scratch;
    if (made.empty() || made.back().bytes() < bytes) made.emplace_back(backend(), bytes, "scratch");
    return made.back().get();
  }
  void run(const std::function<void(Backend&)>& operation) {
    if (to_.noting != 0) {
      sequence(to_, to_.noting).calls.push_back(operation);
      return;
    }
    operation(backend());
    int32_t first;
    backend().download(&first, state_.data_ptr(), sizeof first);
  }
  template <class Args>
  void run(void (Backend::*operation)(const Args&), const Args& a) {
    run([=](Backend& b) { (b.*operation)(a); });
  }

 private:
  Opened& to_;
  Tensor state_;
  Buffer own_;
};

int64_t sequence_begin(int64_t handle) {
  Opened& to = opened(handle);
  if (to.noting != 0) throw Error("RequestError", "sequence_begin: another sequence is being noted");
  to.sequences[to.next];
  return to.noting = to.next++;
}

void sequence_end(int64_t handle) { opened(handle).noting = 0; }

void sequence_run(int64_t handle, int64_t number) {
  Opened& to = opened(handle);
  const Sequence& noted = sequence(to, number);
  to.backend->step("sequence " + std::to_string(number), [&] {
    for (const auto& call : noted.calls) call(*to.backend);
  });
}

void sequence_drop(int64_t handle, int64_t number) {
  Opened& to = opened(handle);
  if (to.noting == number) to.noting = 0;
  to.backend->drop_graphs();
  to.sequences.erase(number);
}

// The address of the stream on which a backend runs, 0 for the CPU: for events around a sequence.
int64_t backend_stream(int64_t handle) {
  int64_t address = 0;
  backend(handle).outside("stream_asked", [&](void* stream) { address = reinterpret_cast<int64_t>(stream); });
  return address;
}

int64_t backend_open(std::string device, bool poison) {
  auto made = make_backend(device, poison);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_backends[g_next].backend = std::move(made);
  return g_next++;
}

void backend_close(int64_t handle) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_backends.erase(handle);
}

std::string backend_counters(int64_t handle) {
  std::string lines;
  for (const auto& [name, count] : backend(handle).counters()) lines += name + " " + std::to_string(count) + "\n";
  return lines;
}

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

// norm_w, scales: empty for none. epilogue: 0 store, 1 residual, 2 silu(first) * second.
void linear(int64_t handle, Tensor x, Tensor norm_w, double eps, std::vector<Tensor> weights, std::vector<Tensor> scales,
            std::vector<Tensor> outs, int64_t epilogue, Tensor state, bool bf16) {
  Call call(handle, state);
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
  int n = 0;
  for (int i = 0; i < a.parts; ++i) {
    a.w[i] = weight_of(weights[i], scales[i], k);
    n += a.w[i].n;
    a.out[i] = activation(outs[gated ? 0 : i], static_cast<int64_t>(m) * a.w[i].n, gated ? a.numerics : Numerics::kF32, "out");
    a.ldo[i] = a.w[i].n;
  }
  a.epilogue = static_cast<Epilogue>(epilogue);
  a.max_rows = m;
  a.n_rows = &step_state(state)->n_rows;
  void* const scratch = call.scratch(call.backend().linear_scratch(n, k, m));
  a.scratch = scratch;
  call.run(&Backend::linear, a);
}

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

void mla_prepare(int64_t handle, std::vector<int64_t> dims, Tensor q, Tensor kv, Tensor norm_w, double eps, Tensor kv_b, Tensor cos_sin,
                 Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, q_lat);
  const Rows r = rows_of(rows);
  const int64_t m = r.max_rows, h = d.heads;
  need(kv_b.numel() == h * (d.nope + d.v) * d.rank, "kv_b", "has the wrong size");
  call.run(&Backend::mla_prepare, {d, sized<float>(q, m * h * (d.nope + d.rope), "q"), sized<float>(kv, m * (d.rank + d.rope), "kv"),
        sized<float>(norm_w, d.rank, "norm_w"), static_cast<float>(eps), weight_of(kv_b, d.rank), data<float>(cos_sin,
        "cos_sin"), activation(q_lat, m * h * d.rank, d.numerics, "q_lat"), activation(q_rope, m * h * d.rope, d.numerics,
        "q_rope"), cache_of(latent, k_rope, d.numerics), r, step_state(state)});
}

void mla_attention(int64_t handle, std::vector<int64_t> dims, double scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope,
                   Tensor o_lat, int64_t max_keys, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, q_lat);
  const Rows r = rows_of(rows);
  const int64_t m = r.max_rows, h = d.heads;
  void* const scratch = call.scratch(call.backend().attention_scratch(d, r.max_rows, static_cast<int>(max_keys)));
  call.run(&Backend::mla_attention, {d, static_cast<float>(scale), activation(q_lat, m * h * d.rank, d.numerics, "q_lat"),
        activation(q_rope, m * h * d.rope, d.numerics, "q_rope"), cache_of(latent, k_rope, d.numerics), activation(o_lat,
        m * h * d.rank, d.numerics, "o_lat"), static_cast<int>(max_keys), scratch, r, step_state(state)});
}

void mla_value(int64_t handle, std::vector<int64_t> dims, Tensor o_lat, Tensor kv_b, Tensor o, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, o_lat);
  const int64_t m = o.size(0), h = d.heads;
  need(kv_b.numel() == h * (d.nope + d.v) * d.rank, "kv_b", "has the wrong size");
  call.run(&Backend::mla_value, {d, activation(o_lat, m * h * d.rank, d.numerics, "o_lat"), weight_of(kv_b, d.rank), activation(o,
        m * h * d.v, d.numerics, "o"), static_cast<int>(m), &step_state(state)->n_rows});
}

void mla_output(int64_t handle, std::vector<int64_t> dims, double scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope,
                Tensor o_lat, int64_t max_keys, Tensor kv_b, Tensor o, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const MlaDims d = dims_of(dims, q_lat);
  const Rows r = rows_of(rows);
  const int64_t m = r.max_rows, h = d.heads;
  need(kv_b.numel() == h * (d.nope + d.v) * d.rank, "kv_b", "has the wrong size");
  void* const scratch = call.scratch(call.backend().attention_scratch(d, r.max_rows, static_cast<int>(max_keys)));
  void* const lat = activation(o_lat, m * h * d.rank, d.numerics, "o_lat");
  const MlaAttentionArgs a{d, static_cast<float>(scale), activation(q_lat, m * h * d.rank, d.numerics, "q_lat"),
                           activation(q_rope, m * h * d.rope, d.numerics, "q_rope"), cache_of(latent, k_rope, d.numerics), lat,
                           static_cast<int>(max_keys), scratch, r, step_state(state)};
  const MlaValueArgs v{d, lat, weight_of(kv_b, d.rank), activation(o, m * h * d.v, d.numerics, "o"), r.max_rows,
                       &step_state(state)->n_rows};
  call.run([=](Backend& b) { b.mla_output(a, v); });
}

void router(int64_t handle, Tensor logits, Tensor bias, Tensor ids, Tensor weights, int64_t n_group, int64_t topk_group, bool norm_topk,
            double scaling, int64_t layer, Tensor state) {
  Call call(handle, state);
  const int m = dim(logits, 0), e = dim(logits, 1), k = dim(ids, 1);
  call.run(&Backend::router, {data<float>(logits, "logits"), sized<float>(bias, e, "bias"), e, k, static_cast<int>(n_group),
        static_cast<int>(topk_group), norm_topk, static_cast<float>(scaling), sized<int32_t>(ids,
        static_cast<int64_t>(m) * k, "ids"), sized<float>(weights, static_cast<int64_t>(m) * k, "weights"),
        static_cast<int>(layer), m, step_state(state)});
}

// experts: gate, up [E, I, D], down [E, D, I]; scales as for linear; shared: the same three as matrices, or empty.
// bf16 here and in linear: the numerics; weights that are not nibbles are then u16.
void moe(int64_t handle, Tensor x, Tensor norm_w, double eps, Tensor ids, Tensor weights, std::vector<Tensor> experts,
         std::vector<Tensor> scales, std::vector<Tensor> shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16) {
  Call call(handle, state);
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
  void* const scratch = call.scratch(call.backend().moe_scratch(m, k, a.gate.e, inner, d));
  a.scratch = scratch;
  call.run(&Backend::moe, a);
}

void select(int64_t handle, Tensor logits, double temperature, Tensor choice, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  const int vocab = dim(logits, 1);
  void* const scratch = call.scratch(call.backend().select_scratch(r.max_rows, vocab));
  call.run(&Backend::select, {sized<float>(logits, static_cast<int64_t>(r.max_rows) * vocab, "logits"), vocab, temperature,
        sized<int32_t>(choice, r.max_rows, "choice"), scratch, r, step_state(state)});
}

void tree_root(int64_t handle, std::vector<Tensor> rows, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  StepState* const s = step_state(state);
  call.run([=](Backend& b) { b.tree_root(r, s); });
}

// costs: f64 [budget + 1] in the backend's memory, or empty.
void tree_build(int64_t handle, Tensor draft, int64_t block_size, int64_t budget, int64_t eos_id, bool chain, Tensor costs,
                std::vector<Tensor> rows, Tensor scores, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  need(budget >= 0 && budget < r.max_rows, "budget", "needs one row more than rows has");
  need(block_size >= 1 && block_size <= r.path_stride, "block_size", "exceeds the stride of path");
  const int vocab = dim(draft, 1), block = static_cast<int>(block_size), nodes = static_cast<int>(budget);
  void* const scratch = call.scratch(call.backend().tree_scratch(vocab, block, nodes));
  call.run(&Backend::tree_build, {data<float>(draft, "draft"), vocab, block, nodes, static_cast<int>(eos_id), chain,
        costs.numel() == 0 ? nullptr : sized<double>(costs, budget + 1, "costs"), scratch, r, sized<double>(scores,
        r.max_rows, "scores"), step_state(state)});
}

// out: RoundOut as i32 [10 + M].
void accept(int64_t handle, std::vector<Tensor> rows, Tensor choice, int64_t eos_id, Tensor accepted, Tensor out, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  call.run(&Backend::accept, {r, sized<int32_t>(choice, r.max_rows, "choice"), static_cast<int>(eos_id), sized<int32_t>(accepted,
        r.max_rows, "accepted"), reinterpret_cast<RoundOut*>(sized<int32_t>(out, 10 + static_cast<int64_t>(r.max_rows),
        "out")), step_state(state)});
}

void kv_commit(int64_t handle, std::vector<Tensor> latents, std::vector<Tensor> k_ropes, Tensor accepted, Tensor state) {
  Call call(handle, state);
  need(!latents.empty() && latents.size() == k_ropes.size(), "latents", "do not pair with k_ropes");
  const Numerics numerics = numerics_of(is_bf16(latents[0]));
  std::vector<MlaCache> layers;
  for (size_t i = 0; i < latents.size(); ++i) layers.push_back(cache_of(latents[i], k_ropes[i], numerics));
  const int n = static_cast<int>(layers.size()), rank = dim(latents[0], 1), rope = dim(k_ropes[0], 1), m = dim(accepted, 0);
  void* const scratch = call.scratch(call.backend().commit_scratch(n, rank, rope, m));
  const int32_t* const rows = data<int32_t>(accepted, "accepted");
  const StepState* const s = step_state(state);
  call.run([=](Backend& b) { b.kv_commit({layers.data(), n, rank, rope, rows, m, scratch, s, numerics}); });
}

void record(int64_t handle, Tensor dst, Tensor src, int64_t offset, Tensor accepted, Tensor state) {
  Call call(handle, state);
  call.run(&Backend::record, {data<float>(dst, "dst"), data<float>(src, "src"), dim(src, 1), static_cast<int>(offset), dim(dst, 0),
        data<int32_t>(accepted, "accepted"), dim(accepted, 0), step_state(state)});
}

void record_tree(int64_t handle, Tensor dst, std::vector<Tensor> rows, Tensor accepted, Tensor state) {
  Call call(handle, state);
  const Rows r = rows_of(rows);
  need(dst.dim() == 2 && dst.size(1) == 2 + 3 * static_cast<int64_t>(r.max_rows), "dst", "is not [entries, 2 + 3*M]");
  call.run(&Backend::record_tree, {data<int32_t>(dst, "dst"), dim(dst, 0), r.max_rows, r, data<int32_t>(accepted, "accepted"),
        step_state(state)});
}

// index: i32, or empty for the rows in order.
void gather_rows(int64_t handle, Tensor dst, int64_t column, Tensor src, Tensor index, Tensor state) {
  Call call(handle, state);
  const int n = dim(src, 1), ldd = dim(dst, 1), m = dim(dst, 0);
  need(column >= 0 && column <= ldd - n, "column", "leaves dst");
  const int32_t* by = index.numel() == 0 ? nullptr : sized<int32_t>(index, m, "index");
  call.run(&Backend::gather_rows, {data<float>(dst, "dst") + column, ldd, data<float>(src, "src"), n, by, m, &step_state(state)->n_rows});
}

void draft_block(int64_t handle, Tensor tokens, int64_t mask_id, Tensor state) {
  Call call(handle, state);
  call.run(&Backend::draft_block, {data<int32_t>(tokens, "tokens"), dim(tokens, 0), static_cast<int>(mask_id), step_state(state)});
}

DraftDims draft_dims(const std::vector<int64_t>& d) {
  need(d.size() == 3, "dims", "is not heads, kv_heads, head_dim");
  return {static_cast<int>(d[0]), static_cast<int>(d[1]), static_cast<int>(d[2])};
}

// q: empty for none; it is changed in place. Row 0 stands at kv_len.
void draft_prepare(int64_t handle, std::vector<int64_t> dims, Tensor q, Tensor k, Tensor v, Tensor q_norm_w, Tensor k_norm_w, double eps,
                   Tensor cos_sin, Tensor keys, Tensor values, Tensor state) {
  Call call(handle, state);
  const DraftDims d = draft_dims(dims);
  const int64_t m = k.size(0), width = static_cast<int64_t>(d.kv_heads) * d.head_dim;
  StepState* s = step_state(state);
  call.run(&Backend::draft_prepare, {d, q.numel() == 0 ? nullptr : sized<float>(q, m * d.heads * d.head_dim, "q"), sized<float>(k,
        m * width, "k"), sized<float>(v, m * width, "v"), sized<float>(q_norm_w, d.head_dim, "q_norm_w"),
        sized<float>(k_norm_w, d.head_dim, "k_norm_w"), static_cast<float>(eps), data<float>(cos_sin, "cos_sin"),
        {data<float>(keys, "keys"), data<float>(values, "values")}, &s->kv_len, static_cast<int>(m), &s->n_rows});
}

void draft_attention(int64_t handle, std::vector<int64_t> dims, Tensor q, Tensor keys, Tensor values, Tensor o, Tensor state) {
  Call call(handle, state);
  const DraftDims d = draft_dims(dims);
  const int64_t m = q.size(0), width = static_cast<int64_t>(d.heads) * d.head_dim;
  StepState* s = step_state(state);
  call.run(&Backend::draft_attention, {d, sized<float>(q, m * width, "q"), {data<float>(keys, "keys"), data<float>(values, "values")},
        sized<float>(o, m * width, "o"), dim(keys, 0), static_cast<int>(m), &s->n_rows, s});
}

// src: u8 [ranks, bytes a rank]; a part each: dst u8 [rows, bytes], its offset in a rank's bytes, its rows for every row of the step.
void unshard(int64_t handle, Tensor src, std::vector<Tensor> dsts, std::vector<int64_t> offsets, std::vector<int64_t> per_row,
             int64_t max_rows, Tensor state) {
  Call call(handle, state);
  need(!dsts.empty() && dsts.size() <= 2 && offsets.size() == dsts.size() && per_row.size() == dsts.size(), "dsts",
       "are not one or two with an offset and rows each");
  UnshardArgs a{};
  a.src = data<uint8_t>(src, "src");
  a.ranks = dim(src, 0);
  a.rank_bytes = static_cast<size_t>(src.size(1));
  a.parts = static_cast<int>(dsts.size());
  for (size_t i = 0; i < dsts.size(); ++i) {
    const auto row_bytes = static_cast<size_t>(dsts[i].size(1)) / static_cast<size_t>(a.ranks);
    a.part[i] = {data<uint8_t>(dsts[i], "dst"), static_cast<size_t>(offsets[i]), row_bytes, static_cast<int>(per_row[i])};
  }
  a.max_rows = static_cast<int>(max_rows);
  a.n_rows = &step_state(state)->n_rows;
  call.run(&Backend::unshard, a);
}

// values: i32 [rows, words]; out: i32 [2], the sum's low and high half, added to.
void checksum(int64_t handle, Tensor out, Tensor values, Tensor state) {
  Call call(handle, state);
  call.run(&Backend::checksum, {reinterpret_cast<uint64_t*>(sized<int32_t>(out, 2, "out")), data<int32_t>(values, "values"),
              static_cast<size_t>(values.size(1)), dim(values, 0), &step_state(state)->n_rows});
}

}  // namespace
}  // namespace kdtree

KDTREE_LIBRARY_FRAGMENT(KDTREE_LIBRARY, m) {
  m.def("backend_open(str device, bool poison) -> int");
  m.def("backend_close(int backend) -> ()");
  m.def("isa_names() -> str");
  m.def("backend_counters(int backend) -> str");
  m.def("draw_experts(int backend, int[] stated, int first, int row, int k, Tensor q, Tensor scale) -> ()");
  m.def("backend_stream(int backend) -> int");
  m.def("sequence_begin(int backend) -> int");
  m.def("sequence_end(int backend) -> ()");
  m.def("sequence_run(int backend, int sequence) -> ()");
  m.def("sequence_drop(int backend, int sequence) -> ()");
  m.def("embed(int backend, Tensor out, Tensor table, Tensor[] rows, Tensor state) -> ()");
  m.def("rms_norm(int backend, Tensor out, Tensor x, Tensor w, float eps, Tensor state) -> ()");
  m.def(
      "linear(int backend, Tensor x, Tensor norm_w, float eps, Tensor[] weights, Tensor[] scales, Tensor[] outs, int epilogue, "
      "Tensor state, bool bf16=False) -> ()");
  m.def(
      "mla_prepare(int backend, int[] dims, Tensor q, Tensor kv, Tensor norm_w, float eps, Tensor kv_b, Tensor cos_sin, "
      "Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor[] rows, Tensor state) -> ()");
  m.def(
      "mla_attention(int backend, int[] dims, float scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, "
      "Tensor o_lat, int max_keys, Tensor[] rows, Tensor state) -> ()");
  m.def(
      "mla_output(int backend, int[] dims, float scale, Tensor q_lat, Tensor q_rope, Tensor latent, Tensor k_rope, "
      "Tensor o_lat, int max_keys, Tensor kv_b, Tensor o, Tensor[] rows, Tensor state) -> ()");
  m.def("mla_value(int backend, int[] dims, Tensor o_lat, Tensor kv_b, Tensor o, Tensor state) -> ()");
  m.def(
      "router(int backend, Tensor logits, Tensor bias, Tensor ids, Tensor weights, int n_group, int topk_group, bool norm_topk, "
      "float scaling, int layer, Tensor state) -> ()");
  m.def(
      "moe(int backend, Tensor x, Tensor norm_w, float eps, Tensor ids, Tensor weights, Tensor[] experts, Tensor[] scales, "
      "Tensor[] shared, Tensor act, Tensor shared_act, Tensor out, Tensor state, bool bf16=False) -> ()");
  m.def(
      "unshard(int backend, Tensor src, Tensor[] dsts, int[] offsets, int[] per_row, int max_rows, Tensor state) -> ()");
  m.def("checksum(int backend, Tensor out, Tensor values, Tensor state) -> ()");
  m.def("select(int backend, Tensor logits, float temperature, Tensor choice, Tensor[] rows, Tensor state) -> ()");
  m.def("tree_root(int backend, Tensor[] rows, Tensor state) -> ()");
  m.def(
      "tree_build(int backend, Tensor draft, int block_size, int budget, int eos_id, bool chain, Tensor costs, Tensor[] rows, "
      "Tensor scores, Tensor state) -> ()");
  m.def("accept(int backend, Tensor[] rows, Tensor choice, int eos_id, Tensor accepted, Tensor out, Tensor state) -> ()");
  m.def("kv_commit(int backend, Tensor[] latents, Tensor[] k_ropes, Tensor accepted, Tensor state) -> ()");
  m.def("record(int backend, Tensor dst, Tensor src, int offset, Tensor accepted, Tensor state) -> ()");
  m.def("record_tree(int backend, Tensor dst, Tensor[] rows, Tensor accepted, Tensor state) -> ()");
  m.def("gather_rows(int backend, Tensor dst, int column, Tensor src, Tensor index, Tensor state) -> ()");
  m.def("draft_block(int backend, Tensor tokens, int mask_id, Tensor state) -> ()");
  m.def(
      "draft_prepare(int backend, int[] dims, Tensor q, Tensor k, Tensor v, Tensor q_norm_w, Tensor k_norm_w, float eps, "
      "Tensor cos_sin, Tensor keys, Tensor values, Tensor state) -> ()");
  m.def("draft_attention(int backend, int[] dims, Tensor q, Tensor keys, Tensor values, Tensor o, Tensor state) -> ()");
}

KDTREE_LIBRARY_IMPL(KDTREE_LIBRARY, m) {
  m.impl("backend_open", kdtree::boxed<kdtree::backend_open>);
  m.impl("backend_close", kdtree::boxed<kdtree::backend_close>);
  m.impl("isa_names", kdtree::boxed<kdtree::cpu::isa_names>);
  m.impl("backend_counters", kdtree::boxed<kdtree::backend_counters>);
  m.impl("draw_experts", kdtree::boxed<kdtree::draw_experts>);
  m.impl("backend_stream", kdtree::boxed<kdtree::backend_stream>);
  m.impl("sequence_begin", kdtree::boxed<kdtree::sequence_begin>);
  m.impl("sequence_end", kdtree::boxed<kdtree::sequence_end>);
  m.impl("sequence_run", kdtree::boxed<kdtree::sequence_run>);
  m.impl("sequence_drop", kdtree::boxed<kdtree::sequence_drop>);
  m.impl("embed", kdtree::boxed<kdtree::embed>);
  m.impl("rms_norm", kdtree::boxed<kdtree::rms_norm>);
  m.impl("linear", kdtree::boxed<kdtree::linear>);
  m.impl("mla_prepare", kdtree::boxed<kdtree::mla_prepare>);
  m.impl("mla_attention", kdtree::boxed<kdtree::mla_attention>);
  m.impl("mla_output", kdtree::boxed<kdtree::mla_output>);
  m.impl("mla_value", kdtree::boxed<kdtree::mla_value>);
  m.impl("router", kdtree::boxed<kdtree::router>);
  m.impl("moe", kdtree::boxed<kdtree::moe>);
  m.impl("unshard", kdtree::boxed<kdtree::unshard>);
  m.impl("checksum", kdtree::boxed<kdtree::checksum>);
  m.impl("select", kdtree::boxed<kdtree::select>);
  m.impl("tree_root", kdtree::boxed<kdtree::tree_root>);
  m.impl("tree_build", kdtree::boxed<kdtree::tree_build>);
  m.impl("accept", kdtree::boxed<kdtree::accept>);
  m.impl("kv_commit", kdtree::boxed<kdtree::kv_commit>);
  m.impl("record", kdtree::boxed<kdtree::record>);
  m.impl("record_tree", kdtree::boxed<kdtree::record_tree>);
  m.impl("gather_rows", kdtree::boxed<kdtree::gather_rows>);
  m.impl("draft_block", kdtree::boxed<kdtree::draft_block>);
  m.impl("draft_prepare", kdtree::boxed<kdtree::draft_prepare>);
  m.impl("draft_attention", kdtree::boxed<kdtree::draft_attention>);
}
