// Hopper's warpgroup matrix instructions as far as attention needs them: bf16 operands, f32 accumulators, 128-byte swizzled tiles.
//
// A tile is made of panels: 64 bf16 (128 bytes) a row, rows one after the other, the 16-byte piece c of row r at place c ^ (r % 8).
// sm_90a only; elsewhere the functions do not exist.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace kdtree {
namespace cuda {

constexpr int kPanelBytes = 64 * 128;  // 64 rows

// The lower half of the descriptor of a swizzled tile whose 8-row groups follow each other; `panel_stride` joins panels of an operand that
// is read across its rows (the values: keys are the reduction, latent columns are contiguous). Tiles within it are reached by adding
// bytes / 16. The upper half is the same for all, so the halves are joined only at the instruction: 32-bit additions between products.
__device__ __forceinline__ uint32_t tile_descriptor(uint32_t shared, uint32_t panel_stride) {
  return (shared & 0x3ffff) >> 4 | (panel_stride >> 4) << 16;
}
constexpr uint32_t kSwizzled = 1u << 30, kEightRows = 1024 >> 4;  // of the upper half: 128-byte swizzle; bytes from 8 rows to the next
__device__ __forceinline__ uint64_t whole_descriptor(uint32_t lower, uint32_t upper = kSwizzled | kEightRows) {
  uint64_t whole;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(lower), "r"(upper));
  return whole;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A thread's sums as an instruction's operands: their places in its text, and the registers.
#define KD_PLACES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define KD_PLACES32 KD_PLACES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KD_PLACES64 \
  KD_PLACES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define KD_PLACES128 \
  KD_PLACES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define KD_SUMS4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KD_SUMS16(d, i) KD_SUMS4(d, i), KD_SUMS4(d, i + 4), KD_SUMS4(d, i + 8), KD_SUMS4(d, i + 12)
#define KD_SUMS32(d, i) KD_SUMS16(d, i), KD_SUMS16(d, i + 16)
#define KD_SUMS64(d, i) KD_SUMS32(d, i), KD_SUMS32(d, i + 32)
#define KD_SUMS128(d) KD_SUMS64(d, 0), KD_SUMS64(d, 64)

// d[64, 64] = a[64, 16] b[64, 16]^T (+ d): both operands with the reduction contiguous.
__device__ __forceinline__ void wgmma_scores(float (&d)[32], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      KD_PLACES32
      "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
      : KD_SUMS32(d, 0)
      : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate));
}

// The same for 72 rows of b, the sums of the last eight in `more`.
__device__ __forceinline__ void wgmma_scores(float (&d)[32], float (&more)[4], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %38, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
      KD_PLACES32 ",%32,%33,%34,%35"
      "}, %36, %37, p, 1, 1, 0, 0;\n}\n"
      : KD_SUMS32(d, 0), KD_SUMS4(more, 0)
      : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate));
}

// For 64 and for 32 rows of b, of which a thread has SUMS sums; the strings are the places of the operands behind these.
#define KD_COLUMNS(SUMS, ROWS, A, B, ACCUMULATE, PENDING)                                                                            \
  /* d[64, ROWS] = a[64, 16] b[ROWS, 16]^T (+ d), a in registers: a warp's sixteen rows as mma.sync's fragment, d as its fragments */ \
  /* of eight columns. */                                                                                                            \
  __device__ __forceinline__ void wgmma_columns(float (&d)[SUMS], const uint32_t (&a)[4], uint64_t b, int accumulate) {               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\n"                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" ROWS "k16.f32.bf16.bf16 {" KD_PLACES##SUMS "}, {" A "}, " B                      \
                 ", p, 1, 1, 0;\n}\n"                                                                                                \
                 : KD_SUMS##SUMS(d, 0)                                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                             \
  }                                                                                                                                  \
  /* Waits until at most COUNT groups are in flight; what an ended one wrote to d and read from a may be used from here on. */        \
  template <int COUNT>                                                                                                               \
  __device__ __forceinline__ void wgmma_wait(float (&d)[SUMS], uint32_t (&a)[8]) {                                                    \
    asm volatile("wgmma.wait_group.sync.aligned " PENDING ";"                                                                        \
                 : KD_SUMS##SUMS(d, 0), KD_READ4(a, 0), KD_READ4(a, 4)                                                               \
                 : "n"(COUNT)                                                                                                        \
                 : "memory");                                                                                                        \
  }
#define KD_READ4(a, i) "+r"(a[i]), "+r"(a[i + 1]), "+r"(a[i + 2]), "+r"(a[i + 3])
KD_COLUMNS(32, "64", "%32,%33,%34,%35", "%36", "%37", "%40")
KD_COLUMNS(16, "32", "%16,%17,%18,%19", "%20", "%21", "%24")
#undef KD_COLUMNS
#undef KD_READ4

// d[64, 256] = a[64, 16] b[16, 256] (+ d): b with its columns contiguous; a in registers or in shared memory. Products
// with a in registers hold up the warp while they read it. Without kEightRows in `upper`, b's second eight rows are its first ones again.
__device__ __forceinline__ void wgmma_values(float (&d)[128], const uint32_t (&a)[4], uint32_t b, int accumulate,
                                             uint32_t upper = kSwizzled | kEightRows) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      KD_PLACES128
      "}, {%128,%129,%130,%131}, %132, p, 1, 1, 1;\n}\n"
      : KD_SUMS128(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b, upper)), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_values(float (&d)[128], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      KD_PLACES128
      "}, %128, %129, p, 1, 1, 0, 1;\n}\n"
      : KD_SUMS128(d)
      : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate));
}

// The same for 128 columns.
__device__ __forceinline__ void wgmma_values(float (&d)[64], const uint32_t (&a)[4], uint32_t b, int accumulate,
                                             uint32_t upper = kSwizzled | kEightRows) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      KD_PLACES64
      "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}\n"
      : KD_SUMS64(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b, upper)), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_values(float (&d)[64], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      KD_PLACES64
      "}, %64, %65, p, 1, 1, 0, 1;\n}\n"
      : KD_SUMS64(d, 0)
      : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(accumulate));
}

#undef KD_PLACES16
#undef KD_PLACES32
#undef KD_PLACES64
#undef KD_PLACES128
#undef KD_SUMS4
#undef KD_SUMS16
#undef KD_SUMS32
#undef KD_SUMS64
#undef KD_SUMS128

}  // namespace cuda
}  // namespace kdtree

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
