// The CPU backend: memory between guard zones, counters, threads, kernels. One source file per operation family.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "../ops.h"
#include "kernels.h"
#include "threads.h"

namespace kdtree::cpu {

class CpuBackend final : public Backend {
 public:
  CpuBackend(int threads, bool poison);
  ~CpuBackend() override;

  const char* name() const override { return "cpu"; }
  void* alloc(size_t bytes, const char* what) override;
  void free(void* p) override;
  Resident resident(const void* host, size_t, size_t, size_t pitch, const char*) override { return {host, pitch}; }
  void upload(void* dst, const void* host, size_t bytes) override;
  void download(void* host, const void* src, size_t bytes) override;
  void fill_zero(void* dst, size_t bytes) override;
  MemoryInfo memory() const override { return memory_; }
  std::string broken_guard() override;

  void step(const std::string&, const std::function<void()>& body) override { body(); }
  void set_graphs(bool) override {}
  void drop_graphs() override {}
  void outside(const char* counter, const std::function<void(void*)>& work) override {
    work(nullptr);
    ++counters_[counter];
  }
  std::map<std::string, uint64_t> counters() const override { return counters_; }
  void reset_counters() override { counters_.clear(); }

  size_t linear_scratch(int k, int max_rows) const override;
  size_t attention_scratch(const MlaDims&, int max_rows, int max_keys) const override;
  size_t moe_scratch(int max_rows, int top_k, int experts, int inner, int dim) const override;
  size_t select_scratch(int max_rows, int vocab) const override;
  size_t tree_scratch(int vocab, int block_size, int budget) const override;

  void draw_experts(const DrawExpertsArgs&) override;
  void embed(const EmbedArgs&) override;
  void rms_norm(float* out, const float* x, const float* w, float eps, int dim, int max_rows, const int32_t* n_rows) override;
  void linear(const LinearArgs&) override;
  void mla_prepare(const MlaPrepareArgs&) override;
  void mla_attention(const MlaAttentionArgs&) override;
  void mla_value(const MlaValueArgs&) override;
  void router(const RouterArgs&) override;
  void moe(const MoeArgs&) override;
  void unshard(const UnshardArgs&) override;
  void checksum(const ChecksumArgs&) override;
  void select(const SelectArgs&) override;
  void tree_root(const Rows&, StepState*) override;
  void tree_build(const TreeBuildArgs&) override;
  void accept(const AcceptArgs&) override;
  void kv_commit(const KvCommitArgs&) override;
  void record(const RecordArgs&) override;
  void record_tree(const RecordTreeArgs&) override;
  void gather_rows(const GatherArgs&) override;
  void draft_block(const DraftBlockArgs&) override;
  void draft_prepare(const DraftPrepareArgs&) override;
  void draft_attention(const DraftAttentionArgs&) override;

 private:
  struct Block {
    std::string what;
    void* raw;
    size_t bytes;
  };
  void count(const char* kernel) {
    ++counters_[kernel];
    ++counters_[isa_];
  }
  template <class T> void prepare(const MlaPrepareArgs&);
  template <class T> void attend(const MlaAttentionArgs&);
  template <class T> void values(const MlaValueArgs&);
  float norm_factor(const float* x, float eps, int dim) const;  // 1/rms
  void norm_row(float* out, const float* x, const float* w, float eps, int dim) const;
  void moe_gate_up(const MoeArgs& a);
  void moe_down(const MoeArgs& a);

  const Kernels& k_;
  const std::string isa_;  // "isa_" and the name of the kernel table: the counter of all launches, which says what ran
  Threads threads_;
  const bool poison_;
  std::map<void*, Block> blocks_;
  MemoryInfo memory_{0, 0};
  std::map<std::string, uint64_t> counters_;
  std::vector<float> floats_;          // the router's scores of one row
  std::vector<unsigned char> flags_;  // and which experts are out or taken
};

// Sets the first fault of a step.
void raise_fault(StepState* state, Fault fault, int row, int detail);

inline int active_rows(const int32_t* n_rows, int max_rows) { return *n_rows < max_rows ? *n_rows : max_rows; }

}  // namespace kdtree::cpu
