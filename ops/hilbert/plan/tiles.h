#pragma once
#include <new>
#include "attends.h"
#include "core/error.h"
#include "plan.h"

// Private: what a set looks at, where documents lie, the keys of a query on an axis, layouts of
// blocks, and a set as tiles.

namespace hilt {

/// What a set looks at, of the tokens behind a prefix; all of these numbers count from there.
struct Ground {
  const PlanSpec& spec;
  const Permutation* order;  // null: the identity
  Grid grid;
  bool by_token;  // positions are tokens: scope order_only, where the order arranges work and no more
  bool met;       // the tiling has the pairs of the prefix, too

  Index length() const { return spec.length - spec.outside(); }
  Index position(Index t) const { return by_token ? t : along_order(t); }
  Index token(Index p) const { return by_token ? p : token_along_order(p); }
  /// The same of sets that know no order: where the work stands.
  Index along_order(Index t) const { return order ? Index{order->position_of[at(t)]} : t; }
  Index token_along_order(Index p) const { return order ? Index{order->token_at[at(p)]} : p; }
  /// Where a token lies on an axis of a branch, and how many cells that has.
  Index cell(const Branch& b, std::size_t axis, Index t) const {
    if (b.dimensions() == 1) return position(t);
    if (axis + 1 == b.dimensions()) return t % grid.width;
    const Index row = t / grid.width;
    return axis + 2 == b.dimensions() ? row % grid.height : row / grid.height;
  }
  Index cells(const Branch& b, std::size_t axis) const {
    return b.dimensions() == 1 ? length() : std::array{grid.frames, grid.height, grid.width}[axis + 3 - b.dimensions()];
  }
};

/// How many branches and unions of branches stand before this one or its union.
inline Index union_of(const Pattern& pattern, std::size_t branch) {
  return std::count_if(pattern.begin(), pattern.begin() + static_cast<std::ptrdiff_t>(branch) + 1,
                       [](const Branch& b) { return !b.joined; }) -
         1;
}
/// Past the last branch that is joined to this one.
inline std::size_t end_of_union(const Pattern& pattern, std::size_t first) {
  std::size_t end = first + 1;
  while (end < pattern.size() && pattern[end].joined) ++end;
  return end;
}

inline Index offset_of(const PlanSpec& spec, std::size_t branch, Index head) {
  const Branch& b = spec.pattern[branch];
  if (spec.dilation_mode == DilationMode::head_groups) return union_of(spec.pattern, branch) % b.dilation;
  return b.offset_by_head ? head % b.dilation : b.offset;
}

inline bool only_active_ask(DilationMode mode) {
  return mode == DilationMode::longnet || mode == DilationMode::head_groups;
}

/// f(), whose lists of so many tokens may need more memory than there is.
template <class F> decltype(auto) in_memory(Index tokens, F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    fail_with(Code::memory, "plan: no memory is left for its lists of ", tokens, " tokens; take fewer, or fewer sets");
  }
}

/// Reads `HxW`, or `TxHxW` where a box is allowed.
Grid read_grid(const std::string& where, std::string_view part, bool box_allowed);
/// Throws unless documents fit rows, order and pattern.
void check_documents(const PlanSpec& spec);

/// rho of the pi of a row; Code::data unless it is a bijection inside each of these documents and
/// behind them, which names the row of the batch and the token.
std::vector<std::int32_t> inverse_within(std::span<const std::int32_t> token_at, const DocumentList& documents,
                                         Index row);
/// PlanSpec::given of a document that begins at this token.
std::vector<std::int32_t> given_from(const PlanSpec& spec, Index first, Index length);

/// A document, which of its tokens ask where not all do, its order where that is given, and where
/// its like lie.
struct PlacedDocument {
  Document document;
  std::optional<std::vector<std::int32_t>> queries;
  std::vector<std::int32_t> given;
  Tiling::Places places;
};
std::vector<PlacedDocument> placed_documents(const PlanSpec& spec);  // without documents, a row is one

struct Interval {
  Index low, high;
  bool has(Index i) const { return low <= i && i <= high; }
};

/// One axis of a branch, `cells` numbered class by class: a query has an interval of numbers.
class AxisRule {
 public:
  AxisRule(const Branch& b, std::size_t axis, Index cells)
      : window_(b.is_window()),
        slides_(b.slides()),
        size_(b.extent(axis)),
        cells_(cells),
        axis_(b.axes[axis]),
        apart_((cells + axis_.dilation - 1) / axis_.dilation) {}

  Index number(Index cell) const { return one_ ? cell : cell % axis_.dilation * apart_ + cell / axis_.dilation; }
  Index cell(Index number) const { return one_ ? number : number / apart_ + number % apart_ * axis_.dilation; }

  /// The numbers of the keys of a query; low > high if there are none.
  Interval keys_of(Index cell) const {
    if (window_) {
      const Index begin = (cell + axis_.shift) / size_ * size_ - axis_.shift;
      const Index first = axis_.borrows ? std::min(begin, cells_ - size_) : begin;
      return {std::max<Index>(first, 0), axis_.causal ? cell : std::min(begin + size_, cells_) - 1};
    }
    const Index base = one_ ? 0 : cell % axis_.dilation * apart_, i = one_ ? cell : cell / axis_.dilation;
    const Index n = one_ ? cells_ : (cells_ - cell % axis_.dilation + axis_.dilation - 1) / axis_.dilation;
    const Interval keys = around(i, n);
    return {base + std::max<Index>(keys.low, 0), base + std::min(keys.high, n - 1)};
  }

 private:
  /// The keys of query i in a class of n cells, borders aside.
  Interval around(Index i, Index n) const {
    const Index s = axis_.stride;
    Index center = std::min((s == 1 ? i : i / s * s) + (axis_.causal ? s - 1 : s / 2), n - 1);
    if (axis_.causal) return {center - (slides_ ? size_ : size_ - 1), i};
    const Index reach = slides_ ? size_ : size_ / 2;
    if (!slides_) center = std::max(std::min(center, n - 1 - reach), std::min(reach, n - 1));
    return {center - reach, center + reach};
  }

  bool window_, slides_;
  Index size_, cells_;
  Branch::Axis axis_;
  bool one_ = axis_.dilation == 1;  // a class
  Index apart_;                     // numbers from class to class
};

/// How the blocks of a `blocks` branch are laid out for kernels: query blocks and key blocks, each
/// once. Work for neighbors in a list runs together, and a key block of both is gathered once.
struct BlockLayout {
  WorkOrder used = WorkOrder::row;  // never automatic
  std::vector<std::int32_t> queries, keys;
};
/// pairs: sorted, within n x n.
BlockLayout lay_out_blocks(WorkOrder wanted, const BlockPairs& pairs, Index n);

/// Key blocks gathered when four query blocks in a row share them: what `automatic` minimizes.
Index blocks_gathered(const BlockLayout& layout, const BlockPairs& pairs);

/// Fills in q_known and k_known of a part's tilings, once they are all there.
void mark_known_rows(const Plan& plan, PlanPart& part);

/// The parts of a plan; where they are documents, those of a row of the batch as one part, which
/// has places of rows alone: for GPUs and ranks. Made when first asked for, and kept with the plan.
std::span<const PlanPart> row_parts(const Plan& plan);

/// A branch and what is joined to it, for the heads whose offsets and lists are those of `head`.
Tiling tiling_of(const Ground& ground, std::size_t branch, Index head);

}  // namespace hilt
