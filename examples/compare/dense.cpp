// Attention as everybody writes it first: all scores of a head in one matrix, masked by a bias.
#include "dense.h"

#include <cmath>
#include <limits>

namespace compare {
namespace {

using hilt::Tensor;
std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// [heads, L, n] as [kv heads, heads a key head, L, n], or [1, 1, L, n] for all heads alike.
Tensor by_key_head(const Tensor& x, Index kv_heads) {
  return x.dim(0) == 1 ? hilt::unsqueeze(x, 0) : hilt::reshape(x, {kv_heads, x.dim(0) / kv_heads, x.dim(1), x.dim(2)});
}

}  // namespace

Dense::Dense(const Problem& p, const AttendedSets& sets)
    : kv_heads_(p.kv_heads()), group_(p.heads() / p.kv_heads()), scale_(p.scale) {
  const Index length = p.length(), tables = sets.sets.size() == 1 ? 1 : p.heads();
  Tensor bias = hilt::full({tables, length, length}, -std::numeric_limits<double>::infinity(), hilt::DType::f32);
  Tensor present = hilt::ones({tables, length, 1}, hilt::DType::f32);
  float* const score = bias.mutable_data<float>();
  float* const row_present = present.mutable_data<float>();
  bool any_empty = false;
  for (Index h = 0; h < tables; ++h) {
    const KeyLists& set = sets.head(h);
    for (Index t = 0; t < length; ++t) {
      float* const row = score + (h * length + t) * length;
      const std::size_t begin = set.begin[at(t)], end = set.begin[at(t) + 1];
      for (std::size_t i = begin, times = 1; i < end; ++i) {
        times = i > begin && set.key[i] == set.key[i - 1] ? times + 1 : 1;
        row[set.key[i]] = std::log(static_cast<float>(times));
      }
      if (begin < end) continue;
      std::fill_n(row, length, 0.f);  // a softmax of nothing is not a number: see everything, then drop it
      row_present[h * length + t] = 0;
      any_empty = true;
    }
  }
  bias_ = hilt::moved(by_key_head(hilt::to(bias, p.dtype), kv_heads_), p.q.device());
  if (any_empty) present_ = hilt::moved(by_key_head(hilt::to(present, p.dtype), kv_heads_), p.q.device());
  if (p.dropout == 0) return;
  Tensor multipliers = hilt::empty({p.batch(), kv_heads_, group_, length, length}, hilt::DType::f32);
  float* const m = multipliers.mutable_data<float>();
  hilt::parallel_for(p.batch() * p.heads() * length, 16, [&](Index first, Index last) {
    for (Index row = first; row < last; ++row)
      for (Index u = 0; u < length; ++u)
        m[row * length + u] = static_cast<float>(dropout_multiplier(p.key, row / length, row % length, u, p.dropout));
  });
  dropout_ = hilt::moved(hilt::to(multipliers, p.dtype), p.q.device());
}

Tensor Dense::forward(const Tensor& q, const Tensor& k, const Tensor& v) const {
  // [B, L, H, D] -> [B, key heads, heads a key head, L, D]
  const auto heads_first = [&](const Tensor& x) {
    return hilt::permute(hilt::reshape(x, {x.dim(0), x.dim(1), kv_heads_, x.dim(2) / kv_heads_, x.dim(3)}),
                         {0, 2, 3, 1, 4});
  };
  const Tensor s = hilt::matmul(heads_first(q), hilt::transpose(heads_first(k))) * scale_ + bias_;
  Tensor p = hilt::softmax(s);
  if (dropout_) p = p * dropout_;
  Tensor o = hilt::matmul(p, heads_first(v));
  if (present_) o = o * present_;
  return hilt::reshape(hilt::permute(o, {0, 3, 1, 2, 4}), q.shape());
}

}  // namespace compare
