// Lists of keys for tiles of queries: their order, and which heights and lists cost least.
#include "ops/hilbert/kernels/compact.h"
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
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
    for (int bit = 0; bit < 21; ++bit)
      for (int axis = 0; axis < 3; ++axis)
        codes[i] |= std::uint64_t(std::array{q.c_low, q.b_low, q.a_low}[at(axis)] >> bit & 1) << (3 * bit + axis);
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
  List from(t.q_token.size()), tile_of(from);
  std::iota(from.begin(), from.end(), 0);
  std::ranges::stable_sort(from, {}, [&](std::int32_t i) { return codes[at(i)]; });
  std::ranges::sort(codes);
  Selection queries{TokenList(from), {}};
  Tiling::Lists met;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    std::fill(tile_of.begin() + t.q_tile[i].begin, tile_of.begin() + t.q_tile[i].end, narrow(i));
  for (Range q{0, 0}; q.begin < narrow(from.size()); q.begin = q.end) {
    q.end = end_of_tile(codes, {q.begin, narrow(from.size())}, Tiling::kTile);
    queries.tiles.push_back(q);
    std::set<std::int32_t> tiles;
    for (auto i = q.begin; i < q.end; ++i) tiles.insert(tile_of[at(from[at(i)])]);
    std::map<std::int32_t, std::size_t> full;  // of a tile of keys: for how many
    for (const std::int32_t i : tiles)
      for (const Tiling::Ref ref : t.met.of(at(i))) full[ref.tile] += !ref.partial;
    for (const auto& [tile, n] : full) met.add(tile, tile + 1, n < tiles.size());
    met.end_list();
  }
  return with_lists(t, &queries, nullptr, std::move(met));
}

/// Queries that ask for a key: bit i is query first + i.
struct Asked {
  std::int32_t key, first;
  unsigned queries;
};
/// Queries that go together, and the keys that they list: of k_token, ascending, some query asks
/// for each. Besides they have `full` keys in whole tiles.
struct Piece {
  Range q;
  List keys = {};
  Index pairs = 0, full = 0;
  std::int32_t tile = -1;         // of queries, or -1: of several, which attends() cannot tell apart
  bool whole = false;             // all tiles of keys are met whole; no keys are listed
  std::vector<Asked> asked = {};  // where pairs may be taken one by one: for each key, queries ascending
};

class Compactor {
 public:
  Compactor(const Tiling& t, const Codes& codes, bool by_pairs)
      : t_(t), codes_(codes), by_pairs_(by_pairs), whole_(t.k_tile.size(), -1) {
    for (std::size_t i = 0; i < t.q_tile.size(); ++i) std::ranges::move(cheapest(i), std::back_inserter(pieces_));
    pieces_ = joined(std::move(pieces_));
    for (const Piece& p : pieces_) cost_ += cost_of_piece(p);
  }
  Index cost() const { return cost_; }
  std::unique_ptr<const Compact> take() {
    select(kQueries, *out_, t_);
    out_->q_tile.clear();
    out_->grids = t_.grids, out_->pairs = t_.pairs;
    for (const Piece& p : pieces_) add(p);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
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
    const Index queries = count(p.q), keys = std::ssize(p.keys), full = cost_of_tiles(queries, p.full);
    if (!pairs) return full + cost_of_tiles(queries, keys);
    return full + p.pairs * kPairCost + keys * cost_of_key() + tiles_of(keys) * queries * kRowCost;
  }
  bool in_pairs(const Piece& p) const {
    return by_pairs_ && !p.whole && (p.tile < 0 || cost_of_piece(p, true) < cost_of_piece(p, false));
  }
  Index cost_of_piece(const Piece& p) const { return cost_of_piece(p, in_pairs(p)); }

  /// A tile of queries, and its tiles of keys: whole, or lists of some, or of all.
  std::vector<Piece> cheapest(std::size_t i) const {
    const Range q = t_.q_tile[i];
    Index whole = t_.keys_of(i), full = 0;  // keys
    for (const Tiling::Ref r : t_.met.of(i)) full += r.partial ? 0 : count(t_.k_tile[at(r.tile)]);
    std::vector<Piece> best{{.q = q, .full = whole, .tile = narrow(i), .whole = true}};
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

  /// Pieces of at most kStep queries.
  std::vector<Piece> lowest(std::size_t tile, Index full) const {
    std::vector<Piece> pieces;
    for (Range q = t_.q_tile[tile]; q.begin < t_.q_tile[tile].end; q.begin = q.end) {
      q.end = end_of_tile(codes_, {q.begin, t_.q_tile[tile].end}, kStep);
      pieces.push_back({.q = q, .full = full, .tile = narrow(tile)});
    }
    for (const Tiling::Ref r : t_.met.of(tile)) {
      if (full > 0 && !r.partial) continue;
      const Range k = t_.k_tile[at(r.tile)];
      for (std::int32_t first = k.begin; first < k.end; first += 64) {
        const KeyBits keys(t_, first, std::min(k.end - first, 64));
        for (Piece& p : pieces) add_asked(p, keys, first, std::min(k.end - first, 64), r.partial);
      }
    }
    return pieces;
  }
  /// Those of some keys that a query of a piece asks for.
  void add_asked(Piece& p, const KeyBits& keys, std::int32_t first, std::int32_t n, bool partial) const {
    KeyBits::Words of_query;
    std::uint64_t any = 0, all = ~std::uint64_t{0} >> (64 - n);
    partial ? keys.find(p.q, of_query) : of_query.fill(all);
    for (std::int32_t i = 0; i < count(p.q); ++i) any |= of_query[at(i)], p.pairs += std::popcount(of_query[at(i)]);
    for (; any != 0; any &= any - 1) {
      const int j = std::countr_zero(any);
      unsigned asking = 0;
      for (Index i = 0; by_pairs_ && i < count(p.q); ++i) asking |= unsigned(of_query[at(i)] >> j & 1) << i;
      p.keys.push_back(first + j);
      if (by_pairs_) p.asked.push_back({first + j, p.q.begin, asking});
    }
  }
  /// Neighbors are joined where that costs less, again and again.
  std::vector<Piece> joined(std::vector<Piece> pieces) const {
    for (bool any = true; std::exchange(any, false);) {
      std::vector<Piece> next;
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        if (i + 1 < pieces.size() && may_join(pieces[i], pieces[i + 1])) {
          const Piece &a = pieces[i], &b = pieces[i + 1];
          Piece both{.q = {a.q.begin, b.q.end},
                     .pairs = a.pairs + b.pairs,
                     .full = a.full,
                     .tile = a.tile == b.tile ? a.tile : -1};
          std::ranges::set_union(a.keys, b.keys, std::back_inserter(both.keys));
          if (cost_of_piece(both) <= cost_of_piece(a) + cost_of_piece(b)) {
            both.asked = std::move(pieces[i].asked);
            std::ranges::move(b.asked, std::back_inserter(both.asked));
            next.push_back(std::move(both)), any = true, ++i;
            continue;
          }
        }
        next.push_back(std::move(pieces[i]));
      }
      pieces = std::move(next);
    }
    return pieces;
  }
  bool may_join(const Piece& a, const Piece& b) const {
    return !a.whole && !b.whole && b.q.end - a.q.begin <= Tiling::kTile &&
           (a.tile == b.tile ? a.tile >= 0 || by_pairs_ : by_pairs_ && a.full == 0 && b.full == 0);
  }

  // ---- what was chosen
  void add(const Piece& p) {
    out_->q_tile.push_back(p.q);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
    if (p.full > 0)
      for (const Tiling::Ref r : t_.met.of(at(p.tile)))
        if (p.whole || !r.partial) out_->keys.push_back({whole_tile(r.tile), r.partial});
    list_tiles(p);
  }
  /// Appends a tile of these keys.
  Range list_keys(const TokenList& keys) {
    const auto begin = narrow(origin_.size());
    select(kKeys, *out_, t_, &keys);
    origin_.insert(origin_.end(), keys.begin(), keys.end());
    return out_->k_tile.emplace_back(Range{begin, narrow(origin_.size())});
  }
  /// A tile of t, once.
  std::int32_t whole_tile(std::int32_t tile) {
    std::int32_t& there = whole_[at(tile)];
    if (there < 0) {
      there = narrow(out_->k_tile.size());
      TokenList keys;
      keys.append(t_.k_tile[at(tile)].begin, at(count(t_.k_tile[at(tile)])));
      list_keys(keys);
    }
    return there;
  }
  void list_tiles(const Piece& p) {
    const auto n = std::ssize(p.keys), pieces = tiles_of(n);
    if (n == 0) return;
    const Index each = (n + pieces * kStep - 1) / (pieces * kStep) * kStep;
    const std::vector<Bytes> pairs = in_pairs(p) ? pairs_of(p, each) : std::vector<Bytes>{};
    for (Index first = 0; first < n; first += each) {
      const Range k = list_keys(TokenList(List(p.keys.begin() + first, p.keys.begin() + std::min(n, first + each))));
      if (!pairs.empty()) list_pairs(pairs[at(first / each)]);
      const bool partial = !pairs.empty() || count_pairs(*out_, p.q, k) < count(p.q) * count(k);
      out_->keys.push_back({narrow(out_->k_tile.size() - 1), partial});
    }
  }
  /// The pairs of a piece with `each` of its keys, and with the next, as Compact::pair_list has
  /// them.
  static std::vector<Bytes> pairs_of(const Piece& p, Index each) {
    const Index queries = count(p.q), keys = std::ssize(p.keys), tiles = (keys + each - 1) / each;
    const Index row = 1 + each, column = 1 + 2 * queries;  // a length, and room for as many
    Bytes of_query(at(tiles * queries * row)), of_key(at(keys * column));
    for (const Asked& a : p.asked) {
      const Index key = std::ranges::lower_bound(p.keys, a.key) - p.keys.begin();
      for (unsigned rest = a.queries; rest != 0; rest &= rest - 1) {
        const Index query = a.first - p.q.begin + std::countr_zero(rest);
        std::uint8_t *const its = &of_query[at((key / each * queries + query) * row)], *to = &of_key[at(key * column)];
        to[2 * *to + 1] = static_cast<std::uint8_t>(query), to[2 * *to + 2] = its[0], ++*to;
        its[++its[0]] = static_cast<std::uint8_t>(key % each);
      }
    }
    std::vector<Bytes> out(at(tiles));
    const auto append = [](Bytes& to, const std::uint8_t* list, int of_each) {
      to.insert(to.end(), list, list + 1 + of_each * *list);
    };
    for (Index i = 0; i < tiles * queries; ++i) append(out[at(i / queries)], &of_query[at(i * row)], 1);
    for (Index i = 0; i < keys; ++i) append(out[at(i / each)], &of_key[at(i * column)], 2);
    return out;
  }
  /// Those of the last tile of keys.
  void list_pairs(const Bytes& bytes) {
    out_->pair_begin.resize(out_->k_tile.size(), -1);
    const auto [known, is_new] = lists_.try_emplace(bytes, narrow(out_->pair_list.size()));
    if (is_new) out_->pair_list.insert(out_->pair_list.end(), bytes.begin(), bytes.end());
    out_->pair_begin.back() = known->second;
  }

  /// Neighbors whose lists begin alike go together, unless so few that threads would idle.
  void make_runs() {
    constexpr std::size_t kEnough = 16;
    const auto list = [&](std::int32_t i) {
      return std::ranges::subrange(out_->keys.begin() + out_->keys_begin[at(i)],
                                   out_->keys.begin() + out_->keys_begin[at(i + 1)]);
    };
    const auto alike = [&](std::int32_t i, std::int32_t j) {  // one list is how the other begins
      const auto [a, b] = std::ranges::mismatch(list(i), list(j), {}, &Tiling::Ref::tile, &Tiling::Ref::tile);
      return !list(i).empty() && !list(j).empty() && (a == list(i).end() || b == list(j).end());
    };
    for (std::int32_t i = 0; i < narrow(out_->q_tile.size()); ++i) {
      const bool joins = i > 0 && out_->q_tile.size() >= kEnough && count(out_->runs.back()) < Compact::kRun;
      if (joins && alike(i - 1, i)) out_->runs.back().end = i + 1;
      else out_->runs.push_back({i, i + 1});
    }
  }

  /// Runs are begun from the last to the first: causal ones have the most keys there.
  void take_turns() {
    if (!out_->pair_begin.empty()) out_->pair_begin.resize(out_->k_tile.size(), -1);
    out_->share_begin.resize(out_->keys.size());
    out_->k_first.resize(out_->k_token.size());
    List& turns = out_->turns;
    turns.resize(at(tiles_of(std::ssize(t_.k_token))));
    std::vector<bool> listed(t_.k_token.size());
    for (std::size_t run = out_->runs.size(); run-- > 0;) {
      const std::size_t before = out_->share.size();
      for (std::int32_t visit = 0, entry; (entry = out_->entry_of(out_->runs[run], visit)) >= 0; ++visit)
        add_shares(entry, listed);
      for (std::size_t i = out_->share.size(); i-- > before;) {
        Compact::Share& share = out_->share[i];
        share.last = share.turn == turns[at(share.rows)];
        if (share.last) ++turns[at(share.rows)];
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
  Index cost_ = 0;
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
    if (other.cost() * 10 < plain.cost() * 9) return other.take();
  }
  return plain.take();
}

// ---- several tilings as one: keys behind each other, queries cut wherever one of them cuts

/// What several tilings list of queries, cut wherever one of them cuts.
std::vector<Range> common_tiles(std::span<const Tiling* const> all) {
  std::set<std::int32_t> ends;
  for (const Tiling* t : all)
    for (const Range& r : t->q_tile) ends.insert(r.end);
  std::vector<Range> tiles;
  for (const std::int32_t end : ends) tiles.push_back({tiles.empty() ? 0 : tiles.back().end, end});
  return tiles;
}

std::unique_ptr<const Tiling> join(std::span<const Tiling* const> all) {
  const Tiling& one = *all[0];
  for (const Tiling* t : all)
    if (t->q_token != one.q_token || t->q_names() != one.q_names() || t->causal != one.causal ||
        t->q_ranks() != one.q_ranks() || !t->axis[0].key.empty())
      return nullptr;
  auto out = std::make_unique<Tiling>();
  select(kQueries, *out, one);
  out->grids = one.grids, out->q_tile = common_tiles(all);
  List tiles_before;
  for (const Tiling* t : all) {
    tiles_before.push_back(narrow(out->k_tile.size()));
    select(kKeys, *out, *t);
    out->pairs += t->pairs;
  }
  std::vector<std::size_t> within(all.size());  // the tile of each that holds ours
  for (const Range& r : out->q_tile) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Tiling& t = *all[i];
      while (t.q_tile[within[i]].end < r.end) ++within[i];
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
  const auto make = [&] {
    std::vector<const Tiling*> all;
    for (const std::int32_t i : which) all.push_back(&tilings[at(i)]);
    return join(all);
  };
  return memo.get<std::unique_ptr<const Tiling>>({which.begin(), which.end()}, make).get();
}

}  // namespace hilt
