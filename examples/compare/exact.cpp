// Attention and its gradients in plain loops, in any number type. For every row t of every head:
//
//      S(u) = c q.k_u     L = log sum_u e^S(u)     P(u) = e^(S(u) - L)     o = sum_u M(u) P(u) v_u
//      Delta = dO.o       dS(u) = P(u) (M(u) dO.v_u - Delta)
//      dq = c sum_u dS(u) k_u     and, added up over the rows,
//      dk_u += c dS(u) q          dv_u += M(u) P(u) dO
#include "exact.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <span>

namespace compare {
namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

/// What an intermediate becomes when a tensor of this type holds it.
template <class Stored, class T> T stored(T x) {
  if constexpr (sizeof(Stored) == 2) return static_cast<T>(static_cast<float>(Stored(static_cast<float>(x))));
  else return x;
}

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

/// One query row: where q, o, d_o, dq lie, and where the i-th key's k, v, dk, dv do.
struct Row {
  const ExactProblem& p;
  Index b, h, t;
  std::span<const std::int32_t> key;

  std::size_t q() const { return at(((b * p.length + t) * p.heads + h) * p.dim); }
  std::size_t k(std::size_t i) const {
    return at(((b * p.length + key[i]) * p.kv_heads + h / (p.heads / p.kv_heads)) * p.dim);
  }
  double multiplier(std::size_t i) const {
    return p.dropout > 0 ? dropout_multiplier(p.key, b * p.heads + h, t, key[i], p.dropout) : 1;
  }
};

/// f(row) for all rows that have keys; rows that share a key head come one after the other on one
/// thread, so that what is added to a key has one writer and one order.
template <class F> void for_rows(const ExactProblem& p, const AttendedSets& sets, F&& f) {
  const Index group = p.heads / p.kv_heads;
  hilt::parallel_for(p.batch * p.kv_heads, 1, [&](Index first, Index last) {
    for (Index task = first; task < last; ++task)
      for (Index h = task % p.kv_heads * group; h < (task % p.kv_heads + 1) * group; ++h)
        for (Index t = 0; t < p.length; ++t) {
          const KeyLists& set = sets.head(h);
          const auto key = std::span(set.key).subspan(set.begin[at(t)], set.begin[at(t) + 1] - set.begin[at(t)]);
          if (!key.empty()) f(Row{p, task / p.kv_heads, h, t, key});
        }
  });
}

/// e^(x - log sum e^x) in place.
template <class T> void softmax(std::vector<T>& x) {
  const T largest = *std::ranges::max_element(x);
  T sum = 0;
  for (T& value : x) sum += value = std::exp(value - largest);
  for (T& value : x) value /= sum;
}

/// Computes in T, stores intermediates as Stored.
template <class T, class Stored> Four attention(const ExactProblem& p, const AttendedSets& sets) {
  const auto converted = [](const std::vector<double>& x) { return std::vector<T>(x.begin(), x.end()); };
  const std::vector<T> q = converted(p.q), k = converted(p.k), v = converted(p.v), d_o = converted(p.d_o);
  std::vector<T> o(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
  const std::size_t dim = at(p.dim);
  const T scale = static_cast<T>(p.scale);
  for_rows(p, sets, [&](const Row& row) {
    const std::size_t keys = row.key.size(), t = row.q();
    std::vector<T> weight(keys), dropped(keys), d_weight(keys);
    for (std::size_t i = 0; i < keys; ++i)
      weight[i] = stored<Stored>(scale * stored<Stored>(dot(&q[t], &k[row.k(i)], dim)));
    softmax(weight);
    for (std::size_t i = 0; i < keys; ++i) {
      const T m = static_cast<T>(row.multiplier(i));
      weight[i] = stored<Stored>(weight[i]);
      dropped[i] = stored<Stored>(m * weight[i]);
      d_weight[i] = stored<Stored>(m * stored<Stored>(dot(&d_o[t], &v[row.k(i)], dim)));
      add_times(&o[t], dropped[i], &v[row.k(i)], dim);
    }
    for (std::size_t d = 0; d < dim; ++d) o[t + d] = stored<Stored>(o[t + d]);
    const T delta = stored<Stored>(dot(&d_o[t], &o[t], dim));
    for (std::size_t i = 0; i < keys; ++i) {
      const T ds = stored<Stored>(scale * stored<Stored>(weight[i] * (d_weight[i] - delta)));
      add_times(&dq[t], ds, &k[row.k(i)], dim);
      add_times(&dk[row.k(i)], ds, &q[t], dim);
      add_times(&dv[row.k(i)], dropped[i], &d_o[t], dim);
    }
  });
  Four out;
  const std::array<const std::vector<T>*, 4> all{&o, &dq, &dk, &dv};
  for (std::size_t i = 0; i < 4; ++i)
    for (T x : *all[i]) out[i].push_back(static_cast<double>(stored<Stored>(x)));
  return out;
}

// Whom to ask attends() about: a superset of the keys of t, so that long sequences with short lists
// need not try every pair.
std::vector<std::int32_t> candidates(const hilt::Plan& plan, Index t) {
  using Kind = hilt::Branch::Kind;
  const Index length = plan.length(), width = plan.grid().width, x = t % width, y = t / width;
  const bool by_token = plan.spec().order.scope == hilt::Order::Scope::order_only;
  const hilt::Permutation& order = plan.order();
  const Index p = by_token ? t : Index{order.position_of[at(t)]};
  std::vector<std::int32_t> out;
  for (const hilt::Branch& b : plan.spec().pattern) {
    const bool everywhere = b.kind == Kind::dense || b.kind == Kind::blocks, planar = !everywhere && b.is_order_only();
    if (planar) {
      for (Index v = std::max<Index>(0, y - b.rows); v <= std::min(y + b.rows, (length - 1) / width); ++v)
        for (Index u = std::max<Index>(0, x - b.columns); u <= std::min(x + b.columns, width - 1); ++u)
          if (v * width + u < length) out.push_back(static_cast<std::int32_t>(v * width + u));
    } else {
      const Index reach = everywhere ? length : b.size;
      for (Index i = std::max<Index>(0, p - reach); i <= std::min(p + reach, length - 1); ++i)
        out.push_back(by_token ? static_cast<std::int32_t>(i) : order.token_at[at(i)]);
    }
  }
  std::ranges::sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace

AttendedSets attended_sets(const hilt::Plan& plan) {
  AttendedSets out;
  std::map<std::vector<std::int32_t>, std::size_t> known;  // by the tilings a head merges
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto tilings = plan.tilings_of(h);
    const auto [entry, fresh] = known.try_emplace({tilings.begin(), tilings.end()}, out.sets.size());
    out.of_head.push_back(entry->second);
    if (!fresh) continue;
    std::vector<std::vector<std::int32_t>> rows(at(plan.length()));
    hilt::parallel_for(plan.length(), 16, [&](Index first, Index last) {
      for (Index t = first; t < last; ++t)
        for (std::int32_t u : candidates(plan, t)) rows[at(t)].insert(rows[at(t)].end(), at(plan.attends(h, t, u)), u);
    });
    KeyLists& set = out.sets.emplace_back();
    set.begin.push_back(0);
    for (const auto& row : rows) {
      set.key.insert(set.key.end(), row.begin(), row.end());
      set.begin.push_back(set.key.size());
    }
  }
  return out;
}

Four exact_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype) {
  if (dtype == hilt::DType::f64) return attention<long double, long double>(problem, sets);
  return attention<double, double>(problem, sets);
}

Four naive_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype) {
  switch (dtype) {
    case hilt::DType::f64: return attention<double, double>(problem, sets);
    case hilt::DType::bf16: return attention<float, hilt::bf16>(problem, sets);
    case hilt::DType::f16: return attention<float, hilt::f16>(problem, sets);
    default: return attention<float, float>(problem, sets);
  }
}

// With r^2 = 1 + L^2 + sum (c q k)^2, the squared error of a weight P in roundings of it:
//   o: (M P v)^2 r^2     dv: (M P dO)^2 r^2     dS: e^2 = c^2 P^2 ((M dP - Delta)^2 r^2 + sum (M dO v)^2 +
//   sum (dO o)^2)     dq: e^2 k^2     dk: e^2 q^2
Four term_sizes(const ExactProblem& p, const AttendedSets& sets, hilt::DType dtype) {
  const auto square = [](double x) { return x * x; };
  const std::size_t dim = at(p.dim);
  const bool wide = hilt::size_of(dtype) > 2;
  std::vector<double> o(p.q.size()), dq(p.q.size()), dk(p.k.size()), dv(p.k.size());
  for_rows(p, sets, [&](const Row& row) {
    const std::size_t t = row.q(), keys = row.key.size();
    std::vector<double> weight(keys), out(dim);
    for (std::size_t i = 0; i < keys; ++i) weight[i] = p.scale * dot(&p.q[t], &p.k[row.k(i)], dim);
    const double largest = *std::ranges::max_element(weight);
    softmax(weight);
    const double lse = largest - std::log(*std::ranges::max_element(weight));
    for (std::size_t i = 0; i < keys; ++i) add_times(out.data(), row.multiplier(i) * weight[i], &p.v[row.k(i)], dim);
    double delta = 0, delta_terms = 0;
    for (std::size_t d = 0; d < dim; ++d) delta += p.d_o[t + d] * out[d], delta_terms += square(p.d_o[t + d] * out[d]);
    for (std::size_t i = 0; i < keys; ++i) {
      const std::size_t k = row.k(i);
      const double m = row.multiplier(i);
      double d_weight = 0, d_weight_terms = 0, score_terms = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        d_weight += m * p.d_o[t + d] * p.v[k + d];
        d_weight_terms += square(m * p.d_o[t + d] * p.v[k + d]);
        score_terms += square(p.scale * p.q[t + d] * p.k[k + d]);
      }
      const double r = 1 + (wide ? square(lse) + score_terms : 0);
      const double e = square(p.scale * weight[i]) * (square(d_weight - delta) * r + d_weight_terms + delta_terms);
      for (std::size_t d = 0; d < dim; ++d) {
        o[t + d] += square(m * weight[i] * p.v[k + d]) * r;
        dv[k + d] += square(m * weight[i] * p.d_o[t + d]) * r;
        dq[t + d] += e * square(p.k[k + d]);
        dk[k + d] += e * square(p.q[t + d]);
      }
    }
  });
  Four size{o, dq, dk, dv};
  for (std::vector<double>& tensor : size)
    for (double& x : tensor) x = std::sqrt(x);
  return size;
}

double dropout_multiplier(const hilt::RandomKey& key, Index head, Index t, Index u, double p) {
  const auto word = [](Index i) { return static_cast<std::uint32_t>(i); };
  const auto words = hilt::philox<7>({word(u / 8), word(t), word(head), static_cast<std::uint32_t>(key.stream)},
                                     key.seed ^ (key.stream >> 32) << 32);
  const double rate = std::floor(p * 65536 + 0.5), decision = words[at(u % 8 / 2)] / (u % 2 ? 65536 : 1) % 65536;
  return decision >= rate ? 65536 / (65536 - rate) : 0;
}

}  // namespace compare
