#pragma once
#include "core/dtype.h"
#include "ops/hilbert/plan/tiling.h"
#include "ops/math.h"

// Score terms as kernels read them, and the formula of each, for one pair of a query and a key:
//
//      S = cap(z) - slope distance + table[entry] + bias       z = c q . k
//
//   softcap    cap(z) = x tanh(z / x)          dz = dS (1 - (cap / x)^2)
//   alibi      distance = sum of |q - k|       dslope = -sum dS distance
//   relative   entry = clamped q - k           dtable[entry] = sum dS
//   bias       by tokens                       dbias = dS, summed over what was broadcast
//
// A sink is no matter of pairs: it is where the online softmax starts, with maximum s and O = 0.

namespace hilt::kernels {

/// A token's coordinates: of its cell on a grid (frame, row, column), or 0, 0, token. a < 0: it
/// lies on no grid, and terms that look at one add nothing. Or any, of a point that a call brings.
struct Site {
  std::int32_t a = 0, b = 0, c = 0;
};
[[gnu::always_inline]] constexpr Site site_of(std::span<const Tiling::Sites> grids, bool on_grid, std::int32_t token) {
  if (!on_grid) return {0, 0, token};
  std::size_t document = 0;
  for (std::size_t behind = grids.size(); behind - document > 1;) {
    const std::size_t middle = (document + behind) / 2;
    (grids[middle].begin <= token ? document : behind) = middle;
  }
  const Tiling::Sites& grid = grids[document];
  token -= grid.first;
  if (token < 0) return {-1, 0, 0};
  const auto width = static_cast<std::int32_t>(grid.width), height = static_cast<std::int32_t>(grid.height);
  return {token / width / height, token / width % height, token % width};
}

/// A tensor [B, H, queries, keys], strides 0 where it is broadcast; none where data is null.
template <class Void> struct PairTensor {
  Void* data = nullptr;
  DType type = DType::f32;
  Index batch = 0, head = 0, query = 0, key = 0;
  const std::int32_t* query_row = nullptr;  // of each token, where not all ask; null: the token itself
  /// Where the row of token t begins.
  [[gnu::always_inline]] constexpr Index offset(Index b, Index h, Index t) const {
    return b * batch + h * head + (query_row ? query_row[t] : t) * query;
  }
  template <class T> [[gnu::always_inline]] constexpr T* row(Index b, Index h, Index t) const {
    return static_cast<T*>(data) + offset(b, h, t);
  }
};

/// A null pointer, and a cap of 0, are no term. Tensors are Stat and dense, but for the bias.
struct Terms {
  double cap = 0;
  const void* slopes = nullptr;  // [H]
  const void* table = nullptr;   // [H, entries]
  bool slopes_on_grid = false, table_on_grid = false;
  const Site* points = nullptr;  // of the tokens of each row, where the table looks at these
  Index points_row = 0;          // from a row to the next
  Site reach;                    // of the table: coordinates differ by as much at most
  Index entries = 0;
  PairTensor<const void> bias;
  [[gnu::always_inline]] constexpr const Site* points_of(Index b) const { return points + b * points_row; }
};
/// Where the sums go, added to what is there: Stat. Null: not wanted.
struct TermGradients {
  void *slopes = nullptr, *table = nullptr;
  PairTensor<void> bias;
};

/// cap(z), and its slope.
template <class W> struct Capped { W s, slope; };
template <class W> [[gnu::always_inline]] constexpr Capped<W> capped(W z, W cap, W inverse) {
  const W t = math::tanh(z * inverse);
  return {cap * t, 1 - t * t};
}
[[gnu::always_inline]] constexpr std::int32_t distance(const Site& q, const Site& k) {
  const auto apart = [](std::int32_t x, std::int32_t y) { return x < y ? y - x : x - y; };
  return (q.a | k.a) < 0 ? 0 : apart(q.a, k.a) + apart(q.b, k.b) + apart(q.c, k.c);
}
/// The entry behind the last, which is 0, where one lies on no grid. All points, of Index, count.
template <class Apart>
[[gnu::always_inline]] constexpr std::int32_t entry(const Site& reach, const Site& q, const Site& k) {
  const auto place = [](Apart apart, int r) { return static_cast<int>(apart < -r ? -r : apart > r ? r : apart) + r; };
  if (sizeof(Apart) == 4 && (q.a | k.a) < 0) return (2 * reach.a + 1) * (2 * reach.b + 1) * (2 * reach.c + 1);
  return (place(Apart{q.a} - k.a, reach.a) * (2 * reach.b + 1) + place(Apart{q.b} - k.b, reach.b)) * (2 * reach.c + 1) +
         place(Apart{q.c} - k.c, reach.c);
}

}  // namespace hilt::kernels
