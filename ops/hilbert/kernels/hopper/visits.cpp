// Tiles are merged to owners of up to 128 rows, pairs of them cut into cells of 64 x 64, and masks
// of cells told apart by their bits. Work is proportional to the tiles that are listed.
#include "ops/hilbert/kernels/hopper/visits.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/plan/attends.h"

namespace hilt {
namespace {

using Owner = VisitSide::Owner;
constexpr std::int32_t kCell = Visits::kCell;

/// Owners of a list, that of each tile, and the end of the tiles behind it that own as many rows.
struct Cut {
  std::vector<Owner> owner;
  std::vector<std::int32_t> of, alike;
  Cut(const std::vector<Tiling::Range>& tiles, bool merges) {
    for (const Tiling::Range& r : tiles) {
      if (owner.empty() || !merges || r.end - owner.back().row > Visits::kOwner)
        owner.push_back({r.begin, 0, 0, 0, 0, narrow(of.size()), 0, 0, {}});
      owner.back().rows = r.end - owner.back().row, ++owner.back().tiles;
      of.push_back(narrow(owner.size() - 1)), alike.push_back(narrow(of.size()));
    }
    for (std::size_t i = of.size(); i-- > 1;) {
      const Owner &a = owner[at(of[i - 1])], &b = owner[at(of[i])];
      if (a.tiles == 1 && b.tiles == 1 && a.rows == b.rows) alike[i - 1] = alike[i];
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
  std::size_t operator()(const auto& list) const {
    std::size_t sum = list.size();
    for (const auto x : list) sum = (sum ^ static_cast<std::size_t>(x)) * 0x9e3779b97f4a7c15;
    return sum;
  }
};

/// A cell, the same with sides changed, how many pairs it has, and the columns and rows of these.
struct MaskedCell {
  std::uint16_t cell, turned;
  Index pairs = 0;
  std::uint64_t columns = 0, rows = 0;
};
// Cells have numbers for so many masks.
constexpr std::size_t kMaskBytes = (std::size_t{1 << 16} - Visits::kMasks) * Visits::kWords * 4;
class Masks {
 public:
  Masks(std::vector<std::uint32_t>& words, std::size_t most)
      : stops(most == kMaskBytes), words_(words), most_(most == kAllCompared ? 0 : most / 4) {
    Bits full;
    full.fill(~std::uint64_t{0});
    cells_ = {{Bits{}, {Visits::kEmpty, Visits::kEmpty}}};
    if (most != kAllCompared) cells_[full] = {Visits::kFull, Visits::kFull, kCell * kCell, full[0], full[0]};
  }
  MaskedCell cell_of(const Bits& bits) {
    if (const auto known = cells_.find(bits); known != cells_.end()) return known->second;
    MaskedCell made{number_of(bits), Visits::kCompare};
    for (const std::uint64_t row : bits) made.pairs += bits_in(row), made.columns |= row;
    for (std::size_t i = 0; i < bits.size(); ++i) made.rows |= std::uint64_t{bits[i] != 0} << i;
    if (made.cell == Visits::kCompare) return made;  // as all will be that come
    const Bits other = transposed(bits);
    made.turned = other == bits ? made.cell : number_of(other);
    cells_[other] = {made.turned, made.cell, made.pairs, made.rows, made.columns};
    return cells_[bits] = made;
  }
  bool compares = false, stops;  // there was no room for a mask; then nobody needs the others

 private:
  std::uint16_t number_of(const Bits& bits) {
    if (words_.size() + Visits::kWords > most_) return compares = true, Visits::kCompare;
    const auto cell = static_cast<std::uint16_t>(Visits::kMasks + words_.size() / Visits::kWords);
    for (std::size_t row = 0; row < bits.size(); row += row % 8 == 7 ? 9 : 1)
      for (int pair = 0; pair < 8; pair += 2)
        words_.push_back(pairs_of(bits[row] >> pair) | pairs_of(bits[row + 8] >> pair) << 16);
    return cell;
  }
  static std::uint32_t pairs_of(std::uint64_t x) {  // two bits of each byte, brought together
    x &= 0x0303030303030303, x = (x | x >> 6) & 0x000f000f000f000f, x = (x | x >> 12) & 0x000000ff000000ff;
    return static_cast<std::uint32_t>((x | x >> 24) & 0xffff);
  }
  std::vector<std::uint32_t>& words_;
  std::size_t most_;
  std::unordered_map<Bits, MaskedCell, Hash> cells_;
};

/// The cells of an owner's halves with half of the other side's rows, and, on axes, what they meet.
struct HalfCells {
  std::array<std::uint16_t, 2> cell{};
  std::array<std::uint64_t, 2> met{};
};
/// What two owners have in common.
struct Met {
  std::array<HalfCells, 2> by_query{}, by_key{};
  Index pairs = 0;
};
/// Adds steps to the visits of the last owner of a side; what continues the last one joins it.
void append(VisitSide& side, const Owner& own, std::int32_t row, std::int32_t rows, const HalfCells& half) {
  if (std::ssize(side.visit) > own.first && std::ranges::count(half.cell, Visits::kCompare) == 0)
    if (VisitSide::Visit& last = side.visit.back();
        last.cell == half.cell && last.row + last.rows == row && last.rows % kCell == 0)
      return void(last.rows += rows);
  side.visit.push_back({row, rows, half.cell, 0});
  if ((half.met[0] | half.met[1]) != 0) side.met.push_back(half.met);
}
/// The same with others that follow each other, each with these cells; without pairs it is no step.
void append(VisitSide& side, const Owner& own, std::span<const Owner> others, const std::array<HalfCells, 2>& half) {
  const bool alike = half[0].cell == half[1].cell && std::ranges::count(half[0].cell, Visits::kCompare) == 0;
  if (const Owner& first = others[0]; alike && first.rows == Visits::kOwner)
    return append(side, own, first.row, narrow(std::ssize(others)) * first.rows, half[0]);
  for (const Owner& other : others)
    for (std::int32_t row = 0; row < other.rows; row += kCell)
      if (half[at(row / kCell)].cell != std::array<std::uint16_t, 2>{})
        append(side, own, other.row + row, std::min(other.rows - row, kCell), half[at(row / kCell)]);
}
/// Counts the steps and cells of an owner whose visits are all there.
void count_steps(VisitSide& side, Owner& own) {
  own.visits = narrow(std::ssize(side.visit)) - own.first;
  std::array<std::int32_t, 2> met{-1, -1};  // by the halves: the last pair of steps
  for (const VisitSide::Visit& visit : side.of(own)) {
    const std::int32_t first = own.steps / 2, steps = (visit.rows + kCell - 1) / kCell;
    own.steps += steps;
    const std::int32_t last = (own.steps - 1) / 2;
    for (std::size_t half = 0; half < 2; ++half)
      if (visit.cell[half] != Visits::kEmpty)
        side.cells += steps, side.cells_wide += 2 * (last - std::max(first - 1, met[half])), met[half] = last;
  }
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
  std::vector<std::array<std::uint64_t, 2>> met;
  for (Owner& owner : side.owner) {
    std::vector<Owner> its(at(side.parts), owner);
    for (Owner& part : its) part.visits = part.steps = 0, part.number = narrow(&part - its.data());
    std::int32_t step = 0, taken = 0, first = narrow(visits.size());
    for (std::int32_t number = owner.first, end = number + owner.visits; number < end; ++number)
      for (VisitSide::Visit v = side.visit[at(number)]; v.rows > 0; v.row += taken, v.rows -= taken) {
        Owner& part = its[at(step / each)];
        if (part.visits++ == 0) part.first = narrow(visits.size());
        taken = std::min(v.rows, (each - part.steps) * kCell);
        visits.push_back({v.row, taken, v.cell, v.mask});
        if (!side.met.empty()) met.push_back(side.met[at(number)]);
        part.steps += (taken + kCell - 1) / kCell, step += (taken + kCell - 1) / kCell;
      }
    owner.first = first, owner.visits = narrow(visits.size()) - first;
    side.part.insert(side.part.end(), its.begin(), its.end());
  }
  side.visit = std::move(visits), side.met = std::move(met);
  std::ranges::stable_sort(side.part, std::greater<>(), &Owner::steps);
}

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
    List its, before;
    for (const Owner& own : owners) {
      const std::size_t begin = at(own.row), end = begin + at(own.rows);
      its = {own.rows};
      if (t.causal) first.push_back(ranks[begin]);
      for (auto i = begin; t.causal && !ranks.counts_up() && i < end; ++i) its.push_back(ranks[i] - ranks[begin]);
      for (const Tiling::Axis& axis : t.axis)
        for (std::size_t box = 0; !axis.key.empty() && box < boxes; ++box) {
          const std::int32_t *from = (asking ? axis.low : axis.key).data() + box, base = from[begin * boxes];
          first.push_back(base);
          std::size_t to = its.size();
          its.resize(to + (end - begin) * (1 + asking));
          for (std::size_t i = begin * boxes; i < end * boxes; i += boxes) {
            its[to++] = !asking && from[i] == kTaken ? kTakenHere : from[i] - base;
            if (asking) its[to++] = axis.high[i + box] - base;
          }
        }
      number.push_back(its == before ? number.back() : known.try_emplace(its, narrow(known.size())).first->second);
      before.swap(its);
    }
    comparisons = owners.empty() ? 0 : first.size() / owners.size();
  }
};

/// Owners of queries and of keys, and the pairs that they have in the tiles that are listed.
class OwnerWalk {
 public:
  OwnerWalk(const Tiling& t, bool merges, Masks& masks)
      : queries(t.q_tile, merges), keys(t.k_tile, merges), t_(t), masks_(masks) {
    if (t.met.partial > 0) shapes_.emplace_back(t, queries.owner, true), shapes_.emplace_back(t, keys.owner, false);
  }
  Cut queries, keys;

  /// Fills in the visits of a side. f(number of an owner, the first of some of the other side, how
  /// many, what it and each have in common), ascending; what is alike is made once.
  template <class F> void fill(VisitSide& side, bool keys_own, const F& f) {
    Cut& ours = keys_own ? keys : queries;
    const Cut& others = keys_own ? queries : keys;
    const Tiling::Lists lists = keys_own ? t_.met.transposed(t_.k_tile.size()) : t_.met;
    std::vector<ListedTile> listed;
    List key;
    for (std::size_t i = 0; i < ours.owner.size(); ++i) {
      if (masks_.stops && masks_.compares) return;  // short lists of more masks are not taken
      Owner& own = ours.owner[i];
      own.first = narrow(side.visit.size()), listed.clear();
      for (std::int32_t tile = own.tile; tile < own.tile + own.tiles; ++tile)
        for (std::int32_t r = lists.begin[at(tile)]; r < lists.begin[at(tile) + 1]; ++r) {
          const auto [begin, end, partial] = lists.run[at(r)];
          for (std::int32_t j = begin; j < end; j = listed.back().end) {
            const bool alone = own.tiles > 1 || partial;
            listed.push_back({at(others.of[at(j)]), keys_own ? j : tile, keys_own ? tile : j,
                              alone ? j + 1 : std::min(others.alike[at(j)], end), partial});
          }
        }
      if (own.tiles > 1) std::ranges::sort(listed);
      for (std::size_t first = 0, end = 0; first < listed.size(); first = end) {
        const std::size_t other = listed[first].owner, q = keys_own ? other : i, k = keys_own ? i : other;
        while (end < listed.size() && listed[end].owner == other) ++end;
        const std::span its = std::span(listed).subspan(first, end - first);
        name(key, q, k, its);
        const auto [known, fresh] = known_.try_emplace(key);
        Met& met = known->second;
        if (fresh) met = made(queries.owner[q], keys.owner[k], its);
        const auto alike = std::span(others.owner).subspan(other, at(others.of[at(its.back().end - 1)]) + 1 - other);
        append(side, own, alike, keys_own ? met.by_key : met.by_query);
        f(i, other, std::ssize(alike), met);
      }
      count_steps(side, own);
    }
  }

 private:
  struct ListedTile {
    std::size_t owner;                 // of the other side
    std::int32_t q_tile, k_tile, end;  // behind those of the other side that are met alike
    bool partial;
    auto operator<=>(const ListedTile&) const = default;
  };
  /// All that the pairs of two owners depend on.
  void name(List& key, std::size_t q, std::size_t k, std::span<const ListedTile> listed) const {
    const Owner &a = queries.owner[q], &b = keys.owner[k];
    const bool tiles = a.tiles > 1 || b.tiles > 1;  // and which of them: where each begins and ends, in one number
    key = {tiles, a.rows, b.rows};
    for (const ListedTile& its : listed.first(tiles ? listed.size() : 0)) {
      const Tiling::Range x = t_.q_tile[at(its.q_tile)], y = t_.k_tile[at(its.k_tile)];
      key.push_back((x.begin - a.row) << 24 | (x.end - a.row) << 16 | (y.begin - b.row) << 9 | (y.end - b.row) << 1 |
                    its.partial);
    }
    if (std::ranges::none_of(listed, &ListedTile::partial)) return;
    key.insert(key.end(), {shapes_[0].number[q], shapes_[1].number[k]});
    for (std::size_t i = 0, n = shapes_[0].comparisons; i < n; ++i)
      key.push_back(shapes_[0].first[q * n + i] - shapes_[1].first[k * n + i]);
  }
  Met made(const Owner& q, const Owner& k, std::span<const ListedTile> listed) {
    std::array<PairBits::Words, 2> pairs{};  // by halves of keys
    for (const ListedTile& tile : listed) {
      const Tiling::Range rows = t_.q_tile[at(tile.q_tile)], columns = t_.k_tile[at(tile.k_tile)];
      for (std::int32_t half = 0; half * kCell < k.rows; ++half) {
        const std::int32_t first = k.row + half * kCell;
        const std::uint64_t all =
            ones(std::clamp(columns.end - first, 0, kCell)) & ~ones(std::clamp(columns.begin - first, 0, kCell));
        PairBits::Words words;
        if (tile.partial && all != 0) bits_.find(rows, first, std::min(k.rows - half * kCell, kCell), words);
        else words.fill(all);
        std::uint64_t* const its = &pairs[at(half)][at(rows.begin - q.row)];
        for (std::size_t i = 0; i < at(rows.end - rows.begin); ++i) its[i] |= all & words[i];
      }
    }
    Met met{};
    for (std::size_t a = 0; a < 2; ++a)
      for (std::size_t b = 0; b < 2; ++b) {
        Bits bits;
        std::copy_n(pairs[b].begin() + kCell * a, kCell, bits.begin());
        const MaskedCell its = masks_.cell_of(bits);
        met.by_query[b].cell[a] = its.cell, met.by_key[a].cell[b] = its.turned, met.pairs += its.pairs;
        if (!t_.axis[0].key.empty()) met.by_query[b].met[a] = its.columns, met.by_key[a].met[b] = its.rows;
      }
    return met;
  }

  const Tiling& t_;
  Masks& masks_;
  std::vector<Shapes> shapes_;  // of queries, of keys; where tiles are partial
  std::unordered_map<List, Met, Hash> known_;
  PairBits bits_{t_};
};

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

/// Queries by owners of three halves, if rows and steps are whole, no cell is compared, and stages
/// of two steps become fewer by a tenth.
VisitSide by_threes(const VisitSide& side) {
  constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
  struct Half {
    const Owner* own;
    std::int32_t row, taken;  // taken: rows of the first visit that is left
    std::span<const VisitSide::Visit> left;
    std::int32_t next() const { return left.empty() ? kNone : left[0].row + taken; }
  };
  VisitSide out;
  std::vector<Half> halves;
  Index before = 0, after = 0;  // stages
  for (const Owner& own : side.owner) {
    before += (own.steps + 1) / 2;
    if (own.rows % kCell != 0) return {};
    for (const VisitSide::Visit& v : side.of(own))
      if (v.rows % kCell != 0 || std::ranges::count(v.cell, Visits::kCompare) > 0) return {};
    for (std::int32_t row = 0; row < own.rows; row += kCell) halves.push_back({&own, own.row + row, 0, side.of(own)});
  }
  std::ranges::sort(halves, {}, &Half::row);
  for (std::size_t first = 0; first < halves.size(); first += 3) {
    const auto its = std::span(halves).subspan(first, std::min<std::size_t>(3, halves.size() - first));
    const std::int32_t tile = its[0].own->tile, end = its.back().own->tile + its.back().own->tiles;
    Owner own{its[0].row, narrow(std::ssize(its)) * kCell, narrow(std::ssize(out.visit)), 0, 0, tile, end - tile, 0,
              {}};
    for (std::int32_t row; (row = std::ranges::min(its, {}, &Half::next).next()) != kNone;) {
      VisitSide::Visit visit{row, kNone, {}, 0};
      for (const Half& h : its)
        if (!h.left.empty())
          visit.rows = std::min(visit.rows, h.next() > row ? h.next() - row : h.left[0].rows - h.taken);
      for (std::size_t i = 0; i < its.size(); ++i) {
        Half& h = its[i];
        if (h.next() != row) continue;
        const auto cell = h.left[0].cell[at((h.row - h.own->row) / kCell)];
        if (i < 2) visit.cell[i] = cell;
        else visit.mask = cell;
        if ((h.taken += visit.rows) == h.left[0].rows) h.left = h.left.subspan(1), h.taken = 0;
      }
      out.visit.push_back(visit), ++own.visits;
      own.steps += visit.rows / kCell;
    }
    after += (own.steps + 1) / 2, out.owner.push_back(own);
  }
  if (10 * after > 9 * before) return {};
  std::ranges::stable_sort(out.owner, std::greater<>(), &Owner::steps);
  out.cells = side.cells;
  return out;
}

}  // namespace

Visits visits_of(const Tiling& t, std::size_t most, Index portion, bool merges) {
  Visits out;
  Masks masks(out.mask, most);
  OwnerWalk walk(t, merges, masks);
  std::vector<Owner>&queries = walk.queries.owner, &keys = walk.keys.owner;
  std::vector<int> halves(queries.size());  // that some key meets, as bits
  walk.fill(out.queries, false, [&](std::size_t q, std::size_t k, Index n, const Met& met) {
    const Index rows = queries[q].rows;
    out.pairs += n * met.pairs;
    out.mixed = out.mixed || most == kAllCompared || met.pairs != rows * keys[k].rows;
    const auto meet = [&](std::size_t tiles, bool full, bool whole) {
      out.meetings[tiles] += n, out.masked[tiles] += full ? 0 : n, out.partial[tiles] += whole ? 0 : n;
    };
    meet(1, met.pairs == Visits::kOwner * Visits::kOwner, rows == Visits::kOwner);
    for (int half = 0; half < 2; ++half)
      if (const auto& cell = met.by_key[at(half)].cell; cell[0] != Visits::kEmpty || cell[1] != Visits::kEmpty) {
        meet(0, cell[0] == Visits::kFull && cell[1] == Visits::kFull, rows >= (half + 1) * kCell);
        halves[q] |= 1 << half;
      }
  });
  // attends() knows nothing of pairs in tiles that are not listed, which merged tiles have.
  if (masks.compares && (queries.size() < t.q_tile.size() || keys.size() < t.k_tile.size()))
    return visits_of(t, most, portion, false);
  walk.fill(out.keys, true, [](auto...) {});
  bool halves_meet = true;
  for (std::size_t q = 0; q < queries.size(); ++q)
    halves_meet = halves_meet && halves[q] == (queries[q].rows > kCell ? 3 : 1);
  out.complete[1] = std::ranges::count(keys, 0, &Owner::visits) == 0 && std::ranges::count(halves, 0) == 0;
  out.complete[0] = out.complete[1] && halves_meet;
  out.one_owner = halves_meet && out.meetings[1] == std::ssize(queries);
  const TokenList& names = t.k_names();
  for (const Owner& own : keys)  // of names that count up, the first says it of all
    for (std::int32_t r = 0; out.eights && r < own.rows; r += names.counts_up() ? own.rows : 1)
      out.eights = names[at(own.row + r)] == (names[at(own.row + r / 8 * 8)] & ~7) + r % 8;
  const bool small = std::ranges::all_of(keys, [](const Owner& own) { return own.rows <= kCell; });
  const auto finish = [&](VisitSide& side, std::vector<Owner>& its, Index least) {
    side.owner = std::move(its);
    std::ranges::stable_sort(side.owner, std::greater<>(), &Owner::steps);
    cut(side, least), number_masks(side, portion);
  };
  finish(out.queries, queries, 32), finish(out.keys, keys, small ? 8 : 32);
  if (t.q_token.counts_up() && t.k_token.counts_up() && out.queries.part.empty() && out.queries.portion.size() == 2)
    out.threes = by_threes(out.queries), number_masks(out.threes, portion);
  return out;
}

/// See with_short_lists(); null where they save too little. A copy would have none of its visits.
static std::unique_ptr<const Tiling> short_lists(const Tiling& t, bool keys_own) {
  const auto side_of = [&](const Visits& v) -> const VisitSide& { return keys_own ? v.keys : v.queries; };
  // Cells that are nearly half full have no fifth to save.
  if (t.axis[0].key.empty() || 9 * kCell * kCell * side_of(visits(t)).cells < 20 * t.pairs) return {};
  const VisitSide& side = side_of(visits(t));
  Index before = side.cells, after = 0;
  std::vector<Owner> owners = side.owner;
  std::ranges::sort(owners, {}, &Owner::row);
  Selection list;
  Tiling::Lists tiles;
  List entries;
  entries.reserve(at(std::min<Index>(before * kCell, 1 << 22)));
  std::array<List, 3> met;  // rows that an owner's first half meets alone, both, its second half alone
  for (const Owner& own : owners) {
    for (List& rows : met) rows.clear();
    for (const VisitSide::Visit& visit : side.of(own)) {
      const auto [first, second] = side.met[at(&visit - side.visit.data())];
      for (std::int32_t row = visit.row; row < visit.row + visit.rows; row += kCell)
        for (std::uint64_t any = first | second; any != 0; any &= any - 1) {
          const int column = std::countr_zero(any);
          met[first >> column & 1 ? second >> column & 1 : 2].push_back(row + column);
        }
    }
    const auto alone = std::ssize(met[0]), first = alone + std::ssize(met[1]), all = first + std::ssize(met[2]);
    const auto steps = [](Index rows) { return (rows + kCell - 1) / kCell; };
    after += steps(first) + steps(all) - alone / kCell;
    std::int32_t tile = narrow(list.tiles.size()), row = narrow(entries.size());
    for (const List& rows : met) entries.insert(entries.end(), rows.begin(), rows.end());
    for (const auto last = narrow(entries.size()); row < last; row = list.tiles.back().end)
      list.tiles.push_back({row, std::min(last, row + narrow(Visits::kOwner))});
    for (std::int32_t n = own.tiles; n > 0; --n, tiles.end_list())
      if (const auto end = narrow(list.tiles.size()); end > tile) tiles.add(tile, end, true);
    if (entries.size() > 1 << 22) return {};
  }
  if (5 * after > 4 * before) return {};
  list.entries = TokenList(std::move(entries));
  if (keys_own) tiles = tiles.transposed(list.tiles.size());
  auto made = std::make_unique<const Tiling>(
      with_lists(t, keys_own ? &list : nullptr, keys_own ? nullptr : &list, std::move(tiles)));
  const Visits& lists = made->memo.get<Visits>({}, [&] { return visits_of(*made, kMaskBytes); });
  // An owner of several tiles may have pairs in tiles that are not listed: see visits_of().
  const Index cells = side_of(lists).cells;  // none: masks ran out before they began
  if (side_of(lists).made > 0 || lists.pairs != t.pairs || cells == 0 || 5 * cells > 4 * before) return {};
  return made;
}

const Visits& visits(const Tiling& t) {
  return t.memo.get<Visits>({}, [&] { return visits_of(t); });
}

const Tiling& with_short_lists(const Tiling& t, bool keys_own) {
  const auto& its = t.memo.get<std::unique_ptr<const Tiling>>({keys_own}, [&] { return short_lists(t, keys_own); });
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

const Tiling& kernels::with_ranks_of_call(const Tiling& t) {
  return *t.memo.get<std::unique_ptr<const Tiling>>({-1}, [&] {
    auto made = std::make_unique<Tiling>(t);
    for (Tiling::Run& run : made->met.run) run.partial = true;
    made->met.partial += std::exchange(made->met.full, 0);
    (void)made->memo.get<Visits>({}, [&] { return visits_of(*made, kAllCompared); });
    return std::unique_ptr<const Tiling>(std::move(made));
  });
}

}  // namespace hilt
