// From an attended set to tiles, one Tiling for each branch and offset that heads ask for.
// Candidates are found by where they lie, then classified from the extremes of their coordinates,
// exactly: a tile is full if every key passes every query's tests, and dropped if no pair does.
#include "ops/hilbert/plan/tiles.h"
#include <limits>
#include "core/error.h"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/axes.h"
#include "ops/hilbert/plan/work_order.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;
using Tokens = std::vector<std::int32_t>;
constexpr Index kTile = Tiling::kTile;

/// A Tiling in the making: lists and tiles first, then which tile meets which.
class Builder {
 public:
  Builder(const Ground& ground, std::size_t branch, Index head)
      : g_(ground),
        branch_(branch),
        alternatives_(ground.spec.pattern.data() + branch, end_of_union(ground.spec.pattern, branch) - branch),
        b_(alternatives_[0]),
        head_(head),
        along_order_(std::ranges::all_of(alternatives_, &Branch::is_order_only)) {
    find_asking();
    if (alternatives_.size() > 1) united();
    else if (b_.kind == Kind::dense) whole();
    else if (b_.kind == Kind::segment) segments();
    else if (b_.kind == Kind::blocks) block_rows();
    else windows();
    begin_row();
    transpose_tiles(t_);
    name_rows();
  }
  Tiling take() { return std::move(t_); }

 private:
  // A list of queries or keys and the tiles it is cut into.
  static void append(Tokens& tokens, std::vector<Tiling::Range>& tiles, const Tokens& more) {
    for (std::size_t i = 0; i < more.size(); i += at(kTile)) {
      const auto begin = narrow(tokens.size() + i);
      tiles.push_back({begin, begin + narrow(std::min<Index>(kTile, static_cast<Index>(more.size() - i)))});
    }
    tokens.insert(tokens.end(), more.begin(), more.end());
  }

  void add_group(std::int32_t q, std::int32_t k) {
    t_.group.push_back({{q, narrow(t_.q_token.size())}, {k, narrow(t_.k_token.size())}});
  }

  // Where the lists look for tokens. Sets that know no order stand along it all the same.
  Index token(Index p) const { return along_order_ ? Index{g_.order.token_at[at(p)]} : g_.token(p); }
  void find_asking() {
    if (!g_.spec.queries) asking_ = query_run(0, g_.spec.rows_of_q());
    else
      for (const std::int32_t row : *g_.spec.queries) {
        const Index t = g_.spec.in_order ? g_.order.token_at[at(row)] : row;
        asking_.push_back(narrow(along_order_ ? Index{g_.order.position_of[at(t)]} : g_.position(t)));
      }
    if (!std::ranges::is_sorted(asking_)) std::ranges::sort(asking_);
  }
  /// Appends the tokens of these positions, of every step-th; of queries those that ask.
  void list(Index begin, Index end, Index step, bool asking, Tokens& out) const {
    const auto last = std::ranges::lower_bound(asking_, end);
    for (auto p = std::ranges::lower_bound(asking_, begin); asking && p < last; ++p)
      if ((*p - begin) % step == 0) out.push_back(narrow(token(*p)));
    for (Index p = begin; !asking && p < end; p += step) out.push_back(narrow(token(p)));
  }

  void list_all() {
    Tokens q, k;
    if (g_.spec.cross) q = asking_;
    else list(0, g_.length(), 1, true, q);
    list(0, g_.length(), 1, false, k);
    append(t_.q_token, t_.q_tile, q);
    append(t_.k_token, t_.k_tile, k);
    fill_ranks();
  }

  void whole() {
    list_all();
    if (!t_.q_token.empty()) add_group(0, 0);
    for (Index i = 0; i < std::ssize(t_.q_tile); ++i) begin_row(), add_row(i, 0, std::ssize(t_.k_tile));
  }

  void segments() {
    const Index r = b_.dilation, offset = offset_of(g_.spec, branch_, head_);
    const bool by_residue = g_.spec.dilation_mode == DilationMode::residue;
    std::vector<std::array<Index, 3>> groups;  // end of its q tiles, its k tiles
    Tokens q, k;
    for (Index begin = -b_.axes[0].shift; begin < g_.length(); begin += b_.size) {
      const Index end = std::min(begin + b_.size, g_.length());
      const Index first = std::max<Index>(begin, 0);
      for (Index residue = 0; residue < (by_residue ? std::min(r, end - begin) : 1); ++residue) {
        q.clear(), k.clear();
        Index p = begin + (by_residue ? residue : offset);
        if (p < 0) p += (r - 1 - p) / r * r;  // the first segment begins before the first position
        if (by_residue || only_active_ask(g_.spec.dilation_mode)) list(p, end, r, true, q);
        else list(first, end, 1, true, q);
        if (q.empty()) continue;
        list(p, end, r, false, k);
        const Index k_first = std::ssize(t_.k_tile);
        const auto q_begin = narrow(std::ssize(t_.q_token)), k_begin = narrow(std::ssize(t_.k_token));
        append(t_.q_token, t_.q_tile, q);
        append(t_.k_token, t_.k_tile, k);
        if (!k.empty()) add_group(q_begin, k_begin);
        groups.push_back({std::ssize(t_.q_tile), k_first, std::ssize(t_.k_tile)});
      }
    }
    fill_ranks();
    Index i = 0;
    for (const auto& [q_end, k_begin, k_end] : groups)
      for (; i < q_end; ++i) begin_row(), add_row(i, k_begin, k_end);
  }

  void block_rows() {
    const Index n = (g_.length() + b_.size - 1) / b_.size;
    const BlockPairs& pairs = b_.pairs_of(head_, g_.spec.heads);
    const BlockLayout layout = lay_out_blocks(g_.spec.work_order, pairs, n);
    const auto q_tiles = blocks_in(layout.queries, t_.q_token, t_.q_tile, true),
               k_tiles = blocks_in(layout.keys, t_.k_token, t_.k_tile, false);
    fill_ranks();
    std::vector<TileRun> row;
    for (std::int32_t block : layout.queries) {
      row.clear();
      for (const auto& pair : std::ranges::equal_range(pairs, block, {}, &BlockPairs::value_type::first))
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
  std::vector<TileRun> blocks_in(const Tokens& sequence, Tokens& tokens, std::vector<Tiling::Range>& tiles,
                                 bool asking) const {
    std::vector<TileRun> made(sequence.size());
    Tokens block;
    for (std::int32_t i : sequence) {
      block.clear();
      list(i * b_.size, std::min((i + 1) * b_.size, g_.length()), 1, asking, block);
      made[at(i)].begin = std::ssize(tiles);
      append(tokens, tiles, block);
      made[at(i)].end = std::ssize(tiles);
    }
    return made;
  }

  void windows() {
    list_all();
    t_.boxes = 0;
    add_axes(b_);
    find_tiles();
  }

  // Each branch of a union is a box, blocks one for each run of a row.
  void united() {
    for (const Branch& b : alternatives_) axes_ = std::max(axes_, b.dimensions());
    list_all();
    t_.boxes = 0;
    for (std::size_t i = 0; i < alternatives_.size(); ++i) {
      const Branch& b = alternatives_[i];
      if (b.kind == Kind::dense) add_box(0, [](auto...) { return kAll; });
      else if (b.kind == Kind::segment) add_segments(b, offset_of(g_.spec, branch_ + i, head_));
      else if (b.kind == Kind::blocks) add_blocks(b);
      else add_axes(b);
    }
    find_tiles();
  }

  /// A token on an axis: its number and where it lies; as a query, the numbers it meets and where.
  struct Met {
    Index number, cell;
    Interval numbers, cells;
  };
  static constexpr Interval kNone{1, 0};
  static constexpr Met kAll{};

  /// Whom queries meet on each of the first `axes`, by on(token, axis, whether it asks).
  template <class F> void add_box(std::size_t axes, F&& on) {
    std::vector<Box> keys(t_.k_tile.size()), reach((t_.q_token.size() + at(kPart) - 1) / at(kPart));
    for (std::size_t j = 0; j < t_.k_token.size(); ++j) {
      Box place{.empty = false};
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Met m = axis < axes ? on(t_.k_token[j], axis, false) : kAll;
        place.side[axis] = {m.cell, m.cell}, place.empty = place.empty || m.number < 0;
        (t_.*kAxes[axis].key).push_back(narrow(m.number));
      }
      keys[j / at(kTile)].cover(place);
    }
    for (std::size_t i = 0; i < t_.q_token.size(); ++i) {
      Box met{.empty = false};
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Met m = axis < axes ? on(t_.q_token[i], axis, true) : kAll;
        met.side[axis] = m.cells, met.empty = met.empty || m.numbers.low > m.numbers.high;
        (t_.*kAxes[axis].low).push_back(narrow(m.numbers.low));
        (t_.*kAxes[axis].high).push_back(narrow(m.numbers.high));
      }
      reach[i / at(kPart)].cover(met);
    }
    ++t_.boxes;
    searches_.push_back({BoxTree(keys), std::move(reach)});
  }

  void add_axes(const Branch& b) {
    axes_ = std::max(axes_, b.dimensions());
    std::vector<AxisRule> rules;
    for (std::size_t axis = 0; axis < b.dimensions(); ++axis) rules.emplace_back(b, axis, g_.cells(b, axis));
    add_box(rules.size(), [&](std::int32_t token, std::size_t axis, bool asks) {
      const AxisRule& rule = rules[axis];
      const Index cell = g_.cell(b, axis, token);
      if (!asks) return Met{rule.number(cell), cell};
      const Interval met = rule.meets(cell);
      return Met{0, cell, met, {rule.cell(met.low), rule.cell(met.high)}};
    });
  }
  void add_segments(const Branch& b, Index offset) {
    const DilationMode mode = g_.spec.dilation_mode;
    add_box(1, [&, residues = std::min(b.dilation, b.size)](std::int32_t token, std::size_t, bool asks) {
      const Index p = g_.position(token) + b.axes[0].shift, s = p / b.size, j = p % b.size % b.dilation;
      if (mode == DilationMode::residue) return Met{s * residues + j, s, {s * residues + j, s * residues + j}, {s, s}};
      const bool active = j == offset || (asks && !only_active_ask(mode));
      return Met{active ? s : -1, s, active ? Interval{s, s} : kNone, {s, s}};
    });
  }
  void add_blocks(const Branch& b) {
    constexpr std::size_t kMostRuns = 64;
    std::vector<std::vector<Interval>> runs(at((g_.length() + b.size - 1) / b.size));
    std::size_t most = 0;
    for (const auto& [i, j] : b.pairs_of(head_, g_.spec.heads)) {
      std::vector<Interval>& row = runs[at(i)];
      if (!row.empty() && row.back().high + 1 == j) row.back().high = j;
      else row.push_back({j, j});
      most = std::max(most, row.size());
    }
    check(most <= kMostRuns, "plan: ", to_string({b}), ": a row of its list has ", most,
          " runs of blocks; in a union at most ", kMostRuns);
    for (std::size_t run = 0; run < most; ++run)
      add_box(1, [&](std::int32_t token, std::size_t, bool) {
        const Index block = g_.position(token) / b.size;
        const Interval met = run < runs[at(block)].size() ? runs[at(block)][run] : kNone;
        return Met{block, block, met, met};
      });
  }

  void find_tiles() {
    t_.boxes = std::max(t_.boxes, 1);  // a list of blocks may be empty
    for (const AxisLists& axis : kAxes)
      for (auto list : {axis.key, axis.low, axis.high}) interleave(t_.*list);
    std::vector<Index> candidates;
    for (Index i = 0; i < std::ssize(t_.q_tile); ++i) {
      begin_row();
      candidates.clear();
      for (const Search& search : searches_) {
        const std::size_t parts = at(kTile / kPart), from = at(i) * parts;
        search.tree.find(std::span(search.reach).subspan(from, std::min(parts, search.reach.size() - from)),
                         [&](Index tile) { candidates.push_back(tile); });
      }
      std::ranges::sort(candidates);
      candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
      for (Index tile : candidates) add_row(i, tile, tile + 1);
    }
  }
  /// Values that stand box after box, as so many an entry.
  void interleave(Tokens& list) const {
    const Tokens by_box = list;
    const std::size_t boxes = at(t_.boxes), n = list.size() / boxes;
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = by_box[i % boxes * n + i / boxes];
  }
  struct Search {
    BoxTree tree;
    std::vector<Box> reach;
  };
  static constexpr Index kPart = 16;  // queries
  struct AxisLists {
    Tokens Tiling::*key, Tiling::*low, Tiling::*high;
  };
  static constexpr std::array<AxisLists, 3> kAxes{{{&Tiling::k_a, &Tiling::q_a_low, &Tiling::q_a_high},
                                                   {&Tiling::k_b, &Tiling::q_b_low, &Tiling::q_b_high},
                                                   {&Tiling::k_c, &Tiling::q_c_low, &Tiling::q_c_high}}};

  // ---- classification ----
  struct Extremes {
    std::int32_t low = std::numeric_limits<std::int32_t>::max(), high = std::numeric_limits<std::int32_t>::min();
  };
  /// Of every step-th value.
  static std::vector<Extremes> extremes(const std::int32_t* values, std::int32_t step,
                                        const std::vector<Tiling::Range>& tiles) {
    std::vector<Extremes> out(tiles.size());
    for (std::size_t tile = 0; tile < tiles.size(); ++tile)
      for (Index i = tiles[tile].begin; i < tiles[tile].end; ++i) {
        Extremes& e = out[tile];
        e.low = std::min(e.low, values[i * step]), e.high = std::max(e.high, values[i * step]);
      }
    return out;
  }

  void fill_ranks() {
    t_.causal = g_.spec.causality != Causality::none;
    if (g_.spec.causality != Causality::curve) return;  // tokens are ranked by their names
    for (std::int32_t t : t_.q_token) t_.q_rank.push_back(g_.order.position_of[at(t)]);
    for (std::int32_t t : t_.k_token) t_.k_rank.push_back(g_.order.position_of[at(t)]);
  }

  void begin_row() { t_.keys_begin.push_back(narrow(std::ssize(t_.keys))); }

  /// A comparison of the mask, and each tile's extremes: a key is in an interval of the query.
  struct Test {
    std::int32_t step;  // from query to query
    const std::int32_t *low, *high;
    std::vector<Extremes> low_of, high_of, key_of;

    void settle(Index i, Index j, bool& always, bool& never) const {
      const Extremes &up = high_of[at(i)], &key = key_of[at(j)];
      always = always && key.high <= up.low, never = never || key.low > up.high;
      if (!low) return;
      const Extremes& down = low_of[at(i)];
      always = always && key.low >= down.high, never = never || key.high < down.low;
    }
    bool misses(Index query, Index tile) const {
      const Extremes& key = key_of[at(tile)];
      return key.low > high[query * step] || (low && key.high < low[query * step]);
    }
  };
  Test test_of(std::int32_t step, const std::int32_t* low, const std::int32_t* high, const std::int32_t* key) const {
    Test test{step, low, high, {}, extremes(high, step, t_.q_tile), extremes(key, step, t_.k_tile)};
    if (low) test.low_of = extremes(low, step, t_.q_tile);
    return test;
  }
  // The lists are whole when the first tile is asked about.
  void fill_tests() {
    if (t_.causal) ranks_.push_back(test_of(1, nullptr, t_.q_ranks().data(), t_.k_ranks().data()));
    boxes_.resize(at(t_.boxes));
    for (std::size_t box = 0; box < boxes_.size(); ++box)
      for (const AxisLists& axis : kAxes)
        if (!(t_.*axis.key).empty())
          boxes_[box].push_back(test_of(t_.boxes, (t_.*axis.low).data() + box, (t_.*axis.high).data() + box,
                                        (t_.*axis.key).data() + box));
  }

  // Tests on the extremes settle most tiles: `always` if no key fails any query, `never` if
  // every key fails all. Boxes may fill a tile together.
  void add_row(Index i, Index k_begin, Index k_end) {
    if (boxes_.empty()) fill_tests();
    const Tiling::Range q = t_.q_tile[at(i)];
    for (Index j = k_begin; j < k_end; ++j) {
      const Tiling::Range k = t_.k_tile[at(j)];
      bool always = true, never = false, some = false, none = true;
      for (const Test& test : ranks_) test.settle(i, j, always, never);
      for (const std::vector<Test>& box : boxes_) {
        bool all_pass = true, all_fail = false;
        for (const Test& test : box) test.settle(i, j, all_pass, all_fail);
        some = some || all_pass, none = none && all_fail;
      }
      if (never || none) continue;
      const Index all = Index{q.end - q.begin} * (k.end - k.begin), pairs = always && some ? all : counted(q, j);
      if (pairs == 0) continue;
      t_.keys.push_back({narrow(j), pairs < all});
      ++(pairs < all ? t_.tiles_partial : t_.tiles_full);
      t_.pairs += pairs;
    }
  }

  /// The pairs of these queries with a tile of keys. On axes most queries miss a tile altogether.
  Index counted(Tiling::Range q, Index tile) const {
    const Tiling::Range k = t_.k_tile[at(tile)];
    if (t_.k_a.empty()) return count_pairs(t_, q, k);
    Index n = 0;
    for (std::int32_t i = q.begin; i < q.end; ++i) {
      const auto misses = [&](const std::vector<Test>& tests) {
        return std::ranges::any_of(tests, [&](const Test& test) { return test.misses(i, tile); });
      };
      if (!misses(ranks_) && !std::ranges::all_of(boxes_, misses)) n += count_pairs(t_, {i, i + 1}, k);
    }
    return n;
  }

  // The lists hold tokens so far. Masks compare what is beside them: only where rows lie changes.
  void name_rows() {
    const auto& queries = g_.spec.queries;
    const auto row_of = [&](std::int32_t token) { return g_.spec.in_order ? g_.order.position_of[at(token)] : token; };
    if (g_.spec.in_order || queries) t_.q_name = t_.q_token;
    if (g_.spec.in_order) t_.k_name = t_.k_token;
    for (std::int32_t& token : t_.k_token) token = row_of(token);
    for (std::int32_t& token : t_.q_token) {
      token = row_of(token);
      if (queries) token = narrow(std::ranges::lower_bound(*queries, token) - queries->begin());
    }
  }

  const Ground& g_;
  std::size_t branch_;
  std::span<const Branch> alternatives_;
  const Branch& b_;
  Index head_;
  bool along_order_;
  Tokens asking_;  // positions, ascending; of another sequence, all it has
  Tiling t_;
  std::size_t axes_ = 1;  // of every box
  std::vector<Search> searches_;
  std::vector<Test> ranks_;
  std::vector<std::vector<Test>> boxes_;
};

}  // namespace

Tiling tiling_of(const Ground& ground, std::size_t branch, Index head) { return Builder(ground, branch, head).take(); }

}  // namespace hilt
