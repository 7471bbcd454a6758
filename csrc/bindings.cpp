// torch.ops.kdtree: sessions by integer handle. Registration only; errors cross as `Name: text` (error.h).
// Strings of the operating system come as u8 tensors, results go into tensors that the caller made.
#include "bindings.h"

#include <chrono>
#include <map>
#include <mutex>
#include <tuple>

#include "decode.h"

namespace kdtree {
namespace {

struct Entry {
  std::mutex mutex;  // calls on one session take turns; torch releases the GIL around them
  std::unique_ptr<Session> session;
  std::vector<Session::TapRows> taps;
};

std::mutex g_mutex;
std::map<int64_t, std::shared_ptr<Entry>> g_sessions;
int64_t g_next = 1;

// An open session, locked for as long as the object lives.
class Locked {
 public:
  explicit Locked(int64_t handle) : entry_(find(handle)), lock_(entry_->mutex) {}
  Session* operator->() const { return entry_->session.get(); }
  std::vector<Session::TapRows>& taps() const { return entry_->taps; }

 private:
  static std::shared_ptr<Entry> find(int64_t handle) {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = g_sessions.find(handle);
    if (found == g_sessions.end()) throw Error("RequestError", "the session is closed");
    return found->second;
  }
  std::shared_ptr<Entry> entry_;
  std::unique_lock<std::mutex> lock_;
};

std::string text(const Tensor& bytes) {
  const uint8_t* p = data<uint8_t>(bytes, "bytes");
  return {p, p + bytes.numel()};
}

float* rows_out(const Tensor& out, int64_t rows, int64_t width) {
  need(out.is_cpu(), "out", "is not on the CPU");
  return sized<float>(out, rows * width, "out");
}

bool linked(int64_t device, int64_t other) {
#ifdef KDTREE_CUDA
  return cuda_linked(static_cast<int>(device), static_cast<int>(other));
#else
  return device == other;
#endif
}

int64_t session_open(Tensor path, Tensor label, std::string device, std::string precision, int64_t context, int64_t max_rows,
                     bool poison, bool graphs, int64_t rank, int64_t ranks, int64_t all_gather, int64_t broadcast,
                     std::vector<int64_t> windows, int64_t window_bytes, double window_seconds, int64_t progress) {
  static const std::map<std::string, Precision> known = {{"fp32", {Numerics::kF32, WeightKind::kF32}},
                                                         {"int4", {Numerics::kF32, WeightKind::kInt4}},
                                                         {"bf16", {Numerics::kBf16, WeightKind::kBf16}},
                                                         {"int4-bf16", {Numerics::kBf16, WeightKind::kInt4}}};
  const auto found = known.find(precision);
  if (found == known.end()) {
    throw Error("RequestError", "precision '" + precision + "', known are fp32, int4, bf16 and int4-bf16");
  }
  need(ranks >= 1 && rank >= 0 && rank < ranks, "rank", "is not below the number of ranks");
  need(ranks == 1 || (all_gather != 0 && broadcast != 0), "all_gather", "is no function");
  need(windows.empty() || windows.size() == static_cast<size_t>(ranks), "windows", "are not one a rank");
  const Transport transport{reinterpret_cast<Transport::AllGather>(all_gather), reinterpret_cast<Transport::Broadcast>(broadcast),
                            window_of(rank, windows, window_bytes, window_seconds), reinterpret_cast<Transport::Progress>(progress)};
  auto file = KdtrFile::open(text(path), text(label));
  auto entry = std::make_shared<Entry>();
  entry->session = std::make_unique<Session>(make_backend(device, poison), std::move(file),
                                             found->second, context, max_rows, graphs,
                                             Ranks{static_cast<int>(rank), static_cast<int>(ranks)}, transport);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_sessions[g_next] = std::move(entry);
  return g_next++;
}

void session_close(int64_t handle) {
  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    const auto found = g_sessions.find(handle);
    if (found == g_sessions.end()) return;
    entry = std::move(found->second);
    g_sessions.erase(found);
  }
  // A call under way ends first. One that found the session and waits for its turn still has it, and frees it in the end.
  const std::lock_guard<std::mutex> lock(entry->mutex);
}

std::vector<int64_t> session_sizes(int64_t handle) {
  const Locked s(handle);
  const ModelConfig& c = s->config();
  return {c.vocab_size, c.hidden_size, c.num_layers,   c.kv_lora_rank, c.qk_rope_head_dim,
          c.eos_id,     s->context(),  s->max_rows(), s->draft_block()};
}

// `name address bytes count pitch`, one tensor of this rank's part a line; addresses are of the backend's memory.
std::string session_weights(int64_t handle) {
  const Locked s(handle);
  std::string lines;
  for (const ResidentWeight& w : s->weights()) {
    lines += w.name + " " + std::to_string(reinterpret_cast<uintptr_t>(w.resident.data)) + " " + std::to_string(w.bytes) + " " +
             std::to_string(w.count) + " " + std::to_string(w.resident.pitch) + "\n";
  }
  return lines;
}

int64_t session_length(int64_t handle) { return Locked(handle)->length(); }

void session_reset(int64_t handle) { Locked(handle)->reset(); }

void session_prefill(int64_t handle, Tensor tokens, Tensor out) {
  const Locked s(handle);
  const std::vector<int32_t> t = ints(tokens, "tokens");
  s->prefill(t, rows_out(out, static_cast<int64_t>(t.size()), s->config().vocab_size));
}

void session_step(int64_t handle, int64_t token, Tensor out) {
  const Locked s(handle);
  if (token < 0 || token >= s->config().vocab_size) throw Error("TokenError", "token " + std::to_string(token) + " is not in the vocabulary");
  s->step(static_cast<int32_t>(token), rows_out(out, 1, s->config().vocab_size));
}

void session_verify(int64_t handle, Tensor tokens, Tensor parents, Tensor out) {
  const Locked s(handle);
  const std::vector<int32_t> t = ints(tokens, "tokens");
  s->verify(t, ints(parents, "parents"), rows_out(out, static_cast<int64_t>(t.size()), s->config().vocab_size));
}

void session_commit(int64_t handle, Tensor path) { Locked(handle)->commit(ints(path, "path")); }

void session_cache(int64_t handle, int64_t layer, Tensor latent, Tensor k_rope) {
  const Locked s(handle);
  float* l = rows_out(latent, s->length(), s->config().kv_lora_rank);
  s->cache(layer, l, rows_out(k_rope, s->length(), s->config().qk_rope_head_dim));
}

// `name values-a-row`, one tap a line; session_tap then copies the index-th one.
std::string listing(const std::vector<Session::TapRows>& taps) {
  std::string names;
  for (const Session::TapRows& t : taps) names += t.name + " " + std::to_string(t.dim) + "\n";
  return names;
}

std::string session_taps(int64_t handle, Tensor tokens, bool operations) {
  const Locked s(handle);
  s.taps() = s->taps(ints(tokens, "tokens"), operations);
  return listing(s.taps());
}

std::string session_verify_taps(int64_t handle, Tensor tokens, Tensor parents) {
  const Locked s(handle);
  s.taps() = s->verify_taps(ints(tokens, "tokens"), ints(parents, "parents"));
  return listing(s.taps());
}

void session_tap(int64_t handle, int64_t index, Tensor out) {
  const Locked s(handle);
  need(index >= 0 && static_cast<size_t>(index) < s.taps().size(), "index", "names no tap");
  const std::vector<float>& values = s.taps()[static_cast<size_t>(index)].values;
  std::copy(values.begin(), values.end(), rows_out(out, static_cast<int64_t>(values.size()), 1));
}

// drafter: none (AR), recorded (draft is its table) or dflash (the file's own). costs: f64 [budget + 1] or empty.
int64_t decode_begin(int64_t handle, Tensor prompt, int64_t max_tokens, std::string drafter, Tensor draft, int64_t draft_first,
                     int64_t block_size, int64_t budget, bool chain, Tensor costs, double temperature, int64_t seed, bool record) {
  const Locked s(handle);
  DecodeRequest r;
  r.prompt = ints(prompt, "prompt");
  r.max_tokens = max_tokens;
  r.dflash = drafter == "dflash";
  r.tree = r.dflash || drafter == "recorded";
  need(r.tree || drafter == "none", "drafter", "is not none, recorded or dflash");
  need(draft.is_cpu() && draft.dim() == 2, "draft", "is not a matrix on the CPU");
  r.draft = data<float>(draft, "draft");
  r.draft_rows = draft.size(0);
  r.draft_width = draft.size(1);
  r.draft_first = draft_first;
  r.block_size = block_size;
  r.budget = budget;
  r.chain = chain;
  need(costs.is_cpu(), "costs", "is not on the CPU");
  const double* c = data<double>(costs, "costs");
  r.costs.assign(c, c + costs.numel());
  r.temperature = temperature;
  r.seed = static_cast<uint64_t>(seed);
  r.record = record;
  return s->begin(r);
}

std::vector<int64_t> wide(const std::vector<int32_t>& v) { return {v.begin(), v.end()}; }

std::vector<int64_t> decode_round(int64_t handle, int64_t ticket) { return wide(Locked(handle)->round(ticket)); }

// Rounds for so many seconds, at least one; whether there are more.
bool decode_run(int64_t handle, int64_t ticket, double seconds) {
  const Locked s(handle);
  const auto start = std::chrono::steady_clock::now();
  do {
    if (s->round(ticket).empty()) return false;
  } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
  return true;
}

std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, bool, double, double> decode_result(int64_t handle, int64_t ticket) {
  const Locked s(handle);
  const DecodeResult& r = s->result(ticket);
  return {wide(r.tokens), wide(r.accepted_per_round), r.round_nanoseconds, r.eos, r.prefill_seconds, r.decode_seconds};
}

void decode_logits(int64_t handle, int64_t ticket, Tensor out) {
  const Locked s(handle);
  s->recorded_logits(ticket, rows_out(out, static_cast<int64_t>(s->result(ticket).tokens.size()) + 1, s->config().vocab_size));
}

// out: [rounds, 2 + 3*(budget+1)], see RecordTreeArgs.
void decode_trees(int64_t handle, int64_t ticket, Tensor out) {
  const Locked s(handle);
  need(out.is_cpu(), "out", "is not on the CPU");
  s->recorded_trees(ticket, sized<int32_t>(out, s->recorded_trees_size(ticket), "out"));
}

// out: [rounds, L, V], see Session::recorded_draft.
void decode_draft(int64_t handle, int64_t ticket, Tensor out) {
  const Locked s(handle);
  const std::vector<float>& values = s->recorded_draft(ticket);
  std::copy(values.begin(), values.end(), rows_out(out, static_cast<int64_t>(values.size()), 1));
}

// `name count`, one kernel a line.
std::string session_counters(int64_t handle) {
  const Locked s(handle);
  std::string lines;
  for (const auto& [name, count] : s->backend().counters()) lines += name + " " + std::to_string(count) + "\n";
  return lines;
}

void session_reset_counters(int64_t handle) { Locked(handle)->backend().reset_counters(); }

std::string session_broken_guard(int64_t handle) { return Locked(handle)->backend().broken_guard(); }

std::vector<int64_t> session_memory(int64_t handle) {
  const Locked s(handle);
  const MemoryInfo m = s->backend().memory();
  return {static_cast<int64_t>(m.allocated), static_cast<int64_t>(m.peak)};
}

}  // namespace

void refuse(const char* what, const char* reason) { throw Error("RequestError", std::string("argument ") + what + " " + reason); }

void* contiguous(const Tensor& t, ScalarType type, const char* what) {
  need(t.scalar_type() == type, what, "has the wrong type");
  need(t.is_contiguous(), what, "is not contiguous");
  return t.data_ptr();
}

void* contiguous(const Tensor& t, ScalarType type, int64_t n, const char* what) {
  void* const p = contiguous(t, type, what);
  need(t.numel() == n, what, "has the wrong size");
  return p;
}

std::vector<int32_t> ints(const Tensor& t, const char* what) {
  const int32_t* p = data<int32_t>(t, what);
  need(t.is_cpu(), what, "is not on the CPU");
  return {p, p + t.numel()};
}

Window window_of(int64_t rank, const std::vector<int64_t>& windows, int64_t bytes, double seconds) {
  if (windows.size() > kWindowRanks) {
    throw Error("RequestError", "argument windows: " + std::to_string(windows.size()) + " ranks, a window is for " + std::to_string(kWindowRanks) +
                                    " at most: set KDTREE_RANKS_WINDOW=0 to go without");
  }
  Window w{static_cast<int>(rank), static_cast<int>(windows.size()), {}, static_cast<size_t>(bytes), seconds};
  for (size_t r = 0; r < windows.size(); ++r) w.of[r] = reinterpret_cast<void*>(windows[r]);
  return w;
}

void wrong_call(uint64_t args, uint64_t wanted) {
  throw Error("RequestError", std::to_string(args) + " arguments for a function of " + std::to_string(wanted));
}

}  // namespace kdtree

KDTREE_LIBRARY_FRAGMENT(KDTREE_LIBRARY, m) {
  m.def(
      "session_open(Tensor path, Tensor label, str device, str precision, int context, int max_rows, bool poison, bool graphs, "
      "int rank, int ranks, int all_gather, int broadcast, int[] windows, int window_bytes, float window_seconds, int progress) -> int");
  m.def("linked(int device, int other) -> bool");
  m.def("session_close(int handle) -> ()");
  m.def("session_sizes(int handle) -> int[]");
  m.def("session_weights(int handle) -> str");
  m.def("session_length(int handle) -> int");
  m.def("session_reset(int handle) -> ()");
  m.def("session_prefill(int handle, Tensor tokens, Tensor(a!) out) -> ()");
  m.def("session_step(int handle, int token, Tensor(a!) out) -> ()");
  m.def("session_verify(int handle, Tensor tokens, Tensor parents, Tensor(a!) out) -> ()");
  m.def("session_commit(int handle, Tensor path) -> ()");
  m.def("session_cache(int handle, int layer, Tensor(a!) latent, Tensor(b!) k_rope) -> ()");
  m.def("session_taps(int handle, Tensor tokens, bool operations) -> str");
  m.def("session_verify_taps(int handle, Tensor tokens, Tensor parents) -> str");
  m.def("session_tap(int handle, int index, Tensor(a!) out) -> ()");
  m.def(
      "decode_begin(int handle, Tensor prompt, int max_tokens, str drafter, Tensor draft, int draft_first, int block_size, "
      "int budget, bool chain, Tensor costs, float temperature, int seed, bool record) -> int");
  m.def("decode_round(int handle, int ticket) -> int[]");
  m.def("decode_run(int handle, int ticket, float seconds) -> bool");
  m.def("decode_result(int handle, int ticket) -> (int[], int[], int[], bool, float, float)");
  m.def("decode_logits(int handle, int ticket, Tensor(a!) out) -> ()");
  m.def("decode_trees(int handle, int ticket, Tensor(a!) out) -> ()");
  m.def("decode_draft(int handle, int ticket, Tensor(a!) out) -> ()");
  m.def("session_counters(int handle) -> str");
  m.def("session_reset_counters(int handle) -> ()");
  m.def("session_broken_guard(int handle) -> str");
  m.def("session_memory(int handle) -> int[]");
}

KDTREE_LIBRARY_IMPL(KDTREE_LIBRARY, m) {
  m.impl("session_open", kdtree::boxed<kdtree::session_open>);
  m.impl("linked", kdtree::boxed<kdtree::linked>);
  m.impl("session_close", kdtree::boxed<kdtree::session_close>);
  m.impl("session_sizes", kdtree::boxed<kdtree::session_sizes>);
  m.impl("session_weights", kdtree::boxed<kdtree::session_weights>);
  m.impl("session_length", kdtree::boxed<kdtree::session_length>);
  m.impl("session_reset", kdtree::boxed<kdtree::session_reset>);
  m.impl("session_prefill", kdtree::boxed<kdtree::session_prefill>);
  m.impl("session_step", kdtree::boxed<kdtree::session_step>);
  m.impl("session_verify", kdtree::boxed<kdtree::session_verify>);
  m.impl("session_commit", kdtree::boxed<kdtree::session_commit>);
  m.impl("session_cache", kdtree::boxed<kdtree::session_cache>);
  m.impl("session_taps", kdtree::boxed<kdtree::session_taps>);
  m.impl("session_verify_taps", kdtree::boxed<kdtree::session_verify_taps>);
  m.impl("session_tap", kdtree::boxed<kdtree::session_tap>);
  m.impl("decode_begin", kdtree::boxed<kdtree::decode_begin>);
  m.impl("decode_round", kdtree::boxed<kdtree::decode_round>);
  m.impl("decode_run", kdtree::boxed<kdtree::decode_run>);
  m.impl("decode_result", kdtree::boxed<kdtree::decode_result>);
  m.impl("decode_logits", kdtree::boxed<kdtree::decode_logits>);
  m.impl("decode_trees", kdtree::boxed<kdtree::decode_trees>);
  m.impl("decode_draft", kdtree::boxed<kdtree::decode_draft>);
  m.impl("session_counters", kdtree::boxed<kdtree::session_counters>);
  m.impl("session_reset_counters", kdtree::boxed<kdtree::session_reset_counters>);
  m.impl("session_broken_guard", kdtree::boxed<kdtree::session_broken_guard>);
  m.impl("session_memory", kdtree::boxed<kdtree::session_memory>);
}
