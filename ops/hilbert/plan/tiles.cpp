// From an attended set to tiles, one Tiling for each branch and offset that heads ask for.
// Candidates are found by where they lie, then classified from the extremes of their coordinates,
// exactly: a tile is full if every key passes every query's tests, and dropped if no pair does.
#include "ops/hilbert/plan/tiles.h"
#include <bit>
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
    const bool alone = alternatives_.size() == 1;
    if (alone && b_.kind == Kind::dense) whole();
    else if (alone && b_.kind == Kind::segment) segments();
    else if (alone && b_.kind == Kind::blocks) block_rows();
    else boxes();
    name_rows();
    if (outside_ > 0) surround();
  }
  Tiling take() { return std::move(t_); }

 private:
  // A list of queries or keys and the tiles it is cut into.
  static void append(TokenList& tokens, std::vector<Tiling::Range>& tiles, const TokenList& more) {
    for (std::size_t i = 0; i < more.size(); i += at(kTile)) {
      const auto begin = narrow(tokens.size() + i);
      tiles.push_back({begin, begin + narrow(std::min<Index>(kTile, static_cast<Index>(more.size() - i)))});
    }
    tokens.append(more);
  }

  void add_group(std::int32_t q, std::int32_t k) {
    t_.group.push_back({{q, narrow(t_.q_token.size())}, {k, narrow(t_.k_token.size())}});
  }

  // Where the lists look for tokens. Sets that know no order stand along it all the same.
  Index token(Index p) const { return along_order_ ? g_.token_along_order(p) : g_.token(p); }
  bool counts_up() const { return !g_.order || (g_.by_token && !along_order_); }  // so tokens stand
  void find_asking() {
    if (!g_.spec.queries) return;
    for (const std::int32_t row : *g_.spec.queries) {
      if (row < outside_) continue;
      const Index t = g_.spec.in_order ? g_.token_along_order(row - outside_) : row - outside_;
      asking_.push_back(narrow(along_order_ ? g_.along_order(t) : g_.position(t)));
    }
    if (!std::ranges::is_sorted(asking_)) std::ranges::sort(asking_);
  }
  /// Appends the tokens of these positions, of every step-th; of queries those that ask.
  void list(Index begin, Index end, Index step, bool asking, TokenList& out) const {
    if (asking && g_.spec.queries) {
      const auto last = std::ranges::lower_bound(asking_, end);
      for (auto p = std::ranges::lower_bound(asking_, begin); p < last; ++p)
        if ((*p - begin) % step == 0) out.push_back(narrow(token(*p)));
      return;
    }
    if (step == 1 && counts_up()) return out.append(narrow(begin), at(std::max<Index>(end - begin, 0)));
    for (Index p = begin; p < end; p += step) out.push_back(narrow(token(p)));
  }

  void list_all() {
    TokenList q, k;
    if (g_.spec.cross) q.append(0, at(*g_.spec.cross));
    else list(0, g_.length(), 1, true, q);
    list(0, g_.length(), 1, false, k);
    append(t_.q_token, t_.q_tile, q);
    append(t_.k_token, t_.k_tile, k);
    fill_ranks();
  }

  void whole() {
    list_all();
    if (!t_.q_token.empty()) add_group(0, 0);
    for (Index i = 0; i < std::ssize(t_.q_tile); ++i) add_row(i, 0, std::ssize(t_.k_tile)), t_.met.end_list();
  }

  void segments() {
    const Index r = b_.dilation, offset = offset_of(g_.spec, branch_, head_);
    const bool by_residue = g_.spec.dilation_mode == DilationMode::residue;
    std::vector<std::array<Index, 3>> groups;  // end of its q tiles, its k tiles
    TokenList q, k;
    for (Index begin = -b_.axes[0].shift; begin < g_.length(); begin += b_.size) {
      const Index end = std::min(begin + b_.size, g_.length());
      const Index first = std::max<Index>(begin, 0);
      for (Index residue = 0; residue < (by_residue ? std::min(r, end - begin) : 1); ++residue) {
        q = {}, k = {};
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
    if (g_.met && (r > 1 || g_.spec.queries))
      list_others(t_.q_token, t_.q_tile, true), list_others(t_.k_token, t_.k_tile, false);
    fill_ranks();
    Index i = 0;
    for (const auto& [q_end, k_begin, k_end] : groups)
      for (; i < q_end; ++i) add_row(i, k_begin, k_end), t_.met.end_list();
    for (; i < std::ssize(t_.q_tile); ++i) t_.met.end_list();
  }
  /// Tokens that the list lacks, for a prefix to meet.
  void list_others(TokenList& tokens, std::vector<Tiling::Range>& tiles, bool asking) const {
    std::vector<bool> listed(at(g_.length()));
    for (const std::int32_t t : tokens) listed[at(t)] = true;
    TokenList all, others;
    list(0, g_.length(), 1, asking, all);
    for (const std::int32_t t : all)
      if (!listed[at(t)]) others.push_back(t);
    append(tokens, tiles, others);
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
        for (const TileRun& run : row) add_row(i, run.begin, run.end);
        t_.met.end_list();
      }
    }
  }
  struct TileRun {
    Index begin, end;
  };
  // Appends the tokens of these blocks, and says which tiles each block became.
  std::vector<TileRun> blocks_in(const Tokens& sequence, TokenList& tokens, std::vector<Tiling::Range>& tiles,
                                 bool asking) const {
    std::vector<TileRun> made(sequence.size());
    for (std::int32_t i : sequence) {
      TokenList block;
      list(i * b_.size, std::min((i + 1) * b_.size, g_.length()), 1, asking, block);
      made[at(i)].begin = std::ssize(tiles);
      append(tokens, tiles, block);
      made[at(i)].end = std::ssize(tiles);
    }
    return made;
  }

  // Each branch of a union is a box, blocks one for each run of a row; so is a set on axes.
  void boxes() {
    for (const Branch& b : alternatives_) axes_ = std::max(axes_, b.dimensions());
    list_all();
    // A number on each axis is a key: those of a query are as many as its intervals say.
    counts_ahead_ = alternatives_.size() == 1 && !t_.causal;
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

  /// A token on an axis: its number and where it lies; as a query, those of its keys.
  struct Met {
    Index number, cell;
    Interval numbers, cells;
  };
  static constexpr Interval kNone{1, 0};
  static constexpr Met kAll{};

  /// The keys of queries on each of the first `axes`, by on(token, axis, whether it asks).
  template <class F> void add_box(std::size_t axes, F&& on) {
    std::vector<Box> keys(t_.k_tile.size()), reach((t_.q_token.size() + at(kPart) - 1) / at(kPart));
    for (std::size_t j = 0; j < t_.k_token.size(); ++j) {
      Box place{.empty = false};
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Met m = axis < axes ? on(t_.k_token[j], axis, false) : kAll;
        place.side[axis] = {m.cell, m.cell}, place.empty = place.empty || m.number < 0;
        t_.axis[axis].key.push_back(narrow(m.number));
      }
      keys[j / at(kTile)].cover(place);
    }
    for (std::size_t i = 0; i < t_.q_token.size(); ++i) {
      Box met{.empty = false};
      Index numbers = 1;
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Met m = axis < axes ? on(t_.q_token[i], axis, true) : kAll;
        met.side[axis] = m.cells, met.empty = met.empty || m.numbers.low > m.numbers.high;
        numbers *= m.numbers.high - m.numbers.low + 1;
        t_.axis[axis].low.push_back(narrow(m.numbers.low));
        t_.axis[axis].high.push_back(narrow(m.numbers.high));
      }
      reach[i / at(kPart)].cover(met);
      if (counts_ahead_ && !met.empty) t_.pairs += numbers;
    }
    ++t_.boxes;
    searches_.push_back({BoxTree(keys), std::move(reach)});
  }

  void add_axes(const Branch& b) {
    axes_ = std::max(axes_, b.dimensions());
    const auto meets = [](const AxisRule& rule, Index cell) {
      const Interval met = rule.keys_of(cell);
      return Met{rule.number(cell), cell, met, {rule.cell(met.low), rule.cell(met.high)}};
    };
    if (b.dimensions() == 1)
      return add_box(1, [&, rule = AxisRule(b, 0, g_.cells(b, 0))](std::int32_t token, std::size_t axis, bool) {
        return meets(rule, g_.cell(b, axis, token));
      });
    std::array<std::vector<Met>, 3> by_cell;  // many tokens share one
    for (std::size_t axis = 0; axis < b.dimensions(); ++axis)
      for (Index cell = 0; cell < g_.cells(b, axis); ++cell)
        by_cell[axis].push_back(meets(AxisRule(b, axis, g_.cells(b, axis)), cell));
    add_box(b.dimensions(),
            [&](std::int32_t token, std::size_t axis, bool) { return by_cell[axis][at(g_.cell(b, axis, token))]; });
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
    for (Tiling::Axis& axis : t_.axis)
      for (Tokens* list : {&axis.key, &axis.low, &axis.high}) interleave(*list);
    std::vector<Index> candidates;
    for (Index i = 0; i < std::ssize(t_.q_tile); ++i) {
      candidates.clear();
      for (const Search& search : searches_) {
        const std::size_t parts = at(kTile / kPart), from = at(i) * parts;
        search.tree.find(std::span(search.reach).subspan(from, std::min(parts, search.reach.size() - from)),
                         [&](Index tile) { candidates.push_back(tile); });
      }
      std::ranges::sort(candidates);
      candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());
      for (Index tile : candidates) add_row(i, tile, tile + 1);
      t_.met.end_list();
    }
  }
  /// Values that stand box after box, as so many an entry.
  void interleave(Tokens& list) const {
    if (t_.boxes == 1) return;
    const Tokens by_box = list;
    const std::size_t boxes = at(t_.boxes), n = list.size() / boxes;
    for (std::size_t i = 0; i < list.size(); ++i) list[i] = by_box[i % boxes * n + i / boxes];
  }
  struct Search {
    BoxTree tree;
    std::vector<Box> reach;
  };
  static constexpr Index kPart = 16;  // queries

  // ---- classification ----
  struct Extremes {
    std::int32_t low = std::numeric_limits<std::int32_t>::max(), high = std::numeric_limits<std::int32_t>::min();
  };
  static Extremes both(Extremes a, Extremes b) { return {std::min(a.low, b.low), std::max(a.high, b.high)}; }
  using Levels = std::vector<std::vector<Extremes>>;  // [level][i]: of tiles i << level .. (i + 1) << level
  template <class F> static std::vector<Extremes> extremes(const std::vector<Tiling::Range>& tiles, F&& value) {
    std::vector<Extremes> out(tiles.size());
    for (std::size_t tile = 0; tile < tiles.size(); ++tile)
      for (Index i = tiles[tile].begin; i < tiles[tile].end; ++i) out[tile] = both(out[tile], {value(i), value(i)});
    return out;
  }
  static std::vector<Extremes> extremes(const std::vector<Tiling::Range>& tiles, const TokenList& list) {
    if (!list.counts_up()) return extremes(tiles, [&](Index i) { return list[at(i)]; });
    std::vector<Extremes> out;
    for (const Tiling::Range& r : tiles) out.push_back({list[at(r.begin)], list[at(r.end - 1)]});
    return out;
  }
  static Levels levels(std::vector<Extremes> of_tiles) {
    Levels all{std::move(of_tiles)};
    for (std::size_t n; (n = all.back().size() / 2) > 0;) {
      std::vector<Extremes> next;
      for (std::size_t i = 0; i < n; ++i) next.push_back(both(all.back()[2 * i], all.back()[2 * i + 1]));
      all.push_back(std::move(next));
    }
    return all;
  }

  void fill_ranks() {
    t_.causal = g_.spec.causality != Causality::none;
    if (g_.spec.causality != Causality::curve) return;  // tokens are ranked by their names
    const auto rank = [&](std::int32_t token) { return narrow(outside_ + g_.along_order(token)); };
    t_.q_rank = mapped(t_.q_token, rank), t_.k_rank = mapped(t_.k_token, rank);
  }
  template <class F> static TokenList mapped(const TokenList& list, F&& f) {
    Tokens out = list.values();
    for (std::int32_t& x : out) x = f(x);
    return TokenList(std::move(out));
  }

  /// A comparison of the mask, and each tile's extremes: a key is in an interval of the query.
  struct Test {
    const TokenList* rank;           // of queries; or, on an axis, from query to query by `step`:
    const std::int32_t *low, *high;  // a key of no low may be as low as it likes
    Index step;
    std::vector<Extremes> low_of, high_of;
    Levels key_of;

    void classify(Index i, std::size_t level, Index j, bool& always, bool& never) const {
      const Extremes &up = high_of[at(i)], &key = key_of[level][at(j)];
      always = always && key.high <= up.low, never = never || key.low > up.high;
      if (!low) return;
      const Extremes& down = low_of[at(i)];
      always = always && key.low >= down.high, never = never || key.high < down.low;
    }
    bool misses(Index query, Index tile) const {
      const Extremes& key = key_of[0][at(tile)];
      return key.low > (rank ? (*rank)[at(query)] : high[query * step]) || (low && key.high < low[query * step]);
    }
  };
  // The lists are whole when the first tile is asked about.
  void fill_tests() {
    const TokenList &q = t_.q_ranks(), &k = t_.k_ranks();
    if (t_.causal) ranks_.push_back({&q, {}, {}, 1, {}, extremes(t_.q_tile, q), levels(extremes(t_.k_tile, k))});
    boxes_.resize(at(t_.boxes));
    for (Index box = 0; box < t_.boxes; ++box)
      for (const Tiling::Axis& axis : t_.axis) {
        if (axis.key.empty()) continue;
        const auto of = [&](const std::vector<Tiling::Range>& tiles, const Tokens& list) {
          return extremes(tiles, [&](Index i) { return list[at(i * t_.boxes + box)]; });
        };
        boxes_[at(box)].push_back({nullptr, axis.low.data() + box, axis.high.data() + box, t_.boxes,
                                   of(t_.q_tile, axis.low), of(t_.q_tile, axis.high), levels(of(t_.k_tile, axis.key))});
      }
  }

  void add_row(Index i, Index k_begin, Index k_end) {
    if (boxes_.empty()) fill_tests();
    for (Index j = k_begin; j < k_end;) {  // whole nodes of the levels
      const int most = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(k_end - j))) - 1,
                level = std::min(most, std::countr_zero(static_cast<std::uint64_t>(j)));
      classify(i, at(level), j >> level);
      j += Index{1} << level;
    }
  }
  // Tests on the extremes settle most tiles, many at once: `always` if no key fails any query,
  // `never` if every key fails all. Boxes may fill a tile together.
  void classify(Index i, std::size_t level, Index node) {
    bool always = true, never = false, some = false, none = true;
    for (const Test& test : ranks_) test.classify(i, level, node, always, never);
    for (const std::vector<Test>& box : boxes_) {
      bool all_pass = true, all_fail = false;
      for (const Test& test : box) test.classify(i, level, node, all_pass, all_fail);
      some = some || all_pass, none = none && all_fail;
    }
    if (never || none) return;
    const bool is_full = always && some;
    if (!is_full && level > 0) return classify(i, level - 1, 2 * node), classify(i, level - 1, 2 * node + 1);
    const Tiling::Range q = t_.q_tile[at(i)];
    const Index first = node << level, end = (node + 1) << level;
    const Index keys = t_.k_tile[at(end - 1)].end - t_.k_tile[at(first)].begin;
    const Index all = Index{q.end - q.begin} * keys, pairs = is_full ? all : counted(q, node);
    if (pairs > 0) t_.met.add(narrow(first), narrow(end), pairs < all);
    if (!counts_ahead_) t_.pairs += pairs;
  }

  /// The pairs of these queries with a tile of keys, or some where all are counted already. On axes
  /// most queries miss a tile altogether.
  Index counted(Tiling::Range q, Index tile) const {
    const Tiling::Range k = t_.k_tile[at(tile)];
    if (t_.axis[0].key.empty()) return count_pairs(t_, q, k);
    Index n = 0;
    for (std::int32_t i = q.begin; i < q.end; ++i) {
      const auto misses = [&](const std::vector<Test>& tests) {
        return std::ranges::any_of(tests, [&](const Test& test) { return test.misses(i, tile); });
      };
      if (!misses(ranks_) && !std::ranges::all_of(boxes_, misses)) n += count_pairs(t_, {i, i + 1}, k);
      if (counts_ahead_ && n > 0) break;
    }
    return n;
  }

  // The lists hold tokens so far. Masks compare what is beside them: only where rows lie changes.
  void name_rows() {
    const auto& queries = g_.spec.queries;
    const bool moves = g_.spec.in_order && g_.order;
    const auto row_of = [&](std::int32_t token) {
      return moves ? outside_ + narrow(g_.along_order(token - outside_)) : token;
    };
    for (TokenList* list : {&t_.q_token, &t_.k_token}) {
      if (outside_ == 0) break;
      TokenList behind;
      behind.append(*list, outside_);
      *list = std::move(behind);
    }
    if (g_.spec.in_order || queries) t_.q_name = t_.q_token;
    if (g_.spec.in_order) t_.k_name = t_.k_token;
    if (moves) t_.k_token = mapped(t_.k_token, row_of);
    if (queries)
      t_.q_token = mapped(t_.q_token, [&](std::int32_t token) {
        return narrow(std::ranges::lower_bound(*queries, row_of(token)) - queries->begin());
      });
    else if (moves) t_.q_token = mapped(t_.q_token, row_of);
    for (TokenList* list : {&t_.q_token, &t_.k_token, &t_.q_name, &t_.k_name}) list->fit();
  }

  // ---- tokens outside ----
  /// Puts the prefix before all else, in tiles of its own, which are full but for causality.
  void surround() {
    TokenList asking, all;
    all.append(0, at(outside_));
    if (!g_.spec.queries) asking = all;
    else
      for (const std::int32_t row : *g_.spec.queries)
        if (row < outside_) asking.push_back(row);
    Tiling out;
    out.grid = t_.grid;
    TokenList rows;
    rows.append(0, asking.size());
    append(out.q_token, out.q_tile, rows);
    if (g_.met) append(out.k_token, out.k_tile, all);
    if (g_.spec.queries) out.q_name = asking;
    if (g_.spec.causality == Causality::curve) out.q_rank = asking, out.k_rank = out.k_token;
    for (std::size_t a = 0; a < t_.axis.size(); ++a) {
      const Tokens& keys = t_.axis[a].key;
      if (keys.empty()) continue;
      const auto [low, high] = g_.met ? std::ranges::minmax(keys) : std::ranges::min_max_result{1, 0};
      out.axis[a].key.assign(out.k_token.size() * at(t_.boxes), kTaken);
      out.axis[a].low.assign(asking.size() * at(t_.boxes), low);
      out.axis[a].high.assign(asking.size() * at(t_.boxes), high);
    }
    const std::size_t q_tiles = out.q_tile.size(), k_tiles = out.k_tile.size();
    const Index behind = std::ssize(t_.k_token);
    add_all_queries(out, t_), add_all_keys(out, t_);
    for (std::size_t i = 0; i < out.q_tile.size(); ++i) {
      const Tiling::Range q = out.q_tile[i];
      for (std::size_t j = 0; j < k_tiles; ++j) meet(out, q, j, i < q_tiles);
      if (i < q_tiles && g_.met && !t_.causal && behind > 0) {
        out.met.add(narrow(k_tiles), narrow(out.k_tile.size()), false);
        out.pairs += (q.end - q.begin) * behind;
      }
      if (i >= q_tiles)
        for (const Tiling::Ref ref : t_.met.of(i - q_tiles))
          out.met.add(ref.tile + narrow(k_tiles), ref.tile + narrow(k_tiles) + 1, ref.partial);
      out.met.end_list();
    }
    out.pairs += t_.pairs;
    take_groups(out);
    t_ = std::move(out);
  }
  /// Queries with tile j of the prefix; some of it is later only where they are of it themselves.
  static void meet(Tiling& t, Tiling::Range q, std::size_t j, bool inside) {
    const Tiling::Range k = t.k_tile[j];
    const Index all = Index{q.end - q.begin} * (k.end - k.begin);
    const auto name = [&](std::int32_t i) { return t.q_names()[at(i)]; };
    const bool full = !inside || !t.causal || name(q.begin) >= k.end - 1;
    const Index pairs = full ? all : name(q.end - 1) < k.begin ? 0 : count_pairs(t, q, k);
    if (pairs > 0) t.met.add(narrow(j), narrow(j + 1), pairs < all);
    t.pairs += pairs;
  }
  /// Where all tokens met all there is one group again; a branch without the prefix keeps its own.
  void take_groups(Tiling& out) const {
    const auto before = narrow(out.q_token.size() - t_.q_token.size());
    const auto is_all = [&](const Tiling::Group& g) {
      return std::cmp_equal(g.q.end - g.q.begin, t_.q_token.size()) && g.k.end - g.k.begin == g_.length();
    };
    if (g_.met && std::ranges::all_of(t_.group, is_all) &&
        (!t_.group.empty() || (g_.length() == 0 && !out.q_tile.empty())))
      out.group.push_back({{0, narrow(out.q_token.size())}, {0, narrow(out.k_token.size())}});
    if (!g_.met)
      for (const Tiling::Group& g : t_.group) out.group.push_back({{g.q.begin + before, g.q.end + before}, g.k});
  }

  const Ground& g_;
  std::size_t branch_;
  std::span<const Branch> alternatives_;
  const Branch& b_;
  Index head_;
  bool along_order_;
  std::int32_t outside_ = narrow(g_.spec.outside());
  Tokens asking_;  // positions, ascending, where not all ask
  Tiling t_;
  std::size_t axes_ = 1;       // of every box
  bool counts_ahead_ = false;  // t_.pairs is known before tiles are found
  std::vector<Search> searches_;
  std::vector<Test> ranks_;
  std::vector<std::vector<Test>> boxes_;
};

}  // namespace

Tiling tiling_of(const Ground& ground, std::size_t branch, Index head) { return Builder(ground, branch, head).take(); }

}  // namespace hilt
