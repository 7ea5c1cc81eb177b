#pragma once
#include <algorithm>
#include "order.h"

// Which tokens attend to which. p is a token's position in the order, s(p) its segment.

namespace [[gnu::visibility("default")]] hilt {

/// (query block, key block)
using BlockPairs = std::vector<std::pair<std::int32_t, std::int32_t>>;

/// One attended set. A Pattern is a list of them, merged as if their key lists were one (a key
/// twice counts twice), but for those joined to the one before: a union, where a key counts once.
struct Branch {
  enum class Kind : unsigned char {  // rules
    dense,                           // all tokens
    segment,         // positions of the same run of `size` positions; of those, every dilation-th from `offset` on
    slide,           // |p - p'| <= size
    neighborhood,    // `size` positions around clamp(p, size/2, L-1-size/2); size is odd
    window2d,        // the same rows x columns window of the grid
    slide2d,         // |dy| <= rows and |dx| <= columns
    neighborhood2d,  // rows x columns cells, the window clamped inside the grid; both odd
    window3d,        // the same on a grid of frames
    slide3d,
    neighborhood3d,
    blocks,  // the listed (query block, key block) pairs of runs of `size` positions
  };
  /// What else an axis of slides, neighborhoods and windows says. Cells with one remainder by
  /// `dilation` are a class: a query attends to its own class, where cells are numbered anew, and
  /// sizes count those. Queries with one number / stride share a center, that of the middle one.
  struct Axis {
    Index dilation = 1, stride = 1;  // of slides and neighborhoods
    Index shift = 0;                 // of windows and segments: the first is so much shorter
    bool causal = false;             // no key beyond the query; the center is then the last that shares it
    bool borrows = false;            // of segments: the last has the last `size` as keys
    friend auto operator<=>(const Axis&, const Axis&) = default;
  };
  /// Where the list of blocks comes from.
  enum class Lists : unsigned char {
    given,         // `pairs`
    local,         // |I - J| <= radius
    dilated,       // J = I +- r for each rate r, and I itself
    global_local,  // the first blocks see all and are seen by all, the others as local
    top,           // for each I the J with the largest product of mean query and mean key: see Branch::chosen
  };
  Kind kind = Kind::dense;
  bool joined = false;                      // united with the branch before
  Index size = 0;                           // in positions or tokens, as the kind says
  Index dilation = 1, offset = 0;           // of segments
  bool offset_by_head = false;              // offset = head mod dilation
  Index frames = 0, rows = 0, columns = 0;  // of grids, as the kind says
  std::array<Axis, 3> axes{};               // the outermost first; positions are one axis
  BlockPairs pairs{};                       // of blocks that are given
  Lists lists = Lists::given;
  std::vector<Index> numbers{};  // of `lists`: the radius; the rates; global blocks and radius; how many
  /// For top: what each run of heads / chosen.size() heads chose; empty before the choice.
  std::vector<BlockPairs> chosen{};
  /// So many first tokens stand outside the pattern; its last branch says so for all. They attend
  /// to all and all to them, once; the others have grid, order and pattern as if they stood alone.
  Index prefix = 0;
  friend auto operator<=>(const Branch&, const Branch&) = default;

  /// The set is of the grid: the order arranges work and memory, and changes no result.
  bool is_order_only() const { return kind == Kind::dense || on_grid(); }
  bool slides() const { return kind == Kind::slide || kind == Kind::slide2d || kind == Kind::slide3d; }  // by a radius
  /// An axis is cut into runs.
  bool is_window() const { return kind == Kind::window2d || kind == Kind::window3d || axes[0].borrows; }
  /// It compares coordinates on the grid.
  bool on_grid() const { return dimensions() > 1; }
  /// How many axes a query and its keys are compared on.
  std::size_t dimensions() const {
    if (kind == Kind::slide || kind == Kind::neighborhood || axes[0].borrows) return 1;
    return kind < Kind::window2d || kind == Kind::blocks ? 0 : kind < Kind::window3d ? 2 : 3;
  }
  /// Radius, number of keys or side on an axis.
  Index extent(std::size_t axis) const {
    return dimensions() == 1 ? size : std::array{frames, rows, columns}[axis + 3 - dimensions()];
  }
  /// The keys depend on q and k, and nobody has looked at them yet.
  bool looks_at_data() const { return lists == Lists::top && chosen.empty(); }
  /// The list of blocks of a head.
  const BlockPairs& pairs_of(Index head, Index heads) const {
    return chosen.empty() ? pairs : chosen[static_cast<std::size_t>(head / (heads / std::ssize(chosen)))];
  }
};
using Pattern = std::vector<Branch>;                                                  // at least one branch
inline Index prefix_of(const Pattern& p) { return p.empty() ? 0 : p.back().prefix; }  // of its last branch
/// The tokens behind a prefix, of so many: what an order and its grid are of. There must be one.
Index behind_prefix(const Pattern& p, Index length);

enum class DilationMode : unsigned char {  // who asks, where a segment is dilated
  all_queries,                             // every position asks; branches merge
  longnet,                                 // only the active positions of a branch ask; branches merge
  head_groups,  // as longnet; branch i alone serves a contiguous group of heads, with offset i mod its dilation
  residue,      // a position attends to its own residue; branches merge
};
enum class Causality : unsigned char {  // which keys are too late
  none,
  token,  // u <= t, on original token indices whatever the order
  curve,  // rho(u) <= rho(t): only for models that predict along the curve
};
/// How the blocks of a `blocks` branch are laid out for kernels: the set is the same.
enum class WorkOrder : unsigned char {
  row,        // as they come
  diagonal,   // query blocks by the mean of their key blocks
  hilbert,    // along the Hilbert curve over the pairs
  automatic,  // whichever of these gathers the fewest key blocks; `auto` in text
};

/// Reads `dense`, `segment:W[,dilation=R][,offset=O|head][,shift=S][,tail=borrow]`, `slide:R`,
/// `neighborhood:K`, `window2d:HxW`, `slide2d:RYxRX`, `neighborhood2d:KYxKX`, `window3d:TxHxW`,
/// `slide3d:RTxRYxRX`, `neighborhood3d:KTxKYxKX`, `blocks:SIZE@LIST`, merged by `+`, united by `|`.
/// Slides and neighborhoods take `,dilation=D`, `,stride=S` and `,causal=1`, windows `,shift=S` and
/// `,causal=1`: a number for all axes or for each, `causal=1x0x0`. LIST: `FILE.npy` ([n, 2] pairs),
/// `local:RADIUS`, `dilated:R/R/..`, `global_local:GLOBAL:RADIUS` or `top:K`. `,prefix=N` ends a
/// pattern, and is of all of it.
Pattern parse_pattern(std::string_view text);
std::string to_string(const Pattern& pattern);
DilationMode parse_dilation_mode(std::string_view text);
Causality parse_causality(std::string_view text);
std::string_view name_of(DilationMode mode);
std::string_view name_of(Causality causality);
WorkOrder parse_work_order(std::string_view text);
std::string_view name_of(WorkOrder order);

// ---- builders of block lists over n blocks ------------------------------------------------------
BlockPairs local_blocks(Index n, Index radius);                       // |I - J| <= radius
BlockPairs dilated_blocks(Index n, const std::vector<Index>& rates);  // J = I +- r for each rate, and I itself
BlockPairs global_local_blocks(Index n, Index global, Index radius);  // the first `global` see and are seen by all
/// The list that the rule of a branch makes; of top one of the right size.
BlockPairs built_blocks(const Branch& branch, Index n);
Branch blocks(Index size, BlockPairs pairs);  // a branch of these

}  // namespace hilt
