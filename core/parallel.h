#pragma once
#include <type_traits>
#include "shape.h"

namespace [[gnu::visibility("default")]] hilt {

/// Threads that kernels may use: HILT_THREADS, else the processors this process may run on.
int thread_count();
/// Takes effect for the next kernel. Results never depend on it.
void set_thread_count(int threads);

namespace detail {
using RangeFn = void (*)(void* context, Index begin, Index end);
void parallel_chunks(Index n, Index grain, RangeFn fn, void* context);
}  // namespace detail

/// Calls f(begin, end) for consecutive ranges of `grain` elements that cover [0, n), on several
/// threads. The ranges depend on n and grain alone, so a sum built per range is the same for any
/// number of threads. Inside another parallel_for it runs on the calling thread. The first
/// exception thrown is rethrown here.
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
