// What works element by element over dense spans: the functors of elementwise.h, dropout from
// counters, AdamW and sums of squares.
#include "ops/elementwise.h"
#include "ops/isa.h"
#include "ops/kernels.h"

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

namespace hilt::kernels {

// From counters: element i of a stream is the same on any thread and any instruction set.
template <class T, class At> void dropout(At, const T* x, T* y, Index first, Index n, double p, RandomKey key) {
  using W = wide_t<T>;
  constexpr Index kBlock = 64;  // counters at a time: sixteen vectors' worth of independent rounds
  const std::uint32_t rate = drop_rate(p);
  const W scale = static_cast<W>(keep_scale(rate));
  for (Index i = 0; i < n;) {
    std::uint32_t words[kBlock * 4];
    const Index counter = (first + i) / 8;
    for (Index c = 0; c < kBlock; ++c) {
      const auto bits = drop_words(counter + c, key);
      for (Index k = 0; k < 4; ++k) words[c * 4 + k] = bits[static_cast<std::size_t>(k)];
    }
    const Index skip = (first + i) % 8, count = n - i < kBlock * 8 - skip ? n - i : kBlock * 8 - skip;
    for (Index j = 0; j < count; ++j) {
      const std::uint32_t bits = words[(skip + j) / 2] >> (skip + j) % 2 * 16 & 0xffff;
      y[i + j] = static_cast<T>(bits >= rate ? static_cast<W>(x[i + j]) * scale : W{0});
    }
    i += count;
  }
}

template <class T, class At>
void adamw(At, const AdamWStep& told, T* __restrict w, const T* __restrict dw, wide_t<T>* __restrict m,
           wide_t<T>* __restrict v, wide_t<T>* __restrict exact, Index n) {
  using W = wide_t<T>;
  const AdamWStep s = told;  // which no store below can reach
  const W shrink = static_cast<W>(s.shrink), scale = static_cast<W>(s.scale);
  const auto next = [=](W weight, Index i) {
    return adamw_next(s, weight, static_cast<W>(dw[i]) * scale, shrink, m[i], v[i]);
  };
  if (exact)
    for (Index i = 0; i < n; ++i) w[i] = static_cast<T>(exact[i] = next(exact[i], i));
  else
    for (Index i = 0; i < n; ++i) w[i] = static_cast<T>(next(static_cast<W>(w[i]), i));
}

template <class T, class At> double sum_of_squares(At, const T* x, Index n) {
  constexpr int kWidth = 4 * kLanes<double>;
  double part[kWidth] = {};
  Index i = 0;
  for (; i + kWidth <= n; i += kWidth)
    for (int l = 0; l < kWidth; ++l) {
      const auto v = static_cast<double>(static_cast<wide_t<T>>(x[i + l]));
      part[l] += v * v;
    }
  for (int l = 0; i < n; ++i, ++l) {
    const auto v = static_cast<double>(static_cast<wide_t<T>>(x[i]));
    part[l] += v * v;
  }
  double total = 0;
  for (double p : part) total += p;
  return total;
}

HILT_CPU_KERNEL(adamw)
HILT_CPU_KERNEL(sum_of_squares)
HILT_CPU_KERNEL(dropout)

}  // namespace hilt::kernels
