// Best-first growth of a tree of any size, by one thread with a heap in shared memory.
#pragma once
#include "tree.cuh"

namespace kdtree {
namespace cuda {

// A node that may join the tree: the rank-th token of the level below `parent`.
struct Candidate {
  double score;
  int32_t parent, rank;
};

// The tree under construction, in shared memory; row 0 is the root.
struct Growth {
  double* score;    // [budget + 1]
  Candidate* heap;  // [budget + 1]: a pop makes room for one of the two pushes that follow it
  int32_t* parent;  // [budget + 1]
  int32_t* rank;
  int32_t* depth;

  static __host__ __device__ size_t bytes(int budget) {
    return (static_cast<size_t>(budget) + 1) * (sizeof(double) + sizeof(Candidate) + 3 * sizeof(int32_t));
  }
  __device__ Growth(char* base, int budget) {
    score = reinterpret_cast<double*>(base);
    heap = reinterpret_cast<Candidate*>(score + budget + 1);
    parent = reinterpret_cast<int32_t*>(heap + budget + 1);
    rank = parent + budget + 1;
    depth = rank + budget + 1;
  }

  // Whether x's path of ranks is lexicographically before y's, a prefix before its extensions. Paths are walked upwards, so the
  // last difference seen is the first one from the root.
  __device__ bool path_before(const Candidate& x, const Candidate& y) const {
    int px = x.parent, py = y.parent, rx = x.rank, ry = y.rank;
    const int dx = depth[px], dy = depth[py];
    for (int d = dx; d > dy; --d) rx = rank[px], px = parent[px];
    for (int d = dy; d > dx; --d) ry = rank[py], py = parent[py];
    bool before = dx < dy;
    while (true) {
      if (rx != ry) before = rx < ry;
      if (px == py) return before;
      rx = rank[px], px = parent[px], ry = rank[py], py = parent[py];
    }
  }
  __device__ bool before(const Candidate& x, const Candidate& y) const {
    return x.score > y.score || (x.score == y.score && path_before(x, y));
  }

  __device__ void sift_up(int i, const Candidate& c) {
    while (i > 0 && before(c, heap[(i - 1) / 2])) heap[i] = heap[(i - 1) / 2], i = (i - 1) / 2;
    heap[i] = c;
  }
  __device__ void sift_down(int size, const Candidate& c) {
    int i = 0;
    while (true) {
      int child = 2 * i + 1;
      if (child >= size) break;
      if (child + 1 < size && before(heap[child + 1], heap[child])) ++child;
      if (!before(heap[child], c)) break;
      heap[i] = heap[child], i = child;
    }
    heap[i] = c;
  }
};

// By one thread. Returns the rows of the tree, the root included.
__device__ inline int grow_by_heap(const TreePlan& plan, Growth& g, int depths, int rows) {
  g.score[0] = 0.0, g.parent[0] = -1, g.rank[0] = 0, g.depth[0] = 0;
  const auto candidate = [&](int parent, int rank, Candidate& c) {
    const int level = g.depth[parent];
    if (level >= depths) return false;
    const double surprisal = plan.surprisal[level * (plan.best + 1) + rank];
    c = {__dsub_rn(g.score[parent], surprisal), parent, rank};
    return surprisal == surprisal;
  };
  int waiting = 0, n = 1;
  Candidate c;
  if (candidate(0, 0, c)) g.heap[waiting++] = c;
  while (waiting > 0 && n < rows) {
    const Candidate top = g.heap[0];
    const int row = n++;
    g.score[row] = top.score, g.parent[row] = top.parent, g.rank[row] = top.rank, g.depth[row] = g.depth[top.parent] + 1;
    // The sibling takes the place of what was popped; without one the last of the heap does.
    if (candidate(top.parent, top.rank + 1, c)) {
      g.sift_down(waiting, c);
    } else if (--waiting > 0) {
      c = g.heap[waiting];
      g.sift_down(waiting, c);
    }
    if (n < rows && candidate(row, 0, c)) g.sift_up(waiting, c), ++waiting;
  }
  return n;
}

}  // namespace cuda
}  // namespace kdtree
