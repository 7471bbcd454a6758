// Best-first growth of a small tree by one warp, without branches that part it.
//
// Node i's next child waits in registers of lane i % 32, place i / 32, with what the table adds for those that would wait after it: its next
// sibling and its own first child. So their surprisals are formed while the warp looks for the least, and a pop hands over what is there
// already. Surprisals are negated scores, whose sums round alike.
#pragma once
#include "tree.cuh"

namespace kdtree {
namespace cuda {

constexpr int kGrownRows = 4 * kWarp;  // rows of a tree that is grown in registers, at most
constexpr int kRowBits = 7;
static_assert(kGrownRows == 1 << kRowBits, "a row's number fits its bits");
constexpr uint32_t kRowMask = kGrownRows - 1;

// A node, or a child that waits: where its level begins in the table of surprisals, its rank there, its parent's row.
__device__ __forceinline__ uint32_t packed_node(int level, int rank, int parent) {
  return static_cast<uint32_t>(level) << 2 * kRowBits | static_cast<uint32_t>(rank) << kRowBits | static_cast<uint32_t>(parent);
}
__device__ __forceinline__ int level_of(uint32_t node) { return static_cast<int>(node >> 2 * kRowBits); }
__device__ __forceinline__ int rank_of(uint32_t node) { return static_cast<int>(node >> kRowBits & kRowMask); }
__device__ __forceinline__ int parent_of(uint32_t node) { return static_cast<int>(node & kRowMask); }

// Whether x's path of ranks is lexicographically before y's, a prefix before its extensions. Paths are walked upwards, so the last
// difference seen is the first one from the root.
__device__ inline bool path_before(uint32_t x, uint32_t y, const uint32_t* nodes) {
  bool before = level_of(x) < level_of(y);
  while (level_of(x) > level_of(y)) x = nodes[parent_of(x)];
  while (level_of(y) > level_of(x)) y = nodes[parent_of(y)];
  while (true) {
    if (rank_of(x) != rank_of(y)) before = rank_of(x) < rank_of(y);
    if (parent_of(x) == parent_of(y)) return before;
    x = nodes[parent_of(x)], y = nodes[parent_of(y)];
  }
}

// The first word of a surprisal, whose order is that of the surprisals as far as it goes, its last bits the row of the node above. A NaN
// is above all numbers.
constexpr uint32_t kNothing = 0x7ff80000u;
__device__ __forceinline__ uint32_t waiting_key(double surprisal, int row) {
  return (static_cast<uint32_t>(__double2hiint(surprisal)) & ~kRowMask) | static_cast<uint32_t>(row);
}

// What a key leaves out of a surprisal: 32 bits, then the last kRowBits.
__device__ __forceinline__ uint32_t middle_bits(double surprisal) {
  return static_cast<uint32_t>(static_cast<unsigned long long>(__double_as_longlong(surprisal)) >> kRowBits);
}
__device__ __forceinline__ uint32_t last_bits(double surprisal) { return static_cast<uint32_t>(__double_as_longlong(surprisal)) & kRowMask; }

template <int PLACES>
struct Waiting {
  double node[PLACES];   // surprisal of the node
  double child[PLACES];  // of its child that waits, NaN if none does
  double next[PLACES];   // what the table adds to the node's for that child's next sibling
  double first[PLACES];  // and to the child's for its first child
  int level[PLACES];     // where the children's level begins in the table
  int at[PLACES];        // the waiting child there
  uint32_t key[PLACES];  // of the waiting child
};

// What a lane would give if its child were popped.
struct Offer {
  uint32_t key;
  double child, first;  // surprisals of the child and of its first child
  int level;
};

// Of the children whose keys are `least` but for the row, the one that comes first by the whole surprisal, then by path: the row above it, the
// same in all lanes. The lane that keeps that row offers it afterwards. first: surprisals of the children's first children.
template <int PLACES>
__device__ __forceinline__ int first_of_equals(const Waiting<PLACES>& w, const double (&first)[PLACES], uint32_t least, const uint32_t* nodes,
                                               Offer& offer) {
  const int lane = threadIdx.x % kWarp;
  // The rest of a surprisal in two numbers: what the key leaves out of the first word with most of the second, and the last bits.
  uint32_t middle = 0xffffffffu;
#pragma unroll
  for (int p = 0; p < PLACES; ++p) {
    const uint32_t bits = middle_bits(w.child[p]);
    middle = (w.key[p] ^ least) <= kRowMask ? min(middle, bits) : middle;
  }
  middle = __reduce_min_sync(kAll, middle);
  uint32_t last = 0xffffffffu;
#pragma unroll
  for (int p = 0; p < PLACES; ++p) {
    const bool equal = (w.key[p] ^ least) <= kRowMask && middle_bits(w.child[p]) == middle;
    const uint32_t bits = last_bits(w.child[p]) << kRowBits | static_cast<uint32_t>(p * kWarp + lane);
    last = equal ? min(last, bits) : last;
  }
  const uint32_t whole = __reduce_min_sync(kAll, last);
  // Lanes that keep a child of the same surprisal. Their paths are compared two by two.
  uint32_t node = 0;
  bool mine = false, several = false;
  __syncwarp();  // nodes are written by the lanes that keep their parents
#pragma unroll
  for (int p = 0; p < PLACES; ++p) {
    const int row = p * kWarp + lane;
    const bool equal = (w.key[p] ^ least) <= kRowMask && middle_bits(w.child[p]) == middle && last_bits(w.child[p]) == whole >> kRowBits;
    several |= equal && row != static_cast<int>(whole & kRowMask);
    const uint32_t other = packed_node(w.level[p], w.at[p] - w.level[p], row);
    const bool better = equal && (!mine || path_before(other, node, nodes));
    mine |= equal, node = better ? other : node;
    offer.child = better ? w.child[p] : offer.child, offer.first = better ? first[p] : offer.first;
    offer.level = better ? w.level[p] : offer.level;
  }
  if (!__any_sync(kAll, several)) return static_cast<int>(whole & kRowMask);
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) {
    const bool theirs = __shfl_xor_sync(kAll, mine ? 1 : 0, mask) != 0;
    const uint32_t other = __shfl_xor_sync(kAll, node, mask);
    if (theirs && (!mine || path_before(other, node, nodes))) node = other;
    mine |= theirs;
  }
  return parent_of(node);
}

// Siblings that follow each other into the tree, n the row of the first, at most `most`: those of row `owner` from its waiting child on, as
// long as their keys are below those of all other children that wait and of the first one's first child. They take rows side by side. Returns
// how many; if it is one, nothing has been done. level: where the siblings' level begins in the table.
template <int PLACES>
__device__ __forceinline__ int pop_siblings(Waiting<PLACES>& w, int n, int most, int owner, int level, const double* table, int width, uint32_t* nodes,
                                            double* surprisals) {
  const int lane = threadIdx.x % kWarp, i = (lane - n) & (kWarp - 1);  // this lane's sibling, and row n + i
  double above = 0.0;
  int at = 0;
  uint32_t others = kNothing;
#pragma unroll
  for (int p = 0; p < PLACES; ++p) {
    const bool keeps = owner == p * kWarp + lane;
    above = keeps ? w.node[p] : above, at = keeps ? w.at[p] : at, others = keeps ? others : min(others, w.key[p]);
  }
  above = __shfl_sync(kAll, above, owner), at = __shfl_sync(kAll, at, owner);
  others = __reduce_min_sync(kAll, others);
  const double sibling = __dadd_rn(above, table[min(at + i, level + width - 1)]), below = __dadd_rn(sibling, table[level + width]);
  const uint32_t bound = min(others, __shfl_sync(kAll, waiting_key(below, 0), n)) & ~kRowMask;
  const unsigned follow = __ballot_sync(kAll, waiting_key(sibling, 0) < bound);
  const int run = min((__ffs(static_cast<int>(~__funnelshift_r(follow, follow, n))) - 1) & (kWarp - 1), most);
  if (run <= 1) return 1;
  if (i < run) nodes[n + i] = packed_node(level, at + i - level, owner), surprisals[n + i] = sibling;
  const double left = __dadd_rn(above, table[at + run]);
#pragma unroll
  for (int p = 0; p < PLACES; ++p) {
    if (i < run && n + i == p * kWarp + lane) {
      w.node[p] = sibling, w.child[p] = below, w.level[p] = w.at[p] = level + width, w.key[p] = waiting_key(below, n + i);
    }
    if (owner == p * kWarp + lane) w.child[p] = left, w.at[p] += run, w.key[p] = waiting_key(left, owner);
    w.next[p] = table[w.at[p] + 1], w.first[p] = table[w.level[p] + width];
  }
  return run;
}

// By one warp. Returns the rows of the tree, at most `rows` and 32 * PLACES. table: surprisals [levels + 2, width], NaN where there is no
// token. nodes, surprisals: [rows]; entry 0 is the root's, whose node is not read. The code is small because every launch fetches it anew.
template <int PLACES>
__device__ __forceinline__ int grow_in_registers(const double* table, int width, int rows, uint32_t* nodes, double* surprisals) {
  const int lane = threadIdx.x % kWarp;
  Waiting<PLACES> w;
#pragma unroll
  for (int p = 0; p < PLACES; ++p) {
    w.node[p] = 0.0, w.child[p] = __longlong_as_double(-1), w.level[p] = w.at[p] = 0, w.key[p] = 0xffffffffu;
    w.next[p] = table[1], w.first[p] = table[width];
  }
  if (lane == 0) {
    surprisals[0] = 0.0;
    w.child[0] = table[0], w.key[0] = waiting_key(table[0], 0);
  }
  int n = 1, last = -1;
  while (n < rows) {
    uint32_t mine = w.key[0];
#pragma unroll
    for (int p = 1; p < PLACES; ++p) mine = min(mine, w.key[p]);
    const uint32_t least = __reduce_min_sync(kAll, mine);
    // While that is on its way, what follows each waiting child. What the table adds is on its way too, and the compiler would wait for it
    // before it starts the reduction, if the warp were not to meet here.
    __syncwarp();
    double sibling[PLACES], first[PLACES];
#pragma unroll
    for (int p = 0; p < PLACES; ++p) {
      sibling[p] = __dadd_rn(w.node[p], w.next[p]), first[p] = __dadd_rn(w.child[p], w.first[p]);
      asm volatile("" : "+d"(sibling[p]), "+d"(first[p]));  // here, and not where one lane needs them
    }
    Offer offer{w.key[0], w.child[0], first[0], w.level[0]};
#pragma unroll
    for (int p = 1; p < PLACES; ++p) {
      const bool less = w.key[p] < offer.key;
      offer.key = less ? w.key[p] : offer.key, offer.child = less ? w.child[p] : offer.child;
      offer.first = less ? first[p] : offer.first, offer.level = less ? w.level[p] : offer.level;
    }
    if (least >= kNothing) break;
    bool equal = false;
#pragma unroll
    for (int p = 0; p < PLACES; ++p) equal |= (w.key[p] ^ least) - 1u < kRowMask;
    int owner = static_cast<int>(least & kRowMask);
    double below = __shfl_sync(kAll, offer.first, owner), popped = __shfl_sync(kAll, offer.child, owner);
    int level = __shfl_sync(kAll, offer.level, owner);
    if (__any_sync(kAll, equal)) {
      owner = first_of_equals<PLACES>(w, first, least, nodes, offer);
      below = __shfl_sync(kAll, offer.first, owner), popped = __shfl_sync(kAll, offer.child, owner);
      level = __shfl_sync(kAll, offer.level, owner);
    }
    if (owner == last) {
      const int run = pop_siblings<PLACES>(w, n, rows - n, owner, level, table, width, nodes, surprisals);
      if (run > 1) {
        n += run;
        continue;
      }
    }
    last = owner;
    level += width;
#pragma unroll
    for (int p = 0; p < PLACES; ++p) {
      if (owner == p * kWarp + lane) {
        nodes[n] = packed_node(w.level[p], w.at[p] - w.level[p], owner);
        w.child[p] = sibling[p], w.at[p] += 1, w.key[p] = waiting_key(sibling[p], owner);
      }
    }
    if (lane == 0) surprisals[n] = popped;
#pragma unroll
    for (int p = 0; p < PLACES; ++p) {
      if (n == p * kWarp + lane) w.node[p] = popped, w.child[p] = below, w.level[p] = w.at[p] = level, w.key[p] = waiting_key(below, n);
      w.next[p] = table[w.at[p] + 1], w.first[p] = table[w.level[p] + width];
    }
    ++n;
  }
  __syncwarp();
  return n;
}

}  // namespace cuda
}  // namespace kdtree
