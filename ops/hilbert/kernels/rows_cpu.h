#pragma once
#include <new>
#include "core/parallel.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/product_cpu.h"

// Memory and threads of a pass, and rows of tensors as tiles.

namespace hilt::kernels {
namespace {

/// Hands out pieces of a block of memory, or, without one, counts what it will need.
struct Carver {
  std::byte* block = nullptr;
  Index used = 0;

  template <class X> X* take(Index n) {
    X* const piece = block ? reinterpret_cast<X*>(block + used) : nullptr;
    used += (n * static_cast<Index>(sizeof(X)) + kLine - 1) / kLine * kLine;
    return piece;
  }
  template <class W> Tile<W> tile(Index rows, Index columns) {
    constexpr Index line = kLine / static_cast<Index>(sizeof(W));
    const Index pitch = (((columns + line - 1) / line) | 1) * line;
    return {take<W>(rows * pitch), pitch};
  }
};
template <class Space> Index bytes_of(Index dim, Index entries) {
  Carver counter;
  Space(std::move(counter), dim, entries);
  return counter.used;
}

/// Scratch. A thread keeps a small one for its next pass: the system takes longer over it than a
/// pass over a few tokens.
class Memory {
 public:
  explicit Memory(Index bytes) {
    if (spare.bytes_ >= bytes) swap(spare);
    if (block) return;
    block = static_cast<std::byte*>(::operator new (static_cast<std::size_t>(bytes), std::align_val_t{kLine}));
    bytes_ = bytes;
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    if (bytes_ > spare.bytes_ && bytes_ <= kMostKept) swap(spare);
    ::operator delete (block, std::align_val_t{kLine});
  }
  std::byte* block = nullptr;

 private:
  static constexpr Index kMostKept = Index{2} << 20;
  Memory() = default;
  void swap(Memory& other) { std::swap(block, other.block), std::swap(bytes_, other.bytes_); }
  static thread_local Memory spare;
  Index bytes_ = 0;
};
thread_local Memory Memory::spare;

/// So few pairs of numbers are multiplied before another thread has woken.
constexpr Index kAlone = Index{1} << 19;

/// Tasks [0, n) of a pass, taken in ascending order by workers with a Space each: none can fail, so
/// one may wait for an earlier one. products: of matrices; entries: of a table with a gradient.
template <class Space> class Tasks {
 public:
  Tasks(const AttentionPass& pass, const Compact& t, Index n, Index products, Index entries)
      : pass_(pass), t_(t), n_(n), entries_(entries), pairs_(products * pass.tiling->pairs) {
    for (Index number = 0; listed_ > 0 && number < pass.place_count(); ++number) {
      const Tiling::Place place = pass.place(number);
      const std::int32_t* const along = pass.along + place.row * pass.sizes.queries + place.k;
      for (Index i = 0; i < listed_; ++i)
        tokens_of(number)[i] = along[i < queries_ ? t.q_token.data()[i] : t.k_token.data()[i - queries_]] - place.k;
    }
  }
  /// Where an order came with the call: a place's tokens, of queries, then of keys. Else null.
  std::int32_t* tokens_of(Index place) const { return listed_ > 0 ? tokens_ + place * listed_ : nullptr; }
  Space space_of(Index i) const { return {Carver{memory_.block + i * bytes_}, pass_.sizes.dim, entries_}; }
  bool take(Index& task) { return (task = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED)) < n_; }
  Index workers() const { return workers_; }

 private:
  const AttentionPass& pass_;
  const Compact& t_;
  const Index n_, entries_, pairs_, bytes_ = bytes_of<Space>(pass_.sizes.dim, entries_);
  const Index most_ = thread_count() < n_ ? thread_count() : n_;
  const Index workers_ = pairs_ * pass_.place_count() * pass_.n_heads * pass_.sizes.dim < kAlone ? 1 : most_;
  const Index queries_ = std::ssize(t_.q_token), listed_ = pass_.along ? queries_ + std::ssize(t_.k_token) : 0;
  const Memory memory_{workers_ * bytes_ + pass_.place_count() * listed_ * static_cast<Index>(sizeof(std::int32_t))};
  std::int32_t* const tokens_ = reinterpret_cast<std::int32_t*>(memory_.block + workers_ * bytes_);
  Index next_ = 0;
};

// ---- rows ---------------------------------------------------------------------------------------

/// f.operator()<T>() for the type T of rows that become an E.
template <class E, class F> [[gnu::always_inline]] inline void with_stored(DType type, F&& f) {
  if constexpr (kPacked<E>) f.template operator()<bf16>();
  else if constexpr (std::is_same_v<E, double>) f.template operator()<double>();
  else with_type<float, bf16, f16>(type, f);
}

/// Rows of one head that a tile lists; `first`: that tokens are counted from.
template <class Void> struct Listed {
  AnyRows<Void> rows;
  Index b, h, dim, first;
  const std::int32_t* token;
  Index n;  // how many
  Index at(Index i) const { return first + token[i]; }
  template <class T> T* row(Index i) const { return rows.template rows<T>().at(b, first, h) + token[i] * rows.token; }
};

/// One head at one place, which a task is about.
struct Head {
  const AttentionPass& pass;
  const Compact& t;
  Tiling::Place place;
  Index h;
  const std::int32_t* along;  // of the pass's tasks, or null
  const std::int32_t* q_token = along ? along : t.q_token.data();
  const std::int32_t* k_token = along ? along + t.q_token.size() : t.k_token.data();
  /// Tokens of queries and keys, counted from the place's first.
  const std::int32_t* q_name = along ? q_token : t.q_names().data();
  const std::int32_t* k_name = along ? k_token : t.k_names().data();

  /// Rows of a tensor that has one for each query, or for each key, as a tile lists them.
  template <class Void> Listed<Void> of_queries(const AnyRows<Void>& x, std::int32_t tile) const {
    const Tiling::Range r = t.q_tile.data()[tile];
    return {x, place.row, h, pass.sizes.dim, place.q, q_token + r.begin, r.end - r.begin};
  }
  template <class Void> Listed<Void> of_keys(const AnyRows<Void>& x, std::int32_t tile) const {
    const Index kv_head = h / (pass.sizes.heads / pass.sizes.kv_heads);
    const Tiling::Range r = t.k_tile.data()[tile];
    return {x, place.row, kv_head, pass.sizes.dim, place.k, k_token + r.begin, r.end - r.begin};
  }
  std::int32_t last_token(std::int32_t tile) const {
    std::int32_t last = 0;
    for (Index q = t.q_tile.data()[tile].begin; pass.causal && q < t.q_tile.data()[tile].end; ++q)
      last = q_name[q] > last ? q_name[q] : last;
    return last;
  }
  /// Where the statistics of the row's first query stand.
  Index first_row() const { return (place.row * pass.sizes.heads + h) * pass.sizes.queries; }
};

/// Asks for rows that are wanted soon: what all tasks share is seldom in a thread's own cache.
/// Inline, because GCC takes a call for one without effect.
template <class Void> [[gnu::always_inline]] inline void prefetch(const Listed<Void>& x) {
  const auto size = static_cast<Index>(size_of(x.rows.type));
  for (Index i = 0; i < x.n; ++i) {
    const Index element = x.b * x.rows.batch + x.at(i) * x.rows.token + x.h * x.rows.head;
    for (Index byte = 0; byte < x.dim * size; byte += kLine)
      __builtin_prefetch(static_cast<const char*>(x.rows.data) + element * size + byte);
  }
}

constexpr Index kAhead = 16;  // rows, asked for before they are read: no prefetcher sees strides
template <class E> constexpr Index kWhole = kPacked<E> ? 2 * kLanes<E> : kLanes<E>;  // elements of a vector

/// `count` elements of a row, from whole vectors of E or less: then zeros follow.
template <class E, class T> [[gnu::always_inline]] inline Vector<E> load(const T* from, Index count) {
  Vector<E> line{};
  if constexpr (kPacked<E> || std::is_same_v<T, E>) {
#pragma GCC unroll 6  // by halves: where it is all, the compiler knows count
    for (std::size_t part = kWhole<E>, d = 0, n = static_cast<std::size_t>(count); part > 0; part /= 2)
      if (n & part) __builtin_memcpy(reinterpret_cast<T*>(&line) + d, from + d, part * sizeof(T)), d += part;
  } else {
    E wide[kWhole<E>] = {};
    if (count >= kWhole<E>)
      for (int l = 0; l < kWhole<E>; ++l) wide[l] = static_cast<E>(from[l]);
    else
      for (Index l = 0; l < count; ++l) wide[l] = static_cast<E>(from[l]);
    line = std::bit_cast<Vector<E>>(wide);
  }
  return line;
}
/// out = factor x, or x itself packed; zeros pad whole vectors. Whether all of it is finite.
template <class E> [[gnu::noinline]] bool gather(const Listed<const void>& x, Index n, Sum<E> factor, Tile<E> out) {
  Bits<E> not_finite{};
  with_stored<E>(x.rows.type, [&]<class T>() {
    for (Index i = 0; i < n; ++i) {
      const T* const from = x.template row<const T>(i);
      if (i + kAhead < n)
        for (Index d = 0; d < x.dim; d += kLine / static_cast<Index>(sizeof(T)))
          __builtin_prefetch(x.template row<const T>(i + kAhead) + d, 0, 2);
      const auto piece = [&](Index d, Index count) __attribute__((always_inline)) {
        Vector<E> y{};  // in registers: what is stored in parts and read as a whole is waited for
        if (kPacked<E> || kWhole<E> <= 4 || count != 4) y = load<E>(from + d, count);
        else
          for (int l = 0; l < 4; ++l) y[l] = static_cast<E>(from[d + l]);
        if constexpr (kPacked<E>) {  // 1 added to an exponent of ones alone reaches the bit above it
          not_finite |= std::bit_cast<Bits<E>>(((y & 0x7fff7fffu) + 0x00800080u) & 0x80008000u);
        } else {
          y *= factor;
          not_finite |= std::bit_cast<Bits<E>>(y - y);  // 0 or NaN
        }
        vector_at(out.row(i) + (kPacked<E> ? d / 2 : d)) = y;
      };
      Index d = 0;
      for (; d + kWhole<E> <= x.dim; d += kWhole<E>) piece(d, kWhole<E>);
      if (x.dim - d == 4) piece(d, 4);  // of small heads, which the compiler is to know
      else if (d < x.dim) piece(d, x.dim - d);
    }
  });
  bool finite = true;
  for (int l = 0; l < kLanes<E>; ++l) finite = finite && not_finite[l] == 0;
  return finite;
}

/// Rows as factors of products.
template <class E> struct FactorRows {
  Tile<E> at, twos;   // as they come, and as sums over them want them
  Tile<Sum<E>> wide;  // as pairs want them
  bool finite = true, is_wide = false;

  FactorRows() = default;
  FactorRows(Carver& c, Index dim, bool summed) : at(c.tile<E>(kTile, packed<E>(dim))), twos(at) {
    if constexpr (kPacked<E>) {
      if (summed) twos = c.tile<E>(kTile / 2, 2 * whole_vectors<E>(packed<E>(dim)));
      wide = c.tile<Sum<E>>(kTile, dim);
    } else wide = at;
  }
  void read(const Listed<const void>& x, Index n, Sum<E> factor) {
    finite = gather(x, n, factor, at), is_wide = !kPacked<E>;
  }
  Tile<Sum<E>> widened(const Listed<const void>& x, Index n, Sum<E> factor) {
    if (!is_wide) is_wide = true, gather(x, n, factor, wide);
    return wide;
  }
  /// Pairs of rows in twos; those of sums' own type are as they come.
  void pack(Index n, Index dim) const {
    if constexpr (kPacked<E>) pair_rows(at, n, packed<E>(dim), twos, kEach<std::uint16_t>);
  }
};

/// C += A B, a sum over n rows of B. But 0 x NaN is NaN: where some are not finite, only those
/// enter row r that it pairs with, by pairs(r, k).
template <class E, class Pairs>
void sum_over_rows(Left<E> a, const FactorRows<E>& b, Tile<Sum<E>> c, Index rows, Index n, Index dim, Pairs&& pairs) {
  if (b.finite) return product(a, b.twos, c, rows, n, dim, true);
  for (Index r = 0; r < rows; ++r)
    for (Index k = 0; k < n; ++k)
      if (pairs(r, k))
        for (Index d = 0; d < dim; ++d) c.row(r)[d] += a(r, k) * plain(b.at)(k, d);
}

}  // namespace
}  // namespace hilt::kernels
