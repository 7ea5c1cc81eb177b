#pragma once
#include "core/strided.h"
#include "ops/isa.h"

// For kernels that work along rows: included by files named *_cpu.cpp alone.

namespace hilt::kernels {
namespace {

constexpr Index kPiece = 1 << 14;  // elements worth a task

template <class F> [[gnu::always_inline]] inline void each_row(Index rows, Index cols, F f) {
  parallel_each(rows, cols > 0 ? kPiece / cols + 1 : kPiece, f);
}

// Sums and maxima over several vectors of lanes, combined in one fixed order.
template <class W> struct Lanes {
  static constexpr int kWidth = 4 * kLanes<W>;
  W at[kWidth];
  [[gnu::always_inline]] explicit Lanes(W start) {
    for (W& w : at) w = start;
  }
  template <class Term, class Join> [[gnu::always_inline]] W over(Index n, Term term, Join join) {
    Index i = 0;
    for (; i + kWidth <= n; i += kWidth)
      for (int l = 0; l < kWidth; ++l) at[l] = join(at[l], term(i + l));
    for (int l = 0; i < n; ++i, ++l) at[l] = join(at[l], term(i));
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) at[l] = join(at[l], at[l + half]);
    return at[0];
  }
};
template <class W, class Term> [[gnu::always_inline]] inline W sum_of(Index n, Term term) {
  return Lanes<W>(0).over(n, term, [](W a, W b) { return a + b; });
}
template <class W, class Term> [[gnu::always_inline]] inline W max_of(Index n, Term term) {
  return Lanes<W>(-__builtin_inff()).over(n, term, [](W a, W b) { return b > a ? b : a; });
}

}  // namespace
}  // namespace hilt::kernels
