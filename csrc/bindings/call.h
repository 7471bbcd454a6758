// Backends by handle, one call of an operation on one, and sequences of calls.
//
// Between sequence_begin and sequence_end calls are noted and not run; sequence_run runs what was noted as one step, so as a graph where
// there are graphs, and does not wait. The caller keeps the tensors of noted calls.
#pragma once
#include <functional>
#include <map>
#include <mutex>

#include "../bindings.h"
#include "../cpu/kernels.h"
#include "../model.h"

namespace kdtree {
namespace {

struct Sequence {
  std::vector<std::function<void(Backend&)>> calls;
  std::vector<Buffer> scratch;  // the last one is the largest
};

struct Opened {
  std::unique_ptr<Backend> backend;
  std::map<int64_t, Sequence> sequences;  // freed before the backend is
  int64_t noting = 0, next = 1;           // noting: the sequence that calls go to, 0 for none
};

std::mutex g_mutex;
std::map<int64_t, Opened> g_backends;
int64_t g_next = 1;

Opened& opened(int64_t handle) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_backends.find(handle);
  if (found == g_backends.end()) throw Error("RequestError", "the backend is closed");
  return found->second;
}

Backend& backend(int64_t handle) { return *opened(handle).backend; }

Sequence& sequence(Opened& to, int64_t number) {
  const auto found = to.sequences.find(number);
  if (found == to.sequences.end()) throw Error("RequestError", "sequence " + std::to_string(number) + ": there is none such");
  return found->second;
}

// One operation through its binding: run at once, and then everything launched before has ended; or noted.
class Call {
 public:
  Call(int64_t handle, Tensor state) : to_(opened(handle)), state_(std::move(state)) {}

  Backend& backend() const { return *to_.backend; }
  // Noted calls share scratch, as operations of a step do.
  void* scratch(size_t bytes) {
    if (to_.noting == 0) {
      own_ = Buffer(backend(), bytes, "scratch");
      return own_.get();
    }
    std::vector<Buffer>& made = sequence(to_, to_.noting).scratch;
    if (made.empty() || made.back().bytes() < bytes) made.emplace_back(backend(), bytes, "scratch");
    return made.back().get();
  }
  void run(const std::function<void(Backend&)>& operation) {
    if (to_.noting != 0) {
      sequence(to_, to_.noting).calls.push_back(operation);
      return;
    }
    operation(backend());
    int32_t first;
    backend().download(&first, state_.data_ptr(), sizeof first);
  }
  template <class Args>
  void run(void (Backend::*operation)(const Args&), const Args& a) {
    run([=](Backend& b) { (b.*operation)(a); });
  }

 private:
  Opened& to_;
  Tensor state_;
  Buffer own_;
};

int64_t sequence_begin(int64_t handle) {
  Opened& to = opened(handle);
  if (to.noting != 0) throw Error("RequestError", "sequence_begin: another sequence is being noted");
  to.sequences[to.next];
  return to.noting = to.next++;
}

void sequence_end(int64_t handle) { opened(handle).noting = 0; }

void sequence_run(int64_t handle, int64_t number) {
  Opened& to = opened(handle);
  const Sequence& noted = sequence(to, number);
  to.backend->step("sequence " + std::to_string(number), [&] {
    for (const auto& call : noted.calls) call(*to.backend);
  });
}

void sequence_drop(int64_t handle, int64_t number) {
  Opened& to = opened(handle);
  if (to.noting == number) to.noting = 0;
  to.backend->drop_graphs();
  to.sequences.erase(number);
}

// The address of the stream on which a backend runs, 0 for the CPU: for events around a sequence.
int64_t backend_stream(int64_t handle) {
  int64_t address = 0;
  backend(handle).outside("stream_asked", [&](void* stream) { address = reinterpret_cast<int64_t>(stream); });
  return address;
}

int64_t backend_open(std::string device, bool poison) {
  auto made = make_backend(device, poison);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_backends[g_next].backend = std::move(made);
  return g_next++;
}

void backend_close(int64_t handle) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_backends.erase(handle);
}

std::string backend_counters(int64_t handle) {
  std::string lines;
  for (const auto& [name, count] : backend(handle).counters()) lines += name + " " + std::to_string(count) + "\n";
  return lines;
}

// What is no operation.
constexpr Bound kBackends[] = {
    {"backend_open", "(str device, bool poison) -> int", boxed<backend_open>},
    {"backend_close", "(int backend) -> ()", boxed<backend_close>},
    {"backend_counters", "(int backend) -> str", boxed<backend_counters>},
    {"backend_stream", "(int backend) -> int", boxed<backend_stream>},
    {"isa_names", "() -> str", boxed<cpu::isa_names>},
    {"sequence_begin", "(int backend) -> int", boxed<sequence_begin>},
    {"sequence_end", "(int backend) -> ()", boxed<sequence_end>},
    {"sequence_run", "(int backend, int sequence) -> ()", boxed<sequence_run>},
    {"sequence_drop", "(int backend, int sequence) -> ()", boxed<sequence_drop>},
};

}  // namespace
}  // namespace kdtree
