// Opening a session, and the calls that run rows one at a time: prefill, step, verify, commit, taps.
#include "cold.h"

#include <algorithm>
#include <limits>

#include "bf16.h"
#include "decode.h"

namespace kdtree {
namespace {

constexpr int64_t kMaxRows = 4096;  // rows.path takes its square

int checked(int64_t value, int64_t low, int64_t high, const char* what) {
  if (value < low || value > high) {
    throw Error("RequestError", std::string(what) + " " + std::to_string(value) + " is not in " + std::to_string(low) + ".." +
                                    std::to_string(high));
  }
  return static_cast<int>(value);
}

}  // namespace

Session::Session(std::unique_ptr<Backend> backend, std::shared_ptr<const KdtrFile> file, Precision precision, int64_t context,
                 int64_t max_rows, bool graphs, Ranks ranks, Transport transport)
    : backend_(std::move(backend)),
      file_(std::move(file)),
      config_(read_config(file_->view())),
      context_(context == 0 ? config_.max_context : checked(context, 1, config_.max_context, "context")),
      max_rows_(checked(max_rows, 1, kMaxRows, "max_rows")),
      collective_(*backend_, ranks, transport) {
  if (context_ > std::numeric_limits<int>::max() - max_rows_) throw Error("RequestError", "context plus max_rows exceeds 2^31-1; open the session with a shorter context");
  check_ranks(config_, ranks.count, file_->view().label());
  weights_ = load_weights(*backend_, file_->view(), config_, precision, ranks);
  mapped_ = file_->holds(weights_.final_norm);
  backend_->set_graphs(graphs);
  step_ = std::make_unique<StepMemory>(*backend_, max_rows_, ranks);
  forward_ = std::make_unique<Forward>(*backend_, config_, weights_, *step_, collective_, precision.numerics, context_, max_rows_);
  scores_ = Buffer(*backend_, sizeof(double) * static_cast<size_t>(max_rows_), "tree.scores");
  draft_config_ = read_drafter(file_->view(), config_);
  if (draft_config_) {
    if (draft_config_->block_size > std::numeric_limits<int>::max() - context_) {
      throw Error("RequestError", "context plus draft_block_size exceeds 2^31-1; open the session with a shorter context");
    }
    if (ranks.lead()) {
      draft_weights_ = load_drafter(*backend_, file_->view(), config_, *draft_config_, precision, ranks.alone() ? &weights_ : nullptr);
    }
  }
  if (ranks.alone()) return;
  scrub_ = std::make_unique<Scrub>(*backend_, weights_.resident, ranks);
}

void Session::reset() {
  length_ = 0;
  end_others();
}

// Any call that moves the session on ends what was under way: a verify waiting for its commit, a decode not yet finished.
void Session::end_others() {
  verified_.clear();
  if (running_) ++ticket_;
  running_ = false;
}

void Session::check_tokens(const std::vector<int32_t>& tokens) const {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= config_.vocab_size) {
      throw Error("TokenError", "token " + std::to_string(tokens[i]) + " at index " + std::to_string(i) + " is not in 0.." +
                                    std::to_string(config_.vocab_size - 1));
    }
  }
}

void Session::check_room(int64_t rows, const char* what) const {
  if (rows > context_ - length_) {
    throw Error("ContextOverflow", std::string(what) + " needs " + std::to_string(rows) + " positions after " +
                                       std::to_string(length_) + ", the session's context is " + std::to_string(context_));
  }
}

Session::Rows Session::chain(const std::vector<int32_t>& tokens, size_t from, size_t count) const {
  Rows rows{{tokens.begin() + from, tokens.begin() + from + count}, {}, static_cast<int>(count) - 1};
  for (size_t i = 0; i < count; ++i) rows.parents.push_back(static_cast<int32_t>(i) - 1);
  return rows;
}

void Session::upload_rows(const Rows& r) {
  const size_t m = r.tokens.size(), stride = static_cast<size_t>(max_rows_);
  std::vector<int32_t> depths(m, 0), path(m * stride, -1);
  for (size_t i = 0; i < m; ++i) {
    if (i > 0) {
      const auto parent = static_cast<size_t>(r.parents[i]);
      depths[i] = depths[parent] + 1;
      std::copy_n(path.begin() + parent * stride, depths[i], path.begin() + i * stride);
    }
    path[i * stride + depths[i]] = static_cast<int32_t>(i);
  }
  const kdtree::Rows device = forward_->rows(max_rows_);
  backend_->upload(device.tokens, r.tokens.data(), sizeof(int32_t) * m);
  backend_->upload(device.parents, r.parents.data(), sizeof(int32_t) * m);
  backend_->upload(device.depths, depths.data(), sizeof(int32_t) * m);
  backend_->upload(device.path, path.data(), sizeof(int32_t) * m * stride);
}

void Session::upload_state(int kv_len, int n_rows) {
  state_.kv_len = state_.base = kv_len;
  state_.n_rows = n_rows;
  state_.error = state_.error_row = state_.error_detail = 0;
  backend_->upload(forward_->state(), &state_, sizeof state_);
}

// The least power of two that holds the keys: few enough different values that graphs are shared between requests.
int Session::keys_bound(int64_t keys) const {
  int64_t bound = 256;
  while (bound < keys) bound *= 2;
  return static_cast<int>(std::min<int64_t>(bound, context_));
}

void Session::select(int width, int first, double temperature) {
  if (!collective_.ranks().lead()) return;
  backend_->select({forward_->logits(), config_.vocab_size, temperature, step_->choice.i32(), forward_->scratch(),
                    forward_->rows(width, first), forward_->state()});
}

void Session::share(const StepMemory::Span& span) {
  if (!collective_.ranks().alone()) collective_.broadcast(span.at, span.bytes);
}

void Session::raise(int fault, int row, int detail, const char* what) const {
  const std::string at = std::string(what) + ", row " + std::to_string(row) + ": ";
  if (fault == kFaultRouterNonFinite) {
    throw Error("NonFiniteError", at + "a router score of layer " + std::to_string(detail) + " is NaN or infinite");
  }
  if (fault == kFaultDraftNonFinite) {
    throw Error("DrafterError", std::string(what) + ": a draft logit of depth " + std::to_string(detail) + " is NaN or +inf");
  }
  throw Error("NonFiniteError", at + "a logit is NaN or infinite");
}

void Session::check_file() const {
  if (mapped_) file_->check_unchanged();
}

void Session::check_fault(const char* what) {
  StepState now;
  backend_->download(&now, forward_->state(), sizeof now);
  if (now.error != kFaultNone) raise(now.error, now.error_row, now.error_detail, what);
}

void Session::run(const Rows& rows, bool graph, bool head, const Tap* tap, const AfterLayer* after) {
  check_file();
  const int width = static_cast<int>(rows.tokens.size());
  const int keys = keys_bound(static_cast<int64_t>(length_) + rows.deepest + 1);
  upload_rows(rows);
  upload_state(length_, width);
  const auto body = [&] {
    forward_->layers(width, keys, tap, length_, after);
    if (!head) return;
    forward_->head(width);
    select(width, 0, 0.0);  // finds NaN and infinity among the logits
    share(step_->chosen());
  };
  if (graph) {
    backend_->step("rows/" + std::to_string(width) + "/" + std::to_string(keys), body);
  } else {
    body();
  }
}

void Session::prefill(const std::vector<int32_t>& tokens, float* logits) {
  if (tokens.empty()) throw Error("RequestError", "prefill of no tokens");
  check_tokens(tokens);
  check_room(static_cast<int64_t>(tokens.size()), "prefill");
  end_others();
  const int before = length_;
  const size_t v = static_cast<size_t>(config_.vocab_size);
  try {
    for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(max_rows_)) {
      const size_t n = std::min(tokens.size() - at, static_cast<size_t>(max_rows_));
      run(chain(tokens, at, n), false, true, nullptr);
      check_fault("prefill");
      if (logits != nullptr) backend_->download(logits + at * v, forward_->logits(), sizeof(float) * n * v);
      length_ += static_cast<int>(n);
    }
  } catch (...) {
    length_ = before;
    throw;
  }
}

void Session::step(int32_t token, float* logits) {
  check_tokens({token});
  check_room(1, "step");
  end_others();
  run(chain({token}, 0, 1), true, true, nullptr);
  check_fault("step");
  backend_->download(logits, forward_->logits(), sizeof(float) * static_cast<size_t>(config_.vocab_size));
  ++length_;
}

int Session::check_tree(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents) const {
  const size_t m = tokens.size();
  if (m == 0) throw Error("RequestError", "verify of no rows");
  if (parents.size() != m) {
    throw Error("RequestError", std::to_string(m) + " tokens but " + std::to_string(parents.size()) + " parents");
  }
  if (m > static_cast<size_t>(max_rows_)) {
    throw Error("RequestError", std::to_string(m) + " rows, the session's max_rows is " + std::to_string(max_rows_));
  }
  std::vector<int> depth(m, 0);
  for (size_t i = 0; i < m; ++i) {
    const bool good = i == 0 ? parents[i] == -1 : parents[i] >= 0 && static_cast<size_t>(parents[i]) < i;
    if (!good) {
      throw Error("RequestError", "parents[" + std::to_string(i) + "] is " + std::to_string(parents[i]) +
                                      (i == 0 ? ", the root's must be -1" : ", must be a lower row"));
    }
    if (i > 0) depth[i] = depth[parents[i]] + 1;
  }
  check_tokens(tokens);
  const int deepest = *std::max_element(depth.begin(), depth.end());
  check_room(deepest + 1, "verify");
  return deepest;
}

void Session::verify(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, float* logits) {
  const int deepest = check_tree(tokens, parents);
  end_others();
  run({tokens, parents, deepest}, true, true, nullptr);
  check_fault("verify");
  backend_->download(logits, forward_->logits(), sizeof(float) * tokens.size() * static_cast<size_t>(config_.vocab_size));
  verified_ = parents;
}

std::vector<Session::TapRows> Session::verify_taps(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents) {
  const int deepest = check_tree(tokens, parents);
  end_others();
  std::vector<TapRows> all;
  const Tap tap = [&](const std::string& name, const void* rows, int dim, Element element) {
    all.push_back({name, dim, {}});
    append_rows(all.back().values, rows, tokens.size() * static_cast<size_t>(dim), element);
  };
  run({tokens, parents, deepest}, false, true, &tap);
  tap("logits", forward_->logits(), config_.vocab_size, Element::kF32);
  return all;
}

void Session::append_rows(std::vector<float>& values, const void* rows, size_t count, Element element) {
  const size_t old = values.size();
  values.resize(old + count);
  download_rows(values.data() + old, rows, count, element);
}

// `count` values of any type as floats.
void Session::download_rows(float* out, const void* rows, size_t count, Element element) {
  if (element == Element::kF32) {
    backend_->download(out, rows, sizeof(float) * count);
  } else if (element == Element::kI32) {
    std::vector<int32_t> ints(count);
    backend_->download(ints.data(), rows, sizeof(int32_t) * count);
    std::copy(ints.begin(), ints.end(), out);
  } else {
    std::vector<uint16_t> bits(count);
    backend_->download(bits.data(), rows, sizeof(uint16_t) * count);
    from_bf16(out, bits.data(), count);
  }
}

void Session::commit(const std::vector<int32_t>& path) {
  if (verified_.empty()) throw Error("RequestError", "commit without a verify before it");
  if (path.empty()) throw Error("RequestError", "commit of an empty path");
  for (size_t j = 0; j < path.size(); ++j) {
    const bool inside = path[j] >= 0 && static_cast<size_t>(path[j]) < verified_.size();
    const bool good = j == 0 ? path[j] == 0 : inside && verified_[path[j]] == path[j - 1];
    if (!good) {
      throw Error("RequestError", "path[" + std::to_string(j) + "] is " + std::to_string(path[j]) +
                                      (j == 0 ? ", a path starts with row 0" : ", not a child of the row before it"));
    }
  }
  const auto n = static_cast<int32_t>(path.size());
  state_.n_accepted = n;
  upload_state(length_, static_cast<int>(verified_.size()));
  backend_->upload(step_->accepted.get(), path.data(), sizeof(int32_t) * path.size());
  backend_->kv_commit({forward_->cache().data(), config_.num_layers, config_.kv_lora_rank, config_.qk_rope_head_dim,
                       step_->accepted.i32(), forward_->state(), forward_->numerics()});
  length_ += n;
  verified_.clear();
}

void Session::cache(int64_t layer, float* latent, float* k_rope) {
  const MlaCache& c = forward_->cache()[checked(layer, 0, config_.num_layers - 1, "layer")];
  const size_t rows = static_cast<size_t>(length_);
  download_rows(latent, c.latent, rows * config_.kv_lora_rank, forward_->held());
  download_rows(k_rope, c.k_rope, rows * config_.qk_rope_head_dim, forward_->held());
}

std::vector<Session::TapRows> Session::taps(const std::vector<int32_t>& tokens, bool operations) {
  if (tokens.empty()) throw Error("RequestError", "taps of no tokens");
  check_tokens(tokens);
  reset();
  check_room(static_cast<int64_t>(tokens.size()), "taps");
  std::vector<TapRows> all;
  size_t n = 0, next = 0;
  const Tap tap = [&](const std::string& name, const void* rows, int dim, Element element) {
    const bool operation = name.find(".mla.") != std::string::npos || name.find(".mlp.") != std::string::npos ||
                           name.find(".moe.") != std::string::npos;
    if (operation && !operations) return;
    if (length_ == 0) all.push_back({name, dim, {}});  // later chunks come by the same names in the same order
    append_rows(all[next++].values, rows, n * static_cast<size_t>(dim), element);
  };
  try {
    for (size_t at = 0; at < tokens.size(); at += n) {
      n = std::min(tokens.size() - at, static_cast<size_t>(max_rows_));
      next = 0;
      run(chain(tokens, at, n), false, true, &tap);
      tap("logits", forward_->logits(), config_.vocab_size, Element::kF32);
      length_ += static_cast<int>(n);
    }
  } catch (...) {
    reset();
    throw;
  }
  return all;
}

}  // namespace kdtree
