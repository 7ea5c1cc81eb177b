#pragma once
#include "ops/hilbert/kernels/hopper/visits.h"

// Private: who adds to a tile of dQ when, where owners of keys go back in one pass.

namespace hilt::kernels::hopper {

/// Owners of keys, in the order in which they begin, and the tiles of queries that each meets, in
/// its own order. Parts of dQ are added up in the order of ranks: an owner's rank at a tile is how
/// many owners before it meet that tile, which follows from the set alone, not from batch, heads
/// or GPU. An owner waits only for owners before it, so the first of those that are under way waits
/// for nobody: if blocks take owners in order, one can always go on, however few there are.
struct Schedule {
  /// A tile of queries: one step of an owner of queries, or both.
  struct alignas(16) Meeting {
    std::int32_t row, rows;
    std::uint32_t turn;  // rank and flags
    std::int32_t tile;
    std::array<std::array<std::uint16_t, 2>, 2> cell{};  // of each step, for each half of the owner's keys
    // In a kernel, where `tile` is one of all calls': batch and head, and which owner's; of turn,
    // the first and the last of an item, and that there is none.
    std::int32_t place = 0, item = 0;
    static constexpr std::uint32_t kFirst = 8, kEnd = 16, kStop = 32;
    constexpr int batch() const { return place >> 8; }
    constexpr int head() const { return place & 0xff; }
  };
  static_assert(sizeof(Meeting) == 32);        // the kernel reads two times sixteen bytes
  static constexpr std::uint32_t kLast = 1;    // no rank is higher
  static constexpr std::uint32_t kMasked = 2;  // << h: half h has cells that are not full
  static constexpr int kRankShift = 6;

  std::vector<VisitSide::Owner> owner;  // those of keys; `first`, `visits` and `steps` count meetings
  std::vector<Meeting> meeting;
  Index tiles = 0;  // of queries
};
/// With tiles of so many queries, 64 or 128.
Schedule schedule_of(const Visits& visits, Index queries);

/// In which order blocks take the owners of all calls (a head of a batch): those of a call in their
/// own order, one a slot, for owners that begin together wait for each other; every `stagger` slots
/// `together` calls begin. No bit of a result depends on it.
struct Dispatch {
  int calls = 0, owners = 0, together = 1, stagger = 1, bundles = 0, width = 0;
  int size = 0;  // of numbers that at() takes; some stand for nothing
  /// `meetings`: of a call.
  constexpr Dispatch(Index its_calls, Index its_owners, Index meetings, Index blocks)
      : calls(static_cast<int>(its_calls)),
        owners(static_cast<int>(its_owners)),
        together(static_cast<int>(std::min(its_calls, (kSlot * blocks + meetings - 1) / meetings))),
        stagger(its_calls * its_owners <= kFew * blocks
                    ? 1
                    : static_cast<int>(std::clamp<Index>(meetings / (kSlot * blocks), 1, its_owners))),
        bundles((calls + together - 1) / together),
        width(std::min(bundles, (owners + stagger - 1) / stagger)),
        size((stagger * (bundles - 1) + owners) * width * together) {}
  constexpr Dispatch() = default;
  constexpr bool at(int i, int& call, int& owner) const {
    const int slot = i / (width * together), newest = std::min(slot / stagger, bundles - 1),
              bundle = newest - i / together % width;
    call = bundle * together + i % together, owner = slot - stagger * bundle;
    return bundle >= 0 && call < calls && owner < owners;
  }
  static constexpr Index kSlot = 3;  // meetings from one owner to the next: longer than a part takes to be added
  static constexpr Index kFew = 4;   // rounds of blocks, so few that all calls begin at once
};

}  // namespace hilt::kernels::hopper
