// Four tokens through the library: each matrix here comes out of the ops that the modes are made
// of, in f64. And exercises on them: check.py, run by python3, writes them, answers them and judges
// what a learner wrote.
#include <unistd.h>
#include "lesson.h"

namespace compare {
namespace {

constexpr const char* kExercise =
#include "exercise.inc"
    ;
constexpr const char* kCheck =
#include "check.inc"
    ;

constexpr Index kTokens = 4, kDim = 2;
const double kScale = std::log(2.0);
const std::vector<double> kQ{1, 1, 1, 2, 0, 1, 1, 1}, kK{1, 0, -1, 1, 2, 0, 1, -1}, kV{4, 0, 0, 4, 2, 2, 8, -8},
    kSlope{1, 0, 2, 1, -2, 2, 1, 2};

Tensor matrix(const std::vector<double>& x) { return hilt::from_values(x, {kTokens, kDim}); }
Tensor as_call(const Tensor& x) { return hilt::reshape(x, {1, kTokens, 1, kDim}); }
Tensor as_matrix(const Tensor& x) { return hilt::reshape(x, {kTokens, -1}); }

Json rows_of(const Tensor& x) {
  Json rows;
  for (Index i = 0; i < x.dim(0); ++i)
    for (const double value : hilt::slice(x, 0, i, i + 1).to_vector())
      rows[at(i)].push_back(std::round(value * 1e10) / 1e10 + 0.0);  // + 0: no -0
  return rows;
}

/// The gradient of x in sum(dO f(x)), by a tape.
template <class F> Tensor slope(const Tensor& x, const Tensor& d_o, F&& f) {
  hilt::Tape tape;
  tape.watch(x);
  return tape.backward(f(x), d_o)[x];
}

}  // namespace

Json by_hand() {
  const Tensor q = matrix(kQ), k = matrix(kK), v = matrix(kV), d_o = matrix(kSlope);
  std::vector<double> hidden;
  for (Index t = 0; t < kTokens; ++t)
    for (Index u = 0; u < kTokens; ++u) hidden.push_back(u > t ? -INFINITY : 0);
  // Taped: one op after the other, and what the tape hands back at each of them.
  const Tensor s = hilt::matmul(q, hilt::transpose(k)) * kScale + hilt::from_values(hidden, {kTokens, kTokens}),
               p = hilt::softmax(s);
  const Tensor dp = slope(p, d_o, [&](const Tensor& x) { return hilt::matmul(x, v); });
  const Tensor ds = slope(s, d_o, [&](const Tensor& x) { return hilt::matmul(hilt::softmax(x), v); });
  // Fused: L is kept, and Delta comes from O.
  const hilt::PlanPtr plan = hilt::make_plan({.length = kTokens, .causality = hilt::Causality::token});
  const hilt::AttentionResult kept =
      hilt::attention_with_lse(as_call(q), as_call(k), as_call(v), plan, {.scale = kScale});
  const Tensor lse = as_matrix(kept.lse), delta = hilt::sum(d_o * as_matrix(kept.o), {-1}, true);
  Json out{{"c", kScale}};
  const auto show = [&](const char* name, const Tensor& x) { out["matrices"][name] = rows_of(x); };
  show("Q", q), show("K", k), show("V", v), show("dO", d_o), show("S", s), show("P", p), show("L", lse);
  show("dP", dp), show("dS", ds), show("\u0394", delta), show("O", hilt::matmul(p, v));
  // All modes, and the largest difference between any two of them and the formulas.
  double apart = 0;
  const std::pair<const char*, Tensor> formulas[] = {{"dQ", hilt::matmul(ds, k) * kScale},
                                                     {"dK", hilt::matmul(hilt::transpose(ds), q) * kScale},
                                                     {"dV", hilt::matmul(hilt::transpose(p), d_o)}};
  for (const hilt::BackwardMode& mode : hilt::backward_modes()) {
    const std::array<Tensor, 4> inputs{as_call(q), as_call(k), as_call(v), as_call(d_o)};
    const program::Named g = program::with_gradients(inputs, {}, [&] {
      return hilt::attention(inputs[0], inputs[1], inputs[2], plan, {.backward = mode.mode, .scale = kScale});
    });
    for (std::size_t i = 0; i < std::size(formulas); ++i) {
      const Tensor found = as_matrix(g[1 + i].second);
      for (const double x : (found - formulas[i].second).to_vector()) apart = std::max(apart, std::abs(x));
      if (mode.mode == hilt::Backward::fused) show(formulas[i].first, found);
    }
  }
  out["apart"] = apart;
  return out;
}

void do_exercise(const program::Options& options, const Settings& s) {
  const std::string number = std::to_string(s.answer ? s.answer : s.exercise);
  const char* const what = !s.check.empty() ? "check" : s.answer ? "answer" : "exercise";
  if (s.check.empty() && number == "0") return;
  const std::string& value = s.check.empty() ? number : s.check;
  for (const auto& [key, given, is_text, group, preset] : options.values())
    hilt::check(!options.given("--" + key) || given == preset || key == what || (key == "out" && s.exercise), "--", key,
                " (", given, "): --", what, " has no use for it; leave one of them out");
  execlp("python3", "python3", "-I", "-c", kCheck, what, value.c_str(), s.out.c_str(), kExercise, nullptr);
  hilt::fail("--", what, " (", value, "): python3 does not start; install it");
}

}  // namespace compare
