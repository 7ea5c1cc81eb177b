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
//
// A masked score is -inf, its P and dS are set to 0, not multiplied. But 0 x NaN is NaN, so a row
// that is not finite never enters a product that sums over rows: it is taken out, zeros take its
// place, and the pairs that do attend are added one by one.
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
    Tile<E> q;
    Tile<W> wide_q, o;
    W *m, *l;
  };
  ForwardSpace(Carver& c, Index dim, Index entries)
      : k_t(c.tile<E>(whole_vectors<E>(packed<E>(dim)), kTile)),
        v(c.tile<E>(kTile, packed_width<E>(dim))),
        rows(v),
        wide_k(c.tile<W>(kTile, dim)),
        s(c.tile<W>(kSlab, kTile)),
        multiplier(c.take<W>(kTile)),
        keep(c.take<Lane<W>>(kTile)),
        terms(c, entries) {
    for (Queries& x : queries) {
      x.q = c.tile<E>(kTile, packed<E>(dim)), x.o = c.tile<W>(kTile, dim);
      x.m = c.take<W>(kTile), x.l = c.take<W>(kTile);
      if constexpr (kPacked<E>) x.wide_q = c.tile<W>(kTile, dim);
      else x.wide_q = x.q;
    }
    if constexpr (kPacked<E>) rows = c.tile<E>(kTile, packed<E>(dim)), wide_v = c.tile<W>(kTile, dim);
    else wide_v = v;
  }
  Tile<E> k_t, v, rows;  // rows: as they come, before they are turned or packed
  Tile<W> wide_k, wide_v, s;
  W* multiplier;
  Lane<W>* keep;  // of a row: 0 where it does not attend
  TermSpace<W> terms;
  Queries queries[kGroup<E>];
};

/// Query tiles [begin, end) of head h, at one place; T: of the inputs, O: of the results.
template <class T, class O, class E>
void forward_tiles(const ForwardPass& f, const Compact& t, Tiling::Place place, Index h, Index begin, Index end,
                   const ForwardSpace<E>& space) {
  using W = Sum<E>;
  const AttentionSizes& sizes = f.sizes;
  const Index dim = sizes.dim, wide = whole_vectors<W>(dim), kv_head = h / (sizes.heads / sizes.kv_heads),
              b = place.row;
  const auto q = f.q.rows<const T>().from(place.q), k = f.k.rows<const T>().from(place.k),
             v = f.v.rows<const T>().from(place.k);
  const auto o = f.o.rows<O>().from(place.q);
  const W scale = static_cast<W>(sizes.scale);
  W* const lse = static_cast<W*>(f.lse) + (b * sizes.heads + h) * sizes.queries + place.q;
  std::int32_t next[kGroup<E>];  // of its list of key tiles
  for (Index g = 0; g < end - begin; ++g) {
    const Tiling::Range range = t.q_tile.data()[begin + g];
    const auto& x = space.queries[g];
    const Source<O> state{o, b, h, dim, t.q_token.data() + range.begin};
    gather(Source<const T>{q, b, h, dim, state.token}, range.end - range.begin, scale, x.q);
    for (Index i = 0; i < range.end - range.begin; ++i) {
      x.m[i] = f.fresh ? kMinusInfinity<W> : lse[state.token[i]];
      x.l[i] = x.m[i] == kMinusInfinity<W> ? 0 : 1;
      const Index held = x.l[i] != 0 ? dim : 0;
      for (Index d = held; d < wide; ++d) x.o.row(i)[d] = 0;
      for (Index d = 0; d < held; ++d) x.o.row(i)[d] = static_cast<W>(state.row(i)[d]);
    }
    next[g] = t.keys_begin.data()[begin + g];
  }
  bool wide_q[kGroup<E>] = {};  // is there
  for (;;) {
    constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();
    std::int32_t tile = kNone;
    for (Index g = 0; g < end - begin; ++g)
      if (next[g] < t.keys_begin.data()[begin + g + 1] && t.keys.data()[next[g]].tile < tile)
        tile = t.keys.data()[next[g]].tile;
    if (tile == kNone) break;

    const Tiling::Range keys = t.k_tile.data()[tile];
    const Index n = keys.end - keys.begin;
    const Source<const T> k_rows{k, b, kv_head, dim, t.k_token.data() + keys.begin},
        v_rows{v, b, kv_head, dim, k_rows.token};
    const std::uint8_t* listed = pairs_of(t, tile);
    if (listed) gather(k_rows, n, W{1}, space.wide_k);
    else gather(k_rows, n, W{1}, space.rows), transpose(space.rows, n, packed<E>(dim), space.k_t);
    NonFinite in_v;
    Counters counters;
    const std::int32_t* const names = t.k_names().data() + keys.begin;
    if (sizes.dropout > 0 && !listed) count_keys(names, place.k, n, counters);
    const KeyTerms<T> terms(f.terms, t, keys, place.k, space.terms);
    if (listed) {
      gather(v_rows, n, W{1}, space.wide_v);
    } else {
      if (!gather(v_rows, n, W{1}, space.rows)) replace_non_finite(space.rows, n, dim, in_v);
      pack_rows(space.rows, n, dim, space.v);
    }

    if (tile + 1 < static_cast<std::int32_t>(t.k_tile.size())) {  // most often the next one
      const Tiling::Range ahead = t.k_tile.data()[tile + 1];
      const std::int32_t* const token = t.k_token.data() + ahead.begin;
      prefetch(Source<const T>{k, b, kv_head, dim, token}, ahead.end - ahead.begin);
      prefetch(Source<const T>{v, b, kv_head, dim, token}, ahead.end - ahead.begin);
    }

    for (Index g = 0; g < end - begin; ++g) {
      if (next[g] == t.keys_begin.data()[begin + g + 1] || t.keys.data()[next[g]].tile != tile) continue;
      const bool partial = t.keys.data()[next[g]++].partial;
      const auto& x = space.queries[g];
      const Tiling::Range range = t.q_tile.data()[begin + g];
      for (Index first = 0; first < range.end - range.begin; first += kSlab) {
        const Index left = range.end - range.begin - first, rows = left < kSlab ? left : kSlab,
                    q0 = range.begin + first;
        const Tile<W> acc = x.o.from(first);
        if (terms)
          for (Index r = 0; r < rows; ++r) terms.fetch({}, b, h, t.q_names().data()[q0 + r]);
        const std::uint8_t *const lists = listed, *list = listed;
        if (kPacked<E> && listed && !wide_q[g])
          wide_q[g] = true, gather(Source<const T>{q, b, h, dim, t.q_token.data() + range.begin},
                                   range.end - range.begin, scale, x.wide_q);
        if (listed) listed = pair_dots(x.wide_q.from(first), space.wide_k, listed, rows, wide, space.s);
        else product(plain(x.q.from(first), scale), space.k_t, space.s, rows, dim, n);
        for (Index r = 0; r < rows; ++r, list += list ? 1 + *list : 0) {
          W* const s = space.s.row(r);
          const Index met = list ? *list : n;
          if (met == 0) continue;
          if (terms) terms.add(b, h, t.q_names().data()[q0 + r], s);
          if (partial && !list) {
            mask(t, q0 + r, keys, space.keep);
            for (Index j = 0; j < whole_vectors<W>(n); j += kLanes<W>)
              vector_at(s + j) = vector_at(space.keep + j) != 0 ? vector_at(s + j) : Vector<W>{} + kMinusInfinity<W>;
          }
          for (Index j = met; j < whole_vectors<W>(met); ++j) s[j] = kMinusInfinity<W>;
          online_softmax<E>(s, whole_vectors<W>(met), x.m[first + r], x.l[first + r], acc.row(r), dim);
          if (sizes.dropout > 0) {
            if (list) count_listed(names, place.k, list, counters);
            multipliers(sizes, b, h, place.k + t.q_names().data()[q0 + r], counters, met, space.multiplier);
            for (Index j = 0; j < met; ++j) s[j] *= space.multiplier[j];
          }
          if (!list) pack_row<E>(s, met);
        }
        const Left<E> weights = plain(factor<E>(space.s));
        if (listed) pair_sums(space.s, space.wide_v, lists, rows, wide, acc, true);
        else product(weights, space.v, acc, rows, n, dim, true);
        add_non_finite(in_v, weights, v_rows, W{1}, acc, rows, [&](Index r, Index j) {
          if (terms && terms.masks(b, h, t.q_names().data()[q0 + r], j)) return false;
          return !partial || attends(t, static_cast<std::size_t>(q0 + r), static_cast<std::size_t>(keys.begin + j));
        });
      }
    }
  }
  for (Index g = 0; g < end - begin; ++g) {
    const Tiling::Range range = t.q_tile.data()[begin + g];
    const auto& x = space.queries[g];
    const Source<O> result{o, b, h, dim, t.q_token.data() + range.begin};
    for (Index i = 0; i < range.end - range.begin; ++i) {
      const W share = x.l[i] == 0 ? W{0} : 1 / x.l[i];
      O* const to = result.row(i);
      for (Index d = 0; d < dim; ++d) to[d] = static_cast<O>(x.o.row(i)[d] * share);
      lse[result.token[i]] = x.m[i] + math::log(x.l[i]);
    }
  }
}

// ---- passes -------------------------------------------------------------------------------------

/// Heads of a token lie together. The last group of tiles first: causal ones have the most keys.
template <class T, class E> void attention_forward(Cuda, const ForwardPass& f, const Decision& how) {
  using W = Sum<E>;
  const Compact& t = *how.lists;
  const auto tiles = std::ssize(t.q_tile), places = f.place_count();
  Index group = kGroup<E>;  // smaller where that would leave threads without work
  while (group > 1 && places * f.n_heads * tiles < 4 * group * thread_count()) group /= 2;
  const Index groups = (tiles + group - 1) / group;
  const auto forward = f.o.type == f.q.type ? forward_tiles<T, T, E> : forward_tiles<T, W, E>;
  Tasks<ForwardSpace<E>> tasks(f, places * f.n_heads * groups, 2, 0);
  const auto work = [&](Index worker, Index) {
    const ForwardSpace<E> space = tasks.space_of(worker);
    for (Index task; tasks.take(task);) {
      const Index begin = (groups - 1 - task / f.n_heads % groups) * group;
      forward(f, t, f.place(task / f.n_heads / groups), f.heads[task % f.n_heads], begin,
              begin + group < tiles ? begin + group : tiles, space);
    }
  };
  if (tasks.workers == 1) work(0, 1);  // nobody to share with
  else parallel_for(tasks.workers, 1, work);
}

template <class T> void attention_delta(Cuda, const DeltaPass& x) {
  const AttentionSizes& s = x.sizes;
  const auto o = x.o.rows<const T>(), d_o = x.d_o.rows<const T>();
  auto* const delta = static_cast<Stat<T>*>(x.delta);
  parallel_for(s.batch * s.queries * s.heads, kTile, [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) {  // as rows lie in memory
      const Index h = i % s.heads, t = i / s.heads % s.queries, b = i / s.heads / s.queries;
      delta[(b * s.heads + h) * s.queries + t] = dot(o.at(b, t, h), d_o.at(b, t, h), s.dim);
    }
  });
}

template <class T, class E> void attention_backward(Cuda, const BackwardPass& x, const Decision& how) {
  const AttentionSizes& s = x.sizes;
  const Compact& t = *how.lists;
  const auto runs = std::ssize(t.runs), turns = std::ssize(t.turns);
  const Index places = x.place_count(), sums = places * s.kv_heads * turns, heads_each = s.heads / s.kv_heads;
  const TermGradients d_terms = x.d_terms ? *x.d_terms : TermGradients{};
  const bool shared = is_shared(d_terms.bias, s);
  const Index counts = sums + s.heads + 1 + (shared ? std::ssize(t.keys) : 0);
  const Memory memory(counts * static_cast<Index>(sizeof(std::int32_t)));
  auto* const done = reinterpret_cast<std::int32_t*>(memory.block);
  for (Index i = 0; i < counts; ++i) done[i] = 0;
  const Done so_far{done, shared && !x.places ? done + sums + s.heads + 1 : nullptr};
  Tasks<BackwardSpace<E>> tasks(x, places * x.n_heads * runs, 5, d_terms.table ? x.terms->entries : 0);
  const auto go_back = [&](Index task, const BackwardSpace<E>& space) {
    const Index number = task / runs / x.n_heads, run = task / x.n_heads % runs, i = task % x.n_heads, h = x.heads[i];
    Index before = 0, sharing = 1;
    while (before < i && x.heads[i - before - 1] / heads_each == h / heads_each) ++before;
    while (i + sharing < x.n_heads && x.heads[i + sharing] / heads_each == h / heads_each) ++sharing;
    std::int32_t *const head_done = done + sums + h, *const task_done = done + sums + s.heads;
    if (x.terms) space.terms.clear();
    // Documents of several rows may overlap in a bias that has no rows: one task after the other.
    if (shared && x.places) wait_for(task_done, static_cast<std::int32_t>(task));
    backward_run<T>(x, t, d_terms, so_far, number, h, before, before + sharing, number * x.n_heads + i,
                    t.runs.data()[runs - 1 - run], how.direct, space);
    if (shared && x.places) __atomic_store_n(task_done, static_cast<std::int32_t>(task + 1), __ATOMIC_RELEASE);
    if (!d_terms.slopes && !d_terms.table) return;
    const auto turn = static_cast<std::int32_t>(number * runs + run);
    wait_for(head_done, turn);
    space.terms.finish(d_terms, h);
    __atomic_store_n(head_done, turn + 1, __ATOMIC_RELEASE);
  };
  const auto work = [&](Index worker, Index) {
    const BackwardSpace<E> space = tasks.space_of(worker);
    for (Index task; tasks.take(task);) go_back(task, space);
  };
  if (tasks.workers == 1) work(0, 1);
  else parallel_for(tasks.workers, 1, work);
}

}  // namespace

template <Isa I> Kernels kernels_at(CpuAt<I>, DType type) {
  Kernels on;
  on.route_forward = [](Cuda, const ForwardPass& f) { return route(Cpu{}, f); };
  on.route_backward = [](Cuda, const BackwardPass& b, bool whole) { return route(Cpu{}, b, whole); };
  with_type<double, float, bf16, f16>(type, [&]<class T>() {
    using W = Stat<T>;
    on.forward = attention_forward<T, W>, on.delta = attention_delta<T>, on.backward = attention_backward<T, W>;
    if constexpr (I == Isa::avx512 && std::is_same_v<T, bf16>)
      if (active_isa() == Isa::avx512_bf16)
        on.forward = attention_forward<T, Bf16x2>, on.backward = attention_backward<T, Bf16x2>;
  });
  return on;
}
template Kernels kernels_at(CpuAt<kIsa>, DType);

}  // namespace hilt::kernels
