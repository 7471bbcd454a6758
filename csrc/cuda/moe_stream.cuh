// The experts for bf16 activations: gate and up with SiLU, then down, each one launch driven by the distinct experts of the step,
// and the combination of a row's products in the order of choice.
//
// Bytes: the distinct experts' weights once for all rows (up to 64), the shared expert's once; flops 2*3*M*(top_k*I + S)*D on tensor cores.
// Bound by weight bytes: an expert rarely has more than eight rows.
// An item is one expert and one block of its weight rows. Clusters take the shared expert's items in turn and contiguous ranges of
// the others, so cut that all read about the same number of bytes. Within a cluster K is split as in linear_stream.cuh.
// Reduction order: stream.cuh with K = D for gate and up and K = I for down; no other row has a say.
#pragma once
#include "stream.cuh"

namespace kdtree {
namespace cuda {

using stream::kMoeGranule;
using stream::kMostExperts;
using stream::kMostTopK;

struct StreamMoeParams {
  const float* x;  // gate and up: residual stream, normed on the way
  const float* norm_w;
  float eps;
  int k, shared_k;        // inner dimension of the product
  bool bf16;              // the experts' weights are bf16, else int4; the shared expert's are bf16
  const void* data[2];    // gate and up, or down
  const uint16_t* scale[2];
  const void* shared[2];
  int n, shared_n;        // weight rows of an expert; shared_n 0: none
  int step;               // weight rows from an expert to the next
  const int32_t* ids;
  int top_k;
  uint16_t* act;         // [M*top_k, I] bf16: written by gate and up, read by down
  uint16_t* shared_act;  // [M, S]
  float* products;       // down: [M*(top_k + 1), n], a row's choices, then the shared expert
  int stride;  // bytes between staged rows
  int max_rows;
  const int32_t* n_rows;
};

template <bool DOWN_, int MT_, int NT_, int CL_, int WARPS_, int DEPTH_, int RESIDENT_>
struct StreamMoeShape {
  static constexpr bool DOWN = DOWN_;
  static constexpr int MT = MT_, NT = NT_, CL = CL_, WARPS = WARPS_, DEPTH = DEPTH_;
  static constexpr int RESIDENT = RESIDENT_;
  static constexpr int SPC = kSegments / CL;
  static constexpr int TW = WARPS / SPC;
  static constexpr int ROWS = MT * TW * kTileRows;         // weight rows a block and item
  static constexpr int OUTPUTS = DOWN ? ROWS : ROWS / 2;   // gate rows, then as many up rows
  static constexpr int COLUMNS = NT * kColumns;
  static constexpr int SLOT = MT * kRingBytes;
  static constexpr int RING = WARPS * DEPTH * SLOT;
  static constexpr int PARTIAL = SPC * ROWS * kColumns * 4;  // of eight columns at a time
  static_assert(WARPS % SPC == 0 && OUTPUTS % CL == 0 && (DOWN || MT * TW % 2 == 0), "warps and rows divide evenly");
};

// Which items a cluster takes: the shared expert's cluster, cluster + clusters, ..., then [first, last) of the others.
struct Share {
  int first, last;
};
__device__ __forceinline__ Share share_of(int cluster, int clusters, int shared_items, int64_t shared_cost, int items, int64_t cost) {
  const int64_t whole = shared_items * shared_cost + items * cost;
  const auto begin = [&](int c) {
    const int64_t before = static_cast<int64_t>(c) * (shared_items / clusters) + min(c, shared_items % clusters);
    const int64_t at = (whole * c / clusters - before * shared_cost) / cost;
    return static_cast<int>(c == clusters ? items : at < 0 ? 0 : at > items ? items : at);
  };
  return {begin(cluster), begin(cluster + 1)};
}

template <typename S>
__global__ __launch_bounds__(S::WARPS * kWarp, S::RESIDENT) void stream_moe_kernel(const __grid_constant__ StreamMoeParams p) {
  constexpr bool DOWN = S::DOWN;
  constexpr int MT = S::MT, NT = S::NT, CL = S::CL, WARPS = S::WARPS, DEPTH = S::DEPTH, SPC = S::SPC, TW = S::TW, ROWS = S::ROWS;
  constexpr WeightKind INT4 = WeightKind::kInt4, BF16 = WeightKind::kBf16;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float squares[S::COLUMNS * SPC], inverse[S::COLUMNS];
  __shared__ int32_t ids[S::COLUMNS * kMostTopK];
  __shared__ uint16_t distinct[S::COLUMNS * kMostTopK], lists[WARPS][S::COLUMNS];
  __shared__ uint32_t set[kMostExperts / 32];
  __shared__ int found;
  uint8_t* const partial = smem + S::RING;
  uint8_t* const staged = partial + S::PARTIAL;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, local = warp / TW, column = warp % TW;
  const int rank = cluster_rank<CL>(), cluster = blockIdx.x / CL, clusters = gridDim.x / CL;
  const int blocks = (p.n + S::OUTPUTS - 1) / S::OUTPUTS, shared_items = (p.shared_n + S::OUTPUTS - 1) / S::OUTPUTS;
  const int m0 = blockIdx.y * S::COLUMNS;
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * S::SLOT);
  const uint32_t mine = piece_offset(lane / 4, lane % 4);

  // Copying side: `from_*` walk the items ahead of the multiplication. The shared expert's come first and wait for nobody.
  Share share{0, 0};
  int copy_shared = cluster, copy_item = 0, copy_left = 0;
  bool copy_bf16 = false;
  TileSource from[MT];
  bool live[MT];
  uint32_t copy_slot = ring;
  const auto granules = [](int k) { return (k + kMoeGranule - 1) / kMoeGranule; };
  const int s0 = rank * SPC + local;  // this warp's segment
  const bool whole = (p.k + 31) / 32 % 4 == 0;
  const auto point = [&](int block, int expert, bool of_shared) {
    const int k = of_shared ? p.shared_k : p.k, n = of_shared ? p.shared_n : p.n;
    const int begin = segment_begin(s0, granules(k));
    copy_bf16 = of_shared || p.bf16;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int row = (mt * TW + column) * kTileRows;
      const int part = DOWN ? 0 : row >= S::OUTPUTS;
      const int tile = (block * S::OUTPUTS + row - part * S::OUTPUTS) / kTileRows;
      live[mt] = tile * kTileRows < n;
      if (!live[mt]) continue;
      const size_t first = static_cast<size_t>(expert) * p.step;
      from[mt] = copy_bf16 ? tile_source<BF16>(of_shared ? p.shared[part] : p.data[part], nullptr, first, tile, n, k, begin * kMoeGranule, lane)
                           : tile_source<INT4>(p.data[part], p.scale[part], first, tile, n, k, begin * kMoeGranule, lane);
    }
    copy_left = (segment_begin(s0 + 1, granules(k)) - begin) * (copy_bf16 ? kMoeGranule / kUnitK<BF16> : 1);
  };
  const auto fetch = [&]() {
    while (copy_left == 0) {
      if (copy_shared < shared_items) {
        point(copy_shared, 0, true);
        copy_shared += clusters;
      } else if (copy_item < share.last) {
        point(copy_item % blocks, distinct[copy_item / blocks], false);
        ++copy_item;
      } else {
        break;
      }
    }
    if (copy_left > 0) {
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        if (!live[mt]) continue;
        if (copy_bf16) {
          copy_unit<BF16>(copy_slot + mt * kRingBytes, from[mt], mine, lane, whole);
        } else {
          copy_unit<INT4>(copy_slot + mt * kRingBytes, from[mt], mine, lane, whole);
        }
      }
      --copy_left;
    }
    copy_commit();
    copy_slot = copy_slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : copy_slot + S::SLOT;
  };
  const int early_granules = segment_begin(s0 + 1, granules(p.shared_k)) - segment_begin(s0, granules(p.shared_k));
  const bool early = cluster < shared_items && early_granules * (kMoeGranule / kUnitK<BF16>) >= DEPTH - 1;
  if (early) {
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) fetch();
  }

  wait_for_previous();
  const int rows = min(active_rows(p.n_rows, p.max_rows) - m0, S::COLUMNS);
  if (rows <= 0 && m0 > 0) {  // the whole cluster alike
    copy_wait<0>();
    return;
  }
  // The distinct experts, ascending.
  for (int i = threadIdx.x; i < kMostExperts / 32; i += WARPS * kWarp) set[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < rows * p.top_k; i += WARPS * kWarp) {
    const int id = p.ids[m0 * p.top_k + i];
    ids[i] = id;
    atomicOr(set + id / 32, 1u << (id % 32));
  }
  __syncthreads();
  if (warp == 0) {
    uint32_t word = set[lane];
    const int mine_count = __popc(word);
    int upto = mine_count;
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int below = __shfl_up_sync(kAll, upto, d);
      if (lane >= d) upto += below;
    }
    for (int at = upto - mine_count; word != 0; word &= word - 1) distinct[at++] = static_cast<uint16_t>(lane * 32 + __ffs(static_cast<int>(word)) - 1);
    if (lane == kWarp - 1) found = upto;
  }
  __syncthreads();
  share = share_of(cluster, clusters, shared_items, 32 * static_cast<int64_t>(p.shared_k), found * blocks, (p.bf16 ? 32 : 9) * static_cast<int64_t>(p.k));
  copy_item = share.first;
  if (!early) {
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) fetch();
  }

  const int staged_first = segment_begin(rank * SPC, granules(p.k)) * kMoeGranule;
  if constexpr (!DOWN) {
    const float* x = p.x + static_cast<size_t>(m0) * p.k;
    square_rows<SPC>(squares, x, p.k, rows, p.k, kMoeGranule, rank);
    inverse_rows<CL, SPC>(inverse, squares, rows, p.k, p.eps);
    cluster_arrive<CL>();  // nobody leaves before its squares were read; met by the first wait below
    stage_normed_rows(staged, p.stride, x, p.k, rows, S::COLUMNS, p.k, staged_first,
               segment_begin((rank + 1) * SPC, granules(p.k)) * kMoeGranule - staged_first, p.norm_w, inverse);
    __syncthreads();
  }

  const LaneOffsets at(lane);
  uint16_t* const list = lists[warp];
  uint32_t slot = ring;
  bool read_before = !DOWN && CL > 1;  // an arrival that is still to be met
  int next_shared = cluster, next_item = share.first;
  while (true) {
    const bool of_shared = next_shared < shared_items, bf16 = of_shared || p.bf16;
    if (!of_shared && next_item >= share.last) break;
    int block, expert = 0, count = 0;
    __syncwarp();  // every lane has read the list of the item before
    if (of_shared) {
      block = next_shared, count = rows;
      next_shared += clusters;
      for (int m = lane; m < rows; m += kWarp) list[m] = static_cast<uint16_t>(m);
    } else {
      block = next_item % blocks, expert = distinct[next_item / blocks];
      ++next_item;
      for (int base = 0; base < rows; base += kWarp) {
        const int m = base + lane;
        int place = -1;
        for (int j = 0; j < p.top_k; ++j) {
          if (m < rows && ids[m * p.top_k + j] == expert) place = m * p.top_k + j;
        }
        const unsigned chosen = __ballot_sync(kAll, place >= 0);
        if (place >= 0) list[count + __popc(chosen & ((1u << lane) - 1))] = static_cast<uint16_t>(place);
        count += __popc(chosen);
      }
    }
    __syncwarp();
    const int tiles = (count + kColumns - 1) / kColumns;
    const int k = of_shared ? p.shared_k : p.k, begin = segment_begin(s0, granules(k)) * kMoeGranule;
    const int length = segment_begin(s0 + 1, granules(k)) * kMoeGranule - begin;

    float acc[MT][NT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) acc[mt][nt][0] = acc[mt][nt][1] = acc[mt][nt][2] = acc[mt][nt][3] = 0.f;

    const auto multiply = [&](auto kind, auto activations) {
      constexpr WeightKind KIND = decltype(kind)::value;
      for (int step = 0; step < length / kUnitK<KIND>; ++step) {
        copy_wait<DEPTH - 2>();
        __syncwarp();
        fetch();
        multiply_unit<KIND, MT, NT>(acc, slot, at, tiles, activations(kind, step));
        slot = slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : slot + S::SLOT;
      }
    };
    if constexpr (DOWN) {
      const uint16_t* const base = of_shared ? p.shared_act + static_cast<size_t>(m0) * k : p.act + static_cast<size_t>(m0) * p.top_k * k;
      uint32_t b_at[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int place = list[min(nt * kColumns + lane / 4, count - 1)];
        b_at[nt] = static_cast<uint32_t>(place) * k;
      }
      const int mine_k = begin + lane % 4 * 8;
      const auto load = [=](uint32_t row, int at_k) {
        if (at_k >= k) return make_uint4(0, 0, 0, 0);
        return in_order(*reinterpret_cast<const uint4*>(base + row + at_k));
      };
      const auto activations = [&](auto kind, int step) {
        constexpr int UNIT = kUnitK<decltype(kind)::value>;
        struct Ahead {  // the first tile's activations are in flight before they are needed
          uint4 first[UNIT / 32];
        } ahead;
#pragma unroll
        for (int i = 0; i < UNIT / 32; ++i) ahead.first[i] = load(b_at[0], mine_k + step * UNIT + i * 32);
        return [ahead, step, mine_k, &b_at, load](int nt, int part) {
          return nt == 0 ? ahead.first[part] : load(b_at[nt], mine_k + step * UNIT + part * 32);
        };
      };
      if (bf16) {
        multiply(std::integral_constant<WeightKind, BF16>{}, activations);
      } else {
        multiply(std::integral_constant<WeightKind, INT4>{}, activations);
      }
    } else {
      uint32_t b_at[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int place = list[min(nt * kColumns + lane / 4, count - 1)];
        b_at[nt] = shared_address(staged) + (of_shared ? place : place / p.top_k) * p.stride + (begin - staged_first) * 2 + lane % 4 * 16;
      }
      const auto activations = [&](auto kind, int step) {
        constexpr int UNIT = kUnitK<decltype(kind)::value>;
        return [step, &b_at](int nt, int part) { return load_shared16(b_at[nt] + step * (UNIT * 2) + part * 64); };
      };
      if (bf16) {
        multiply(std::integral_constant<WeightKind, BF16>{}, activations);
      } else {
        multiply(std::integral_constant<WeightKind, INT4>{}, activations);
      }
    }

    // Eight columns at a time: sums of a segment as [local][row][column], read by the cluster, each block a share of the rows.
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      if (NT > 1 && nt >= tiles) break;
      if (read_before) cluster_wait<CL>();
      read_before = true;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        float* to = reinterpret_cast<float*>(partial) + (local * ROWS + (mt * TW + column) * kTileRows + lane / 4) * kColumns + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(acc[mt][nt][0], acc[mt][nt][1]);
        *reinterpret_cast<float2*>(to + 8 * kColumns) = make_float2(acc[mt][nt][2], acc[mt][nt][3]);
      }
      cluster_arrive<CL>();
      cluster_wait<CL>();
      constexpr int share_rows = S::OUTPUTS / CL;
      const int quads = (min(count - nt * kColumns, kColumns) + 3) / 4;
      for (int i = threadIdx.x; i < share_rows * quads; i += WARPS * kWarp) {
        const int row = rank * share_rows + i % share_rows, quad = i / share_rows, to = block * S::OUTPUTS + row;
        if (to >= (of_shared ? p.shared_n : p.n)) continue;
        const auto total = [&](int r) {
          const uint32_t place = shared_address(partial) + (r * kColumns + quad * 4) * sizeof(float);
          float4 part[kSegments];
#pragma unroll
          for (int s = 0; s < kSegments; ++s)
            part[s] = load_cluster16<CL>(place + s % SPC * (ROWS * kColumns * sizeof(float)), s / SPC);
#pragma unroll
          for (int s = 1; s < kSegments; ++s) {
            part[0].x = __fadd_rn(part[0].x, part[s].x), part[0].y = __fadd_rn(part[0].y, part[s].y);
            part[0].z = __fadd_rn(part[0].z, part[s].z), part[0].w = __fadd_rn(part[0].w, part[s].w);
          }
          return part[0];
        };
        const float4 y4 = total(row);
        float y[4] = {y4.x, y4.y, y4.z, y4.w};
        if constexpr (!DOWN) {
          const float4 u4 = total(S::OUTPUTS + row);
          const float u[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(silu(y[j]), u[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int c = nt * kColumns + quad * 4 + j;
          if (c >= count) break;
          const int place = list[c];
          if constexpr (DOWN) {
            const int m = m0 + (of_shared ? place : place / p.top_k), choice = of_shared ? p.top_k : place % p.top_k;
            p.products[(static_cast<size_t>(m) * (p.top_k + 1) + choice) * p.n + to] = y[j];
          } else if (of_shared) {
            p.shared_act[static_cast<size_t>(m0 + place) * p.shared_n + to] = round_bf16(y[j]);
          } else {
            p.act[(static_cast<size_t>(m0) * p.top_k + place) * p.n + to] = round_bf16(y[j]);
          }
        }
      }
      cluster_arrive<CL>();
    }
  }
  copy_wait<0>();
  if (CL > 1 && read_before) cluster_wait<CL>();
}

using StreamMoeKernel = void (*)(StreamMoeParams);

template <bool DOWN, const auto& TABLE, size_t... I>
StreamMoeKernel moe_kernel_at(int index, std::index_sequence<I...>) {
  constexpr StreamMoeKernel kernels[] = {
      &stream_moe_kernel<StreamMoeShape<DOWN, TABLE[I].mt, TABLE[I].nt, TABLE[I].cl, TABLE[I].warps, TABLE[I].depth, TABLE[I].resident>>...};
  return kernels[index];
}
template <bool DOWN, const auto& TABLE>
StreamMoeKernel moe_kernel(int index) {
  return moe_kernel_at<DOWN, TABLE>(index, std::make_index_sequence<std::size(TABLE)>());
}

inline bool aligned(const void* p, uintptr_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace cuda
}  // namespace kdtree
