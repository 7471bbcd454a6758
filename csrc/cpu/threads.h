// A small pool that runs independent tasks. It decides who computes a task, never what is computed.
#pragma once
#include <functional>
#include <memory>

namespace kdtree::cpu {

// Threads to use: KDTREE_THREADS, else OMP_NUM_THREADS, else the processors this process may run on. Never below 1.
int default_threads();

// A process that was forked off finds no thread of its parent's here and starts its own.
class Threads {
 public:
  explicit Threads(int count);  // the caller is one of them
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Calls task(i) for every i in [0, n), in any order and on any thread; returns when all are done. `work` is the number of
  // multiply-adds in all: little work is done by the caller alone, because waking a thread costs more. Tasks must not throw.
  void run(int n, double work, const std::function<void(int)>& task);

 private:
  class Pool;
  Pool& pool();
  void leave_parents();

  const int count_;
  std::unique_ptr<Pool> pool_;  // made by the first run that needs it
};

}  // namespace kdtree::cpu
