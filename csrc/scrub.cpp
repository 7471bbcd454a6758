// See scrub.h.
#include "scrub.h"

#include <algorithm>

namespace kdtree {
namespace {

constexpr size_t kPiece = 1 << 22;  // words: 16 MB, four microseconds of a GPU and ten milliseconds of a CPU core
constexpr size_t kLeast = 1 << 14;  // words at a time, so that small models come round soon
constexpr double kEvery = 0.05;     // seconds between looks: each costs the host a wait for the device
constexpr size_t kTogether = 64;    // pieces that a wait is for

}  // namespace

Scrub::Scrub(Backend& backend, const std::vector<ResidentWeight>& weights, Ranks ranks)
    : backend_(backend), weights_(weights), ranks_(ranks), sums_(backend, kTogether * sizeof(uint64_t), "scrub") {
  for (size_t w = 0; w < weights.size(); ++w) {
    const bool packed = weights[w].resident.pitch == weights[w].bytes;  // then blocks need not begin at whole words
    const size_t blocks = packed ? 1 : weights[w].count, bytes = packed ? weights[w].bytes * weights[w].count : weights[w].bytes;
    for (size_t block = 0; block < blocks; ++block) {
      for (size_t first = 0; first < bytes / 4; first += kPiece) {
        pieces_.push_back({w, block, 4 * first, std::min(kPiece, bytes / 4 - first), 0});
        words_ += pieces_.back().words;
      }
    }
  }
  for (size_t at = 0; at < pieces_.size(); at += kTogether) {
    const std::vector<uint64_t> sums = sums_from(at, std::min(kTogether, pieces_.size() - at));
    for (size_t i = 0; i < sums.size(); ++i) pieces_[at + i].sum = sums[i];
  }
}

std::vector<uint64_t> Scrub::sums_from(size_t first, size_t count) {
  auto* to = static_cast<uint64_t*>(sums_.get());
  backend_.fill_zero(to, count * sizeof *to);
  for (size_t i = 0; i < count; ++i) {
    const Piece& piece = pieces_[first + i];
    const Resident& w = weights_[piece.weight].resident;
    const unsigned char* words = static_cast<const unsigned char*>(w.data) + piece.block * w.pitch + piece.offset;
    backend_.checksum({to + i, 1, {{words, piece.words, 1, nullptr}}});
  }
  std::vector<uint64_t> sums(count);
  backend_.download(sums.data(), to, count * sizeof *to);
  return sums;
}

void Scrub::check(size_t first, size_t count) {
  const std::vector<uint64_t> sums = sums_from(first, count);
  for (size_t i = 0; i < count; ++i) {
    if (sums[i] == pieces_[first + i].sum) continue;
    throw Error("RankDiverged", "rank " + std::to_string(ranks_.rank) + " of " + std::to_string(ranks_.count) + ": " +
                                    weights_[pieces_[first + i].weight].name + " is not what was loaded: a memory fault, or something wrote into it");
  }
}

void Scrub::next(double seconds) {
  if (pieces_.empty() || (waited_ += seconds) < kEvery) return;
  const double share = std::min(waited_ / kSeconds, 1.0);
  waited_ = 0.0;
  const size_t due = std::min(words_, std::max(kLeast, static_cast<size_t>(share * static_cast<double>(words_))));
  for (size_t done = 0; done < due;) {
    size_t count = 0;
    while (count < kTogether && at_ + count < pieces_.size() && done < due) done += pieces_[at_ + count++].words;
    check(at_, count);
    at_ = (at_ + count) % pieces_.size();
  }
}

void Scrub::all() {
  for (size_t at = 0; at < pieces_.size(); at += kTogether) check(at, std::min(kTogether, pieces_.size() - at));
}

}  // namespace kdtree
