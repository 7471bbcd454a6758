// linear(): y = W x for f32, bf16 and INT4 weights, the input normed on the way, with its epilogues.
//
// Bytes: the weights once (4, 2 or 0.5625 a weight), as rows share them within a strip; flops 2*M*N*K. At few rows bound by
// memory, so outputs are cut into strips that threads take. Reduction order: kernels.h.
#include "gemm.h"

#include <cstring>

#include "../bf16.h"
#include "backend.h"

namespace kdtree::cpu {

Packed::Packed(const Kernels& k, const Weight& w, Numerics numerics, float* scratch)
    : k_(k), int4_(w.kind == WeightKind::kInt4), bf16_(numerics == Numerics::kBf16), width_(w.k), scratch_(scratch) {}

const void* Packed::normed(float* x, int at) {
  if (!bf16_) return held(x, at);
  float* place = scratch_ + static_cast<size_t>(at) * packed_floats(width_);
  if (int4_) {
    round_bf16(x, static_cast<size_t>(width_));
    k_.pack_int4(place, x, width_);
  } else {
    k_.to_bf16(reinterpret_cast<uint16_t*>(place), x, width_);
  }
  return place;
}

const void* Packed::held(const void* x, int at) {
  if (!int4_) return x;
  float* place = scratch_ + static_cast<size_t>(at) * packed_floats(width_);
  if (bf16_) {
    k_.pack_int4_bf16(place, static_cast<const uint16_t*>(x), width_);
  } else {
    k_.pack_int4(place, static_cast<const float*>(x), width_);
  }
  return place;
}

void gemm_strip(const Kernels& k, const Weight& w, int expert, const void* const* x, int m, int first, int n, float* y, int ldy) {
  const size_t row = static_cast<size_t>(expert) * w.step() + first;
  const auto rows_of = [&](auto* data, auto** rows) {
    for (int j = 0; j < n; ++j) rows[j] = data + (row + j) * w.k;
  };
  if (w.kind == WeightKind::kInt4) {
    const int groups = int4_groups(w.k);
    const auto* q = static_cast<const uint8_t*>(w.data) + row * groups * kGroupBytes;
    k.gemm_int4(reinterpret_cast<const float* const*>(x), m, q, w.scale + row * groups, n, groups, y, ldy);
  } else if (w.kind == WeightKind::kBf16) {
    const uint16_t* rows[kStrip];
    rows_of(static_cast<const uint16_t*>(w.data), rows);
    k.gemm_bf16(reinterpret_cast<const uint16_t* const*>(x), m, rows, n, w.k, y, ldy);
  } else {
    const float* rows[kStrip];
    rows_of(static_cast<const float*>(w.data), rows);
    k.gemm_f32(reinterpret_cast<const float* const*>(x), m, rows, n, w.k, y, ldy);
  }
}

void store_held(const Kernels& k, void* out, size_t at, const float* x, int n, Numerics numerics) {
  if (numerics == Numerics::kBf16) {
    k.to_bf16(static_cast<uint16_t*>(out) + at, x, n);
  } else {
    std::memcpy(static_cast<float*>(out) + at, x, sizeof(float) * static_cast<size_t>(n));
  }
}

namespace {

// Floats between rows that several outputs are computed from at a time: at a multiple of 4 KiB from each other they, and the weights'
// rows, would want the same few lines of the first cache.
constexpr int kSpread = 80;
constexpr int kLongRow = 1024;  // floats from which that matters

}  // namespace

size_t CpuBackend::linear_scratch(int k, int max_rows) const {
  // The packed rows, the normed or spread rows, and a pointer to each row of either.
  return static_cast<size_t>(max_rows) * (sizeof(float) * (2 * packed_floats(k) + kSpread) + sizeof(float*));
}

void CpuBackend::linear(const LinearArgs& a) {
  const int m = active_rows(a.n_rows, a.max_rows), k = a.w[0].k;
  const size_t width = packed_floats(k), apart = width + kSpread;
  auto* scratch = static_cast<float*>(a.scratch);
  Packed packed(k_, a.w[0], a.numerics, scratch);
  float* normed = scratch + a.max_rows * width;
  auto** x = reinterpret_cast<const void**>(normed + a.max_rows * apart);
  const bool spread = a.w[0].kind == WeightKind::kF32 && m >= 4 && k >= kLongRow;
  for (int i = 0; i < m; ++i) {
    const size_t at = static_cast<size_t>(i) * a.ldx;
    float* out = normed + i * apart;
    if (a.norm_w != nullptr) {
      norm_row(out, static_cast<const float*>(a.x) + at, a.norm_w, a.eps, k);
      x[i] = packed.normed(out, i);
    } else if (spread) {
      std::memcpy(out, static_cast<const float*>(a.x) + at, sizeof(float) * k);
      x[i] = out;
    } else {
      x[i] = packed.held(static_cast<const char*>(a.x) + at * held_bytes(a.numerics), i);
    }
  }
  const bool gated = a.epilogue == Epilogue::kSiluMul;
  int strips[2] = {0, 0}, columns = 0;
  for (int p = 0; p < a.parts; ++p) {
    strips[p] = strips_of(a.w[p], m);
    columns += a.w[p].n;
  }
  const auto strip = [&](int task) {
    const int part = gated || task < strips[0] ? 0 : 1;
    const int width = strip_of(a.w[part], m), first = (part == 0 ? task : task - strips[0]) * width;
    const int n = a.w[part].n - first < width ? a.w[part].n - first : width;
    float y[kBlock * kStrip], up[kBlock * kStrip];
    for (int i = 0; i < m; i += kBlock) {
      const int rows = m - i < kBlock ? m - i : kBlock;
      gemm_strip(k_, a.w[part], 0, x + i, rows, first, n, y, kStrip);
      if (gated) gemm_strip(k_, a.w[1], 0, x + i, rows, first, n, up, kStrip);
      for (int r = 0; r < rows; ++r) {
        const size_t at = static_cast<size_t>(i + r) * a.ldo[part] + first;
        float* out = static_cast<float*>(a.out[part]) + (gated ? 0 : at);
        float* from = y + r * kStrip;
        if (gated) {
          k_.silu_mul(from, from, up + r * kStrip, n);
          store_held(k_, a.out[part], at, from, n, a.numerics);
        } else if (a.epilogue == Epilogue::kResidual) {
          for (int j = 0; j < n; ++j) out[j] += from[j];
        } else {
          std::memcpy(out, from, sizeof(float) * n);
        }
      }
    }
  };
  threads_.run(gated ? strips[0] : strips[0] + strips[1], static_cast<double>(m) * columns * k, strip);
  const bool bf16 = a.numerics == Numerics::kBf16;
  count(a.w[0].kind == WeightKind::kInt4 ? (bf16 ? "linear_int4_bf16" : "linear_int4") : bf16 ? "linear_bf16" : "linear_f32");
}

}  // namespace kdtree::cpu
