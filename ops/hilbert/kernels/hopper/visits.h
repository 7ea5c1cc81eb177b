#pragma once
#include "ops/hilbert/plan/tiling.h"

// A tiling as kernels walk it whose tiles have 128 rows: who owns what, whom it visits in steps of
// 64 rows, and which pairs of those attend, as bits.

namespace hilt {

/// One direction: owners are runs of queries that visit keys, or runs of keys that visit queries.
struct VisitSide {
  /// Rows of the other side, a step for every 64 of them, all with the same cells: one for each
  /// half of the owner's rows.
  struct Visit {
    std::int32_t row, rows;
    std::array<std::uint16_t, 2> cell;
    std::int32_t mask;  // where a cell is compared, the number of the first half's mask; of threes the third cell
  };
  /// Whole tiles that follow each other, together at most 128 rows, or with threes some of those of
  /// up to 192 rows, which may reach beyond them; its visits are
  /// visit[first, first + visits), `steps` steps in all, and the first of them stands here too, so
  /// that one load finds what there is to do.
  struct Owner {
    std::int32_t row, rows, first, visits, steps, tile, tiles, number;  // number: of a part, see `part`
    Visit front;
  };
  std::vector<Owner> owner;  // the ones with the most steps first
  /// Where few owners have many steps: the same, `parts` of each, which have a part of its visits.
  /// Each begins with a visit of its own; some have none. The sums of an owner's parts are added.
  std::vector<Owner> part;
  Index parts = 1;
  std::vector<Visit> visit;
  std::vector<std::array<std::uint64_t, 2>> met;  // of each, on axes: the rows of a step that its halves meet
  std::span<const Visit> of(const Owner& own) const {
    return std::span(visit).subspan(static_cast<std::size_t>(own.first), static_cast<std::size_t>(own.visits));
  }
  Index cells = 0;       // that are not empty
  Index cells_wide = 0;  // in pairs of steps of which one is not empty
  /// Owners portion[i] .. portion[i + 1] - 1 have at most `made` masks that a call makes; these
  /// count from 0.
  std::vector<std::int32_t> portion;
  Index made = 0;
};

struct Visits {
  static constexpr Index kOwner = 128, kCell = 64, kWords = 128;
  static constexpr Index kFewOwners = 8, kParts = 32;  // at most, where owners have parts
  static constexpr Index kPortion = 1 << 17;           // masks, of 512 bytes, that a call makes at a time
  /// A cell is 64 rows of an owner and 64 of a step. From kMasks on it is the number of its mask
  /// plus kMasks. kCompare: a plan had no room for its bits, and each call makes them.
  enum Cell : std::uint16_t { kEmpty, kFull, kCompare, kMasks };

  VisitSide queries, keys;  // by owner
  VisitSide threes;         // of queries by owners of three halves, or of none: see visits.cpp
  /// kWords words a cell, one for each of the 128 threads that hold 64 x 64 scores: bit
  /// 16 h + 2 c + j of word 32 w + l is row 16 w + l / 4 + 8 h and column 8 c + 2 (l % 4) + j. What
  /// lies beyond the rows of either does not attend.
  std::vector<std::uint32_t> mask;
  Index pairs = 0;        // that attend, as cells say; of cells that are compared, in listed tiles
  bool mixed = false;     // an owner's steps hold rows that some of its own rows do not attend to
  bool one_owner = true;  // every query is visited, and by one owner of keys alone
  /// Tiles of 64 queries, and of 128, that owners of keys meet: all, those with a cell that is not
  /// full, those of fewer queries; whether each is met, and every owner meets one.
  std::array<Index, 2> meetings{}, masked{}, partial{};
  std::array<bool, 2> complete{};
  bool eights = true;  // of keys: row r of an owner has the name of row r - r % 8, a multiple of 8, plus r % 8
};
/// The same set with the keys of half a tile in ascending order, which they need not have of their
/// own: eight in a row then share the bits that drop their weights. Made once.
const Tiling& with_ascending_keys(const Tiling& t);
/// What Hopper's kernels walk where queries, or keys, are owned: the tiling, or, where that saves a
/// fifth of the cells, the same set in which each owner has a list of its own of the other side's
/// rows, those alone that some row of the owner meets. Made once.
const Tiling& with_short_lists(const Tiling& t, bool keys_own);
constexpr std::size_t kAllCompared = ~std::size_t{0};  // bytes of masks: none, and no cell is full
/// Equal masks are kept once, at most `most` bytes of them. Owners may have several tiles where it
/// `merges`.
Visits visits_of(const Tiling& t, std::size_t most = std::size_t{1} << 20, Index portion = Visits::kPortion,
                 bool merges = true);
/// Made once.
const Visits& visits(const Tiling& t);

}  // namespace hilt
