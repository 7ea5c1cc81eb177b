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
    case Order::Kind::automatic:
    case Order::Kind::given: break;
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

Pi order_of(const PlanSpec& spec, const Order& order, Index first, Index length) {
  if (order.kind != Order::Kind::given) return order_of(order, length);
  std::vector<std::int32_t> token_at;
  for (Index i = 0; i < length; ++i) token_at.push_back(static_cast<std::int32_t>(spec.given[at(first + i)] - first));
  return inverted(std::move(token_at), true);
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
  Index position, frame, x, y;
};

/// Whether a slide (`reach` cells) or a neighborhood (`reach` keys) of an axis of n cells lists u
/// for t: cells t % d, t % d + d, .. are a class, in which t is number i of `count`.
bool near(bool slides, Index reach, const Branch::Axis& axis, Index n, Index t, Index u) {
  const Index d = axis.dilation, s = axis.stride;
  if (t % d != u % d || (axis.causal && u > t)) return false;
  const Index i = t / d, k = u / d, count = (n - t % d + d - 1) / d;
  const Index first = i - i % s, last = first + s - 1;
  const Index center = std::min(axis.causal ? last : s == 1 ? i : first + s / 2, count - 1);
  if (axis.causal) return slides ? k >= center - reach : k > center - reach;
  if (slides) return std::abs(k - center) <= reach;
  // The run of so many keys, moved into the class where it sticks out.
  const Index begin = std::max<Index>(0, std::min(center - reach / 2, count - reach));
  return k >= begin && k < begin + reach;
}
bool one_window(Index side, const Branch::Axis& axis, Index t, Index u) {
  return (t + axis.shift) / side == (u + axis.shift) / side && (!axis.causal || u <= t);
}

/// How often branch i lists u for t, causality aside.
bool lists(const Branch& b, std::size_t i, DilationMode mode, Index length, const Grid& grid, Index head,
           const Where& t, const Where& u) {
  using K = Branch::Kind;
  const bool slides = b.kind == K::slide2d || b.kind == K::slide3d;
  switch (b.kind) {
    case Branch::Kind::dense: return true;
    case Branch::Kind::segment: {
      const Index from = t.position + b.axes[0].shift, to = u.position + b.axes[0].shift, s = from / b.size;
      if (const Index first = s * b.size - b.axes[0].shift, last = first + b.size; b.axes[0].borrows)
        return u.position >= std::min(first, std::max<Index>(0, length - b.size)) && u.position < last;
      if (to / b.size != s) return false;
      const Index j = from - s * b.size, key = to - s * b.size, r = b.dilation;
      if (mode == DilationMode::residue) return key % r == j % r;
      const Index offset = mode == DilationMode::head_groups ? static_cast<Index>(i) % r
                           : b.offset_by_head                ? head % r
                                                             : b.offset;
      const bool only_active = mode == DilationMode::longnet || mode == DilationMode::head_groups;
      return key % r == offset && (!only_active || j % r == offset);
    }
    case K::slide: return near(true, b.size, b.axes[0], length, t.position, u.position);
    case K::neighborhood: return near(false, b.size, b.axes[0], length, t.position, u.position);
    case K::window2d: return one_window(b.rows, b.axes[0], t.y, u.y) && one_window(b.columns, b.axes[1], t.x, u.x);
    case K::window3d:
      return one_window(b.frames, b.axes[0], t.frame, u.frame) && one_window(b.rows, b.axes[1], t.y, u.y) &&
             one_window(b.columns, b.axes[2], t.x, u.x);
    case K::slide2d:
    case K::neighborhood2d:
      return near(slides, b.rows, b.axes[0], grid.height, t.y, u.y) &&
             near(slides, b.columns, b.axes[1], grid.width, t.x, u.x);
    case K::slide3d:
    case K::neighborhood3d:
      return near(slides, b.frames, b.axes[0], grid.frames, t.frame, u.frame) &&
             near(slides, b.rows, b.axes[1], grid.height, t.y, u.y) &&
             near(slides, b.columns, b.axes[2], grid.width, t.x, u.x);
    case Branch::Kind::blocks: {
      const Index from = t.position / b.size, to = u.position / b.size, apart = std::abs(from - to);
      switch (b.lists) {
        case Branch::Lists::local: return apart <= b.numbers[0];
        case Branch::Lists::dilated:
          return apart == 0 || std::find(b.numbers.begin(), b.numbers.end(), apart) != b.numbers.end();
        case Branch::Lists::global_local: return std::min(from, to) < b.numbers[0] || apart <= b.numbers[1];
        default: break;
      }
      const std::pair<std::int32_t, std::int32_t> pair(static_cast<std::int32_t>(from), static_cast<std::int32_t>(to));
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
  if (const Index before = std::min(spec.pattern.back().prefix, spec.length); before > 0) {
    PlanSpec rest = spec;
    rest.length -= before, rest.pattern.back().prefix = 0;
    const Attended behind(rest, pi);
    table_of_ = behind.table_of_;
    for (const Table& table : behind.tables_) {
      std::vector<std::uint8_t> count;
      for (Index t = 0; t < length_; ++t)
        for (Index u = 0; u < length_; ++u)
          if (t < before || u < before) count.push_back(spec.causality == Causality::none || u <= t);
          else count.push_back(table.count[at((t - before) * rest.length + u - before)]);
      tables_.push_back(listed(length_, std::move(count)));
    }
    return;
  }
  const Index n = spec.length;
  const Grid grid = grid_of(spec.order, n);
  const bool positions_are_tokens = spec.order.scope == Order::Scope::order_only;
  std::vector<Where> where(at(n));
  for (Index t = 0; t < n; ++t) {
    const Index frame = t / (grid.width * grid.height), in_frame = t - frame * grid.width * grid.height;
    where[at(t)] = {positions_are_tokens ? t : Index{pi.position_of[at(t)]}, frame, in_frame % grid.width,
                    in_frame / grid.width};
  }
  const bool by_head =
      spec.dilation_mode == DilationMode::head_groups ||
      std::any_of(spec.pattern.begin(), spec.pattern.end(), [](const Branch& b) { return b.offset_by_head; });
  std::vector<Pattern> unions;
  for (const Branch& b : spec.pattern) {
    if (!b.joined) unions.emplace_back();
    unions.back().push_back(b);
  }
  for (Index head = 0; head < (by_head ? spec.heads : 1); ++head) {
    std::vector<std::uint8_t> count(at(n * n), 0);
    for (std::size_t i = 0; i < unions.size(); ++i) {
      if (!serves(spec.dilation_mode, i, unions.size(), head, spec.heads)) continue;
      for (Index t = 0; t < n; ++t)
        for (Index u = 0; u < n; ++u) {
          if (spec.causality == Causality::token && u > t) continue;
          if (spec.causality == Causality::curve && where[at(u)].position > where[at(t)].position) continue;
          bool listed = false;
          for (const Branch& b : unions[i])
            listed = listed || lists(b, i, spec.dilation_mode, n, grid, head, where[at(t)], where[at(u)]);
          count[at(t * n + u)] += listed;
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

Attended Attended::packed(const PlanSpec& spec, const DocumentList& documents) {
  const Index n = spec.length;
  std::vector<std::vector<std::uint8_t>> count;
  Attended row(n);
  Index first = 0;
  for (const Document& d : documents) {
    PlanSpec one = spec;
    one.documents.clear();
    one.length = d.length, one.order.grid = d.grid;
    if (one.order.scope == Order::Scope::per_segment) one.order = with_segment(one.order, spec.pattern[0].size);
    const Index behind = d.length - std::min(spec.pattern.back().prefix, d.length);
    const Attended alone(one, order_of(spec, one.order, first, behind));
    count.resize(alone.tables_.size(), std::vector<std::uint8_t>(at(n * n), 0));
    row.table_of_ = alone.table_of_;
    for (std::size_t i = 0; i < count.size(); ++i)
      for (Index t = 0; t < d.length; ++t)
        std::copy_n(alone.tables_[i].count.begin() + t * d.length, d.length,
                    count[i].begin() + (first + t) * n + first);
    first += d.length;
  }
  if (documents.empty()) return Attended(n, spec.heads, std::vector<std::uint8_t>(at(n * n), 0));
  for (std::vector<std::uint8_t>& c : count) row.tables_.push_back(listed(n, std::move(c)));
  return row;
}

Attended Attended::asked_by(const std::vector<std::int32_t>& tokens) const {
  Attended out(length_);
  out.table_of_ = table_of_;
  for (const Table& table : tables_) {
    std::vector<std::uint8_t> count(table.count.size(), 0);
    for (const std::int32_t t : tokens)
      std::copy_n(table.count.begin() + t * length_, length_, count.begin() + t * length_);
    out.tables_.push_back(listed(length_, std::move(count)));
  }
  return out;
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
/// A query of a head and a sequence.
struct Query {
  Index b, h, t;
};
std::vector<Query> queries_of(const Sizes& n) {
  std::vector<Query> all;
  for (Index b = 0; b < n.batch; ++b)
    for (Index h = 0; h < n.heads; ++h)
      for (Index t = 0; t < n.length; ++t) all.push_back({b, h, t});
  return all;
}

struct Layout {
  const Sizes& n;
  std::size_t q(const Query& x) const { return at(((x.b * n.length + x.t) * n.heads + x.h) * n.dim); }
  std::size_t k(const Query& x, Index u) const {
    return at(((x.b * n.length + u) * n.kv_heads + x.h / (n.heads / n.kv_heads)) * n.dim);
  }
  std::size_t row(const Query& x) const { return at((x.b * n.heads + x.h) * n.length + x.t); }
};

/// The dropout multiplier of a pair: 1 / (1 - p) where it is kept, else 0; p counts 65,536ths.
/// Number u % 8 of the 16-bit numbers that Philox4x32 makes in 7 rounds of {u / 8, t, head,
/// stream}.
double weight(const Sizes& n, const Query& query, Index u) {
  if (n.dropout == 0) return 1;
  const auto low = [](std::uint64_t x) { return x & 0xffffffff; };
  std::uint64_t x0 = low(static_cast<std::uint64_t>(u / 8)), x1 = low(static_cast<std::uint64_t>(query.t)),
                x2 = low(static_cast<std::uint64_t>(query.b * n.heads + query.h)), x3 = low(n.key.stream);
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

/// How far u is from t on each axis of the grid, or of the sequence.
std::array<Index, 3> apart(const Grid& grid, bool on_grid, Index t, Index u) {
  if (!on_grid) return {0, 0, t - u};
  const Index frame = grid.width * grid.height;
  return {t / frame - u / frame, t % frame / grid.width - u % frame / grid.width, t % grid.width - u % grid.width};
}

/// What one pair finds in the terms' tensors.
struct Found {
  Index distance = 0;
  std::size_t entry = 0, bias = 0;  // in table, in bias
  bool has_entry = false;
};
template <class T> Found found(const Terms<T>& x, const Query& query, Index u) {
  const auto [b, h, t] = query;
  Found out;
  Index first = 0;  // token of the document that holds t
  Grid grid = x.grid;
  for (const Document& d : x.documents) {
    Order folded;
    folded.grid = d.grid;
    grid = grid_of(folded, d.length - x.prefix);
    if (t < first + d.length) break;
    first += d.length;
  }
  // Both count from the prefix on; before it there is no grid.
  const Index q = t - first - x.prefix, k = u - first - x.prefix;
  const std::size_t axes = x.table_shape.size();
  const bool by_points = !x.points.empty(), outside = q < 0 || k<0, table_on_grid = axes> 1 && !by_points;
  if (!x.distance_on_grid || !outside)
    for (const Index d : apart(grid, x.distance_on_grid, q, k)) out.distance += std::abs(d);
  const auto point = [&](Index token, std::size_t axis) { return x.points[at(b * x.length + token) * axes + axis]; };
  out.has_entry = !x.table.empty() && (!table_on_grid || !outside);
  if (out.has_entry) {
    const auto d = apart(grid, table_on_grid, q, k);
    Index entry = h;
    for (std::size_t i = 0; i < axes; ++i) {
      const Index reach = x.table_shape[i] / 2, here = by_points ? point(t, i) - point(u, i) : d[3 - axes + i];
      entry = entry * x.table_shape[i] + std::min(std::max(here, -reach), reach) + reach;
    }
    out.entry = at(entry);
  }
  const std::array<Index, 4> place{b, h, t, u};
  Index i = 0;
  for (std::size_t axis = 0; axis < 4; ++axis) i = i * x.bias_shape[axis] + (x.bias_shape[axis] == 1 ? 0 : place[axis]);
  out.bias = at(i);
  return out;
}
template <class T> bool is_masked(const Terms<T>& x, const Found& where) {
  return !x.bias.empty() && judge::value_of(x.bias[where.bias]) == -std::numeric_limits<double>::infinity();
}

/// S of a pair from z = c q . k, and dS/dz.
template <class T> struct Score { T s, slope; };
template <class T> Score<T> score(const Terms<T>& x, const Found& where, Index h, T z) {
  using judge::tanh;
  Score<T> out{z, T(1)};
  if (x.softcap > 0) {
    const T bent = tanh(z / T(x.softcap));
    out = {T(x.softcap) * bent, T(1) - bent * bent};
  }
  if (!x.slopes.empty()) out.s = out.s - x.slopes[at(h)] * T(static_cast<double>(where.distance));
  if (where.has_entry) out.s = out.s + x.table[where.entry];
  if (!x.bias.empty()) out.s = out.s + x.bias[where.bias];
  return out;
}

/// One row of P, dS/dz of its keys, and its lse.
template <class T> struct Softmax {
  std::vector<T> p, slope;
  T lse;
};
/// A key that a bias masks has weight 0.
template <class T>
Softmax<T> softmax(const Sizes& n, const std::vector<Attended::Key>& keys, const Inputs<T>& in, const Query& query,
                   const Store& store) {
  using judge::exp, judge::log;
  const Layout where{n};
  const std::size_t q = where.q(query);
  const T none = T(-std::numeric_limits<double>::infinity());
  Softmax<T> out{{}, {}, none};
  std::vector<T>& p = out.p;
  T largest = in.terms.sink.empty() ? none : in.terms.sink[at(query.h)];
  for (const auto& key : keys) {
    T product = T(0);
    const std::size_t k = where.k(query, key.token);
    for (std::size_t d = 0; d < at(n.dim); ++d) product = product + in.q[q + d] * in.k[k + d];
    const Found here = found(in.terms, query, key.token);
    const Score<T> x = score(in.terms, here, query.h, T(n.scale) * product);
    p.push_back(is_masked(in.terms, here) ? none : stored(store, x.s));
    out.slope.push_back(x.slope);
    if (p.back() > largest) largest = p.back();
  }
  if (judge::value_of(largest) == judge::value_of(none)) {  // unless a score is NaN, which is not above it
    for (T& x : p) x = judge::value_of(x) == judge::value_of(none) ? T(0) : x;
    bool spoilt = false;
    for (const T& x : p) spoilt = spoilt || std::isnan(judge::value_of(x));
    if (!spoilt) return out;
  }
  T sum = in.terms.sink.empty() ? T(0) : exp(in.terms.sink[at(query.h)] - largest);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    p[i] = exp(p[i] - largest);
    sum = sum + T(keys[i].times) * p[i];
  }
  for (T& x : p) x = stored(store, x / sum);
  out.lse = largest + log(sum);
  return out;
}

}  // namespace

template <class T> Output<T> attention(const Sizes& n, const Attended& set, const Inputs<T>& in, const Store& store) {
  const Layout where{n};
  Output<T> out{std::vector<T>(in.q.size(), T(0)),
                std::vector<T>(at(n.batch * n.heads * n.length), T(-std::numeric_limits<double>::infinity()))};
  for (const Query& query : queries_of(n)) {
    const auto& keys = set.keys(query.h, query.t);
    const std::size_t q = where.q(query);
    const auto [p, slope, lse] = softmax(n, keys, in, query, store);
    out.lse[where.row(query)] = lse;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (is_masked(in.terms, found(in.terms, query, keys[i].token))) continue;
      const std::size_t v = where.k(query, keys[i].token);
      const T w = T(keys[i].times * weight(n, query, keys[i].token)) * p[i];
      for (std::size_t d = 0; d < at(n.dim); ++d) out.o[q + d] = out.o[q + d] + w * in.v[v + d];
    }
    for (std::size_t d = 0; d < at(n.dim); ++d) out.o[q + d] = stored(store, out.o[q + d]);
  }
  return out;
}

template <class T>
Slopes<T> attention_gradients(const Sizes& n, const Attended& set, const Inputs<T>& in, const std::vector<T>& d_o,
                              const Store& store, const std::vector<T>& d_lse) {
  using judge::exp;
  const Layout where{n};
  const Terms<T>& terms = in.terms;
  const auto zeros = [](const std::vector<T>& x) { return std::vector<T>(x.size(), T(0)); };
  Slopes<T> out{zeros(in.q),        zeros(in.k),       zeros(in.v),      zeros(terms.slopes),
                zeros(terms.table), zeros(terms.bias), zeros(terms.sink)};
  std::vector<T> dp;
  for (const Query& query : queries_of(n)) {
    const auto& keys = set.keys(query.h, query.t);
    const std::size_t q = where.q(query);
    const auto [p, slope, lse] = softmax(n, keys, in, query, store);
    const T d_l = d_lse.empty() ? T(0) : d_lse[where.row(query)];
    dp.assign(keys.size(), T(0));
    T delta = T(0);  // dO . O = sum over the list of P M dO . V
    for (std::size_t d = 0; d < at(n.dim); ++d) delta = delta + T(0) * d_o[q + d];  // of a list without keys, too
    const auto masked = [&](std::size_t i) { return is_masked(terms, found(terms, query, keys[i].token)); };
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (masked(i)) continue;
      const std::size_t v = where.k(query, keys[i].token);
      const T m = T(weight(n, query, keys[i].token));
      for (std::size_t d = 0; d < at(n.dim); ++d) {
        dp[i] = dp[i] + d_o[q + d] * in.v[v + d];
        out.dv[v + d] = out.dv[v + d] + T(keys[i].times) * (m * p[i]) * d_o[q + d];
      }
      dp[i] = stored(store, m * dp[i]);
      delta = delta + T(keys[i].times) * p[i] * dp[i];
    }
    if (!terms.sink.empty() && judge::value_of(terms.sink[at(query.h)]) > -std::numeric_limits<double>::infinity())
      out.dsink[at(query.h)] = out.dsink[at(query.h)] + exp(terms.sink[at(query.h)] - lse) * (d_l - delta);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (masked(i)) continue;
      const std::size_t k = where.k(query, keys[i].token);
      const T ds = T(keys[i].times) * stored(store, p[i] * (dp[i] - delta + d_l));
      const Found here = found(terms, query, keys[i].token);
      if (!terms.slopes.empty())
        out.dslopes[at(query.h)] = out.dslopes[at(query.h)] - T(static_cast<double>(here.distance)) * ds;
      if (here.has_entry) out.dtable[here.entry] = out.dtable[here.entry] + ds;
      if (!terms.bias.empty()) out.dbias[here.bias] = out.dbias[here.bias] + ds;
      const T dz = terms.softcap > 0 ? stored(store, ds * slope[i]) : ds;
      for (std::size_t d = 0; d < at(n.dim); ++d) {
        out.dq[q + d] = out.dq[q + d] + T(n.scale) * dz * in.k[k + d];
        out.dk[k + d] = out.dk[k + d] + T(n.scale) * dz * in.q[q + d];
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
                                           const std::vector<float>&, const Store&, const std::vector<float>&);
template Slopes<double> attention_gradients(const Sizes&, const Attended&, const Inputs<double>&,
                                            const std::vector<double>&, const Store&, const std::vector<double>&);

Magnitudes magnitudes(const Sizes& n, const Attended& set, const Inputs<double>& in, const std::vector<double>& d_o,
                      const std::vector<double>& d_lse) {
  const Layout where{n};
  const std::size_t dim = at(n.dim);
  const Terms<double>& terms = in.terms;
  Magnitudes size;
  std::vector<double> o(dim), dq(dim), dk(in.k.size(), 0.0), dv(in.v.size(), 0.0);
  std::vector<double> slopes(terms.slopes.size()), table(terms.table.size()), bias(terms.bias.size()),
      sink(terms.sink.size());
  std::vector<Index> queries(at(n.batch * n.length * n.kv_heads), 0);
  const auto grow = [](double& largest, double x) {
    if (x > largest) largest = x;
  };  // a NaN does not grow anything
  for (const Query& query : queries_of(n)) {
    const auto& keys = set.keys(query.h, query.t);
    const std::size_t q = where.q(query);
    const auto [p, slope, lse] = softmax(n, keys, in, query, {});
    if (std::isfinite(lse)) grow(size.lse, std::abs(lse));
    std::fill(o.begin(), o.end(), 0.0), std::fill(dq.begin(), dq.end(), 0.0);
    Index listed = 0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Found here = found(terms, query, keys[i].token);
      if (is_masked(terms, here)) continue;
      const std::size_t k = where.k(query, keys[i].token);
      const double m = weight(n, query, keys[i].token);
      double z = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        z += std::abs(in.q[q + d] * in.k[k + d]);
        o[d] += keys[i].times * m * p[i] * std::abs(in.v[k + d]);
        dv[k + d] += keys[i].times * m * p[i] * std::abs(d_o[q + d]);
      }
      z *= std::abs(n.scale);
      if (!terms.slopes.empty()) z += std::abs(terms.slopes[at(query.h)]) * static_cast<double>(here.distance);
      if (here.has_entry) z += std::abs(terms.table[here.entry]);
      if (!terms.bias.empty()) z += std::abs(terms.bias[here.bias]);
      grow(size.score, z);
      queries[k / dim] += keys[i].times, listed += keys[i].times;
    }
    size.keys = std::max(size.keys, listed);
    double delta = d_lse.empty() ? 0 : std::abs(d_lse[where.row(query)]);
    for (std::size_t d = 0; d < dim; ++d) {
      grow(size.o, o[d]);
      delta += std::abs(d_o[q + d]) * o[d];
    }
    if (!sink.empty() && std::isfinite(lse)) sink[at(query.h)] += std::exp(terms.sink[at(query.h)] - lse) * delta;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const Found here = found(terms, query, keys[i].token);
      if (is_masked(terms, here)) continue;
      const std::size_t k = where.k(query, keys[i].token);
      double dp = 0;
      for (std::size_t d = 0; d < dim; ++d) dp += std::abs(d_o[q + d] * in.v[k + d]);
      const double ds = keys[i].times * p[i] * (weight(n, query, keys[i].token) * dp + delta);
      if (!slopes.empty()) slopes[at(query.h)] += ds * static_cast<double>(here.distance);
      if (here.has_entry) table[here.entry] += ds;
      if (!bias.empty()) bias[here.bias] += ds;
      for (std::size_t d = 0; d < dim; ++d) {
        dq[d] += ds * std::abs(n.scale * in.k[k + d]);
        dk[k + d] += ds * std::abs(n.scale * in.q[q + d]);
      }
    }
    for (const double x : dq) grow(size.dq, x);
  }
  for (const double x : dk) grow(size.dk, x);
  for (const double x : dv) grow(size.dv, x);
  for (const double x : slopes) grow(size.dslopes, x);
  for (const double x : table) grow(size.dtable, x);
  for (const double x : bias) grow(size.dbias, x);
  for (const double x : sink) grow(size.dsink, x);
  for (const Index x : queries) size.queries = std::max(size.queries, x);
  return size;
}

double slope_along(const Sizes& n, const Attended& set, const Inputs<double>& in, const Inputs<double>& along,
                   const std::vector<double>& d_o, const std::vector<double>& d_lse) {
  const auto dual = [](const std::vector<double>& x, const std::vector<double>& dx) {
    std::vector<Dual> y;
    for (std::size_t i = 0; i < x.size(); ++i) y.emplace_back(x[i], dx.empty() ? 0 : dx[i]);
    return y;
  };
  const Terms<double>&x = in.terms, &dx = along.terms;
  const Terms<Dual> terms{x.softcap,
                          dual(x.slopes, dx.slopes),
                          dual(x.table, dx.table),
                          dual(x.bias, dx.bias),
                          dual(x.sink, dx.sink),
                          x.distance_on_grid,
                          x.table_shape,
                          x.bias_shape,
                          x.grid,
                          x.documents,
                          x.prefix,
                          x.points,
                          x.length};
  const auto out = attention<Dual>(n, set, {dual(in.q, along.q), dual(in.k, along.k), dual(in.v, along.v), terms});
  double slope = 0;
  for (std::size_t i = 0; i < d_o.size(); ++i) slope += out.o[i].dx * d_o[i];
  for (std::size_t i = 0; i < d_lse.size(); ++i)
    if (std::isfinite(out.lse[i].x)) slope += out.lse[i].dx * d_lse[i];
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

void judge_lists(const char* what, const Tiling::Lists& lists, std::size_t n, std::size_t others) {
  const std::vector<std::int32_t>& begin = lists.begin;
  if (begin.size() != n + 1 || begin[0] != 0 || at(begin[n]) != lists.run.size()) fault("tile lists", what, ": ends");
  for (std::size_t i = 0; i < n; ++i) {
    if (begin[i + 1] < begin[i]) fault("tile lists", what, ": begins descend at ", i);
    for (std::int32_t e = begin[i]; e < begin[i + 1]; ++e) {
      const Tiling::Run run = lists.run[at(e)], last = e > begin[i] ? lists.run[at(e) - 1] : Tiling::Run{0, 0, false};
      if (run.begin < 0 || run.end <= run.begin || at(run.end) > others)
        fault("tile lists", what, ": tiles [", run.begin, ", ", run.end, ") of ", others);
      if (run.begin < last.end) fault("tile lists", what, ": not ascending in list ", i);
      if (e > begin[i] && run.begin == last.end && run.partial == last.partial)
        fault("tile lists", what, ": two runs that are one in list ", i);
    }
  }
}

/// One tiling by itself, and what it adds to count[row of q * length + u].
void judge_tiling(const Tiling& g, Index queries, Index length, std::vector<int>& count) {
  judge_runs("q_tile", g.q_tile, g.q_token.size(), Tiling::kTile);
  judge_runs("k_tile", g.k_tile, g.k_token.size(), Tiling::kTile);
  for (const auto& [tokens, n] : {std::pair(&g.q_token, queries), {&g.k_token, length}}) {
    std::vector<bool> seen(at(n), false);
    for (const std::int32_t t : *tokens) {
      if (t < 0 || t >= n || seen[at(t)]) fault("tokens", "token ", t, " is out of range or twice in one list");
      seen[at(t)] = true;
    }
  }
  judge_lists("met", g.met, g.q_tile.size(), g.k_tile.size());
  const Tiling::Lists by_key = g.met.transposed(g.k_tile.size());
  judge_lists("transposed", by_key, g.k_tile.size(), g.q_tile.size());
  std::map<std::pair<std::int32_t, std::int32_t>, bool> transposed;
  for (std::size_t j = 0; j < g.k_tile.size(); ++j)
    for (const Tiling::Ref ref : by_key.of(j)) transposed[{ref.tile, static_cast<std::int32_t>(j)}] = ref.partial;
  if (std::ssize(transposed) != g.met.full + g.met.partial)
    fault("transposed", g.met.full + g.met.partial, " tiles by query, ", transposed.size(), " by key");

  std::vector<std::vector<Tiling::Range>> groups_of(
      g.q_token.size());  // the key runs that a query meets in dense blocks
  for (const Tiling::Group& group : g.group) {
    if (group.q.begin < 0 || group.q.end <= group.q.begin || at(group.q.end) > g.q_token.size() || group.k.begin < 0 ||
        group.k.end < group.k.begin || at(group.k.end) > g.k_token.size())
      fault("groups", "[", group.q.begin, ", ", group.q.end, ") x [", group.k.begin, ", ", group.k.end, ")");
    for (std::int32_t a = group.q.begin; a < group.q.end; ++a) groups_of[at(a)].push_back(group.k);
  }
  Index full = 0, partial = 0, pairs = 0;
  for (std::size_t i = 0; i < g.q_tile.size(); ++i)
    for (const Tiling::Ref ref : g.met.of(i)) {
      const auto other = transposed.find({static_cast<std::int32_t>(i), ref.tile});
      if (other == transposed.end() || other->second != ref.partial)
        fault("transposed", "tile (", i, ", ", ref.tile, ") differs or is missing");
      const Tiling::Range q = g.q_tile[i], k = g.k_tile[at(ref.tile)];
      Index held = 0;
      for (std::int32_t a = q.begin; a < q.end; ++a)
        for (std::int32_t b = k.begin; b < k.end; ++b) {
          if (!attends(g, at(a), at(b))) continue;
          ++held;
          ++count[at(g.q_token[at(a)]) * at(length) + at(g.k_token[at(b)])];
          const auto groups = std::count_if(groups_of[at(a)].begin(), groups_of[at(a)].end(),
                                            [&](const Tiling::Range& r) { return r.begin <= b && b < r.end; });
          if (groups != 1 && !g.group.empty())
            fault("groups", "pair (", a, ", ", b, ") of tile (", i, ", ", ref.tile, ") is in ", groups);
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
  if (full != g.met.full || partial != g.met.partial)
    fault("tile counts", "counted ", full, " full and ", partial, " partial, tiling says ", g.met.full, " and ",
          g.met.partial);
  if (pairs != g.pairs) fault("pairs", "counted ", pairs, ", tiling says ", g.pairs);
}

void judge_or_throw(const Plan& plan, const Attended& set, Index batch_row) {
  const Index n = plan.length();
  if (plan.heads() != set.heads()) fault("heads", plan.heads(), " of ", set.heads());
  std::vector<std::int32_t> asking(at(n));
  std::iota(asking.begin(), asking.end(), 0);
  if (plan.spec().queries) asking = *plan.spec().queries;
  if (plan.queries() != std::ssize(asking)) fault("queries", plan.queries(), " of ", asking.size());
  const bool whole = plan.spec().documents.empty();
  if (whole && plan.order().length() != n) fault("order", "length ", plan.order().length());
  std::set<std::pair<std::size_t, std::vector<std::int32_t>>> judged;
  for (Index h = 0; h < plan.heads(); ++h) {
    const auto list = plan.tilings_of(h);
    for (const std::int32_t i : list)
      for (const PlanPart& part : plan.parts())
        if (i < 0 || at(i) >= part.tilings.size()) fault("tilings_of", "head ", h, " names tiling ", i);
    if (!judged.emplace(set.table_of(h), std::vector(list.begin(), list.end())).second) continue;
    std::vector<int> count(at(n * n), 0);
    for (const PlanPart& part : plan.parts()) {
      std::vector<int> alone(at(part.queries * part.length), 0);
      for (const std::int32_t i : list) judge_tiling(part.tilings[at(i)], part.queries, part.length, alone);
      for (Index number = 0; number < part.places.count(1); ++number) {
        const Tiling::Place place = part.places.at(number);
        if (!part.places.each_row && place.row != batch_row) continue;
        if (place.q < 0 || place.q + part.queries > std::ssize(asking) || (!plan.spec().queries && place.k != place.q))
          fault("place", place.q, ", ", place.k);
        for (Index t = 0; t < part.queries; ++t)
          for (Index u = 0; u < part.length; ++u)
            count[at(asking[at(place.q + t)] * n + place.k + u)] += alone[at(t * part.length + u)];
      }
    }
    for (Index t = 0; t < n; ++t)
      for (Index u = 0; u < n; ++u)
        if (count[at(t * n + u)] != set.times(h, t, u))
          fault("attended set", "head ", h, " query ", t, " key ", u, ": tiles ", count[at(t * n + u)],
                " times, definition ", set.times(h, t, u));
  }
  const Index silent = n - std::ssize(asking);
  if (plan.spec().documents.size() <= 1 && plan.empty_rows() + silent != set.empty_rows())
    fault("empty_rows", plan.empty_rows(), " beside ", silent, ", definition ", set.empty_rows());
  // All pairs of a short sequence, a lattice of those of a long one: the step has no factor in
  // common with a segment.
  const Index all = plan.heads() * n * n, step = std::max<Index>(1, all / 400) | 1;
  for (Index i = 0; i < all; i += step) {
    const Index h = i / (n * n), t = i / n % n, u = i % n;
    if (!std::ranges::binary_search(asking, t)) continue;
    if (plan.attends(h, t, u, batch_row) != set.times(h, t, u))
      fault("attends", "head ", h, " query ", t, " key ", u, ": ", plan.attends(h, t, u, batch_row), ", definition ",
            set.times(h, t, u));
  }
}

}  // namespace

PlanFault judge(const Plan& plan, const Attended& set, Index row) {
  try {
    judge_or_throw(plan, set, row);
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
