// The claims of the derivation, tried on rows of this run: with L of the fused forward pass and o
// of a mode, in f64 otherwise.
#include "lesson.h"

namespace compare {

Checks check_rows(const Problem& p, const ExactProblem& exact, const AttendedSets& sets, const std::vector<double>& o) {
  constexpr Index kRows = 512;
  const hilt::AttentionOptions options{.scale = p.scale, .dropout = p.dropout, .key = p.key, .terms = p.terms};
  const ExactTerms& terms = exact.terms;
  const std::size_t dim = at(p.dim());
  const std::vector<double> lse = hilt::attention_with_lse(p.q, p.k, p.v, p.plan, options).lse.to_vector();
  Checks c;
  const Index stride = std::max<Index>(1, p.length() / kRows);
  for (Index t = 0; t < p.length(); t += stride) {  // of the first sequence and head
    const auto keys = sets.head(0).row(t);
    if (keys.empty()) continue;
    const double *const query = &exact.q[at(t * p.heads()) * dim], *const slope = &exact.d_o[at(t * p.heads()) * dim];
    const double delta = dot(slope, &o[at(t * p.heads()) * dim], dim);
    // A sink is a key whose value is zero.
    double weights = terms.has_sink() ? std::exp(terms.tensor[3][0] - lse[at(t)]) : 0, by_weights = 0,
           slopes = -weights * delta, size = 0;
    for (const std::int32_t u : keys) {
      const std::size_t key = at(u * p.kv_heads() * p.dim());
      const double z = p.scale * dot(query, &exact.k[key], dim);
      const double weight = std::exp(terms.score(z, 0, 0, t, u, [](double x) { return x; }) - lse[at(t)]);
      const double d_weight = dropout_multiplier(p.key, 0, t, u, p.dropout) * dot(slope, &exact.v[key], dim);
      weights += weight, by_weights += weight * d_weight, slopes += weight * (d_weight - delta);
      size = std::max(size, std::abs(d_weight));
    }
    ++c.rows;
    c.weights_sum = std::max(c.weights_sum, std::abs(weights - 1));
    c.delta = std::max(c.delta, std::abs(by_weights - delta) / size);
    c.slopes_sum = std::max(c.slopes_sum, std::abs(slopes) / size);
  }
  return c;
}

}  // namespace compare
