// The contract of every operation, once. cpu/ and cuda/ implement it; model.cpp and decode.cpp call nothing else.
//
// Guarantees that every implementation gives (docs/model.md is normative for the arithmetic):
//   * Row invariance: what is written for row m depends on row m's inputs alone, bit for bit - not on the number of
//     rows, on the other rows, on the number of threads, or on eager execution against graph replay.
//   * Rank invariance: nor on how many outputs, heads or experts a call computes. A rank asks for some of them, and what it gets
//     has the bits that a call for all of them would have given.
//   * Only rows m < *n_rows are written (n_rows lives in the backend's memory, so that a captured graph can be replayed with
//     another count); max_rows is the static bound that sizes launches.
//   * Pointers are in the backend's memory (host memory for the CPU). Row-major, leading dimensions in elements; f32 where the type
//     says so. `void` is what only products read: f32 under Numerics::kF32, bf16 (nearest, ties to even) under kBf16.
//   * Nothing is allocated inside an operation; scratch is handed in, its size asked for at load time (*_scratch). Operations
//     run one after the other, so all of them may be given the same scratch; nothing in it survives an operation.
//   * What changes from request to request (draft position, seed, limit) is read from StepState, so that a captured graph stays
//     valid; everything else in an argument struct is constant for the key given to Backend::step.
//   * A data-dependent fault (NaN logits, non-finite router score) sets StepState::error and leaves memory valid.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "error.h"

namespace kdtree {

// What a step reads and writes about itself; one per session, in the backend's memory.
struct StepState {
  int32_t kv_len;      // committed cache rows = position of the step's row 0
  int32_t n_rows;      // active rows of the step
  int32_t bonus;       // chosen by the target, not yet run through it
  int32_t committed;   // tokens committed since decoding began
  int32_t limit;       // stop when committed reaches it
  int32_t done;        // 0 running, 1 limit reached, 2 EOS committed
  int32_t n_accepted;  // rows accepted by the last accept, the root included
  int32_t base;        // kv_len before the last accept: where the step's rows stand in the cache
  int32_t error;       // 0 or the first Fault met
  int32_t error_row;   // row and detail (layer, expert or token) of that fault
  int32_t error_detail;
  int32_t rounds;      // forwards since decoding began
  int32_t draft_first; // position drafted by row 0 of the draft table
  int32_t draft_rows;  // rows of the draft table
  uint32_t seed_lo;    // of sampling
  uint32_t seed_hi;
};
static_assert(sizeof(StepState) == 64, "StepState is copied as one 64-byte record");

enum Fault : int32_t {
  kFaultNone = 0,
  kFaultRouterNonFinite = 1,  // detail: layer
  kFaultLogitsNonFinite = 2,  // detail: 0
  kFaultDraftNonFinite = 3,   // detail: depth
};

// The rows of a step. All arrays have max_rows entries, path has max_rows * path_stride.
struct Rows {
  int32_t* tokens;
  int32_t* parents;  // row index, lower than the row's own; -1 for row 0
  int32_t* depths;   // 0 for row 0; a row's position is kv_len + depth
  int32_t* path;     // path[m*path_stride + d]: the row that is m's ancestor at depth d, d <= depths[m]; the last is m itself
  int path_stride;
  int max_rows;
};

// How a forward pass rounds (docs/model.md, bf16). kBf16: whatever a product reads is bf16, what it gives is f32.
enum class Numerics : int32_t { kF32 = 0, kBf16 = 1 };

enum class WeightKind : int32_t { kF32 = 0, kInt4 = 1, kBf16 = 2 };

// A matrix [n, k] (out, in); or e such matrices, for experts, which begin step() rows apart. kF32 goes with Numerics::kF32, kBf16
// with kBf16, kInt4 with either.
struct Weight {
  WeightKind kind = WeightKind::kF32;
  const void* data = nullptr;        // f32 or bf16 [e, n, k], or nibbles u8 [e, n, 16*ceil(k/32)]
  const uint16_t* scale = nullptr;   // int4: bf16 [e, n, ceil(k/32)]
  int n = 0, k = 0, e = 1;
  int stride = 0;                    // rows from one of the e to the next where they do not follow each other, else 0
  int step() const { return stride != 0 ? stride : n; }
};

enum class Epilogue : int32_t {
  kStore = 0,     // out = y
  kResidual = 1,  // out += y
  kSiluMul = 2,   // two weights of equal shape: out[0] = silu(y0) * y1
};

// y_i = w_i * x for up to two weights that share the input; the input may be normed on the way.
struct LinearArgs {
  const void* x; int ldx;          // with a norm f32 always, and rounded after it
  const float* norm_w; float eps;  // norm_w non-null: x is replaced by rms(x, norm_w, eps)
  Weight w[2]; void* out[2]; int ldo[2]; int parts;  // parts 1 or 2; out is f32, but for kSiluMul
  Epilogue epilogue;
  void* scratch;  // linear_scratch(k, max_rows) bytes
  int max_rows; const int32_t* n_rows;
  Numerics numerics = Numerics::kF32;
};

struct EmbedArgs {  // out[m] = table[tokens[m]]: table.k values of a row, f32 or bf16; the next token's begins `stride` values later
  float* out; Weight table; int stride; Rows rows; const int32_t* n_rows;
};

struct MlaDims { int heads, rank, nope, rope, v; Numerics numerics = Numerics::kF32; };

// The cache of one layer. Slot s holds the token at position s for s < kv_len; the rows of the current step stand at kv_len + m.
struct MlaCache { void* latent; void* k_rope; int slots; };  // [slots, rank], [slots, rope]

// From the raw projections to what attention needs: absorbs W_UK into the query, rotates, norms the latent, writes the cache rows.
struct MlaPrepareArgs {
  MlaDims dims;
  const float* q;     // [M, heads*(nope+rope)]
  const float* kv;    // [M, rank+rope]
  const float* kv_norm_w; float eps;
  Weight kv_b;        // f32 or bf16 [heads*(nope+v), rank]
  const float* cos_sin;  // [max positions, rope/2, 2]
  void* q_lat;        // out [M, heads, rank]
  void* q_rope;       // out [M, heads, rope]
  MlaCache cache;     // rows kv_len + m are written
  Rows rows; const StepState* state;
};

struct MlaAttentionArgs {  // o_lat = softmax(scale * (q_lat.latent + q_rope.k_rope)) . latent over the row's visible keys
  MlaDims dims; float scale;
  const void* q_lat; const void* q_rope; MlaCache cache;
  void* o_lat;   // out [M, heads, rank]
  int max_keys;  // no row sees more keys than this
  void* scratch; // attention_scratch(dims, max_rows, max_keys) bytes
  Rows rows; const StepState* state;
};

struct MlaValueArgs {  // o[m, h, :] = W_UV[h] o_lat[m, h]
  MlaDims dims; const void* o_lat; Weight kv_b; void* o; int max_rows; const int32_t* n_rows;  // o [M, heads*v]
};

struct RouterArgs {  // logits are the router's linear output
  const float* logits; const float* bias; int experts, top_k, n_group, topk_group; bool norm_topk; float scaling;
  int32_t* ids; float* weights;  // out [M, top_k], in the order of choice
  int layer; int max_rows; StepState* state;
};

// gate.n may be a part of the experts' inner size and down.n a part of dim: then a rank does each phase for itself, with an exchange
// of act and shared_act between them.
enum class MoePhase : int32_t { kBoth = 0, kGateUp = 1, kDown = 2 };

// Memory of every rank that all ranks read and write: what a backend's own kernels exchange through. Zeros at first; what an exchange
// leaves in it the next one counts on, whichever session makes it.
constexpr int kWindowRanks = 8;
struct Window {
  int rank = 0, count = 0;           // count 0: there is none
  void* of[kWindowRanks] = {};       // every rank's, where this process sees it; aligned to 16 bytes
  size_t bytes = 0;                  // of each
  double seconds = 0;                // that a rank waits for another
};

// Where a gather's contributions are.
enum class Origin {
  kGathered,  // src: all of them, [ranks, rank_bytes]
  kOwn,       // src: this rank's, whose parts follow each other; the others' come through the window, and every row is written
  kLead,      // the same with rank 0's alone as result, left as it is there: dst [per_row * M, row_bytes]
};

// x and the count of rows are older than the operation before this one, which is the router: launches that overlap may read them at once.
struct MoeArgs {
  const float* x; int dim;          // residual stream [M, dim]
  const float* norm_w; float eps;
  const int32_t* ids; const float* weights; int top_k;
  Weight gate, up, down;            // e experts
  Weight shared_gate, shared_up, shared_down;  // n == 0: no shared expert
  void* act;                        // [M, top_k, gate.n]   silu(gate)*up of every chosen expert; kDown reads [M, top_k, down.k]
  void* shared_act;                 // [M, shared_gate.n]; kDown reads [M, shared_down.k]
  float* out;                       // [M, down.n], += ; may be x itself
  void* scratch;                    // moe_scratch(...) bytes
  int max_rows; const int32_t* n_rows;
  Numerics numerics = Numerics::kF32;
  MoePhase phase = MoePhase::kBoth;
  // kDown: contributions of act's rows, then shared_act's, which are to be written from it (UnshardArgs::src); or null: they are there.
  // Nobody else reads act then, so that it may be in another place and order.
  const void* gathered = nullptr; size_t rank_bytes = 0; int ranks = 1;
  Origin origin = Origin::kGathered;  // what of it is there
};

// Ranks' contributions - one rank's rows after the other's - put side by side: row i of dst is row i of rank 0, then of rank 1, ...
struct UnshardArgs {
  struct Part {
    void* dst;         // [per_row * M, ranks * row_bytes]
    size_t offset;     // where the part begins in a rank's contribution, bytes
    size_t row_bytes;  // of one rank; even
    int per_row;       // rows of dst for every row of the step
  };
  const void* src; size_t rank_bytes;  // [ranks, rank_bytes]
  int ranks;
  Part part[2]; int parts;
  int max_rows; const int32_t* n_rows;  // unless of kGathered not asked for
  Origin origin = Origin::kGathered;
};

// MoeArgs::gathered put side by side in act and shared_act.
inline UnshardArgs acts_of(const MoeArgs& a) {
  const size_t operand = a.numerics == Numerics::kBf16 ? sizeof(uint16_t) : sizeof(float), ranks = static_cast<size_t>(a.ranks);
  const size_t routed = operand * static_cast<size_t>(a.down.k) / ranks, shared = operand * static_cast<size_t>(a.shared_down.k) / ranks;
  const size_t first = routed * static_cast<size_t>(a.max_rows) * static_cast<size_t>(a.top_k);
  return {a.gathered, a.rank_bytes, a.ranks, {{a.act, 0, routed, a.top_k}, {a.shared_act, first, shared, 1}},
          a.shared_down.n > 0 ? 2 : 1, a.max_rows, a.n_rows, a.origin};
}

// out += a sum over 32-bit words, mixed with their place, of the rows that count of each span: equal data give equal sums on every
// backend, and no order of adding changes it. n_rows null: all of them.
struct ChecksumArgs {
  struct Span {
    const void* data; size_t row_words; int max_rows; const int32_t* n_rows;
  };
  uint64_t* out; int spans; Span span[3];
};

// The choice of each row: argmax (temperature 0) or a Gumbel draw keyed by (state's seed, position, token). A NaN or an
// infinity among a row's logits is kFaultLogitsNonFinite, its choice then 0.
struct SelectArgs {
  const float* logits; int vocab; double temperature;  // double, because docs/model.md divides by it in f64
  int32_t* choice;  // out [M]
  void* scratch;
  Rows rows; StepState* state;
};

struct TreeBuildArgs {
  const float* draft;  // [state->draft_rows, vocab]: logits for positions state->draft_first ...
  int vocab, block_size, budget, eos_id;
  bool chain;          // only the best token of each depth
  const double* costs; // [budget + 1] or null: the tree is cut as docs/model.md says
  void* scratch;       // tree_scratch(vocab, block_size, budget) bytes
  Rows rows;           // out: tokens, parents, depths, path; state->n_rows
  double* scores;      // out [max_rows], scores[0] = 0
  StepState* state;
};

// dst[m*ldd + i] = src[(index ? index[m] : m)*dim + i] for i < dim
struct GatherArgs {
  float* dst; int ldd; const float* src; int dim; const int32_t* index; int max_rows; const int32_t* n_rows;
};

struct DraftDims { int heads, kv_heads, head_dim; };  // heads/kv_heads queries share a head of keys, neighbours first

// The drafter's cache of one layer, [slots, kv_heads*head_dim] each; slot s stands for position s.
struct DraftCache { float* k; float* v; };

// tokens = bonus, mask, mask, ...; draft_first and draft_rows of the state: the block's rows but the first.
struct DraftBlockArgs { int32_t* tokens; int block_size, mask_id; StepState* state; };

// From the raw projections of row m at position *first + m: norms and rotates every head of q (in place) and k, the pairs being
// (i, i + head_dim/2), and writes k and v to the cache.
struct DraftPrepareArgs {
  DraftDims dims;
  float* q;                           // [M, heads*head_dim], or null: keys and values alone
  const float* k; const float* v;     // [M, kv_heads*head_dim]
  const float* q_norm_w; const float* k_norm_w; float eps;  // [head_dim]
  const float* cos_sin;               // [positions, head_dim/2, 2]
  DraftCache cache;
  const int32_t* first;               // a field of the state
  int max_rows; const int32_t* n_rows;
};

// o = softmax(q.k / sqrt(head_dim)) . v; every row sees the slots 0 .. kv_len + *n_rows - 1, the whole context and the whole block.
struct DraftAttentionArgs {
  DraftDims dims; const float* q; DraftCache cache;
  float* o;      // out [M, heads*head_dim]
  int max_keys;  // no more are there
  int max_rows; const int32_t* n_rows; const StepState* state;
};

// What the host learns of a round, in one transfer.
struct RoundOut {
  int32_t n_accepted, done, bonus, committed, kv_len, n_rows, error, error_row, error_detail, reserved;
  int32_t tokens[1];  // n_accepted of them; the buffer holds max_rows
};

// Walks the tree, advances state (kv_len, committed, bonus, done, base, n_accepted, rounds), fills out. With state->error set
// it accepts nothing (n_accepted 0, nothing advances) and reports the error.
struct AcceptArgs {
  Rows rows; const int32_t* choice; int eos_id;
  int32_t* accepted;  // out [max_rows]: the accepted rows, ascending
  RoundOut* out; StepState* state;
};

struct KvCommitArgs {  // cache row base + accepted[j] -> base + j, for every layer
  const MlaCache* layers; int n_layers; int rank, rope;  // layers: array in host memory, constant for a session's life
  const int32_t* accepted; const StepState* state;
  Numerics numerics = Numerics::kF32;
};

// dst[(state->committed - state->n_accepted + j + offset)] = src[accepted[j]], rows of `dim` floats: the log of a recorded run.
struct RecordArgs {
  float* dst; const float* src; int dim, offset, dst_rows; const int32_t* accepted; int max_rows; const StepState* state;
};

// Copies the round's tree into a log, after accept: entry state->rounds - 1 of int32 [2 + 3*max_rows]: n_rows, n_accepted, then
// tokens, parents and accepted rows with max_rows places each, the unused ones -1. Entries >= `entries` are dropped.
struct RecordTreeArgs {
  int32_t* dst; int entries, max_rows; Rows rows; const int32_t* accepted; const StepState* state;
};

// What experts are drawn from that a file states (docs/model.md); stated.h has the rule.
struct Stated {
  uint32_t key0, key1;
  uint16_t scale;               // bf16 bits of the least scale, a power of two
  int32_t zero, extreme, loud;  // shares of kStatedLots
};
constexpr int kStatedLots = 1024;

// Of the stated experts first .. first + e - 1 of a tensor the rows row .. row + n - 1 of k weights, into memory of the backend
// laid out as Weight's kInt4.
struct DrawExpertsArgs {
  Stated stated; int first, row, e, n, k;
  uint8_t* q;       // out [e, n, 16*ceil(k/32)], 16-byte aligned
  uint16_t* scale;  // out [e, n, ceil(k/32)]
};

struct MemoryInfo { size_t allocated, peak; };

// Blocks of host memory that were made resident: block i at data + i*pitch bytes.
struct Resident { const void* data; size_t pitch; };

// One device's memory, operations and counters. Not thread-safe; a session owns one.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // "cpu" or "cuda:0"

  // Memory. alloc: 64-byte aligned, between guard zones; filled with NaN patterns when poisoned, zero otherwise.
  virtual void* alloc(size_t bytes, const char* what) = 0;
  // The same for what operations write and the host alone reads, after every round: where download need copy nothing, if there is such memory.
  virtual void* alloc_told(size_t bytes, const char* what) { return alloc(bytes, what); }
  virtual void free(void* p) = 0;
  // Weights: `count` blocks of `bytes` that begin `pitch` bytes apart. The CPU leaves them where they are, a device packs them.
  virtual Resident resident(const void* host, size_t bytes, size_t count, size_t pitch, const char* what) = 0;
  virtual void upload(void* dst, const void* host, size_t bytes) = 0;      // ordered with the operations
  virtual void download(void* host, const void* src, size_t bytes) = 0;    // waits for the operations before it
  virtual void fill_zero(void* dst, size_t bytes) = 0;
  virtual MemoryInfo memory() const = 0;
  virtual std::string broken_guard() = 0;  // name of a buffer whose guard zone was written, or ""

  // Runs body; with graphs on, captures it the first time a key is seen and replays it afterwards.
  virtual void step(const std::string& key, const std::function<void()>& body) = 0;
  virtual void set_graphs(bool on) = 0;  // off: always eager
  virtual void drop_graphs() = 0;

  // Lets a library put work of its own between the operations, on the stream it is given (null for the CPU); in a step too. Whatever that
  // work waits for or not, it begins when all operations before it have ended.
  virtual void outside(const char* counter, const std::function<void(void* stream)>& work) = 0;

  // Kernel launches by name since the last reset (a replay counts what it launches). Every backend has these names and may have
  // more: draw_experts, embed, linear_f32, linear_int4, linear_bf16, mla_prepare, mla_attention, mla_value, router, experts_f32, experts_int4,
  // experts_bf16, experts_int4_bf16 (a moe() call counts one of them by the kernel that ran; linear of INT4 under kBf16 is
  // linear_int4_bf16, the MLA operations under kBf16 are mla_prepare_bf16 and so on), unshard, checksum, select, tree_root,
  // tree_build, accept, kv_commit, record, record_tree; with a drafter gather_rows, draft_block, draft_prepare, draft_attention.
  virtual std::map<std::string, uint64_t> counters() const = 0;
  virtual void reset_counters() = 0;

  virtual size_t linear_scratch(int k, int max_rows) const = 0;
  virtual size_t attention_scratch(const MlaDims&, int max_rows, int max_keys) const = 0;
  virtual size_t moe_scratch(int max_rows, int top_k, int experts, int inner, int dim) const = 0;
  virtual size_t select_scratch(int max_rows, int vocab) const = 0;
  virtual size_t tree_scratch(int vocab, int block_size, int budget) const = 0;

  virtual void draw_experts(const DrawExpertsArgs&) = 0;  // at load time, before any step
  virtual void embed(const EmbedArgs&) = 0;
  virtual void rms_norm(float* out, const float* x, const float* w, float eps, int dim, int max_rows, const int32_t* n_rows) = 0;
  virtual void linear(const LinearArgs&) = 0;
  virtual void mla_prepare(const MlaPrepareArgs&) = 0;
  virtual void mla_attention(const MlaAttentionArgs&) = 0;
  virtual void mla_value(const MlaValueArgs&) = 0;
  // Attention and the values of its result, the same bits as one after the other; o_lat may be left unwritten.
  virtual void mla_output(const MlaAttentionArgs& a, const MlaValueArgs& v) {
    mla_attention(a);
    mla_value(v);
  }
  virtual void router(const RouterArgs&) = 0;
  virtual void moe(const MoeArgs&) = 0;
  // The router's product, its choice and the experts (or their gate and up), which then need not be operations of their own.
  virtual void routed_moe(const LinearArgs& product, const RouterArgs& choice, const MoeArgs& experts) {
    linear(product);
    router(choice);
    moe(experts);
  }
  virtual void unshard(const UnshardArgs&) = 0;
  // Exchanges go through `window` from here on; every rank then has one of as many bytes.
  virtual void open(const Window&) {}
  // Whether unshard can fetch the other ranks' contributions itself (an origin other than kGathered).
  virtual bool gathers(const UnshardArgs&) const { return false; }
  virtual void checksum(const ChecksumArgs&) = 0;
  virtual void select(const SelectArgs&) = 0;
  virtual void tree_root(const Rows&, StepState*) = 0;  // one row: the bonus at kv_len
  virtual void tree_build(const TreeBuildArgs&) = 0;
  virtual void accept(const AcceptArgs&) = 0;
  virtual void kv_commit(const KvCommitArgs&) = 0;
  virtual void record(const RecordArgs&) = 0;
  virtual void record_tree(const RecordTreeArgs&) = 0;
  virtual void gather_rows(const GatherArgs&) = 0;
  virtual void draft_block(const DraftBlockArgs&) = 0;
  virtual void draft_prepare(const DraftPrepareArgs&) = 0;
  virtual void draft_attention(const DraftAttentionArgs&) = 0;
};

// device: cpu, cuda or cuda:N; DeviceError if there is none such in this build or machine.
std::unique_ptr<Backend> make_backend(const std::string& device, bool poison);

// threads 0: as the environment says (cpu/threads.h).
std::unique_ptr<Backend> make_cpu_backend(int threads, bool poison);
#ifdef KDTREE_CUDA
std::unique_ptr<Backend> make_cuda_backend(int device, bool poison);
bool cuda_linked(int device, int other);  // by NVLink: each reads and writes the other's memory, 16 aligned bytes as a whole
#endif

}  // namespace kdtree
