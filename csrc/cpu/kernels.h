// The inner loops of the CPU backend, one table of them per instruction set.
//
// Guarantee: every table gives the same bits. A reduction over K runs in 16 f32 lanes (lane t adds the elements t, t+16, ... in
// ascending order by fused multiply-add, a short tail counting as zeros) followed by the halving tree lane[t] += lane[t+h],
// h = 8, 4, 2, 1. With INT4 weights lane t takes the elements 8t to 8t+7 of every 128: it adds up q*x in ascending order, then
// adds the sum's product with their scale. Every other loop is elementwise in stated operations. So neither the instruction set
// nor the number of rows, nor how rows and outputs are cut into tiles, shows in a result.
#pragma once
#include <cstdint>
#include <string>

namespace kdtree::cpu {

constexpr int kGroup = 32;       // weights that share a scale
constexpr int kGroupBytes = 16;  // two nibbles a byte
constexpr int kUnit = 128;       // weights that an INT4 product takes at a time: 16 words of 8

struct Kernels {
  const char* isa;

  // y[i*ldy + j] = x[i] . w[j] over k elements.
  void (*gemm_f32)(const float* const* x, int m, const float* const* w, int n, int k, float* y, int ldy);

  // As gemm_f32 with both sides bf16.
  void (*gemm_bf16)(const uint16_t* const* x, int m, const uint16_t* const* w, int n, int k, float* y, int ldy);

  // As gemm_f32 with w[j] = q * scale, q the row's nibbles at q + j*16*groups, scale its bf16 at scale + j*groups. x[i] is
  // as pack_int4 leaves it, best at a multiple of 64 bytes.
  void (*gemm_int4)(const float* const* x, int m, const uint8_t* q, const uint16_t* scale, int n, int groups, float* y, int ldy);

  // x[k] padded with zeros to whole units, in each of which out[16j + t] = x[8t + j], as nibble j of word t is laid out.
  void (*pack_int4)(float* out, const float* x, int k);
  void (*pack_int4_bf16)(float* out, const uint16_t* x, int k);

  // y[i] = decay[i] * y[i] + sum over t ascending of coef[i*ldc + t] * row[t], vectors of n; decay null: from zero.
  void (*weighted_sum)(const float* coef, int ldc, int m, const float* const* row, int t, int n, const float* decay, float* y,
                       int ldy);

  void (*weighted_sum_bf16)(const float* coef, int ldc, int m, const uint16_t* const* row, int t, int n, const float* decay, float* y,
                            int ldy);

  float (*sum_squares)(const float* x, int n);
  void (*scale_by)(float* out, const float* x, float factor, const float* w, int n);  // out = (x * factor) * w
  void (*divide)(float* x, float divisor, int n);                                     // x = x / divisor
  void (*silu_mul)(float* out, const float* gate, const float* up, int n);            // out = gate / (1 + exp(-gate)) * up
  void (*to_bf16)(uint16_t* out, const float* x, int n);                              // nearest, ties to even (bf16.h)
  void (*sigmoid)(float* out, const float* x, int n);
  // The greatest of x; *finite is false if any element is NaN or infinite (the result is then meaningless).
  float (*max_value)(const float* x, int n, bool* finite);
  // x = exp(x - shift), returns the sum of the results.
  float (*exp_sum)(float* x, float shift, int n);
};

// The best table for this processor; the environment variable KDTREE_ISA (base, avx2, avx512, neon) asks for another one and
// is a DeviceError if the processor lacks it.
const Kernels& kernels();

// Names that KDTREE_ISA may have here, space separated, worst first.
std::string isa_names();

}  // namespace kdtree::cpu
