// Kernels that work along rows: one pass to find what the row needs to know of itself, one to write.
#include "core/parallel.h"
#include "core/random.h"
#include "ops/isa.h"
#include "ops/kernels_rows.h"
#include "ops/math.h"

namespace hilt::kernels {
namespace {

constexpr Index kPiece = 1 << 14;  // elements worth a task

template <class F>
[[gnu::always_inline]] inline void each_row(Index rows, Index cols, F f) {
  parallel_for(rows, cols > 0 ? kPiece / cols + 1 : kPiece, [f](Index begin, Index end) {
    for (Index r = begin; r < end; ++r) f(r);
  });
}

// Sums and maxima over several vectors of lanes, combined in one fixed order.
template <class W>
struct Lanes {
  static constexpr int kWidth = 4 * kLanes<W>;
  W at[kWidth];
  [[gnu::always_inline]] explicit Lanes(W start) {
    for (W& w : at) w = start;
  }
  template <class Term, class Join>
  [[gnu::always_inline]] W over(Index n, Term term, Join join) {
    Index i = 0;
    for (; i + kWidth <= n; i += kWidth)
      for (int l = 0; l < kWidth; ++l) at[l] = join(at[l], term(i + l));
    for (int l = 0; i < n; ++i, ++l) at[l] = join(at[l], term(i));
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) at[l] = join(at[l], at[l + half]);
    return at[0];
  }
};
template <class W, class Term>
[[gnu::always_inline]] inline W sum_of(Index n, Term term) {
  return Lanes<W>(0).over(n, term, [](W a, W b) { return a + b; });
}
template <class W, class Term>
[[gnu::always_inline]] inline W max_of(Index n, Term term) {
  return Lanes<W>(-__builtin_inff()).over(n, term, [](W a, W b) { return b > a ? b : a; });
}

/// log sum e^x of a row as shift + rest, apart, since far from 0 their sum rounds the rest away. -inf for a row of -inf or
/// none; NaN if there is one.
template <class W>
struct RowLse { W shift, rest; };
template <class W, class T>
[[gnu::always_inline]] inline RowLse<W> row_lse(const T* x, Index n) {
  const W top = max_of<W>(n, [x](Index i) { return static_cast<W>(x[i]); });
  const W shift = top - top == 0 ? top : W{0};
  const W total = sum_of<W>(n, [=](Index i) { return math::exp(static_cast<W>(x[i]) - shift); });
  return {shift, math::log(total)};
}

}  // namespace

template <Isa I, class T>
void softmax(CpuAt<I>, const T* x, T* y, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T* const in = x + r * cols;
    T* const out = y + r * cols;
    const W top = max_of<W>(cols, [in](Index i) { return static_cast<W>(in[i]); });
    if constexpr (sizeof(T) >= 4) {  // e^x waits in y for its sum
      for (Index i = 0; i < cols; ++i) out[i] = math::exp(in[i] - top);
      const W scale = W{1} / sum_of<W>(cols, [out](Index i) { return out[i]; });
      for (Index i = 0; i < cols; ++i) out[i] *= scale;
    } else {
      const W scale = W{1} / sum_of<W>(cols, [=](Index i) { return math::exp(static_cast<W>(in[i]) - top); });
      for (Index i = 0; i < cols; ++i) out[i] = static_cast<T>(math::exp(static_cast<W>(in[i]) - top) * scale);
    }
  });
}

template <Isa I, class T>
void softmax_backward(CpuAt<I>, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T *const p = y + r * cols, *const g = dy + r * cols;
    const W dot = sum_of<W>(cols, [=](Index i) { return static_cast<W>(p[i]) * static_cast<W>(g[i]); });
    for (Index i = 0; i < cols; ++i) dx[r * cols + i] = static_cast<T>(static_cast<W>(p[i]) * (static_cast<W>(g[i]) - dot));
  });
}

template <Isa I, class T>
void log_softmax(CpuAt<I>, const T* x, T* y, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T* const in = x + r * cols;
    const auto [shift, rest] = row_lse<W>(in, cols);
    for (Index i = 0; i < cols; ++i) y[r * cols + i] = static_cast<T>((static_cast<W>(in[i]) - shift) - rest);
  });
}

template <Isa I, class T>
void log_softmax_backward(CpuAt<I>, const T* y, const T* dy, T* dx, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T *const l = y + r * cols, *const g = dy + r * cols;
    const W total = sum_of<W>(cols, [g](Index i) { return static_cast<W>(g[i]); });
    for (Index i = 0; i < cols; ++i) dx[r * cols + i] = static_cast<T>(static_cast<W>(g[i]) - math::exp(static_cast<W>(l[i])) * total);
  });
}

template <Isa I, class T>
void logsumexp(CpuAt<I>, const T* x, T* y, Index rows, Index cols) {
  each_row(rows, cols, [=](Index r) {
    const auto [shift, rest] = row_lse<wide_t<T>>(x + r * cols, cols);
    y[r] = static_cast<T>(shift + rest);
  });
}

template <Isa I, class T>
void logsumexp_backward(CpuAt<I>, const T* x, const T* dy, T* dx, Index rows, Index cols) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const auto [shift, rest] = row_lse<W>(x + r * cols, cols);
    const W g = static_cast<W>(dy[r]);
    for (Index i = 0; i < cols; ++i) dx[r * cols + i] = static_cast<T>(g * math::exp((static_cast<W>(x[r * cols + i]) - shift) - rest));
  });
}

template <Isa I, class T>
void norm(CpuAt<I>, const T* x, const T* w, const T* b, T* y, wide_t<T>* mean, wide_t<T>* rstd, Index rows, Index cols, double epsilon) {
  using W = wide_t<T>;
  each_row(rows, cols, [=](Index r) {
    const T* const in = x + r * cols;
    T* const out = y + r * cols;
    const W n = static_cast<W>(cols);
    const W center = mean ? sum_of<W>(cols, [in](Index i) { return static_cast<W>(in[i]); }) / n : W{0};
    const W square = sum_of<W>(cols, [=](Index i) { const W d = static_cast<W>(in[i]) - center; return d * d; }) / n;
    const W scale = W{1} / std::sqrt(square + static_cast<W>(epsilon));
    if (b) for (Index i = 0; i < cols; ++i) out[i] = static_cast<T>((static_cast<W>(in[i]) - center) * scale * static_cast<W>(w[i]) + static_cast<W>(b[i]));
    else for (Index i = 0; i < cols; ++i) out[i] = static_cast<T>((static_cast<W>(in[i]) - center) * scale * static_cast<W>(w[i]));
    if (mean) mean[r] = center;
    rstd[r] = scale;
  });
}

template <Isa I, class T>
void norm_backward(CpuAt<I>, const T* x, const T* w, const wide_t<T>* mean, const wide_t<T>* rstd, const T* dy, T* dx, wide_t<T>* dw, wide_t<T>* db,
                   Index rows, Index cols) {
  using W = wide_t<T>;
  const W n = static_cast<W>(cols);
  for (Index r = 0; r < rows; ++r) {
    const T *const in = x + r * cols, *const g = dy + r * cols;
    const W center = mean ? mean[r] : W{0}, scale = rstd[r];
    const auto hat = [=](Index i) { return (static_cast<W>(in[i]) - center) * scale; };
    const auto slope = [=](Index i) { return static_cast<W>(g[i]) * static_cast<W>(w[i]); };  // of the loss along hat
    if (dx) {
      const W along = sum_of<W>(cols, [=](Index i) { return slope(i) * hat(i); }) / n;
      const W level = mean ? sum_of<W>(cols, slope) / n : W{0};
      T* const out = dx + r * cols;
      for (Index i = 0; i < cols; ++i) out[i] = static_cast<T>(scale * (slope(i) - level - hat(i) * along));
    }
    if (dw) for (Index i = 0; i < cols; ++i) dw[i] += static_cast<W>(g[i]) * hat(i);
    if (db) for (Index i = 0; i < cols; ++i) db[i] += static_cast<W>(g[i]);
  }
}

template <Isa I, class T>
void rotate(CpuAt<I>, const T* x, const wide_t<T>* table, T* y, Index outer, Index length, Index heads, Index dim, int sign) {
  using W = wide_t<T>;
  const Index half = dim / 2;
  const W turn = static_cast<W>(sign);
  each_row(outer * length, heads * dim, [=](Index row) {
    const W *const cosine = table + row % length * half, *const sine = table + (length + row % length) * half;
    for (Index h = 0; h < heads; ++h) {
      const T* const in = x + (row * heads + h) * dim;
      T* const out = y + (row * heads + h) * dim;
      for (Index i = 0; i < half; ++i) {
        const W a = static_cast<W>(in[i]), b = static_cast<W>(in[i + half]), c = cosine[i], s = sine[i] * turn;
        out[i] = static_cast<T>(a * c - b * s);
        out[i + half] = static_cast<T>(a * s + b * c);
      }
    }
  });
}

template <Isa I, class T>
void dropout(CpuAt<I>, const T* x, T* y, Index first, Index n, double p, std::uint64_t seed, std::uint64_t stream) {
  using W = wide_t<T>;
  constexpr Index kBlock = 64;  // counters at a time: sixteen vectors' worth of independent rounds
  const W scale = static_cast<W>(1 / (1 - p));
  const auto limit = static_cast<std::uint32_t>(__builtin_ceil(p * 0x1p24));  // u 2^-24 >= p
  for (Index i = 0; i < n;) {
    std::uint32_t words[kBlock * 4];
    const Index counter = (first + i) / 4;
    for (Index c = 0; c < kBlock; ++c) {
      const auto at = static_cast<std::uint64_t>(counter + c);
      const auto bits = philox({static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(at >> 32), static_cast<std::uint32_t>(stream),
                                static_cast<std::uint32_t>(stream >> 32)}, seed);
      for (Index k = 0; k < 4; ++k) words[c * 4 + k] = bits[static_cast<std::size_t>(k)];
    }
    const Index skip = (first + i) % 4, count = n - i < kBlock * 4 - skip ? n - i : kBlock * 4 - skip;
    for (Index j = 0; j < count; ++j)
      y[i + j] = static_cast<T>((words[skip + j] >> 8) >= limit ? static_cast<W>(x[i + j]) * scale : W{0});
    i += count;
  }
}

template void softmax(CpuAt<kIsa>, const double*, double*, Index, Index);
template void softmax_backward(CpuAt<kIsa>, const double*, const double*, double*, Index, Index);
template void log_softmax(CpuAt<kIsa>, const double*, double*, Index, Index);
template void log_softmax_backward(CpuAt<kIsa>, const double*, const double*, double*, Index, Index);
template void logsumexp(CpuAt<kIsa>, const double*, double*, Index, Index);
template void logsumexp_backward(CpuAt<kIsa>, const double*, const double*, double*, Index, Index);
template void norm(CpuAt<kIsa>, const double*, const double*, const double*, double*, double*, double*, Index, Index, double);
template void norm_backward(CpuAt<kIsa>, const double*, const double*, const double*, const double*, const double*, double*, double*, double*, Index, Index);
template void rotate(CpuAt<kIsa>, const double*, const double*, double*, Index, Index, Index, Index, int);
template void dropout(CpuAt<kIsa>, const double*, double*, Index, Index, double, std::uint64_t, std::uint64_t);
template void softmax(CpuAt<kIsa>, const float*, float*, Index, Index);
template void softmax_backward(CpuAt<kIsa>, const float*, const float*, float*, Index, Index);
template void log_softmax(CpuAt<kIsa>, const float*, float*, Index, Index);
template void log_softmax_backward(CpuAt<kIsa>, const float*, const float*, float*, Index, Index);
template void logsumexp(CpuAt<kIsa>, const float*, float*, Index, Index);
template void logsumexp_backward(CpuAt<kIsa>, const float*, const float*, float*, Index, Index);
template void norm(CpuAt<kIsa>, const float*, const float*, const float*, float*, float*, float*, Index, Index, double);
template void norm_backward(CpuAt<kIsa>, const float*, const float*, const float*, const float*, const float*, float*, float*, float*, Index, Index);
template void rotate(CpuAt<kIsa>, const float*, const float*, float*, Index, Index, Index, Index, int);
template void dropout(CpuAt<kIsa>, const float*, float*, Index, Index, double, std::uint64_t, std::uint64_t);
template void softmax(CpuAt<kIsa>, const bf16*, bf16*, Index, Index);
template void softmax_backward(CpuAt<kIsa>, const bf16*, const bf16*, bf16*, Index, Index);
template void log_softmax(CpuAt<kIsa>, const bf16*, bf16*, Index, Index);
template void log_softmax_backward(CpuAt<kIsa>, const bf16*, const bf16*, bf16*, Index, Index);
template void logsumexp(CpuAt<kIsa>, const bf16*, bf16*, Index, Index);
template void logsumexp_backward(CpuAt<kIsa>, const bf16*, const bf16*, bf16*, Index, Index);
template void norm(CpuAt<kIsa>, const bf16*, const bf16*, const bf16*, bf16*, float*, float*, Index, Index, double);
template void norm_backward(CpuAt<kIsa>, const bf16*, const bf16*, const float*, const float*, const bf16*, bf16*, float*, float*, Index, Index);
template void rotate(CpuAt<kIsa>, const bf16*, const float*, bf16*, Index, Index, Index, Index, int);
template void dropout(CpuAt<kIsa>, const bf16*, bf16*, Index, Index, double, std::uint64_t, std::uint64_t);
template void softmax(CpuAt<kIsa>, const f16*, f16*, Index, Index);
template void softmax_backward(CpuAt<kIsa>, const f16*, const f16*, f16*, Index, Index);
template void log_softmax(CpuAt<kIsa>, const f16*, f16*, Index, Index);
template void log_softmax_backward(CpuAt<kIsa>, const f16*, const f16*, f16*, Index, Index);
template void logsumexp(CpuAt<kIsa>, const f16*, f16*, Index, Index);
template void logsumexp_backward(CpuAt<kIsa>, const f16*, const f16*, f16*, Index, Index);
template void norm(CpuAt<kIsa>, const f16*, const f16*, const f16*, f16*, float*, float*, Index, Index, double);
template void norm_backward(CpuAt<kIsa>, const f16*, const f16*, const float*, const float*, const f16*, f16*, float*, float*, Index, Index);
template void rotate(CpuAt<kIsa>, const f16*, const float*, f16*, Index, Index, Index, Index, int);
template void dropout(CpuAt<kIsa>, const f16*, f16*, Index, Index, double, std::uint64_t, std::uint64_t);

}  // namespace hilt::kernels
