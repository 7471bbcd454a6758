// CudaBackend: one CUDA device's memory, step graphs and launch counters. The operations are in the .cu files beside this one,
// one family a file, each over raw pointers.
//
// Everything runs on one private stream in the order of the calls. A step is captured into a graph the first time its key
// is seen and replayed from then on; what a replay launches is counted as if it were launched one by one.
#pragma once
#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "../ops.h"
#include "check.h"
#include "../row_plan.h"

namespace kdtree {

namespace cuda {
struct MlaParts;
struct StreamMoeParams;
struct Tickets;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, bool poison);
  ~CudaBackend() override;
  CudaBackend(const CudaBackend&) = delete;
  CudaBackend& operator=(const CudaBackend&) = delete;

  const char* name() const override { return name_.c_str(); }

  void* alloc(size_t bytes, const char* what) override;
  void* alloc_told(size_t bytes, const char* what) override;
  void free(void* p) override;
  Resident resident(const void* host, size_t bytes, size_t count, size_t pitch, const char* what) override;
  void upload(void* dst, const void* host, size_t bytes) override;
  void download(void* host, const void* src, size_t bytes) override;
  void fill_zero(void* dst, size_t bytes) override;
  MemoryInfo memory() const override { return memory_; }
  std::string broken_guard() override;

  void step(const std::string& key, const std::function<void()>& body) override;
  void set_graphs(bool on) override { graphs_on_ = on; }
  void drop_graphs() override;
  void outside(const char* counter, const std::function<void(void*)>& work) override;

  std::map<std::string, uint64_t> counters() const override { return counters_; }
  void reset_counters() override { counters_.clear(); }

  size_t linear_scratch(int k, int max_rows) const override;
  size_t attention_scratch(const MlaDims& dims, int max_rows, int max_keys) const override;
  size_t moe_scratch(int max_rows, int top_k, int experts, int inner, int dim) const override;
  size_t select_scratch(int max_rows, int vocab) const override;
  size_t tree_scratch(int vocab, int block_size, int budget) const override;

  void draw_experts(const DrawExpertsArgs& a) override;
  void embed(const EmbedArgs& a) override;
  void rms_norm(float* out, const float* x, const float* w, float eps, int dim, int max_rows, const int32_t* n_rows) override;
  void linear(const LinearArgs& a) override;
  void mla_prepare(const MlaPrepareArgs& a) override;
  void mla_attention(const MlaAttentionArgs& a) override;
  void mla_value(const MlaValueArgs& a) override;
  void mla_output(const MlaAttentionArgs& a, const MlaValueArgs& v) override;
  void router(const RouterArgs& a) override;
  void moe(const MoeArgs& a) override;
  void routed_moe(const LinearArgs& product, const RouterArgs& choice, const MoeArgs& experts) override;
  void unshard(const UnshardArgs& a) override;
  void open(const Window& window) override;
  bool gathers(const UnshardArgs& a) const override;
  void checksum(const ChecksumArgs& a) override;
  void select(const SelectArgs& a) override;
  void tree_root(const Rows& rows, StepState* state) override;
  void tree_build(const TreeBuildArgs& a) override;
  void accept(const AcceptArgs& a) override;
  void kv_commit(const KvCommitArgs& a) override;
  void record(const RecordArgs& a) override;
  void record_tree(const RecordTreeArgs& a) override;
  void gather_rows(const GatherArgs& a) override;
  void draft_block(const DraftBlockArgs& a) override;
  void draft_prepare(const DraftPrepareArgs& a) override;
  void draft_attention(const DraftAttentionArgs& a) override;

 private:
  struct Allocation {
    std::string what;
    size_t bytes;
    bool told;  // in the host's memory, where kernels write it
  };
  struct Graph {
    cudaGraphExec_t exec;
    std::map<std::string, uint64_t> launches;
  };

  // Launches a kernel on the private stream, counts it and checks the launch. `counter` is its name in counters(). cluster: blocks that
  // run together and share their memory, a divisor of grid.x.
  template <typename... Parameters, typename... Arguments>
  void launch_clusters(const char* counter, void (*kernel)(Parameters...), int cluster, dim3 grid, int threads, size_t shared_bytes,
                       Arguments&&... arguments) {
    cudaLaunchAttribute attributes[2]{};
    int count = 0;
    if (overlaps_ && after_kernel_) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = static_cast<unsigned>(cluster);
      attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
      ++count;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    config.attrs = attributes;
    config.numAttrs = static_cast<unsigned>(count);
    const cudaError_t code = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
    if (code != cudaSuccess) fail_launch(code, counter, grid, threads, shared_bytes);
    after_kernel_ = true, keys_settled_ = false;
    ++(*counting_)[counter];
  }
  template <typename... Parameters, typename... Arguments>
  void launch(const char* counter, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes,
              Arguments&&... arguments) {
    launch_clusters(counter, kernel, 1, grid, threads, shared_bytes, std::forward<Arguments>(arguments)...);
  }
  [[noreturn]] void fail_launch(cudaError_t code, const char* counter, dim3 grid, int threads, size_t shared_bytes) const;
  // Lets `kernel` be launched with so much dynamic shared memory, also above the 48 KiB that need no asking; throws what the device lacks.
  void reserve_shared(const void* kernel, const char* counter, size_t bytes);
  // Asks for no more than so much of a multiprocessor's memory, in percent, to be shared memory for `kernel`: the rest is its cache.
  void leave_cache(const void* kernel, int percent);
  // Clusters of `cluster` blocks of a kernel that the device runs at a time, at least 1. Reserves the shared memory.
  int resident_clusters(const void* kernel, const char* counter, int cluster, int threads, size_t shared_bytes);

  // The products of bf16 activations on tensor cores (stream_plan.h says for which); false: the generic kernel must.
  bool linear_stream(const LinearArgs& a);
  bool linear_boxes(const LinearArgs& a);  // false where stream::plan_linear_boxes has none
  bool linear_wide(const LinearArgs& a);  // where stream::serves_wide; false where its blocks would not all run at a time
  bool linear_wide_boxes(const LinearArgs& a, const uint16_t* x, int ldx);  // where stream::serves_wide_boxes; false as linear_wide
  bool linear_whole(const LinearArgs& a, const uint16_t* x, int ldx);  // where stream::serves_whole; false where boxes do not
  // x[m] normed, rounded and in the products' order to to[m], [max_rows, stride], zeros from k on; granule: as segments of K are cut.
  void norm_rows(const char* counter, uint16_t* to, int stride, const float* x, int ldx, int k, const float* norm_w, float eps, int granule,
                 int max_rows, const int32_t* n_rows);
  bool moe_streams(const MoeArgs& a) const;
  // chooses: else the choice is left to gate and up.
  bool route_stream(const LinearArgs& a, const RouterArgs& r, const MoeArgs& experts, bool chooses);
  // routed: the launch before is route_stream's, which has left more rows than stream::kOwnNorm normed in scratch.
  // choice: of one row, which that launch has left to gate and up.
  void moe(const MoeArgs& a, bool routed, const RouterArgs* choice);
  bool gate_up_stream(const MoeArgs& a, bool routed, const RouterArgs* choice);
  bool down_stream(const MoeArgs& a, const RouterArgs* choice);
  int choose_boxes(const MoeArgs& a, bool down) const;  // the shape of box_plan.h that serves, or -1
  bool tiles_serve(const MoeArgs& a, bool down) const;  // moe_tiles.cuh does, as tile_plan.h says
  bool tiles_together(const MoeArgs& a) const;               // for both products, one launch behind the other
  cuda::Tickets* unit_tickets(bool down) const;
  void launch_tiles(const char* name, const MoeArgs& a, bool down, bool routed, const cuda::StreamMoeParams& p);
  void launch_boxes(const char* name, const MoeArgs& a, bool down, int variant, bool routed, const cuda::StreamMoeParams& p);
  stream::RowLaunch plan_row(const char* name, const MoeArgs& a, bool down);  // of one row; none where choose_boxes' kernels must
  void launch_row(const char* name, const MoeArgs& a, bool down, const stream::RowLaunch& plan, bool routed, const RouterArgs* choice, const cuda::StreamMoeParams& p);
  bool rows_serve(const MoeArgs& a);  // both products are by launch_row, whether or not they are asked for together
  void put_side_by_side(const UnshardArgs& a, bool ordered);  // ordered: the first part in the order in which int4 is multiplied (nibbles.cuh)

  // MLA in bf16 on tensor cores (mla_plan.h says for which shapes). prepare_on_tensor_cores: false where the generic kernel must.
  bool prepare_on_tensor_cores(const MlaPrepareArgs& a);
  void attention_on_hopper(const MlaAttentionArgs& a);
  size_t hopper_scratch(const MlaDims& d, int max_rows, int max_keys) const;
  bool one_launch(const MlaAttentionArgs& a) const;  // the scratch holds the splits of all rows at once
  // Attention up to its splits, which `then` is to fold before the next rows' overwrite them.
  void launch_hopper(const MlaAttentionArgs& a, const std::function<void(const cuda::MlaParts&)>& then);
  void launch_values(const MlaValueArgs& a, const cuda::MlaParts* parts);  // null: from o_lat
  static bool finds_wgmma();

  void exchange(const UnshardArgs& a, bool ordered);
  void check_exchanges() const;  // RankError if a rank has not come to one

  void enter(const char* call, bool capturable);
  char* take(size_t bytes, const char* what, bool told = false);
  void* filled(char* payload, size_t bytes);  // as alloc gives it
  static void give_back(char* payload, const Allocation& allocation);
  void capture(const std::string& key, const std::function<void()>& body);

  int device_;
  bool poison_;
  std::string name_;
  cudaStream_t stream_ = nullptr;
  bool tensor_ = false;        // kernels of the bf16 precisions on tensor cores are asked for
  bool wgmma_ = false;         // and the device and the code image both know Hopper's matrix instructions
  bool overlaps_ = false;      // the device and the code image both know programmatic dependent launch
  bool after_kernel_ = false;  // the stream's last item is a kernel: only then may the next one overlap it
  bool keys_settled_ = false;  // the last kernel writes neither a step's state nor keys of earlier steps: attention may begin with them
  size_t shared_limit_ = 0;    // dynamic shared memory a block may have, bytes
  std::unordered_map<const void*, size_t> shared_reserved_;
  std::unordered_map<const void*, int> carved_;
  stream::Device device_shape_{};
  std::map<std::pair<const void*, size_t>, int> resident_clusters_;

  std::map<char*, Allocation> allocations_;
  MemoryInfo memory_{0, 0};
  char* staging_ = nullptr;  // pinned, for small downloads
  void* exchange_ = nullptr;      // where wgmma_: stream::wide_exchange bytes, for linear_wide and moe_tiles
  unsigned* arrivals_ = nullptr;  // and stream::wide_counters bytes: each a multiple of eight between launches
  cuda::Tickets* tickets_ = nullptr;  // of the router and of down, where blocks of a launch meet, and of gate and up's and down's units
  unsigned* multiplied_ = nullptr;    // of each distinct expert of a step, the tiles of gate and up that are done
  int32_t* chosen_ = nullptr;         // [stream::moe_rows(false), kMostTopK] a step's choices as the router makes them known before its end

  bool graphs_on_ = true;
  bool capturing_ = false;
  std::unordered_map<std::string, Graph> graphs_;
  std::map<std::string, uint64_t> counters_;
  std::map<std::string, uint64_t>* counting_ = &counters_;

  Window window_{};
  unsigned* missed_ = nullptr;  // pinned, where there is a window: set by a kernel that has waited for another rank in vain
};

}  // namespace kdtree
