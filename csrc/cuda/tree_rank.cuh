// Ranking the tokens of each draft depth: log-sum-exp to docs/model.md's last bit, and the exact K best in order.
#pragma once
#include "tree.cuh"

namespace kdtree {
namespace cuda {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == kTreeThreads, "a thread a digit");
constexpr int kTreeWarps = kTreeThreads / kWarp;

__device__ inline float exp32(float x) {
  if (x < -87.0f) return 0.0f;
  const float n = rintf(__fmul_rn(x, 1.44269504f));
  float r = __fsub_rn(x, __fmul_rn(n, 0.693359375f));
  r = __fsub_rn(r, __fmul_rn(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
  float y = __fmul_rn(p, __fmul_rn(r, r));
  y = __fadd_rn(y, r);
  y = __fadd_rn(y, 1.0f);
  return __fmul_rn(y, __uint_as_float(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23));
}

__device__ inline float log32(float s) {
  // s >= 1, so it is a normal number: its exponent field gives frexp's e, and the field of [1/2, 1) its f.
  const uint32_t bits = __float_as_uint(s);
  int e = static_cast<int>(bits >> 23) - 126;
  float f = __uint_as_float((bits & 0x007fffffu) | 0x3f000000u);
  if (f < 0.707106781186547524f) {
    e -= 1;
    f = __fadd_rn(f, f);
  }
  const float z = __fsub_rn(f, 1.0f), n = static_cast<float>(e);
  float p = 7.0376836292e-2f;
  p = __fadd_rn(__fmul_rn(p, z), -1.1514610310e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 1.1676998740e-1f);
  p = __fadd_rn(__fmul_rn(p, z), -1.2420140846e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 1.4249322787e-1f);
  p = __fadd_rn(__fmul_rn(p, z), -1.6668057665e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 2.0000714765e-1f);
  p = __fadd_rn(__fmul_rn(p, z), -2.4999993993e-1f);
  p = __fadd_rn(__fmul_rn(p, z), 3.3333331174e-1f);
  const float q = __fmul_rn(z, z);
  float y = __fmul_rn(z, q);
  y = __fmul_rn(y, p);
  y = __fadd_rn(y, __fmul_rn(n, -2.12194440e-4f));
  y = __fsub_rn(y, __fmul_rn(0.5f, q));
  return __fadd_rn(__fadd_rn(z, y), __fmul_rn(n, 0.693359375f));
}

// log-sum-exp of a row from its segments' greatest logits and sums.
__device__ inline float row_lse(const float* tops, const float* sums, int segments) {
  float top = tops[0], sum = 0.f;
  for (int s = 1; s < segments; ++s) top = fmaxf(top, tops[s]);
  for (int s = 0; s < segments; ++s) {
    if (tops[s] > -INFINITY) sum = __fadd_rn(sum, __fmul_rn(sums[s], exp32(__fsub_rn(tops[s], top))));
  }
  return __fadd_rn(top, log32(sum));
}

// Shared memory of one block that ranks.
struct RankShared {
  float lane[kTreeThreads];
  float warp_top[kTreeWarps];
  int digit[kDigits];  // keys with each value of the digit, then how many have that value or a greater one
  int warp_total[kTreeWarps];
  int chosen, above;  // the digit of the K-th key, and how many keys have a greater digit
  int length;
};

// sum of exp32(x_i - top) over a segment in docs/model.md's order; in every thread.
__device__ inline float segment_sum(const float* x, int n, float top, RankShared& s) {
  const int t = threadIdx.x;
  float lane = 0.f;
  for (int i = t; i < n; i += kTreeThreads) lane = __fadd_rn(lane, exp32(__fsub_rn(x[i], top)));
  s.lane[t] = lane;
  __syncthreads();
  for (int h = kTreeThreads / 2; h > 0; h /= 2) {
    if (t < h) s.lane[t] = __fadd_rn(s.lane[t], s.lane[t + h]);
    __syncthreads();
  }
  return s.lane[0];
}

// Collects the `wanted` greatest of n distinct keys in descending order into out (room for a power of two >= wanted); absent keys are
// 0. Returns how many there are. Radix selection, eight bits a pass from the top; the order is that of the keys alone.
template <typename KeyAt>
__device__ int best_keys(KeyAt key_at, int n, int wanted, Key* out, RankShared& s) {
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  Key prefix = 0;
  int need = wanted;
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    const int above = shift + kDigitBits;
    s.digit[t] = 0;
    __syncthreads();
    for (int i = t; i < n; i += kTreeThreads) {
      const Key key = key_at(i);
      if (key != 0 && (above == 64 || key >> (above & 63) == prefix >> (above & 63)))
        atomicAdd(&s.digit[(key >> shift) % kDigits], 1);
    }
    __syncthreads();
    // Thread t holds digit 255 - t, so that an ascending scan counts the keys with that digit or a greater one.
    const int mine = s.digit[kDigits - 1 - t];
    int upto = mine;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int before = __shfl_up_sync(kAll, upto, d);
      if (lane >= d) upto += before;
    }
    if (lane == kWarp - 1) s.warp_total[warp] = upto;
    if (t == 0) s.chosen = -1;
    __syncthreads();
    for (int w = 0; w < warp; ++w) upto += s.warp_total[w];
    if (upto >= need && upto - mine < need) s.chosen = kDigits - 1 - t, s.above = upto - mine;
    __syncthreads();
    if (s.chosen < 0) {  // fewer keys than wanted (first pass only): all of them
      prefix = 1;
      break;
    }
    need -= s.above;
    prefix |= static_cast<Key>(s.chosen) << shift;
    const bool whole = s.digit[s.chosen] == need;  // the rest of this digit is wanted too
    __syncthreads();
    if (whole) break;
  }
  if (t == 0) s.length = 0;
  __syncthreads();
  for (int i = t; i < n; i += kTreeThreads) {
    const Key key = key_at(i);
    if (key >= prefix && key != 0) out[atomicAdd(&s.length, 1)] = key;
  }
  __syncthreads();
  const int length = s.length;
  int size = 1;
  while (size < length) size *= 2;
  for (int i = length + t; i < size; i += kTreeThreads) out[i] = 0;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {  // bitonic, descending
    for (int gap = run / 2; gap > 0; gap /= 2) {
      for (int i = t; i < size / 2; i += kTreeThreads) {
        const int low = (i / gap) * 2 * gap + i % gap, high = low + gap;
        const Key a = out[low], b = out[high];
        if ((a < b) == ((low & run) == 0)) out[low] = b, out[high] = a;
      }
      __syncthreads();
    }
  }
  return length;
}

}  // namespace cuda
}  // namespace kdtree
