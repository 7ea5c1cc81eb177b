#pragma once
#include <compare>
#include "../../../core/recent.h"
#include "../../../core/shape.h"

// In which order tokens stand: a bijection pi from positions to tokens, and rho, its inverse.
//   gathered[i] = X[pi(i)]      and back again      Y[pi(i)] = computed[i]

namespace [[gnu::visibility("default")]] hilt {

// ---- space-filling curves: cell <-> position, by integers, without tables, in O(log side) -------

/// Width x height cells, so many frames. Token (z * height + y) * width + x is in cell (x, y, z).
struct Grid {
  Index width = 0, height = 0, frames = 1;  // sides, in cells
  bool named_frames = false;                // T x H x W was said, even of one frame
  /// Whether it has an axis of frames.
  bool has_frames() const { return named_frames || frames > 1; }
  /// The product of the sides, checked for overflow.
  Index cells() const;
  friend auto operator<=>(const Grid&, const Grid&) = default;
  friend bool operator==(const Grid&, const Grid&) = default;  // said, or nvcc warns that nobody defines it
};

std::string to_string(const Grid& grid);  // HEIGHTxWIDTH, or FRAMESxHEIGHTxWIDTH

/// Column, row, frame.
struct Cell {
  Index x = 0, y = 0, z = 0;  // in this order: column, row, frame
  friend auto operator<=>(const Cell&, const Cell&) = default;
};

Cell cell_of(const Grid& grid, Index token);         // where a token lies
Index token_of(const Grid& grid, const Cell& cell);  // the token of a cell

/// For rectangles with one odd and one even side. unit: unit steps, by an even major side. near:
/// that only where the aspect is below 3; thin grids keep their locality and pay one diagonal step.
enum class Steps : unsigned char { near, unit };

/// The Hilbert curve on any grid, on a 2^k square the classic one. Unit steps cannot be asked of a
/// box of three sides above 1 unless all are even.
Cell hilbert_cell(const Grid& grid, Index position, Steps steps = Steps::near);
Index hilbert_position(const Grid& grid, const Cell& cell, Steps steps = Steps::near);  // the inverse

/// The tokens below `limit` (at most 2^31 - 1) in curve order, by one walk that skips the others.
std::vector<std::int32_t> hilbert_walk(const Grid& grid, Index limit, Steps steps = Steps::near);

// ---- orders -------------------------------------------------------------------------------------

/// What a user asks for; a value, without a length. permutation() makes it concrete.
struct Order {
  /// snake, morton and tiles are controls, never to be called Hilbert. automatic, `auto` in text:
  /// the best for a pattern; a plan chooses it, see choose_order(). given: PlanSpec::given, or
  /// each call, says which.
  enum class Kind : unsigned char { row, snake, morton, tiles, hilbert, automatic, given };
  /// global: pi over all tokens. chunked: pi(m c + j) = m c + pi_c(j). per_segment: chunked by the
  /// pattern's segments. order_only: the attended set ignores pi, which arranges memory and work.
  enum class Scope : unsigned char { global, per_segment, order_only, chunked };

  Kind kind = Kind::row;
  Grid grid{};                             // of all tokens, or of one chunk; without cells: fold the sequence
  Index tile_height = 8, tile_width = 16;  // of tiles
  Scope scope = Scope::global;
  Index chunk = 0;  // positions of a chunk; 0: none
  Steps steps = Steps::near;

  bool folds() const { return grid == Grid{}; }  // it has no grid of its own
  friend auto operator<=>(const Order&, const Order&) = default;
};
/// Whether there is such an order of this grid: snake, morton and tiles know one frame.
bool walks(Order::Kind kind, const Grid& grid);

/// Reads `row`, `snake`, `morton`, `tiles` or `hilbert`, which fold a sequence; with a grid
/// `snake:HxW`, `morton:HxW`, `tiles:HxW/hxw`, `hilbert:HxW`, `hilbert:TxHxW`, or `row:HxW` for
/// patterns that look at the grid; `tiles:hxw` folds into tiles of h x w; `auto`, `auto:HxW` or
/// `auto:TxHxW`, which a plan makes one of these; `given`. Then, but for auto and given, any of
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
  std::vector<std::int32_t> token_at{};                  // pi: position -> token
  std::vector<std::int32_t> position_of{};               // rho: token -> position
  Index length() const { return std::ssize(token_at); }  // how many tokens
};

/// From any pi; checks that it is a bijection.
Permutation make_permutation(std::vector<std::int32_t> token_at);
/// Builds pi for `length` tokens, below 2^31. Short last rows and chunks leave tokens out.
Permutation build_permutation(const Order& order, Index length);

/// Whether HILT_FORCE_ORDER=row makes orders the identity, for debugging. Reports must show it.
bool row_order_forced();

/// Permutations by {order, width, height, frames, length, scope, chunk}.
class PermutationCache : public Recent<std::pair<Order, Index>, std::shared_ptr<const Permutation>> {
 public:
  explicit PermutationCache(std::size_t max_bytes);                          // what the permutations may take
  std::shared_ptr<const Permutation> get(const Order& order, Index length);  // as permutation()
};

/// The cache behind permutation(): one for the process, 256 MiB.
PermutationCache& permutation_cache();
/// build_permutation, remembered.
std::shared_ptr<const Permutation> permutation(const Order& order, Index length);

}  // namespace hilt
