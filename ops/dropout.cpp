// y = x m / (1 - p), m = 1 with probability 1 - p.        dx = dy m / (1 - p) p is rounded to a
// multiple of 2^-16; the mask decides by 16 bits of Philox with 7 rounds, eight of a counter.
// The mask is a function of the key: drawn again in backward, never kept.
#include "core/parallel.h"
#include "core/tape.h"
#include "ops/helpers.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr Index kPiece = 1 << 14;

struct Dropout final : Function {
  double p = 0;
  RandomKey key;
  std::vector<Index> rows;  // of the whole, where x is a part of it
  std::string_view name() const override { return "dropout"; }
  Tensor masked(const Tensor& in) const {
    const Tensor x = dense(in);
    Tensor y = empty_like(x);
    visit("dropout", x, [&]<class T>(auto where) {
      const T* const from = x.data<T>();
      T* const to = y.mutable_data<T>();
      // Elements [0, n) of x from `at` on are elements [first, first + n) of the whole.
      const auto run = [&](Index at, Index first, Index n) {
        if constexpr (is_cuda<decltype(where)>) kernels::dropout(where, from + at, to + at, first, n, p, key);
        else
          parallel_for(n, kPiece, [&](Index begin, Index end) {
            kernels::dropout(where, from + at + begin, to + at + begin, first + begin, end - begin, p, key.seed,
                             key.stream);
          });
      };
      if (rows.empty()) return run(0, 0, x.numel());
      const auto count = static_cast<Index>(rows.size()), columns = x.numel() / count;
      for (Index begin = 0, end = 1; begin < count; begin = end, ++end) {  // runs of neighbours
        while (end < count && rows[static_cast<std::size_t>(end)] == rows[static_cast<std::size_t>(end) - 1] + 1) ++end;
        run(begin * columns, rows[static_cast<std::size_t>(begin)] * columns, (end - begin) * columns);
      }
    });
    return y;
  }
  Tensor forward(const Tensor& x) { return masked(x); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {masked(dy)}; }
};

}  // namespace

Tensor dropout(const Tensor& x, double p, RandomKey key, std::vector<Index> rows) {
  check(p >= 0 && p < 1, "dropout: p ", p, " must be in [0, 1)");
  check(bool(x) && is_floating(x.dtype()), "dropout: needs a tensor of floats, got ",
        x ? name_of(x.dtype()) : "an undefined one");
  check(rows.empty() || x.numel() % static_cast<Index>(rows.size()) == 0, "dropout: ", rows.size(),
        " rows do not divide ", x.shape());
  Dropout fn;
  fn.rows = std::move(rows);
  fn.p = p;
  fn.key = key;
  return apply(std::move(fn), x);
}

}  // namespace hilt
