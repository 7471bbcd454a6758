// The experts for bf16 activations: gate and up with SiLU, then down, each one launch driven by the distinct experts of the step,
// and the combination of a row's products in the order of choice.
//
// Bytes: the distinct experts' weights once for all rows (up to 64), the shared expert's once; flops 2*3*M*(top_k*I + S)*D on tensor cores.
// Bound by weight bytes: an expert rarely has more than eight rows.
// An item is one expert and one block of its weight rows; stream_plan.h shares them out (Items). Within a cluster K is split as in linear_stream.cuh.
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

template <bool DOWN_, int MT_, int NT_, int CL_, int WARPS_, int DEPTH_, int RESIDENT_, int HELD_>
struct StreamMoeShape {
  static constexpr bool DOWN = DOWN_;
  static constexpr int MT = MT_, NT = NT_, CL = CL_, WARPS = WARPS_, DEPTH = DEPTH_;
  static constexpr int RESIDENT = RESIDENT_;
  static constexpr int TURN = NT * kColumns;               // rows of an expert at a time
  static constexpr int SPC = kSegments / CL;
  static constexpr int TW = WARPS / SPC;
  static constexpr int ROWS = MT * TW * kTileRows;         // weight rows a block and item
  static constexpr int OUTPUTS = DOWN ? ROWS : ROWS / 2;   // gate rows, then as many up rows
  static constexpr int COLUMNS = HELD_ * kColumns;         // rows of the step at a time
  static constexpr int PLACES = COLUMNS * kMostTopK;
  static constexpr int SLOT = stream::moe_slot_bytes(MT, DOWN);
  static constexpr int RING = WARPS * DEPTH * SLOT;
  static constexpr int PARTIAL = SPC * ROWS * kColumns * 4;  // of eight columns at a time
  static_assert(WARPS % SPC == 0 && OUTPUTS % CL == 0 && (DOWN || MT * TW % 2 == 0), "warps and rows divide evenly");
};

// Who goes to which expert in this step.
template <int PLACES>
struct Routes {
  int found;                   // distinct experts, ascending:
  uint16_t expert[PLACES];     // [slot]
  uint16_t start[PLACES + 1];  // [slot]: its part of `place`
  uint16_t place[PLACES];      // row * top_k + choice, rows ascending
  uint16_t id[PLACES];
  uint32_t set[kMostExperts / 32];
  int below[kMostExperts / 32];  // experts of the words before
};

// Called by the whole block; `count` ids of the step's rows, row by row. Ends with a barrier of the block.
template <int PLACES>
__device__ __forceinline__ void find_routes(Routes<PLACES>& r, const int32_t* ids, int count) {
  const int lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < kMostExperts / 32; i += blockDim.x) r.set[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int id = ids[i];
    KD_ASSERT(id >= 0 && id < kMostExperts, "moe: an expert id out of range");
    r.id[i] = static_cast<uint16_t>(id);
    atomicOr(r.set + id / 32, 1u << (id % 32));
  }
  __syncthreads();
  const auto upto = [&](int mine) {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const int below = __shfl_up_sync(kAll, mine, d);
      if (lane >= d) mine += below;
    }
    return mine;
  };
  if (threadIdx.x < kWarp) {
    uint32_t word = r.set[lane];
    const int all = upto(__popc(word)), found = __shfl_sync(kAll, all, kWarp - 1);
    r.below[lane] = all - __popc(word);
    for (int at = r.below[lane]; word != 0; word &= word - 1) {
      r.expert[at++] = static_cast<uint16_t>(lane * 32 + __ffs(static_cast<int>(word)) - 1);
    }
    for (int i = lane; i <= found; i += kWarp) r.start[i] = 0;
    __syncwarp();
    // First how many go to each slot, then, from where its part begins, their places in order.
    for (int pass = 0; pass < 2; ++pass) {
      for (int base = 0; base < count; base += kWarp) {
        const unsigned here = __ballot_sync(kAll, base + lane < count);
        if (base + lane < count) {
          const int id = r.id[base + lane], slot = r.below[id / 32] + __popc(r.set[id / 32] & ((1u << (id % 32)) - 1));
          const unsigned same = __match_any_sync(here, slot);
          const int before = __popc(same & ((1u << lane) - 1)), begin = r.start[slot];
          if (pass == 1) r.place[begin + before] = static_cast<uint16_t>(base + lane);
          __syncwarp(here);
          if (before == 0) r.start[slot] = static_cast<uint16_t>(begin + __popc(same));
        }
        __syncwarp();
      }
      if (pass == 1) break;
      int carry = 0;
      for (int base = 0; base < found; base += kWarp) {
        const int mine = base + lane < found ? r.start[base + lane] : 0, sum = carry + upto(mine);
        __syncwarp();
        if (base + lane < found) r.start[base + lane] = static_cast<uint16_t>(sum - mine);
        carry = __shfl_sync(kAll, sum, kWarp - 1);
      }
      __syncwarp();
    }
    // The second pass left every slot's end: shift them into beginnings.
    for (int base = (found - 1) / kWarp * kWarp; base >= 0; base -= kWarp) {
      const int end = base + lane < found ? r.start[base + lane] : 0;
      __syncwarp();
      if (base + lane < found) r.start[base + lane + 1] = static_cast<uint16_t>(end);
      __syncwarp();
    }
    if (lane == 0) r.start[0] = 0, r.found = found;
  }
  __syncthreads();
}

// Of the items that are not the shared expert's, a cluster's are [first, last).
struct Share {
  int first, last;
};

template <typename S>
__global__ __launch_bounds__(S::WARPS * kWarp, KD_RESIDENT(S::RESIDENT)) void stream_moe_kernel(const __grid_constant__ StreamMoeParams p) {
  constexpr bool DOWN = S::DOWN;
  constexpr int MT = S::MT, NT = S::NT, CL = S::CL, WARPS = S::WARPS, DEPTH = S::DEPTH, SPC = S::SPC, TW = S::TW, ROWS = S::ROWS;
  constexpr WeightKind INT4 = WeightKind::kInt4, BF16 = WeightKind::kBf16;
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ float squares[DOWN ? 1 : S::COLUMNS * SPC], inverse[DOWN ? 1 : S::COLUMNS];
  __shared__ Routes<S::PLACES> routes;
  uint8_t* const partial = smem + S::RING;
  uint8_t* const staged = partial + S::PARTIAL;

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, local = warp / TW, column = warp % TW;
  const int rank = cluster_rank<CL>(), cluster = blockIdx.x / CL, clusters = gridDim.x / CL;
  const int blocks = (p.n + S::OUTPUTS - 1) / S::OUTPUTS, shared_items = (p.shared_n + S::OUTPUTS - 1) / S::OUTPUTS;
  const int m0 = blockIdx.y * S::COLUMNS;
  const uint32_t ring = shared_address(smem) + warp * (DEPTH * S::SLOT);
  const uint32_t mine = piece_offset(lane / 4, lane % 4);
  const bool whole = (p.k + 31) / 32 % 4 == 0;
  const auto granules = [](int k) { return (k + kMoeGranule - 1) / kMoeGranule; };
  const int s0 = rank * SPC + local;  // this warp's segment
  const auto begin_of = [&](int k) { return segment_begin(s0, granules(k)) * kMoeGranule; };
  const auto length_of = [&](int k) { return (segment_begin(s0 + 1, granules(k)) - segment_begin(s0, granules(k))) * kMoeGranule; };

  // Copying side: walks the items ahead of the multiplication. The shared expert's come first and, but for their activations, wait for nobody.
  Share share{0, 0};
  int copy_shared = cluster, copy_item = 0, copy_turn = 0, copy_left = 0, rows = S::COLUMNS;
  bool copy_bf16 = false;
  TileSource from[MT];
  bool live[MT];
  const uint16_t* act = nullptr;  // down: this lane's piece of row lane/4 of the item's activations
  int act_left = 0;               // of that row, elements from there on
  bool act_here = false;          // whether the item has such a row
  uint32_t copy_slot = ring;
  // Points at turn `turn` of an item; gives whether another turn follows.
  const auto point = [&](int block, int slot, bool of_shared, int turn) {
    const int k = of_shared ? p.shared_k : p.k, n = of_shared ? p.shared_n : p.n, begin = begin_of(k);
    const size_t first = of_shared ? 0 : static_cast<size_t>(routes.expert[slot]) * p.step;
    copy_bf16 = of_shared || p.bf16;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int row = (mt * TW + column) * kTileRows;
      const int part = DOWN ? 0 : row >= S::OUTPUTS;
      const int tile = (block * S::OUTPUTS + row - part * S::OUTPUTS) / kTileRows;
      live[mt] = tile * kTileRows < n;
      if (!live[mt]) continue;
      from[mt] = copy_bf16 ? tile_source<BF16>(of_shared ? p.shared[part] : p.data[part], nullptr, first, tile, n, k, begin, lane)
                           : tile_source<INT4>(p.data[part], p.scale[part], first, tile, n, k, begin, lane);
    }
    const int at = of_shared ? 0 : routes.start[slot], count = of_shared ? rows : routes.start[slot + 1] - at;
    if constexpr (DOWN) {
      const int g = turn * S::TURN + lane / 4;
      const int place = of_shared ? g : routes.place[at + min(g, count - 1)];
      act = (of_shared ? p.shared_act + static_cast<size_t>(m0 + place) * k : p.act + (static_cast<size_t>(m0) * p.top_k + place) * k) +
            begin + lane % 4 * 8;
      act_left = k - begin - lane % 4 * 8, act_here = g < count;
    }
    copy_left = length_of(k) / (copy_bf16 ? kUnitK<BF16> : kUnitK<INT4>);
    return (turn + 1) * S::TURN < count;
  };
  const auto fetch = [&]() {
    while (copy_left == 0) {
      if (copy_shared < shared_items) {
        const bool more = point(copy_shared, 0, true, copy_turn);
        copy_turn = more ? copy_turn + 1 : 0, copy_shared += more ? 0 : clusters;
      } else if (copy_item < share.last) {
        const bool more = point(copy_item % blocks, copy_item / blocks, false, copy_turn);
        copy_turn = more ? copy_turn + 1 : 0, copy_item += more ? 0 : 1;
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
      if constexpr (DOWN) {
        // Rows lie side by side, 64 or 256 bytes each; of odd rows the halves of a line are swapped, so that two rows lie in all banks.
        const uint32_t to = copy_slot + MT * kRingBytes;
        const int row = lane / 4;
        if (copy_bf16) {
          if (act_here) copy16(to + row * 64 + lane % 4 * 16, act, act_left > 0 ? 16 : 0);
          act += 32, act_left -= 32;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint32_t piece = (4 * j + lane % 4) ^ ((row & 1) * 4);
            if (act_here) copy16(to + row * 256 + piece * 16, act + j * 32, act_left > j * 32 ? 16 : 0);
          }
          act += 128, act_left -= 128;
        }
      }
      --copy_left;
    }
    copy_commit();
    copy_slot = copy_slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : copy_slot + S::SLOT;
  };
  const bool early = !DOWN && cluster < shared_items && length_of(p.shared_k) / kUnitK<BF16> >= DEPTH - 1;
  if (early) {
#pragma unroll 1
    for (int i = 0; i < DEPTH - 1; ++i) fetch();
  }

  wait_for_previous();
  rows = min(active_rows(p.n_rows, p.max_rows) - m0, S::COLUMNS);
  if (rows <= 0) {  // the whole cluster alike
    copy_wait<0>();
    return;
  }
  find_routes(routes, p.ids + m0 * p.top_k, rows * p.top_k);
  const stream::Items all{clusters, shared_items, 32 * static_cast<int64_t>(p.shared_k) * ((rows + S::TURN - 1) / S::TURN), routes.found * blocks,
                          (p.bf16 ? 32 : 9) * static_cast<int64_t>(p.k)};
  share = {stream::first_item(all, cluster), stream::first_item(all, cluster + 1)};
  copy_item = share.first;
  if (early) {  // the one item pointed at so far, in the light of how many rows there are
    const bool more = S::TURN < rows;
    copy_turn = more ? 1 : 0, copy_shared = cluster + (more ? 0 : clusters);
  } else {
#pragma unroll 1
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
  uint32_t slot = ring;
  bool read_before = !DOWN && CL > 1;  // an arrival that is still to be met
  int next_shared = cluster, next_item = share.first, turn = 0;
  while (true) {
    const bool of_shared = next_shared < shared_items, bf16 = of_shared || p.bf16;
    if (!of_shared && next_item >= share.last) break;
    int block = next_shared, first = 0, count = rows;
    if (!of_shared) {
      const int expert = next_item / blocks;
      block = next_item % blocks, first = routes.start[expert], count = routes.start[expert + 1] - first;
    }
    first += turn * S::TURN, count -= turn * S::TURN;
    const bool more = count > S::TURN;
    if (more) count = S::TURN;
    turn = more ? turn + 1 : 0;
    if (of_shared) next_shared += more ? 0 : clusters;
    else next_item += more ? 0 : 1;
    const auto place_of = [&](int c) { return of_shared ? first + c : static_cast<int>(routes.place[first + c]); };
    const int tiles = (count + kColumns - 1) / kColumns;
    const int k = of_shared ? p.shared_k : p.k, begin = begin_of(k);

    float acc[MT][NT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) acc[mt][nt][0] = acc[mt][nt][1] = acc[mt][nt][2] = acc[mt][nt][3] = 0.f;

    // Where a lane's activations of tile nt are: gate and up, in the staged rows; down, in memory, the first tile's in the ring.
    uint32_t b_at[NT];
    const uint16_t* const base = of_shared ? p.shared_act + static_cast<size_t>(m0) * k : p.act + static_cast<size_t>(m0) * p.top_k * k;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const int place = place_of(min(nt * kColumns + lane / 4, count - 1));
      b_at[nt] = DOWN ? static_cast<uint32_t>(place) * k + begin + lane % 4 * 8
                      : shared_address(staged) + (of_shared ? place : place / p.top_k) * p.stride + (begin - staged_first) * 2 + lane % 4 * 16;
    }
    const auto multiply = [&](auto kind, auto count_of_tiles, int done) {
      constexpr WeightKind KIND = decltype(kind)::value;
      const auto activations = [&](int nt, int part) {
        if constexpr (!DOWN) {
          return load_shared16(b_at[nt] + done * 2 + part * 64);
        } else {
          if (nt == 0) {
            const int row = lane / 4, piece = KIND == BF16 ? lane % 4 : (4 * part + lane % 4) ^ ((row & 1) * 4);
            return in_order(load_shared16(slot + MT * kRingBytes + row * (KIND == BF16 ? 64 : 256) + piece * 16));
          }
          const int from_begin = done + part * 32;
          if (begin + lane % 4 * 8 + from_begin >= k) return make_uint4(0, 0, 0, 0);
          return in_order(*reinterpret_cast<const uint4*>(base + b_at[nt] + from_begin));
        }
      };
      multiply_unit<KIND, MT, decltype(count_of_tiles)::value, NT == 1 ? 4 : 2>(acc, slot, at, activations);
    };
    const int unit = bf16 ? kUnitK<BF16> : kUnitK<INT4>, length = length_of(k);
    for (int done = 0; done < length; done += unit) {
      copy_wait<DEPTH - 2>();
      __syncwarp();
      fetch();
      const std::integral_constant<int, 1> one{};
      const std::integral_constant<int, NT> every{};
      if (bf16) {
        const std::integral_constant<WeightKind, BF16> kind{};
        if (NT == 1 || tiles == 1) multiply(kind, one, done);
        else multiply(kind, every, done);
      } else {
        const std::integral_constant<WeightKind, INT4> kind{};
        if (NT == 1 || tiles == 1) multiply(kind, one, done);
        else multiply(kind, every, done);
      }
      slot = slot + S::SLOT == ring + DEPTH * S::SLOT ? ring : slot + S::SLOT;
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
          const int place = place_of(c);
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
      &stream_moe_kernel<StreamMoeShape<DOWN, TABLE[I].mt, TABLE[I].nt, TABLE[I].cl, TABLE[I].warps, TABLE[I].depth, TABLE[I].resident, TABLE[I].held>>...};
  return kernels[index];
}
template <bool DOWN, const auto& TABLE>
StreamMoeKernel moe_kernel(int index) {
  return moe_kernel_at<DOWN, TABLE>(index, std::make_index_sequence<std::size(TABLE)>());
}

inline bool aligned(const void* p, uintptr_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace cuda
}  // namespace kdtree
