#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>
#include "core/random.h"
#include "ops/hilbert/plan/plan.h"
#include "tests/support/dual.h"

// Attention by brute force, straight from the definitions: which keys a query has, one pair at a
// time, and the formulas, one loop each. No code of the kernels, of Plan or of Tiling; PlanSpec is
// read as the list of numbers it is. The judge of every other implementation, so it is judged
// itself in attention_test.cpp (by hand, by dual numbers).

namespace hilt::ref {

using Dual = judge::Dual<double>;

// ---- orders and attended sets -------------------------------------------------------------------

/// pi, position -> token. A second implementation for row, snake, morton, tiles and, on 2^k
/// squares, hilbert (d2xy); the library's where the definition is the generalized curve, 3-D or a
/// chunk of a given grid. per_segment must have become chunked. `independent` tells which.
struct Pi {
  std::vector<std::int32_t> token_at, position_of;
  bool independent = false;
};
Pi order_of(const Order& order, Index length);
/// The same of a spec, or of a document that begins at a token: PlanSpec::given is any pi.
Pi order_of(const PlanSpec& spec, const Order& order, Index first, Index length);
/// Width, height of the grid that 2-D patterns look at.
Grid grid_of(const Order& order, Index length);

/// How often u stands in A(t), for every head. Heads share a table where the set does not depend on
/// them.
class Attended {
 public:
  /// pi: of the tokens behind a prefix.
  Attended(const PlanSpec& spec, const Pi& pi);
  /// Any set: count[t * length + u] for every head.
  Attended(Index length, Index heads, std::vector<std::uint8_t> count);
  /// A row of spec.length tokens that holds these documents, each as if it stood alone.
  static Attended packed(const PlanSpec& spec, const DocumentList& documents);
  /// The same, the lists of tokens that do not ask left empty.
  Attended asked_by(const std::vector<std::int32_t>& tokens) const;

  struct Key {
    std::int32_t token, times;
  };
  Index length() const { return length_; }
  Index heads() const { return static_cast<Index>(table_of_.size()); }
  Index times(Index head, Index t, Index u) const;
  const std::vector<Key>& keys(Index head, Index t) const;
  /// Sum of times over all pairs of a head; tokens with an empty list for some head.
  Index pairs(Index head) const;
  Index empty_rows() const;
  /// Which of the distinct tables a head uses.
  std::size_t table_of(Index head) const { return table_of_[static_cast<std::size_t>(head)]; }

 private:
  struct Table {
    std::vector<std::uint8_t> count;
    std::vector<std::vector<Key>> keys;
  };
  explicit Attended(Index length) : length_(length) {}
  static Table listed(Index length, std::vector<std::uint8_t> count);
  Index length_;
  std::vector<Table> tables_;
  std::vector<std::size_t> table_of_;
};

// ---- attention ----------------------------------------------------------------------------------

/// q, o, d_o: [batch, length, heads, dim]; k, v: [batch, length, kv_heads, dim]; all dense.
struct Sizes {
  Index batch = 1, length = 0, heads = 1, kv_heads = 1, dim = 1;
  double scale = 1;
  double dropout = 0;
  RandomKey key;
};
/// Score terms; one that is empty (softcap: 0) is not there.
template <class T> struct Terms {
  double softcap = 0;
  std::vector<T> slopes;              // alibi, [heads]
  std::vector<T> table;               // relative, [heads, extent.., extent]
  std::vector<T> bias;                // of shape bias_shape, which broadcasts to [batch, heads, length, length]
  std::vector<T> sink;                // [heads]
  bool distance_on_grid = false;      // of alibi: the axes' sum, not |t - u|
  std::vector<Index> table_shape;     // without heads: one extent on tokens, two or three on the grid
  std::array<Index, 4> bias_shape{};  // with leading ones
  Grid grid;
  DocumentList documents = {};     // of every row; each has a grid of its own
  Index prefix = 0;                // so many first tokens of a row or a document are on no grid
  std::vector<Index> points = {};  // [batch, length, axes]: what the table looks at instead of tokens or a grid
  Index length = 0;                // of these
};
template <class T> struct Inputs {
  std::vector<T> q, k, v;
  Terms<T> terms = {};
};
template <class T> struct Output { std::vector<T> o, lse; };  // lse: [batch, heads, length]
template <class T> struct Slopes { std::vector<T> dq, dk, dv, dslopes, dtable, dbias, dsink; };

/// What a 16-bit tensor does to each value stored in it; nothing by default.
using Store = std::function<float(float)>;

/// The naive formula: scores, softmax over the list, product, in T throughout. `store` rounds every
/// intermediate that an op-by-op implementation would keep in a tensor (T = float only).
template <class T>
Output<T> attention(const Sizes& n, const Attended& set, const Inputs<T>& in, const Store& store = {});

/// The gradients by the closed formulas of ops/hilbert/modes/README.md, from scratch, in T. d_lse:
/// of the lse, none where empty.
template <class T>
Slopes<T> attention_gradients(const Sizes& n, const Attended& set, const Inputs<T>& in, const std::vector<T>& d_o,
                              const Store& store = {}, const std::vector<T>& d_lse = {});

/// What rounding errors are measured against: for every output the largest sum of absolute values
/// of the terms it is made of. A gradient can be exactly zero by cancellation; its terms are what
/// an implementation rounds.
struct Magnitudes {
  double o = 0, dq = 0, dk = 0, dv = 0, dslopes = 0, dtable = 0, dbias = 0, dsink = 0;
  double score = 0;   // largest scale * sum |q_d k_d| over attended pairs, and the terms' absolute values
  double lse = 0;     // largest |lse|, empty rows aside
  Index keys = 0;     // longest list
  Index queries = 0;  // most queries, over grouped heads, of one key
};
Magnitudes magnitudes(const Sizes& n, const Attended& set, const Inputs<double>& in, const std::vector<double>& d_o,
                      const std::vector<double>& d_lse = {});

/// d/de (sum(o * d_o) + sum(lse * d_lse)) along the inputs + e (along), by dual numbers through
/// attention<Dual>.
double slope_along(const Sizes& n, const Attended& set, const Inputs<double>& in, const Inputs<double>& along,
                   const std::vector<double>& d_o, const std::vector<double>& d_lse = {});

// ---- plans --------------------------------------------------------------------------------------

/// Holds a plan against the table of its set: the pairs of its tiles are the attended pairs, as
/// often as they are listed; tiles cover the lists in order; none is empty, full and partial are
/// what they say; the transposed lists agree; groups hold every pair once; all counts are right;
/// attends() agrees (a sample for long lists). Where the plan names who asks, the set is asked_by()
/// those. Of rows with documents of their own, row `row` of
/// the batch is held against it. The first fault found, or an empty one.
struct PlanFault {
  std::string what, details;
};
PlanFault judge(const Plan& plan, const Attended& set, Index row = 0);

// ---- tiles --------------------------------------------------------------------------------------

/// Share of side x side score tiles that hold an attending pair, and that hold one without being
/// full, queries and keys both in the order pi. `allowed(t, f)` calls f(u) for every key
/// of t.
struct TileShare {
  double touched = 0, partial = 0;
};
TileShare tile_share(const Pi& pi, Index side,
                     const std::function<void(Index t, const std::function<void(Index u)>&)>& keys_of);

}  // namespace hilt::ref
