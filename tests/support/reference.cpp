// Attention from its definitions: orders, attended sets and formulas in plain loops, nothing shared
// with the library.
#include "tests/support/reference.h"
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <type_traits>
#include <utility>
#include "core/error.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt::ref {
namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

// ---- orders -------------------------------------------------------------------------------------

/// The classic d2xy: the cell at position d of the curve on n x n cells.
Cell d2xy(Index n, Index d) {
  Index x = 0, y = 0;
  for (Index s = 1; s < n; s *= 2) {
    const Index rx = (d >> 1) & 1, ry = (d ^ rx) & 1;
    if (ry == 0) {
      if (rx) x = s - 1 - x, y = s - 1 - y;
      std::swap(x, y);
    }
    x += s * rx, y += s * ry, d >>= 2;
  }
  return {x, y};
}

bool power_of_two(Index n) { return n > 0 && (n & (n - 1)) == 0; }

/// Every cell of a W x H grid in the order asked for, or nothing where no second implementation
/// exists.
std::vector<Cell> cells_in_order(Order::Kind kind, Index w, Index h, Index tile_h, Index tile_w) {
  std::vector<Cell> cells;
  const auto row = [&](Index y, Index x0, Index x1) {
    for (Index x = x0; x < std::min(x1, w); ++x) cells.push_back({x, y});
  };
  switch (kind) {
    case Order::Kind::row:
      for (Index y = 0; y < h; ++y) row(y, 0, w);
      break;
    case Order::Kind::snake:
      for (Index y = 0; y < h; ++y)
        for (Index i = 0; i < w; ++i) cells.push_back({y % 2 == 0 ? i : w - 1 - i, y});
      break;
    case Order::Kind::tiles:
      for (Index y0 = 0; y0 < h; y0 += tile_h)
        for (Index x0 = 0; x0 < w; x0 += tile_w)
          for (Index y = y0; y < std::min(y0 + tile_h, h); ++y) row(y, x0, x0 + tile_w);
      break;
    case Order::Kind::morton: {
      Index side = 1;
      while (side < std::max(w, h)) side *= 2;
      for (Index code = 0; code < side * side; ++code) {
        Cell c;
        for (int bit = 0; bit < 31; ++bit)
          c.x |= (code >> (2 * bit) & 1) << bit, c.y |= (code >> (2 * bit + 1) & 1) << bit;
        if (c.x < w && c.y < h) cells.push_back(c);
      }
      break;
    }
    case Order::Kind::hilbert:
      if (w != h || !power_of_two(w)) break;
      for (Index d = 0; d < w * h; ++d) cells.push_back(d2xy(w, d));
      break;
  }
  return cells;
}

/// One run of `length` tokens, on its own grid or folded; empty where this file has no
/// implementation.
std::vector<std::int32_t> run_of(const Order& order, Index length) {
  Grid g = order.grid;
  if (order.folds()) {
    g.width = 1;
    while (g.width * g.width < length) g.width *= 2;
    g.height = (length + g.width - 1) / g.width;
  }
  std::vector<std::int32_t> tokens;
  for (const Cell& c : cells_in_order(order.kind, g.width, g.height, order.tile_height, order.tile_width))
    if (c.y * g.width + c.x < length) tokens.push_back(static_cast<std::int32_t>(c.y * g.width + c.x));
  return tokens;
}

Pi inverted(std::vector<std::int32_t> token_at, bool independent) {
  Pi pi{std::move(token_at), {}, independent};
  pi.position_of.assign(pi.token_at.size(), -1);
  for (std::size_t i = 0; i < pi.token_at.size(); ++i)
    pi.position_of[at(pi.token_at[i])] = static_cast<std::int32_t>(i);
  return pi;
}

}  // namespace

Pi order_of(const Order& order, Index length) {
  check(order.scope != Order::Scope::per_segment, "ref::order_of: which segment?");
  const auto library = [&] { return inverted(build_permutation(order, length).token_at, false); };
  if (order.grid.frames > 1 || length == 0) return library();
  const bool chunked = order.scope == Order::Scope::chunked;
  const Index c = chunked ? std::min(order.chunk, length) : length;
  if (!order.folds() && order.grid.width * order.grid.height != c) return library();  // so many rows of a larger grid
  const std::vector<std::int32_t> one = run_of(order, c);
  if (one.empty()) return library();
  std::vector<std::int32_t> all;
  for (Index begin = 0; begin < length; begin += c)
    for (const std::int32_t t : one)
      if (begin + t < length) all.push_back(static_cast<std::int32_t>(begin + t));
  return inverted(std::move(all), true);
}

Grid grid_of(const Order& order, Index length) {
  if (!order.folds() && order.grid.width * order.grid.height * order.grid.frames == length) return order.grid;
  Index width = 1;
  while (width * width < length) width *= 2;
  return {width, (length + width - 1) / width};
}

// ---- attended sets ------------------------------------------------------------------------------

namespace {

struct Where {
  Index position, x, y;
};

/// How often branch i lists u for t, causality aside.
bool lists(const Branch& b, std::size_t i, DilationMode mode, Index length, const Grid& grid, Index head,
           const Where& t, const Where& u) {
  const auto centred = [](Index p, Index k, Index n) {
    return std::min(std::max(p, k / 2), std::max(n - 1 - k / 2, k / 2));
  };
  switch (b.kind) {
    case Branch::Kind::dense: return true;
    case Branch::Kind::segment: {
      const Index s = t.position / b.size;
      if (u.position / b.size != s) return false;
      const Index j = t.position - s * b.size, key = u.position - s * b.size, r = b.dilation;
      if (mode == DilationMode::residue) return key % r == j % r;
      const Index offset = mode == DilationMode::head_groups ? static_cast<Index>(i) % r
                           : b.offset_by_head                ? head % r
                                                             : b.offset;
      const bool only_active = mode == DilationMode::longnet || mode == DilationMode::head_groups;
      return key % r == offset && (!only_active || j % r == offset);
    }
    case Branch::Kind::slide: return std::abs(t.position - u.position) <= b.size;
    case Branch::Kind::neighborhood: return std::abs(u.position - centred(t.position, b.size, length)) <= b.size / 2;
    case Branch::Kind::window2d: return t.y / b.rows == u.y / b.rows && t.x / b.columns == u.x / b.columns;
    case Branch::Kind::slide2d: return std::abs(t.y - u.y) <= b.rows && std::abs(t.x - u.x) <= b.columns;
    case Branch::Kind::neighborhood2d:
      return std::abs(u.y - centred(t.y, b.rows, grid.height)) <= b.rows / 2 &&
             std::abs(u.x - centred(t.x, b.columns, grid.width)) <= b.columns / 2;
    case Branch::Kind::blocks: {
      const std::pair<std::int32_t, std::int32_t> pair(static_cast<std::int32_t>(t.position / b.size),
                                                       static_cast<std::int32_t>(u.position / b.size));
      return std::find(b.pairs.begin(), b.pairs.end(), pair) != b.pairs.end();
    }
  }
  return false;
}

/// Whether branch i of n serves a head.
bool serves(DilationMode mode, std::size_t i, std::size_t n, Index head, Index heads) {
  if (mode != DilationMode::head_groups) return true;
  const Index groups = static_cast<Index>(n), g = static_cast<Index>(i);
  Index begin = 0;
  for (Index before = 0; before < g; ++before) begin += heads / groups + (before < heads % groups ? 1 : 0);
  return head >= begin && head < begin + heads / groups + (g < heads % groups ? 1 : 0);
}

}  // namespace

Attended::Attended(const PlanSpec& spec, const Pi& pi) : length_(spec.length) {
  const Index n = spec.length;
  const Grid grid = grid_of(spec.order, n);
  const bool positions_are_tokens = spec.order.scope == Order::Scope::order_only;
  std::vector<Where> where(at(n));
  for (Index t = 0; t < n; ++t) {
    const Index in_frame = grid.width > 0 ? t % (grid.width * grid.height) : t;
    where[at(t)] = {positions_are_tokens ? t : Index{pi.position_of[at(t)]}, in_frame % grid.width,
                    in_frame / grid.width};
  }
  const bool by_head =
      spec.dilation_mode == DilationMode::head_groups ||
      std::any_of(spec.pattern.begin(), spec.pattern.end(), [](const Branch& b) { return b.offset_by_head; });
  for (Index head = 0; head < (by_head ? spec.heads : 1); ++head) {
    std::vector<std::uint8_t> count(at(n * n), 0);
    for (std::size_t i = 0; i < spec.pattern.size(); ++i) {
      if (!serves(spec.dilation_mode, i, spec.pattern.size(), head, spec.heads)) continue;
      for (Index t = 0; t < n; ++t)
        for (Index u = 0; u < n; ++u) {
          if (spec.causality == Causality::token && u > t) continue;
          if (spec.causality == Causality::curve && where[at(u)].position > where[at(t)].position) continue;
          if (lists(spec.pattern[i], i, spec.dilation_mode, n, grid, head, where[at(t)], where[at(u)]))
            ++count[at(t * n + u)];
        }
    }
    tables_.push_back(listed(n, std::move(count)));
  }
  for (Index head = 0; head < spec.heads; ++head) table_of_.push_back(by_head ? at(head) : 0);
}

Attended::Attended(Index length, Index heads, std::vector<std::uint8_t> count)
    : length_(length), table_of_(at(heads), 0) {
  check(count.size() == at(length * length), "ref::Attended: ", count.size(), " counts for ", length, " tokens");
  tables_.push_back(listed(length, std::move(count)));
}

Attended::Table Attended::listed(Index length, std::vector<std::uint8_t> count) {
  Table table{std::move(count), std::vector<std::vector<Key>>(at(length))};
  for (Index t = 0; t < length; ++t)
    for (Index u = 0; u < length; ++u)
      if (const int times = table.count[at(t * length + u)])
        table.keys[at(t)].push_back({static_cast<std::int32_t>(u), times});
  return table;
}

Index Attended::times(Index head, Index t, Index u) const { return tables_[table_of(head)].count[at(t * length_ + u)]; }
const std::vector<Attended::Key>& Attended::keys(Index head, Index t) const {
  return tables_[table_of(head)].keys[at(t)];
}

Index Attended::pairs(Index head) const {
  const auto& count = tables_[table_of(head)].count;
  return std::accumulate(count.begin(), count.end(), Index{0});
}

Index Attended::empty_rows() const {
  Index rows = 0;
  for (Index t = 0; t < length_; ++t)
    rows += std::any_of(tables_.begin(), tables_.end(), [&](const Table& table) { return table.keys[at(t)].empty(); });
  return rows;
}

// ---- attention ----------------------------------------------------------------------------------

namespace {

/// Addresses in the dense layouts.
struct Layout {
  const Sizes& n;
  std::size_t q(Index b, Index t, Index h) const { return at(((b * n.length + t) * n.heads + h) * n.dim); }
  std::size_t k(Index b, Index u, Index h) const {
    return at(((b * n.length + u) * n.kv_heads + h / (n.heads / n.kv_heads)) * n.dim);
  }
  std::size_t row(Index b, Index t, Index h) const { return at((b * n.heads + h) * n.length + t); }
};

/// The dropout multiplier of a pair: 1 / (1 - p) where it is kept, else 0; p counts 65,536ths.
/// Number u % 8 of the 16-bit numbers that Philox4x32 makes in 7 rounds of {u / 8, t, head,
/// stream}.
double weight(const Sizes& n, Index b, Index h, Index t, Index u) {
  if (n.dropout == 0) return 1;
  const auto low = [](std::uint64_t x) { return x & 0xffffffff; };
  std::uint64_t x0 = low(static_cast<std::uint64_t>(u / 8)), x1 = low(static_cast<std::uint64_t>(t)),
                x2 = low(static_cast<std::uint64_t>(b * n.heads + h)), x3 = low(n.key.stream);
  std::uint64_t key0 = low(n.key.seed), key1 = (n.key.seed >> 32) ^ (n.key.stream >> 32);
  for (int round = 0; round < 7; ++round) {
    const std::uint64_t a = 0xD2511F53 * x0, c = 0xCD9E8D57 * x2;
    x0 = (c >> 32) ^ x1 ^ key0, x1 = low(c), x2 = (a >> 32) ^ x3 ^ key1, x3 = low(a);
    key0 = low(key0 + 0x9E3779B9), key1 = low(key1 + 0xBB67AE85);
  }
  const std::uint64_t words[] = {x0, x1, x2, x3};
  const auto number = static_cast<double>(words[u % 8 / 2] >> (u % 2 * 16) & 0xffff);
  const double dropped = std::round(n.dropout * 65536);
  return number >= dropped ? 65536 / (65536 - dropped) : 0;
}

template <class T> T stored(const Store& store, T x) {
  if constexpr (std::is_same_v<T, float>) return store ? store(x) : x;
  else return x;
}

/// One row of P and its lse.
template <class T>
T probabilities(const Sizes& n, const std::vector<Attended::Key>& keys, const Inputs<T>& in, std::size_t q, Index b,
                Index h, const Store& store, std::vector<T>& p) {
  using judge::exp, judge::log;
  const Layout at_row{n};
  p.clear();
  T largest = T(-std::numeric_limits<double>::infinity());
  for (const auto& key : keys) {
    T score = T(0);
    const std::size_t k = at_row.k(b, key.token, h);
    for (std::size_t d = 0; d < at(n.dim); ++d) score = score + in.q[q + d] * in.k[k + d];
    p.push_back(stored(store, T(n.scale) * score));
    if (p.back() > largest) largest = p.back();
  }
  T sum = T(0);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    p[i] = exp(p[i] - largest);
    sum = sum + T(keys[i].times) * p[i];
  }
  for (T& x : p) x = stored(store, x / sum);
  return largest + log(sum);
}

}  // namespace

template <class T> Output<T> attention(const Sizes& n, const Attended& set, const Inputs<T>& in, const Store& store) {
  const Layout where{n};
  Output<T> out{std::vector<T>(in.q.size(), T(0)),
                std::vector<T>(at(n.batch * n.heads * n.length), T(-std::numeric_limits<double>::infinity()))};
  std::vector<T> p;
  for (Index b = 0; b < n.batch; ++b)
    for (Index h = 0; h < n.heads; ++h)
      for (Index t = 0; t < n.length; ++t) {
        const auto& keys = set.keys(h, t);
        if (keys.empty()) continue;
        const std::size_t q = where.q(b, t, h);
        out.lse[where.row(b, t, h)] = probabilities(n, keys, in, q, b, h, store, p);
        for (std::size_t i = 0; i < keys.size(); ++i) {
          const std::size_t v = where.k(b, keys[i].token, h);
          const T w = T(keys[i].times * weight(n, b, h, t, keys[i].token)) * p[i];
          for (std::size_t d = 0; d < at(n.dim); ++d) out.o[q + d] = out.o[q + d] + w * in.v[v + d];
        }
        for (std::size_t d = 0; d < at(n.dim); ++d) out.o[q + d] = stored(store, out.o[q + d]);
      }
  return out;
}

template <class T>
Slopes<T> attention_gradients(const Sizes& n, const Attended& set, const Inputs<T>& in, const std::vector<T>& d_o,
                              const Store& store) {
  const Layout where{n};
  Slopes<T> out{std::vector<T>(in.q.size(), T(0)), std::vector<T>(in.k.size(), T(0)),
                std::vector<T>(in.v.size(), T(0))};
  std::vector<T> p, dp;
  for (Index b = 0; b < n.batch; ++b)
    for (Index h = 0; h < n.heads; ++h)
      for (Index t = 0; t < n.length; ++t) {
        const auto& keys = set.keys(h, t);
        if (keys.empty()) continue;
        const std::size_t q = where.q(b, t, h);
        probabilities(n, keys, in, q, b, h, store, p);
        dp.assign(keys.size(), T(0));
        T delta = T(0);  // dO . O = sum over the list of P M dO . V
        for (std::size_t i = 0; i < keys.size(); ++i) {
          const std::size_t v = where.k(b, keys[i].token, h);
          const T m = T(weight(n, b, h, t, keys[i].token));
          for (std::size_t d = 0; d < at(n.dim); ++d) {
            dp[i] = dp[i] + d_o[q + d] * in.v[v + d];
            out.dv[v + d] = out.dv[v + d] + T(keys[i].times) * (m * p[i]) * d_o[q + d];
          }
          dp[i] = stored(store, m * dp[i]);
          delta = delta + T(keys[i].times) * p[i] * dp[i];
        }
        for (std::size_t i = 0; i < keys.size(); ++i) {
          const std::size_t k = where.k(b, keys[i].token, h);
          const T ds = T(keys[i].times) * stored(store, p[i] * (dp[i] - delta));
          for (std::size_t d = 0; d < at(n.dim); ++d) {
            out.dq[q + d] = out.dq[q + d] + T(n.scale) * ds * in.k[k + d];
            out.dk[k + d] = out.dk[k + d] + T(n.scale) * ds * in.q[q + d];
          }
        }
      }
  for (auto* tensor : {&out.dq, &out.dk, &out.dv})
    for (T& x : *tensor) x = stored(store, x);
  return out;
}

template Output<float> attention(const Sizes&, const Attended&, const Inputs<float>&, const Store&);
template Output<double> attention(const Sizes&, const Attended&, const Inputs<double>&, const Store&);
template Output<Dual> attention(const Sizes&, const Attended&, const Inputs<Dual>&, const Store&);
template Slopes<float> attention_gradients(const Sizes&, const Attended&, const Inputs<float>&,
                                           const std::vector<float>&, const Store&);
template Slopes<double> attention_gradients(const Sizes&, const Attended&, const Inputs<double>&,
                                            const std::vector<double>&, const Store&);

Magnitudes magnitudes(const Sizes& n, const Attended& set, const Inputs<double>& in, const std::vector<double>& d_o) {
  const Layout where{n};
  const std::size_t dim = at(n.dim);
  Magnitudes size;
  std::vector<double> o(dim), dq(dim), dk(in.k.size(), 0.0), dv(in.v.size(), 0.0), p;
  std::vector<Index> queries(at(n.batch * n.length * n.kv_heads), 0);
  const auto grow = [](double& largest, double x) {
    if (x > largest) largest = x;
  };  // a NaN does not grow anything
  for (Index b = 0; b < n.batch; ++b)
    for (Index h = 0; h < n.heads; ++h)
      for (Index t = 0; t < n.length; ++t) {
        const auto& keys = set.keys(h, t);
        if (keys.empty()) continue;
        const std::size_t q = where.q(b, t, h);
        grow(size.lse, std::abs(probabilities(n, keys, in, q, b, h, {}, p)));
        std::fill(o.begin(), o.end(), 0.0), std::fill(dq.begin(), dq.end(), 0.0);
        Index listed = 0;
        for (std::size_t i = 0; i < keys.size(); ++i) {
          const std::size_t k = where.k(b, keys[i].token, h);
          const double m = weight(n, b, h, t, keys[i].token);
          double score = 0;
          for (std::size_t d = 0; d < dim; ++d) {
            score += std::abs(in.q[q + d] * in.k[k + d]);
            o[d] += keys[i].times * m * p[i] * std::abs(in.v[k + d]);
            dv[k + d] += keys[i].times * m * p[i] * std::abs(d_o[q + d]);
          }
          grow(size.score, std::abs(n.scale) * score);
          queries[k / dim] += keys[i].times, listed += keys[i].times;
        }
        size.keys = std::max(size.keys, listed);
        double delta = 0;
        for (std::size_t d = 0; d < dim; ++d) {
          grow(size.o, o[d]);
          delta += std::abs(d_o[q + d]) * o[d];
        }
        for (std::size_t i = 0; i < keys.size(); ++i) {
          const std::size_t k = where.k(b, keys[i].token, h);
          double dp = 0;
          for (std::size_t d = 0; d < dim; ++d) dp += std::abs(d_o[q + d] * in.v[k + d]);
          const double ds = keys[i].times * p[i] * (weight(n, b, h, t, keys[i].token) * dp + delta) * std::abs(n.scale);
          for (std::size_t d = 0; d < dim; ++d) {
            dq[d] += ds * std::abs(in.k[k + d]);
            dk[k + d] += ds * std::abs(in.q[q + d]);
          }
        }
        for (const double x : dq) grow(size.dq, x);
      }
  for (const double x : dk) grow(size.dk, x);
  for (const double x : dv) grow(size.dv, x);
  for (const Index x : queries) size.queries = std::max(size.queries, x);
  return size;
}

double slope_along(const Sizes& n, const Attended& set, const Inputs<double>& in, const Inputs<double>& along,
                   const std::vector<double>& d_o) {
  const auto dual = [](const std::vector<double>& x, const std::vector<double>& dx) {
    std::vector<Dual> y;
    for (std::size_t i = 0; i < x.size(); ++i) y.emplace_back(x[i], dx[i]);
    return y;
  };
  const auto out = attention<Dual>(n, set, {dual(in.q, along.q), dual(in.k, along.k), dual(in.v, along.v)});
  double slope = 0;
  for (std::size_t i = 0; i < d_o.size(); ++i) slope += out.o[i].dx * d_o[i];
  return slope;
}

// ---- plans --------------------------------------------------------------------------------------

namespace {

template <class... Parts> [[noreturn]] void fault(const char* what, const Parts&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  throw PlanFault{what, s.str()};
}

/// Runs that cover [0, n) in order, each of 1 .. limit.
void judge_runs(const char* what, const std::vector<Tiling::Range>& runs, std::size_t n, Index limit) {
  std::int32_t next = 0;
  for (const Tiling::Range& r : runs) {
    if (r.begin != next || r.end <= r.begin || r.end - r.begin > limit)
      fault("runs", what, ": [", r.begin, ", ", r.end, ") after ", next);
    next = r.end;
  }
  if (at(next) != n) fault("runs", what, ": cover ", next, " of ", n);
}

void judge_lists(const char* what, const std::vector<std::int32_t>& begin, const std::vector<Tiling::Ref>& refs,
                 std::size_t n, std::size_t others) {
  if (begin.size() != n + 1 || begin[0] != 0 || at(begin[n]) != refs.size()) fault("tile lists", what, ": ends");
  for (std::size_t i = 0; i < n; ++i) {
    if (begin[i + 1] < begin[i]) fault("tile lists", what, ": begins descend at ", i);
    for (std::int32_t e = begin[i]; e < begin[i + 1]; ++e) {
      const std::int32_t tile = refs[at(e)].tile;
      if (tile < 0 || at(tile) >= others) fault("tile lists", what, ": tile ", tile, " of ", others);
      if (e > begin[i] && tile <= refs[at(e) - 1].tile) fault("tile lists", what, ": not ascending in list ", i);
    }
  }
}

/// One tiling by itself, and what it adds to count[t * length + u].
void judge_tiling(const Tiling& g, Index length, std::vector<int>& count) {
  judge_runs("q_tile", g.q_tile, g.q_token.size(), Tiling::kTile);
  judge_runs("k_tile", g.k_tile, g.k_token.size(), Tiling::kTile);
  for (const auto* tokens : {&g.q_token, &g.k_token}) {
    std::vector<bool> seen(at(length), false);
    for (const std::int32_t t : *tokens) {
      if (t < 0 || t >= length || seen[at(t)]) fault("tokens", "token ", t, " is out of range or twice in one list");
      seen[at(t)] = true;
    }
  }
  judge_lists("keys", g.keys_begin, g.keys, g.q_tile.size(), g.k_tile.size());
  judge_lists("queries", g.queries_begin, g.queries, g.k_tile.size(), g.q_tile.size());
  std::map<std::pair<std::int32_t, std::int32_t>, bool> transposed;
  for (std::size_t j = 0; j < g.k_tile.size(); ++j)
    for (std::int32_t e = g.queries_begin[j]; e < g.queries_begin[j + 1]; ++e)
      transposed[{g.queries[at(e)].tile, static_cast<std::int32_t>(j)}] = g.queries[at(e)].partial;
  if (transposed.size() != g.keys.size())
    fault("transposed", g.keys.size(), " tiles by query, ", transposed.size(), " by key");

  std::vector<std::vector<Tiling::Range>> groups_of(
      g.q_token.size());  // the key runs that a query meets in dense blocks
  for (const Tiling::Group& group : g.group) {
    if (group.q.begin < 0 || group.q.end <= group.q.begin || at(group.q.end) > g.q_token.size() || group.k.begin < 0 ||
        group.k.end < group.k.begin || at(group.k.end) > g.k_token.size())
      fault("groups", "[", group.q.begin, ", ", group.q.end, ") x [", group.k.begin, ", ", group.k.end, ")");
    for (std::int32_t a = group.q.begin; a < group.q.end; ++a) groups_of[at(a)].push_back(group.k);
  }
  Index full = 0, partial = 0, pairs = 0, empty = 0;
  std::vector<Index> keys_of(g.q_token.size(), 0);
  for (std::size_t i = 0; i < g.q_tile.size(); ++i)
    for (std::int32_t e = g.keys_begin[i]; e < g.keys_begin[i + 1]; ++e) {
      const Tiling::Ref ref = g.keys[at(e)];
      const auto other = transposed.find({static_cast<std::int32_t>(i), ref.tile});
      if (other == transposed.end() || other->second != ref.partial)
        fault("transposed", "tile (", i, ", ", ref.tile, ") differs or is missing");
      const Tiling::Range q = g.q_tile[i], k = g.k_tile[at(ref.tile)];
      Index held = 0;
      for (std::int32_t a = q.begin; a < q.end; ++a)
        for (std::int32_t b = k.begin; b < k.end; ++b) {
          if (!attends(g, at(a), at(b))) continue;
          ++held, ++keys_of[at(a)];
          ++count[at(g.q_token[at(a)]) * at(length) + at(g.k_token[at(b)])];
          const auto groups = std::count_if(groups_of[at(a)].begin(), groups_of[at(a)].end(),
                                            [&](const Tiling::Range& r) { return r.begin <= b && b < r.end; });
          if (groups != 1) fault("groups", "pair (", a, ", ", b, ") of tile (", i, ", ", ref.tile, ") is in ", groups);
        }
      const Index all = Index{q.end - q.begin} * (k.end - k.begin);
      if (held == 0) fault("empty tile", "(", i, ", ", ref.tile, ") is listed and has no pair");
      if (!ref.partial && held != all)
        fault("full tile", "(", i, ", ", ref.tile, ") is said to be full and holds ", held, " of ", all);
      if (ref.partial && held == all)
        fault("partial tile", "(", i, ", ", ref.tile, ") is said to be partial and is full");
      (ref.partial ? partial : full) += 1;
      pairs += held;
    }
  for (const Index n : keys_of) empty += n == 0;
  if (full != g.tiles_full || partial != g.tiles_partial)
    fault("tile counts", "counted ", full, " full and ", partial, " partial, tiling says ", g.tiles_full, " and ",
          g.tiles_partial);
  if (pairs != g.pairs) fault("pairs", "counted ", pairs, ", tiling says ", g.pairs);
  if (empty != g.empty_queries) fault("empty_queries", "counted ", empty, ", tiling says ", g.empty_queries);
}

void judge_or_throw(const Plan& plan, const Attended& set) {
  const Index n = plan.length();
  if (plan.heads() != set.heads()) fault("heads", plan.heads(), " of ", set.heads());
  if (plan.order().length() != n) fault("order", "length ", plan.order().length());
  std::set<std::pair<std::size_t, std::vector<std::int32_t>>> judged;
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto list = plan.tilings_of(h);
    for (const std::int32_t i : list)
      if (i < 0 || at(i) >= plan.tilings().size()) fault("tilings_of", "head ", h, " names tiling ", i);
    if (!judged.emplace(set.table_of(h), std::vector(list.begin(), list.end())).second) continue;
    std::vector<int> count(at(n * n), 0);
    for (const std::int32_t i : list) judge_tiling(plan.tilings()[at(i)], n, count);
    for (Index t = 0; t < n; ++t)
      for (Index u = 0; u < n; ++u)
        if (count[at(t * n + u)] != set.times(h, t, u))
          fault("attended set", "head ", h, " query ", t, " key ", u, ": tiles ", count[at(t * n + u)],
                " times, definition ", set.times(h, t, u));
  }
  if (plan.empty_rows() != set.empty_rows()) fault("empty_rows", plan.empty_rows(), ", definition ", set.empty_rows());
  // All pairs of a short sequence, a lattice of those of a long one: the step has no factor in
  // common with a segment.
  const Index all = plan.heads() * n * n, step = std::max<Index>(1, all / 400) | 1;
  for (Index i = 0; i < all; i += step) {
    const Index h = i / (n * n), t = i / n % n, u = i % n;
    if (plan.attends(h, t, u) != set.times(h, t, u))
      fault("attends", "head ", h, " query ", t, " key ", u, ": ", plan.attends(h, t, u), ", definition ",
            set.times(h, t, u));
  }
}

}  // namespace

PlanFault judge(const Plan& plan, const Attended& set) {
  try {
    judge_or_throw(plan, set);
    return {};
  } catch (const PlanFault& f) { return f; }
}

// ---- tiles --------------------------------------------------------------------------------------

TileShare tile_share(const Pi& pi, Index side,
                     const std::function<void(Index, const std::function<void(Index)>&)>& keys_of) {
  const Index length = static_cast<Index>(pi.token_at.size()), tiles = (length + side - 1) / side;
  std::vector<Index> pairs(at(tiles * tiles), 0);
  for (Index t = 0; t < length; ++t) {
    const Index row = pi.position_of[at(t)] / side * tiles;
    keys_of(t, [&](Index u) { ++pairs[at(row + pi.position_of[at(u)] / side)]; });
  }
  const auto extent = [&](Index tile) { return std::min(side, length - tile * side); };
  Index touched = 0, partial = 0;
  for (Index i = 0; i < tiles; ++i)
    for (Index j = 0; j < tiles; ++j) {
      const Index held = pairs[at(i * tiles + j)];
      touched += held > 0;
      partial += held > 0 && held < extent(i) * extent(j);
    }
  const double all = static_cast<double>(tiles * tiles);
  return {static_cast<double>(touched) / all, static_cast<double>(partial) / all};
}

}  // namespace hilt::ref
