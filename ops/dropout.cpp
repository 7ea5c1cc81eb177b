// y = x m / (1 - p), m = 1 with probability 1 - p.        dx = dy m / (1 - p) p is rounded to a
// multiple of 2^-16; the mask decides by 16 bits of Philox with 7 rounds, eight of a counter.
// The mask is a function of the key: drawn again in backward, never kept.
#include "core/parallel.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {

/// x under its mask; `rows` of the whole, where x is a part of it.
static Tensor masked(const Tensor& in, double p, RandomKey key, const std::vector<Index>& rows) {
  const Tensor x = dense(in);
  Tensor y = empty_like(x);
  visit("dropout", x, [&]<class T>(auto where) {
    const T* const from = x.data<T>();
    T* const to = y.mutable_data<T>();
    // Elements [0, n) of x from `at` on are elements [first, first + n) of the whole.
    const auto run = [&](Index at, Index first, Index n) {
      if constexpr (is_cuda<decltype(where)>) kernels::dropout(where, from + at, to + at, first, n, p, key);
      else
        parallel_for(n, kWorthATask, [&](Index begin, Index end) {
          kernels::dropout(where, from + at + begin, to + at + begin, first + begin, end - begin, p, key);
        });
    };
    if (rows.empty()) return run(0, 0, x.numel());
    const auto count = std::ssize(rows), columns = x.numel() / count;
    for (Index begin = 0, end = 1; begin < count; begin = end, ++end) {  // runs of neighbours
      while (end < count && rows[static_cast<std::size_t>(end)] == rows[static_cast<std::size_t>(end) - 1] + 1) ++end;
      run(begin * columns, rows[static_cast<std::size_t>(begin)] * columns, (end - begin) * columns);
    }
  });
  return y;
}

Tensor dropout(const Tensor& x, double p, RandomKey key, std::vector<Index> rows) {
  check(p >= 0 && p < 1, "dropout: p ", p, " must be in [0, 1)");
  check_floats("dropout", x);
  check(rows.empty() || x.numel() % std::ssize(rows) == 0, "dropout: ", rows.size(), " rows do not divide ", x.shape());
  const auto mask = [=, rows = std::move(rows)](const Tensor& of) { return masked(of, p, key, rows); };
  return apply_linear("dropout", x, mask, mask);
}

}  // namespace hilt
