// Lists of keys for tiles of queries: their order, and which heights and lists cost least.
#include "ops/hilbert/plan/compact.h"
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

using List = std::vector<std::int32_t>;
using Range = Tiling::Range;

Index count(Range r) { return r.end - r.begin; }

// In products of a query and a key, about what the kernels of a CPU take for them.
constexpr Index kKeyCost = 6;  // a key of a list: its rows are gathered, transposed and added to
constexpr Index kRowCost = 6;  // a query that meets up to kTile keys
constexpr Index kStep = 16;    // queries of the lowest tile; its keys come in pieces of whole kSteps

Index cost_of(Index queries, Index keys) {
  return keys * (queries + kKeyCost) + (keys + Tiling::kTile - 1) / Tiling::kTile * queries * kRowCost;
}

/// Of a query a number, 21 bits of where its keys begin on each axis, interleaved: queries of close
/// numbers ask for almost the same keys, and those of equal numbers often for the same.
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
  for (auto list : Tiling::kKeyLists) out.*list = t.*list;
  out.k_tile = t.k_tile, out.grid = t.grid, out.causal = t.causal;
  out.pairs = t.pairs;
  List from(t.q_token.size()), tile_of(from);
  std::iota(from.begin(), from.end(), 0);
  std::ranges::stable_sort(from, {}, [&](std::int32_t i) { return codes[at(i)]; });
  std::ranges::sort(codes);
  for (auto list : Tiling::kQueryLists)
    if (!(t.*list).empty())
      for (const std::int32_t i : from) (out.*list).push_back((t.*list)[at(i)]);
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    std::fill(tile_of.begin() + t.q_tile[i].begin, tile_of.begin() + t.q_tile[i].end, narrow(i));
  for (Range q{0, 0}; q.begin < narrow(from.size()); q.begin = q.end) {
    q.end = end_of_tile(codes, {q.begin, narrow(from.size())}, Tiling::kTile);
    out.q_tile.push_back(q);
    std::set<std::int32_t> tiles;
    for (auto i = q.begin; i < q.end; ++i) tiles.insert(tile_of[at(from[at(i)])]);
    std::map<std::int32_t, std::size_t> full;  // of a tile of keys: for how many
    for (const std::int32_t i : tiles)
      for (auto e = t.keys_begin[at(i)]; e < t.keys_begin[at(i + 1)]; ++e)
        full[t.keys[at(e)].tile] += !t.keys[at(e)].partial;
    out.keys_begin.push_back(narrow(out.keys.size()));
    for (const auto& [tile, n] : full) out.keys.push_back({tile, n < tiles.size()});
  }
  out.keys_begin.push_back(narrow(out.keys.size()));
  return out;
}

/// Queries that go together, and keys of partial tiles that some ask for: of k_token, ascending.
struct Piece {
  Range q;
  List keys;
};

class Compactor {
 public:
  Compactor(const Tiling& t, const Codes& codes)
      : t_(t), codes_(codes), turns_(t.k_tile.size()), whole_(t.k_tile.size(), -1) {
    out_ = std::make_shared<Tiling>();
    for (auto list : Tiling::kQueryLists) (*out_).*list = t.*list;
    out_->grid = t.grid;
    out_->causal = t.causal, out_->boxes = t.boxes;
    out_->pairs = t.pairs;
    for (std::size_t i = 0; i < t.q_tile.size(); ++i) add(i);
    out_->keys_begin.push_back(narrow(out_->keys.size()));
    make_runs();
    take_turns();
  }
  std::shared_ptr<const Tiling> take() { return std::move(out_); }
  Index cost() const { return cost_; }

 private:
  void add(std::size_t i) {
    const std::span refs(t_.keys.data() + t_.keys_begin[i], t_.keys.data() + t_.keys_begin[i + 1]);
    const Range q = t_.q_tile[i];
    Index whole = 0, full = 0;  // keys
    for (const Tiling::Ref& r : refs) {
      const Index keys = count(t_.k_tile[at(r.tile)]);
      whole += keys, full += r.partial ? 0 : keys;
    }
    Index least = codes_.empty() ? cost_of(count(q), whole) * 4 / 5 : std::numeric_limits<Index>::max();
    std::vector<Piece> best;
    if (full < whole) {
      std::vector<Piece> pieces = joined(lowest(q, refs), full);
      Index cost = 0;
      for (const Piece& p : pieces) cost += cost_of_piece(p, full);
      if (cost < least) least = cost, best = std::move(pieces);
    }
    cost_ += best.empty() ? cost_of(count(q), whole) : least;
    const bool lists = !best.empty();
    if (!lists) best.push_back({q, {}});
    for (const Piece& p : best) {
      out_->q_tile.push_back(p.q);
      out_->keys_begin.push_back(narrow(out_->keys.size()));
      for (const Tiling::Ref& r : refs)
        if (!lists || !r.partial) meet(whole_tile(r.tile), r.partial);
      meet_list(p.q, p.keys);
    }
  }
  static Index cost_of_piece(const Piece& p, Index full) {
    return cost_of(count(p.q), full) + cost_of(count(p.q), std::ssize(p.keys));
  }

  /// Pieces of at most kStep queries. Most keys fail the hull of their queries' bounds.
  std::vector<Piece> lowest(Range all_of_them, std::span<const Tiling::Ref> refs) const {
    std::vector<Piece> pieces;
    std::array<QueryBounds, kStep> bounds;
    for (Range q = all_of_them; q.begin < all_of_them.end; q.begin = q.end) {
      q.end = end_of_tile(codes_, {q.begin, all_of_them.end}, kStep);
      const std::int32_t begin = q.begin;
      const auto n = at(count(q));
      QueryBounds all = bounds[0] = bounds_of(t_, at(begin));
      for (std::size_t i = 1; i < n; ++i) all = hull(all, bounds[i] = bounds_of(t_, at(begin) + i));
      List& keys = pieces.emplace_back(q, List{}).keys;
      for (const Tiling::Ref& r : refs) {
        if (!r.partial) continue;
        const Range k = t_.k_tile[at(r.tile)];
        for (std::int32_t j = k.begin; j < k.end; ++j) {
          if (t_.boxes > 1) {  // a union
            bool any = false;
            for (std::size_t i = 0; i < n && !any; ++i) any = attends(t_, at(begin) + i, at(j));
            if (any) keys.push_back(j);
            continue;
          }
          const KeyPlace place = place_of(t_, at(j));
          if (attends(all, place) && std::any_of(bounds.begin(), bounds.begin() + static_cast<std::ptrdiff_t>(n),
                                                 [&](const QueryBounds& b) { return attends(b, place); }))
            keys.push_back(j);
        }
      }
    }
    return pieces;
  }
  /// Neighbors are joined where that costs less, again and again.
  static std::vector<Piece> joined(std::vector<Piece> pieces, Index full) {
    for (bool any = true; any;) {
      any = false;
      std::vector<Piece> next;
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        if (i + 1 < pieces.size()) {
          Piece both{{pieces[i].q.begin, pieces[i + 1].q.end}, {}};
          std::ranges::set_union(pieces[i].keys, pieces[i + 1].keys, std::back_inserter(both.keys));
          if (cost_of_piece(both, full) <= cost_of_piece(pieces[i], full) + cost_of_piece(pieces[i + 1], full)) {
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

  // ---- what was chosen
  void meet(std::int32_t tile, bool partial) {
    out_->keys.push_back({tile, partial});
    ++(partial ? out_->tiles_partial : out_->tiles_full);
  }
  void list_key(std::int32_t j) {
    for (auto list : Tiling::kKeyLists)
      for (std::size_t each = (t_.*list).size() / t_.k_token.size(), box = 0; box < each; ++box)
        ((*out_).*list).push_back((t_.*list)[at(j) * each + box]);
    origin_.push_back(j);
  }
  /// A tile of t, once.
  std::int32_t whole_tile(std::int32_t tile) {
    std::int32_t& there = whole_[at(tile)];
    if (there < 0) {
      there = narrow(out_->k_tile.size());
      const Range k = t_.k_tile[at(tile)];
      const auto begin = narrow(out_->k_token.size());
      for (std::int32_t j = k.begin; j < k.end; ++j) list_key(j);
      out_->k_tile.push_back({begin, narrow(out_->k_token.size())});
    }
    return there;
  }
  void meet_list(Range rows, const List& keys) {
    const auto n = std::ssize(keys), pieces = (n + Tiling::kTile - 1) / Tiling::kTile;
    if (n == 0) return;
    const Index each = (n + pieces * kStep - 1) / (pieces * kStep) * kStep;
    for (Index first = 0; first < n; first += each) {
      const auto begin = narrow(out_->k_token.size());
      for (Index j = first; j < std::min(n, first + each); ++j) list_key(keys[at(j)]);
      const Range k{begin, narrow(out_->k_token.size())};
      out_->k_tile.push_back(k);
      meet(narrow(out_->k_tile.size() - 1), count_pairs(*out_, rows, k) < count(rows) * count(k));
    }
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
                         out_->runs.back().end - out_->runs.back().begin < Tiling::kRun && alike(i - 1, i);
      if (joins) out_->runs.back().end = i + 1;
      else out_->runs.push_back({i, i + 1});
    }
  }

  /// Tiles are begun from the last to the first: causal ones have the most keys there.
  void take_turns() {
    List tile_of(t_.k_token.size());
    for (std::size_t j = 0; j < t_.k_tile.size(); ++j)
      std::fill(tile_of.begin() + t_.k_tile[j].begin, tile_of.begin() + t_.k_tile[j].end, narrow(j));
    out_->share_begin.resize(out_->keys.size());
    for (std::size_t i = out_->q_tile.size(); i-- > 0;)
      for (auto e = out_->keys_begin[i]; e < out_->keys_begin[i + 1]; ++e) {
        const Range k = out_->k_tile[at(out_->keys[at(e)].tile)];
        out_->share_begin[at(e)] = narrow(out_->share.size());
        for (std::int32_t j = k.begin; j < k.end; ++j) {
          const std::int32_t rows = tile_of[at(origin_[at(j)])];
          if (j == k.begin || out_->share.back().rows != rows) out_->share.push_back({rows, j, turns_[at(rows)]++});
          out_->share.back().end = j + 1;
        }
      }
    out_->turns = turns_;
  }

  const Tiling& t_;
  const Codes& codes_;
  std::shared_ptr<Tiling> out_;
  Index cost_ = 0;
  List origin_;  // of a key of out_: which of t_
  List turns_;
  List whole_;  // of a tile of t_: which of out_, or -1
};

}  // namespace

const Tiling& compact(const Tiling& t) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (t.compacted) return *t.compacted;
  const Codes none;
  Compactor plain(t, none);
  Codes codes = t.k_a.empty() || t.boxes > 1 ? none : codes_of(t);
  if (!std::ranges::is_sorted(codes)) {
    const Tiling by_codes = sorted(t, codes);
    Compactor other(by_codes, codes);
    if (other.cost() * 10 < plain.cost() * 9) t.compacted = other.take();
  }
  if (!t.compacted) t.compacted = plain.take();
  return *t.compacted;
}

}  // namespace hilt
