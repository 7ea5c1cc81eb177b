// y = x m / (1 - p), m = 1 with probability 1 - p.        dx = dy m / (1 - p)
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
  std::string_view name() const override { return "dropout"; }
  Tensor masked(const Tensor& in) const {
    const Tensor x = dense(in);
    Tensor y = empty_like(x);
    visit("dropout", x, [&]<class T>(auto where) {
      const T* const from = x.data<T>();
      T* const to = y.mutable_data<T>();
      if constexpr (is_cuda<decltype(where)>) kernels::dropout(where, from, to, 0, x.numel(), p, key.seed, key.stream);
      else parallel_for(x.numel(), kPiece, [&](Index begin, Index end) {
        kernels::dropout(where, from + begin, to + begin, begin, end - begin, p, key.seed, key.stream);
      });
    });
    return y;
  }
  Tensor forward(const Tensor& x) { return masked(x); }
  std::vector<Tensor> backward(const Tensor& dy) override { return {masked(dy)}; }
};

}  // namespace

Tensor dropout(const Tensor& x, double p, RandomKey key) {
  check(p >= 0 && p < 1, "dropout: p ", p, " must be in [0, 1)");
  check(bool(x) && is_floating(x.dtype()), "dropout: needs a tensor of floats, got ", x ? name_of(x.dtype()) : "an undefined one");
  Dropout fn;
  fn.p = p;
  fn.key = key;
  return apply(std::move(fn), x);
}

}  // namespace hilt
