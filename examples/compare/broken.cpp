// The steps of attention and its gradient once more, each with a place for one mistake. Nothing in
// ops/ has such a place.
#include "exact.h"
#include <limits>

namespace compare {
namespace {

constexpr Index kUnmasked = 128;           // queries, the first, whose way back has no mask
constexpr double kMostProducts = 1 << 27;  // of pairs and features: a few seconds

/// The keys of token t; with Mistake::position_for_token those that a kernel finds that works on
/// tokens along the order and asks the mask about places as if they were tokens.
std::vector<std::int32_t> keys_of(Mistake mistake, const KeyLists& set, const hilt::Permutation& order, Index t) {
  const bool mistaken = mistake == Mistake::position_for_token;
  std::vector<std::int32_t> keys = set.row(mistaken ? order.position_of[at(t)] : t);
  if (mistaken)
    for (std::int32_t& u : keys) u = order.token_at[at(u)];
  return keys;
}

/// The keys, and where the way back forgets the mask, behind them all others: not with a table of
/// offsets, which has no entry for those.
std::vector<std::int32_t> keys_back_of(Mistake mistake, const ExactProblem& p, std::vector<std::int32_t> keys,
                                       Index t) {
  if (mistake != Mistake::no_mask || t >= kUnmasked || !p.terms.tensor[1].empty()) return keys;
  std::vector<char> met(at(p.length), 0);
  for (const std::int32_t u : keys) met[at(u)] = 1;
  for (Index u = 0; u < p.length; ++u)
    if (!met[at(u)]) keys.push_back(static_cast<std::int32_t>(u));
  return keys;
}

/// A part of o, dq, dk and dv, or what is shaped like them: the first sequence, the heads of the
/// first key head.
Tensors first_part(const ExactProblem& p, const Tensors& x) {
  Tensors out;
  for (std::size_t i = 0; i < 4; ++i)
    for (Index t = 0, heads = i < 2 ? p.heads : p.kv_heads; t < p.length; ++t) {
      const auto row = std::span(x[i]).subspan(at(t * heads * p.dim), at(heads / p.kv_heads * p.dim));
      out[i].insert(out[i].end(), row.begin(), row.end());
    }
  return out;
}

/// The steps op by op in f64, a row at a time, its keys in two tiles. Sets dS's largest row sum.
Tensors attention_with(Mistake mistake, const ExactProblem& p, const AttendedSets& sets, const hilt::Permutation& order,
                       double& row_sum) {
  Tensors out;
  auto& [o, dq, dk, dv, d_slopes, d_relative, d_bias, d_sink] = out;
  o.resize(p.q.size()), dq.resize(p.q.size()), dk.resize(p.k.size()), dv.resize(p.k.size());
  row_sum = 0;
  const std::size_t dim = at(p.dim);
  for (Index h = 0; h < p.heads; ++h)
    for (Index t = 0; t < p.length; ++t) {
      const std::vector<std::int32_t> seen = keys_of(mistake, sets.head(h), order, t);
      if (seen.empty()) continue;
      const std::vector<std::int32_t> keys = keys_back_of(mistake, p, seen, t);
      const std::size_t n = seen.size(), back = mistake == Mistake::half_of_the_keys ? (n + 1) / 2 : keys.size(),
                        row = at((t * p.heads + h) * p.dim), half = (n + 1) / 2;
      const auto key = [&](std::size_t i) { return at(keys[i] * p.dim); };
      std::vector<double> s(keys.size()), m(keys.size()), cap_slope(keys.size());
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const double z = p.scale * dot(&p.q[row], &p.k[key(i)], dim);
        std::tie(s[i], cap_slope[i]) = p.terms.score(z, 0, h, t, keys[i], std::identity());
        m[i] = dropout_multiplier(p.key, h, t, keys[i], p.dropout);
      }
      const double sink = p.terms.has_sink() ? p.terms.tensor[3][at(h)] : -std::numeric_limits<double>::infinity();
      double top = sink, sum = p.terms.has_sink() ? 1 : 0;
      for (std::size_t first : {std::size_t{0}, half}) {  // the running softmax
        const std::size_t end = first == 0 ? half : n;
        if (first == end) continue;
        const double before = top;
        top = std::max(before, std::ranges::max(std::span(s).subspan(first, end - first)));
        const double rescale = mistake == Mistake::no_rescale ? 1 : std::exp(before - top);
        sum *= rescale;
        for (std::size_t d = 0; d < dim; ++d) o[row + d] *= rescale;
        for (std::size_t i = first; i < end; ++i) {
          sum += std::exp(s[i] - top);
          add_times(&o[row], m[i] * std::exp(s[i] - top), &p.v[key(i)], dim);
        }
      }
      for (std::size_t d = 0; d < dim; ++d) o[row + d] /= sum;
      const double lse = top + std::log(sum);
      const double delta = mistake == Mistake::no_delta ? 0 : dot(&p.d_o[row], &o[row], dim);
      double ds_sum = -std::exp(sink - lse) * delta;
      for (std::size_t i = 0; i < back; ++i) {
        const double weight = std::exp(s[i] - lse);
        const double ds = weight * (m[i] * dot(&p.d_o[row], &p.v[key(i)], dim) - delta);
        const double dz = cap_slope[i] * ds, scaled = p.scale * (mistake == Mistake::scaled_twice ? p.scale * dz : dz);
        ds_sum += ds;
        add_times(&dq[row], scaled, &p.k[key(i)], dim);
        add_times(&dk[key(i)], scaled, &p.q[row], dim);
        add_times(&dv[key(i)], m[i] * weight, &p.d_o[row], dim);
      }
      row_sum = std::max(row_sum, std::abs(ds_sum));
    }
  return out;
}

}  // namespace

std::vector<Broken> break_it(const ExactProblem& whole, const AttendedSets& sets, const hilt::Permutation& order,
                             const Tensors& exact, const Tensors& naive, const Tensors& terms, double rounding) {
  const Tensors inputs = first_part(whole, {whole.q, whole.d_o, whole.k, whole.v});
  ExactProblem part = whole;
  part.q = inputs[0], part.d_o = inputs[1], part.k = inputs[2], part.v = inputs[3];
  part.batch = part.kv_heads = 1, part.heads = whole.heads / whole.kv_heads;
  double pairs = 0;
  for (Index h = 0; h < part.heads; ++h) pairs += static_cast<double>(sets.head(h).pairs());
  if (pairs * static_cast<double>(part.dim) > kMostProducts) return {};
  const Tensors right = first_part(whole, exact), textbook = first_part(whole, naive), sizes = first_part(whole, terms);
  constexpr double kStep = 1e-4;
  std::vector<Broken> out;
  std::vector<std::vector<double>> dq;  // of each mistake
  for (std::size_t i = 0; i < kMistakes.size(); ++i) {
    Broken b{.mistake = static_cast<Mistake>(i)};
    const Tensors x = attention_with(b.mistake, part, sets, order, b.row_sum);
    for (std::size_t j = 0; j < 4; ++j) {
      b.error[j] = judge(x[j], right[j], sizes[j], measure(textbook[j], right[j]), rounding);
      for (std::size_t e = 0; e < x[j].size(); ++e) b.deviation[j].push_back(std::abs(x[j][e] - right[j][e]));
    }
    dq.push_back(x[1]);
    out.push_back(std::move(b));
  }
  if (part.q.empty()) return out;
  // A query that the two rarest mistakes touch: of the first, where a largest score comes late.
  const std::vector<double>& late = out[static_cast<std::size_t>(Mistake::no_rescale)].deviation[1];
  const Index stride = part.heads * part.dim;
  Index moved = 0;
  for (Index t = 1; t < std::min(part.length, kUnmasked); ++t)
    if (late[at(t * stride)] > late[at(moved * stride)]) moved = t;
  const std::size_t feature = at(moved * stride);
  // A query moves the loss by its own row alone, so the finite difference needs the forward pass of
  // that row.
  for (Broken& b : out) {
    b.query = moved, b.slope = dq[static_cast<std::size_t>(b.mistake)][feature];
    const std::size_t row = at(b.mistake == Mistake::position_for_token ? order.position_of[at(moved)] : moved);
    AttendedSets one = sets;
    for (KeyLists& set : one.sets)
      for (std::size_t t = 0; t < set.rows.size(); ++t)
        if (t != row) set.rows[t].clear();
    ExactProblem changed = part;
    double unused = 0, ends[2];
    for (int side : {0, 1}) {
      changed.q[feature] = part.q[feature] + (side ? kStep : -kStep);
      const Tensors x = attention_with(b.mistake, changed, one, order, unused);
      ends[side] = dot(x[0].data(), part.d_o.data(), part.d_o.size());  // the loss
    }
    b.difference = (ends[1] - ends[0]) / (2 * kStep);
  }
  return out;
}

}  // namespace compare
