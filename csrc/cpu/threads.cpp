// See threads.h. Workers sleep on a condition variable between runs and do not spin, so that processes sharing the
// processors do not slow each other down.
#include "threads.h"

#include <cstdlib>
#include <system_error>
#if defined(__linux__)
#include <sched.h>
#endif

namespace kdtree::cpu {
namespace {

constexpr double kSerialWork = 1 << 20;  // multiply-adds, some 30 us on one core: waking a thread costs about as much
constexpr int kMaxThreads = 256;

int positive(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  const long value = std::strtol(text, nullptr, 10);
  if (value < 1) return 0;
  return value < kMaxThreads ? static_cast<int>(value) : kMaxThreads;
}

}  // namespace

int default_threads() {
  if (const int n = positive("KDTREE_THREADS")) return n;
  if (const int n = positive("OMP_NUM_THREADS")) return n;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    const int n = CPU_COUNT(&set);
    if (n >= 1) return n < kMaxThreads ? n : kMaxThreads;
  }
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n < 1 ? 1 : static_cast<int>(n < kMaxThreads ? n : kMaxThreads);
}

Threads::Threads(int count) : count_(count < 1 ? 1 : count) {}

Threads::~Threads() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Threads::start() {
  try {
    while (static_cast<int>(workers_.size()) < count_ - 1) workers_.emplace_back([this] { loop(); });
  } catch (const std::system_error&) {
    // The system has no more threads to give; those that there are do the work.
  }
}

void Threads::drain(const std::function<void(int)>& task, int n) {
  for (int i = next_.fetch_add(1, std::memory_order_relaxed); i < n; i = next_.fetch_add(1, std::memory_order_relaxed)) task(i);
}

void Threads::loop() {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || (round_ != seen && task_ != nullptr); });
    if (stop_) return;
    seen = round_;
    const std::function<void(int)>& task = *task_;
    const int n = n_;
    ++active_;
    lock.unlock();
    drain(task, n);
    lock.lock();
    if (--active_ == 0) finished_.notify_one();
  }
}

void Threads::run(int n, double work, const std::function<void(int)>& task) {
  if (n <= 0) return;
  if (count_ == 1 || n == 1 || work < kSerialWork) {
    for (int i = 0; i < n; ++i) task(i);
    return;
  }
  start();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    task_ = &task;
    n_ = n;
    next_.store(0, std::memory_order_relaxed);
    ++round_;
  }
  wake_.notify_all();
  drain(task, n);
  std::unique_lock<std::mutex> lock(mutex_);
  task_ = nullptr;  // a worker that has not woken by now finds nothing to do
  finished_.wait(lock, [&] { return active_ == 0; });
}

}  // namespace kdtree::cpu
