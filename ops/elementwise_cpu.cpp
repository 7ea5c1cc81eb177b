// Every functor of elementwise.h as a loop over dense spans, built for each instruction set.
#include "ops/elementwise.h"
#include "ops/isa.h"

namespace hilt::spans {
namespace {

template <class Op, class T> void run(const T* a, const T* b, const T* c, T* __restrict y, Index n, T p, T q) {
  using W = Arithmetic<Op, T>;
  const W u = static_cast<W>(p), v = static_cast<W>(q);
  if constexpr (Op::kInputs == 1)
    for (Index i = 0; i < n; ++i) y[i] = static_cast<T>(Op::f(static_cast<W>(a[i]), W{}, W{}, u, v));
  else if constexpr (Op::kInputs == 2)
    for (Index i = 0; i < n; ++i) y[i] = static_cast<T>(Op::f(static_cast<W>(a[i]), static_cast<W>(b[i]), W{}, u, v));
  else
    for (Index i = 0; i < n; ++i) y[i] = Op::f(a[i], b[i], c[i], p, q);
}

}  // namespace

template <class Op, Isa I, class T> Span<T> span_of(CpuAt<I>) {
  if constexpr (std::is_same_v<T, std::int64_t> && !kTakesWhole<Op>) return nullptr;
  else return &run<Op, T>;
}

/// Names every kernel once, which is what makes the compiler build them.
template <Isa I, class List> struct Built;
template <Isa I, class... Ops> struct Built<I, std::tuple<Ops...>> {
  static constexpr Span<float> (*narrow[])(CpuAt<I>) = {&span_of<Ops, I, float>...};
  static constexpr Span<double> (*wide[])(CpuAt<I>) = {&span_of<Ops, I, double>...};
  static constexpr Span<std::int64_t> (*whole[])(CpuAt<I>) = {&span_of<Ops, I, std::int64_t>...};
};
template struct Built<kIsa, AllSpans>;

}  // namespace hilt::spans
