#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>
#include "order.h"

// Which tokens attend to which, before it is cut into tiles. p is a token's position in the order,
// s(p) its segment.

namespace [[gnu::visibility("default")]] hilt {

/// One attended set. A Pattern is a list of them, merged as if their key lists were one (a key
/// twice counts twice).
struct Branch {
  enum class Kind : unsigned char {
    dense,           // all tokens
    segment,         // positions of the same run of `size` positions; of those, every dilation-th from `offset` on
    slide,           // |p - p'| <= size
    neighborhood,    // `size` positions around clamp(p, size/2, L-1-size/2); size is odd
    window2d,        // the same rows x columns window of the grid
    slide2d,         // |dy| <= rows and |dx| <= columns
    neighborhood2d,  // rows x columns cells, the window clamped inside the grid; both odd
    blocks,          // the listed (query block, key block) pairs of runs of `size` positions
  };
  Kind kind = Kind::dense;
  Index size = 0;
  Index dilation = 1, offset = 0;
  bool offset_by_head = false;  // offset = head mod dilation
  Index rows = 0, columns = 0;
  std::vector<std::pair<std::int32_t, std::int32_t>> pairs;
  friend auto operator<=>(const Branch&, const Branch&) = default;

  /// The set is defined on the grid: the order arranges work and memory, and never changes a
  /// result.
  bool is_order_only() const { return kind == Kind::dense || kind >= Kind::window2d; }
};
using Pattern = std::vector<Branch>;

enum class DilationMode : unsigned char {
  all_queries,  // every position asks; branches merge
  longnet,      // only the active positions of a branch ask; branches merge
  head_groups,  // as longnet; branch i alone serves a contiguous group of heads, with offset i mod its dilation
  residue,      // a position meets the keys of its own residue; branches merge
};
enum class Causality : unsigned char {
  none,
  token,  // u <= t, on original token indices whatever the order
  curve,  // rho(u) <= rho(t): only for models that predict along the curve
};
/// How the blocks of a `blocks` branch are laid out for kernels. The set is the same, and so is the
/// result but for rounding.
enum class WorkOrder : unsigned char {
  row,        // as they come
  diagonal,   // query blocks by the mean of their key blocks
  hilbert,    // along the Hilbert curve over the pairs
  automatic,  // whichever of these gathers the fewest key blocks; `auto` in text
};

/// Reads `dense`, `segment:W[,dilation=R][,offset=O|head]`, `slide:R`, `neighborhood:K`,
/// `window2d:HxW`, `slide2d:RYxRX`, `neighborhood2d:KYxKX`, `blocks:SIZE@FILE.npy` ([n, 2] pairs),
/// joined by `+`.
Pattern parse_pattern(std::string_view text);
std::string to_string(const Pattern& pattern);
DilationMode parse_dilation_mode(std::string_view text);
Causality parse_causality(std::string_view text);
std::string_view name_of(DilationMode mode);
std::string_view name_of(Causality causality);
WorkOrder parse_work_order(std::string_view text);
std::string_view name_of(WorkOrder order);

// ---- builders of block lists over n blocks ------------------------------------------------------
using BlockPairs = std::vector<std::pair<std::int32_t, std::int32_t>>;
BlockPairs local_blocks(Index n, Index radius);                       // |I - J| <= radius
BlockPairs dilated_blocks(Index n, const std::vector<Index>& rates);  // J = I +- r for each rate, and I itself
BlockPairs global_local_blocks(Index n, Index global, Index radius);  // the first `global` see and are seen by all
Branch blocks(Index size, BlockPairs pairs);

}  // namespace hilt
