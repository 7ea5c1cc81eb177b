// From an attended set to tiles.
//
// Each branch becomes one Tiling (one for each offset that heads ask for). Dense, segments and
// blocks are groups: lists of queries against lists of keys that all attend, so only causality
// makes a tile partial. Slides, neighbourhoods and windows are intervals on one or two coordinates
// of the key. Candidate tiles are found from the geometry, then classified from the extremes of
// each tile's coordinates, exactly: a tile is full if every key passes every query's tests, and
// dropped if no pair does. Work and memory are proportional to tiles and tokens, never to length
// squared.
#include "ops/hilbert/plan/plan.h"
#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <mutex>
#include <numeric>
#include "core/error.h"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/work_order.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;
using Tokens = std::vector<std::int32_t>;
constexpr Index kTile = Tiling::kTile;
constexpr std::size_t kCachedPlans = 16;

std::int32_t narrow(Index i) { return static_cast<std::int32_t>(i); }
std::size_t at(Index i) { return static_cast<std::size_t>(i); }

struct Interval {
  Index low, high;
  bool has(Index i) const { return low <= i && i <= high; }
};

/// `size` places around i, moved inside [0, n).
Interval clamped(Index i, Index size, Index n) {
  const Index center = std::clamp(i, std::min(size / 2, n - 1), std::max(n - 1 - size / 2, std::min(size / 2, n - 1)));
  return {center - size / 2, center + size / 2};
}

// ---- the definitions ----------------------------------------------------------------------------

/// Everything the definition of a set may look at.
struct Ground {
  const PlanSpec& spec;
  const Permutation& order;
  Grid grid;
  bool by_token;  // positions are tokens: scope order_only, where the order arranges work and no more

  Index length() const { return spec.length; }
  Index position(Index t) const { return by_token ? t : order.position_of[at(t)]; }
  Index token(Index p) const { return by_token ? p : order.token_at[at(p)]; }
  Index x(Index t) const { return t % grid.width; }
  Index y(Index t) const { return t / grid.width; }
};

Index offset_of(const PlanSpec& spec, std::size_t branch, Index head) {
  const Branch& b = spec.pattern[branch];
  if (spec.dilation_mode == DilationMode::head_groups) return static_cast<Index>(branch) % b.dilation;
  return b.offset_by_head ? head % b.dilation : b.offset;
}

/// Whether this head takes part in this branch: all do, but for head_groups.
bool serves(const PlanSpec& spec, std::size_t branch, Index head) {
  if (spec.dilation_mode != DilationMode::head_groups) return true;
  const auto groups = static_cast<Index>(spec.pattern.size()), i = static_cast<Index>(branch);
  const Index size = spec.heads / groups, longer = spec.heads % groups;  // the first `longer` groups have one head more
  const Index begin = i * size + std::min(i, longer);
  return head >= begin && head < begin + size + (i < longer ? 1 : 0);
}

bool only_active_ask(DilationMode mode) { return mode == DilationMode::longnet || mode == DilationMode::head_groups; }

/// The intervals of key coordinates that a query's window spans, for the kinds that are windows.
struct Window {
  Interval a, b;
};
Window window_of(const Ground& g, const Branch& b, Index t) {
  const Index p = g.position(t), x = g.x(t), y = g.y(t);
  switch (b.kind) {
    case Kind::slide: return {{p - b.size, p + b.size}, {}};
    case Kind::neighborhood: return {clamped(p, b.size, g.length()), {}};
    case Kind::window2d:
      return {{y / b.rows * b.rows, y / b.rows * b.rows + b.rows - 1},
              {x / b.columns * b.columns, x / b.columns * b.columns + b.columns - 1}};
    case Kind::slide2d: return {{y - b.rows, y + b.rows}, {x - b.columns, x + b.columns}};
    default: return {clamped(y, b.rows, g.grid.height), clamped(x, b.columns, g.grid.width)};
  }
}
bool is_planar(Kind kind) { return kind >= Kind::window2d && kind <= Kind::neighborhood2d; }

bool branch_attends(const Ground& g, std::size_t branch, Index head, Index t, Index u) {
  const Branch& b = g.spec.pattern[branch];
  if (!serves(g.spec, branch, head)) return false;
  if (g.spec.causality == Causality::token && u > t) return false;
  if (g.spec.causality == Causality::curve && g.order.position_of[at(u)] > g.order.position_of[at(t)]) return false;
  const Index p = g.position(t), q = g.position(u);
  switch (b.kind) {
    case Kind::dense: return true;
    case Kind::segment: {
      if (p / b.size != q / b.size) return false;
      const Index from = p % b.size % b.dilation, to = q % b.size % b.dilation;
      if (g.spec.dilation_mode == DilationMode::residue) return from == to;
      const Index offset = offset_of(g.spec, branch, head);
      return to == offset && (!only_active_ask(g.spec.dilation_mode) || from == offset);
    }
    case Kind::blocks: return std::ranges::binary_search(b.pairs, std::pair(narrow(p / b.size), narrow(q / b.size)));
    default: {
      const Window w = window_of(g, b, t);
      return is_planar(b.kind) ? w.a.has(g.y(u)) && w.b.has(g.x(u)) : w.a.has(q);
    }
  }
}

void check_spec(PlanSpec& spec) {
  check(spec.length >= 0 && spec.length <= std::numeric_limits<std::int32_t>::max(), "plan: length ", spec.length,
        " must be 0..2147483647");
  check(spec.heads >= 1, "plan: heads ", spec.heads, " must be at least 1");
  check(!spec.pattern.empty(), "plan: the pattern has no branch");
  check(spec.dilation_mode != DilationMode::head_groups || static_cast<Index>(spec.pattern.size()) <= spec.heads,
        "plan: head_groups needs a head for each of the ", spec.pattern.size(), " branches, got ", spec.heads);
  for (Branch& b : spec.pattern) {
    check(b.dilation >= 1 && b.offset >= 0 && b.offset < b.dilation, "plan: offset ", b.offset,
          " must be below the dilation, ", b.dilation);
    if (b.kind == Kind::segment || b.kind == Kind::blocks)
      check(b.size >= 1, "plan: ", to_string({b}), ": size must be at least 1");
    if (b.kind == Kind::slide) check(b.size >= 0, "plan: ", to_string({b}), ": radius must not be negative");
    if (b.kind == Kind::neighborhood)
      check(b.size % 2 == 1, "plan: ", to_string({b}),
            ": the number of keys must be odd, so that the query is in the middle");
    if (is_planar(b.kind))
      check(b.rows >= (b.kind != Kind::slide2d) && b.columns >= (b.kind != Kind::slide2d), "plan: ", to_string({b}),
            ": sides must be at least 1");
    if (b.kind == Kind::neighborhood2d)
      check(b.rows % 2 == 1 && b.columns % 2 == 1, "plan: ", to_string({b}), ": both sides must be odd");
    if (b.kind == Kind::blocks) {
      std::ranges::sort(b.pairs);
      b.pairs.erase(std::unique(b.pairs.begin(), b.pairs.end()), b.pairs.end());
      const Index n = (spec.length + b.size - 1) / b.size;
      for (const auto& [i, j] : b.pairs)
        check(i >= 0 && i < n && j >= 0 && j < n, "plan: block (", i, ", ", j, ") is outside the ", n, " x ", n,
              " blocks of ", b.size, " that ", spec.length, " tokens make");
    }
  }
}

/// The order with scope per_segment resolved to the segment that the pattern names.
Order resolved_order(const PlanSpec& spec) {
  if (spec.order.scope != Order::Scope::per_segment) return spec.order;
  Index size = 0;
  for (const Branch& b : spec.pattern)
    if (b.kind == Kind::segment) {
      check(size == 0 || size == b.size, "plan: scope=segment needs one segment size, got ", size, " and ", b.size,
            "; name one with chunk=N");
      size = b.size;
    }
  check(size > 0, "plan: scope=segment needs a segment pattern, got ", to_string(spec.pattern));
  return with_segment(spec.order, size);
}

// ---- tiles --------------------------------------------------------------------------------------

/// A Tiling in the making: lists and tiles first, then which tile meets which.
class Builder {
 public:
  Builder(const Ground& ground, std::size_t branch, Index head)
      : g_(ground), branch_(branch), b_(ground.spec.pattern[branch]), head_(head) {
    if (b_.kind == Kind::dense) whole();
    else if (b_.kind == Kind::segment) segments();
    else if (b_.kind == Kind::blocks) block_rows();
    else windows();
    transpose();
  }
  Tiling take() { return std::move(t_); }

 private:
  // A list of queries or keys and the tiles it is cut into.
  static void append(Tokens& tokens, std::vector<Tiling::Range>& tiles, const Tokens& more) {
    for (std::size_t i = 0; i < more.size(); i += at(kTile)) {
      const auto begin = narrow(static_cast<Index>(tokens.size() + i));
      tiles.push_back({begin, begin + narrow(std::min<Index>(kTile, static_cast<Index>(more.size() - i)))});
    }
    tokens.insert(tokens.end(), more.begin(), more.end());
  }

  void one_group() {
    if (!t_.q_token.empty())
      t_.group.push_back(
          {{0, narrow(static_cast<Index>(t_.q_token.size()))}, {0, narrow(static_cast<Index>(t_.k_token.size()))}});
  }

  void whole() {
    const Tokens& all = g_.order.token_at;
    append(t_.q_token, t_.q_tile, all);
    append(t_.k_token, t_.k_tile, all);
    one_group();
    fill_ranks();
    for (Index i = 0; i < tiles_of(t_.q_tile); ++i) classify(i, 0, tiles_of(t_.k_tile));
  }

  void segments() {
    const Index r = b_.dilation, offset = offset_of(g_.spec, branch_, head_);
    const bool by_residue = g_.spec.dilation_mode == DilationMode::residue;
    std::vector<std::array<Index, 3>> groups;  // end of its q tiles, its k tiles
    Tokens q, k;
    for (Index begin = 0; begin < g_.length(); begin += b_.size) {
      const Index end = std::min(begin + b_.size, g_.length());
      for (Index residue = 0; residue < (by_residue ? std::min(r, end - begin) : 1); ++residue) {
        q.clear(), k.clear();
        for (Index p = begin + (by_residue ? residue : offset); p < end; p += r) k.push_back(narrow(g_.token(p)));
        if (by_residue || only_active_ask(g_.spec.dilation_mode)) q = k;
        else
          for (Index p = begin; p < end; ++p) q.push_back(narrow(g_.token(p)));
        const Index first = tiles_of(t_.k_tile);
        const auto q_begin = narrow(static_cast<Index>(t_.q_token.size())),
                   k_begin = narrow(static_cast<Index>(t_.k_token.size()));
        append(t_.q_token, t_.q_tile, q);
        append(t_.k_token, t_.k_tile, k);
        if (!k.empty())
          t_.group.push_back({{q_begin, narrow(static_cast<Index>(t_.q_token.size()))},
                              {k_begin, narrow(static_cast<Index>(t_.k_token.size()))}});
        groups.push_back({tiles_of(t_.q_tile), first, tiles_of(t_.k_tile)});
      }
    }
    fill_ranks();
    Index i = 0;
    for (const auto& [q_end, k_begin, k_end] : groups)
      for (; i < q_end; ++i) classify(i, k_begin, k_end);
  }

  void block_rows() {
    const Index n = (g_.length() + b_.size - 1) / b_.size;
    const BlockLayout layout = lay_out_blocks(g_.spec.work_order, b_.pairs, n);
    const auto q_tiles = blocks_in(layout.queries, t_.q_token, t_.q_tile),
               k_tiles = blocks_in(layout.keys, t_.k_token, t_.k_tile);
    one_group();
    fill_ranks();
    std::vector<TileRun> row;
    for (std::int32_t block : layout.queries) {
      row.clear();
      for (const auto& pair : std::ranges::equal_range(b_.pairs, block, {}, &BlockPairs::value_type::first))
        row.push_back(k_tiles[at(pair.second)]);
      std::ranges::sort(row, {}, &TileRun::begin);
      for (Index i = q_tiles[at(block)].begin; i < q_tiles[at(block)].end; ++i) {
        begin_row();
        for (const TileRun& run : row) add_row(i, run.begin, run.end);
      }
    }
  }
  struct TileRun {
    Index begin, end;
  };
  // Appends the tokens of these blocks, and says which tiles each block became.
  std::vector<TileRun> blocks_in(const Tokens& sequence, Tokens& tokens, std::vector<Tiling::Range>& tiles) const {
    std::vector<TileRun> made(sequence.size());
    Tokens block;
    for (std::int32_t i : sequence) {
      block.clear();
      for (Index p = i * b_.size; p < std::min((i + 1) * b_.size, g_.length()); ++p)
        block.push_back(narrow(g_.token(p)));
      made[at(i)].begin = tiles_of(tiles);
      append(tokens, tiles, block);
      made[at(i)].end = tiles_of(tiles);
    }
    return made;
  }

  void windows() {
    Tokens all(at(g_.length()));
    if (is_planar(b_.kind)) all = g_.order.token_at;
    else
      for (Index p = 0; p < g_.length(); ++p) all[at(p)] = narrow(g_.token(p));
    append(t_.q_token, t_.q_tile, all);
    append(t_.k_token, t_.k_tile, all);
    one_group();
    fill_ranks();
    const bool planar = is_planar(b_.kind);
    for (std::int32_t token : all) {
      const Window w = window_of(g_, b_, token);
      t_.k_a.push_back(narrow(planar ? g_.y(token) : g_.position(token)));
      push_clipped(t_.q_a_low, t_.q_a_high, w.a);
      if (!planar) continue;
      t_.k_b.push_back(narrow(g_.x(token)));
      push_clipped(t_.q_b_low, t_.q_b_high, w.b);
    }
    if (planar) planar_rows();
    else line_rows();
  }
  static void push_clipped(Tokens& low, Tokens& high, Interval i) {
    constexpr Index kMax = std::numeric_limits<std::int32_t>::max();
    low.push_back(narrow(std::clamp<Index>(i.low, 0, kMax)));
    high.push_back(narrow(std::clamp<Index>(i.high, -1, kMax)));
  }

  // Keys stand in the order of the coordinate, so a query tile's candidates are one run of tiles.
  void line_rows() {
    for (Index i = 0; i < tiles_of(t_.q_tile); ++i) {
      const Tiling::Range r = t_.q_tile[at(i)];
      const Index low = *std::min_element(t_.q_a_low.begin() + r.begin, t_.q_a_low.begin() + r.end);
      const Index high = *std::max_element(t_.q_a_high.begin() + r.begin, t_.q_a_high.begin() + r.end);
      classify(i, low / kTile, std::min(high, g_.length() - 1) / kTile + 1);
    }
  }

  // The cells that a query tile's windows cover, row by row of the grid, name the candidate tiles.
  void planar_rows() {
    const Grid& grid = g_.grid;
    std::vector<Interval> reach(at(grid.height), {grid.width, -1});
    std::vector<Index> touched, candidates;
    std::vector<Index> seen(t_.k_tile.size(), -1);
    for (Index i = 0; i < tiles_of(t_.q_tile); ++i) {
      for (std::int32_t j = t_.q_tile[at(i)].begin; j < t_.q_tile[at(i)].end; ++j) {
        const auto q = static_cast<std::size_t>(j);
        for (Index y = t_.q_a_low[q]; y <= std::min<Index>(t_.q_a_high[q], grid.height - 1); ++y) {
          Interval& row = reach[at(y)];
          if (row.high < 0) touched.push_back(y);
          row.low = std::min<Index>(row.low, t_.q_b_low[q]);
          row.high = std::max(row.high, std::min<Index>(t_.q_b_high[q], grid.width - 1));
        }
      }
      for (Index y : touched) {
        for (Index x = reach[at(y)].low; x <= reach[at(y)].high; ++x) {
          const Index token = y * grid.width + x;
          if (token >= g_.length()) break;
          const Index tile = g_.order.position_of[at(token)] / kTile;
          if (seen[at(tile)] != i) seen[at(tile)] = i, candidates.push_back(tile);
        }
        reach[at(y)] = {grid.width, -1};
      }
      std::ranges::sort(candidates);
      begin_row();
      for (Index tile : candidates) add_row(i, tile, tile + 1);
      touched.clear(), candidates.clear();
    }
  }

  // ---- classification ----
  struct Extremes {
    std::int32_t low = std::numeric_limits<std::int32_t>::max(), high = std::numeric_limits<std::int32_t>::min();
  };
  static Extremes extremes(const Tokens& values, Tiling::Range r) {
    Extremes e;
    for (std::int32_t i = r.begin; i < r.end; ++i) {
      e.low = std::min(e.low, values[static_cast<std::size_t>(i)]);
      e.high = std::max(e.high, values[static_cast<std::size_t>(i)]);
    }
    return e;
  }
  const std::vector<Extremes>& over(const Tokens& values, const std::vector<Tiling::Range>& tiles) {
    std::vector<Extremes>& known = extremes_[&values];
    if (known.empty())
      for (const Tiling::Range& r : tiles) known.push_back(extremes(values, r));
    return known;
  }

  void fill_ranks() {
    if (g_.spec.causality == Causality::none) return;
    const auto rank = [&](std::int32_t t) {
      return g_.spec.causality == Causality::token ? t : g_.order.position_of[static_cast<std::size_t>(t)];
    };
    for (std::int32_t t : t_.q_token) t_.q_rank.push_back(rank(t));
    for (std::int32_t t : t_.k_token) t_.k_rank.push_back(rank(t));
  }

  void begin_row() { t_.keys_begin.push_back(narrow(static_cast<Index>(t_.keys.size()))); }
  void classify(Index i, Index k_begin, Index k_end) {
    begin_row();
    add_row(i, k_begin, k_end);
  }

  // Two tests on the extremes settle most tiles: `always` if no key fails any query, `never` if
  // every key fails all.
  void test(const std::vector<Extremes>& low, const std::vector<Extremes>& high, const std::vector<Extremes>& key,
            Index i, Index j, bool& always, bool& never) const {
    const Extremes &l = low[at(i)], &h = high[at(i)], &k = key[at(j)];
    always = always && k.low >= l.high && k.high <= h.low;
    never = never || k.high < l.low || k.low > h.high;
  }

  void add_row(Index i, Index k_begin, Index k_end) {
    const std::vector<Extremes>* rank[2] = {};
    const std::vector<Extremes>* a[3] = {};
    const std::vector<Extremes>* b[3] = {};
    if (!t_.q_rank.empty()) rank[0] = &over(t_.q_rank, t_.q_tile), rank[1] = &over(t_.k_rank, t_.k_tile);
    if (!t_.k_a.empty())
      a[0] = &over(t_.q_a_low, t_.q_tile), a[1] = &over(t_.q_a_high, t_.q_tile), a[2] = &over(t_.k_a, t_.k_tile);
    if (!t_.k_b.empty())
      b[0] = &over(t_.q_b_low, t_.q_tile), b[1] = &over(t_.q_b_high, t_.q_tile), b[2] = &over(t_.k_b, t_.k_tile);
    const Tiling::Range q = t_.q_tile[at(i)];
    for (Index j = k_begin; j < k_end; ++j) {
      const Tiling::Range k = t_.k_tile[at(j)];
      bool always = true, never = false;
      if (rank[0]) {
        always = (*rank[1])[at(j)].high <= (*rank[0])[at(i)].low;
        never = (*rank[1])[at(j)].low > (*rank[0])[at(i)].high;
      }
      if (a[0]) test(*a[0], *a[1], *a[2], i, j, always, never);
      if (b[0]) test(*b[0], *b[1], *b[2], i, j, always, never);
      if (never) continue;
      const Index pairs = always ? Index{q.end - q.begin} * (k.end - k.begin) : count_pairs(t_, q, k);
      if (pairs == 0) continue;
      t_.keys.push_back({narrow(j), !always});
      ++(always ? t_.tiles_full : t_.tiles_partial);
      t_.pairs += pairs;
    }
  }
  static Index tiles_of(const std::vector<Tiling::Range>& tiles) { return static_cast<Index>(tiles.size()); }

  void transpose() {
    begin_row();
    transpose_tiles(t_);
    count_empty_queries();
  }

  void count_empty_queries() {
    if (b_.kind != Kind::segment && b_.kind != Kind::blocks) return;  // the others always attend to themselves
    for (std::size_t i = 0; i < t_.q_tile.size(); ++i) {
      const auto begin = t_.keys.begin() + t_.keys_begin[i], end = t_.keys.begin() + t_.keys_begin[i + 1];
      const Tiling::Range q = t_.q_tile[i];
      if (std::any_of(begin, end, [](const Tiling::Ref& r) { return !r.partial; })) continue;
      for (std::int32_t row = q.begin; row < q.end; ++row)
        t_.empty_queries += std::none_of(begin, end, [&](const Tiling::Ref& r) {
          const Tiling::Range k = t_.k_tile[static_cast<std::size_t>(r.tile)];
          return count_pairs(t_, {row, row + 1}, k) > 0;
        });
    }
  }

  const Ground& g_;
  std::size_t branch_;
  const Branch& b_;
  Index head_;
  Tiling t_;
  std::map<const Tokens*, std::vector<Extremes>> extremes_;
};

Ground ground_of(const PlanSpec& spec, const Permutation& order, Grid grid) {
  return {spec, order, grid, spec.order.scope == Order::Scope::order_only};
}

void add_stats(TileStats& s, const Tiling& t) {
  s.full += t.tiles_full;
  s.partial += t.tiles_partial;
  s.total += static_cast<Index>(t.q_tile.size() * t.k_tile.size());
  s.pairs += t.pairs;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const Tiling::Range k = t.k_tile[static_cast<std::size_t>(t.keys[static_cast<std::size_t>(e)].tile)];
      s.tile_pairs += Index{t.q_tile[i].end - t.q_tile[i].begin} * (k.end - k.begin);
    }
}

}  // namespace

Plan::Plan(PlanSpec spec) : spec_(std::move(spec)) {
  check_spec(spec_);
  spec_.order = resolved_order(spec_);
  grid_ = token_grid(spec_.order, spec_.length);
  for (const Branch& b : spec_.pattern)
    check(!is_planar(b.kind) || grid_.frames == 1, "plan: ", to_string({b}), " looks at one frame, the grid has ",
          grid_.frames);
  forced_ = row_order_forced();
  order_ = permutation(spec_.order, spec_.length);
  const Ground ground = ground_of(spec_, *order_, grid_);
  std::map<std::pair<std::size_t, Index>, std::int32_t> made;  // by branch and offset
  for (Index head = 0; head < spec_.heads; ++head) {
    head_begin_.push_back(narrow(static_cast<Index>(head_tilings_.size())));
    for (std::size_t branch = 0; branch < spec_.pattern.size(); ++branch) {
      if (!serves(spec_, branch, head)) continue;
      const auto [entry, fresh] =
          made.try_emplace({branch, offset_of(spec_, branch, head)}, narrow(static_cast<Index>(tilings_.size())));
      if (fresh) tilings_.push_back(Builder(ground, branch, head).take());
      head_tilings_.push_back(entry->second);
    }
  }
  head_begin_.push_back(narrow(static_cast<Index>(head_tilings_.size())));
  if (!spec_.in_order) return;
  // Masks compare what stands beside the lists, so only where rows lie changes.
  for (Tiling& t : tilings_) {
    t.q_name = t.q_token, t.k_name = t.k_token;
    for (Tokens* list : {&t.q_token, &t.k_token})
      for (std::int32_t& token : *list) token = order_->position_of[static_cast<std::size_t>(token)];
  }
}

std::span<const std::int32_t> Plan::tilings_of(Index head) const {
  check(head >= 0 && head < spec_.heads, "plan: head ", head, " of ", spec_.heads);
  return std::span(head_tilings_)
      .subspan(static_cast<std::size_t>(head_begin_[at(head)]),
               static_cast<std::size_t>(head_begin_[at(head) + 1] - head_begin_[at(head)]));
}

Index Plan::attends(Index head, Index t, Index u) const {
  const Ground ground = ground_of(spec_, *order_, grid_);
  if (spec_.in_order) t = order_->token_at[at(t)], u = order_->token_at[at(u)];
  Index times = 0;
  for (std::size_t branch = 0; branch < spec_.pattern.size(); ++branch)
    times += branch_attends(ground, branch, head, t, u);
  return times;
}

Index Plan::empty_rows() const {
  std::vector<bool> empty_somewhere(at(spec_.length));
  for (Index head = 0; head < spec_.heads; ++head) {
    std::vector<bool> asks(at(spec_.length));
    for (std::int32_t index : tilings_of(head)) {
      const Tiling& t = tilings_[static_cast<std::size_t>(index)];
      for (std::size_t i = 0; i < t.q_tile.size(); ++i)
        for (auto q = static_cast<std::size_t>(t.q_tile[i].begin); q < static_cast<std::size_t>(t.q_tile[i].end); ++q)
          for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1] && !asks[static_cast<std::size_t>(t.q_token[q])];
               ++e) {
            const Tiling::Ref ref = t.keys[static_cast<std::size_t>(e)];
            const Tiling::Range k = t.k_tile[static_cast<std::size_t>(ref.tile)];
            bool any = !ref.partial;
            for (auto j = static_cast<std::size_t>(k.begin); !any && j < static_cast<std::size_t>(k.end); ++j)
              any = hilt::attends(t, q, j);
            asks[static_cast<std::size_t>(t.q_token[q])] = any;
          }
    }
    for (std::size_t i = 0; i < asks.size(); ++i) empty_somewhere[i] = empty_somewhere[i] || !asks[i];
  }
  return static_cast<Index>(std::ranges::count(empty_somewhere, true));
}

TileStats Plan::stats() const {
  TileStats s;
  for (const Tiling& t : tilings_) add_stats(s, t);
  return s;
}

TileStats Plan::stats_for(Order::Kind kind) const {
  if (kind == spec_.order.kind) return stats();
  PlanSpec other = spec_;
  other.order.kind = kind;
  return Plan(std::move(other)).stats();
}

std::size_t Plan::bytes() const {
  std::size_t n = sizeof(Plan) + 2 * at(spec_.length) * sizeof(std::int32_t);
  for (const Tiling& t : tilings_) {
    for (const Tokens* list : {&t.q_token, &t.k_token, &t.q_name, &t.k_name, &t.keys_begin, &t.queries_begin, &t.q_rank,
                               &t.k_rank, &t.k_a, &t.q_a_low, &t.q_a_high, &t.k_b, &t.q_b_low, &t.q_b_high})
      n += list->capacity() * sizeof(std::int32_t);
    n += (t.q_tile.capacity() + t.k_tile.capacity()) * sizeof(Tiling::Range);
    n += (t.keys.capacity() + t.queries.capacity()) * sizeof(Tiling::Ref) + t.group.capacity() * sizeof(Tiling::Group);
  }
  return n;
}

// ---- plans in use -------------------------------------------------------------------------------
PlanPtr make_plan(const PlanSpec& spec) {
  static std::mutex mutex;
  static std::list<std::pair<std::pair<PlanSpec, bool>, PlanPtr>> recent;  // the most recently used first
  const std::pair key(spec, row_order_forced());
  {
    const std::lock_guard lock(mutex);
    for (auto it = recent.begin(); it != recent.end(); ++it)
      if (it->first == key) {
        recent.splice(recent.begin(), recent, it);
        return it->second;
      }
  }
  PlanPtr plan = std::make_shared<const Plan>(spec);
  const std::lock_guard lock(mutex);
  recent.emplace_front(key, plan);
  if (recent.size() > kCachedPlans) recent.pop_back();
  return plan;
}

OrderChoice choose_order(PlanSpec spec) {
  OrderChoice choice{spec.order, {}};
  const bool free = std::ranges::all_of(spec.pattern, [](const Branch& b) { return b.is_order_only(); }) &&
                    spec.causality != Causality::curve;
  double best = 2;
  for (Order::Kind kind :
       {Order::Kind::row, Order::Kind::snake, Order::Kind::morton, Order::Kind::tiles, Order::Kind::hilbert}) {
    if (!free && kind != spec.order.kind) continue;
    PlanSpec candidate = spec;
    candidate.order.kind = kind;
    const TileStats stats = make_plan(candidate)->stats();
    choice.considered.emplace_back(candidate.order, stats);
    if (stats.touched() < best) best = stats.touched(), choice.order = candidate.order;
  }
  return choice;
}

}  // namespace hilt
