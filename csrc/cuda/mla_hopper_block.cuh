// What a block of Hopper's MLA attention consists of: units of work, shared memory, barriers, and the instructions that neither copying
// nor computing has alone. mla_hopper.cuh says how the whole works.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include "barrier.cuh"
#include "mla_fold.cuh"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace kdtree {
namespace cuda {

constexpr int kHopperRank = kPartRank, kHopperRope = 64, kHopperHeads = kPartHeads;
constexpr int kHopperThreads = 384;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kPanels = (kHopperRank + kHopperRope) / 64;
constexpr int kHalfPanels = kHopperRank / 64 / 2;  // of a half of the latent columns
constexpr int kTileBytes = kPanels * kKeyChunk * 128;
constexpr int kLastPanelBytes = (kKeyChunk + kMoreKeys) * 128, kLastTileBytes = kPanels * kLastPanelBytes;  // of a split's last chunk
constexpr int kRopePanel = kPanels - 1;
constexpr int kGatherers = 64;  // threads
constexpr int kFewSlots = 8, kMoreSlots = 24;  // of smaller boxes: any multiple of 8 below 64 is three of them at most

struct HopperParams {
  CUtensorMap q_lat, q_rope;    // [M, heads, 512], [M, heads, 64]: boxes of a row, 64 heads, 64 columns
  CUtensorMap latents, k_ropes;  // what the next two point to: boxes of 64 slots, 64 columns
  CUtensorMap some_latents[2], some_k_ropes[2];  // the same in boxes of kFewSlots and kMoreSlots
  const __nv_bfloat16* latent;  // [slots, 512]
  const __nv_bfloat16* k_rope;  // [slots, 64]
  MlaParts parts;               // out
  const int32_t* path;
  int path_stride;
  float scale_log2;  // softmax scale * log2(e)
  float slack;       // of a raw score above what weights are relative to, before that moves
  int heads, splits;
  int multiprocessors;
  bool early;  // the kernel ahead writes neither the step's state nor keys below kv_len
};

// Chunks first .. first + steps - 1 of a row, for 64 of its heads and, where blocks share it, a part of the columns.
struct HopperUnit {
  int keys, first;  // of the row; chunk
  uint16_t row, first_head, steps;
  uint8_t split, part;
};

struct HopperShared {
  unsigned char q[kTileBytes];
  unsigned char keys[kTileBytes + kLastTileBytes];  // both buffers: chunk c of a split is in the second where its last chunk is c + 2 i
  HopperUnit units[kMostUnits];  // of this block
  int count, parts, kv_len;      // how many; blocks that share each
  float top[2][kHopperHeads];  // what weights are relative to after the last even and the last odd chunk
  unsigned long long q_full[kPanels], q_empty;
  unsigned long long full[2][2];        // [buffer][half of the latent columns], with the second half to be copied the rope
  unsigned long long more;              // keys 64 .. 71 of a chunk are there
  unsigned long long empty[2][2];       // [buffer][warpgroup]
  unsigned long long scored[2];         // [buffer]: where blocks share a unit, the columns of the other block are free
  unsigned long long gather[2][2];      // [buffer][half of the latent columns]: free, and to be filled by the gatherers
};
static_assert(sizeof(HopperShared) <= 227 * 1024, "what a block of Hopper may have");

__device__ __forceinline__ constexpr int panel_bytes(int buffer) { return buffer == 0 ? kKeyChunk * 128 : kLastPanelBytes; }
// A chunk, from which on the row has so many keys, has more than the others.
__device__ __forceinline__ bool holds_more(int valid) { return valid > kKeyChunk && valid <= kKeyChunk + kMoreKeys; }
// Where a chunk of a split of so many lies: the last one, which may have more keys, in the second buffer.
__device__ __forceinline__ int buffer_of(int step, int steps) { return (step + steps) & 1; }

// Blocks that share a unit.
__device__ __forceinline__ int parts_of(const HopperParams& p, int n_rows, int kv_len) {
  const int rows = min(n_rows - p.parts.first_row, p.parts.rows);
  const int units = splits_of(kv_len + 1) * rows * p.parts.head_blocks, parts = column_parts(units, kv_len + 1, p.multiprocessors);
  return units * parts <= static_cast<int>(gridDim.x) ? parts : 1;
}

// Where number t of this block's units lies. Known before the state is.
struct UnitPlace {
  int part, split, row, first_head;
};
__device__ __forceinline__ UnitPlace place_of(const HopperParams& p, int t, int parts) {
  const int row_blocks = p.parts.rows * p.parts.head_blocks, index = static_cast<int>(blockIdx.x) + t * static_cast<int>(gridDim.x);
  const int unit = index / parts, split = unit / row_blocks, row_block = unit - split * row_blocks, row = row_block / p.parts.head_blocks;
  return {index % parts, split, p.parts.first_row + row, (row_block - row * p.parts.head_blocks) * kHopperHeads};
}
// The unit there; without steps where a row has no such split. depth: of its row.
__device__ __forceinline__ HopperUnit unit_at(const UnitPlace& at, int n_rows, int kv_len, int depth) {
  const int keys = kv_len + depth + 1, chunks = chunks_of(keys), splits = splits_of(keys), first = split_begin(at.split, splits, chunks);
  const int steps = at.split < splits && at.row < n_rows ? split_begin(at.split + 1, splits, chunks) - first : 0;
  return {keys,
          first,
          static_cast<uint16_t>(at.row),
          static_cast<uint16_t>(at.first_head),
          static_cast<uint16_t>(steps),
          static_cast<uint8_t>(at.split),
          static_cast<uint8_t>(at.part)};
}
// How many there are, those without steps included.
__device__ __forceinline__ int count_units(const HopperParams& p, int parts) {
  const int all = p.splits * p.parts.rows * p.parts.head_blocks * parts, blocks = gridDim.x;
  return (all - static_cast<int>(blockIdx.x) + blocks - 1) / blocks;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Barriers where they stand in HopperShared.
__device__ __forceinline__ void barrier_init(unsigned long long* b, int arrivals) { barrier_init(shared_address(b), arrivals); }
__device__ __forceinline__ void barrier_arrive(unsigned long long* b) { barrier_arrive(shared_address(b)); }
__device__ __forceinline__ void barrier_expect(unsigned long long* b, int bytes) { barrier_expect(shared_address(b), bytes); }
__device__ __forceinline__ void barrier_wait(unsigned long long* b, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra wait;\ndone:\n}\n" ::"r"(
          shared_address(b)),
      "r"(parity)
      : "memory");
}
template <int ID, int THREADS>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
template <int ID, int THREADS>
__device__ __forceinline__ void signal() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
// Makes this thread's ordinary writes to shared memory seen by the tensor cores of whoever is told of them afterwards.
__device__ __forceinline__ void fence_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

constexpr int kMeetEven = 1, kMeetOdd = 2, kEvenReady = 3, kOddReady = 4, kGathered = 5, kPlanned = 6, kPlannedGather = 7,
              kInitialized = 8;

// So many bytes of the bulk copy engine are still to come before the barrier's phase ends; who else is waited for arrives later.
__device__ __forceinline__ void barrier_expect_too(unsigned long long* b, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
// A panel by the bulk copy engine.
__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, unsigned long long* full, int column, int slot) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(&map), "r"(shared_address(full)), "r"(column), "r"(slot)
               : "memory");
}
__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, unsigned long long* full, int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(shared_address(full)), "r"(column), "r"(head), "r"(row)
      : "memory");
}
// The tile of a buffer.
__device__ __forceinline__ uint32_t tile_of(const HopperShared& s, int buffer) { return shared_address(s.keys) + buffer * kTileBytes; }
__device__ __forceinline__ void fetch_map(const CUtensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Four 8 x 8 matrices of a warp into shared memory, as products hold them; `row` is that of this lane: row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Two of them.
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t& a, uint32_t& b, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(row) : "memory");
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace cuda
}  // namespace kdtree
