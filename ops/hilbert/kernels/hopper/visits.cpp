// Tiles are merged to owners of up to 128 rows, pairs of them cut into cells of 64 x 64, and masks
// of cells told apart by their bits. Work is proportional to the tiles that are listed.
#include "ops/hilbert/kernels/hopper/visits.h"
#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

using Owner = VisitSide::Owner;
constexpr std::int32_t kCell = Visits::kCell;

/// Owners of a list, and which one each tile belongs to.
struct Cut {
  std::vector<Owner> owner;
  std::vector<std::int32_t> of;
  Cut(const std::vector<Tiling::Range>& tiles, bool merges) {
    for (const Tiling::Range& r : tiles) {
      if (owner.empty() || !merges || r.end - owner.back().row > Visits::kOwner)
        owner.push_back({r.begin, 0, 0, 0, 0, narrow(of.size()), 0, 0, {}});
      owner.back().rows = r.end - owner.back().row, ++owner.back().tiles;
      of.push_back(narrow(owner.size() - 1));
    }
  }
};

/// The pairs of a cell that attend: a word a row, a bit a column.
using Bits = std::array<std::uint64_t, kCell>;
constexpr std::uint64_t ones(std::int32_t n) { return n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1; }

Bits transposed(Bits x) {
  for (std::size_t j = 32, m = 0x00000000ffffffff; j != 0; j >>= 1, m ^= m << j)
    for (std::size_t k = 0; k < 64; k = (k + j + 1) & ~j) {
      const std::uint64_t t = (x[k] >> j ^ x[k + j]) & m;
      x[k] ^= t << j, x[k + j] ^= t;
    }
  return x;
}

using List = std::vector<std::int32_t>;
struct Hash {
  template <class L> std::size_t operator()(const L& list) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(list.data()), list.size() * sizeof(list[0])});
  }
};

class Masks {
 public:
  Masks(std::vector<std::uint32_t>& words, std::size_t most) : words_(words), most_(most / 4) {
    Bits full;
    full.fill(~std::uint64_t{0});
    cells_ = {{Bits{}, Visits::kEmpty}, {full, Visits::kFull}};
  }
  std::uint16_t cell_of(const Bits& bits) {
    if (const auto known = cells_.find(bits); known != cells_.end()) return known->second;
    if (words_.size() + Visits::kWords > most_) return compares = true, Visits::kCompare;
    const auto cell = static_cast<std::uint16_t>(Visits::kMasks + words_.size() / Visits::kWords);
    for (std::size_t thread = 0; thread < Visits::kWords; ++thread) words_.push_back(word(bits, thread));
    return cells_[bits] = cell;
  }
  bool compares = false;  // there was no room for a mask

 private:
  static std::uint32_t word(const Bits& bits, std::size_t thread) {
    std::uint32_t out = 0;
    for (std::size_t h = 0; h < 2; ++h) {
      const std::uint64_t row = bits[thread / 32 * 16 + thread % 32 / 4 + 8 * h] >> thread % 4 * 2;
      for (std::size_t c = 0; c < 8; ++c) out |= static_cast<std::uint32_t>(row >> 8 * c & 3) << (16 * h + 2 * c);
    }
    return out;
  }
  std::vector<std::uint32_t>& words_;
  std::size_t most_;
  std::unordered_map<Bits, std::uint16_t, Hash> cells_;
};

/// Adds a step to the visits of an owner; what continues the last one joins it.
using VisitList = std::vector<VisitSide::Visit>;
void append(VisitList& list, std::int32_t row, std::int32_t rows, const std::array<std::uint16_t, 2>& cell) {
  if (!list.empty()) {
    VisitSide::Visit& last = list.back();
    if (last.cell == cell && last.row + last.rows == row && last.rows % kCell == 0 &&
        std::ranges::count(cell, Visits::kCompare) == 0) {
      last.rows += rows;
      return;
    }
  }
  list.push_back({row, rows, cell, 0});
}
/// The owners of a side, each with its visits behind those of others, and how many cells that are.
void take(VisitSide& side, std::vector<Owner>& owners, std::vector<VisitList>& lists) {
  for (std::size_t i = 0; i < owners.size(); ++i) {
    Owner& own = owners[i];
    own.first = narrow(side.visit.size()), own.visits = narrow(lists[i].size());
    side.visit.insert(side.visit.end(), lists[i].begin(), lists[i].end());
    std::array<std::int32_t, 2> met{-1, -1};  // by the halves: the last pair of steps
    for (const VisitSide::Visit& visit : lists[i]) {
      const std::int32_t first = own.steps / 2, steps = (visit.rows + kCell - 1) / kCell;
      own.steps += steps;
      const std::int32_t last = (own.steps - 1) / 2;
      for (std::size_t half = 0; half < 2; ++half)
        if (visit.cell[half] != Visits::kEmpty)
          side.cells += steps, side.cells_wide += 2 * (last - std::max(first - 1, met[half])), met[half] = last;
    }
    lists[i] = {};
  }
  side.owner = std::move(owners);
}

/// Parts of few owners that have many steps, by the tiling alone: a result has the same bits
/// whatever the batch is. A part has at least `least` steps: one that is short costs more than it
/// saves where batch and heads keep a GPU busy.
void cut(VisitSide& side, Index least) {
  if (side.owner.empty() || std::ssize(side.owner) > Visits::kFewOwners) return;
  const Index longest = side.owner[0].steps, parts = std::min(longest / least, Visits::kParts);
  if (parts < 2) return;
  const std::int32_t each = narrow((longest + 2 * parts - 1) / (2 * parts) * 2);  // whole pairs of steps
  side.parts = (longest + each - 1) / each;
  std::vector<VisitSide::Visit> visits;
  for (Owner& owner : side.owner) {
    std::vector<Owner> its(at(side.parts), owner);
    for (Owner& part : its) part.visits = part.steps = 0, part.number = narrow(&part - its.data());
    std::int32_t step = 0;
    const std::int32_t first = narrow(visits.size());
    for (VisitSide::Visit v : side.of(owner))
      for (std::int32_t taken; v.rows > 0; v.row += taken, v.rows -= taken) {
        Owner& part = its[at(step / each)];
        if (part.visits++ == 0) part.first = narrow(visits.size());
        taken = std::min(v.rows, (each - part.steps) * kCell);
        visits.push_back({v.row, taken, v.cell, v.mask});
        part.steps += (taken + kCell - 1) / kCell, step += (taken + kCell - 1) / kCell;
      }
    owner.first = first, owner.visits = narrow(visits.size()) - first;
    side.part.insert(side.part.end(), its.begin(), its.end());
  }
  side.visit = std::move(visits);
  std::ranges::stable_sort(side.part, std::greater<>(), &Owner::steps);
}

/// The pairs of two owners, by halves of queries and of keys.
using OwnerPairs = std::array<std::array<Bits, 2>, 2>;

/// Owners of a side by what attends() compares of their rows. Those of one number differ at most in
/// where that begins: both sides' being as far apart, they attend alike.
struct Shapes {
  List number, first;           // by owner; by owner and comparison
  std::size_t comparisons = 0;  // of an owner
  Shapes(const Tiling& t, const std::vector<Owner>& owners, bool asking) {
    constexpr std::int32_t kTakenHere = std::numeric_limits<std::int32_t>::min();  // no difference
    std::unordered_map<List, std::int32_t, Hash> known;
    const TokenList& ranks = asking ? t.q_ranks() : t.k_ranks();
    const auto boxes = at(t.boxes);
    List its;
    for (const Owner& own : owners) {
      const std::size_t begin = at(own.row), end = begin + at(own.rows);
      its = {own.rows};
      if (t.causal) first.push_back(ranks[begin]);
      for (auto i = begin; t.causal && !ranks.counts_up() && i < end; ++i) its.push_back(ranks[i] - ranks[begin]);
      for (const Tiling::Axis& axis : t.axis)
        for (std::size_t box = 0; !axis.key.empty() && box < boxes; ++box) {
          const List& from = asking ? axis.low : axis.key;
          first.push_back(from[begin * boxes + box]);
          for (std::size_t i = begin * boxes + box; i < end * boxes; i += boxes) {
            its.push_back(!asking && from[i] == kTaken ? kTakenHere : from[i] - first.back());
            if (asking) its.push_back(axis.high[i] - first.back());
          }
        }
      number.push_back(known.try_emplace(its, narrow(known.size())).first->second);
    }
    comparisons = owners.empty() ? 0 : first.size() / owners.size();
  }
};

/// Owners of queries and of keys, and the pairs that they have in the tiles that are listed.
class OwnerWalk {
 public:
  OwnerWalk(const Tiling& t, bool merges)
      : queries(t.q_tile, merges), keys(t.k_tile, merges), t_(t), bits_(keys.owner.size()) {
    if (t.met.partial > 0) shapes_.emplace_back(t, queries.owner, true), shapes_.emplace_back(t, keys.owner, false);
  }
  Cut queries, keys;

  /// f(number of an owner of queries, that of one of keys, what `make` makes of their pairs),
  /// ascending. What is alike is made once.
  template <class Make, class F> void each(const Make& make, const F& f) {
    std::unordered_map<List, decltype(make(OwnerPairs{})), Hash> known;
    auto found = known.end();
    std::vector<ListedTile> listed;
    List key;
    for (std::size_t q = 0; q < queries.owner.size(); ++q) {
      const Owner& own = queries.owner[q];
      listed.clear();
      for (std::int32_t tile = own.tile; tile < own.tile + own.tiles; ++tile)
        for (const Tiling::Ref ref : t_.met.of(at(tile)))
          listed.push_back({at(keys.of[at(ref.tile)]), tile, ref.tile, ref.partial});
      if (own.tiles > 1) std::ranges::stable_sort(listed, {}, &ListedTile::keys);
      for (std::size_t first = 0, end = 0; first < listed.size(); first = end) {
        const std::size_t k = listed[first].keys;
        while (end < listed.size() && listed[end].keys == k) ++end;
        const std::span its = std::span(listed).subspan(first, end - first);
        name(key, q, k, its);
        if (found == known.end() || key != found->first) found = known.find(key);
        if (found == known.end()) found = known.emplace(key, make(pairs_of(own, keys.owner[k], its))).first;
        f(q, k, found->second);
      }
    }
  }

 private:
  struct ListedTile {
    std::size_t keys;  // their owner
    std::int32_t q_tile, k_tile;
    bool partial;
  };
  /// All that the pairs of two owners depend on.
  void name(List& key, std::size_t q, std::size_t k, std::span<const ListedTile> listed) const {
    key.clear();
    const std::int32_t row = queries.owner[q].row, column = keys.owner[k].row;
    for (const ListedTile& tile : listed) {
      const Tiling::Range x = t_.q_tile[at(tile.q_tile)], y = t_.k_tile[at(tile.k_tile)];
      key.insert(key.end(), {x.begin - row, x.end - row, y.begin - column, y.end - column, tile.partial});
    }
    if (std::ranges::none_of(listed, &ListedTile::partial)) return;
    key.insert(key.end(), {shapes_[0].number[q], shapes_[1].number[k]});
    const std::size_t n = shapes_[0].comparisons;
    for (std::size_t i = 0; i < n; ++i) key.push_back(shapes_[0].first[q * n + i] - shapes_[1].first[k * n + i]);
  }
  OwnerPairs pairs_of(const Owner& q, const Owner& k, std::span<const ListedTile> listed) {
    OwnerPairs out{};
    for (const ListedTile& tile : listed) add(tile, q, k, out);
    return out;
  }
  void add(const ListedTile& tile, const Owner& q, const Owner& k, OwnerPairs& out) {
    const Tiling::Range rows = t_.q_tile[at(tile.q_tile)], columns = t_.k_tile[at(tile.k_tile)];
    std::vector<KeyBits>& halves = bits_[tile.keys];
    for (std::int32_t half = 0; tile.partial && half * kCell < k.rows && std::ssize(halves) <= half; ++half)
      halves.emplace_back(t_, k.row + half * kCell, std::min(k.rows - half * kCell, kCell));
    for (std::int32_t half = 0; half * kCell < k.rows; ++half) {
      const std::int32_t first = k.row + half * kCell;
      const std::uint64_t all =
          ones(std::clamp(columns.end - first, 0, kCell)) & ~ones(std::clamp(columns.begin - first, 0, kCell));
      for (std::int32_t i = rows.begin; all != 0 && i < rows.end; ++i)
        out[at((i - q.row) / kCell)][at(half)][at((i - q.row) % kCell)] |=
            tile.partial ? all & halves[at(half)].of(at(i)) : all;
    }
    if (t_.boxes > kFewBoxes) halves.clear();
  }

  const Tiling& t_;
  std::vector<Shapes> shapes_;              // of queries, of keys; where tiles are partial
  std::vector<std::vector<KeyBits>> bits_;  // of each owner of keys, by halves; kept where boxes are few
  static constexpr std::int32_t kFewBoxes = 4;
};

/// The cells of an owner's halves, for each half of the other side's rows.
using HalfCells = std::array<std::array<std::uint16_t, 2>, 2>;
/// Adds the steps of an owner with another, but for those without pairs; whether there is none.
bool add_steps(VisitList& list, const Owner& other, const HalfCells& cells) {
  bool all = true;
  for (std::int32_t row = 0; row < other.rows; row += kCell) {
    const auto& cell = cells[at(row / kCell)];
    const bool any = cell[0] != Visits::kEmpty || cell[1] != Visits::kEmpty;
    if (any) append(list, other.row + row, std::min(other.rows - row, kCell), cell);
    all = all && any;
  }
  return all;
}
/// Counts the masks that each call makes, portion by portion of owners.
void number_masks(VisitSide& side, Index portion) {
  Index n = 0;
  side.portion = {0};
  for (Owner& owner : side.owner) {
    const auto its = std::span(side.visit).subspan(at(owner.first), at(owner.visits));
    const auto compares = [](const VisitSide::Visit& v) { return std::ranges::count(v.cell, Visits::kCompare) > 0; };
    const std::int32_t i = narrow(&owner - side.owner.data());
    if (n + 2 * std::ranges::count_if(its, compares) > portion && i > side.portion.back())
      side.portion.push_back(i), n = 0;
    for (VisitSide::Visit& v : its)
      if (compares(v)) v.mask = narrow(n), n += 2;
    if (!its.empty()) owner.front = its[0];
    side.made = std::max(side.made, n);
  }
  side.portion.push_back(narrow(side.owner.size()));
  if (side.portion.size() > 2) side.part = {}, side.parts = 1;  // their masks have no numbers together
  for (Owner& part : side.part)
    if (part.visits > 0) part.front = side.visit[at(part.first)];
}

Visits visits_of_owners(const Tiling& t, std::size_t most, Index portion, bool merges) {
  Visits out;
  Masks masks(out.mask, most);
  OwnerWalk cells(t, merges);
  std::vector<Owner>&queries = cells.queries.owner, &keys = cells.keys.owner;
  std::vector<VisitList> of_queries(queries.size()), of_keys(keys.size());
  std::vector<Index> owners(queries.size());  // of keys, that each meets
  struct Met {
    HalfCells by_query, by_key;
    Index pairs = 0;
  };
  const auto cells_of = [&](const OwnerPairs& pairs) {
    Met met{};
    for (std::size_t a = 0; a < 2; ++a)
      for (std::size_t b = 0; b < 2; ++b) {
        if (pairs[a][b] == Bits{}) continue;
        met.by_query[b][a] = masks.cell_of(pairs[a][b]), met.by_key[a][b] = masks.cell_of(transposed(pairs[a][b]));
        for (const std::uint64_t row : pairs[a][b]) met.pairs += std::popcount(row);
      }
    return met;
  };
  cells.each(cells_of, [&](std::size_t q, std::size_t k, const Met& met) {
    out.pairs += met.pairs, ++owners[q];
    out.mixed = out.mixed || met.pairs != Index{queries[q].rows} * keys[k].rows;
    if (!add_steps(of_keys[k], queries[q], met.by_key)) out.one_owner = false;
    add_steps(of_queries[q], keys[k], met.by_query);
  });
  // attends() knows nothing of pairs in tiles that are not listed, which merged tiles have.
  if (masks.compares && merges) return visits_of_owners(t, most, portion, false);
  out.one_owner = out.one_owner && std::ranges::count(owners, 1) == std::ssize(owners);
  const TokenList& names = t.k_names();
  for (const Owner& own : keys)  // of names that count up, the first says it of all
    for (std::int32_t r = 0; out.eights && r < own.rows; r += names.counts_up() ? own.rows : 1)
      out.eights = names[at(own.row + r)] == (names[at(own.row + r / 8 * 8)] & ~7) + r % 8;
  const bool small = std::ranges::all_of(keys, [](const Owner& own) { return own.rows <= kCell; });
  const auto finish = [&](VisitSide& side, std::vector<Owner>& its, std::vector<VisitList>& lists, Index least) {
    take(side, its, lists);
    std::ranges::stable_sort(side.owner, std::greater<>(), &Owner::steps);
    cut(side, least);
    number_masks(side, portion);
  };
  finish(out.queries, queries, of_queries, 32), finish(out.keys, keys, of_keys, small ? 8 : 32);
  return out;
}

/// Rows of the other side that an owner meets: its first half alone, both, its second half alone.
using RowsMet = std::array<std::vector<std::int32_t>, 3>;
/// Those of every owner; `n`: cells that are not empty. None where all lists together have too
/// many.
std::vector<RowsMet> rows_met(OwnerWalk& cells, bool keys_own, Index& n) {
  constexpr Index kMost = 1 << 22;
  std::vector<RowsMet> out((keys_own ? cells.keys : cells.queries).owner.size());
  Index all = 0;
  using Columns = std::array<std::array<std::uint64_t, 2>, 2>;  // of the other's halves, those that each half meets
  const auto columns_of = [&](const OwnerPairs& pairs) {
    Columns columns{};
    for (std::size_t other = 0; other < 2; ++other)
      for (std::size_t half = 0; half < 2; ++half) {
        const Bits& bits = keys_own ? pairs[other][half] : pairs[half][other];
        for (std::size_t row = 0; row < bits.size(); ++row)
          columns[other][half] |= keys_own ? std::uint64_t{bits[row] != 0} << row : bits[row];
      }
    return columns;
  };
  cells.each(columns_of, [&](std::size_t q, std::size_t k, const Columns& columns) {
    if (all > kMost) return;
    RowsMet& its = out[keys_own ? k : q];
    const std::int32_t first = (keys_own ? cells.queries.owner[q] : cells.keys.owner[k]).row;
    for (std::size_t other = 0; other < 2; ++other) {
      n += std::ranges::count_if(columns[other], [](std::uint64_t met) { return met != 0; });
      for (std::uint64_t any = columns[other][0] | columns[other][1]; any != 0; any &= any - 1) {
        const auto column = std::countr_zero(any);
        const bool a = columns[other][0] >> column & 1, b = columns[other][1] >> column & 1;
        its[a ? b : 2].push_back(first + narrow(other) * kCell + column), ++all;
      }
    }
  });
  return all > kMost ? std::vector<RowsMet>{} : out;
}

/// See with_short_lists(); null where they save too little. A copy of the tiling would have none of
/// its visits.
using ShortLists = std::unique_ptr<const Tiling>;
ShortLists short_lists(const Tiling& t, bool keys_own) {
  const auto side_of = [&](const Visits& v) -> const VisitSide& { return keys_own ? v.keys : v.queries; };
  // Cells that are nearly half full have no fifth to save.
  if (t.axis[0].key.empty() || 9 * kCell * kCell * side_of(visits(t)).cells < 20 * t.pairs) return {};
  OwnerWalk cells(t, true);
  Index before = 0, after = 0;  // cells
  const std::vector<RowsMet> met = rows_met(cells, keys_own, before);
  Selection list;
  Tiling::Lists tiles;
  std::vector<std::int32_t> entries;
  for (std::size_t i = 0; i < met.size(); ++i) {
    const auto alone = std::ssize(met[i][0]), first = alone + std::ssize(met[i][1]),
               all = first + std::ssize(met[i][2]);
    const auto steps = [](Index rows) { return (rows + kCell - 1) / kCell; };
    after += steps(first) + steps(all) - alone / kCell;
    const auto tile = narrow(list.tiles.size());
    auto row = narrow(entries.size());
    for (const std::vector<std::int32_t>& rows : met[i]) entries.insert(entries.end(), rows.begin(), rows.end());
    for (const auto end = narrow(entries.size()); row < end; row = list.tiles.back().end)
      list.tiles.push_back({row, std::min(end, row + narrow(Visits::kOwner))});
    for (std::int32_t n = (keys_own ? cells.keys : cells.queries).owner[i].tiles; n > 0; --n) {
      if (narrow(list.tiles.size()) > tile) tiles.add(tile, narrow(list.tiles.size()), true);
      tiles.end_list();
    }
  }
  if (met.empty() || 5 * after > 4 * before) return {};
  list.entries = TokenList(std::move(entries));
  auto made =
      std::make_unique<const Tiling>(keys_own ? with_lists(t, &list, nullptr, tiles.transposed(list.tiles.size()))
                                              : with_lists(t, nullptr, &list, std::move(tiles)));
  // Cells have numbers for so many masks.
  constexpr std::size_t kMaskBytes = (std::size_t{1 << 16} - Visits::kMasks) * Visits::kWords * 4;
  const Visits& lists = made->memo.get<Visits>({}, [&] { return visits_of(*made, kMaskBytes); });
  // attends() knows nothing of pairs in tiles that are not listed, which an owner of several tiles
  // may have.
  if (side_of(lists).made > 0 || lists.pairs != t.pairs || 5 * side_of(lists).cells > 4 * before) return {};
  return made;
}

}  // namespace

Visits visits_of(const Tiling& t, std::size_t most, Index portion) { return visits_of_owners(t, most, portion, true); }

const Visits& visits(const Tiling& t) {
  return t.memo.get<Visits>({}, [&] { return visits_of(t); });
}

const Tiling& with_short_lists(const Tiling& t, bool keys_own) {
  const ShortLists& its = t.memo.get<ShortLists>({keys_own}, [&] { return short_lists(t, keys_own); });
  return its ? *its : t;
}

const Tiling& with_ascending_keys(const Tiling& t) {
  return t.memo.get<Tiling>({}, [&] {
    std::vector<std::int32_t> entries;
    for (const Tiling::Range& tile : t.k_tile)
      for (std::int32_t i = tile.begin; i < tile.end; i += kCell) {
        for (std::int32_t j = i; j < std::min(i + kCell, tile.end); ++j) entries.push_back(j);
        std::ranges::sort(std::span(entries).subspan(at(i)), {}, [&](std::int32_t j) { return t.k_names()[at(j)]; });
      }
    const Selection keys{TokenList(std::move(entries)), t.k_tile};
    return with_lists(t, nullptr, &keys, t.met);
  });
}

}  // namespace hilt
