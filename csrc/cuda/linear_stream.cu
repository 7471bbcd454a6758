// linear for bf16 activations: y = w x for up to two weights (int4 or bf16) that share the input, with norm and epilogue.
//
// Bytes: each weight once for up to 8*NT rows; flops 2*M*N*K on tensor cores. Bound by weight bytes up to about M = 32.
// A cluster of CL blocks owns a block of weight rows; each of its blocks takes kSegments/CL segments of K, keeps the activations of
// its segments in shared memory as bf16, and the segments' sums meet through distributed shared memory in ascending order.
// Reduction order: stream.cuh; the norm's sum of squares likewise by segments. Neither depends on M, CL, MT, NT or the grid.
#include "backend.h"
#include "cluster.cuh"
#include "staged_rows.cuh"
#include "stream.cuh"

namespace kdtree {
namespace {

using namespace cuda;
using stream::kZeros;

struct Params {
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
  int stride;  // bytes between staged rows
  int max_rows;
  const int32_t* n_rows;
};

template <WeightKind KIND_, int MT_, int NT_, int CL_, int WARPS_, int DEPTH_, int RESIDENT_>
struct Shape {
  static constexpr WeightKind KIND = KIND_;
  static constexpr int MT = MT_, NT = NT_, CL = CL_, WARPS = WARPS_, DEPTH = DEPTH_, RESIDENT = RESIDENT_;
  static constexpr int SPC = kSegments / CL;        // segments a block
  static constexpr int TW = WARPS / SPC;            // warps side by side on weight rows
  static constexpr int ROWS = MT * TW * kTileRows;  // weight rows a block
  static constexpr int COLUMNS = NT * kColumns;
  static constexpr int SLOT = MT * kRingBytes;
  static constexpr int RING = WARPS * DEPTH * SLOT;
  static constexpr int PARTIAL = SPC * ROWS * COLUMNS * 4;
  // The segments' sums take the ring's place: copies then stop at the end of a block of rows.
  static constexpr bool IN_RING = stream::sums_in_ring(NT);
  static constexpr bool ABSENT = NT == 1;  // columns may have no row
  // Units that are asked for before the launch before has ended. A block that fills its multiprocessor begins when that has: then
  // activations come sooner if few weights stand before them.
  static constexpr int EARLY = RESIDENT > 1 ? DEPTH - 1 : 1;
  static_assert(WARPS % SPC == 0 && ROWS / 2 % CL == 0, "warps and rows divide evenly");
};

template <typename S>
__global__ __launch_bounds__(S::WARPS * kWarp, KD_RESIDENT(S::RESIDENT)) void stream_kernel(const __grid_constant__ Params p) {
  constexpr WeightKind KIND = S::KIND;
  constexpr int MT = S::MT, NT = S::NT, CL = S::CL, WARPS = S::WARPS, DEPTH = S::DEPTH, SPC = S::SPC, TW = S::TW, ROWS = S::ROWS;
  extern __shared__ __align__(128) uint8_t smem[];
  constexpr bool IN_RING = S::IN_RING;
  uint8_t* const partial = IN_RING ? smem : smem + S::RING;
  // The norm is over before the first sums are written, in this block; other blocks of a cluster may still read its squares then.
  constexpr bool OWN = CL > 1 || IN_RING;
  __shared__ float own[OWN ? S::COLUMNS * (SPC + 1) : 1];
  float *const squares = OWN ? own : reinterpret_cast<float*>(partial), *const inverse = squares + S::COLUMNS * SPC;
  uint8_t* const staged = (IN_RING ? smem + (S::RING > S::PARTIAL ? S::RING : S::PARTIAL) : partial + S::PARTIAL) + kZeros;

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

  // The copying side runs DEPTH - 1 units ahead, unless IN_RING from one block of rows into the next. Tiles past the last one copy the
  // first one's weights, whose products nobody writes.
  TileSource from[MT];
  int copy_block = cluster, copy_left = 0;
  const auto open = [&]() {
    if (copy_block < p.blocks) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        const int row = (mt * TW + column) * kTileRows;
        int part = paired && row >= outputs, tile = (copy_block * outputs + row - part * outputs) / kTileRows;
        if (tile >= tiles) tile = 0;
        if (!paired && tile >= tiles0) part = 1, tile -= tiles0;
        from[mt] = tile_source<KIND>(p.data[part], p.scale[part], 0, tile, p.n[part], p.k, unit * UNIT, lane);
      }
      copy_left = steps, copy_block += clusters;
    }
  };
  const auto fetch = [&](uint32_t to) {
    if (!IN_RING && copy_left == 0 && steps > 0) open();
    if (copy_left > 0) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) copy_unit<KIND>(to + mt * kRingBytes, from[mt], mine, lane, whole);
      --copy_left;
    }
    copy_commit();
  };
  const auto fetch_units = [&](int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) fetch(ring + i * S::SLOT);
  };
  if (IN_RING) open();
  fetch_units(0, S::EARLY);

  wait_for_previous();
  // Rows that do not count are staged and multiplied like the others, which need not wait for the count to arrive; they are not written.
  const int m0 = blockIdx.y * S::COLUMNS, staged_rows = min(p.max_rows - m0, S::COLUMNS);
  if (m0 > 0 && active_rows(p.n_rows, p.max_rows) <= m0) {  // the whole cluster alike
    copy_wait<0>();
    return;
  }
  int counted = load_early(p.n_rows);
  // Columns without a row stage nothing; their lanes read zeros, again and again.
  const int columns = S::ABSENT ? staged_rows : S::COLUMNS;
  const int k_first = first_unit * UNIT, length = segment_begin((rank + 1) * SPC, units) * UNIT - k_first;
  const size_t skipped = static_cast<size_t>(m0) * p.ldx;
  if (p.norm_w != nullptr) {
    fetch_units(S::EARLY, DEPTH - 1);
    const float* x = static_cast<const float*>(p.x) + skipped;
    square_rows<SPC>(squares, x, p.ldx, staged_rows, p.k, UNIT, rank);
    inverse_rows<CL, SPC>(inverse, squares, staged_rows, p.k, p.eps);
    stage_normed_rows(staged, p.stride, x, p.ldx, staged_rows, columns, p.k, k_first, length, p.norm_w, inverse);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + skipped;
    stage_rows(staged, p.stride, x, p.ldx, staged_rows, columns, p.k, k_first, length, FirstPiece(length),
               [&] { fetch_units(S::EARLY, DEPTH - 1); });
  }
  if (S::ABSENT && threadIdx.x < kZeros / 16) reinterpret_cast<uint4*>(staged - kZeros)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  const LaneOffsets at(lane);
  const bool absent = S::ABSENT && lane / 4 >= columns;
  const uint32_t b_row = shared_address(staged) + lane % 4 * 16 +
                         (absent ? 0 - static_cast<uint32_t>(kZeros) : lane / 4 * p.stride + (unit - first_unit) * (UNIT * 2));
  const uint32_t b_unit = absent ? 0 : UNIT * 2;
  uint32_t slot = ring, behind = ring + (DEPTH - 1) * S::SLOT;
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
      fetch(behind);  // the slot that was read a step ago
      behind = slot;
      multiply_unit<KIND, MT, NT, (WARPS > 8 ? 2 : 4)>(acc, slot, at,
                                  [&](int nt, int part) { return load_shared16(b_at + nt * kColumns * p.stride + part * 64); });
      b_at += b_unit;
      slot = slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : slot + S::SLOT;
    }

    // Sums of a segment: [local][nt][row][column].
    if (IN_RING) {
      copy_wait<0>();
      __syncthreads();  // every warp has read its ring
    } else if (!first_block) {
      cluster_wait<CL>();  // every block of the cluster has read the sums before
    }
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
    asm volatile("" : "+r"(counted));  // whose load nothing before this waits for
    const int rows = min(min(counted, p.max_rows) - m0, S::COLUMNS), share = outputs / CL, quads = (rows + 3) / 4;
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
    if (IN_RING) {
      cluster_wait<CL>();
      slot = ring, behind = ring + (DEPTH - 1) * S::SLOT;
      open();
      fetch_units(0, DEPTH - 1);
    }
  }
  copy_wait<0>();
  if (CL > 1 && !first_block && !IN_RING) cluster_wait<CL>();
}

using Kernel = void (*)(Params);

template <WeightKind KIND, const auto& TABLE, size_t... I>
Kernel kernel_at(int index, std::index_sequence<I...>) {
  constexpr Kernel kernels[] = {
      &stream_kernel<Shape<KIND, TABLE[I].mt, TABLE[I].nt, TABLE[I].cl, TABLE[I].warps, TABLE[I].depth, TABLE[I].resident>>...};
  return kernels[index];
}
template <WeightKind KIND, const auto& TABLE>
Kernel kernel_of(int index) {
  return kernel_at<KIND, TABLE>(index, std::make_index_sequence<std::size(TABLE)>());
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool CudaBackend::linear_stream(const LinearArgs& a) {
  const int k = a.w[0].k;
  if (a.numerics != Numerics::kBf16 || !stream::serves(device_shape_, k)) return false;
  const bool paired = a.epilogue == Epilogue::kSiluMul, int4 = a.w[0].kind == WeightKind::kInt4;
  const int variant = stream::choose_linear(device_shape_, a.w[0].kind, k, a.max_rows, paired, a.norm_w != nullptr);
  bool ready = variant >= 0 && aligned(a.x) && a.ldx % 8 == 0 && aligned(a.norm_w);
  Params p{};
  p.x = a.x, p.ldx = a.ldx, p.k = k, p.norm_w = a.norm_w, p.eps = a.eps, p.epilogue = a.epilogue, p.max_rows = a.max_rows,
  p.n_rows = a.n_rows;
  int tiles = 0;
  for (int i = 0; i < 2; ++i) {
    const int j = i < a.parts ? i : 0;
    p.data[i] = a.w[j].data, p.scale[i] = a.w[j].scale, p.n[i] = i < a.parts ? a.w[i].n : 0;
    p.out[i] = a.out[paired ? 0 : j], p.ldo[i] = a.ldo[paired ? 0 : j];
    ready = ready && aligned(p.data[i]) && (!int4 || reinterpret_cast<uintptr_t>(p.scale[i]) % 8 == 0);
    if (i == 0 || !paired) tiles += (p.n[i] + kTileRows - 1) / kTileRows;
  }
  if (!ready) return false;
  ++(*counting_)[int4 ? "linear_int4_bf16_stream" : "linear_bf16_stream"];
  if (stream::serves_wide(device_shape_, a.w[0].kind, k, a.max_rows) && linear_wide(a)) return true;
  if (linear_boxes(a)) return true;
  const stream::Variant& v = int4 ? stream::kLinearInt4[variant] : stream::kLinearBf16[variant];
  const Kernel kernel = int4 ? kernel_of<WeightKind::kInt4, stream::kLinearInt4>(variant)
                             : kernel_of<WeightKind::kBf16, stream::kLinearBf16>(variant);
  const char* const name = int4 ? "linear_int4_bf16" : "linear_bf16";
  const size_t shared = stream::linear_shared(v, a.w[0].kind, k, a.max_rows);
  const int outputs = stream::rows_of(v) / kTileRows / (paired ? 2 : 1);
  p.blocks = (tiles + outputs - 1) / outputs;
  p.stride = stream::staged_stride(stream::staged_length(k, v.cl, stream::unit_of(a.w[0].kind)));
  const int resident = resident_clusters(reinterpret_cast<const void*>(kernel), name, v.cl, v.warps * kWarp, shared);
  const int columns = v.nt * kColumns;
  const int rounds = (p.blocks + resident - 1) / resident, clusters = (p.blocks + rounds - 1) / rounds;
  const dim3 grid(static_cast<unsigned>(clusters * v.cl), static_cast<unsigned>((a.max_rows + columns - 1) / columns));
  launch_clusters(name, kernel, v.cl, grid, v.warps * kWarp, shared, p);
  return true;
}

}  // namespace kdtree
