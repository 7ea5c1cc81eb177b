#pragma once
#include "pattern.h"
#include "tiling.h"

// A plan: an attended set made ready for kernels. Built once, immutable, shared.

namespace [[gnu::visibility("default")]] hilt {

// Documents stand one after the other in a row, each attended to as if it stood alone.

/// a sequence, or an image, of a row.
struct Document {
  Index length = 0;  // in tokens
  Grid grid{};       // without cells: a sequence, which folds

  Document(Index tokens) : length(tokens) {}                           // a sequence
  Document(const Grid& cells) : length(cells.cells()), grid(cells) {}  // an image
  bool folds() const { return grid == Grid{}; }                        // a sequence: an order makes a grid of it
  friend auto operator<=>(const Document&, const Document&) = default;
};
/// Those of one row, from its first token on; what is left of the row belongs to nobody.
using DocumentList = std::vector<Document>;

/// Reads `100,16x16,4x6x6`, lengths and grids; lists joined by `/` are rows, one list is for all.
std::vector<DocumentList> parse_documents(std::string_view text);
std::string to_string(const std::vector<DocumentList>& rows);

/// What a plan is made from.
struct PlanSpec {
  static constexpr Index kMostHeads = 65535;  // as many as the grid of a GPU's kernel has rows
  Index length = 0;                           // tokens of a row
  Index heads = 1;                            // that a set may depend on
  Order order{};
  Pattern pattern = {Branch{}};
  DilationMode dilation_mode = DilationMode::all_queries;
  Causality causality = Causality::none;
  WorkOrder work_order = WorkOrder::row;  // of blocks
  /// Activations stand in curve order: row i of q, k, v and o is token order().token_at[i].
  bool in_order = false;
  /// What lies in a row, one list for all rows of the batch or one for each; none: a row is whole.
  /// Order, pattern and causality then apply inside each document as if it stood alone.
  std::vector<DocumentList> documents{};
  /// The rows that ask, ascending, where not all do: row i of q, o and lse is what row queries[i]
  /// of a call with all queries is. Keys and values are those of all.
  std::optional<std::vector<std::int32_t>> queries{};
  /// Cross-attention: so many queries, no tokens of the keys' sequence; they know `dense` alone.
  std::optional<Index> cross{};
  /// The order where it is `given`: the token at each position of a row, a bijection inside each
  /// document. None: each call brings one, AttentionOptions::permutation, and the plan serves all.
  std::vector<std::int32_t> given{};
  Index rows_of_q() const { return cross.value_or(queries ? std::ssize(*queries) : length); }  // how many queries
  Index outside() const { return length - behind_prefix(pattern, length); }  // first tokens that the pattern leaves out
  friend auto operator<=>(const PlanSpec&, const PlanSpec&) = default;
};

/// Tilings, one a set that heads ask for, and where they lie: a row, or documents of one shape.
struct PlanPart {
  Index length{}, queries{};      // tokens of a place, and how many of them ask
  std::vector<Tiling> tilings{};  // one for each set
  Tiling::Places places{};        // where each lies
  Memo memo = {};                 // what kernels make of several
};

/// Tile counts, of a row or of all with documents; total: all q tiles x k tiles, touched or not.
struct TileStats {
  Index full = 0, partial = 0, total = 0;  // tiles
  Index pairs = 0;                         // that attend
  Index tile_pairs = 0;                    // that touched tiles hold: useful = pairs / tile_pairs
  /// The part of all tiles that is touched.
  double touched() const { return total ? static_cast<double>(full + partial) / static_cast<double>(total) : 0; }
  /// The part of touched tiles that attends.
  double useful() const { return tile_pairs ? static_cast<double>(pairs) / static_cast<double>(tile_pairs) : 1; }
};

class Plan {  // an attended set on an order, tiled. It has no tensors
 public:
  explicit Plan(PlanSpec spec);  // throws Code::usage with what does not fit; make_plan() remembers

  const PlanSpec& spec() const { return spec_; }  // what it was made from
  Index length() const { return spec_.length; }   // tokens of a row
  Index heads() const { return spec_.heads; }     // query heads
  /// Rows of q.
  Index queries() const { return spec_.rows_of_q(); }
  /// The order in use. It is the identity if the set does not depend on it and it would gain
  /// nothing, or if HILT_FORCE_ORDER says so. Documents have orders and grids of their own.
  const Permutation& order() const;
  bool order_forced() const { return forced_; }  // by HILT_FORCE_ORDER
  /// Each call brings its order; this one stands in row order.
  bool takes_order() const { return spec_.order.kind == Order::Kind::given && spec_.given.empty(); }
  Grid grid() const { return grid_; }

  /// The pattern chooses by q and k (`blocks:SIZE@top:K`), so each sequence has a plan of its own,
  /// see plan_of_sequence(). This one holds sets of the size that they will have.
  bool looks_at_data() const;

  /// The attended sets of a head, to be merged: which tilings of each part, those of the largest
  /// dilation first.
  std::span<const std::int32_t> tilings_of(Index head) const;
  bool heads_agree() const { return agree_; }                    // on all of them
  const std::vector<PlanPart>& parts() const { return parts_; }  // one, or one for each length and grid of documents
  /// Those of the only part, where there are no documents.
  const std::vector<Tiling>& tilings() const;
  /// How often the token of row u is in A(the token of row t) of this head; without in_order, rows
  /// are tokens, whether t is among the queries or not. From the definitions, not from the tiles:
  /// slow, for tests and pages. batch: which row of it, where those have documents of their own.
  Index attends(Index head, Index t, Index u, Index batch = 0) const;
  /// Rows whose list is empty for some head, of as many rows of the batch as stats() counts.
  Index empty_rows() const;

  /// Counts over the distinct sets: one that several heads share counts once.
  TileStats stats() const;

  const Memo& memo() const { return memo_; }
  /// Bytes of the plan itself.
  std::size_t bytes() const;

 private:
  PlanSpec spec_;
  std::shared_ptr<const Permutation> order_;  // of tokens behind a prefix; none: they stand as they come
  Memo memo_;                                 // order(), where it is another, and what is made of the plan
  bool forced_ = false, agree_ = true;
  Grid grid_;
  std::vector<PlanPart> parts_;
  std::vector<std::vector<std::int32_t>> head_tilings_;  // of each head

  void build();
};
using PlanPtr = std::shared_ptr<const Plan>;

/// Builds, or finds among the most recently used, the plan for a spec. Safe from any thread.
PlanPtr make_plan(const PlanSpec& spec);

/// `count` rows from `first` on, for PlanSpec::queries.
std::vector<std::int32_t> query_run(Index first, Index count);

/// Among the orders that leave the attended set of `spec` unchanged, the one with the fewest tiles;
/// of an order `auto`, whose set is that of the tokens as they come. Of equals, the first.
struct OrderChoice {
  Order order{};
  std::vector<std::pair<Order, TileStats>> considered{};  // all that were compared
};
OrderChoice choose_order(PlanSpec spec);  // throws Code::usage as Plan

}  // namespace hilt
