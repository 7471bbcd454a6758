// INT4 weights in boxes of 64 rows times 64 rows of activations by warpgroups: what linear_wide_boxes.cu and linear_whole.cu share.
//
// Two warpgroups multiply, with two groups' sums in flight until a unit's end. Each has a ring for boxes of 64 weight rows x 128 bytes, two units of K,
// with their scales; a segment that begins or ends between two boxes leaves half of one unread. A third warpgroup puts activations in the nibbles'
// order where they stand, a chunk after the other, so that products begin with the first. Of a fourth two warps ask for a ring's boxes and one for
// activations: the copy engine takes them one after the other, and whoever asks waits.
// Reduction order: stream.cuh; sums are a fourth, exactly, until a segment's end (nibbles.cuh).
#pragma once
#include "box_copy.cuh"
#include "nibbles.cuh"
#include "stream_wide.cuh"

namespace kdtree {
namespace cuda {

using stream::kWideBoxGroups;
using stream::kWideChunk;
using stream::kWideScaleSlot;
using stream::kWideTile;
using stream::kWideWeightSlot;

constexpr int kWideBoxThreads = (kWideBoxGroups + 2) * 4 * kWarp;

constexpr int kEightBytes = 1024;  // of eight rows of activations, of 64 elements of K

struct WideBoxParams : WideParams {
  CUtensorMap x;                   // bf16 [max_rows, k], in boxes of kBox x copied
  uint32_t upper = kEightBytes >> 4;  // half of a descriptor of activations: a constant would be formed again for each product
  CUtensorMap weights[2], scales[2];  // boxes of kWideTile rows x 128 bytes, and of their scales
};

// All but a launch's rows; tiles are kWideTile rows of one weight. False where scales cannot be copied.
inline bool set_wide_boxes(WideBoxParams& p, const LinearArgs& a) {
  set_wide(p, a);
  p.tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const Weight& w = a.w[i < a.parts ? i : 0];
    if (reinterpret_cast<uintptr_t>(w.scale) % 16 != 0) return false;
    const uint64_t pitch = static_cast<uint64_t>(p.k) / 2;
    p.weights[i] = row_map(w.data, w.data, pitch, w.n, 128, kWideTile, true);
    p.scales[i] = row_map(w.scale, w.scale, pitch / 8, w.n, 16, kWideTile, false);
    p.tiles += (p.n[i] + kWideTile - 1) / kWideTile;
  }
  return true;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Activations: boxes of 64 of K, in a box eight rows of 128 bytes after the other. Put in order, eight rows are for each 32 of K two steps of sixteen, of
// each two 8 x 16-byte matrices.
constexpr int kHalfBytes = 512, kStepOfHalf = 256;
static_assert(kWideChunk == 2 * kBox && kWideChunk == kUnitK<WeightKind::kInt4>, "a chunk is a unit's activations, two boxes");
template <int COLUMNS>
constexpr int kOrderedBox = kBox * COLUMNS * 2;  // bytes
template <int COLUMNS>
constexpr int kOrderedChunk = 2 * kOrderedBox<COLUMNS>;

// The lower half of a descriptor of activations; places behind it are reached by adding bytes / 16. The upper half is the same for all: WideBoxParams::upper.
__device__ __forceinline__ uint32_t lower_descriptor(uint32_t at) { return (at & 0x3ffff) >> 4 | (kMatrixBytes >> 4) << 16; }
__device__ __forceinline__ uint64_t joined_descriptor(uint32_t lower, uint32_t upper) {
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(lower), "r"(upper));
  return whole;
}

// The products of one group of 32, whose activations' descriptor is b and `upper`: two steps, started from zero.
template <int SUMS>
__device__ __forceinline__ void start_boxed(float (&d)[SUMS], const uint32_t (&a)[8], uint32_t b, uint32_t upper) {
  const uint32_t first[4] = {a[0], a[1], a[2], a[3]}, second[4] = {a[4], a[5], a[6], a[7]};
  wgmma_fence();
  wgmma_columns(d, first, joined_descriptor(b, upper), false);
  wgmma_columns(d, second, joined_descriptor(b + (kStepOfHalf >> 4), upper), true);
  wgmma_commit();
}

// Adds a group's sums times its scales: of a pair of groups, of the lane's row and the one eight below, the one or the `odd` one.
template <int SUMS>
__device__ __forceinline__ void add_scaled(float (&acc)[SUMS], const float (&sum)[SUMS], uint32_t pair, uint32_t below, bool odd) {
  const float s[2] = {__uint_as_float(odd ? pair & 0xffff0000u : pair << 16), __uint_as_float(odd ? below & 0xffff0000u : below << 16)};
#pragma unroll
  for (int e = 0; e < SUMS; ++e) acc[e] = __fmaf_rn(sum[e], s[e / 2 % 2], acc[e]);
}

__device__ __forceinline__ void store_matrices(uint32_t at, const uint4& v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// A WARPS-th, by warp `which`, of a chunk that has come at `at`, put in order there; `done` counts warps. A quarter of a warp reads two rows that are four
// apart, which the swizzle brings into all banks.
template <int COLUMNS, int WARPS>
__device__ __forceinline__ void order_chunk(uint32_t at, int which, int lane, bool ordered, uint32_t done) {
  constexpr int EIGHTS = kOrderedChunk<COLUMNS> / kEightBytes, EACH = EIGHTS % WARPS == 0 ? EIGHTS / WARPS : 1;
  const int row = lane / 4 % 2 * 4 + lane / 8, to = lane / 8 * kMatrixBytes + (lane % 2 * 4 + lane % 8 / 2) * 16;
#pragma unroll 1
  for (int first = which; first < EIGHTS; first += WARPS * EACH) {
    uint4 v[EACH][2];
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
      for (int i = 0; i < 2; ++i) v[e][i] = load_shared16(at + (first + e * WARPS) * kEightBytes + row * 128 + (((i * 4 + lane % 4) ^ row) & 7) * 16);
    __syncwarp();
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
      for (int i = 0; i < 2; ++i) store_matrices(at + (first + e * WARPS) * kEightBytes + i * kHalfBytes + to, ordered ? v[e][i] : in_order(v[e][i]));
  }
  fence_to_tensor_cores();
  __syncwarp();
  if (elected()) barrier_arrive(done);
}

// A warpgroup gives registers back, or takes of those that others gave.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
constexpr int kMultiplyRegisters = 176, kOrderRegisters = 96, kCopyRegisters = 40;  // of a thread; all have as many at first
static_assert(kWideBoxGroups * kMultiplyRegisters + kOrderRegisters + kCopyRegisters <= 512, "registers of a multiprocessor");

// As barrier_wait, asking rarely: for a wait as long as a tile beside warps that have work.
__device__ __forceinline__ void barrier_idle(uint32_t at, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n@!done bra again;\n}\n" ::"r"(at), "r"(parity)
      : "memory");
}

// Where the warps that ask for boxes wait until the one that asks for activations has done so: their queue is one.
__device__ __forceinline__ void meet_copying() { asm volatile("bar.sync 2, %0;" ::"n"((kWideBoxGroups + 1) * kWarp) : "memory"); }
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A tile's sixteen rows that are warp `quarter`'s of a warpgroup.
__device__ __forceinline__ Sixteen sixteen_of_box(const WideParams& p, int tile, int quarter) {
  const int first = (p.n[0] + kWideTile - 1) / kWideTile, part = tile >= first, at = (part ? tile - first : tile) * (kWideTile / kTileRows) + quarter;
  return Sixteen{part, at, at * kTileRows < p.n[part]};
}

// A multiplying warpgroup's ring: shared addresses of its slots and of their barriers, those that count a box's bytes and those that count warps that
// have read it.
struct WideRing {
  uint32_t weights, scales, landed, freed;
  int depth;
};
// Ring `group` of those that begin at `rings`: all slots of weights, then all of scales. Its barriers: the ring's own.
__device__ __forceinline__ WideRing ring_at(uint32_t rings, int group, int depth, const uint64_t* landed, const uint64_t* freed) {
  const uint32_t weights = rings + group * depth * kWideWeightSlot, scales = rings + (kWideBoxGroups * kWideWeightSlot + group * kWideScaleSlot) * depth;
  return WideRing{weights, scales, shared_address(landed), shared_address(freed), depth};
}
// MOST: slots that a ring of the kernel may have; a loop over those that it has takes longer than what is left of the launch before.
template <int MOST>
__device__ __forceinline__ void init_ring(const WideRing& ring) {
#pragma unroll
  for (int i = 0; i < MOST; ++i) barrier_init(ring.landed + i * 8, 1), barrier_init(ring.freed + i * 8, 4);
}
// One thread that asks for a ring's boxes, one after the other. Its slot steps: a division would take instructions from the warps that multiply beside it.
struct WideAsker {
  WideRing ring;
  int slot = 0;
  uint32_t parity = 1;  // of a phase before the first, which has ended: the places are free

  __device__ __forceinline__ explicit WideAsker(const WideRing& of) : ring(of) {}
  // Box `box` of a tile.
  __device__ __forceinline__ void ask(const WideBoxParams& p, int tile, int box) {
    const Sixteen of = sixteen_of_box(p, tile, 0);
    const uint32_t landed = ring.landed + slot * 8;
    barrier_wait(ring.freed + slot * 8, parity);
    barrier_expect(landed, kWideWeightSlot + kWideScaleSlot);
    copy_box_once(ring.weights + slot * kWideWeightSlot, p.weights + of.part, box * 128, of.at * kTileRows, landed);
    copy_box_once(ring.scales + slot * kWideScaleSlot, p.scales + of.part, box * 16, of.at * kTileRows, landed);
    if (++slot == ring.depth) slot = 0, parity ^= 1;
  }
};

// The same value in a register that is kept: the machine code would find a shared address again, in five instructions, wherever it is used.
__device__ __forceinline__ uint32_t kept(uint32_t v) { return __shfl_sync(kAll, v, 0); }

// What is needed behind a wait is found before it: the machine code would leave it until then.
__device__ __forceinline__ void found_here(uint32_t& v) { asm volatile("" : "+r"(v)); }
template <typename T>
__device__ __forceinline__ void found_here(T*& at) {
  asm volatile("" : "+l"(at));
}

// A warp's place in its warpgroup's ring, and what a lane has of one unit there. What it keeps of the ring is found once, in place of for each unit.
struct WideReader {
  uint32_t at, scales, landed;  // of the unit that is read next: the lane's places and its box's barrier
  uint32_t end;                 // of the ring's weights
  uint32_t weights_back, scales_back, landed_back, freed;  // from a ring's end to its beginning; from a slot's barrier that counts bytes to the other
  uint32_t parity = 0;
  uint32_t words[8];
  uint2 scale, below;

  __device__ __forceinline__ WideReader(const WideRing& ring, int quarter, int lane) {
    const int row = quarter * kTileRows + (lane & 15), piece = lane >> 4;  // the lane's row address of ldmatrix, groups 0 and 1; ^ 32 for groups 2 and 3
    at = ring.weights + row * 128 + (piece ^ (row & 7)) * 16, scales = ring.scales + (quarter * kTileRows + lane / 4) * 16;
    landed = ring.landed, freed = ring.freed - ring.landed, end = ring.weights + ring.depth * kWideWeightSlot;
    weights_back = ring.depth * kWideWeightSlot, scales_back = ring.depth * kWideScaleSlot, landed_back = ring.depth * 8;
    found_here(at), found_here(scales), found_here(landed), found_here(freed), found_here(end);
    found_here(weights_back), found_here(scales_back), found_here(landed_back);
  }
  // To a box's second unit, or back to its first.
  __device__ __forceinline__ void turn() { at ^= 64, scales ^= 8; }
  __device__ __forceinline__ void await_box() const { barrier_wait(landed, parity); }
  __device__ __forceinline__ void read_words() {
    uint32_t half[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(half, at ^ (i * 32));
#pragma unroll
      for (int e = 0; e < 4; ++e) words[4 * i + e] = half[e];
    }
  }
  // Of the unit whose words have been read, each row's four groups.
  __device__ __forceinline__ void read_scales() { scale = load_shared8(scales), below = load_shared8(scales + 8 * 16); }
  // Gives the box's place away and goes to the next one's first unit. What was read of it has been used by then: the machine code does not wait for loads
  // before it tells the barrier.
  __device__ __forceinline__ void leave() {
    __syncwarp();
    if (elected()) barrier_arrive(landed + freed);
    at += kWideWeightSlot, scales += kWideScaleSlot, landed += 8;
    if (at >= end) parity ^= 1, at -= weights_back, scales -= scales_back, landed -= landed_back;
  }
};

// What has been added so far is added before what follows, as far as the compiler orders it.
template <int SUMS>
__device__ __forceinline__ void hold_here(float (&v)[SUMS]) {
#pragma unroll
  for (int e = 0; e < SUMS; e += 8)
    asm volatile("" : "+f"(v[e]), "+f"(v[e + 1]), "+f"(v[e + 2]), "+f"(v[e + 3]), "+f"(v[e + 4]), "+f"(v[e + 5]), "+f"(v[e + 6]), "+f"(v[e + 7]));
}

// A segment of a tile, `steps` units from unit `unit` on, whose activations' descriptor is b and `upper`; await(step): those of a unit are in order.
// meanwhile(part): of four, what is to be done beside the first unit's products; the segment's sums take the place of what `whole` held only behind that.
template <int SUMS, typename Await, typename Meanwhile>
__device__ __forceinline__ void multiply_segment(float (&whole)[SUMS], WideReader& from, uint32_t b, uint32_t upper, int unit, int steps, const Await& await,
                                                 const Meanwhile& meanwhile) {
  constexpr int COLUMNS = 2 * SUMS;
  float acc[SUMS];
#pragma unroll
  for (int e = 0; e < SUMS; ++e) acc[e] = 0.f;
  if (steps == 0) {
#pragma unroll
    for (int part = 0; part < 4; ++part) meanwhile(part);
#pragma unroll
    for (int e = 0; e < SUMS; ++e) whole[e] = 0.f;
    return;
  }
  int half = unit % 2;  // of the box, that is read
  if (half != 0) from.turn();
  from.await_box();
  from.read_words();
  await(0);
  float sum[2][SUMS];
  uint32_t a[2][8];
#pragma unroll 1
  for (int step = 0; step < steps; b += kOrderedChunk<COLUMNS> >> 4) {
    from.read_scales();
    quarter_fragments(a[0], a[0] + 4, from.words[0], from.words[1]);
    start_boxed(sum[0], a[0], b, upper);
    quarter_fragments(a[1], a[1] + 4, from.words[2], from.words[3]);
    start_boxed(sum[1], a[1], b + (kHalfBytes >> 4), upper);
    if (step == 0) meanwhile(0), meanwhile(1);
    wgmma_wait<1>(sum[0], a[0]);
    add_scaled(acc, sum[0], from.scale.x, from.below.x, false);
    quarter_fragments(a[0], a[0] + 4, from.words[4], from.words[5]);
    start_boxed(sum[0], a[0], b + (kOrderedBox<COLUMNS> >> 4), upper);
    if (step == 0) meanwhile(2), meanwhile(3);
    wgmma_wait<1>(sum[1], a[1]);
    add_scaled(acc, sum[1], from.scale.x, from.below.x, true);
    quarter_fragments(a[1], a[1] + 4, from.words[6], from.words[7]);
    start_boxed(sum[1], a[1], b + ((kOrderedBox<COLUMNS> + kHalfBytes) >> 4), upper);
    ++step;
    const bool more = step < steps, leaves = half != 0 || !more;
    if (half != 0 || more) from.turn();
    half = leaves ? 0 : 1;
    if (leaves) from.leave();
    if (more) {
      if (leaves) from.await_box();
      from.read_words();
    }
    wgmma_wait<1>(sum[0], a[0]);
    add_scaled(acc, sum[0], from.scale.y, from.below.y, false);
    // The branch stands between two waits that the machine code would otherwise put together: nothing would be multiplied while these sums are scaled.
    hold_here(acc);
    if (more) await(step);
    wgmma_wait<0>(sum[1], a[1]);
    add_scaled(acc, sum[1], from.scale.y, from.below.y, true);
  }
#pragma unroll
  for (int e = 0; e < SUMS; ++e) whole[e] = __fmul_rn(acc[e], 4.f);
}

#endif

}  // namespace cuda
}  // namespace kdtree
