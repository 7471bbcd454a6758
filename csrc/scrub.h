// Weights that change while a model runs: what a rank holds is summed when it is loaded and, piece by piece, over and over again.
//
// A rank whose weights went wrong gives every other rank the same wrong results, so that no comparison between ranks shows it; this
// does, and names the tensor. All of it comes round within kSeconds at a cost of bytes/kSeconds of the memory's bandwidth.
#pragma once
#include <vector>

#include "model.h"

namespace kdtree {

class Scrub {
 public:
  static constexpr double kSeconds = 10.0;

  Scrub(Backend& backend, const std::vector<ResidentWeight>& weights, Ranks ranks);

  // The next pieces, as many as the time since the last call asks for. RankDiverged naming rank and tensor if one has changed.
  void next(double seconds);
  void all();

 private:
  struct Piece {
    size_t weight, block, offset, words;  // offset in bytes into the block
    uint64_t sum;
  };
  std::vector<uint64_t> sums_from(size_t first, size_t count);  // of pieces, as they are
  void check(size_t first, size_t count);

  Backend& backend_;
  const std::vector<ResidentWeight>& weights_;
  const Ranks ranks_;
  Buffer sums_;
  std::vector<Piece> pieces_;
  size_t words_ = 0, at_ = 0;
  double waited_ = 0.0;  // seconds since the last look
};

}  // namespace kdtree
