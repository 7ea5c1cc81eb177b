// Lists of keys for tiles of queries: their order, and which heights and lists cost least.
#include "ops/hilbert/kernels/compact.h"
#include <bit>
#include <set>
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

using List = std::vector<std::int32_t>;
using Bytes = std::vector<std::uint8_t>;
using Range = Tiling::Range;

Index count(Range r) { return r.end - r.begin; }

// About what the kernels of a CPU take: two for the product of a query and a key.
constexpr Index kPairCost = 4;  // a pair that is taken by itself
constexpr Index kRowCost = 12;  // a query with up to kTile keys
constexpr Index kStep = 16;     // queries of the lowest tile; its keys come in pieces of whole kSteps
Index tiles_of(Index keys) { return (keys + Tiling::kTile - 1) / Tiling::kTile; }

/// A query's code: 21 bits of where its keys begin on each axis, interleaved. Queries of close
/// codes ask for almost the same keys, and those of equal codes often for the same.
using Codes = std::vector<std::uint64_t>;
Codes codes_of(const Tiling& t) {
  Codes codes(t.q_token.size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const QueryBounds q = bounds_of(t, i);
    for (const std::int32_t low : {q.a_low, q.b_low, q.c_low}) {
      std::uint64_t x = at(low) & 0x1fffff;  // its bits are brought apart
      x = (x | x << 32) & 0x001f00000000ffff, x = (x | x << 16) & 0x001f0000ff0000ff;
      x = (x | x << 8) & 0x100f00f00f00f00f, x = (x | x << 4) & 0x10c30c30c30c30c3,
      x = (x | x << 2) & 0x1249249249249249;
      codes[i] = codes[i] << 1 | x;
    }
  }
  return codes;
}
/// The end of a tile from `begin` on: where the codes differ in the highest bit, a window or patch.
std::int32_t end_of_tile(const Codes& codes, Range q, Index most) {
  const auto limit = narrow(std::min<Index>(q.end, q.begin + most));
  std::int32_t end = limit;
  if (codes.empty() || limit == q.end) return end;
  for (std::int32_t i = limit; i > q.begin; --i)
    if (std::bit_width(codes[at(i)] ^ codes[at(i - 1)]) > std::bit_width(codes[at(end)] ^ codes[at(end - 1)])) end = i;
  return end;
}

/// The tiling with its queries in ascending order of their codes, which are sorted too.
Tiling sorted(const Tiling& t, Codes& codes) {
  List from(t.q_token.size());
  std::iota(from.begin(), from.end(), 0);
  std::ranges::stable_sort(from, {}, [&](std::int32_t i) { return codes[at(i)]; });
  Codes ascending;
  for (const std::int32_t i : from) ascending.push_back(codes[at(i)]);
  codes.swap(ascending);
  Selection queries{TokenList(from), {}};
  Tiling::Lists met;
  for (Range q{0, 0}; q.begin < narrow(from.size()); q.begin = q.end) {
    q.end = end_of_tile(codes, {q.begin, narrow(from.size())}, Tiling::kTile);
    queries.tiles.push_back(q);
    std::set<std::ptrdiff_t> tiles;
    for (auto i = q.begin; i < q.end; ++i)
      tiles.insert(std::ranges::upper_bound(t.q_tile, from[at(i)], {}, &Range::begin) - t.q_tile.begin() - 1);
    std::map<std::int32_t, std::size_t> full;  // of a tile of keys: for how many
    for (const std::ptrdiff_t i : tiles)
      for (const Tiling::Ref ref : t.met.of(at(i))) full[ref.tile] += !ref.partial;
    for (const auto& [tile, n] : full) met.add(tile, tile + 1, n < tiles.size());
    met.end_list();
  }
  return with_lists(t, &queries, nullptr, std::move(met));
}

/// Bits of up to 64 keys from `first` on: which some query of a piece asks for, and which all do.
struct Asked {
  std::int32_t first;
  std::uint64_t any, all;
};
/// Queries that go together, and the keys that they list: of k_token, ascending, some query asks
/// for each. Besides they have `full` keys in whole tiles.
struct Piece {
  Range q;
  Range tiles;  // of queries; what is listed of several attends() cannot tell apart
  std::vector<Asked> asked = {};
  Index keys = 0, pairs = 0, full = 0;
  bool whole = false;  // all tiles of keys are met whole; no keys are listed
  void ask(Asked x) { asked.push_back(x), keys += bits_in(x.any); }
};

class Compactor {
 public:
  Compactor(const Tiling& t, const Codes& codes, bool by_pairs)
      : t_(t), codes_(codes), by_pairs_(by_pairs), bits_(t), whole_(t.k_tile.size(), -1) {
    for (std::size_t i = 0; i < t.q_tile.size(); ++i) std::ranges::move(cheapest(i), std::back_inserter(pieces_));
    pieces_ = joined(std::move(pieces_));
    for (const Piece& p : pieces_) cost_of_all += cost_of_piece(p);
  }
  Index cost_of_all = 0;
  std::unique_ptr<const Compact> take() {
    select(kQueries, *out_, t_);
    out_->q_tile.clear();
    out_->grids = t_.grids, out_->pairs = t_.pairs;
    for (const Piece& p : pieces_) add(p);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
    const TokenList listed(origin_);
    select(kKeys, *out_, t_, &listed);
    for (TokenList* list : {&out_->q_token, &out_->k_token, &out_->q_name, &out_->k_name, &out_->q_rank, &out_->k_rank})
      list->store();
    make_runs();
    take_turns();
    return std::move(out_);
  }

 private:
  // Lists that are taped's are joined to groups later, whose costs are others.
  Index cost_of_key() const { return by_pairs_ ? 24 : 12; }  // which is gathered, and added to
  Index cost_of_tiles(Index queries, Index keys) const {
    const Index of_tile = by_pairs_ ? 400 : 0;
    return keys * (2 * queries + cost_of_key()) + tiles_of(keys) * (queries * kRowCost + of_tile);
  }
  Index cost_of_piece(const Piece& p, bool pairs) const {
    const Index queries = count(p.q), keys = p.keys, full = cost_of_tiles(queries, p.full);
    if (!pairs) return full + cost_of_tiles(queries, keys);
    return full + p.pairs * kPairCost + keys * cost_of_key() + tiles_of(keys) * queries * kRowCost;
  }
  bool in_pairs(const Piece& p) const {
    return by_pairs_ && !p.whole && (count(p.tiles) > 1 || cost_of_piece(p, true) < cost_of_piece(p, false));
  }
  Index cost_of_piece(const Piece& p) const { return cost_of_piece(p, in_pairs(p)); }

  /// A tile of queries, and its tiles of keys: whole, or lists of some, or of all.
  std::vector<Piece> cheapest(std::size_t i) {
    const Range q = t_.q_tile[i];
    Index whole = t_.keys_of(i), full = 0;  // keys
    for (const Tiling::Ref r : t_.met.of(i)) full += r.partial ? 0 : count(t_.k_tile[at(r.tile)]);
    std::vector<Piece> best{{.q = q, .tiles = {narrow(i), narrow(i) + 1}, .full = whole, .whole = true}};
    // Several tiles of queries read the same whole tiles of keys, which makes those cheaper; not so
    // those of a small segment.
    const bool shared = !by_pairs_ || whole > Tiling::kTile;
    Index least =
        codes_.empty() ? cost_of_tiles(count(q), whole) * (shared ? 4 : 5) / 5 : std::numeric_limits<Index>::max();
    const auto consider = [&](Index kept) {
      std::vector<Piece> pieces = joined(lowest(i, kept));
      Index cost = 0;
      for (const Piece& p : pieces) cost += cost_of_piece(p);
      if (cost < least) least = cost, best = std::move(pieces);
    };
    if (full < whole) consider(full);
    if (by_pairs_ && full > 0 && whole <= Tiling::kTile) consider(0);
    return best;
  }

  /// f(the first of up to 64 keys, a word for each query of a tile: which of them it asks for);
  /// `listed`: of tiles of keys that are partial, alone.
  template <class F> void each_asked(std::size_t tile, bool listed, const F& f) {
    for (const Tiling::Ref r : t_.met.of(tile)) {
      if (listed && !r.partial) continue;
      const Range k = t_.k_tile[at(r.tile)];
      for (std::int32_t first = k.begin; first < k.end; first += 64) {
        const std::int32_t n = std::min(k.end - first, 64);
        PairBits::Words words;
        if (!r.partial) words.fill(~std::uint64_t{0} >> (64 - n));
        if (r.partial) bits_.find(t_.q_tile[tile], first, n, words);
        f(first, words);
      }
    }
  }
  /// Pieces of at most kStep queries.
  std::vector<Piece> lowest(std::size_t tile, Index full) {
    std::vector<Piece> pieces;
    const Range all = t_.q_tile[tile];
    for (Range q = all; q.begin < all.end; q.begin = q.end) {
      q.end = end_of_tile(codes_, {q.begin, all.end}, kStep);
      pieces.push_back({.q = q, .tiles = {narrow(tile), narrow(tile) + 1}, .full = full});
    }
    each_asked(tile, full > 0, [&](std::int32_t first, const PairBits::Words& words) {
      for (Piece& p : pieces) {
        Asked its{first, 0, ~std::uint64_t{0}};
        for (const std::uint64_t word : std::span(words).subspan(at(p.q.begin - all.begin), at(count(p.q))))
          its.any |= word, its.all &= word, p.pairs += word ? bits_in(word) : 0;
        if (its.any != 0) p.ask(its);
      }
    });
    return pieces;
  }
  /// Neighbors are joined where that costs less, again and again.
  std::vector<Piece> joined(std::vector<Piece> pieces) const {
    for (bool any = true; std::exchange(any, false);) {
      std::vector<Piece> next;
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        if (i + 1 < pieces.size() && may_join(pieces[i], pieces[i + 1]))
          if (Piece both = join(pieces[i], pieces[i + 1]);
              cost_of_piece(both) <= cost_of_piece(pieces[i]) + cost_of_piece(pieces[i + 1])) {
            next.push_back(std::move(both)), any = true, ++i;
            continue;
          }
        next.push_back(std::move(pieces[i]));
      }
      pieces = std::move(next);
    }
    return pieces;
  }
  bool may_join(const Piece& a, const Piece& b) const {
    return !a.whole && !b.whole && b.q.end - a.q.begin <= Tiling::kTile &&
           ((by_pairs_ && a.full == 0 && b.full == 0) || a.tiles.begin + 1 == b.tiles.end);
  }
  static Piece join(const Piece& a, const Piece& b) {
    Piece both{
        .q = {a.q.begin, b.q.end}, .tiles = {a.tiles.begin, b.tiles.end}, .pairs = a.pairs + b.pairs, .full = a.full};
    auto x = a.asked.begin(), y = b.asked.begin();
    while (x != a.asked.end() || y != b.asked.end())
      if (y == b.asked.end() || (x != a.asked.end() && x->first < y->first)) both.ask({x->first, x->any, 0}), ++x;
      else if (x == a.asked.end() || y->first < x->first) both.ask({y->first, y->any, 0}), ++y;
      else both.ask({x->first, x->any | y->any, x->all & y->all}), ++x, ++y;
    return both;
  }

  // ---- what was chosen
  /// A tile of t, once.
  std::int32_t whole_tile(std::int32_t tile) {
    std::int32_t& there = whole_[at(tile)];
    if (there < 0) {
      there = narrow(out_->k_tile.size());
      for (std::int32_t key = t_.k_tile[at(tile)].begin; key < t_.k_tile[at(tile)].end; ++key) origin_.push_back(key);
      end_tile();
    }
    return there;
  }
  void end_tile() {
    out_->k_tile.push_back({out_->k_tile.empty() ? 0 : out_->k_tile.back().end, narrow(origin_.size())});
  }
  void add(const Piece& p) {
    out_->q_tile.push_back(p.q);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
    if (p.full > 0)
      for (const Tiling::Ref r : t_.met.of(at(p.tiles.begin)))
        if (p.whole || !r.partial) out_->keys.push_back({whole_tile(r.tile), r.partial});
    if (p.keys == 0) return;
    const Index steps = tiles_of(p.keys) * kStep, each = (p.keys + steps - 1) / steps * kStep;
    const auto begin = std::ssize(origin_), first_tile = std::ssize(out_->k_tile);
    const bool by_pairs = in_pairs(p);
    bool full = !by_pairs;
    for (const Asked& its : p.asked)
      for (std::uint64_t any = its.any; any != 0; any &= any - 1) {
        const int j = std::countr_zero(any);
        origin_.push_back(its.first + j), full = full && (its.all >> j & 1) != 0;
        if (const Index n = std::ssize(origin_) - begin; n % each != 0 && n < p.keys) continue;
        end_tile();
        out_->keys.push_back({narrow(out_->k_tile.size() - 1), !std::exchange(full, !by_pairs)});
      }
    if (!by_pairs) return;
    out_->pair_begin.resize(at(first_tile), -1);
    for (const Bytes& bytes : pairs_of(p, origin_.data() + begin, each)) {
      const auto [known, is_new] = lists_.try_emplace(bytes, narrow(out_->pair_list.size()));
      if (is_new) out_->pair_list.insert(out_->pair_list.end(), bytes.begin(), bytes.end());
      out_->pair_begin.push_back(known->second);
    }
  }
  /// The pairs of a piece with `each` of its keys, and with the next, as Compact::pair_list has
  /// them.
  std::vector<Bytes> pairs_of(const Piece& p, const std::int32_t* listed, Index each) {
    const Index queries = count(p.q), keys = p.keys, tiles = (keys + each - 1) / each;
    const Index row = 1 + each, column = 1 + 2 * queries;  // a length, and room for as many
    Bytes of_query(at(tiles * queries * row)), of_key(at(keys * column));
    for (std::int32_t tile = p.tiles.begin; tile < p.tiles.end; ++tile)
      each_asked(at(tile), p.full > 0, [&](std::int32_t first, const PairBits::Words& words) {
        std::array<Index, 64> number;
        for (Index n = std::lower_bound(listed, listed + keys, first) - listed; n < keys && listed[n] < first + 64; ++n)
          number[at(listed[n] - first)] = n;
        const Range all = t_.q_tile[at(tile)];
        for (std::int32_t i = std::max(all.begin, p.q.begin); i < std::min(all.end, p.q.end); ++i)
          for (std::uint64_t rest = words[at(i - all.begin)]; rest != 0; rest &= rest - 1) {
            const Index key = number[at(std::countr_zero(rest))], query = i - p.q.begin;
            std::uint8_t *const its = &of_query[at((key / each * queries + query) * row)],
                                *to = &of_key[at(key * column)];
            to[2 * *to + 1] = static_cast<std::uint8_t>(query), to[2 * *to + 2] = its[0], ++*to;
            its[++its[0]] = static_cast<std::uint8_t>(key % each);
          }
      });
    std::vector<Bytes> out(at(tiles));
    const auto append = [](Bytes& to, const std::uint8_t* list, int of_each) {
      to.insert(to.end(), list, list + 1 + of_each * *list);
    };
    for (Index i = 0; i < tiles * queries; ++i) append(out[at(i / queries)], &of_query[at(i * row)], 1);
    for (Index i = 0; i < keys; ++i) append(out[at(i / each)], &of_key[at(i * column)], 2);
    return out;
  }

  /// Neighbors whose lists begin alike go together, unless so few that threads would idle.
  void make_runs() {
    constexpr std::size_t kEnough = 16;
    const List& begin = out_->keys_begin;
    const auto alike = [&](std::size_t i, std::size_t j) {  // one list is how the other begins
      const Index n = std::min(begin[i + 1] - begin[i], begin[j + 1] - begin[j]);
      const Tiling::Ref *const a = out_->keys.data() + begin[i], *const b = out_->keys.data() + begin[j];
      return n > 0 && std::ranges::equal(a, a + n, b, b + n, {}, &Tiling::Ref::tile, &Tiling::Ref::tile);
    };
    for (std::int32_t i = 0; i < narrow(out_->q_tile.size()); ++i) {
      const bool joins = i > 0 && out_->q_tile.size() >= kEnough && count(out_->runs.back()) < Compact::kRun;
      if (joins && alike(at(i - 1), at(i))) out_->runs.back().end = i + 1;
      else out_->runs.push_back({i, i + 1});
    }
  }

  /// Runs are begun from the last to the first: causal ones have the most keys there.
  void take_turns() {
    if (!out_->pair_begin.empty()) out_->pair_begin.resize(out_->k_tile.size(), -1);
    out_->share_begin.resize(out_->keys.size());
    out_->k_first.resize(out_->k_token.size());
    out_->turns.resize(at(tiles_of(std::ssize(t_.k_token))));
    std::vector<bool> listed(t_.k_token.size());
    for (std::size_t run = out_->runs.size(); run-- > 0;) {
      const std::size_t before = out_->share.size();
      for (std::int32_t visit = 0, entry; (entry = out_->entry_of(out_->runs[run], visit)) >= 0; ++visit)
        add_shares(entry, listed);
      for (std::size_t i = out_->share.size(); i-- > before;) {
        Compact::Share& share = out_->share[i];
        share.last = share.turn == out_->turns[at(share.rows)];
        if (share.last) ++out_->turns[at(share.rows)];
      }
    }
    out_->every_key = std::ranges::find(listed, false) == listed.end();
  }
  /// The shares of an entry's keys, and which keys come first; `listed`: those that did before.
  void add_shares(std::int32_t entry, std::vector<bool>& listed) {
    const Range k = out_->k_tile[at(out_->keys[at(entry)].tile)];
    out_->share_begin[at(entry)] = narrow(out_->share.size());
    for (std::int32_t j = k.begin; j < k.end; ++j) {
      const std::int32_t key = origin_[at(j)], rows = key / narrow(Tiling::kTile);
      if (j == k.begin || out_->share.back().rows != rows)
        out_->share.push_back({rows, j, out_->turns[at(rows)], false, false});
      out_->share.back().end = j + 1;
      if (!listed[at(key)]) listed[at(key)] = true, out_->k_first[at(j)] = 1, out_->share.back().first = true;
    }
  }

  const Tiling& t_;
  const Codes& codes_;
  bool by_pairs_;
  std::unique_ptr<Compact> out_ = std::make_unique<Compact>();
  std::vector<Piece> pieces_;
  PairBits bits_;
  List origin_;                          // of a key of out_: which of t_
  List whole_;                           // of a tile of t_: which of out_, or -1
  std::map<Bytes, std::int32_t> lists_;  // of pairs, each once
};

std::unique_ptr<const Compact> made(const Tiling& t, bool by_pairs) {
  const Codes none;
  Compactor plain(t, none, by_pairs);
  Codes codes = t.axis[0].key.empty() || t.boxes > 1 ? none : codes_of(t);
  if (!std::ranges::is_sorted(codes)) {
    const Tiling by_codes = sorted(t, codes);
    Compactor other(by_codes, codes, by_pairs);
    if (other.cost_of_all * 10 < plain.cost_of_all * 9) return other.take();
  }
  return plain.take();
}

// ---- several tilings as one: keys behind each other, queries cut wherever one of them cuts

std::unique_ptr<const Tiling> join(std::span<const Tiling> tilings, std::span<const std::int32_t> which) {
  const Tiling& one = tilings[at(which[0])];
  auto out = std::make_unique<Tiling>();
  select(kQueries, *out, one);
  out->grids = one.grids, out->q_tile.clear();
  std::set<std::int32_t> ends;
  List tiles_before;
  for (const std::int32_t i : which) {
    const Tiling& t = tilings[at(i)];
    if (t.q_token != one.q_token || t.q_names() != one.q_names() || t.causal != one.causal ||
        t.q_ranks() != one.q_ranks() || !t.axis[0].key.empty())
      return nullptr;
    for (const Range& r : t.q_tile) ends.insert(r.end);
    tiles_before.push_back(narrow(out->k_tile.size()));
    select(kKeys, *out, t);
    out->pairs += t.pairs;
  }
  std::vector<std::size_t> within(which.size());  // the tile of each that holds ours
  for (const std::int32_t end : ends) {
    out->q_tile.push_back({out->q_tile.empty() ? 0 : out->q_tile.back().end, end});
    for (std::size_t i = 0; i < which.size(); ++i) {
      const Tiling& t = tilings[at(which[i])];
      while (t.q_tile[within[i]].end < end) ++within[i];
      for (const Tiling::Ref ref : t.met.of(within[i]))
        out->met.add(ref.tile + tiles_before[i], ref.tile + tiles_before[i] + 1, ref.partial);
    }
    out->met.end_list();
  }
  return out;
}

}  // namespace

const Compact& compact(const Tiling& t, bool by_pairs) {
  return *t.memo.get<std::unique_ptr<const Compact>>({by_pairs}, [&] { return made(t, by_pairs); });
}

const Tiling* joined_tiling(const Memo& memo, std::span<const Tiling> tilings, std::span<const std::int32_t> which) {
  const auto make = [&] { return join(tilings, which); };
  return memo.get<std::unique_ptr<const Tiling>>({which.begin(), which.end()}, make).get();
}

}  // namespace hilt
