// Attention on tiles: at most 128 queries meet up to 128 keys, as compact() lists them; rows are
// gathered from where the tokens lie, padded and widened to f32 (f64).
//
//   forward    a task is some query tiles of one head; key tiles in ascending order, which every query tile shares:
//                  S = (c Q) K^T     m' = max(m, rowmax S)     P = e^(S - m')     l = e^(m - m') l + rowsum P
//                  O = e^(m - m') O + (M P) V                  and at the end     O / l     L = m + log l
//   backward   a task is a run of query tiles of one head; the tiles of keys that they meet:
//                  S = (c Q) K^T     P = e^(S - L)      dP = dO V^T     dS = P (M dP - Delta)
//                  dQ += c dS K                                         stays with the task
//                  dV += (M P)^T dO     dK += dS^T (c Q)                task after task, in the order of their turns
//
// So all sums have one order, whatever the number of threads. M: dropout's multipliers. Matrix work
// is product(), of bf16 by the hardware where it has that; where compact() lists the pairs of
// a tile, they are taken one by one instead, and a row of S, P or dS has those of its query alone.
#include "ops/hilbert/kernels/backward_cpu.h"

namespace hilt::kernels {
namespace {

// ---- forward ------------------------------------------------------------------------------------

template <class E>
constexpr Index kGroup = kPacked<E> ? 8 : 4;  // query tiles that share a key tile once it is gathered
constexpr Index kSlab = 64;                   // queries whose scores stay in the L1 cache

template <class E> struct ForwardSpace {
  using W = Sum<E>;
  struct Queries {
    FactorRows<E> q;
    Tile<W> o;
    W *m, *l;
    Index n = 0;                      // queries
    std::int32_t next = 0, last = 0;  // of its list of key tiles; token that causality compares
  };
  ForwardSpace(Carver&& c, Index dim, Index entries) : v(c, dim, true), row(row_space<W>(c, entries)) {
    k_t = c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile);
    wide_k = c.tile<W>(kTile, dim), s = c.tile<W>(kSlab, kTile);
    for (Queries& x : queries) x = {{c, dim, false}, c.tile<W>(kTile, dim), c.take<W>(kTile), c.take<W>(kTile)};
  }
  Tile<E> k_t;
  FactorRows<E> v;  // and k, before it is turned
  Tile<W> wide_k, s;
  RowSpace<W>* row;
  Queries queries[kGroup<E>];
};

/// Query tiles [begin, end) of one head.
template <class E> struct ForwardTask {
  using W = Sum<E>;
  using Queries = typename ForwardSpace<E>::Queries;
  const ForwardPass& f;
  Head head;
  std::int32_t begin, end;
  ForwardSpace<E>& space;
  Index dim = f.sizes.dim, wide = whole_vectors<W>(dim);
  W scale = static_cast<W>(f.sizes.scale);
  W* lse = static_cast<W*>(f.lse) + head.first_row();

  Queries& queries(std::int32_t i) const { return space.queries[i - begin]; }
  /// The next tile of keys of query tile i, and of all; kNone behind the last.
  static constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
  std::int32_t next_of(std::int32_t i) const {
    const std::int32_t next = queries(i).next;
    return next == head.t.keys_begin.data()[i + 1] ? kNone : head.t.keys.data()[next].tile;
  }
  std::int32_t next_tile() const {
    std::int32_t tile = kNone;
    for (std::int32_t i = begin; i < end; ++i) tile = next_of(i) < tile ? next_of(i) : tile;
    return tile;
  }

  void load(std::int32_t i) {
    Queries& x = queries(i);
    const Listed<void> state = head.of_queries(f.o, i);
    x.n = state.n, x.next = head.t.keys_begin.data()[i], x.last = head.last_token(i);
    prefetch(state);
    x.q.read(head.of_queries(f.q, i), x.n, scale);
    for (Index r = 0; r < x.n; ++r) {
      x.m[r] = f.fresh ? kMinusInfinity<W> : lse[state.at(r)];
      x.l[r] = x.m[r] == kMinusInfinity<W> ? 0 : 1;
      const Index held = x.l[r] != 0 ? dim : 0;
      for (Index d = held; d < wide; ++d) x.o.row(r)[d] = 0;
      with_stored<W>(f.o.type, [&]<class O>() {
        for (Index d = 0; d < held; ++d) x.o.row(r)[d] = static_cast<W>(state.row<O>(r)[d]);
      });
    }
  }
  void load_keys(const KeyTile<E>& keys) {
    const Listed<const void> k = head.of_keys(f.k, keys.number), v = head.of_keys(f.v, keys.number);
    if (keys.listed) {
      gather(k, keys.n, W{1}, space.wide_k), space.v.is_wide = false;
      space.v.widened(v, keys.n, W{1});
    } else {
      space.v.read(k, keys.n, W{1}), transpose(space.v.at, keys.n, packed<E>(dim), space.k_t);
      space.v.read(v, keys.n, W{1}), space.v.pack(keys.n, dim);
    }
    if (keys.number + 1 < static_cast<std::int32_t>(head.t.k_tile.size()))  // most often the next one
      prefetch(head.of_keys(f.k, keys.number + 1)), prefetch(head.of_keys(f.v, keys.number + 1));
  }

  /// Query tile i, if the tile of keys is its next.
  void meet(std::int32_t i, KeyTile<E>& keys) {
    if (next_of(i) != keys.number) return;
    Queries& x = queries(i);
    const bool partial = head.t.keys.data()[x.next++].partial;
    if (x.last < keys.first) return;
    const std::uint8_t* lists = keys.listed;
    for (Index first = 0; first < x.n; first += kSlab) {
      const Index rows = x.n - first < kSlab ? x.n - first : kSlab, q0 = head.t.q_tile.data()[i].begin + first;
      const Tile<W> o = x.o.from(first);
      for (Index r = 0; keys.terms && r < rows; ++r) keys.terms.fetch(head.q_name[q0 + r]);
      if (lists)
        pair_dots(x.q.widened(head.of_queries(f.q, i), x.n, scale).from(first), space.wide_k, lists, rows, wide,
                  space.s);
      else product(plain(x.q.at.from(first), scale), space.k_t, space.s, rows, dim, keys.n);
      const std::uint8_t* list = lists;
      for (Index r = 0; r < rows; ++r, list += list ? 1 + *list : 0)
        weigh(keys, q0 + r, list, partial, space.s.row(r), x.m[first + r], x.l[first + r], o.row(r));
      if (lists) lists = pair_sums(space.s, space.v.wide, lists, rows, wide, o, true);
      else
        sum_over_rows(plain(factor<E>(space.s)), space.v, o, rows, keys.n, dim,
                      [&](Index r, Index j) { return keys.pairs(q0 + r, j, partial); });
    }
  }
  /// The scores of query q become weights.
  void weigh(KeyTile<E>& keys, Index q, const std::uint8_t* list, bool partial, W* s, W& m, W& l, W* o) {
    const Index met = list ? *list : keys.n, whole = whole_vectors<W>(met);
    if (met == 0) return;
    if (keys.terms) keys.terms.add(head.q_name[q], s);
    if (const Lane<W>* const keep = keys.mask_of(q, partial))
      for (Index j = 0; j < whole; j += kLanes<W>)
        vector_at(s + j) = vector_at(keep + j) != 0 ? vector_at(s + j) : Vector<W>{} + kMinusInfinity<W>;
    for (Index j = met; j < whole; ++j) s[j] = kMinusInfinity<W>;
    online_softmax<E>(s, whole, m, l, o, dim);
    if (const W* const multiplier = keys.multipliers_of(q, list))
      for (Index j = 0; j < met; ++j) s[j] *= multiplier[j];
    if (!list) pack_row<E>(s, met);
  }

  void store(std::int32_t i) {
    const Queries& x = queries(i);
    const Listed<void> result = head.of_queries(f.o, i);
    for (Index r = 0; r < x.n; ++r) {
      const W share = x.l[r] == 0 ? W{0} : 1 / x.l[r];
      with_stored<W>(f.o.type, [&]<class O>() {
        for (Index d = 0; d < dim; ++d) result.row<O>(r)[d] = static_cast<O>(x.o.row(r)[d] * share);
      });
      lse[result.at(r)] = x.m[r] + math::log(x.l[r]);
    }
  }
};

// ---- passes -------------------------------------------------------------------------------------

/// Heads of a token lie together. The last group of tiles first: causal ones have the most keys.
template <class E> void attention_forward(Cuda, const ForwardPass& f, const Decision& how) {
  const Compact& t = *how.lists;
  const auto tiles = std::ssize(t.q_tile), places = f.place_count();
  Index group = kGroup<E>;  // smaller where that would leave threads without work
  while (group > 1 && places * f.n_heads * tiles < 4 * group * thread_count()) group /= 2;
  const Index groups = (tiles + group - 1) / group;
  Tasks<ForwardSpace<E>> tasks(f, t, places * f.n_heads * groups, 2, 0);
  const auto work = [&](Index worker, Index) {
    ForwardSpace<E> space = tasks.space_of(worker);
    for (Index task; tasks.take(task);) {
      const Index first = (groups - 1 - task / f.n_heads % groups) * group, number = task / f.n_heads / groups;
      const std::int32_t begin = hilt::narrow(first), end = hilt::narrow(first + group < tiles ? first + group : tiles);
      const Head head{f, t, f.place(number), f.heads[task % f.n_heads], tasks.tokens_of(number)};
      ForwardTask<E> queries{f, head, begin, end, space};
      for (std::int32_t i = begin; i < end; ++i) queries.load(i);
      for (std::int32_t tile; (tile = queries.next_tile()) != queries.kNone;) {
        KeyTile<E> keys(head, tile, {}, *space.row);
        queries.load_keys(keys);
        for (std::int32_t i = begin; i < end; ++i) queries.meet(i, keys);
      }
      for (std::int32_t i = begin; i < end; ++i) queries.store(i);
    }
  };
  tasks.workers() == 1 ? work(0, 1) : parallel_for(tasks.workers(), 1, work);  // nobody to share with
}

void delta_of_rows(Cuda, const DeltaPass& x) {
  const AttentionSizes& s = x.sizes;
  with_type<double, float, bf16, f16>(x.o.type, [&]<class T>() {
    const auto o = x.o.rows<const T>(), d_o = x.d_o.rows<const T>();
    auto* const delta = static_cast<Stat<T>*>(x.delta);
    parallel_for(s.batch * s.queries * s.heads, kTile, [&](Index begin, Index end) {
      for (Index i = begin; i < end; ++i) {  // as rows lie in memory
        const Index h = i % s.heads, t = i / s.heads % s.queries, b = i / s.heads / s.queries;
        delta[(b * s.heads + h) * s.queries + t] = dot(o.at(b, t, h), d_o.at(b, t, h), s.dim);
      }
    });
  });
}

template <class E> void attention_backward(Cuda, const BackwardPass& x, const Decision& how) {
  const AttentionSizes& s = x.sizes;
  const Compact& t = *how.lists;
  const auto runs = std::ssize(t.runs);
  const Index places = x.place_count(), sums = places * s.kv_heads * std::ssize(t.turns),
              heads_each = s.heads / s.kv_heads;
  const TermGradients d_terms = x.d_terms ? *x.d_terms : TermGradients{};
  const bool shared = is_shared(d_terms.bias, s);
  // Before the counts, which are small: what a thread keeps goes to the first that asks.
  Tasks<BackwardSpace<E>> tasks(x, t, places * x.n_heads * runs, 5, d_terms.table ? x.terms->entries : 0);
  const Index counts = sums + s.heads + 1 + (shared ? std::ssize(t.keys) : 0);
  const Memory memory(counts * static_cast<Index>(sizeof(std::int32_t)));
  auto* const done = reinterpret_cast<std::int32_t*>(memory.block);
  for (Index i = 0; i < counts; ++i) done[i] = 0;
  std::int32_t *const heads_done = done + sums, *const tasks_done = heads_done + s.heads;
  const auto go_back = [&](Index task, BackwardSpace<E>& space) {
    const Index number = task / runs / x.n_heads, run = task / x.n_heads % runs, i = task % x.n_heads, h = x.heads[i];
    Index before = 0, sharing = 1;
    while (before < i && x.heads[i - before - 1] / heads_each == h / heads_each) ++before;
    while (i + sharing < x.n_heads && x.heads[i + sharing] / heads_each == h / heads_each) ++sharing;
    if (x.terms) space.row->terms.clear();
    // Documents of several rows may overlap in a bias that has no rows: one task after the other.
    if (shared && x.places) wait_for(tasks_done, task);
    const BackwardOrder order{done + (number * s.kv_heads + h / heads_each) * std::ssize(t.turns), before,
                              before + sharing, shared && !x.places ? tasks_done + 1 : nullptr, number * x.n_heads + i};
    const Head head{x, t, x.place(number), h, tasks.tokens_of(number)};
    BackwardTask<E>{x, head, d_terms, t.runs.data()[runs - 1 - run], order, how.direct, space}.run();
    if (shared && x.places) finish(tasks_done, task);
    if (!d_terms.slopes && !d_terms.table) return;
    const Index turn = number * runs + run;
    wait_for(heads_done + h, turn);
    space.row->terms.finish(d_terms, h);
    finish(heads_done + h, turn);
  };
  const auto work = [&](Index worker, Index) {
    BackwardSpace<E> space = tasks.space_of(worker);
    for (Index task; tasks.take(task);) go_back(task, space);
  };
  tasks.workers() == 1 ? work(0, 1) : parallel_for(tasks.workers(), 1, work);  // nobody to share with
}

}  // namespace

template <Isa I> Kernels kernels_at(CpuAt<I>, DType type) {
  Kernels on;
  on.route_forward = [](Cuda, const ForwardPass& f) { return route(Cpu{}, f); };
  on.route_backward = [](Cuda, const BackwardPass& b, bool whole) { return route(Cpu{}, b, whole); };
  on.delta = delta_of_rows;
  const auto take = [&]<class E>() { on.forward = attention_forward<E>, on.backward = attention_backward<E>; };
  if (type == DType::f64) return take.template operator()<double>(), on;
  if constexpr (I == Isa::avx512)
    if (type == DType::bf16 && multiplies_bf16(active_isa())) return take.template operator()<Bf16x2>(), on;
  take.template operator()<float>();
  return on;
}
template Kernels kernels_at(CpuAt<kIsa>, DType);

}  // namespace hilt::kernels
