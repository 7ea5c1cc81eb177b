#pragma once
#include <sched.h>
#include "ops/hilbert/kernels/scores_cpu.h"

// The backward pass of a run of query tiles: see attention_cpu.cpp.

namespace hilt::kernels {
namespace {

template <class E> struct BackwardSpace {
  using W = Sum<E>;
  struct Queries {
    FactorRows<E> q, d_o;
    Tile<W> dq;
    W* delta;
    std::int32_t last;  // token that causality compares
  };
  BackwardSpace(Carver&& c, Index dim, Index entries) : k(c, dim, true), row(row_space<W>(c, entries)) {
    for (Tile<E>* x : {&k_t, &v_t}) *x = c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile);
    for (Tile<W>* x : {&dk, &dv}) *x = c.tile<W>(kTile, dim);
    for (Tile<W>* x : {&p, &ds}) *x = c.tile<W>(kTile, kTile);
    for (Queries& x : queries) x = {{c, dim, true}, {c, dim, true}, c.tile<W>(kTile, dim), c.take<W>(kTile), 0};
  }
  FactorRows<E> k;  // and v, before it is turned
  Tile<E> k_t, v_t;
  Tile<W> dk, dv, p, ds;
  RowSpace<W>* row;
  Queries queries[Compact::kRun];
};

/// One row: p = e^(s - L) and dS = p (M dP - Delta), in place of s and dP; 0 where `keep` is. m is
/// null without dropout, keep where all attend. n: whole vectors.
template <class E, class W>
void softmax_backward(W* s, W* dp, const W* m, const Lane<W>* keep, Index n, W lse, W delta) {
  for (Index j = 0; j < n; j += kLanes<W>) {
    const Bits<W> in = keep ? vector_at(keep + j) : ~Bits<W>{};
    const Vector<W> p = weight<E>(vector_at(s + j) - lse), kept = m ? vector_at(m + j) : Vector<W>{} + 1;
    const Vector<W> ds = p * (kept * vector_at(dp + j) - delta), weights = kept * p;
    vector_at(dp + j) = std::bit_cast<Vector<W>>(std::bit_cast<Bits<W>>(ds) & in);
    vector_at(s + j) = std::bit_cast<Vector<W>>(std::bit_cast<Bits<W>>(weights) & in);
  }
}

/// The left factor of sums over the rows of x. Of packed ones it is pairs of rows, which come to
/// `first` and each second row from there.
template <class E> Left<E> transposed(Tile<E> x, Index rows, Index n, E* first) {
  if constexpr (!kPacked<E>) return {x.at, 1, x.pitch};
  pair_rows(x, rows, packed<E>(n), {first, 2 * x.pitch}, kEach<std::uint16_t>);
  return {first, 1, 2 * x.pitch};
}

/// Sums of several tasks come in one order: turn `turn` waits until those before it are finished.
void wait_for(const std::int32_t* finished, Index turn) {
  while (__atomic_load_n(finished, __ATOMIC_ACQUIRE) != turn) sched_yield();
}
void finish(std::int32_t* finished, Index turn) {
  __atomic_store_n(finished, static_cast<std::int32_t>(turn + 1), __ATOMIC_RELEASE);
}

/// to += factor x, or = where is_first(row); of the rows that there are.
template <class W, class First>
void add_rows(const Listed<void>& to, Tile<W> x, Index begin, Index end, W factor, First&& is_first) {
  for (Index i = begin; i < end && i < to.n; ++i) {
    W *const sum = to.row<W>(i), *const term = x.row(i);
    const bool first = is_first(i);
    for (Index d = 0; d < to.dim; ++d) sum[d] = (first ? 0 : sum[d]) + factor * term[d];
  }
}

/// The order in which tasks add to what they share: how many turns are finished, and which one is
/// this task's.
struct BackwardOrder {
  std::int32_t* shares;   // [parts of the keys], of dk and dv of one key head at one place
  Index before, sharing;  // heads that add to those: before this one, and all
  std::int32_t* entries;  // [entries of keys], of a bias that heads share; or null
  Index turn;             // in those
};

/// A run of query tiles of one head.
template <class E> struct BackwardTask {
  using W = Sum<E>;
  using Queries = typename BackwardSpace<E>::Queries;
  const BackwardPass& pass;
  Head head;
  const TermGradients& d_terms;
  Tiling::Range tiles;
  BackwardOrder order;
  bool direct;
  BackwardSpace<E>& space;
  Index dim = pass.sizes.dim, wide = whole_vectors<W>(dim);
  W scale = static_cast<W>(pass.sizes.scale);
  const W* lse = static_cast<const W*>(pass.lse) + head.first_row();
  const std::int32_t* lists = head.t.keys_begin.data();

  void run() {
    for (std::int32_t i = tiles.begin; i < tiles.end; ++i) load(i, queries(i));
    for (std::int32_t visit = 0, entry; (entry = head.t.entry_of(tiles, visit)) >= 0; ++visit) {
      KeyTile<E> keys(head, head.t.keys.data()[entry].tile, d_terms, *space.row);
      load_keys(keys, head.t.entry_of(tiles, visit + 1));
      if (order.entries) wait_for(order.entries + entry, order.turn);
      if (!keys.listed) clear(space.dk, keys.n), clear(space.dv, keys.n);  // else v is in dv
      for (std::int32_t i = tiles.begin; i < tiles.end; ++i)
        if (lists[i] + visit < lists[i + 1] && queries(i).last >= keys.first) meet(i, keys, visit);
      if (order.entries) finish(order.entries + entry, order.turn);
      add_to_keys(keys, entry);
    }
    for (std::int32_t i = tiles.begin; i < tiles.end; ++i)
      add_rows(head.of_queries(pass.dq, i), queries(i).dq, 0, kTile, scale, [&](Index) { return direct; });
  }

 private:
  Queries& queries(std::int32_t i) const { return space.queries[i - tiles.begin]; }
  /// All at once: a call for each row would take longer than its line.
  static void clear(Tile<W> x, Index rows) { __builtin_memset(x.at, 0, sizeof(W) * at(rows * x.pitch)); }

  void load(std::int32_t i, Queries& x) {
    const Listed<const void> d_o = head.of_queries(pass.d_o, i), o = head.of_queries(pass.o, i);
    clear(x.dq, o.n), x.last = head.last_token(i);
    x.q.read(head.of_queries(pass.q, i), o.n, kPacked<E> ? 1 : scale), x.q.pack(o.n, dim);
    x.d_o.read(d_o, o.n, W{1}), x.d_o.pack(o.n, dim);
    const W* const delta = pass.delta ? static_cast<const W*>(pass.delta) + head.first_row() : nullptr;
    with_stored<E>(pass.q.type, [&]<class T>() {
      for (Index r = 0; r < o.n; ++r)
        x.delta[r] = delta ? delta[o.at(r)] : dot(o.row<const T>(r), d_o.row<const T>(r), dim);
    });
  }
  /// next: the entry to come, or -1.
  void load_keys(const KeyTile<E>& keys, std::int32_t next) {
    const Listed<const void> k = head.of_keys(pass.k, keys.number), v = head.of_keys(pass.v, keys.number);
    prefetch(head.of_keys(pass.dk, keys.number)), prefetch(head.of_keys(pass.dv, keys.number));
    if (keys.listed) {  // by one tile of queries: dv comes when v has gone
      gather(v, keys.n, W{1}, space.dv), gather(k, keys.n, W{1}, space.k.wide);
    } else {
      space.k.read(v, keys.n, W{1}), transpose(space.k.at, keys.n, packed<E>(dim), space.v_t);
      space.k.read(k, keys.n, W{1}), transpose(space.k.at, keys.n, packed<E>(dim), space.k_t);
      space.k.pack(keys.n, dim);
    }
    for (const Input& x : {pass.k, pass.v})
      if (next >= 0) prefetch(head.of_keys(x, head.t.keys.data()[next].tile));
  }

  void meet(std::int32_t i, KeyTile<E>& keys, std::int32_t visit) {
    Queries& x = queries(i);
    const Listed<const void> q_rows = head.of_queries(pass.q, i);
    const Index q0 = head.t.q_tile.data()[i].begin, rows = q_rows.n, n = keys.n;
    const bool partial = head.t.keys.data()[lists[i] + visit].partial;
    for (Index r = 0; keys.terms && r < rows; ++r) keys.terms.fetch(head.q_name[q0 + r]);
    const std::uint8_t *list = keys.listed, *by_key = nullptr;
    if (list) {
      by_key = pair_dots(x.q.widened(q_rows, rows, scale), space.k.wide, list, rows, wide, space.p);
      pair_dots(x.d_o.widened(head.of_queries(pass.d_o, i), rows, W{1}), space.dv, list, rows, wide, space.ds);
    } else {
      product(plain(x.q.at, scale), space.k_t, space.p, rows, dim, n);
      product(plain(x.d_o.at), space.v_t, space.ds, rows, dim, n);
    }
    for (Index r = 0; r < rows; ++r, list += list ? 1 + *list : 0)
      weigh(keys, q0 + r, list, partial, space.p.row(r), space.ds.row(r), lse[q_rows.at(r)], x.delta[r]);
    if (by_key) {
      pair_sums(space.ds, space.k.wide, keys.listed, rows, wide, x.dq, true);
      pair_sums<true>(space.p, x.d_o.wide, by_key, n, wide, space.dv, false);
      pair_sums<true>(space.ds, x.q.wide, by_key, n, wide, space.dk, false);
      return;
    }
    const Tile<E> p = factor<E>(space.p), ds = factor<E>(space.ds);
    const Left<E> p_t = transposed(p, rows, n, p.at), ds_t = transposed(ds, rows, n, p.row(1));
    const auto pairs = [&](Index r, Index j) { return keys.pairs(q0 + r, j, partial); };
    const auto pairs_transposed = [&](Index j, Index r) { return pairs(r, j); };
    sum_over_rows(p_t, x.d_o, space.dv, n, rows, dim, pairs_transposed);
    sum_over_rows(ds_t, x.q, space.dk, n, rows, dim, pairs_transposed);
    sum_over_rows(plain(ds), space.k, x.dq, rows, n, dim, pairs);
  }
  /// The scores s and dP of query q become P and dS.
  void weigh(KeyTile<E>& keys, Index q, const std::uint8_t* list, bool partial, W* s, W* dp, W lse_of_q, W delta) {
    const std::int32_t token = head.q_name[q];
    const bool masked = keys.terms && keys.terms.add(token, s);
    const W* const multiplier = keys.multipliers_of(q, list);
    softmax_backward<E>(s, dp, multiplier, keys.mask_of(q, partial), whole_vectors<W>(list ? *list : keys.n), lse_of_q,
                        delta);
    for (Index j = 0; masked && j < keys.n; ++j)
      if (keys.terms.masks(token, j)) s[j] = dp[j] = 0;
    if (keys.terms) keys.terms.collect(token, dp);
    if (!list) pack_row<E>(s, keys.n), pack_row<E>(dp, keys.n);
  }

  /// Adds to dk and dv of a tile, share after share, each in its turn.
  void add_to_keys(const KeyTile<E>& keys, std::int32_t entry) {
    const Listed<void> dk = head.of_keys(pass.dk, keys.number), dv = head.of_keys(pass.dv, keys.number);
    std::int32_t from = 0, to = 0;
    for (const Compact::Share* share = head.t.share.data() + head.t.share_begin.data()[entry]; from < keys.n;
         ++share, from = to) {
      to = share->end - keys.range.begin;
      const Index turn = share->turn * order.sharing + order.before;
      wait_for(order.shares + share->rows, turn);
      const bool writes = direct && order.before == 0 && share->first;
      const auto is_first = [&](Index j) { return writes && head.t.k_first.data()[keys.range.begin + j] != 0; };
      add_rows(dk, space.dk, from, to, kPacked<E> && !keys.listed ? scale : W{1}, is_first);
      add_rows(dv, space.dv, from, to, W{1}, is_first);
      if (keys.terms) keys.terms.add_columns(from, to);
      if (share->last) finish(order.shares + share->rows, turn);
    }
  }
};

}  // namespace
}  // namespace hilt::kernels
