#pragma once
#include <hilt/hilt.h>
#include <algorithm>
#include <cmath>
#include <functional>

// Private to compare_gradients: attention and its gradients in plain loops, straight from the
// definition. It shares no code with what it judges: the set comes from Plan::attends(), one pair
// at a time, published slopes from alibi_slopes(); the rest are the formulas.

namespace compare {

using hilt::Index;

inline std::size_t at(Index i) { return static_cast<std::size_t>(i); }

// Four partial sums: a dot product of one would wait for each addition.
template <class T> T dot(const T* a, const T* b, std::size_t n) {
  T sum[4] = {};
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (std::size_t j = 0; j < 4; ++j) sum[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}
template <class T> void add_times(T* sum, T factor, const T* x, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += factor * x[i];
}

/// The keys of every row of one attended set; a key that is listed twice stands twice.
struct KeyLists {
  std::vector<std::vector<std::int32_t>> rows;
  const std::vector<std::int32_t>& row(Index t) const { return rows[at(t)]; }
  Index pairs() const;
};

/// The sets of a plan: most heads share one.
struct AttendedSets {
  std::vector<KeyLists> sets;
  std::vector<std::size_t> of_head;
  const KeyLists& head(Index h) const { return sets[of_head[at(h)]]; }
};
/// The sets of a plan; of each document as it stands alone.
AttendedSets attended_sets(const hilt::Plan& plan);
/// A plan of each document of a row alone, and its first token; of a row that is whole, the plan.
std::vector<std::pair<Index, hilt::PlanPtr>> alone(const hilt::Plan& plan);

/// Where a token stands: frame, row and column on the grid of its document, or (0, 0, token); a
/// frame below 0: outside the grid.
using Site = std::array<Index, 3>;

/// The score terms as numbers: S = cap(z) + sum of element x factor over slopes, relative, bias.
struct ExactTerms {
  double softcap = 0;                           // 0: none
  std::array<std::vector<double>, 4> tensor{};  // slopes, relative, bias, sink; empty: none
  std::array<Index, 4> bias{};                  // its shape
  Site reach{};                                 // of relative: offsets are clamped to it
  std::array<std::vector<Site>, 2> site{};      // of each token, for slopes and for relative

  bool any() const {
    return softcap > 0 || std::ranges::any_of(tensor, [](const auto& x) { return !x.empty(); });
  }
  bool has_sink() const { return !tensor[3].empty(); }
  /// Whether there is a term, of slopes or relative, and both tokens lie where it looks.
  bool finds(std::size_t which, Index t, Index u) const {
    return !tensor[which].empty() && std::min(site[which][at(t)][0], site[which][at(u)][0]) >= 0;
  }
  /// f(which, element, factor) of the first three at a pair.
  template <class F> void each(Index b, Index h, Index t, Index u, F&& f) const {
    if (finds(0, t, u)) {
      Index apart = 0;
      for (std::size_t i = 0; i < 3; ++i) apart += std::abs(site[0][at(t)][i] - site[0][at(u)][i]);
      f(0, at(h), -static_cast<double>(apart));
    }
    if (finds(1, t, u)) {
      Index entry = h;
      for (std::size_t i = 0; i < 3; ++i)
        entry = entry * (2 * reach[i] + 1) + reach[i] +
                std::clamp(site[1][at(t)][i] - site[1][at(u)][i], -reach[i], reach[i]);
      f(1, at(entry), 1.0);
    }
    if (!tensor[2].empty()) {
      Index element = 0;
      const std::array<Index, 4> index{b, h, t, u};
      for (std::size_t i = 0; i < 4; ++i) element = element * bias[i] + (bias[i] > 1 ? index[i] : 0);
      f(2, at(element), 1.0);
    }
  }
  /// S of z = c q . k, every step of it rounded, and the slope of the cap.
  template <class T, class F> std::pair<T, T> score(T z, Index b, Index h, Index t, Index u, F rounded) const {
    const T x = softcap > 0 ? rounded(std::tanh(rounded(z / static_cast<T>(softcap)))) : T{0};
    T s = softcap > 0 ? rounded(static_cast<T>(softcap) * x) : z;
    each(b, h, t, u, [&](std::size_t which, std::size_t element, double factor) {
      s = rounded(s + rounded(static_cast<T>(tensor[which][element]) * rounded(static_cast<T>(factor))));
    });
    return {s, 1 - x * x};
  }
};
ExactTerms exact_terms(const hilt::Plan& plan, const hilt::ScoreTerms& terms);

/// All dense and in row-major order: q, d_o [batch, length, heads, dim], k, v [batch, length,
/// kv_heads, dim].
struct ExactProblem {
  Index batch, length, heads, kv_heads, dim;
  double scale, dropout;
  hilt::RandomKey key;
  std::vector<double> q, k, v, d_o;
  ExactTerms terms{};
};

/// o, dq, dk, dv, and the gradients of slopes, relative, bias and sink, empty where there is none.
using Tensors = std::array<std::vector<double>, 8>;

/// The formulas in f64; of f64 inputs, in long double.
Tensors exact_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype);
/// The same loops in `dtype`: f64 and f32 throughout, bf16 and f16 with every intermediate stored
/// in 16 bits, and so what is read beside q, k and v: tensors of terms, dropout's multipliers.
Tensors naive_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype);
/// For every element the size of the terms it is the sum of, added up as independent rounding
/// errors are: the root of the sum of squares. It does not vanish where the terms cancel. A weight
/// e^(S - L) counts the terms of S and L too, but in 16 bits, where those are kept in f32.
Tensors term_sizes(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype);

/// Whether dropout keeps a weight, by its documented definition; multipliers are 0 or 1 / (1 - p).
double dropout_multiplier(const hilt::RandomKey& key, Index head, Index t, Index u, double p);

// ---- when a computed tensor counts as right ----------------------------------------
/// How far a tensor is from the exact one.
struct Error {
  double max_abs = 0;           // largest |x - exact|; infinite if an element is not a number
  double rel_l2 = 0;            // |x - exact| / |exact|, Euclidean
  std::size_t worst_index = 0;  // of max_abs, in row-major order
  double limit = 0;             // what max_abs may be, filled in by judge()
  double rel_limit = 0;         // what rel_l2 may be
  bool ok = true;
};

Error measure(std::span<const double> x, std::span<const double> exact);

/// The rule, for the largest error and for the relative error over the tensor alike:
///     err(x) <= 2 err(naive) + floor
/// naive is the textbook formula in x's own type: rounding is forgiven as far as nobody could do
/// without it. The floor is for where naive has luck: `rounding`, relative to the size of the terms
/// (term_sizes), which do not cancel; 4 / sqrt(n) of it for n < 16 elements, who may all have luck.
Error judge(std::span<const double> x, std::span<const double> exact, std::span<const double> terms, const Error& naive,
            double rounding);

// ---- broken.cpp: attention with one mistake in it, to see what each does and how it is found ----
/// The mistakes people make.
enum class Mistake { none, no_delta, scaled_twice, position_for_token, no_rescale, half_of_the_keys, no_mask };
inline constexpr std::array<const char*, 7> kMistakes{
    "none", "no_delta", "scaled_twice", "position_for_token", "no_rescale", "half_of_the_keys", "no_mask"};

/// What one mistake does to the first sequence and the heads of the first key head.
struct Broken {
  Mistake mistake;
  std::array<Error, 4> error;                    // o, dq, dk, dv
  std::array<std::vector<double>, 4> deviation;  // |x - exact| of every element of that part
  Index query = 0;                               // the one whose first feature suffers most from no_rescale
  double slope = 0, difference = 0;              // of its first feature: the gradient, and a finite difference
  double row_sum = 0;                            // the largest |sum of a row of dS|

  const char* name() const { return kMistakes[static_cast<std::size_t>(mistake)]; }
};

/// Every mistake, judged as a mode would be; `exact`, `naive` and `terms` are of the whole problem.
/// Empty where that would take more than a few seconds.
std::vector<Broken> break_it(const ExactProblem& whole, const AttendedSets& sets, const hilt::Permutation& order,
                             const Tensors& exact, const Tensors& naive, const Tensors& terms, double rounding);

}  // namespace compare
