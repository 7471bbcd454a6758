// Ranking the tokens of each draft depth: log-sum-exp to docs/model.md's last bit, and the exact K best in order.
#pragma once
#include "tree.cuh"

namespace kdtree {
namespace cuda {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == kTreeThreads, "a thread a digit");
constexpr int kTreeWarps = kTreeThreads / kWarp;
constexpr int kTreeShare = kTreeSegment / kTreeThreads;  // elements a thread holds
constexpr int kTreeCandidates = 2 * kTreeThreads;        // what best_of_shares has room for
static_assert(kTreeThreads == 256, "segment_sum spells out the halving of 256 lanes");

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

// Shared memory of one block that ranks.
struct RankShared {
  float lane[kTreeThreads];  // also the terms of a row's sum
  float warp_top[kTreeWarps];
  uint32_t warp_least[kTreeWarps];
  int digit[kDigits];  // keys with each value of the digit, then how many have that value or a greater one
  int warp_total[kTreeWarps];
  int chosen, above;  // the digit of the K-th key, and how many keys have a greater digit
  int length;
  __align__(16) Key candidate[kTreeCandidates];
};

// log-sum-exp of a row from its segments' greatest logits and sums, in every thread. A segment without finite logits has the sum 0
// and adds +0, which changes nothing. The terms are formed side by side and added in order.
__device__ inline float row_lse(const float* tops, const float* sums, int segments, RankShared& s) {
  const int t = threadIdx.x;
  float top = -INFINITY;
  for (int i = t; i < segments; i += kTreeThreads) top = fmaxf(top, tops[i]);
  top = warp_max(top);
  __syncthreads();
  if (t % kWarp == 0) s.warp_top[t / kWarp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kTreeWarps; ++w) top = fmaxf(top, s.warp_top[w]);
  float sum = 0.f;
  for (int base = 0; base < segments; base += kTreeThreads) {
    if (base + t < segments) s.lane[t] = __fmul_rn(sums[base + t], exp32(__fsub_rn(tops[base + t], top)));
    __syncthreads();
    const int n = min(segments - base, kTreeThreads);
#pragma unroll 8
    for (int i = 0; i < n; ++i) sum = __fadd_rn(sum, s.lane[i]);
    __syncthreads();
  }
  return __fadd_rn(top, log32(sum));
}

// A thread's share of a segment: elements t, t + 256, ..; what is past the segment's end is -inf.
struct SegmentShare {
  float x[kTreeShare];

  __device__ SegmentShare(const float* segment, int n) {
    segment += threadIdx.x;
#pragma unroll
    for (int j = 0; j < kTreeShare; ++j) {
      x[j] = static_cast<int>(threadIdx.x) + j * kTreeThreads < n ? segment[j * kTreeThreads] : -INFINITY;
    }
  }
};

// The same as keys: the upper halves (0: not to be used), and the token of the first, which gives the lower ones.
struct SegmentKeys {
  uint32_t upper[kTreeShare];
  int first;

  __device__ SegmentKeys(const SegmentShare& share, int begin) : first(begin + static_cast<int>(threadIdx.x)) {
#pragma unroll
    for (int j = 0; j < kTreeShare; ++j) {
      upper[j] = share.x[j] > -INFINITY ? order_of_logit(share.x[j]) : 0u;
      asm volatile("" : "+r"(upper[j]));  // takes the logit's register, and is not formed anew at every use
    }
  }
  __device__ uint32_t order(int j) const { return upper[j]; }
  __device__ uint32_t low(int j) const { return ~static_cast<uint32_t>(first + j * kTreeThreads); }
  // Keeps the compiler from holding all sixteen tokens in registers through a loop that seldom runs.
  __device__ void forget() { asm volatile("" : "+r"(first)); }
};

// A thread's share of the segments' lists, at most 4096 keys; the best of every list first, so that they meet all warps alike.
struct ListShare {
  Key keys[kTreeShare];

  __device__ ListShare(const Key* lists, int segments, int best) {
#pragma unroll
    for (int j = 0; j < kTreeShare; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kTreeThreads, segment = i % segments, rank = i / segments;
      keys[j] = rank < best ? lists[segment * best + rank] : Key{0};
    }
  }
  __device__ uint32_t order(int j) const { return static_cast<uint32_t>(keys[j] >> 32); }
  __device__ uint32_t low(int j) const { return static_cast<uint32_t>(keys[j]); }
  __device__ void forget() {}
};

// sum of exp32(x_i - top) over a segment in docs/model.md's order; in thread 0. Past the segment's end exp32 is +0 and adds nothing.
__device__ inline float segment_sum(const SegmentShare& share, float top, RankShared& s) {
  const int t = threadIdx.x;
  float lane = 0.f;
#pragma unroll
  for (int j = 0; j < kTreeShare; ++j) lane = __fadd_rn(lane, exp32(__fsub_rn(share.x[j], top)));
  s.lane[t] = lane;
  __syncthreads();
  if (t >= kWarp) return 0.f;
  // h = 128, 64 and 32, each lane for itself; then h = 16 .. 1 across the warp.
  const auto halves = [&](int i) { return __fadd_rn(s.lane[i], s.lane[i + 128]); };
  const auto quarters = [&](int i) { return __fadd_rn(halves(i), halves(i + 64)); };
  float v = __fadd_rn(quarters(t), quarters(t + 32));
#pragma unroll
  for (int h = kWarp / 2; h > 0; h /= 2) v = __fadd_rn(v, __shfl_down_sync(kAll, v, h));
  return v;
}

// Keys from here on: a greater order, or this one and at least this lower half.
struct Bound {
  uint32_t order, low;
};

template <typename Share>
__device__ __forceinline__ bool reaches(const Share& share, int j, const Bound& bound) {
  const uint32_t order = share.order(j);
  return order != 0 && (order > bound.order || (order == bound.order && share.low(j) >= bound.low));
}

// The bound that exactly `wanted` of the block's keys reach, a bit at a time; all of them if there are fewer.
template <typename Share>
__device__ Bound bound_of_shares(Share& share, int wanted, RankShared& s) {
  Bound bound{0, 0};
#pragma unroll 1
  for (int bit = 63; bit >= 0; --bit) {
    share.forget();
    Bound raised = bound;
    (bit >= 32 ? raised.order : raised.low) |= 1u << bit % 32;
    int reach = 0;
#pragma unroll
    for (int j = 0; j < kTreeShare; ++j) reach += reaches(share, j, raised) ? 1 : 0;
    reach = __reduce_add_sync(kAll, reach);
    if (threadIdx.x % kWarp == 0) s.warp_total[threadIdx.x / kWarp] = reach;
    __syncthreads();
    reach = 0;
#pragma unroll
    for (int w = 0; w < kTreeWarps; ++w) reach += s.warp_total[w];
    if (reach >= wanted) bound = raised;
    __syncthreads();
  }
  return bound;
}

// Puts the keys that reach `bound` into s.candidate, in any order; returns how many there are, also if they do not fit.
template <typename Share>
__device__ int collect(const Share& share, const Bound& bound, RankShared& s) {
  const int lane = threadIdx.x % kWarp;
  uint32_t hits = 0;
#pragma unroll
  for (int j = 0; j < kTreeShare; ++j) hits |= (reaches(share, j, bound) ? 1u : 0u) << j;
  int upto = __popc(hits);
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const int before = __shfl_up_sync(kAll, upto, d);
    if (lane >= d) upto += before;
  }
  int first = 0;
  if (lane == kWarp - 1) first = atomicAdd(&s.length, upto);
  int at = __shfl_sync(kAll, first, kWarp - 1) + upto - __popc(hits);
#pragma unroll
  for (int j = 0; j < kTreeShare; ++j) {
    if (hits >> j & 1) {
      if (at < kTreeCandidates) s.candidate[at] = static_cast<Key>(share.order(j)) << 32 | share.low(j);
      ++at;
    }
  }
  __syncthreads();
  return s.length;
}

// best_keys for up to 256 wanted of up to 4096 keys, 16 a thread. At least `wanted` keys reach a bound that as many threads' greatest
// keys reach, and seldom many more; where they are too many (equal logits, say) the exact bound is looked for.
template <typename Share>
__device__ int best_of_shares(Share& share, int wanted, Key* out, RankShared& s) {
  const int t = threadIdx.x, lane = t % kWarp, warp = t / kWarp;
  uint32_t mine = 0, least = 0;
#pragma unroll
  for (int j = 0; j < kTreeShare; ++j) mine = max(mine, share.order(j));
  const int rounds = (wanted + kTreeWarps - 1) / kTreeWarps;
  for (int i = 0; i < rounds; ++i) {
    least = __reduce_max_sync(kAll, mine);
    if (lane == __ffs(static_cast<int>(__ballot_sync(kAll, mine == least))) - 1) mine = 0;
  }
  if (lane == 0) s.warp_least[warp] = least;
  if (t == 0) s.length = 0;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kTreeWarps; ++w) least = min(least, s.warp_least[w]);
  int length = collect(share, {least, 0}, s);
  if (length > kTreeCandidates) {
    const Bound bound = bound_of_shares(share, wanted, s);
    if (t == 0) s.length = 0;
    __syncthreads();
    length = collect(share, bound, s);
  }
  for (int i = t; i < length; i += kTreeThreads) {
    const Key key = s.candidate[i];
    int greater = 0;
#pragma unroll 8
    for (int j = 0; j < length; ++j) greater += s.candidate[j] > key ? 1 : 0;
    if (greater < wanted) out[greater] = key;
  }
  __syncthreads();
  return min(length, wanted);
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
