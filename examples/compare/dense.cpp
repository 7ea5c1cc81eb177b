// Attention as everybody writes it first: all scores of a head in one matrix, masked by a bias.
#include "lesson.h"
#include <limits>

namespace compare {
namespace {

/// [heads, ..], or [B, heads, ..] where axis is 1, as [B or 1, key heads, heads a key head, rest];
/// of one for all heads alike, [B or 1, 1, 1, rest].
Tensor by_heads(const Tensor& x, Index kv_heads, int axis, const hilt::Shape& rest) {
  const Index heads = x.dim(axis), of_key = heads == 1 ? 1 : kv_heads;
  hilt::Shape shape{axis == 0 ? 1 : x.dim(0), of_key, heads / of_key};
  for (const Index n : rest) shape.push_back(n);
  return hilt::reshape(x, shape);
}

}  // namespace

Dense::Dense(const Problem& p, const AttendedSets& sets) : kv_heads_(p.kv_heads()), scale_(p.scale), terms_(p.terms) {
  const Index length = p.length(), tables = sets.sets.size() == 1 ? 1 : p.heads();
  const hilt::DType wide = p.dtype == hilt::DType::f64 ? hilt::DType::f64 : hilt::DType::f32;
  Tensor bias = hilt::full({tables, length, length}, -std::numeric_limits<double>::infinity(), wide);
  Tensor present = hilt::ones({tables, length, 1}, hilt::DType::f32);
  const auto typed = [&](const auto& fill) { wide == hilt::DType::f64 ? fill(double()) : fill(float()); };
  float* const row_present = present.mutable_data<float>();
  bool any_empty = false;
  const auto fill_bias = [&]<class T>(T) {
    for (Index at_row = 0; at_row < tables * length; ++at_row) {
      const Index h = at_row / length, t = at_row % length;
      const auto keys = sets.head(h).row(t);
      T* const row = bias.mutable_data<T>() + at_row * length;
      for (std::size_t i = 0, times = 1; i < keys.size(); ++i) {
        times = i > 0 && keys[i] == keys[i - 1] ? times + 1 : 1;
        row[keys[i]] = std::log(static_cast<T>(times));
      }
      if (!keys.empty()) continue;
      std::fill_n(row, length, T{0});  // a softmax of nothing is not a number: see everything, then drop it
      row_present[at_row] = 0;
      any_empty = true;
    }
  };
  typed(fill_bias);
  bias_ = hilt::moved(by_heads(hilt::to(bias, p.dtype), kv_heads_, 0, {length, length}), p.q.device());
  if (any_empty) present_ = hilt::moved(by_heads(hilt::to(present, p.dtype), kv_heads_, 0, {length, 1}), p.q.device());
  if (terms_.alibi) terms_.slopes = hilt::alibi_slopes(p.heads(), hilt::DType::f64);
  const ExactTerms exact = exact_terms(*p.plan, terms_);
  // Pairs outside the grid are 0 apart, and find the 0 that forward() puts behind the table.
  const std::size_t pairs = at(length * length), behind = exact.tensor[1].size() / at(p.heads());
  std::vector<double> apart(pairs);
  std::vector<std::int32_t> entry(pairs, static_cast<std::int32_t>(behind));
  for (Index pair = 0; (terms_.slopes || terms_.relative) && pair < length * length; ++pair)
    exact.each(0, 0, pair / length, pair % length, [&](std::size_t which, std::size_t element, double factor) {
      if (which == 0) apart[at(pair)] = factor;
      if (which == 1) entry[at(pair)] = static_cast<std::int32_t>(element);
    });
  if (terms_.slopes) apart_ = hilt::moved(hilt::to(hilt::from_values(apart, {length, length}), p.dtype), p.q.device());
  if (terms_.alibi) terms_.slopes = hilt::moved(terms_.slopes, p.q.device());
  if (terms_.relative) entry_ = hilt::moved(hilt::from_values(entry, {length * length}), p.q.device());
  if (p.dropout == 0) return;
  Tensor multipliers = hilt::empty({p.batch(), kv_heads_, p.heads() / kv_heads_, length, length}, wide);
  typed([&]<class T>(T) {
    T* const m = multipliers.mutable_data<T>();
    hilt::parallel_for(p.batch() * p.heads() * length, 16, [&](Index first, Index last) {
      for (Index row = first; row < last; ++row)
        for (Index u = 0; u < length; ++u)
          m[row * length + u] = static_cast<T>(dropout_multiplier(p.key, row / length, row % length, u, p.dropout));
    });
  });
  dropout_ = hilt::moved(hilt::to(multipliers, p.dtype), p.q.device());
}

Tensor Dense::forward(const Tensor& q, const Tensor& k, const Tensor& v) const {
  // [B, L, H, D] -> [B, key heads, heads a key head, L, D]
  const auto heads_first = [&](const Tensor& x) {
    return hilt::permute(hilt::reshape(x, {x.dim(0), x.dim(1), kv_heads_, x.dim(2) / kv_heads_, x.dim(3)}),
                         {0, 2, 3, 1, 4});
  };
  Tensor s = hilt::matmul(heads_first(q), hilt::transpose(heads_first(k))) * scale_;
  const auto term = [&](const Tensor& x, int axis, const hilt::Shape& rest) {
    return hilt::to(by_heads(x, kv_heads_, axis, rest), s.dtype());
  };
  const Index length = q.dim(1);
  if (terms_.softcap) s = hilt::tanh(s * (1 / *terms_.softcap)) * *terms_.softcap;
  if (terms_.slopes) s = s + term(terms_.slopes, 0, {1, 1}) * apart_;
  if (const Tensor& table = terms_.relative) {
    const Tensor none = hilt::zeros({table.dim(0), 1}, table.dtype(), table.device()),
                 all = hilt::cat({hilt::reshape(table, {table.dim(0), -1}), none}, 1);
    s = s + term(hilt::gather(all, 1, entry_), 0, {length, length});
  }
  if (const Tensor& b = terms_.bias) s = s + term(b, 1, {b.dim(2), b.dim(3)});
  s = s + bias_;
  if (terms_.sink) s = hilt::cat({s, hilt::expand(term(terms_.sink, 0, {1, 1}), s.shape().with(-1, 1))}, -1);
  Tensor p = hilt::softmax(s);
  if (terms_.sink) p = hilt::slice(p, -1, 0, length);
  if (dropout_) p = p * dropout_;
  Tensor o = hilt::matmul(p, heads_first(v));
  if (present_) o = o * present_;
  return hilt::reshape(hilt::permute(o, {0, 3, 1, 2, 4}), q.shape());
}

}  // namespace compare
