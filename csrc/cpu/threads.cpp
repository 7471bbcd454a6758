// See threads.h. A thread that has nothing to do sleeps. After much work it first looks on for about as long as waking it would
// take, offering the processor to others: the next operation of a step follows sooner, and processes that share the processors do
// not slow each other down.
#include "threads.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../error.h"
#if defined(__linux__)
#include <sched.h>
#endif

namespace kdtree::cpu {
namespace {

constexpr double kSerialWork = 1 << 20;  // multiply-adds, some 30 us on one core: waking a thread costs about as much
constexpr int kMaxThreads = 256;
// A thread takes consecutive tasks, because their operands follow each other in memory: of what is left, one part in so many times
// the threads, so that those that start late or are held up find work to the end.
constexpr int kShares = 4;
constexpr double kMuchWork = 8 * kSerialWork;     // of which the time of looking on is a small part
constexpr std::chrono::microseconds kLookOn{50};  // an idle processor of a virtual machine takes some 30 to wake

template <class F>
void look_on(double work, const F& over) {
  if (work < kMuchWork) return;
  const auto end = std::chrono::steady_clock::now() + kLookOn;
  while (!over() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

int at_most(long n) { return n < kMaxThreads ? static_cast<int>(n) : kMaxThreads; }

// The number that a variable holds, 0 where it is not set. `strict`: ours, whose mistakes are told; others have values of more kinds.
int positive(const char* name, bool strict) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (value >= 1 && (*end == '\0' || !strict)) return at_most(value);
  if (strict) throw Error("DeviceError", std::string(name) + "=" + text + ": is no number of threads; set one from 1 on, or unset it");
  return 0;
}

}  // namespace

int default_threads() {
  if (const int n = positive("KDTREE_THREADS", true)) return n;
  if (const int n = positive("OMP_NUM_THREADS", false)) return n;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    const int n = CPU_COUNT(&set);
    if (n >= 1) return at_most(n);
  }
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n < 1 ? 1 : at_most(n);
}

class Threads::Pool {
 public:
  explicit Pool(int count) : count_(count) {
    try {
      while (static_cast<int>(workers_.size()) < count_ - 1) workers_.emplace_back([this] { loop(); });
    } catch (const std::exception&) {
      // The system has no more threads to give; those that there are do the work.
    }
  }

  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  bool of_this_process() const { return process_ == getpid(); }

  void run(int n, double work, const std::function<void(int)>& task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      task_ = &task;
      n_ = n;
      work_ = work;
      next_.store(0, std::memory_order_relaxed);
      ++round_;
    }
    wake_.notify_all();
    drain(task, n);
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = nullptr;  // a worker that has not woken by now finds nothing to do
    const auto over = [&] { return active_ == 0; };
    if (over()) return;
    lock.unlock();
    look_on(work, over);
    lock.lock();
    finished_.wait(lock, over);
  }

 private:
  void drain(const std::function<void(int)>& task, int n) {
    int begin = next_.load(std::memory_order_relaxed);
    while (begin < n) {
      const int share = (n - begin) / (kShares * count_), end = begin + (share > 1 ? share : 1);
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      for (int i = begin; i < end; ++i) task(i);
      begin = next_.load(std::memory_order_relaxed);
    }
  }

  void loop() {
    uint64_t seen = 0;
    double work = 0.0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      lock.unlock();
      look_on(work, [&] { return round_ != seen; });
      lock.lock();
      wake_.wait(lock, [&] { return stop_ || (round_ != seen && task_ != nullptr); });
      if (stop_) return;
      seen = round_;
      const std::function<void(int)>& task = *task_;
      const int n = n_;
      work = work_;
      ++active_;
      lock.unlock();
      drain(task, n);
      lock.lock();
      if (--active_ == 0) finished_.notify_one();
    }
  }

  const int count_;  // the caller included
  const pid_t process_ = getpid();
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
  std::vector<std::thread> workers_;
};

Threads::Threads(int count) : count_(count < 1 ? 1 : count) {}

Threads::~Threads() { leave_parents(); }

// In a process that was forked off: to end the parent's pool would be to wait for threads that are not here.
void Threads::leave_parents() {
  if (pool_ != nullptr && !pool_->of_this_process()) static_cast<void>(pool_.release());
}

Threads::Pool& Threads::pool() {
  leave_parents();
  if (pool_ == nullptr) pool_ = std::make_unique<Pool>(count_);
  return *pool_;
}

void Threads::run(int n, double work, const std::function<void(int)>& task) {
  if (n <= 0) return;
  if (count_ == 1 || n == 1 || work < kSerialWork) {
    for (int i = 0; i < n; ++i) task(i);
    return;
  }
  pool().run(n, work, task);
}

}  // namespace kdtree::cpu
