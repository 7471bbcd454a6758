// A small pool that runs independent tasks. It decides who computes a task, never what is computed.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kdtree::cpu {

// Threads to use: KDTREE_THREADS, else OMP_NUM_THREADS, else the processors this process may run on. Never below 1.
int default_threads();

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
  void start();
  void loop();
  void drain(const std::function<void(int)>& task, int n);

  const int count_;
  std::vector<std::thread> workers_;  // started by the first run that needs them
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  const std::function<void(int)>* task_ = nullptr;  // guarded by mutex_, as all that follows but next_
  int n_ = 0;
  double work_ = 0.0;
  bool stop_ = false;
  // Written under mutex_, too, but read without it by who waits a moment before sleeping.
  std::atomic<int> active_{0};  // workers that have not yet left the current run
  std::atomic<uint64_t> round_{0};
  std::atomic<int> next_{0};
};

}  // namespace kdtree::cpu
