// Nibbles as bf16 numbers, and the order of activations in which a word's nibbles meet them.
//
// A nibble n becomes q = n - 8, or q/4, which takes fewer instructions: exactly either way. Whoever has added up a segment of q/4 multiplies its sums
// by 4.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace kdtree {
namespace cuda {

// Nibbles e and e+4 of a word (shifted down by 4e) as two bf16 numbers q = nibble - 8, exactly: 0x4300 + nibble is 128 + nibble in bf16.
__device__ __forceinline__ uint32_t nibble_pair(uint32_t word) {
  uint32_t v;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(v) : "r"(word));
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x3f803f80u), "r"(0xc308c308u));
  return v;
}

// The nibbles of a word's bytes 0 and 2, low or high, as two bf16 numbers q/4: exactly, since bf16's smallest numbers need no exponent to be set. The low
// nibble is (128 + n)/4 - 34; the high one's bits are the number n * 2^-129, which is multiplied by 2^127.
__device__ __forceinline__ uint32_t low_pair(uint32_t word) {
  uint32_t v;
  asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(v) : "r"(word));
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x3e803e80u), "r"(0xc208c208u));
  return v;
}
__device__ __forceinline__ uint32_t high_pair(uint32_t word) {
  uint32_t v = word & 0x00f000f0u;
  asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x7f007f00u), "r"(0xc000c000u));
  return v;
}

// A lane's words of two rows of a group of 32 as the register operands of its two products, as q/4: of a product rows alternate.
__device__ __forceinline__ void quarter_fragments(uint32_t* first, uint32_t* later, uint32_t low, uint32_t high) {
  first[0] = low_pair(low), first[1] = low_pair(high), first[2] = high_pair(low), first[3] = high_pair(high);
  later[0] = low_pair(low >> 8), later[1] = low_pair(high >> 8), later[2] = high_pair(low >> 8), later[3] = high_pair(high >> 8);
}

// Eight consecutive bf16 numbers in the order in which a lane multiplies them: (0,4) (1,5) (2,6) (3,7), the nibbles' own order.
__device__ __forceinline__ uint4 in_order(const uint4& v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

// Where in_order puts element i of a row.
__device__ __forceinline__ int ordered_place(int i) { return i - i % 8 + (i % 8 < 4 ? i % 8 * 2 : i % 8 * 2 - 7); }

}  // namespace cuda
}  // namespace kdtree
