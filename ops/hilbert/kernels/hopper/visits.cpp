// Tiles are merged to owners of up to 128 rows, pairs of them cut into cells of 64 x 64, and masks
// of cells told apart by their bits. Work is proportional to the tiles that are listed.
#include "ops/hilbert/kernels/hopper/visits.h"
#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <span>
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

class Masks {
 public:
  Masks(std::vector<std::uint32_t>& words, std::size_t most) : words_(words), most_(most / 4) {}
  std::uint16_t cell_of(const Bits& bits) {
    if (std::ranges::all_of(bits, [](std::uint64_t row) { return row == 0; })) return Visits::kEmpty;
    if (std::ranges::all_of(bits, [](std::uint64_t row) { return row == ~std::uint64_t{0}; })) return Visits::kFull;
    std::uint64_t hash = 0;
    for (const std::uint64_t row : bits) hash = (hash ^ row) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
    std::vector<Known>& alike = known_[hash];
    for (const Known& known : alike)
      if (known.bits == bits) return known.cell;
    if (words_.size() + Visits::kWords > most_) return compares = true, Visits::kCompare;
    const auto cell = static_cast<std::uint16_t>(Visits::kMasks + words_.size() / Visits::kWords);
    for (std::size_t thread = 0; thread < Visits::kWords; ++thread) words_.push_back(word(bits, thread));
    alike.push_back({bits, cell});
    return cell;
  }
  bool compares = false;  // there was no room for a mask

 private:
  struct Known {
    Bits bits;
    std::uint16_t cell;
  };
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
  std::unordered_map<std::uint64_t, std::vector<Known>> known_;
};

/// Adds a step to the visits of an owner; what continues the last one joins it.
using Run = std::vector<VisitSide::Visit>;
void append(Run& run, std::int32_t row, std::int32_t rows, const std::array<std::uint16_t, 2>& cell) {
  if (!run.empty()) {
    VisitSide::Visit& last = run.back();
    if (last.cell == cell && last.row + last.rows == row && last.rows % kCell == 0 &&
        std::ranges::count(cell, Visits::kCompare) == 0) {
      last.rows += rows;
      return;
    }
  }
  run.push_back({row, rows, cell, 0});
}
/// Moves the visits of an owner behind those of others.
void take(VisitSide& side, Owner& owner, Run& run) {
  owner.first = narrow(side.visit.size()), owner.visits = narrow(run.size());
  for (const VisitSide::Visit& v : run) {
    const std::int32_t steps = (v.rows + kCell - 1) / kCell;
    owner.steps += steps;
    side.cells += Index{steps} * ((v.cell[0] != Visits::kEmpty) + (v.cell[1] != Visits::kEmpty));
  }
  if (!run.empty()) owner.front = run.front();
  side.visit.insert(side.visit.end(), run.begin(), run.end());
  run = {};
}
void count_wide(VisitSide& side) {
  for (const Owner& owner : side.owner) {
    bool any[2][2] = {};
    std::int32_t step = 0;
    for (std::int32_t v = owner.first; v < owner.first + owner.visits; ++v) {
      const VisitSide::Visit& visit = side.visit[at(v)];
      for (std::int32_t row = 0; row < visit.rows; row += kCell, ++step) {
        for (int half = 0; half < 2; ++half) any[step % 2][half] = visit.cell[at(half)] != Visits::kEmpty;
        if (step % 2 == 0 && step + 1 < owner.steps) continue;
        if (step % 2 == 0) any[1][0] = any[1][1] = false;
        for (int half = 0; half < 2; ++half) side.cells_wide += 2 * (any[0][half] || any[1][half]);
      }
    }
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
  for (Owner& owner : side.owner) {
    std::vector<Owner> its(at(side.parts), owner);
    for (Owner& part : its) part.visits = part.steps = 0, part.front = {}, part.number = narrow(&part - its.data());
    std::int32_t step = 0;
    const std::int32_t first = narrow(visits.size());
    for (VisitSide::Visit v : std::span(side.visit).subspan(at(owner.first), at(owner.visits)))
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

/// A listed tile, of an owner of queries and one of keys.
struct Ref {
  std::int32_t keys, q_tile, k_tile;
  bool partial;
};
/// The pairs of two owners, by halves of queries and of keys.
using Quarters = std::array<std::array<Bits, 2>, 2>;

/// Up to 64 keys by a number that each has.
class Ordered {
 public:
  template <class Number> Ordered(std::int32_t n, const Number& number) : n_(n) {
    std::array<std::pair<std::int32_t, std::int32_t>, at(kCell)> order;
    for (std::int32_t j = 0; j < n; ++j) order[at(j)] = {number(j), j};
    std::sort(order.begin(), order.begin() + n);
    for (std::int32_t j = 0; j < n; ++j) {
      number_[at(j)] = order[at(j)].first;
      first_[at(j) + 1] = first_[at(j)] | std::uint64_t{1} << order[at(j)].second;
    }
  }
  /// The keys whose number is not above `high`; and those of them that are not below `low`.
  std::uint64_t up_to(std::int32_t high) const {
    return first_[at(std::upper_bound(number_.begin(), number_.begin() + n_, high) - number_.begin())];
  }
  std::uint64_t within(std::int32_t low, std::int32_t high) const {
    return up_to(high) & ~first_[at(std::lower_bound(number_.begin(), number_.begin() + n_, low) - number_.begin())];
  }

 private:
  std::ptrdiff_t n_;
  std::array<std::int32_t, at(kCell)> number_{};
  std::array<std::uint64_t, at(kCell) + 1> first_{};  // the bits of so many
};

/// attends() for a query and up to 64 keys at a time.
class Keys {
 public:
  Keys(const Tiling& t, std::int32_t row, std::int32_t rows) : t_(t), boxes_(at(t.boxes)) {
    if (t.causal) ranks_.emplace(rows, [&](std::int32_t j) { return t.k_ranks()[at(row + j)]; });
    const auto number = [&](std::size_t axis, std::size_t box, std::int32_t j) {
      return t.axis[axis].key[at(row + j) * boxes_ + box];
    };
    while (axes_ < 3 && !t.axis[axes_].key.empty()) ++axes_;
    for (std::size_t box = 0; box < boxes_; ++box) {
      taken_.push_back(0);
      for (std::size_t axis = 0; axis < axes_; ++axis)
        on_.emplace_back(rows, [&](std::int32_t j) { return number(axis, box, j); });
      for (std::int32_t j = 0; axes_ > 0 && j < rows; ++j)
        taken_[box] |= std::uint64_t{number(0, box, j) == kTaken} << j;
    }
  }
  /// Bits of the keys that query i attends to.
  std::uint64_t of(std::size_t i) const {
    std::uint64_t any = 0;
    for (std::size_t box = 0; box < boxes_; ++box) {
      std::uint64_t met = ~std::uint64_t{0};
      for (std::size_t axis = 0; axis < axes_; ++axis) {
        const Tiling::Axis& its = t_.axis[axis];
        met &= on_[box * axes_ + axis].within(its.low[i * boxes_ + box], its.high[i * boxes_ + box]);
      }
      any |= met | taken_[box];
    }
    return ranks_ ? any & ranks_->up_to(t_.q_ranks()[i]) : any;
  }

 private:
  const Tiling& t_;
  std::size_t boxes_, axes_ = 0;
  std::optional<Ordered> ranks_;
  std::vector<Ordered> on_;  // by box, then axis
  std::vector<std::uint64_t> taken_;
};

class Builder {
 public:
  Builder(const Tiling& t, std::size_t most, Index portion, bool merges)
      : t_(t),
        portion_(portion),
        masks_(out_.mask, most),
        q_(t.q_tile, merges),
        k_(t.k_tile, merges),
        of_keys_(k_.owner.size()),
        keys_(k_.owner.size()) {
    for (Owner& own : q_.owner) visit_keys(own);
    for (std::size_t j = 0; j < k_.owner.size(); ++j) take(out_.keys, k_.owner[j], of_keys_[j]);
    for (const Owner& own : k_.owner)
      for (std::int32_t r = 0; r < own.rows; ++r)
        out_.eights =
            out_.eights && t.k_names()[at(own.row + r)] == (t.k_names()[at(own.row + r / 8 * 8)] & ~7) + r % 8;
    const bool small = std::ranges::all_of(k_.owner, [](const Owner& own) { return own.rows <= kCell; });
    finish(out_.queries, q_.owner, 32), finish(out_.keys, k_.owner, small ? 8 : 32);
  }
  Visits take_visits() { return std::move(out_); }
  bool compares() const { return masks_.compares; }

 private:
  void visit_keys(Owner& own) {
    std::vector<Ref> refs;
    for (std::int32_t tile = own.tile; tile < own.tile + own.tiles; ++tile)
      for (const Tiling::Ref ref : t_.met.of(at(tile)))
        refs.push_back({k_.of[at(ref.tile)], tile, ref.tile, ref.partial});
    std::ranges::stable_sort(refs, {}, &Ref::keys);
    Run run;
    Index owners = 0;
    for (std::size_t first = 0, last; first < refs.size(); first = last, ++owners) {
      for (last = first; last < refs.size() && refs[last].keys == refs[first].keys;) ++last;
      add_visits(own, std::span(refs).subspan(first, last - first), run);
    }
    out_.one_owner = out_.one_owner && owners == 1;
    take(out_.queries, own, run);
  }

  /// All listed tiles of two owners: their cells, once by their queries and once by their keys.
  void add_visits(const Owner& own, std::span<const Ref> refs, Run& run) {
    const Owner& other = k_.owner[at(refs[0].keys)];
    const bool full = refs.size() == 1 && !refs[0].partial && own.tiles == 1 && other.tiles == 1 &&
                      own.rows == Visits::kOwner && other.rows == Visits::kOwner;
    std::array<std::array<std::uint16_t, 2>, 2> by_query{}, by_key{};
    if (full) {
      by_query = by_key = {{{Visits::kFull, Visits::kFull}, {Visits::kFull, Visits::kFull}}};
    } else {
      Quarters bits{};
      for (const Ref& ref : refs) add_pairs(ref, own, other, bits);
      for (std::int32_t a = 0; a < 2; ++a)
        for (std::int32_t b = 0; b < 2; ++b) {
          const std::int32_t rows = std::clamp(own.rows - a * kCell, 0, kCell),
                             columns = std::clamp(other.rows - b * kCell, 0, kCell);
          const Bits& cell = bits[at(a)][at(b)];
          by_query[at(b)][at(a)] = masks_.cell_of(cell);
          by_key[at(a)][at(b)] = masks_.cell_of(transposed(cell));
          for (std::int32_t row = 0; row < rows; ++row) out_.mixed |= cell[at(row)] != ones(columns);
        }
    }
    constexpr std::array<std::uint16_t, 2> kNone{Visits::kEmpty, Visits::kEmpty};
    for (std::int32_t row = 0; row < other.rows; row += kCell)
      if (const auto& cell = by_query[at(row / kCell)]; cell != kNone)
        append(run, other.row + row, std::min(other.rows - row, kCell), cell);
    for (std::int32_t row = 0; row < own.rows; row += kCell)
      if (const auto& cell = by_key[at(row / kCell)]; cell != kNone)
        append(of_keys_[at(refs[0].keys)], own.row + row, std::min(own.rows - row, kCell), cell);
      else out_.one_owner = false;
  }

  void add_pairs(const Ref& ref, const Owner& q, const Owner& k, Quarters& bits) {
    const Tiling::Range rows = t_.q_tile[at(ref.q_tile)], columns = t_.k_tile[at(ref.k_tile)];
    std::vector<Keys>& halves = keys_[at(ref.keys)];
    for (std::int32_t half = 0; ref.partial && half * kCell < k.rows && std::ssize(halves) <= half; ++half)
      halves.emplace_back(t_, k.row + half * kCell, std::min(k.rows - half * kCell, kCell));
    for (std::int32_t half = 0; half * kCell < k.rows; ++half) {
      const std::int32_t first = k.row + half * kCell;
      const std::uint64_t all =
          ones(std::clamp(columns.end - first, 0, kCell)) & ~ones(std::clamp(columns.begin - first, 0, kCell));
      for (std::int32_t i = rows.begin; all != 0 && i < rows.end; ++i)
        bits[at((i - q.row) / kCell)][at(half)][at((i - q.row) % kCell)] |=
            ref.partial ? all & halves[at(half)].of(at(i)) : all;
    }
    if (t_.boxes > kFewBoxes) halves.clear();
  }

  void finish(VisitSide& side, std::vector<Owner>& owners, Index least) {
    side.owner = std::move(owners);
    count_wide(side);
    std::ranges::stable_sort(side.owner, std::greater<>(), &Owner::steps);
    cut(side, least);
    number_masks(side);
  }
  void number_masks(VisitSide& side) const {
    Index n = 0;
    side.portion = {0};
    for (Owner& owner : side.owner) {
      const auto its = std::span(side.visit).subspan(at(owner.first), at(owner.visits));
      const auto compares = [](const VisitSide::Visit& v) { return std::ranges::count(v.cell, Visits::kCompare) > 0; };
      const std::int32_t i = narrow(&owner - side.owner.data());
      if (n + 2 * std::ranges::count_if(its, compares) > portion_ && i > side.portion.back())
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

  const Tiling& t_;
  const Index portion_;
  Visits out_;
  Masks masks_;
  Cut q_, k_;
  std::vector<Run> of_keys_;             // visits of every owner of keys
  std::vector<std::vector<Keys>> keys_;  // of each, by halves; kept where boxes are few
  static constexpr std::int32_t kFewBoxes = 4;
};

/// The columns of a step that a half of an owner meets, and how many pairs that are.
struct Met {
  std::uint64_t columns = 0;
  Index pairs = 0;
};
Met met_in(const Visits& v, std::uint16_t cell, std::int32_t rows, std::int32_t columns) {
  if (cell == Visits::kEmpty) return {};
  if (cell == Visits::kFull) return {ones(columns), Index{rows} * columns};
  Met out;
  for (std::size_t thread = 0; thread < Visits::kWords; ++thread) {
    const std::uint32_t word = v.mask[at(cell - Visits::kMasks) * Visits::kWords + thread];
    out.pairs += std::popcount(word);
    for (std::size_t c = 0; c < 8; ++c)
      out.columns |= std::uint64_t{(word | word >> 16) >> 2 * c & 3} << (8 * c + thread % 4 * 2);
  }
  return out;
}

/// See with_short_lists(); null where they save too little. It stays where it is, as copies forget
/// their visits.
using ShortLists = std::unique_ptr<const Tiling>;
ShortLists short_lists(const Tiling& t, bool keys_own) {
  constexpr Index kMost = 1 << 22;  // rows in all lists
  // Cells have numbers for so many masks.
  constexpr std::size_t kMaskBytes = (std::size_t{1 << 16} - Visits::kMasks) * Visits::kWords * 4;
  const auto side_of = [&](const Visits& v) -> const VisitSide& { return keys_own ? v.keys : v.queries; };
  // Cells that are nearly half full have no fifth to save.
  if (t.axis[0].key.empty() || 9 * kCell * kCell * side_of(visits(t)).cells < 20 * t.pairs) return {};
  const bool compares = visits(t).queries.made + visits(t).keys.made > 0;  // cells whose columns are asked for here
  const Visits& v = compares ? t.memo.get<Visits>({1}, [&] { return visits_of(t, kMaskBytes); }) : visits(t);
  const VisitSide& side = side_of(v);
  if (side.made > 0) return {};
  std::vector<const Owner*> owners(side.owner.size());
  for (std::size_t i = 0; i < owners.size(); ++i) owners[i] = &side.owner[i];
  std::ranges::sort(owners, {}, &Owner::row);
  auto made = std::make_unique<Tiling>(t);
  Tiling& out = *made;
  std::vector<Tiling::Range>& tiles = keys_own ? out.q_tile : out.k_tile;
  tiles.clear();
  Tiling::Lists met;
  std::vector<std::int32_t> entries;
  Index cells = 0;
  for (const Owner* own : owners) {
    std::array<std::vector<std::int32_t>, 3> list;  // rows that the first half meets alone, both, the second alone
    for (std::int32_t i = own->first; i < own->first + own->visits; ++i) {
      const VisitSide::Visit& visit = side.visit[at(i)];
      for (std::int32_t first = 0; first < visit.rows; first += kCell) {
        std::array<std::uint64_t, 2> columns;
        for (std::int32_t half = 0; half < 2; ++half) {
          const std::uint16_t cell = visit.cell[at(half)];
          const std::int32_t rows = std::clamp(own->rows - half * kCell, 0, kCell);
          columns[at(half)] = met_in(v, cell, rows, std::min(visit.rows - first, kCell)).columns;
        }
        for (std::uint64_t any = columns[0] | columns[1]; any != 0; any &= any - 1) {
          const auto column = std::countr_zero(any);
          const bool a = columns[0] >> column & 1, b = columns[1] >> column & 1;
          list[a ? b : 2].push_back(visit.row + first + column);
        }
      }
    }
    const auto before = std::ssize(list[0]), all = before + std::ssize(list[1]) + std::ssize(list[2]);
    const auto steps = [](Index rows) { return (rows + kCell - 1) / kCell; };
    cells += steps(all - std::ssize(list[2])) + steps(all) - before / kCell;
    const auto begin = narrow(entries.size()), tile = narrow(tiles.size());
    for (const auto& part : list) entries.insert(entries.end(), part.begin(), part.end());
    for (std::int32_t row = begin; row < narrow(entries.size()); row += Visits::kOwner)
      tiles.push_back({row, std::min(narrow(entries.size()), row + narrow(Visits::kOwner))});
    for (std::int32_t i = 0; i < own->tiles; ++i) {
      if (narrow(tiles.size()) > tile) met.add(tile, narrow(tiles.size()), true);
      met.end_list();
    }
    if (std::ssize(entries) > kMost) return {};
  }
  if (5 * cells > 4 * side.cells) return {};
  if (keys_own) {
    out.q_token = out.q_name = out.q_rank = {}, out.q_known = {};
    for (Tiling::Axis& axis : out.axis) axis.low.clear(), axis.high.clear();
    add_queries(out, t, TokenList(entries));
    out.met = met.transposed(tiles.size());
  } else {
    out.k_token = out.k_name = out.k_rank = {}, out.k_known = {};
    for (Tiling::Axis& axis : out.axis) axis.key.clear();
    add_keys(out, t, TokenList(entries));
    out.met = std::move(met);
  }
  out.group.clear();
  // attends() knows nothing of pairs in tiles that are not listed, which an owner of several tiles
  // may have.
  const Visits& lists = out.memo.get<Visits>({}, [&] { return visits_of(out, kMaskBytes); });
  const VisitSide& its = side_of(lists);
  if (its.made > 0) return {};
  Index pairs = 0;
  for (const Owner& own : its.owner)
    for (std::int32_t i = own.first; i < own.first + own.visits; ++i)
      for (const VisitSide::Visit& visit = its.visit[at(i)]; const std::int32_t half : {0, 1})
        for (std::int32_t first = 0; first < visit.rows; first += kCell)
          pairs += met_in(lists, visit.cell[at(half)], std::clamp(own.rows - half * kCell, 0, kCell),
                          std::min(visit.rows - first, kCell))
                       .pairs;
  if (pairs != t.pairs || 5 * its.cells > 4 * side.cells) return {};
  return made;
}

}  // namespace

Visits visits_of(const Tiling& t, std::size_t most, Index portion) {
  Builder all(t, most, portion, true);
  // attends() knows nothing of pairs in tiles that are not listed, which merged tiles have.
  return all.compares() ? Builder(t, most, portion, false).take_visits() : all.take_visits();
}

const Visits& visits(const Tiling& t) {
  return t.memo.get<Visits>({}, [&] { return visits_of(t); });
}

const Tiling& with_short_lists(const Tiling& t, bool keys_own) {
  const ShortLists& its = t.memo.get<ShortLists>({keys_own}, [&] { return short_lists(t, keys_own); });
  return its ? *its : t;
}

const Tiling& with_ascending_keys(const Tiling& t) {
  return t.memo.get<Tiling>({}, [&] {
    std::vector<std::int32_t> entries, known;
    for (const Tiling::Range& tile : t.k_tile)
      for (std::int32_t i = tile.begin; i < tile.end; i += kCell) {
        for (std::int32_t j = i; j < std::min(i + kCell, tile.end); ++j) entries.push_back(j);
        std::ranges::sort(std::span(entries).subspan(at(i)), {}, [&](std::int32_t j) { return t.k_names()[at(j)]; });
      }
    Tiling out = t;
    out.k_token = out.k_name = out.k_rank = {};
    for (Tiling::Axis& axis : out.axis) axis.key.clear();
    add_keys(out, t, TokenList(entries));
    for (const std::int32_t j : entries)
      if (!t.k_known.empty()) known.push_back(t.k_known[at(j)]);
    out.k_known = std::move(known);
    return out;
  });
}

}  // namespace hilt
