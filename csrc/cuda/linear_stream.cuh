// linear for bf16 activations: y = w x for up to two weights (int4 or bf16) that share the input, with norm and epilogue.
//
// Bytes: each weight once for up to 8*NT rows; flops 2*M*N*K on tensor cores. Bound by weight bytes up to about M = 32.
// A cluster of CL blocks owns a block of weight rows; each of its blocks takes kSegments/CL segments of K, keeps the activations of
// its segments in shared memory as bf16, and the segments' sums meet through distributed shared memory in ascending order.
// Reduction order: stream.cuh; the norm's sum of squares likewise by segments. Neither depends on M, CL, MT, NT or the grid.
#pragma once
#include "stream.cuh"

namespace kdtree {
namespace cuda {

struct StreamLinearParams {
  const void* x;  // f32 with a norm, else bf16
  int ldx, k;
  const float* norm_w;
  float eps;
  const void* data[2];
  const uint16_t* scale[2];
  int n[2];
  void* out[2];  // f32; bf16 for kSiluMul
  int ldo[2];
  Epilogue epilogue;
  int blocks;  // of rows, shared out among the clusters
  int max_rows;
  const int32_t* n_rows;
};

template <WeightKind KIND_, int MT_, int NT_, int CL_, int WARPS_, int DEPTH_, int RESIDENT_>
struct StreamLinearShape {
  static constexpr WeightKind KIND = KIND_;
  static constexpr int MT = MT_, NT = NT_, CL = CL_, WARPS = WARPS_, DEPTH = DEPTH_;
  static constexpr int RESIDENT = RESIDENT_;      // blocks an SM that registers must allow
  static constexpr int SPC = kSegments / CL;      // segments a block
  static constexpr int TW = WARPS / SPC;          // warps side by side on weight rows
  static constexpr int ROWS = MT * TW * kTileRows;  // weight rows a block
  static constexpr int COLUMNS = NT * kColumns;
  static constexpr int SLOT = MT * kRingBytes;
  static constexpr int RING = WARPS * DEPTH * SLOT;
  static constexpr int PARTIAL = SPC * ROWS * COLUMNS * 4;
  static_assert(WARPS % SPC == 0 && ROWS / 2 % CL == 0, "warps and rows divide evenly");
  // Elements of K that a block stages at most.
  static __host__ __device__ int staged_length(int k) {
    const int units = (k + kUnitK<KIND> - 1) / kUnitK<KIND>;
    return (units * SPC + kSegments - 1) / kSegments * kUnitK<KIND>;
  }
  static size_t shared_bytes(int k) { return RING + PARTIAL + static_cast<size_t>(COLUMNS) * staged_stride(staged_length(k)); }
};

template <typename S>
__global__ __launch_bounds__(S::WARPS * kWarp, S::RESIDENT) void stream_linear_kernel(const __grid_constant__ StreamLinearParams p) {
  constexpr WeightKind KIND = S::KIND;
  constexpr int MT = S::MT, NT = S::NT, CL = S::CL, WARPS = S::WARPS, DEPTH = S::DEPTH, SPC = S::SPC, TW = S::TW, ROWS = S::ROWS;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float squares[S::COLUMNS * SPC], inverse[S::COLUMNS];
  uint8_t* const partial = smem + S::RING;
  uint8_t* const staged = partial + S::PARTIAL;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, local = warp / TW, column = warp % TW;
  const int rank = cluster_rank<CL>(), cluster = blockIdx.x / CL, clusters = gridDim.x / CL;
  constexpr int UNIT = kUnitK<KIND>;
  const int units = (p.k + UNIT - 1) / UNIT, first_unit = segment_begin(rank * SPC, units);
  const int unit = segment_begin(rank * SPC + local, units), steps = segment_begin(rank * SPC + local + 1, units) - unit;
  const bool paired = p.epilogue == Epilogue::kSiluMul;
  const bool whole = (p.k + 31) / 32 % 4 == 0;
  const int tiles0 = (p.n[0] + kTileRows - 1) / kTileRows, tiles1 = (p.n[1] + kTileRows - 1) / kTileRows;
  const int tiles = paired ? tiles0 : tiles0 + tiles1, outputs = paired ? ROWS / 2 : ROWS;
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * S::SLOT);
  const uint32_t mine = piece_offset(lane / 4, lane % 4);

  // The copying side runs DEPTH - 1 units ahead, from one block of rows into the next.
  TileSource from[MT];
  bool live[MT];
  int copy_block = cluster, copy_left = 0;
  uint32_t copy_slot = ring;
  const auto fetch = [&]() {
    if (copy_left == 0 && copy_block < p.blocks && steps > 0) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const int row = (mt * TW + column) * kTileRows;
        int part = paired && row >= outputs, tile = (copy_block * outputs + row - part * outputs) / kTileRows;
        live[mt] = tile < tiles;
        if (!paired && tile >= tiles0) part = 1, tile -= tiles0;
        if (live[mt]) from[mt] = tile_source<KIND>(p.data[part], p.scale[part], 0, tile, p.n[part], p.k, unit * UNIT, lane);
      }
      copy_left = steps, copy_block += clusters;
    }
    if (copy_left > 0) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        if (live[mt]) copy_unit<KIND>(copy_slot + mt * kRingBytes, from[mt], mine, lane, whole);
      }
      --copy_left;
    }
    copy_commit();
    copy_slot = copy_slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : copy_slot + S::SLOT;
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) fetch();

  wait_for_previous();
  const int m0 = blockIdx.y * S::COLUMNS, rows = min(active_rows(p.n_rows, p.max_rows) - m0, S::COLUMNS);
  if (rows <= 0 && m0 > 0) {  // the whole cluster alike
    copy_wait<0>();
    return;
  }
  const int k_first = first_unit * UNIT, length = segment_begin((rank + 1) * SPC, units) * UNIT - k_first;
  const int stride = staged_stride(S::staged_length(p.k));
  const size_t skipped = static_cast<size_t>(m0) * p.ldx;
  const void* x = static_cast<const uint16_t*>(p.x) + skipped;
  if (p.norm_w != nullptr) {
    const float* f = static_cast<const float*>(p.x) + skipped;
    x = f;
    square_rows<SPC>(squares, f, p.ldx, rows, p.k, UNIT, rank);
    inverse_rows<CL, SPC>(inverse, squares, rows, p.k, p.eps);
  }
  stage_rows(staged, stride, x, p.ldx, rows, S::COLUMNS, p.k, k_first, length, p.norm_w, inverse);
  __syncthreads();

  const LaneOffsets at(lane);
  const int used = (rows + kColumns - 1) / kColumns;
  const uint32_t b_row = shared_address(staged) + (lane / 4) * stride + (unit - first_unit) * (UNIT * 2) + lane % 4 * 16;
  uint32_t slot = ring;
  bool first_block = true;
  for (int block = cluster; block < p.blocks; block += clusters) {
    float acc[MT][NT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) acc[mt][nt][0] = acc[mt][nt][1] = acc[mt][nt][2] = acc[mt][nt][3] = 0.f;
    uint32_t b_at = b_row;
    for (int step = 0; step < steps; ++step) {
      copy_wait<DEPTH - 2>();
      __syncwarp();
      fetch();  // into the slot that was read a step ago
      multiply_unit<KIND, MT, NT>(acc, slot, at, used,
                                  [&](int nt, int part) { return load_shared16(b_at + nt * kColumns * stride + part * 64); });
      b_at += UNIT * 2;
      slot = slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : slot + S::SLOT;
    }

    // Sums of a segment: [local][nt][row][column].
    if (!first_block) cluster_wait<CL>();  // every block of the cluster has read the sums before
    first_block = false;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int row = (mt * TW + column) * kTileRows + lane / 4;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        float* to = reinterpret_cast<float*>(partial) + ((local * NT + nt) * ROWS + row) * kColumns + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(acc[mt][nt][0], acc[mt][nt][1]);
        *reinterpret_cast<float2*>(to + 8 * kColumns) = make_float2(acc[mt][nt][2], acc[mt][nt][3]);
      }
    }
    cluster_arrive<CL>();
    cluster_wait<CL>();
    const int share = outputs / CL, quads = (rows + 3) / 4;
    for (int i = threadIdx.x; i < share * quads; i += WARPS * kWarp) {
      const int row = rank * share + i % share, quad = i / share;
      const auto total = [&](int r) {
        const uint32_t place =
            shared_address(partial) + ((quad / 2 * ROWS + r) * kColumns + quad % 2 * 4) * sizeof(float);
        float4 part[kSegments];
#pragma unroll
        for (int s = 0; s < kSegments; ++s)
          part[s] = load_cluster16<CL>(place + s % SPC * (NT * ROWS * kColumns * sizeof(float)), s / SPC);
#pragma unroll
        for (int s = 1; s < kSegments; ++s) {
          part[0].x = __fadd_rn(part[0].x, part[s].x), part[0].y = __fadd_rn(part[0].y, part[s].y);
          part[0].z = __fadd_rn(part[0].z, part[s].z), part[0].w = __fadd_rn(part[0].w, part[s].w);
        }
        return part[0];
      };
      int to = block * outputs + row, part = 0;
      if (!paired && to >= tiles0 * kTileRows) to -= tiles0 * kTileRows, part = 1;
      if (to >= p.n[part]) continue;
      const float4 y4 = total(row);
      float y[4] = {y4.x, y4.y, y4.z, y4.w};
      if (paired) {
        const float4 u4 = total(outputs + row);
        const float u[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(silu(y[j]), u[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = quad * 4 + j;
        if (m >= rows) break;
        const size_t place = static_cast<size_t>(m0 + m) * p.ldo[part] + to;
        if (paired) {
          static_cast<uint16_t*>(p.out[part])[place] = round_bf16(y[j]);
        } else {
          float* o = static_cast<float*>(p.out[part]) + place;
          *o = p.epilogue == Epilogue::kResidual ? __fadd_rn(*o, y[j]) : y[j];
        }
      }
    }
    cluster_arrive<CL>();
  }
  copy_wait<0>();
  if (CL > 1 && !first_block) cluster_wait<CL>();
}

}  // namespace cuda
}  // namespace kdtree
