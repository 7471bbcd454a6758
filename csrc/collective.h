// Ranks: devices that share one model, each with a part of every matrix, and what they exchange.
//
// Every product is shared out by its outputs, never over K: a rank computes some outputs whole, in the order that a single device
// uses, and the ranks then gather. Nothing is added across ranks, so the number of ranks changes no bit (docs/ranks.md).
#pragma once
#include "ops.h"

namespace kdtree {

struct Ranks {
  int rank = 0, count = 1;
  bool alone() const { return count == 1; }
  bool lead() const { return rank == 0; }  // takes the decisions: trees, choices, acceptance
};

// The transport, given from outside (engine/ranks/collective.py puts torch.distributed behind it). Both return 0, or anything else
// when the exchange failed; what is exchanged lies in the backend's memory, and the work goes on `stream` (null for the CPU).
struct Transport {
  using AllGather = int (*)(void* recv, const void* send, uint64_t bytes, void* stream);
  using Broadcast = int (*)(void* data, uint64_t bytes, void* stream);
  using Progress = void (*)();
  AllGather all_gather = nullptr;
  Broadcast broadcast = nullptr;
  Window window;                // where all ranks can reach each other's memory: what backend and size allow then goes through it,
  Progress progress = nullptr;  // and this is called in place of the two above
};

// Exchanges between the ranks, ordered with the operations of a backend. Every rank makes the same calls in the same order.
class Collective {
 public:
  Collective(Backend& backend, Ranks ranks, Transport transport) : backend_(backend), ranks_(ranks), transport_(transport) {
    if (transport_.window.count > 0) backend_.open(transport_.window);
  }

  const Ranks& ranks() const { return ranks_; }

  // Whether the operation that `a` describes is to make the exchange. Every rank that is told so makes it.
  bool within(const UnshardArgs& a) {
    if (!backend_.gathers(a)) return false;
    if (transport_.progress != nullptr) transport_.progress();
    return true;
  }

  // recv: [ranks, bytes], rank r's `send` at place r. RankError if the exchange failed.
  void all_gather(void* recv, const void* send, size_t bytes) {
    const UnshardArgs a = whole(recv, send, bytes, Origin::kOwn);
    if (within(a)) return backend_.unshard(a);
    backend_.outside("all_gather", [&](void* stream) { check(transport_.all_gather(recv, send, bytes, stream), "all_gather", bytes); });
  }

  // data: the lead's, in every rank's memory afterwards.
  void broadcast(void* data, size_t bytes) {
    const UnshardArgs a = whole(data, data, bytes, Origin::kLead);
    if (within(a)) return backend_.unshard(a);
    backend_.outside("broadcast", [&](void* stream) { check(transport_.broadcast(data, bytes, stream), "broadcast", bytes); });
  }

 private:
  UnshardArgs whole(void* to, const void* from, size_t bytes, Origin origin) const {
    return {from, bytes, ranks_.count, {{to, 0, bytes, 1}, {}}, 1, 1, nullptr, origin};
  }
  void check(int status, const char* what, size_t bytes) const {
    if (status == 0) return;
    throw Error("RankError", "rank " + std::to_string(ranks_.rank) + " of " + std::to_string(ranks_.count) + ": " + what + " of " +
                                 std::to_string(bytes) + " bytes failed: another rank is gone, or did not answer in time");
  }
  Backend& backend_;
  const Ranks ranks_;
  const Transport transport_;
};

}  // namespace kdtree
