// The loop that serves AR and DDTree. A round runs wholly in the backend: tree, forward, choice, accept, compaction; the host
// then learns what was accepted in one transfer. On a backend with graphs a round is one graph, captured per key.
#include "cold.h"

#include "decode.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace kdtree {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string bits(double value) {
  uint64_t b;
  std::memcpy(&b, &value, sizeof b);
  return std::to_string(b);
}

// A tree of `budget` nodes is never deeper than that, however far the draft reaches.
int block_of(const DecodeRequest& r) { return static_cast<int>(std::min(r.block_size, r.budget + 1)); }

}  // namespace

void Session::check_request(const DecodeRequest& r) const {
  const auto refuse = [](const char* name, const std::string& text) { throw Error(name, text); };
  if (r.prompt.empty()) refuse("RequestError", "the prompt is empty");
  check_tokens(r.prompt);
  if (r.max_tokens < 0) refuse("RequestError", "max_tokens " + std::to_string(r.max_tokens) + " is negative");
  const auto n = static_cast<int64_t>(r.prompt.size());
  if (n > context_ || r.max_tokens > context_ - n) {
    refuse("ContextOverflow", "a prompt of " + std::to_string(n) + " and max_tokens " + std::to_string(r.max_tokens) +
                                  " exceed the session's context of " + std::to_string(context_));
  }
  if (!(r.temperature >= 0.0) || std::isinf(r.temperature)) {
    refuse("RequestError", "temperature " + std::to_string(r.temperature) + " is not a finite number of at least 0");
  }
  if (!r.tree) return;
  if (r.block_size < 1) refuse("RequestError", "block_size " + std::to_string(r.block_size) + " is below 1");
  if (r.block_size > INT32_MAX) refuse("RequestError", "block_size " + std::to_string(r.block_size) + " exceeds 2^31-1");
  if (r.budget < 0) refuse("RequestError", "budget " + std::to_string(r.budget) + " is negative");
  if (r.budget >= max_rows_) {
    refuse("RequestError", "budget " + std::to_string(r.budget) + " and the root need " + std::to_string(r.budget + 1) +
                               " rows, the session's max_rows is " + std::to_string(max_rows_));
  }
  if (!r.costs.empty() && static_cast<int64_t>(r.costs.size()) != r.budget + 1) {
    refuse("RequestError", std::to_string(r.costs.size()) + " costs, a budget of " + std::to_string(r.budget) + " takes " +
                               std::to_string(r.budget + 1));
  }
  for (const double cost : r.costs) {
    if (!(cost > 0.0) || std::isinf(cost)) refuse("RequestError", "a cost of " + std::to_string(cost) + " is not finite and above 0");
  }
  if (r.dflash) {
    if (!draft_config_) refuse("DrafterError", "the file has no drafter of its own; `kdtree import --drafter` puts one in");
    return;
  }
  if (r.draft_width != config_.vocab_size) {
    refuse("DrafterError", "draft logits are " + std::to_string(r.draft_width) + " wide, the vocabulary has " +
                               std::to_string(config_.vocab_size));
  }
  if (r.draft_first < INT32_MIN / 2 || r.draft_first > INT32_MAX / 2 || r.draft_rows > INT32_MAX / 2) {
    refuse("DrafterError", "the draft table's positions exceed 2^30");
  }
}

// Makes room for what this request needs. If there is none, whatever was captured or is held still fits together.
void Session::reserve(const DecodeRequest& r) {
  const auto grow = [&](Buffer& buffer, size_t bytes, const char* what) {
    if (bytes <= buffer.bytes()) return;
    backend_->drop_graphs();
    buffer = Buffer();  // a request that needs it asks again, and need not find room for both
    buffer = Buffer(*backend_, bytes, what);
  };
  const size_t v = static_cast<size_t>(config_.vocab_size), tokens = static_cast<size_t>(r.max_tokens);
  if (r.tree) {
    if (!r.dflash) grow(draft_, sizeof(float) * v * static_cast<size_t>(r.draft_rows), "draft");
    grow(costs_, sizeof(double) * r.costs.size(), "tree.costs");
    if (r.dflash && collective_.ranks().lead()) {
      if (!drafter_) {
        drafter_ = std::make_unique<Drafter>(*backend_, config_, *draft_config_, draft_weights_, context_, max_rows_, forward_->state());
      }
      forward_->need_scratch(drafter_->scratch_bytes());
    }
    forward_->need_scratch(backend_->tree_scratch(config_.vocab_size, block_of(r), static_cast<int>(r.budget)));
  }
  if (r.record) {
    grow(logit_log_, sizeof(float) * v * tokens, "log.logits");
    grow(tree_log_, sizeof(int32_t) * tokens * (2 + 3 * static_cast<size_t>(max_rows_)), "log.trees");
  }
}

void Session::prefill_bonus() {
  const std::vector<int32_t>& prompt = request_.prompt;
  for (size_t at = 0; at < prompt.size(); at += static_cast<size_t>(max_rows_)) {
    const size_t n = std::min(prompt.size() - at, static_cast<size_t>(max_rows_));
    const int width = static_cast<int>(n);
    const bool drafting = request_.dflash && drafter_;
    const AfterLayer keep = [&](int layer, const float* x) { drafter_->tap(layer, x, width); };
    run(chain(prompt, at, n), false, false, nullptr, drafting ? &keep : nullptr);
    if (drafting) drafter_->extend(width, forward_->scratch());
    if (at + n == prompt.size()) {  // the last row alone decides what follows
      const int last = static_cast<int>(n) - 1;
      check_fault("prefill");
      upload_state(length_, 1);
      forward_->head(1, last);
      select(1, last, request_.temperature);
      share(step_->chosen());
    }
    check_fault("prefill");
    length_ += static_cast<int>(n);
  }
  backend_->download(&state_.bonus, step_->choice.get(), sizeof(int32_t));
  if (!request_.record) return;
  first_logits_.resize(static_cast<size_t>(config_.vocab_size));
  backend_->download(first_logits_.data(), forward_->logits(), sizeof(float) * first_logits_.size());
}

int64_t Session::begin(const DecodeRequest& request) {
  check_request(request);
  reset();
  const auto start = Clock::now();
  ++ticket_;
  request_ = request;
  if (!request_.tree) request_.costs.clear();
  result_ = DecodeResult{};
  draft_log_.clear();
  reserve(request_);
  if (!request_.costs.empty()) backend_->upload(costs_.get(), request_.costs.data(), sizeof(double) * request_.costs.size());
  if (request_.tree && !request_.dflash && request_.draft_rows > 0) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(request_.draft_rows * request_.draft_width);
    backend_->upload(draft_.get(), request_.draft, bytes);
  }
  request_.draft = nullptr;  // the caller's memory is not kept
  width_ = request_.tree ? static_cast<int>(request_.budget) + 1 : 1;
  keys_ = keys_bound(static_cast<int64_t>(request_.prompt.size()) + request_.max_tokens);
  state_ = StepState{};
  state_.seed_lo = static_cast<uint32_t>(request_.seed);
  state_.seed_hi = static_cast<uint32_t>(request_.seed >> 32);
  try {
    prefill_bonus();
  } catch (...) {
    reset();
    throw;
  }
  state_.limit = static_cast<int32_t>(request_.max_tokens);
  state_.draft_first = static_cast<int32_t>(request_.draft_first);
  state_.draft_rows = static_cast<int32_t>(request_.draft_rows);
  upload_state(length_, 0);
  key_ = (request_.tree ? "ddtree/" + std::to_string(block_of(request_)) : std::string("ar")) + "/" + std::to_string(width_) +
         "/" + std::to_string(keys_) + "/" + bits(request_.temperature) + (request_.dflash ? "/dflash" : "") + (request_.chain ? "/chain" : "") + (request_.costs.empty() ? "" : "/costs") +
         (request_.record ? "/record" : "");
  running_ = request_.max_tokens > 0;
  result_.prefill_seconds = seconds_since(start);
  return ticket_;
}

void Session::forward_round() {
  const kdtree::Rows rows = forward_->rows(width_);
  StepState* state = forward_->state();
  const bool lead = collective_.ranks().lead();
  const bool drafting = lead && request_.dflash;
  if (drafting) drafter_->draft(keys_, forward_->scratch());
  if (lead && request_.tree) {
    backend_->tree_build({drafting ? drafter_->logits() : draft_.f32(), config_.vocab_size, block_of(request_), width_ - 1,
                          config_.eos_id, request_.chain, request_.costs.empty() ? nullptr : static_cast<double*>(costs_.get()),
                          forward_->scratch(), rows, static_cast<double*>(scores_.get()), state});
  } else if (lead) {
    backend_->tree_root(rows, state);
  }
  share(step_->planned());
  const AfterLayer keep = [this](int layer, const float* x) { drafter_->tap(layer, x, width_); };
  forward_->layers(width_, keys_, nullptr, 0, drafting ? &keep : nullptr);
  forward_->head(width_);
  select(width_, 0, request_.temperature);
  if (lead) {
    backend_->accept({rows, step_->choice.i32(), config_.eos_id, step_->accepted.i32(), static_cast<RoundOut*>(step_->out.get()), state});
  }
  share(step_->decided());
  if (request_.record) {
    const int entries = static_cast<int>(logit_log_.bytes() / (sizeof(float) * static_cast<size_t>(config_.vocab_size)));
    backend_->record({logit_log_.f32(), forward_->logits(), config_.vocab_size, 0, entries, step_->accepted.i32(), width_, state});
    backend_->record_tree({tree_log_.i32(), entries, width_, rows, step_->accepted.i32(), state});
  }
  backend_->kv_commit({forward_->cache().data(), config_.num_layers, config_.kv_lora_rank, config_.qk_rope_head_dim,
                       step_->accepted.i32(), state, forward_->numerics()});
  if (drafting) drafter_->extend_accepted(step_->accepted.i32(), width_, forward_->scratch());
  if (!collective_.ranks().alone()) sum_round();
}

// What this rank holds of the rounds up to this one - its logits, and the decisions it was given - as one number, and every other rank's
// beside it, each followed by the round.
void Session::sum_round() {
  const int32_t* n_rows = &forward_->state()->n_rows;
  backend_->checksum({static_cast<uint64_t*>(step_->sum.get()), 3, {{forward_->logits(), static_cast<size_t>(config_.vocab_size), width_, n_rows},
                               {step_->out.get(), sizeof(RoundOut) / 4, 1, nullptr},
                               {step_->tokens.get(), 1, width_, n_rows}}});
  collective_.all_gather(step_->told().at, step_->summed().at, step_->summed().bytes);
}

void Session::compare_round(const std::vector<uint64_t>& sums, double seconds) {
  std::string apart;
  for (size_t r = 1; r < sums.size(); ++r) {
    if (sums[r] != sums[0]) apart += (apart.empty() ? "" : ", ") + std::to_string(r);
  }
  if (apart.empty()) {
    scrub_->next(seconds);
    return;
  }
  scrub_->all();  // a rank whose weights are to blame says so itself
  throw Error("RankDiverged", "round " + std::to_string(result_.accepted_per_round.size()) +
                                  ": the checksum over tokens and logits of rank " + apart + " is not that of rank 0");
}

std::vector<int32_t> Session::round(int64_t ticket) {
  check_ticket(ticket);
  if (!running_) return {};
  check_file();
  const auto start = Clock::now();
  backend_->step(key_, [this] { forward_round(); });
  const StepMemory::Span told = step_->told();
  std::vector<unsigned char> raw(told.bytes);
  backend_->download(raw.data(), told.at, raw.size());
  const Ranks& ranks = collective_.ranks();
  std::vector<uint64_t> sums(ranks.alone() ? 0 : static_cast<size_t>(ranks.count));
  const size_t each = told.bytes / static_cast<size_t>(ranks.count);
  for (size_t r = 0; r < sums.size(); ++r) std::memcpy(&sums[r], raw.data() + r * each, sizeof sums[r]);
  const unsigned char* decided = raw.data() + (static_cast<size_t>(ranks.rank) + 1) * each - step_->out.bytes();
  RoundOut out;
  std::memcpy(&out, decided, sizeof out);
  if (out.error != kFaultNone) {
    reset();
    raise(out.error, out.error_row, out.error_detail, "decode");
  }
  if (request_.record && request_.dflash) {
    const size_t old = draft_log_.size();
    draft_log_.resize(old + static_cast<size_t>(draft_block() - 1) * static_cast<size_t>(config_.vocab_size));
    if (drafter_) backend_->download(draft_log_.data() + old, drafter_->logits(), sizeof(float) * (draft_log_.size() - old));
  }
  std::vector<int32_t> tokens(static_cast<size_t>(out.n_accepted));
  std::memcpy(tokens.data(), decided + offsetof(RoundOut, tokens), sizeof(int32_t) * tokens.size());
  if (scrub_ != nullptr) compare_round(sums, seconds_since(start));
  length_ = out.kv_len;
  running_ = out.done == 0;
  result_.eos = out.done == 2;
  result_.tokens.insert(result_.tokens.end(), tokens.begin(), tokens.end());
  result_.accepted_per_round.push_back(out.n_accepted);
  const double seconds = seconds_since(start);
  result_.round_nanoseconds.push_back(static_cast<int64_t>(1e9 * seconds));
  result_.decode_seconds += seconds;
  return tokens;
}

void Session::check_ticket(int64_t ticket) const {
  if (ticket != ticket_ || ticket == 0) throw Error("RequestError", "this decode was ended by another call on its session");
}

const DecodeResult& Session::result(int64_t ticket) const {
  check_ticket(ticket);
  return result_;
}

void Session::recorded_logits(int64_t ticket, float* logits) {
  check_ticket(ticket);
  if (!request_.record) throw Error("RequestError", "the decode did not record; begin it with `record`");
  std::memcpy(logits, first_logits_.data(), sizeof(float) * first_logits_.size());
  const size_t bytes = sizeof(float) * first_logits_.size() * result_.tokens.size();
  if (bytes > 0) backend_->download(logits + first_logits_.size(), logit_log_.get(), bytes);
}

const std::vector<float>& Session::recorded_draft(int64_t ticket) const {
  check_ticket(ticket);
  if (!request_.record || !request_.dflash) throw Error("RequestError", "the decode did not record a drafter of its own; begin it with `record` and the drafter dflash");
  return draft_log_;
}

int64_t Session::recorded_trees_size(int64_t ticket) const {
  check_ticket(ticket);
  return static_cast<int64_t>(result_.accepted_per_round.size()) * (2 + 3 * static_cast<int64_t>(width_));
}

void Session::recorded_trees(int64_t ticket, int32_t* trees) {
  const auto bytes = sizeof(int32_t) * static_cast<size_t>(recorded_trees_size(ticket));
  if (!request_.record) throw Error("RequestError", "the decode did not record; begin it with `record`");
  if (bytes > 0) backend_->download(trees, tree_log_.get(), bytes);
}

}  // namespace kdtree
