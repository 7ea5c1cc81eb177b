#pragma once
#include <compare>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "curve.h"

// In which order tokens stand: a bijection pi from positions to tokens, and rho, its inverse.
//   gathered[i] = X[pi(i)]      and home again      Y[pi(i)] = computed[i]

namespace [[gnu::visibility("default")]] hilt {

/// What a user asks for; a value, without a length. permutation() makes it concrete.
struct Order {
  /// snake, morton and tiles are controls, never to be called Hilbert.
  enum class Kind : unsigned char { row, snake, morton, tiles, hilbert };
  /// global: pi over all tokens. chunked: pi(m c + j) = m c + pi_c(j). per_segment: chunked by the
  /// pattern's segments, see with_segment. order_only: the attended set ignores pi, which only
  /// arranges memory and work.
  enum class Scope : unsigned char { global, per_segment, chunked, order_only };

  Kind kind = Kind::row;
  Grid grid;  // of all tokens, or of one chunk; without cells: fold the sequence
  Index tile_height = 8, tile_width = 16;
  Scope scope = Scope::global;
  Index chunk = 0;
  Steps steps = Steps::near;

  bool folds() const { return grid == Grid{}; }
  friend auto operator<=>(const Order&, const Order&) = default;
};

/// Reads `row`, `snake`, `morton`, `tiles` or `hilbert`, which fold a sequence; with a grid
/// `snake:HxW`, `morton:HxW`, `tiles:HxW/hxw`, `hilbert:HxW`, `hilbert:TxHxW`, or `row:HxW` for
/// patterns that look at the grid; `tiles:hxw` folds into tiles of h x w. Then any of
/// `,scope=segment|order-only|global`, `,chunk=N`, `,steps=unit|near`. The grid must fit a sequence
/// of `length` tokens; a chunk longer than that is the whole sequence.
Order parse_order(std::string_view text, Index length);
/// The shortest text that parse_order reads as this order.
std::string to_string(const Order& order);

/// The order with scope per_segment made chunked(segment); any other order unchanged.
Order with_segment(Order order, Index segment);

/// Width 2^ceil(log2 sqrt length), height ceil(length / width).
Grid fold(Index length);
/// Where the tokens lie: the order's grid if it has one cell a token, else the fold.
Grid token_grid(const Order& order, Index length);

/// pi and rho. Made by the functions below and shared, so constant.
struct Permutation {
  std::vector<std::int32_t> token_at;     // pi: position -> token
  std::vector<std::int32_t> position_of;  // rho: token -> position
  Index length() const { return static_cast<Index>(token_at.size()); }
};

/// From any pi; checks that it is a bijection.
Permutation make_permutation(std::vector<std::int32_t> token_at);
/// Builds pi for `length` tokens, below 2^31. A short last row, and a short last chunk, leave
/// tokens out.
Permutation build_permutation(const Order& order, Index length);

/// Whether HILT_FORCE_ORDER=row replaces every order by the identity, for debugging. Reports must
/// show it.
bool row_order_forced();

/// Permutations by {order, width, height, frames, length, scope, chunk}; the least recently used go
/// when they exceed max_bytes. Safe from any thread; what a caller holds outlives its eviction.
class PermutationCache {
 public:
  explicit PermutationCache(std::size_t max_bytes) : max_bytes_(max_bytes) {}
  std::shared_ptr<const Permutation> get(const Order& order, Index length);
  /// Forgets everything, counters too.
  void clear();

  struct Counters {
    Index hits = 0, misses = 0, evictions = 0, entries = 0;
    std::size_t bytes = 0;
  };
  Counters counters() const;

 private:
  struct Key {
    Order order;
    Index length = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Entry {
    Key key;
    std::shared_ptr<const Permutation> permutation;
  };
  mutable std::mutex mutex_;
  std::size_t max_bytes_;
  std::list<Entry> entries_;  // the most recently used first
  std::map<Key, std::list<Entry>::iterator> by_key_;
  Counters counters_;
};

/// The cache behind permutation(): one for the process, 256 MiB.
PermutationCache& permutation_cache();
/// build_permutation, remembered.
std::shared_ptr<const Permutation> permutation(const Order& order, Index length);

}  // namespace hilt
