// A session: a loaded model with its cache, and the AR and DDTree loops over it.
//
// Requests are checked before anything runs. A fault found by the backend during a step raises the error of its name; committed
// rows are then as they were before the call (prefill, verify) or forgotten (decode), and the session goes on being usable.
// Not thread-safe: callers serialise. With several ranks every rank has a session and makes the same calls; trees, choices and
// acceptance are the lead's, broadcast to the others, and after each round a checksum over tokens and logits is compared.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "dflash.h"
#include "model.h"
#include "scrub.h"

namespace kdtree {

struct DecodeRequest {
  std::vector<int32_t> prompt;
  int64_t max_tokens = 0;
  bool tree = false;  // false: AR, and what follows up to `costs` is ignored
  const float* draft = nullptr;  // host memory [draft_rows, draft_width]
  int64_t draft_rows = 0, draft_width = 0, draft_first = 0;
  bool dflash = false;  // the file's own drafter drafts, and the four above mean nothing
  int64_t block_size = 1, budget = 0;
  bool chain = false;   // only the best token of each depth
  std::vector<double> costs;  // [budget + 1] of a forward with so many nodes, by which trees are cut; empty: they are not
  double temperature = 0.0;
  uint64_t seed = 0;
  bool record = false;  // keep the logits of every committed row and every round's tree
};

struct DecodeResult {
  std::vector<int32_t> tokens;
  std::vector<int32_t> accepted_per_round;
  std::vector<int64_t> round_nanoseconds;
  bool eos = false;
  double prefill_seconds = 0.0, decode_seconds = 0.0;
};

class Session {
 public:
  // context 0: the model's max_context.
  Session(std::unique_ptr<Backend> backend, std::shared_ptr<const KdtrFile> file, Precision precision, int64_t context,
          int64_t max_rows, bool graphs, Ranks ranks = {}, Transport transport = {});

  const ModelConfig& config() const { return config_; }
  Backend& backend() { return *backend_; }
  int length() const { return length_; }
  int max_rows() const { return max_rows_; }
  int context() const { return context_; }
  const std::vector<ResidentWeight>& weights() const { return weights_.resident; }
  void reset();

  // Commits the tokens after what is there; logits: host [n, V] or null.
  void prefill(const std::vector<int32_t>& tokens, float* logits);
  void step(int32_t token, float* logits);
  // Runs a tree, commits nothing; logits: host [M, V].
  void verify(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, float* logits);
  void commit(const std::vector<int32_t>& path);
  void cache(int64_t layer, float* latent, float* k_rope);

  // Values a row and all rows of every tap, in the order of computation; ids are given as floats.
  struct TapRows {
    std::string name;
    int dim;
    std::vector<float> values;
  };
  // A fault is no error here: rows that are not finite show where it began.
  std::vector<TapRows> taps(const std::vector<int32_t>& tokens, bool operations);
  // As verify, but gives every operation's rows and leaves nothing to commit.
  std::vector<TapRows> verify_taps(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents);

  // Reset and prefill; the ticket names this decode in the calls below, which refuse another one's.
  int64_t begin(const DecodeRequest& request);
  // One forward: the tokens it committed; empty once the decode has ended.
  std::vector<int32_t> round(int64_t ticket);
  const DecodeResult& result(int64_t ticket) const;
  // Logits of a recorded decode: host [T+1, V].
  void recorded_logits(int64_t ticket, float* logits);
  // Trees of a recorded DDTree decode: host int32 [rounds, 2 + 3*(budget+1)], as RecordTreeArgs lays them out.
  void recorded_trees(int64_t ticket, int32_t* trees);
  int64_t recorded_trees_size(int64_t ticket) const;  // integers
  // What the own drafter gave in each round of a recorded decode: [rounds, L, V]; zeros on a rank that does not lead.
  const std::vector<float>& recorded_draft(int64_t ticket) const;
  int draft_block() const { return draft_config_ ? draft_config_->block_size : 0; }  // 0: the file has no drafter

 private:
  struct Rows {  // host copy of a step's rows
    std::vector<int32_t> tokens, parents;
    int deepest;
  };
  void check_file() const;  // FormatError if weights are no longer those that were opened
  void check_tokens(const std::vector<int32_t>& tokens) const;
  void check_room(int64_t rows, const char* what) const;
  int check_tree(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents) const;  // the depth of the deepest row
  void append_rows(std::vector<float>& values, const void* rows, size_t count, Element element);
  void download_rows(float* out, const void* rows, size_t count, Element element);
  void end_others();
  void upload_rows(const Rows& rows);
  void upload_state(int kv_len, int n_rows);
  // Rows at length_. after: see Forward::layers.
  void run(const Rows& rows, bool graph, bool head, const Tap* tap, const AfterLayer* after = nullptr);
  void select(int width, int first, double temperature);  // on the lead
  void share(const StepMemory::Span& span);                // the lead's, to every rank
  void sum_round();
  void compare_round(const std::vector<uint64_t>& sums, double seconds);
  void check_fault(const char* what);
  [[noreturn]] void raise(int fault, int row, int detail, const char* what) const;
  Rows chain(const std::vector<int32_t>& tokens, size_t from, size_t count) const;
  int keys_bound(int64_t keys) const;

  void check_request(const DecodeRequest& r) const;
  void reserve(const DecodeRequest& r);
  void prefill_bonus();
  void forward_round();
  void check_ticket(int64_t ticket) const;

  std::unique_ptr<Backend> backend_;
  std::shared_ptr<const KdtrFile> file_;
  ModelConfig config_;
  ModelWeights weights_;
  bool mapped_ = false;  // weights are used where the file is mapped
  int context_, max_rows_;
  Collective collective_;
  std::unique_ptr<StepMemory> step_;
  std::unique_ptr<Scrub> scrub_;  // with several ranks
  std::unique_ptr<Forward> forward_;
  std::optional<DrafterConfig> draft_config_;
  DrafterWeights draft_weights_{};    // on the lead, as what follows
  std::unique_ptr<Drafter> drafter_;  // made by the first decode that drafts with it: its cache is as long as the context
  Buffer scores_;
  Buffer draft_, logit_log_, tree_log_, costs_;  // grown on demand, kept between decodes
  int length_ = 0;
  StepState state_{};          // what the next step starts from
  std::vector<int32_t> verified_;  // parents of the last verify; empty when there is nothing to commit

  int64_t ticket_ = 0;
  bool running_ = false;
  DecodeRequest request_;
  DecodeResult result_;
  std::vector<float> first_logits_, draft_log_;
  std::string key_;
  int width_ = 1, keys_ = 1;
};

}  // namespace kdtree
