#pragma once
#include <unordered_map>
#include "tiling.h"

// The mask, the only one. Lists: a Tiling, or what a GPU sees of one.

namespace hilt {

/// A number as what lists are indexed by, and as what they hold.
constexpr std::size_t at(Index i) { return static_cast<std::size_t>(i); }
template <class I> constexpr std::int32_t narrow(I i) { return static_cast<std::int32_t>(i); }
/// How many bits are set. std::popcount() is a call where not every processor has the instruction.
constexpr Index bits_in(std::uint64_t x) {
  x -= x >> 1 & 0x5555555555555555;
  x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
  return static_cast<Index>(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
}

/// What a key has instead of a number on an axis where every query takes it.
constexpr std::int32_t kTaken = -2;

/// What is compared of a query and of a key. Where a tiling has no such test, zeros pass.
struct QueryBounds {
  std::int32_t rank = 0, a_low = 0, a_high = 0, b_low = 0, b_high = 0, c_low = 0, c_high = 0;
};
struct KeyPlace {
  std::int32_t rank = 0, a = 0, b = 0, c = 0;
};

/// The bounds of query i, an index into q_token. A kernel without three axes or unions takes two.
template <int kAxes = 3, class Lists>
[[gnu::always_inline]] constexpr QueryBounds bounds_of(const Lists& t, std::size_t i, std::size_t box = 0) {
  QueryBounds q;
  if (t.causal) q.rank = t.q_ranks()[i];
  if constexpr (kAxes > 2) i = i * static_cast<std::size_t>(t.boxes) + box;
  if (!t.axis[0].key.empty()) q.a_low = t.axis[0].low[i], q.a_high = t.axis[0].high[i];
  if (!t.axis[1].key.empty()) q.b_low = t.axis[1].low[i], q.b_high = t.axis[1].high[i];
  if constexpr (kAxes > 2)
    if (!t.axis[2].key.empty()) q.c_low = t.axis[2].low[i], q.c_high = t.axis[2].high[i];
  return q;
}
/// The place of key j, an index into k_token.
template <int kAxes = 3, class Lists>
[[gnu::always_inline]] constexpr KeyPlace place_of(const Lists& t, std::size_t j, std::size_t box = 0) {
  KeyPlace k;
  if (t.causal) k.rank = t.k_ranks()[j];
  if constexpr (kAxes > 2) j = j * static_cast<std::size_t>(t.boxes) + box;
  if (!t.axis[0].key.empty()) k.a = t.axis[0].key[j];
  if (!t.axis[1].key.empty()) k.b = t.axis[1].key[j];
  if constexpr (kAxes > 2)
    if (!t.axis[2].key.empty()) k.c = t.axis[2].key[j];
  return k;
}
[[gnu::always_inline]] constexpr bool attends(const QueryBounds& q, const KeyPlace& k) {
  return k.rank <= q.rank && (k.a == kTaken || (k.a >= q.a_low && k.a <= q.a_high && k.b >= q.b_low &&
                                                k.b <= q.b_high && k.c >= q.c_low && k.c <= q.c_high));
}

/// Whether query i of a tiling attends to key j, for pairs of listed tiles: others have none.
template <class Lists> [[gnu::always_inline]] constexpr bool attends(const Lists& t, std::size_t i, std::size_t j) {
  bool any = false;
  for (std::size_t box = 0; box < static_cast<std::size_t>(t.boxes) && !any; ++box)
    any = attends(bounds_of(t, i, box), place_of(t, j, box));
  return any;
}

/// attends() for a run of queries and up to 64 keys at a time. What is made of the keys stays.
class PairBits {
 public:
  explicit PairBits(const Tiling& t) : t_(t) {}
  using Words = std::array<std::uint64_t, Tiling::kTile>;
  /// A word for each query, whose bit j says that it attends to key first + j; always as many keys.
  void find(Tiling::Range q, Index first, Index keys, Words& words);
  /// How many pairs attend, or some number from `most` on. They must all be of listed tiles.
  Index count(Tiling::Range q, Tiling::Range k, Index most = 1 << 30);

 private:
  struct Ordered {  // on an axis, or by rank
    explicit Ordered(const std::vector<std::int32_t>& of_key);
    std::uint64_t up_to(Index high) const;  // the keys whose number is not above
    Index low, span;
    std::vector<std::int32_t> number;  // ascending; empty: each from low on
    std::vector<std::uint64_t> first;  // the keys of those in front
  };
  struct Keys {
    Keys(const Tiling& t, Index first, Index keys);
    std::size_t axes = 0;
    std::vector<Ordered> on;           // by box and axis, and behind them by rank
    std::vector<std::uint64_t> taken;  // by box
  };
  const Tiling& t_;
  std::unordered_map<Index, Keys> keys_;  // by the first
};

/// How entries differ from those that they were: their rows, names and numbers on the first axis,
/// by so much.
struct Moved {
  std::int32_t row = 0, name = 0, number = 0;
};
/// Where a tiling has what it says of one side.
struct Side {
  TokenList Tiling::*token, Tiling::*name, Tiling::*rank;
  std::vector<Tiling::Range> Tiling::*tile;
  std::vector<std::int32_t> Tiling::*known;
  std::vector<std::vector<std::int32_t> Tiling::Axis::*> on_axis;
};
extern const Side kQueries, kKeys;
/// Appends entries of a side of another tiling, and all that is told of them; null: all, with the
/// tiles that they are in.
void select(const Side& side, Tiling& to, const Tiling& from, const TokenList* entries = nullptr, const Moved& by = {});

/// Entries of a tiling's queries, or of its keys, and the tiles that these are cut into.
struct Selection {
  TokenList entries;
  std::vector<Tiling::Range> tiles;
};
/// The same pairs with queries, or keys, in other lists; null: in the list and the tiles that they
/// have. `met` is that of the new tiles.
Tiling with_lists(const Tiling& t, const Selection* queries, const Selection* keys, Tiling::Lists met);

}  // namespace hilt
