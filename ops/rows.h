#pragma once
#include <tuple>
#include "core/dispatch.h"
#include "ops/math.h"

// The ops that reduce each row of dense [rows, cols] and write something for it: one body for the
// CPU (rows_cpu.cpp) and GPUs (rows.cu), called once a row. A row computes in the wide type:
//      row.sum(f, x, ..)       the sum of f(x[i], ..) over the row, and row.max(x) its maximum
//      row.map(to, f, x, ..)   to[i] = f(x[i], ..)
// On a GPU many threads share a row: one of them leads, and each element is owned by one.

namespace hilt::kernels {

#ifdef __CUDACC__
#define HILT_ROW_CODE __device__
#else
#define HILT_ROW_CODE [[gnu::always_inline]]
#endif

/// op for each of its rows; `name` is whose they are, for messages.
template <class Op, class At> void along_rows(At, const char* name, const Op& op);

/// What every op has, those of one input have, and their gradients. in_packs(): what a GPU may read
/// or write several elements at a time, where all of it is aligned.
template <class T> struct RowOp {
  using Element = T;
  Index rows, cols;
};
template <class T> struct RowForward : RowOp<T> {
  const T* x;
  T* y;
  auto in_packs() const { return std::tuple(x, y); }
};
template <class T> struct RowBackward : RowOp<T> {
  const T *kept, *dy;  // kept: x or y
  T* dx;
  auto in_packs() const { return std::tuple(kept, dy, dx); }
};

// ---- the softmax family -------------------------------------------------------------------------
/// log sum e^x of a row as shift + rest, apart for digits. -inf: of -inf or none; NaN: has one.
template <class W> struct RowLse { W shift, rest; };
template <class Row, class T> HILT_ROW_CODE inline auto row_lse(const Row& row, const T* x) {
  using W = wide_t<T>;
  const W top = row.max(x);
  const W shift = top - top == 0 ? top : W{0};  // a row of -inf, or one with +inf, keeps its meaning
  return RowLse<W>{shift, math::log(row.sum([=](W v) { return math::exp(v - shift); }, x))};
}

template <class T> struct Softmax : RowForward<T> {
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T* const in = row.of(this->x);
    T* const out = row.of(this->y);
    const W top = row.max(in);
    const auto raised = [=](W v) { return math::exp(v - top); };
    if constexpr (Row::kRereads && std::is_same_v<T, W>) {  // e^x waits in y for its sum
      row.map(out, raised, in);
      const W scale = W{1} / row.sum([](W v) { return v; }, out);
      row.map(
          out, [=](W v) { return v * scale; }, out);
    } else {
      const W scale = W{1} / row.sum(raised, in);
      row.map(
          out, [=](W v) { return raised(v) * scale; }, in);
    }
  }
};
template <class T> struct SoftmaxBackward : RowBackward<T> {  // keeps y
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T *const from = row.of(this->kept), *const slope = row.of(this->dy);
    const W dot = row.sum([](W p, W g) { return p * g; }, from, slope);
    row.map(
        row.of(this->dx), [=](W p, W g) { return p * (g - dot); }, from, slope);
  }
};

template <class T> struct LogSoftmax : RowForward<T> {
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const RowLse<W> lse = row_lse(row, row.of(this->x));
    row.map(
        row.of(this->y), [=](W v) { return (v - lse.shift) - lse.rest; }, row.of(this->x));
  }
};
template <class T> struct LogSoftmaxBackward : RowBackward<T> {  // keeps y
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T* const slope = row.of(this->dy);
    const W total = row.sum([](W g) { return g; }, slope);
    row.map(
        row.of(this->dx), [=](W v, W g) { return g - math::exp(v) * total; }, row.of(this->kept), slope);
  }
};

template <class T> struct LogSumExp : RowForward<T> {  // y: [rows], and dy
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    const auto lse = row_lse(row, row.of(this->x));
    if (row.leads()) this->y[row.index] = static_cast<T>(lse.shift + lse.rest);
  }
};
template <class T> struct LogSumExpBackward : RowBackward<T> {  // keeps x
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T* const from = row.of(this->kept);
    const RowLse<W> lse = row_lse(row, from);
    const W g = static_cast<W>(this->dy[row.index]);
    row.map(
        row.of(this->dx), [=](W v) { return g * math::exp((v - lse.shift) - lse.rest); }, from);
  }
};

// ---- norms --------------------------------------------------------------------------------------
/// y = (x - mean) rstd w + b; without `mean` the root mean square, y = x rstd w, which has no b.
template <class T> struct Norm : RowOp<T> {
  const T *x, *w, *b;
  T* y;
  wide_t<T>*mean, *rstd;  // [rows]
  double epsilon;
  auto in_packs() const { return std::tuple(x, w, b, y); }
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T* const in = row.of(x);
    const W n = static_cast<W>(row.cols);
    const W center = mean ? row.sum([](W v) { return v; }, in) / n : W{0};
    const W square = row.sum([=](W v) { return (v - center) * (v - center); }, in) / n;
    const W scale = W{1} / std::sqrt(square + static_cast<W>(epsilon));
    if (b)
      row.map(
          row.of(y), [=](W v, W slope, W level) { return (v - center) * scale * slope + level; }, in, w, b);
    else
      row.map(
          row.of(y), [=](W v, W slope) { return (v - center) * scale * slope; }, in, w);
    if (!row.leads()) return;
    if (mean) mean[row.index] = center;
    rstd[row.index] = scale;
  }
};
template <class T> struct NormBackward : RowOp<T> {
  const T *x, *w;
  const wide_t<T>*mean, *rstd;
  const T* dy;
  T* dx;  // may be null, for who asks for dw and db alone
  auto in_packs() const { return std::tuple(x, w, dy, dx); }
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T *const in = row.of(x), *const g = row.of(dy);
    const W center = mean ? mean[row.index] : W{0}, scale = rstd[row.index], n = static_cast<W>(row.cols);
    const auto hat = [=](W v) { return (v - center) * scale; };
    const auto slope = [](W d, W weight) { return Row::product(d, weight); };  // of the loss along hat
    const W along = row.sum([=](W v, W d, W weight) { return slope(d, weight) * hat(v); }, in, g, w) / n;
    const W level = mean ? row.sum(slope, g, w) / n : W{0};
    row.map(
        row.of(dx), [=](W v, W d, W weight) { return scale * (slope(d, weight) - level - hat(v) * along); }, in, g, w);
  }
};

// ---- cross-entropy ------------------------------------------------------------------------------
/// What each row of logits loses: log sum e^x less the target's logit. NaN where there is no such
/// target, and nothing where it is `ignore`.
template <class T> struct CrossEntropy : RowOp<T> {
  const T* x;
  const std::int64_t* target;
  Index ignore;
  wide_t<T>* lse;
  double* loss;
  auto in_packs() const { return std::tuple(x); }
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T* const in = row.of(x);
    const RowLse<W> parts = row_lse(row, in);
    if (!row.leads()) return;
    const Index t = target[row.index];
    const W l = parts.shift + parts.rest;
    lse[row.index] = l;
    loss[row.index] = t == ignore              ? 0.0
                      : t >= 0 && t < row.cols ? static_cast<double>(l) - static_cast<double>(static_cast<W>(in[t]))
                                               : std::numeric_limits<double>::quiet_NaN();
  }
};
template <class T> struct CrossEntropyBackward : RowOp<T> {
  const T* x;
  const std::int64_t* target;
  Index ignore;
  const wide_t<T>*lse, *dy, *share;  // one dy, of which each target that counts has this share
  T* dx;
  auto in_packs() const { return std::tuple(x, dx); }
  template <class Row> HILT_ROW_CODE void operator()(const Row& row) const {
    using W = wide_t<T>;
    const T* const in = row.of(x);
    T* const out = row.of(dx);
    const Index t = target[row.index];
    const W scale = t == ignore ? W{0} : *dy * *share, l = lse[row.index];
    if (scale == 0)
      return row.map(
          out, [](W) { return W{0}; }, in);
    row.map(
        out, [=](W v) { return scale * math::exp(v - l); }, in);
    if (t >= 0 && t < row.cols && row.owns(t))
      out[t] = static_cast<T>(scale * (math::exp(static_cast<W>(in[t]) - l) - W{1}));
  }
};

/// All of them, for the files that build them.
#define HILT_ROW_OPS(BUILD) \
  BUILD(Softmax)            \
  BUILD(SoftmaxBackward)    \
  BUILD(LogSoftmax)         \
  BUILD(LogSoftmaxBackward) \
  BUILD(LogSumExp)          \
  BUILD(LogSumExpBackward) BUILD(Norm) BUILD(NormBackward) BUILD(CrossEntropy) BUILD(CrossEntropyBackward)

}  // namespace hilt::kernels
