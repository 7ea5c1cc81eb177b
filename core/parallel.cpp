// Threads run the pieces of a loop: ours, which share one job at a time, or the host's.
// Caller and workers take range after range; a caller that finds them busy does its job alone.
#include "core/parallel.h"
#include <sched.h>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hilt {
namespace {

constexpr int kMaxThreads = 256;
// A worker polls so often before it sleeps: about 30 microseconds, a little more than waking costs.
constexpr int kSpins = 2000;

int default_threads() {
  if (const char* text = std::getenv("HILT_THREADS")) {
    const int n = number_in<int>(text).value_or(0);
    check(n >= 1 && n <= kMaxThreads, "HILT_THREADS: '", text, "' must be 1..", kMaxThreads);
    return n;
  }
  cpu_set_t set;
  const int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  return n < 1 ? 1 : n < kMaxThreads ? n : kMaxThreads;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

thread_local bool inside = false;      // this thread is already running part of a job
thread_local int limit = kMaxThreads;  // of the ThreadLimits around

struct Job {
  const Index n, grain;
  const detail::RangeFn fn;
  void* const context;
  std::atomic<Index> next{0};
  std::atomic<int> workers{0};  // still inside
  std::atomic<bool> failed{false};
  std::exception_ptr error{};  // written once, by whoever set failed

  void work() noexcept {
    const bool outer = std::exchange(inside, true);
    for (;;) {
      const Index begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) break;
      try {
        fn(context, begin, begin + grain < n ? begin + grain : n);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
        next.store(n, std::memory_order_relaxed);
      }
    }
    inside = outer;
  }
};

class Workers {
 public:
  int threads() {
    const int n = threads_.load(std::memory_order_relaxed);
    if (n > 0) return n;
    int expected = 0;
    threads_.compare_exchange_strong(expected, default_threads());
    return threads_.load();
  }
  void set_threads(int n) { threads_.store(n); }
  void set_executor(Executor executor) {
    const std::lock_guard lock(mutex_);
    executor_ = executor ? std::make_shared<const Executor>(std::move(executor)) : nullptr;
    has_executor_ = executor_ != nullptr;
  }

  void run(Job& job) {
    const Index chunks = (job.n + job.grain - 1) / job.grain;
    int helpers = static_cast<int>(std::min<Index>(std::min(threads(), limit), chunks)) - 1;
    const std::shared_ptr<const Executor> executor = helpers > 0 && !inside ? host() : nullptr;
    std::unique_lock busy(busy_, std::defer_lock);
    if (helpers > 0 && !inside && !executor && busy.try_lock()) helpers = started(helpers);
    if (executor) {
      (*executor)(helpers + 1, [&](int) { job.work(); });
    } else if (helpers <= 0 || !busy) {
      job.work();
    } else {
      {
        const std::lock_guard lock(mutex_);
        job.workers.store(helpers, std::memory_order_relaxed);
        job_ = &job;
        open_ = helpers;
        generation_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
      job.work();
      {  // nobody may join late: the job lives on this stack
        const std::lock_guard lock(mutex_);
        job_ = nullptr;
        job.workers.fetch_sub(open_, std::memory_order_relaxed);
        open_ = 0;
      }
      for (int spin = 0; job.workers.load(std::memory_order_acquire) > 0; ++spin)
        spin < kSpins ? relax() : std::this_thread::yield();
    }
    if (job.failed) std::rethrow_exception(job.error);
  }

  ~Workers() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
  }

 private:
  std::shared_ptr<const Executor> host() {
    if (!has_executor_) return nullptr;
    const std::lock_guard lock(mutex_);
    return executor_;
  }
  /// How many helpers there are: fewer where the system has no room for a thread. Under busy_.
  int started(int helpers) try {
    while (static_cast<int>(workers_.size()) < helpers) workers_.emplace_back([this] { serve(); });
    return helpers;
  } catch (const std::exception&) { return static_cast<int>(workers_.size()); }

  void serve() {
    std::uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) relax();
      Job* job = nullptr;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        if (stop_) return;
        if (open_ > 0) --open_, job = job_;
      }
      if (!job) continue;
      job->work();
      job->workers.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<std::uint64_t> generation_{0};
  Job* job_ = nullptr;
  int open_ = 0;  // places left in the current job
  bool stop_ = false;
  std::atomic<int> threads_{0};
  std::shared_ptr<const Executor> executor_;  // under mutex_
  std::atomic<bool> has_executor_{false};
};

Workers& workers() {
  static Workers p;
  return p;
}

}  // namespace

int thread_count() { return std::min(workers().threads(), limit); }
void set_thread_count(int threads) {
  check(threads >= 1 && threads <= kMaxThreads, "set_thread_count: ", threads, " must be 1..", kMaxThreads);
  workers().set_threads(threads);
}

ThreadLimit::ThreadLimit(int threads) : before_(limit) {
  check(threads >= 1, "ThreadLimit: ", threads, " must be at least 1");
  limit = std::min(limit, threads);
}
ThreadLimit::~ThreadLimit() { limit = before_; }

void set_executor(Executor executor) { workers().set_executor(std::move(executor)); }

void detail::parallel_chunks(Index n, Index grain, RangeFn fn, void* context) {
  Job job{n, grain < 1 ? 1 : grain, fn, context};
  workers().run(job);
}

}  // namespace hilt
