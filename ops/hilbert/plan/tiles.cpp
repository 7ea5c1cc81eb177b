// From an attended set to tiles, one Tiling for each branch and offset that heads ask for.
// Candidates are found by where they lie, then classified from the extremes of their coordinates,
// exactly: a tile is full if every key passes every query's tests, and dropped if no pair does.
#include "ops/hilbert/plan/tiles.h"
#include <bit>
#include "core/error.h"

namespace hilt {
namespace {

using Kind = Branch::Kind;
using Tokens = std::vector<std::int32_t>;
constexpr Index kTile = Tiling::kTile;

/// A Tiling in the making: lists and tiles first, then which tile may meet which, then which does.
class Builder {
 public:
  Builder(const Ground& ground, std::size_t branch, Index head)
      : g_(ground),
        branch_(branch),
        alternatives_(ground.spec.pattern.data() + branch, end_of_union(ground.spec.pattern, branch) - branch),
        b_(alternatives_[0]),
        head_(head),
        along_order_(std::ranges::all_of(alternatives_, &Branch::is_order_only)) {
    const bool alone = alternatives_.size() == 1, lists_tell_all = alone && b_.dimensions() == 0;  // of no axes
    find_asking();
    list_prefix();
    if (lists_tell_all && b_.kind == Kind::segment) segments();
    else if (alone && b_.kind == Kind::blocks) block_rows();
    else whole();
    fill_ranks();
    if (!lists_tell_all && g_.length() > 0) boxes();
    if (t_.causal && !g_.met && !t_.group.empty()) counts_ahead_ = true, count_groups();
    find_tiles();
    if (g_.met) group_with_prefix();
    name_rows();
  }
  Tiling take() { return std::move(t_); }

 private:
  using Range = Tiling::Range;
  using Ranges = std::vector<Range>;

  // ---- what tiles have between them ----
  /// The lowest and the highest of some numbers.
  struct Extremes {
    std::int32_t low = std::numeric_limits<std::int32_t>::max(), high = std::numeric_limits<std::int32_t>::min();
    void cover(Index x) { cover({x, x}); }
    void cover(const Interval& x) { low = std::min(low, narrow(x.low)), high = std::max(high, narrow(x.high)); }
  };
  using Extents = std::vector<Extremes>;  // of each tile
  /// Extremes of list[step row + first] among the rows of each tile.
  template <class List> Extents extents(const Ranges& tiles, const List& list, Index step = 1, Index first = 0) const {
    Extents out(tiles.size());
    bool ends_tell = is_line_;
    if constexpr (std::is_same_v<List, TokenList>) ends_tell = list.counts_up();
    for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
      const Index begin = tiles[tile].begin, last = tiles[tile].end - 1, by = ends_tell ? last - begin : 1;
      for (Index row = begin; row <= last; row += std::max<Index>(by, 1)) out[tile].cover(list[at(step * row + first)]);
    }
    return out;
  }
  using Levels = std::vector<Extents>;  // [level][i]: of tiles i << level .. (i + 1) << level
  static Levels levels(Extents of_tiles) {
    Levels all{std::move(of_tiles)};
    for (std::size_t n; (n = all.back().size() / 2) > 0;) {
      Extents next(n);
      for (std::size_t i = 0; i < 2 * n; ++i) next[i / 2].cover({all.back()[i].low, all.back()[i].high});
      all.push_back(std::move(next));
    }
    return all;
  }

  /// A comparison of the mask by each tile's extremes: a key is in an interval of the query.
  struct Test {
    Extents low, high;  // without low, a key may be as low as it likes
    Levels key;

    void classify(Index i, std::size_t level, Index j, bool& always, bool& never) const {
      const Extremes &up = high[at(i)], &keys = key[level][at(j)];
      if (keys.high == kTaken) return;
      always = always && keys.high <= up.low, never = never || keys.low > up.high;
      if (low.empty()) return;
      const Extremes& down = low[at(i)];
      always = always && keys.low >= down.high, never = never || keys.high < down.low;
    }
  };
  /// One of a union.
  struct Box {
    std::vector<Test> numbers;  // what the mask compares
    std::vector<Test> cells;    // where that lies: it rules out tiles that numbers, which go class by class, do not
  };

  // ---- lists ----
  // They hold tokens until name_rows(). Sets that know no order stand along it all the same.

  /// Cuts the rows behind these tiles into more tiles, and says which.
  static Range cut(const TokenList& rows, Ranges& tiles) {
    const auto first = narrow(tiles.size()), end = narrow(rows.size());
    for (auto row = tiles.empty() ? 0 : tiles.back().end; row < end; row = tiles.back().end)
      tiles.push_back({row, std::min(row + narrow(kTile), end)});
    return {first, narrow(tiles.size())};
  }
  Range cut(bool asking) { return asking ? cut(t_.q_token, t_.q_tile) : cut(t_.k_token, t_.k_tile); }

  std::int32_t token(Index p) const { return outside_ + narrow(along_order_ ? g_.token_along_order(p) : g_.token(p)); }
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
  /// The tokens of every step-th of these positions; of queries those that ask.
  void append(Index begin, Index end, Index step, bool asking, TokenList& out) const {
    if (asking && g_.spec.queries) {
      const auto last = std::ranges::lower_bound(asking_, end);
      for (auto p = std::ranges::lower_bound(asking_, begin); p < last; ++p)
        if ((*p - begin) % step == 0) out.push_back(token(*p));
      return;
    }
    if (step == 1 && counts_up()) return out.append(outside_ + narrow(begin), at(std::max<Index>(end - begin, 0)));
    for (Index p = begin; p < end; p += step) out.push_back(token(p));
  }
  /// Lists them in tiles of their own.
  Range list(Index begin, Index end, Index step, bool asking) {
    append(begin, end, step, asking, asking ? t_.q_token : t_.k_token);
    return cut(asking);
  }

  /// The tokens outside come before all else.
  void list_prefix() {
    for (std::int32_t row = 0; row < outside_; ++row) {
      if (!g_.spec.queries || std::ranges::binary_search(*g_.spec.queries, row)) t_.q_token.push_back(row);
      if (g_.met) t_.k_token.push_back(row);
    }
    prefix_ = {t_.q_token.size(), t_.k_token.size(), cut(true).end, cut(false).end};
  }

  /// These queries meet these keys: tiles of the lists.
  void meet(Range q, Range k) {
    candidates_.resize(t_.q_tile.size());
    for (Ranges& its : std::span(candidates_).subspan(at(q.begin), at(q.end - q.begin)))
      if (!its.empty() && its.back().end == k.begin) its.back().end = k.end;
      else its.push_back(k);
  }
  /// The same, where all of them meet but for causality. They are the last of the lists.
  void meet_as_group(Range q, Range k) {
    meet(q, k);
    const auto queries = narrow(t_.q_token.size()), keys = narrow(t_.k_token.size());
    if (q.begin < q.end)
      t_.group.push_back(
          {{t_.q_tile[at(q.begin)].begin, queries}, {k.begin < k.end ? t_.k_tile[at(k.begin)].begin : keys, keys}});
  }

  /// All tokens in one list. Of a set on axes, boxes() tells which of them meet.
  void whole() {
    if (g_.spec.cross) t_.q_token.append(0, at(*g_.spec.cross));
    const Range q = g_.spec.cross ? cut(true) : list(0, g_.length(), 1, true), k = list(0, g_.length(), 1, false);
    alternatives_.size() == 1 && b_.kind == Kind::dense ? meet_as_group(q, k) : meet(q, k);
  }

  void segments() {
    const Index r = b_.dilation, offset = offset_of(g_.spec, branch_, head_);
    const bool by_residue = g_.spec.dilation_mode == DilationMode::residue;
    for (Index begin = -b_.axes[0].shift; begin < g_.length(); begin += b_.size) {
      const Index end = std::min(begin + b_.size, g_.length());
      for (Index residue = 0; residue < (by_residue ? std::min(r, end - begin) : 1); ++residue) {
        Index p = begin + (by_residue ? residue : offset);
        if (p < 0) p += (r - 1 - p) / r * r;  // the first segment begins before the first position
        const bool some_ask = by_residue || only_active_ask(g_.spec.dilation_mode);
        const Range q = some_ask ? list(p, end, r, true) : list(std::max<Index>(begin, 0), end, 1, true);
        if (q.begin == q.end) continue;
        const Range k = list(p, end, r, false);
        if (k.begin < k.end) meet_as_group(q, k);
      }
    }
    if (g_.met && (r > 1 || g_.spec.queries)) list_others(true), list_others(false);
  }
  /// Tokens that the list lacks, for a prefix to meet.
  void list_others(bool asking) {
    TokenList &list = asking ? t_.q_token : t_.k_token, all;
    std::vector<bool> listed(at(g_.spec.length));
    for (const std::int32_t t : list) listed[at(t)] = true;
    append(0, g_.length(), 1, asking, all);
    for (const std::int32_t t : all)
      if (!listed[at(t)]) list.push_back(t);
    cut(asking);
  }

  void block_rows() {
    const Index n = (g_.length() + b_.size - 1) / b_.size;
    const BlockPairs& pairs = b_.pairs_of(head_, g_.spec.heads);
    const BlockLayout layout = lay_out_blocks(g_.spec.work_order, pairs, n);
    const auto tiles_of = [&](const Tokens& blocks, bool asking) {
      Ranges tiles(blocks.size());
      for (const Index i : blocks)
        tiles[at(i)] = list(i * b_.size, std::min((i + 1) * b_.size, g_.length()), 1, asking);
      return tiles;
    };
    const Ranges q = tiles_of(layout.queries, true), k = tiles_of(layout.keys, false);
    for (const auto& [i, j] : pairs) meet(q[at(i)], k[at(j)]);
  }

  // ---- boxes ----
  /// A token on an axis: its number and where it lies; as a query, those of its keys.
  struct Met {
    Index number, cell;
    Interval numbers, cells;
  };

  // Each branch of a union is a box, blocks one for each run of a row; so is a set on axes.
  void boxes() {
    std::vector<std::vector<std::vector<Interval>>> runs;  // by branch
    std::size_t boxes = 0;
    for (const Branch& b : alternatives_) {
      axes_ = std::max({axes_, b.dimensions(), std::size_t{1}});
      runs.push_back(b.kind == Kind::blocks ? runs_of(b) : std::vector<std::vector<Interval>>(1));
      boxes += runs.back().size();
    }
    if (boxes == 0) return void(axes_ = 0);  // a list of blocks may be empty
    // A query has as many keys as numbers on each axis, which one after the other may be the ranks.
    const bool curve = g_.spec.causality == Causality::curve, along = b_.dimensions() == 1 && !g_.by_token,
               ranked = (!g_.order || curve == along) && !g_.met;
    counts_ahead_ = alternatives_.size() == 1 &&
                    (!t_.causal || (ranked && std::ranges::all_of(b_.axes, [](auto& a) { return a.dilation == 1; })));
    boxes_.clear(), t_.boxes = narrow(boxes);
    for (Tiling::Axis& axis : std::span(t_.axis).first(axes_)) {
      axis.key.assign(t_.k_token.size() * boxes, kTaken);  // as the prefix has it
      axis.low.assign(t_.q_token.size() * boxes, 1), axis.high.assign(axis.low.size(), 0);
    }
    for (std::size_t i = 0; i < alternatives_.size(); ++i)
      for (const std::vector<Interval>& run : runs[i]) add_branch(i, run);
    if (g_.met) fill_bounds_of_prefix();
  }
  /// The next box, of a branch; `run`: of blocks, those of each.
  void add_branch(std::size_t i, const std::vector<Interval>& run) {
    const Branch& b = alternatives_[i];
    if (b.kind == Kind::blocks)
      return add_box(1, [&](std::int32_t token, std::size_t, bool) {
        const Index block = g_.position(token) / b.size;
        return Met{block, block, run[at(block)], run[at(block)]};
      });
    if (b.kind == Kind::segment && !b.axes[0].borrows)
      return add_box(
          1, [&, offset = offset_of(g_.spec, branch_ + i, head_)](std::int32_t token, std::size_t, bool asks) {
            const DilationMode mode = g_.spec.dilation_mode;
            const Index p = g_.position(token) + b.axes[0].shift, s = p / b.size, j = p % b.size % b.dilation;
            const Index residue = s * std::min(b.dilation, b.size) + j;
            if (mode == DilationMode::residue) return Met{residue, s, {residue, residue}, {s, s}};
            const bool active = j == offset || (asks && !only_active_ask(mode));
            return Met{active ? s : -1, s, active ? Interval{s, s} : Interval{1, 0}, {s, s}};
          });
    if (alternatives_.size() == 1 && outside_ == 0 && b.dimensions() == 1 &&
        b.axes[0].dilation * b.axes[0].stride == 1 && !b.axes[0].borrows) {
      is_line_ = true, boxes_.emplace_back();
      std::iota(t_.axis[0].key.begin(), t_.axis[0].key.end(), 0);
      return t_.q_token.empty() ? void() : add_line(AxisRule(b, 0, g_.length()), 0, std::ssize(t_.q_token));
    }
    std::array<std::vector<Met>, 3> by_cell;  // many tokens share one, and each asks and is asked
    for (std::size_t axis = 0; axis < b.dimensions(); ++axis) {
      const AxisRule rule(b, axis, g_.cells(b, axis));
      for (Index cell = 0; cell < g_.cells(b, axis); ++cell) {
        const Interval keys = rule.keys_of(cell);
        by_cell[axis].push_back({rule.number(cell), cell, keys, {rule.cell(keys.low), rule.cell(keys.high)}});
      }
    }
    add_box(b.dimensions(), [&](std::int32_t token, std::size_t axis, bool) -> const Met& {
      return by_cell[axis][at(g_.cell(b, axis, token))];
    });
  }

  /// The next box: the keys of queries on the first `axes`; on the others all.
  template <class On> void add_box(std::size_t axes, const On& rule) {
    const std::size_t box = boxes_.size();
    boxes_.emplace_back();
    const auto on = [&](auto token, auto axis, bool asks) { return axis < axes ? rule(token, axis, asks) : Met{}; };
    const auto of_each = [&](const Ranges& tiles, std::int32_t first, auto&& f) {
      for (auto tile = at(first); tile < tiles.size(); ++tile)
        for (Index row = tiles[tile].begin; row < tiles[tile].end; ++row) f(tile, at(row), at(row * t_.boxes) + box);
    };
    std::vector<Extents> keys(axes_, Extents(t_.k_tile.size())), reach(axes_, Extents(t_.q_tile.size()));
    of_each(t_.k_tile, prefix_.k_tiles, [&](std::size_t tile, std::size_t row, std::size_t entry) {
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Met m = on(t_.k_token[row] - outside_, axis, false);
        t_.axis[axis].key[entry] = narrow(m.number);
        keys[axis][tile].cover(m.cell);
      }
    });
    of_each(t_.q_tile, prefix_.q_tiles, [&](std::size_t tile, std::size_t row, std::size_t entry) {
      Index numbers = !t_.causal, same = t_.causal;  // in front of it, and it itself, by the axes so far
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Met m = on(t_.q_token[row] - outside_, axis, true);
        t_.axis[axis].low[entry] = narrow(m.numbers.low), t_.axis[axis].high[entry] = narrow(m.numbers.high);
        numbers = numbers * std::max<Index>(m.numbers.high - m.numbers.low + 1, 0) +
                  same * std::max<Index>(std::min(m.numbers.high, m.number - 1) - m.numbers.low + 1, 0);
        same *= m.numbers.has(m.number);
        if (m.numbers.low <= m.numbers.high) reach[axis][tile].cover(m.cells);
      }
      if (counts_ahead_) t_.pairs += numbers + same;
    });
    for (std::size_t axis = 0; axis < axes_; ++axis) {
      std::fill_n(keys[axis].begin(), prefix_.k_tiles, Extremes{kTaken, kTaken});
      std::fill_n(reach[axis].begin(), prefix_.q_tiles, Extremes{0, narrow(g_.length())});
      boxes_[box].cells.push_back({reach[axis], reach[axis], levels(std::move(keys[axis]))});
    }
  }

  /// The only box, of positions that ascend, where both ends of the keys move by at most one from
  /// each to the next: the first and the last in turn tell of those between, or of each half.
  void add_line(const AxisRule& rule, Index begin, Index end) {
    const auto place = [&](Index row) { return g_.spec.queries ? Index{asking_[at(row)]} : row; };
    const Interval first = rule.keys_of(place(begin)), last = rule.keys_of(place(end - 1));
    const Index n = end - begin, low = last.low - first.low, high = last.high - first.high;
    if (place(end - 1) - place(begin) != n - 1 || (n > 2 && (low % (n - 1) != 0 || high % (n - 1) != 0)))
      return add_line(rule, begin, begin + n / 2), add_line(rule, begin + n / 2, end);
    for (Index i = 0; i < n; ++i) t_.axis[0].low[at(begin + i)] = narrow(first.low + std::min(i, low));
    for (Index i = 0; i < n; ++i) t_.axis[0].high[at(begin + i)] = narrow(first.high + std::min(i, high));
    const auto keys = [&](Interval x, Index p) { return (t_.causal ? std::min(x.high, p) : x.high) - x.low + 1; };
    if (counts_ahead_) t_.pairs += n * (keys(first, place(begin)) + keys(last, place(end - 1))) / 2;
  }

  /// The pairs of causal groups, whose lists may be long.
  void count_groups() {
    const TokenList &asking = t_.q_ranks(), &asked = t_.k_ranks();
    for (const auto& [q, k] : t_.group) {
      const Extremes ends = extents({k}, asked)[0];
      const Index n = k.end - k.begin, before = Index{asking[at(q.begin)]} - ends.low;
      const bool each = Index{ends.high} - ends.low + 1 == n, count_up = each && asking.counts_up();  // no number lacks
      const auto sum = [n](Index x) { return x > n ? n * (n + 1) / 2 + (x - n) * n : x > 0 ? x * (x + 1) / 2 : 0; };
      if (count_up) t_.pairs += sum(before + q.end - q.begin) - sum(before);  // 1, 2 .. n, n .. keys
      Tokens keys;
      for (Index j = k.begin; !each && j < k.end; ++j) keys.push_back(asked[at(j)]);
      if (!std::ranges::is_sorted(keys)) std::ranges::sort(keys);
      for (Index i = q.begin; !count_up && i < q.end; ++i)
        t_.pairs += each ? std::clamp<Index>(asking[at(i)] - ends.low + 1, 0, n)
                         : std::ranges::upper_bound(keys, asking[at(i)]) - keys.begin();
    }
  }

  /// The prefix attends to all, and has kTaken as a key.
  void fill_bounds_of_prefix() {
    const std::size_t boxes = at(t_.boxes);
    for (std::size_t axis = 0; axis < axes_; ++axis) {
      Tiling::Axis& a = t_.axis[axis];
      const auto [low, high] = std::ranges::minmax(std::span(a.key).subspan(prefix_.k * boxes));
      std::fill_n(a.low.begin(), prefix_.q * boxes, low), std::fill_n(a.high.begin(), prefix_.q * boxes, high);
    }
    if (counts_ahead_) t_.pairs += Index(prefix_.q * t_.k_token.size() + (t_.q_token.size() - prefix_.q) * prefix_.k);
  }

  /// The runs of blocks in the rows of a list: the first of each row, the second ..
  std::vector<std::vector<Interval>> runs_of(const Branch& b) const {
    constexpr std::size_t kMostRuns = 64;
    std::vector<std::vector<Interval>> runs;
    std::vector<std::size_t> count(at((g_.length() + b.size - 1) / b.size));
    for (const auto& [i, j] : b.pairs_of(head_, g_.spec.heads)) {
      std::size_t& n = count[at(i)];
      const bool follows = n > 0 && runs[n - 1][at(i)].high + 1 == j;
      if (!follows && n++ == runs.size()) runs.emplace_back(count.size(), Interval{1, 0});
      runs[n - 1][at(i)] = {follows ? runs[n - 1][at(i)].low : j, j};
    }
    check(runs.size() <= kMostRuns, "plan: ", to_string({b}), ": a row of its list has ", runs.size(),
          " runs of blocks; in a union at most ", kMostRuns);
    return runs;
  }

  // ---- classification ----
  /// Where a token stands along the order.
  std::int32_t along_order(std::int32_t token) const {
    return token < outside_ ? token : outside_ + narrow(g_.along_order(token - outside_));
  }
  void fill_ranks() {
    t_.causal = g_.spec.causality != Causality::none;
    if (g_.spec.causality != Causality::curve) return;  // tokens are ranked by their names
    const auto rank = [&](std::int32_t token) { return along_order(token); };
    t_.q_rank = mapped(t_.q_token, rank), t_.k_rank = mapped(t_.k_token, rank);
  }
  template <class F> static TokenList mapped(const TokenList& list, F&& f) {
    Tokens out = list.values();
    for (std::int32_t& x : out) x = f(x);
    return TokenList(std::move(out));
  }

  void find_tiles() {
    if (t_.causal) rank_ = {{}, extents(t_.q_tile, t_.q_ranks()), levels(extents(t_.k_tile, t_.k_ranks()))};
    for (Index box = 0; box < t_.boxes; ++box)
      for (const Tiling::Axis& axis : std::span(t_.axis).first(axes_))
        boxes_[at(box)].numbers.push_back({extents(t_.q_tile, axis.low, t_.boxes, box),
                                           extents(t_.q_tile, axis.high, t_.boxes, box),
                                           levels(extents(t_.k_tile, axis.key, t_.boxes, box))});
    if (g_.met) meet({0, prefix_.q_tiles}, {prefix_.k_tiles, narrow(t_.k_tile.size())});
    candidates_.resize(t_.q_tile.size());
    for (std::size_t i = 0; i < candidates_.size(); ++i) {
      Ranges& its = candidates_[i];
      std::ranges::sort(its, {}, &Range::begin);
      add_row(narrow(i), 0, prefix_.k_tiles);
      for (const Range& tiles : its) add_row(narrow(i), tiles.begin, tiles.end);
      t_.met.end_list();
    }
  }
  void add_row(Index i, Index k_begin, Index k_end) {
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
    if (t_.causal) rank_.classify(i, level, node, always, never);
    for (const Box& box : boxes_) {
      bool all_pass = true, all_fail = false, unused = false;
      for (const Test& test : box.cells) test.classify(i, level, node, unused, all_fail);
      for (const Test& test : box.numbers) test.classify(i, level, node, all_pass, all_fail);
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

  /// The pairs of these queries with a tile of keys; where all are counted already, whether there
  /// are some, which extremes of ranks have told.
  Index counted(Range q, Index tile) {
    const Range k = t_.k_tile[at(tile)];
    if (!counts_ahead_) return bits_.count(q, k);
    return axes_ == 0 || attends(t_, at(q.begin), at(k.begin)) || attends(t_, at(q.end - 1), at(k.end - 1)) ||
           bits_.count(q, k, 1) > 0;
  }

  /// With a prefix that all meet, one group of all is a group again, and no other.
  void group_with_prefix() {
    const auto rows = [](Range r) { return at(r.end - r.begin); };
    const bool of_all = t_.group.size() == 1 && prefix_.q + rows(t_.group[0].q) == t_.q_token.size() &&
                        prefix_.k + rows(t_.group[0].k) == t_.k_token.size();
    t_.group.assign(of_all, {{0, narrow(t_.q_token.size())}, {0, narrow(t_.k_token.size())}});
  }

  // The lists hold tokens so far. Masks compare what is beside them: only where rows lie changes.
  void name_rows() {
    const auto& queries = g_.spec.queries;
    const bool moves = g_.spec.in_order && g_.order;
    const auto row_of = [&](std::int32_t token) { return moves ? along_order(token) : token; };
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

  const Ground& g_;
  std::size_t branch_;
  std::span<const Branch> alternatives_;
  const Branch& b_;
  Index head_;
  bool along_order_;
  std::int32_t outside_ = narrow(g_.spec.outside());
  Tokens asking_;  // positions, ascending, where not all ask
  Tiling t_;
  struct {
    std::size_t q, k;  // rows
    std::int32_t q_tiles, k_tiles;
  } prefix_{};                      // those in front
  std::vector<Ranges> candidates_;  // of each tile of queries: tiles of keys that it may meet, besides the prefix
  std::size_t axes_ = 0;            // of every box
  bool is_line_ = false;            // what the mask compares ascends from row to row
  bool counts_ahead_ = false;       // t_.pairs is known before tiles are found
  Test rank_;
  std::vector<Box> boxes_{1};
  PairBits bits_{t_};
};

}  // namespace

Tiling tiling_of(const Ground& ground, std::size_t branch, Index head) { return Builder(ground, branch, head).take(); }

}  // namespace hilt
