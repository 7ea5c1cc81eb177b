#pragma once
#include <sched.h>
#include "ops/hilbert/kernels/pairs_cpu.h"
#include "ops/hilbert/kernels/rows_cpu.h"
#include "ops/hilbert/kernels/scores_cpu.h"
#include "ops/hilbert/kernels/tasks_cpu.h"
#include "ops/hilbert/kernels/terms_cpu.h"

// The backward pass of a run of query tiles: see attention_cpu.cpp.

namespace hilt::kernels {
namespace {

template <class E> struct BackwardSpace {
  using W = Sum<E>;
  /// As they come; as sums over them want them, packed by twos, or the same; as pairs want them.
  struct Rows {
    Tile<E> at, packed_rows;
    Tile<W> wide;
    Rows() = default;
    Rows(Carver& c, Index dim) : at(c.tile<E>(kTile, packed<E>(dim))), packed_rows(at) {
      if constexpr (kPacked<E>) packed_rows = c.tile<E>(kTile / 2, packed_width<E>(dim)), wide = c.tile<W>(kTile, dim);
      else wide = at;
    }
  };
  struct Queries {
    Rows q, d_o;
    Tile<W> dq;
    W* delta;
  };
  BackwardSpace(Carver& c, Index dim, Index entries)
      : k(c, dim),
        k_t(c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile)),
        v_t(c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile)),
        dk(c.tile<W>(kTile, dim)),
        dv(c.tile<W>(kTile, dim)),
        p(c.tile<W>(kTile, kTile)),
        ds(c.tile<W>(kTile, kTile)),
        multiplier(c.take<W>(kTile)),
        keep(c.take<Lane<W>>(kTile)),
        terms(c, entries) {
    for (Queries& x : queries) x = {{c, dim}, {c, dim}, c.tile<W>(kTile, dim), c.take<W>(kTile)};
  }
  Rows k;
  Tile<E> k_t, v_t;
  Tile<W> dk, dv, p, ds;
  W* multiplier;
  Lane<W>* keep;  // of a row: 0 where it does not attend
  TermSpace<W> terms;
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

/// P and dS as left factors of sums over their rows; dS becomes one of sums over its columns.
template <class E> struct TransposedFactors { Left<E> p, ds; };
template <class E> TransposedFactors<E> transposed_factors(Tile<Sum<E>> p, Tile<Sum<E>> ds, Index rows, Index n) {
  if constexpr (!kPacked<E>) return {transposed(p), transposed(ds)};
  for (Index r = 0; r < rows; r += 2) {  // two rows of P take the place of the first, those of dS of the second
    const bool two = r + 1 < rows;
    pack_columns<E>(p.row(r), two ? p.row(r + 1) : nullptr, n, p.row(r));
    pack_columns<E>(ds.row(r), two ? ds.row(r + 1) : nullptr, n, p.row(r + 1));
    pack_row<E>(ds.row(r), n);
    if (two) pack_row<E>(ds.row(r + 1), n);
  }
  const Tile<E> twos{factor<E>(p).at, 2 * p.pitch}, twos_of_ds{factor<E>(p).row(1), 2 * p.pitch};
  return {transposed(twos), transposed(twos_of_ds)};
}

/// Sums of several tasks come in one order: place `turn` waits until those before it are done.
void wait_for(const std::int32_t* done, std::int32_t turn) {
  while (__atomic_load_n(done, __ATOMIC_ACQUIRE) != turn) sched_yield();
}

/// to += factor x, or = where is_first(row).
template <class W, class First>
void add_rows(const Source<W>& to, Tile<W> x, Index begin, Index end, W factor, First&& is_first) {
  for (Index i = begin; i < end; ++i) {
    W *const sum = to.row(i), *const term = x.row(i);
    const bool first = is_first(i);
    Index d = 0;
    for (; d + kLanes<W> <= to.dim; d += kLanes<W>) {
      Vector<W> line{};
      if (!first) __builtin_memcpy(&line, sum + d, sizeof line);
      line += factor * vector_at(term + d);
      __builtin_memcpy(sum + d, &line, sizeof line);
    }
    for (; d < to.dim; ++d) sum[d] = (first ? 0 : sum[d]) + factor * term[d];
  }
}

template <class W> void set_zero(Tile<W> x, Index rows, Index wide) {
  for (Index r = 0; r < rows; ++r)
    for (Index d = 0; d < wide; d += kLanes<W>) vector_at(x.row(r) + d) = Vector<W>{};
}

struct Done {
  std::int32_t* shares;  // [places, Hk, parts of the keys]: how many runs have added to dk and dv
  std::int32_t* heads;   // [entries of keys]: how many have been added to a shared bias, or null
};

/// Query tiles of a run at place `number`, of head h, after `before` of `sharing` of its key head.
template <class T, class E>
void backward_run(const BackwardPass& pass, const Compact& t, const TermGradients& d_terms, Done done, Index number,
                  Index h, Index before, Index sharing, Index earlier, Tiling::Range run, bool direct,
                  const BackwardSpace<E>& space) {
  using W = Sum<E>;
  const AttentionSizes& sizes = pass.sizes;
  const Tiling::Place place = pass.place(number);
  const Index dim = sizes.dim, wide = whole_vectors<W>(dim), kv_head = h / (sizes.heads / sizes.kv_heads),
              b = place.row, first_row = (b * sizes.heads + h) * sizes.queries + place.q;
  const auto q = pass.q.rows<const T>().from(place.q), d_o = pass.d_o.rows<const T>().from(place.q);
  const auto k = pass.k.rows<const T>().from(place.k), v = pass.v.rows<const T>().from(place.k);
  const auto dq = pass.dq.rows<W>().from(place.q), dk = pass.dk.rows<W>().from(place.k),
             dv = pass.dv.rows<W>().from(place.k);
  const auto o = pass.o.rows<const T>().from(place.q);
  const W* const lse = static_cast<const W*>(pass.lse) + first_row;
  const W* const delta = pass.delta ? static_cast<const W*>(pass.delta) + first_row : nullptr;
  const W scale = static_cast<W>(sizes.scale), of_q = kPacked<E> ? 1 : scale;
  const std::int32_t* const lists = t.keys_begin.data();
  const auto rows_of = [&](const auto& x, std::int32_t tile) {
    return Source<std::remove_pointer_t<decltype(x.data)>>{x, b, h, dim,
                                                           t.q_token.data() + t.q_tile.data()[tile].begin};
  };
  bool finite[Compact::kRun] = {}, wide_rows[Compact::kRun] = {};  // wide_rows: those are there
  for (std::int32_t visit = 0;; ++visit) {
    std::int32_t lead = -1;  // the last that meets this tile of keys
    for (std::int32_t i = run.begin; i < run.end; ++i)
      if (visit < lists[i + 1] - lists[i]) lead = i;
    if (lead < 0) break;
    const Tiling::Range keys = t.k_tile.data()[t.keys.data()[lists[lead] + visit].tile];
    const Index n = keys.end - keys.begin;
    const Source<const T> k_rows{k, b, kv_head, dim, t.k_token.data() + keys.begin},
        v_rows{v, b, kv_head, dim, k_rows.token};
    const Source<W> dk_rows{dk, b, kv_head, dim, k_rows.token}, dv_rows{dv, b, kv_head, dim, k_rows.token};
    NonFinite in_k;
    Counters counters;
    const std::int32_t* const names = t.k_names().data() + keys.begin;
    const std::uint8_t* const listed = pairs_of(t, t.keys.data()[lists[lead] + visit].tile);
    if (sizes.dropout > 0 && !listed) count_keys(names, place.k, n, counters);
    prefetch(dk_rows, n), prefetch(dv_rows, n);
    if (listed) {  // by one tile of queries: dv comes when v has gone
      gather(v_rows, n, W{1}, space.dv), gather(k_rows, n, W{1}, space.k.wide);
    } else {
      gather(v_rows, n, W{1}, space.k.at), transpose(space.k.at, n, packed<E>(dim), space.v_t);
      const bool finite_k = gather(k_rows, n, W{1}, space.k.at);
      transpose(space.k.at, n, packed<E>(dim), space.k_t);
      if (!finite_k) replace_non_finite(space.k.at, n, dim, in_k);
      pack_rows(space.k.at, n, dim, space.k.packed_rows);
    }
    if (visit + 1 < lists[lead + 1] - lists[lead]) {
      const Tiling::Range ahead = t.k_tile.data()[t.keys.data()[lists[lead] + visit + 1].tile];
      const std::int32_t* const token = t.k_token.data() + ahead.begin;
      prefetch(Source<const T>{k, b, kv_head, dim, token}, ahead.end - ahead.begin);
      prefetch(Source<const T>{v, b, kv_head, dim, token}, ahead.end - ahead.begin);
    }
    const KeyTerms<T> terms(pass.terms, t, keys, place.k, space.terms);
    std::int32_t* const pair_count = done.heads ? done.heads + lists[lead] + visit : nullptr;
    if (pair_count) wait_for(pair_count, static_cast<std::int32_t>(earlier));

    bool add = false;
    for (std::int32_t i = run.begin; i < run.end; ++i) {
      if (visit >= lists[i + 1] - lists[i]) continue;
      const auto& x = space.queries[i - run.begin];
      const bool partial = t.keys.data()[lists[i] + visit].partial;
      const Index q0 = t.q_tile.data()[i].begin, rows = t.q_tile.data()[i].end - q0;
      const Source<const T> q_rows = rows_of(q, i), d_o_rows = rows_of(d_o, i);
      bool& asked = finite[i - run.begin];
      if (!asked) {  // the first time, and where zeros took the place of what is asked for again
        asked = gather(q_rows, rows, of_q, x.q.at);
        asked = gather(d_o_rows, rows, W{1}, x.d_o.at) && asked;
        if (asked) pack_rows(x.q.at, rows, dim, x.q.packed_rows), pack_rows(x.d_o.at, rows, dim, x.d_o.packed_rows);
        for (Index r = 0; r < rows; ++r)
          x.delta[r] = delta ? delta[q_rows.token[r]] : dot(o.at(b, q_rows.token[r], h), d_o_rows.row(r), dim);
      }
      if (terms)
        for (Index r = 0; r < rows; ++r) terms.fetch(d_terms, b, h, t.q_names().data()[q0 + r]);
      const std::uint8_t *list = listed, *by_key = nullptr;
      if (listed) {
        if (kPacked<E> && !wide_rows[i - run.begin]) {
          wide_rows[i - run.begin] = true;
          gather(q_rows, rows, scale, x.q.wide), gather(d_o_rows, rows, W{1}, x.d_o.wide);
        }
        by_key = pair_dots(x.q.wide, space.k.wide, listed, rows, wide, space.p);
        pair_dots(x.d_o.wide, space.dv, listed, rows, wide, space.ds);
      } else {
        product(plain(x.q.at, scale), space.k_t, space.p, rows, dim, n);
        product(plain(x.d_o.at), space.v_t, space.ds, rows, dim, n);
      }
      for (Index r = 0; r < rows; ++r, list += list ? 1 + *list : 0) {
        const Index of_row = list ? *list : n;
        W *const p = space.p.row(r), *const ds = space.ds.row(r);
        const std::int32_t token = q_rows.token[r], name = t.q_names().data()[q0 + r];
        const bool masked = terms && terms.add(b, h, name, p);
        if (sizes.dropout > 0 && list) count_listed(names, place.k, list, counters);
        if (sizes.dropout > 0) multipliers(sizes, b, h, place.k + name, counters, of_row, space.multiplier);
        if (partial && !list) mask(t, q0 + r, keys, space.keep);
        softmax_backward<E>(p, ds, sizes.dropout > 0 ? space.multiplier : nullptr,
                            partial && !list ? space.keep : nullptr, whole_vectors<W>(of_row), lse[token], x.delta[r]);
        if (masked) terms.drop(b, h, name, p), terms.drop(b, h, name, ds);
        if (terms) terms.collect(d_terms, b, h, name, ds);
      }
      if (listed) {
        pair_sums(space.ds, space.k.wide, listed, rows, wide, x.dq, visit > 0);
        pair_sums_transposed(space.p, x.d_o.wide, by_key, n, wide, space.dv);
        pair_sums_transposed(space.ds, x.q.wide, by_key, n, wide, space.dk);
        continue;
      }
      const auto [p_t, ds_t] = transposed_factors<E>(space.p, space.ds, rows, n);
      const Left<E> ds = plain(factor<E>(space.ds));
      const auto pairs = [&](Index row, Index j) {
        if (terms && terms.masks(b, h, t.q_names().data()[q0 + row], j)) return false;
        return !partial || attends(t, static_cast<std::size_t>(q0 + row), static_cast<std::size_t>(keys.begin + j));
      };
      const auto pairs_transposed = [&](Index j, Index row) { return pairs(row, j); };
      NonFinite in_q, in_d_o;
      if (!asked) {
        replace_non_finite(x.q.at, rows, dim, in_q), replace_non_finite(x.d_o.at, rows, dim, in_d_o);
        pack_rows(x.q.at, rows, dim, x.q.packed_rows), pack_rows(x.d_o.at, rows, dim, x.d_o.packed_rows);
      }
      product(p_t, x.d_o.packed_rows, space.dv, n, rows, dim, add);
      add_non_finite(in_d_o, p_t, d_o_rows, W{1}, space.dv, n, pairs_transposed);
      product(ds_t, x.q.packed_rows, space.dk, n, rows, dim, add);
      add_non_finite(in_q, ds_t, q_rows, of_q, space.dk, n, pairs_transposed);
      product(ds, space.k.packed_rows, x.dq, rows, n, dim, visit > 0);
      add_non_finite(in_k, ds, k_rows, W{1}, x.dq, rows, pairs);
      add = true;
    }
    if (pair_count) __atomic_store_n(pair_count, static_cast<std::int32_t>(earlier + 1), __ATOMIC_RELEASE);

    std::int32_t from = 0, to = 0;
    for (const Compact::Share* share = t.share.data() + t.share_begin.data()[lists[lead] + visit]; from < n;
         ++share, from = to) {
      to = share->end - keys.begin;
      std::int32_t* const count = done.shares + (number * sizes.kv_heads + kv_head) * std::ssize(t.turns) + share->rows;
      const std::int32_t turn = static_cast<std::int32_t>(share->turn * sharing + before);
      wait_for(count, turn);
      const bool writes = direct && before == 0 && share->first;
      const auto is_first = [&](Index j) { return writes && t.k_first.data()[keys.begin + j] != 0; };
      add_rows(dk_rows, space.dk, from, to, kPacked<E> && !listed ? scale : W{1}, is_first);
      add_rows(dv_rows, space.dv, from, to, W{1}, is_first);
      if (terms) terms.add_columns(d_terms, b, h, from, to);
      if (share->last) __atomic_store_n(count, turn + 1, __ATOMIC_RELEASE);
    }
  }
  for (std::int32_t i = run.begin; i < run.end; ++i) {
    const Tile<W> x = space.queries[i - run.begin].dq;
    const Index rows = t.q_tile.data()[i].end - t.q_tile.data()[i].begin;
    if (lists[i] == lists[i + 1]) set_zero(x, rows, wide);
    add_rows(rows_of(dq, i), x, 0, rows, scale, [&](Index) { return direct; });
  }
}

}  // namespace
}  // namespace hilt::kernels
