// Four tokens through the library: each number here comes out of the ops that the modes are made
// of, in f64.
#include "lesson.h"
#include <nlohmann/json.hpp>

namespace compare {
namespace {

constexpr Index kTokens = 4, kDim = 2, kTile = 2;
const double kScale = std::log(2.0);
const std::vector<double> kQ{1, 1, 1, 2, 0, 1, 1, 1}, kK{1, 0, -1, 1, 2, 0, 1, -1}, kV{4, 0, 0, 4, 2, 2, 8, -8},
    kSlope{1, 0, 2, 1, -2, 2, 1, 2};

Tensor matrix(const std::vector<double>& x) { return hilt::from_values(x, {kTokens, kDim}); }
Tensor as_call(const Tensor& x) { return hilt::reshape(x, {1, kTokens, 1, kDim}); }

Json rows_of(const Tensor& x) {
  const std::vector<double> values = x.to_vector();
  Json rows = Json::array();
  const std::size_t columns = at(x.dim(1));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i % columns == 0) rows.push_back(Json::array());
    rows.back().push_back(report::number(std::round(values[i] * 1e10) / 1e10 + 0.0));  // + 0: no -0
  }
  return rows;
}
Json named(const char* name, const char* formula, const Tensor& x) {
  return {{"name", name}, {"formula", formula}, {"rows", rows_of(x)}};
}

/// The gradient of x in sum(dO f(x)), by a tape.
template <class F> Tensor slope(const Tensor& x, const Tensor& d_o, F&& f) {
  hilt::Tape tape;
  tape.watch(x);
  return tape.backward(f(x), d_o)[x];
}

/// The last row's keys in tiles of two: maximum, sum and accumulated output after each.
Json running_softmax(const Tensor& s, const Tensor& v) {
  const std::vector<double> scores = s.to_vector(), values = v.to_vector();
  const Index t = kTokens - 1;
  double m = -INFINITY, l = 0, a[kDim] = {};
  Json steps = Json::array();
  for (Index first = 0; first < kTokens; first += kTile) {
    const double* const score = &scores[static_cast<std::size_t>(t * kTokens + first)];
    const double before = std::exchange(m, std::max(m, *std::max_element(score, score + kTile)));
    const double rescale = std::exp(before - m);
    l *= rescale;
    for (double& x : a) x *= rescale;
    Json weights = Json::array();
    for (Index i = 0; i < kTile; ++i) {
      const double w = std::exp(score[i] - m);
      weights.push_back(w), l += w;
      for (Index d = 0; d < kDim; ++d) a[d] += w * values[static_cast<std::size_t>((first + i) * kDim + d)];
    }
    steps.push_back({{"first", first},
                     {"last", first + kTile - 1},
                     {"scores", {score[0], score[1]}},
                     {"m", m},
                     {"rescale", rescale},
                     {"weights", weights},
                     {"l", l},
                     {"a", a}});
  }
  return {{"row", t}, {"tiles", steps}, {"o", {a[0] / l, a[1] / l}}, {"lse", m + std::log(l)}};
}

}  // namespace

Json by_hand() {
  const Tensor q = matrix(kQ), k = matrix(kK), v = matrix(kV), d_o = matrix(kSlope);
  std::vector<double> hidden;
  for (Index t = 0; t < kTokens; ++t)
    for (Index u = 0; u < kTokens; ++u) hidden.push_back(u > t ? -INFINITY : 0);
  const Tensor mask = hilt::from_values(hidden, {kTokens, kTokens});
  // Taped: one op after the other, and what the tape hands back at each of them.
  const Tensor products = hilt::matmul(q, hilt::transpose(k));
  const Tensor s = products * kScale + mask, p = hilt::softmax(s), o = hilt::matmul(p, v);
  const Tensor dp = slope(p, d_o, [&](const Tensor& x) { return hilt::matmul(x, v); });
  const Tensor ds = slope(s, d_o, [&](const Tensor& x) { return hilt::matmul(hilt::softmax(x), v); });
  // Fused: L is kept, P comes back from it, and Delta from O.
  const hilt::PlanPtr plan = hilt::make_plan({.length = kTokens, .causality = hilt::Causality::token});
  const hilt::AttentionResult kept =
      hilt::attention_with_lse(as_call(q), as_call(k), as_call(v), plan, {.scale = kScale});
  const Tensor lse = hilt::reshape(kept.lse, {kTokens, 1});
  const Tensor again = hilt::exp(s - lse), delta = hilt::sum(d_o * hilt::reshape(kept.o, {kTokens, kDim}), {-1}, true);
  Json out{{"c", kScale},
           {"inputs", {named("Q", "", q), named("K", "", k), named("V", "", v), named("dO", "", d_o)}},
           {"forward",
            {named("Q K\u1d40", "products", products), named("S", "c Q K\u1d40, masked", s),
             named("P", "softmax of each row", p), named("O", "P V", o)}},
           {"kept",
            {named("L", "log \u2211 exp(S)", lse), named("P", "exp(S \u2212 L)", again),
             named("\u0394", "rowsum(dO \u00b7 O)", delta)}},
           {"backward", {named("dP", "dO V\u1d40", dp), named("dS", "P (dP \u2212 \u0394)", ds)}}};
  // All modes, and the largest difference between any two of them and the formulas.
  double apart = 0;
  for (const hilt::BackwardMode& mode : hilt::backward_modes()) {
    const std::array<Tensor, 3> qkv{as_call(q), as_call(k), as_call(v)};
    const program::Named g = program::with_gradients(qkv, {}, as_call(d_o), [&] {
      return hilt::attention(qkv[0], qkv[1], qkv[2], plan, {.backward = mode.mode, .scale = kScale});
    });
    const Tensor by_formula[] = {hilt::matmul(ds, k) * kScale, hilt::matmul(hilt::transpose(ds), q) * kScale,
                                 hilt::matmul(hilt::transpose(p), d_o)};
    for (std::size_t i = 0; i < 3; ++i) {
      const Tensor& slope = g[1 + i].second;
      const Tensor off = hilt::reshape(slope, {kTokens, kDim}) - by_formula[i];
      for (const double x : off.to_vector()) apart = std::max(apart, std::abs(x));
      if (mode.mode != hilt::Backward::fused) continue;
      constexpr const char* kNames[][2] = {{"dQ", "c dS K"}, {"dK", "c dS\u1d40 Q"}, {"dV", "P\u1d40 dO"}};
      out["backward"].push_back(named(kNames[i][0], kNames[i][1], hilt::reshape(slope, {kTokens, kDim})));
    }
  }
  out["apart"] = apart;
  // Fused on the way back: what a tile of two queries and two keys gives to their sums.
  const auto part = [](const Tensor& x, Index row) { return hilt::slice(x, 0, row, row + kTile); };
  for (Index t = 0; t < kTokens; t += kTile)
    for (Index u = 0; u <= t; u += kTile) {
      const auto tile = [&](const Tensor& x) { return hilt::slice(part(x, t), 1, u, u + kTile); };
      out["tiles"].push_back({{"query", t},
                              {"last_query", t + kTile - 1},
                              {"key", u},
                              {"last_key", u + kTile - 1},
                              {"dV", rows_of(hilt::matmul(hilt::transpose(tile(p)), part(d_o, t)))},
                              {"dK", rows_of(hilt::matmul(hilt::transpose(tile(ds)), part(q, t)) * kScale)},
                              {"dQ", rows_of(hilt::matmul(tile(ds), part(k, u)) * kScale)}});
    }
  out["softmax"] = running_softmax(s, v);
  // The finite difference: the loss is sum(dO O); the last feature of the last query moves.
  constexpr double kStep = 1e-4;
  const std::size_t moved = kTokens * kDim - 1;
  double loss[2];
  for (int side : {0, 1}) {
    std::vector<double> x = kQ;
    x[moved] += side ? kStep : -kStep;
    const Tensor y = hilt::attention(as_call(matrix(x)), as_call(k), as_call(v), plan, {.scale = kScale});
    loss[side] = hilt::sum(y * as_call(d_o)).to_vector()[0];
  }
  const double gradient = (hilt::matmul(ds, k) * kScale).to_vector()[moved];
  out["difference"] = {{"step", kStep},
                       {"below", loss[0]},
                       {"above", loss[1]},
                       {"quotient", (loss[1] - loss[0]) / (2 * kStep)},
                       {"gradient", gradient}};
  return out;
}

}  // namespace compare
