// Prints, for every instruction set of the processor it runs on, a hash over what each kernel of csrc/cpu/kernels.h makes of
// fixed inputs. Built for another processor and run there (or in an emulator) it must print the same hashes.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "../../csrc/cpu/kernels.h"

namespace {

struct Random {  // xorshift64*, so that the inputs are the same everywhere
  uint64_t state = 88172645463325252ull;
  uint32_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<uint32_t>((state * 2685821657736338717ull) >> 32);
  }
  float number() { return static_cast<float>(static_cast<int32_t>(next())) * 1.5e-9f; }
};

struct Hash {  // FNV-1a over the bits
  uint64_t value = 1469598103934665603ull;
  void add(const float* p, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, p + i, 4);
      for (int b = 0; b < 4; ++b) value = (value ^ ((bits >> (8 * b)) & 255)) * 1099511628211ull;
    }
  }
};

std::vector<float> numbers(Random& r, size_t n, float scale = 1.0f) {
  std::vector<float> v(n);
  for (float& x : v) x = r.number() * scale;
  return v;
}

std::vector<const float*> rows(const std::vector<float>& v, int n, int width) {
  std::vector<const float*> p;
  for (int i = 0; i < n; ++i) p.push_back(v.data() + static_cast<size_t>(i) * width);
  return p;
}

uint64_t hash_of(const kdtree::cpu::Kernels& k, int m, int n, int width) {
  Random r;
  Hash h;
  const auto x = numbers(r, static_cast<size_t>(m) * width), w = numbers(r, static_cast<size_t>(n) * width);
  std::vector<float> y(static_cast<size_t>(m) * n);
  k.gemm_f32(rows(x, m, width).data(), m, rows(w, n, width).data(), n, width, y.data(), n);
  h.add(y.data(), y.size());
  const int groups = (width + 31) / 32;
  const int wide_row = (width + 127) / 128 * 128;
  std::vector<float> packed(static_cast<size_t>(m) * wide_row);
  for (int i = 0; i < m; ++i) k.pack_int4(packed.data() + static_cast<size_t>(i) * wide_row, x.data() + static_cast<size_t>(i) * width, width);
  std::vector<uint8_t> q(static_cast<size_t>(n) * groups * 16);
  for (uint8_t& b : q) b = static_cast<uint8_t>(r.next());
  std::vector<uint16_t> scale(static_cast<size_t>(n) * groups);
  for (uint16_t& s : scale) s = static_cast<uint16_t>(0x3C00 + r.next() % 512);
  k.gemm_int4(rows(packed, m, wide_row).data(), m, q.data(), scale.data(), n, groups, y.data(), n);
  h.add(y.data(), y.size());
  std::vector<float> sum(static_cast<size_t>(m) * width);
  k.weighted_sum(y.data(), n, m, rows(w, n, width).data(), n, width, nullptr, sum.data(), width);
  k.weighted_sum(y.data(), n, m, rows(w, n, width).data(), n, width, x.data(), sum.data(), width);
  h.add(sum.data(), sum.size());
  const float squares = k.sum_squares(x.data(), width);
  h.add(&squares, 1);
  std::vector<float> out(static_cast<size_t>(width));
  k.scale_by(out.data(), x.data(), 0.37f, w.data(), width);
  h.add(out.data(), out.size());
  k.divide(out.data(), 3.7f, width);
  h.add(out.data(), out.size());
  const auto wide = numbers(r, static_cast<size_t>(width), 40.0f);
  k.silu_mul(out.data(), wide.data(), x.data(), width);
  h.add(out.data(), out.size());
  k.sigmoid(out.data(), wide.data(), width);
  h.add(out.data(), out.size());
  bool finite = false;
  const float top = k.max_value(wide.data(), width, &finite);
  h.add(&top, 1);
  auto e = wide;
  const float total = k.exp_sum(e.data(), top, width);
  h.add(e.data(), e.size());
  h.add(&total, 1);
  return finite ? h.value : 0;
}

}  // namespace

int main() {
  std::istringstream names(kdtree::cpu::isa_names());
  std::string name;
  while (names >> name) {
    setenv("KDTREE_ISA", name.c_str(), 1);
    const auto& k = kdtree::cpu::kernels();
    std::printf("%s", name.c_str());
    for (const int width : {1, 15, 16, 33, 64, 257}) {
      for (const int m : {1, 2, 3, 5, 9}) {  // 23 outputs: more than any tile has, and a rest
        std::printf(" %016llx", static_cast<unsigned long long>(hash_of(k, m, 23, width)));
      }
    }
    std::printf("\n");
  }
  return 0;
}
