#pragma once
#include <functional>
#include <type_traits>
#include "shape.h"

namespace [[gnu::visibility("default")]] hilt {

/// Threads that kernels called from here may use: HILT_THREADS, else the processors this process
/// may run on, or less by a ThreadLimit. Results never depend on it.
int thread_count();
void set_thread_count(int threads);  // of the process; takes effect for the next kernel
/// While one lives, kernels that this thread calls use at most so many threads, itself among them.
class ThreadLimit {
 public:
  explicit ThreadLimit(int threads);  // at least 1; throws Code::usage below
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  int before_;
};

/// Calls task(0) .. task(n - 1) once each, on any threads, and returns when all of them have
/// returned: a thread pool of the host, say. Tasks throw nothing and wait for nothing.
using Executor = std::function<void(int n, const std::function<void(int)>& task)>;
/// From the next kernel on, threads are had from there and none is started; an empty one ends that.
void set_executor(Executor executor);

namespace detail {
using RangeFn = void (*)(void* context, Index begin, Index end);
void parallel_chunks(Index n, Index grain, RangeFn fn, void* context);
}  // namespace detail

/// Calls f(begin, end) for consecutive ranges of `grain` elements that cover [0, n), on several
/// threads. They depend on n and grain alone, so a sum built per range does too. Inside another
/// parallel_for it runs on the calling thread. The first exception thrown is rethrown here.
template <class F> void parallel_for(Index n, Index grain, F&& f) {
  using Fn = std::remove_reference_t<F>;
  if (n <= grain) {
    if (n > 0) f(Index{0}, n);
    return;
  }
  detail::parallel_chunks(
      n, grain, [](void* context, Index begin, Index end) { (*static_cast<Fn*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace hilt
