// Lists of keys for tiles of queries: their order, and which heights and lists cost least.
#include "ops/hilbert/kernels/compact.h"
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

using List = std::vector<std::int32_t>;
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
  Tiling out;
  add_all_keys(out, t);
  out.grid = t.grid, out.pairs = t.pairs;
  List from(t.q_token.size()), tile_of(from);
  std::iota(from.begin(), from.end(), 0);
  std::ranges::stable_sort(from, {}, [&](std::int32_t i) { return codes[at(i)]; });
  std::ranges::sort(codes);
  add_queries(out, t, TokenList(from));
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    std::fill(tile_of.begin() + t.q_tile[i].begin, tile_of.begin() + t.q_tile[i].end, narrow(i));
  for (Range q{0, 0}; q.begin < narrow(from.size()); q.begin = q.end) {
    q.end = end_of_tile(codes, {q.begin, narrow(from.size())}, Tiling::kTile);
    out.q_tile.push_back(q);
    std::set<std::int32_t> tiles;
    for (auto i = q.begin; i < q.end; ++i) tiles.insert(tile_of[at(from[at(i)])]);
    std::map<std::int32_t, std::size_t> full;  // of a tile of keys: for how many
    for (const std::int32_t i : tiles)
      for (const Tiling::Ref ref : t.met.of(at(i))) full[ref.tile] += !ref.partial;
    for (const auto& [tile, n] : full) out.met.add(tile, tile + 1, n < tiles.size());
    out.met.end_list();
  }
  return out;
}

/// At most kStep queries, the keys that they list, and which queries list each: bits.
struct Step {
  Range q;
  List keys = {};
  std::vector<std::uint16_t> asking = {};
};
/// Queries that go together, and the keys that they list: of k_token, ascending, some query asks
/// for each. Besides they have `full` keys in whole tiles.
struct Piece {
  Range q;
  List keys = {};
  Index pairs = 0, full = 0;
  std::int32_t tile = -1;        // of queries, or -1: of several, which attends() cannot tell apart
  bool whole = false;            // all tiles of keys are met whole; no keys are listed
  std::vector<Step> steps = {};  // where pairs may be taken one by one
};

class Compactor {
 public:
  Compactor(const Tiling& t, const Codes& codes, bool by_pairs)
      : t_(t),
        codes_(codes),
        by_pairs_(by_pairs),
        turns_(at(tiles_of(std::ssize(t.k_token)))),
        whole_(t.k_tile.size(), -1) {
    add_all_queries(*out_, t);
    out_->q_tile.clear();
    out_->grid = t.grid, out_->pairs = t.pairs;
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < t.q_tile.size(); ++i) std::ranges::move(cheapest(i), std::back_inserter(pieces));
    for (const Piece& p : joined(std::move(pieces))) add(p);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
    for (TokenList* list : {&out_->q_token, &out_->k_token, &out_->q_name, &out_->k_name, &out_->q_rank, &out_->k_rank})
      list->store();
    make_runs();
    take_turns();
  }
  std::unique_ptr<const Compact> take() { return std::move(out_); }
  Index cost() const { return cost_; }

 private:
  // Lists that are taped's are joined to groups later, whose costs are others.
  Index cost_of_key() const { return by_pairs_ ? 24 : 12; }  // which is gathered, and added to
  Index cost_of_tiles(Index queries, Index keys) const {
    const Index of_tile = by_pairs_ ? 400 : 0;
    return keys * (2 * queries + cost_of_key()) + tiles_of(keys) * (queries * kRowCost + of_tile);
  }
  Index cost_in_products(const Piece& p) const {
    return cost_of_tiles(count(p.q), p.full) + cost_of_tiles(count(p.q), std::ssize(p.keys));
  }
  Index cost_in_pairs(const Piece& p) const {
    return cost_of_tiles(count(p.q), p.full) + p.pairs * kPairCost + std::ssize(p.keys) * cost_of_key() +
           tiles_of(std::ssize(p.keys)) * count(p.q) * kRowCost;
  }
  bool in_pairs(const Piece& p) const {
    return by_pairs_ && !p.whole && (p.tile < 0 || cost_in_pairs(p) < cost_in_products(p));
  }
  Index cost_of_piece(const Piece& p) const { return in_pairs(p) ? cost_in_pairs(p) : cost_in_products(p); }

  /// A tile of queries, and its tiles of keys: whole, or lists of some, or of all.
  std::vector<Piece> cheapest(std::size_t i) const {
    const Range q = t_.q_tile[i];
    Index whole = 0, full = 0;  // keys
    for (const Tiling::Ref r : t_.met.of(i)) {
      const Index keys = count(t_.k_tile[at(r.tile)]);
      whole += keys, full += r.partial ? 0 : keys;
    }
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

  /// Pieces of at most kStep queries. Most keys fail the hull of their queries' bounds.
  std::vector<Piece> lowest(std::size_t tile, Index full) const {
    std::vector<Piece> pieces;
    const Range all_of_them = t_.q_tile[tile];
    std::array<QueryBounds, kStep> bounds;
    for (Range q = all_of_them; q.begin < all_of_them.end; q.begin = q.end) {
      q.end = end_of_tile(codes_, {q.begin, all_of_them.end}, kStep);
      const std::int32_t begin = q.begin;
      const auto n = at(count(q));
      QueryBounds all = bounds[0] = bounds_of(t_, at(begin));
      for (std::size_t i = 1; i < n; ++i) all = hull(all, bounds[i] = bounds_of(t_, at(begin) + i));
      Piece& p = pieces.emplace_back(Piece{.q = q, .full = full, .tile = narrow(tile)});
      Step step{q};
      for (const Tiling::Ref r : t_.met.of(tile)) {
        if (full > 0 && !r.partial) continue;
        const Range k = t_.k_tile[at(r.tile)];
        for (std::int32_t j = k.begin; j < k.end; ++j) {
          unsigned asking = r.partial ? 0 : (1u << n) - 1;
          const KeyPlace place = t_.boxes > 1 ? KeyPlace{} : place_of(t_, at(j));
          if (r.partial && t_.boxes > 1)  // a union
            for (std::size_t i = 0; i < n; ++i) asking |= unsigned{attends(t_, at(begin) + i, at(j))} << i;
          else if (r.partial && attends(all, place))
            for (std::size_t i = 0; i < n; ++i) asking |= unsigned{attends(bounds[i], place)} << i;
          if (asking == 0) continue;
          p.keys.push_back(j), p.pairs += std::popcount(asking);
          if (by_pairs_) step.asking.push_back(static_cast<std::uint16_t>(asking));
        }
      }
      if (by_pairs_) step.keys = p.keys, p.steps.push_back(std::move(step));
    }
    return pieces;
  }
  /// Neighbors are joined where that costs less, again and again.
  std::vector<Piece> joined(std::vector<Piece> pieces) const {
    for (bool any = true; any;) {
      any = false;
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
            both.steps = std::move(pieces[i].steps);
            std::ranges::move(pieces[i + 1].steps, std::back_inserter(both.steps));
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
    cost_ += cost_of_piece(p);
    out_->q_tile.push_back(p.q);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
    if (p.full > 0)
      for (const Tiling::Ref r : t_.met.of(at(p.tile)))
        if (p.whole || !r.partial) list_tile(whole_tile(r.tile), r.partial);
    list_tiles(p);
  }
  void list_tile(std::int32_t tile, bool partial) { out_->keys.push_back({tile, partial}); }
  /// Appends a tile of these keys.
  Range list_keys(const TokenList& keys) {
    const auto begin = narrow(origin_.size());
    add_keys(*out_, t_, keys);
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
    const std::vector<List> met = in_pairs(p) ? keys_by_row(p) : std::vector<List>{};
    for (Index first = 0; first < n; first += each) {
      const Range k = list_keys(TokenList(List(p.keys.begin() + first, p.keys.begin() + std::min(n, first + each))));
      if (!met.empty()) list_pairs(met, narrow(first), narrow(count(k)));
      list_tile(narrow(out_->k_tile.size() - 1), !met.empty() || count_pairs(*out_, p.q, k) < count(p.q) * count(k));
    }
  }
  /// Which of a piece's keys each of its queries asks for.
  std::vector<List> keys_by_row(const Piece& p) const {
    std::vector<List> met(at(count(p.q)));
    for (const Step& step : p.steps) {
      std::int32_t key = 0;
      for (std::size_t i = 0; i < step.keys.size(); ++i) {
        while (p.keys[at(key)] < step.keys[i]) ++key;
        for (unsigned rest = step.asking[i]; rest != 0; rest &= rest - 1)
          met[at(step.q.begin - p.q.begin + std::countr_zero(rest))].push_back(key);
      }
    }
    return met;
  }
  /// The pairs of a tile with `n` of the piece's keys, from `first` on, as Compact::pair_list has
  /// them.
  void list_pairs(const std::vector<List>& met, std::int32_t first, std::int32_t n) {
    std::vector<std::uint8_t> bytes;
    std::array<std::array<std::uint8_t, 2 * Tiling::kTile>, Tiling::kTile> of_key;
    std::array<std::size_t, Tiling::kTile> length{};
    for (std::size_t r = 0; r < met.size(); ++r) {
      const auto from = std::ranges::lower_bound(met[r], first), to = std::ranges::lower_bound(met[r], first + n);
      bytes.push_back(static_cast<std::uint8_t>(to - from));
      for (auto key = from; key < to; ++key) {
        const std::size_t k = at(*key - first);
        bytes.push_back(static_cast<std::uint8_t>(k));
        of_key[k][length[k]++] = static_cast<std::uint8_t>(r);
        of_key[k][length[k]++] = static_cast<std::uint8_t>(key - from);
      }
    }
    for (std::size_t k = 0; k < at(n); ++k) {
      bytes.push_back(static_cast<std::uint8_t>(length[k] / 2));
      bytes.insert(bytes.end(), of_key[k].begin(), of_key[k].begin() + static_cast<std::ptrdiff_t>(length[k]));
    }
    out_->pair_begin.resize(out_->k_tile.size(), -1);
    const auto [known, is_new] = lists_.try_emplace(bytes, narrow(out_->pair_list.size()));
    if (is_new) out_->pair_list.insert(out_->pair_list.end(), bytes.begin(), bytes.end());
    out_->pair_begin.back() = known->second;
  }

  /// Neighbors whose lists begin alike go together, unless so few that threads would idle.
  void make_runs() {
    constexpr std::size_t kEnough = 16;
    const auto list = [&](std::int32_t i) {
      return std::span(out_->keys)
          .subspan(at(out_->keys_begin[at(i)]), at(out_->keys_begin[at(i + 1)] - out_->keys_begin[at(i)]));
    };
    const auto alike = [&](std::int32_t i, std::int32_t j) {
      const auto a = list(i), b = list(j);
      const auto same = [](Tiling::Ref x, Tiling::Ref y) { return x.tile == y.tile; };
      return !a.empty() && !b.empty() &&
             std::equal(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(std::min(a.size(), b.size())), b.begin(),
                        same);
    };
    for (std::int32_t i = 0; i < narrow(out_->q_tile.size()); ++i) {
      const bool joins = i > 0 && out_->q_tile.size() >= kEnough &&
                         out_->runs.back().end - out_->runs.back().begin < Compact::kRun && alike(i - 1, i);
      if (joins) out_->runs.back().end = i + 1;
      else out_->runs.push_back({i, i + 1});
    }
  }

  /// Runs are begun from the last to the first: causal ones have the most keys there.
  void take_turns() {
    if (!out_->pair_begin.empty()) out_->pair_begin.resize(out_->k_tile.size(), -1);
    out_->share_begin.resize(out_->keys.size());
    out_->k_first.resize(out_->k_token.size());
    std::vector<bool> listed(t_.k_token.size());
    List last(turns_.size(), -1), parts;  // of a run: its last share of a part, and which have one
    for (std::size_t run = out_->runs.size(); run-- > 0;) {
      for (std::int32_t visit = 0;; ++visit) {
        std::int32_t entry = -1;
        for (auto i = out_->runs[run].begin; i < out_->runs[run].end; ++i)
          if (visit < out_->keys_begin[at(i + 1)] - out_->keys_begin[at(i)]) entry = out_->keys_begin[at(i)] + visit;
        if (entry < 0) break;
        const Range k = out_->k_tile[at(out_->keys[at(entry)].tile)];
        const auto first = narrow(out_->share.size());
        out_->share_begin[at(entry)] = first;
        for (std::int32_t j = k.begin; j < k.end; ++j) {
          const std::int32_t key = origin_[at(j)], rows = key / narrow(Tiling::kTile);
          if (j == k.begin || out_->share.back().rows != rows) {
            if (last[at(rows)] < 0) parts.push_back(rows);
            last[at(rows)] = narrow(out_->share.size());
            out_->share.push_back({rows, j, turns_[at(rows)], false, false});
          }
          out_->share.back().end = j + 1;
          if (!listed[at(key)]) listed[at(key)] = true, out_->k_first[at(j)] = 1, out_->share.back().first = true;
        }
      }
      for (const std::int32_t rows : parts) {
        out_->share[at(last[at(rows)])].last = true;
        last[at(rows)] = -1, ++turns_[at(rows)];
      }
      parts.clear();
    }
    out_->turns = turns_;
    out_->every_key = std::ranges::find(listed, false) == listed.end();
  }

  const Tiling& t_;
  const Codes& codes_;
  bool by_pairs_;
  std::unique_ptr<Compact> out_ = std::make_unique<Compact>();
  Index cost_ = 0;
  List origin_;  // of a key of out_: which of t_
  List turns_;
  List whole_;                                               // of a tile of t_: which of out_, or -1
  std::map<std::vector<std::uint8_t>, std::int32_t> lists_;  // of pairs, each once
};

}  // namespace

static std::unique_ptr<const Compact> made(const Tiling& t, bool by_pairs) {
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

const Compact& compact(const Tiling& t, bool by_pairs) {
  return *t.memo.get<std::unique_ptr<const Compact>>({by_pairs}, [&] { return made(t, by_pairs); });
}

}  // namespace hilt
