// Every functor of elementwise.h as a loop over dense spans, built for each instruction set.
#include "ops/elementwise.h"
#include "ops/isa.h"

namespace hilt::spans {
namespace {

template <class Op, class T> void run(const T* a, const T* b, const T* c, T* __restrict y, Index n, T p, T q) {
  if constexpr (Op::kInputs == 1)
    for (Index i = 0; i < n; ++i) y[i] = Op::f(a[i], T{}, T{}, p, q);
  else if constexpr (Op::kInputs == 2)
    for (Index i = 0; i < n; ++i) y[i] = Op::f(a[i], b[i], T{}, p, q);
  else
    for (Index i = 0; i < n; ++i) y[i] = Op::f(a[i], b[i], c[i], p, q);
}

}  // namespace

template <class Op, Isa I, class T> Span<T> span_of(CpuAt<I>) { return &run<Op, T>; }

/// Names every kernel once, which is what makes the compiler build them.
template <Isa I, class List> struct Built;
template <Isa I, class... Ops> struct Built<I, std::tuple<Ops...>> {
  static constexpr Span<float> (*narrow[])(CpuAt<I>) = {&span_of<Ops, I, float>...};
  static constexpr Span<double> (*wide[])(CpuAt<I>) = {&span_of<Ops, I, double>...};
};
template struct Built<kIsa, AllSpans>;

}  // namespace hilt::spans
