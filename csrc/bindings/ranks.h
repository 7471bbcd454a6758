// What ranks do with what they exchange.
#pragma once
#include "arguments.h"
#include "call.h"

namespace kdtree {
namespace {

// windows: every rank's address.
void open_window(int64_t handle, int64_t rank, std::vector<int64_t> windows, int64_t bytes, double seconds) {
  backend(handle).open(window_of(rank, windows, bytes, seconds));
}

// src: u8 [ranks, bytes a rank], with an origin other than kGathered [1, bytes a rank]; a part each: dst u8 [rows, bytes], its offset in a rank's
// bytes, its rows for every row of the step.
void unshard(int64_t handle, Tensor src, std::vector<Tensor> dsts, std::vector<int64_t> offsets, std::vector<int64_t> per_row,
             int64_t max_rows, Tensor state, int64_t ranks, int64_t origin) {
  Call call(handle, state);
  need(!dsts.empty() && dsts.size() <= 2 && offsets.size() == dsts.size() && per_row.size() == dsts.size(), "dsts",
       "are not one or two with an offset and rows each");
  UnshardArgs a{};
  a.src = data<uint8_t>(src, "src");
  a.ranks = static_cast<int>(ranks), a.origin = static_cast<Origin>(origin);
  need(src.size(0) == (a.origin == Origin::kGathered ? ranks : 1), "src", "has not the contributions of its origin");
  a.rank_bytes = static_cast<size_t>(src.size(1));
  a.parts = static_cast<int>(dsts.size());
  for (size_t i = 0; i < dsts.size(); ++i) {
    const auto row_bytes = static_cast<size_t>(dsts[i].size(1)) / static_cast<size_t>(a.origin == Origin::kLead ? 1 : ranks);
    a.part[i] = {data<uint8_t>(dsts[i], "dst"), static_cast<size_t>(offsets[i]), row_bytes, static_cast<int>(per_row[i])};
  }
  a.max_rows = static_cast<int>(max_rows);
  a.n_rows = &step_state(state)->n_rows;
  need(a.origin == Origin::kGathered || call.backend().gathers(a), "origin", "is none from which this backend gathers");
  call.run(&Backend::unshard, a);
}

// values: i32 [rows, words], of which those that count are summed and then the first row once more; out: i32 [2], the sum's low and high half,
// added to.
void checksum(int64_t handle, Tensor out, Tensor values, Tensor state) {
  Call call(handle, state);
  const ChecksumArgs::Span rows = {data<int32_t>(values, "values"), static_cast<size_t>(values.size(1)), dim(values, 0), &step_state(state)->n_rows};
  const ChecksumArgs::Span first = {rows.data, rows.row_words, 1, nullptr};
  call.run(&Backend::checksum, {reinterpret_cast<uint64_t*>(sized<int32_t>(out, 2, "out")), 2, {rows, first}});
}

// Their signatures.
constexpr Bound kRanks[] = {
    {"unshard",
     "(int backend, Tensor src, Tensor[] dsts, int[] offsets, int[] per_row, int max_rows, Tensor state, int ranks, int origin) -> ()",
     boxed<unshard>},
    {"open_window", "(int backend, int rank, int[] windows, int bytes, float seconds) -> ()", boxed<open_window>},
    {"checksum", "(int backend, Tensor out, Tensor values, Tensor state) -> ()", boxed<checksum>},
};

}  // namespace
}  // namespace kdtree
