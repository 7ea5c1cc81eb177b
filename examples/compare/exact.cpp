// Attention and its gradients in plain loops, in any number type. For every row t of every head:
//
//      S(u) = c q.k_u     L = log sum_u e^S(u)     P(u) = e^(S(u) - L)     o = sum_u M(u) P(u) v_u
//      Delta = dO.o       dS(u) = P(u) (M(u) dO.v_u - Delta)
//      dq = c sum_u dS(u) k_u     and, added up over the rows,
//      dk_u += c dS(u) q          dv_u += M(u) P(u) dO
#include "exact.h"
#include <limits>

namespace compare {
namespace {

/// What an intermediate becomes when a tensor of this type holds it.
template <class Stored, class T> T stored(T x) {
  if constexpr (sizeof(Stored) == 2) return static_cast<T>(static_cast<float>(Stored(static_cast<float>(x))));
  else return x;
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

/// f(row) for all rows that have keys; rows that share a key head, or with terms all of them, come
/// one after the other on one thread, so that what is added up has one writer and one order.
template <class F> void for_rows(const ExactProblem& p, const AttendedSets& sets, F&& f) {
  const Index group = p.heads / p.kv_heads;
  const Index tasks = p.batch * p.kv_heads;
  hilt::parallel_for(tasks, p.terms.any() ? tasks : 1, [&](Index first, Index last) {
    for (Index task = first; task < last; ++task)
      for (Index h = task % p.kv_heads * group; h < (task % p.kv_heads + 1) * group; ++h)
        for (Index t = 0; t < p.length; ++t) {
          if (const auto& keys = sets.head(h).row(t); !keys.empty()) f(Row{p, task / p.kv_heads, h, t, keys});
        }
  });
}

/// e^(x - log sum e^x) in place, with the sink as one key more, which it takes away again: its
/// weight, 0 where there is none.
template <class T> T softmax(std::vector<T>& x, const ExactTerms& terms, Index h) {
  if (terms.has_sink()) x.push_back(static_cast<T>(terms.tensor[3][at(h)]));
  const T largest = *std::ranges::max_element(x);
  T sum = 0;
  for (T& value : x) sum += value = std::exp(value - largest);
  for (T& value : x) value /= sum;
  if (!terms.has_sink()) return 0;
  const T weight = x.back();
  x.pop_back();
  return weight;
}

/// Zeros for o, dq, dk, dv and the gradients of terms.
template <class T> std::array<std::vector<T>, 8> zeros_for(const ExactProblem& p) {
  std::array<std::vector<T>, 8> x;
  for (std::size_t i = 0; i < 4; ++i)
    x[i].resize(i < 2 ? p.q.size() : p.k.size()), x[i + 4].resize(p.terms.tensor[i].size());
  return x;
}

/// Computes in T, stores intermediates as Stored.
template <class T, class Stored> Tensors attention(const ExactProblem& p, const AttendedSets& sets) {
  const auto converted = [](const std::vector<double>& x) { return std::vector<T>(x.begin(), x.end()); };
  const std::vector<T> q = converted(p.q), k = converted(p.k), v = converted(p.v), d_o = converted(p.d_o);
  auto results = zeros_for<T>(p);
  auto& [o, dq, dk, dv, d_slopes, d_relative, d_bias, d_sink] = results;
  const std::size_t dim = at(p.dim);
  const T scale = static_cast<T>(p.scale);
  ExactTerms terms = p.terms;
  for (std::vector<double>& tensor : terms.tensor)
    for (double& x : tensor) x = stored<Stored>(x);
  for_rows(p, sets, [&](const Row& row) {
    const std::size_t keys = row.key.size(), t = row.q();
    std::vector<T> weight(keys), dropped(keys), d_weight(keys), cap_slope(keys);
    for (std::size_t i = 0; i < keys; ++i) {
      const T z = stored<Stored>(scale * stored<Stored>(dot(&q[t], &k[row.k(i)], dim)));
      std::tie(weight[i], cap_slope[i]) = terms.score(z, row.b, row.h, row.t, row.key[i], stored<Stored, T>);
    }
    const T of_sink = stored<Stored>(softmax(weight, terms, row.h));
    for (std::size_t i = 0; i < keys; ++i) {
      const T m = stored<Stored>(static_cast<T>(row.multiplier(i)));
      weight[i] = stored<Stored>(weight[i]);
      dropped[i] = stored<Stored>(m * weight[i]);
      d_weight[i] = stored<Stored>(m * stored<Stored>(dot(&d_o[t], &v[row.k(i)], dim)));
      add_times(&o[t], dropped[i], &v[row.k(i)], dim);
    }
    for (std::size_t d = 0; d < dim; ++d) o[t + d] = stored<Stored>(o[t + d]);
    const T delta = stored<Stored>(dot(&d_o[t], &o[t], dim));
    if (!d_sink.empty()) d_sink[at(row.h)] -= of_sink * delta;
    for (std::size_t i = 0; i < keys; ++i) {
      T ds = stored<Stored>(weight[i] * (d_weight[i] - delta));
      terms.each(row.b, row.h, row.t, row.key[i], [&](std::size_t which, std::size_t element, double factor) {
        results[4 + which][element] += static_cast<T>(factor) * ds;
      });
      ds = stored<Stored>(scale * stored<Stored>(ds * cap_slope[i]));
      add_times(&dq[t], ds, &k[row.k(i)], dim);
      add_times(&dk[row.k(i)], ds, &q[t], dim);
      add_times(&dv[row.k(i)], dropped[i], &d_o[t], dim);
    }
  });
  Tensors out;
  for (std::size_t i = 0; i < out.size(); ++i)  // gradients of terms stay wide
    for (T x : results[i]) out[i].push_back(static_cast<double>(i < 4 ? stored<Stored>(x) : x));
  return out;
}

Site site_on(const hilt::Grid& grid, Index i) {
  return {i / grid.width / grid.height, i / grid.width % grid.height, i % grid.width};
}

// The cells around t, as far as a branch may reach on each axis; both count from `first` on.
void on_grid(const hilt::Plan& plan, const hilt::Branch& b, Index t, Index first, std::vector<std::int32_t>& out) {
  const hilt::Grid& grid = plan.grid();
  const Site cells{grid.frames, grid.height, grid.width}, cell = site_on(grid, t - first);
  Site low{}, high{};
  const std::size_t missing = 3 - b.dimensions();
  for (std::size_t i = missing; i < 3; ++i) {
    const hilt::Branch::Axis& axis = b.axes[i - missing];
    const Index reach = (b.extent(i - missing) + axis.stride) * axis.dilation;
    low[i] = std::max<Index>(0, cell[i] - reach), high[i] = std::min(cell[i] + reach, cells[i] - 1);
  }
  for (Index f = low[0]; f <= high[0]; ++f)
    for (Index y = low[1]; y <= high[1]; ++y)
      for (Index x = low[2]; x <= high[2]; ++x)
        out.push_back(static_cast<std::int32_t>(first + (f * grid.height + y) * grid.width + x));
}

// Whom to ask attends() about: a superset of the keys of t, so that long sequences with short lists
// need not try every pair.
std::vector<std::int32_t> candidates(const hilt::Plan& plan, Index t) {
  using Kind = hilt::Branch::Kind;
  const Index length = plan.length(), before = plan.spec().outside();
  if (t < before) return hilt::query_run(0, length);
  const bool by_token = plan.spec().order.scope == hilt::Order::Scope::order_only;
  const hilt::Permutation& order = plan.order();
  const Index p = by_token ? t : Index{order.position_of[at(t)]};
  std::vector<std::int32_t> out = hilt::query_run(0, before);
  for (const hilt::Branch& b : plan.spec().pattern) {
    const bool everywhere = b.kind == Kind::dense || b.kind == Kind::blocks;
    if (b.on_grid()) {
      on_grid(plan, b, t, before, out);
    } else {
      const Index reach = everywhere ? length : (b.size + b.axes[0].stride) * b.axes[0].dilation;
      for (Index i = std::max<Index>(0, p - reach); i <= std::min(p + reach, length - 1); ++i)
        out.push_back(by_token ? static_cast<std::int32_t>(i) : order.token_at[at(i)]);
    }
  }
  std::ranges::sort(out);
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::vector<Site> sites_of(const hilt::Plan& plan, bool on_grid) {
  std::vector<Site> out;
  for (const auto& [first, one] : alone(plan))
    for (Index t = 0, before = one->spec().outside(); t < one->length(); ++t)
      out.push_back(!on_grid ? Site{0, 0, t} : t < before ? Site{-1, 0, 0} : site_on(one->grid(), t - before));
  out.resize(at(plan.length()));
  return out;
}

}  // namespace

std::vector<std::pair<Index, hilt::PlanPtr>> alone(const hilt::Plan& plan) {
  if (plan.spec().documents.empty()) return {{0, hilt::PlanPtr(hilt::PlanPtr(), &plan)}};
  std::vector<std::pair<Index, hilt::PlanPtr>> out;
  hilt::PlanSpec one = plan.spec();
  one.documents.clear();
  Index first = 0;
  for (const hilt::Document& d : plan.spec().documents[0]) {  // the same list for all rows
    one.length = d.length, one.order.grid = d.grid;
    out.emplace_back(first, hilt::make_plan(one));
    first += d.length;
  }
  return out;
}

ExactTerms exact_terms(const hilt::Plan& plan, const hilt::ScoreTerms& terms) {
  ExactTerms out{.softcap = terms.softcap.value_or(0)};
  const hilt::Tensor slopes = terms.alibi ? hilt::alibi_slopes(plan.heads(), hilt::DType::f64) : terms.slopes;
  const std::array<const hilt::Tensor*, 4> all{&slopes, &terms.relative, &terms.bias, &terms.sink};
  for (std::size_t i = 0; i < all.size(); ++i)
    if (*all[i]) out.tensor[i] = all[i]->to_vector();
  for (int i = 0; terms.bias && i < 4; ++i) out.bias[at(i)] = terms.bias.dim(i);
  const int axes = terms.relative ? terms.relative.rank() - 1 : 0;
  for (int i = 0; i < axes; ++i) out.reach[at(3 - axes + i)] = terms.relative.dim(1 + i) / 2;
  if (slopes) out.site[0] = sites_of(plan, std::ranges::any_of(plan.spec().pattern, &hilt::Branch::on_grid));
  if (axes > 0) out.site[1] = sites_of(plan, axes > 1);
  return out;
}

Index KeyLists::pairs() const {
  Index sum = 0;
  for (const auto& row : rows) sum += std::ssize(row);
  return sum;
}

AttendedSets attended_sets(const hilt::Plan& plan) {
  AttendedSets out;
  std::map<std::vector<std::int32_t>, std::size_t> known;  // by the tilings a head merges
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto tilings = plan.tilings_of(h);
    const auto [entry, fresh] = known.try_emplace({tilings.begin(), tilings.end()}, out.sets.size());
    out.of_head.push_back(entry->second);
    if (!fresh) continue;
    auto& rows = out.sets.emplace_back().rows;
    rows.resize(at(plan.length()));
    for (const auto& part : alone(plan)) {
      const std::int32_t first = static_cast<std::int32_t>(part.first);
      const hilt::Plan& one = *part.second;
      hilt::parallel_for(one.length(), 16, [&](Index begin, Index end) {
        for (Index t = begin; t < end; ++t)
          for (std::int32_t u : candidates(one, t))
            rows[at(first + t)].insert(rows[at(first + t)].end(), at(one.attends(h, t, u)), first + u);
      });
    }
  }
  return out;
}

Tensors exact_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype) {
  if (dtype == hilt::DType::f64) return attention<long double, long double>(problem, sets);
  return attention<double, double>(problem, sets);
}

Tensors naive_attention(const ExactProblem& problem, const AttendedSets& sets, hilt::DType dtype) {
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
// A term's gradient sums e^2 without c, times its factor; a cap's slope, 1 - x^2, adds its own.
Tensors term_sizes(const ExactProblem& p, const AttendedSets& sets, hilt::DType dtype) {
  const auto square = [](double x) { return x * x; };
  const std::size_t dim = at(p.dim);
  const bool wide = hilt::size_of(dtype) > 2;
  Tensors size = zeros_for<double>(p);
  auto& [o, dq, dk, dv, d_slopes, d_relative, d_bias, d_sink] = size;
  for_rows(p, sets, [&](const Row& row) {
    const std::size_t t = row.q(), keys = row.key.size();
    std::vector<double> weight(keys), cap_slope(keys), out(dim);
    for (std::size_t i = 0; i < keys; ++i) {
      const double z = p.scale * dot(&p.q[t], &p.k[row.k(i)], dim);
      std::tie(weight[i], cap_slope[i]) = p.terms.score(z, row.b, row.h, row.t, row.key[i], std::identity());
    }
    const double largest = *std::ranges::max_element(weight);
    const double of_sink = softmax(weight, p.terms, row.h);
    const double lse = largest - std::log(*std::ranges::max_element(weight));
    for (std::size_t i = 0; i < keys; ++i) add_times(out.data(), row.multiplier(i) * weight[i], &p.v[row.k(i)], dim);
    double delta = 0, delta_terms = 0;
    for (std::size_t d = 0; d < dim; ++d) delta += p.d_o[t + d] * out[d], delta_terms += square(p.d_o[t + d] * out[d]);
    if (!d_sink.empty()) d_sink[at(row.h)] += square(of_sink) * (square(delta) * (1 + square(lse)) + delta_terms);
    for (std::size_t i = 0; i < keys; ++i) {
      const std::size_t k = row.k(i);
      const double m = row.multiplier(i);
      double d_weight = 0, d_weight_terms = 0, score_terms = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        d_weight += m * p.d_o[t + d] * p.v[k + d];
        d_weight_terms += square(m * p.d_o[t + d] * p.v[k + d]);
        score_terms += square(p.scale * p.q[t + d] * p.k[k + d]);
      }
      p.terms.each(row.b, row.h, row.t, row.key[i], [&](std::size_t which, std::size_t element, double factor) {
        score_terms += square(p.terms.tensor[which][element] * factor);
      });
      const double r = 1 + (wide ? square(lse) + score_terms : 0);
      const double e_s = square(weight[i]) * (square(d_weight - delta) * r + d_weight_terms + delta_terms);
      p.terms.each(row.b, row.h, row.t, row.key[i], [&](std::size_t which, std::size_t element, double factor) {
        size[4 + which][element] += square(factor) * e_s;
      });
      const double e = square(p.scale) *
                       (square(cap_slope[i]) * e_s + square(2 * (1 - cap_slope[i]) * weight[i] * (d_weight - delta)));
      for (std::size_t d = 0; d < dim; ++d) {
        o[t + d] += square(m * weight[i] * p.v[k + d]) * r;
        dv[k + d] += square(m * weight[i] * p.d_o[t + d]) * r;
        dq[t + d] += e * square(p.k[k + d]);
        dk[k + d] += e * square(p.q[t + d]);
      }
    }
  });
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

/// The root of a sum of squares, against the Euclidean size of the exact tensor.
static double relative(double sum, std::span<const double> exact) {
  double size = 0;
  for (const double x : exact) size += x * x;
  return std::sqrt(sum / std::max(size, std::numeric_limits<double>::min()));
}

Error measure(std::span<const double> x, std::span<const double> exact) {
  Error e;
  double difference = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double d =
        i < x.size() && std::isfinite(x[i]) ? std::abs(x[i] - exact[i]) : std::numeric_limits<double>::infinity();
    if (d > e.max_abs) e.max_abs = d, e.worst_index = i;
    difference += d * d;
  }
  e.rel_l2 = relative(difference, exact);
  return e;
}

Error judge(std::span<const double> x, std::span<const double> exact, std::span<const double> terms, const Error& naive,
            double rounding) {
  const double n = static_cast<double>(exact.size()), floor = rounding * std::max(1.0, 4 / std::sqrt(n));
  double largest = 0, squares = 0;
  for (const double term : terms) largest = std::max(largest, term), squares += term * term;
  Error e = measure(x, exact);
  e.limit = 2 * naive.max_abs + floor * largest;
  e.rel_limit = 2 * naive.rel_l2 + floor * relative(squares, exact);
  e.ok = x.size() == exact.size() && e.max_abs <= e.limit && e.rel_l2 <= e.rel_limit;
  return e;
}

}  // namespace compare
