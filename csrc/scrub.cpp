// See scrub.h.
#include "scrub.h"

#include <algorithm>

namespace kdtree {
namespace {

constexpr size_t kPiece = 1 << 22;  // words: 16 MB, four microseconds of a GPU and ten milliseconds of a CPU core
constexpr size_t kLeast = 1 << 14;  // words at a time, so that small models come round soon
constexpr double kEvery = 0.05;     // seconds between looks: each costs the host two waits for the device

}  // namespace

Scrub::Scrub(Backend& backend, const std::vector<ResidentWeight>& weights, Ranks ranks)
    : backend_(backend), weights_(weights), ranks_(ranks), sum_(backend, sizeof(uint64_t), "scrub") {
  for (size_t w = 0; w < weights.size(); ++w) {
    const bool packed = weights[w].resident.pitch == weights[w].bytes;  // then blocks need not begin at whole words
    const size_t blocks = packed ? 1 : weights[w].count, bytes = packed ? weights[w].bytes * weights[w].count : weights[w].bytes;
    for (size_t block = 0; block < blocks; ++block) {
      for (size_t first = 0; first < bytes / 4; first += kPiece) {
        Piece piece{w, block, 4 * first, std::min(kPiece, bytes / 4 - first), 0};
        piece.sum = sum_of(piece);
        words_ += piece.words;
        pieces_.push_back(piece);
      }
    }
  }
}

uint64_t Scrub::sum_of(const Piece& piece) {
  const Resident& w = weights_[piece.weight].resident;
  backend_.fill_zero(sum_.get(), sizeof(uint64_t));
  const unsigned char* words = static_cast<const unsigned char*>(w.data) + piece.block * w.pitch + piece.offset;
  backend_.checksum({static_cast<uint64_t*>(sum_.get()), {{words, piece.words, 1, nullptr}}, 1});
  uint64_t sum = 0;
  backend_.download(&sum, sum_.get(), sizeof sum);
  return sum;
}

void Scrub::check(const Piece& piece) {
  if (sum_of(piece) == piece.sum) return;
  throw Error("RankDiverged", "rank " + std::to_string(ranks_.rank) + " of " + std::to_string(ranks_.count) + ": " +
                                  weights_[piece.weight].name + " is not what was loaded: a memory fault, or something wrote into it");
}

void Scrub::next(double seconds) {
  if (pieces_.empty() || (waited_ += seconds) < kEvery) return;
  const double share = std::min(waited_ / kSeconds, 1.0);
  waited_ = 0.0;
  const size_t due = std::min(words_, std::max(kLeast, static_cast<size_t>(share * static_cast<double>(words_))));
  for (size_t done = 0; done < due; at_ = (at_ + 1) % pieces_.size()) {
    check(pieces_[at_]);
    done += pieces_[at_].words;
  }
}

void Scrub::all() {
  for (const Piece& piece : pieces_) check(piece);
}

}  // namespace kdtree
