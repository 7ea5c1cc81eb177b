// Attention backward on any GPU, either way to multiply (loop.cuh): twice over the scores, so that
// every sum stays with its owner, nothing is added from two sides, and the bits are the same every
// time.
//
//   keys       a block owns keys, queries stream by
//                  S^T = K Q^T     P^T = e^(c S^T - L)     dP^T = V dO^T     dS^T = P^T (M dP^T - Delta)
//                  dV += (M P^T) dO     dK += dS^T Q
//   queries    a block owns queries, keys stream by
//                  S = Q K^T       P = e^(c S - L)         dP = dO V^T       dS = P (M dP - Delta)           dQ += dS K
//
// Both are one kernel: what a block owns and what streams by are two pairs of rows, (K, V) and (Q,
// dO). With grouped heads a block that owns keys goes through the query heads that read them, one
// by one.
//
// f16 keeps numbers below 2^-14 with fewer bits, and a softmax over thousands of keys is made of
// such: where it is what tensor cores multiply, P is 2^kLift times as large until the end, and the
// factor that brings dS back rides on its subtraction.
#include "ops/hilbert/kernels/cuda/mma.cuh"
#include "ops/hilbert/kernels/cuda/plain.cuh"

namespace hilt::kernels {
namespace {

template <class T> struct Backward {
  Rows<const T> own_a, own_b, stream_a, stream_b;  // (K, V) and (Q, dO), or the other way round
  Results<T> a, b;                                 // the gradients of what is owned; of queries a alone
  const float *lse, *delta;                        // [B, H, Lq]
  const std::int32_t* known;                       // which of the owned rows have sums so far; null: all
  float scale, power, multiplier;  // of scores, the same in exponents, and of weights that survive dropout
  TileMarks marks;
  TermSums terms;
};

template <class Unit> constexpr float kUnlift = 1 / static_cast<float>(1 << static_cast<int>(Unit::kLift));

/// What a warp adds up for the first and the second of the owned pair, and what it knows of the
/// rows it owns: queries' statistics, the first as an exponent.
template <class Unit, bool kKeys> struct Gradients {
  using L = typename Unit::Lanes;
  float a[L::kRows][L::kSums], b[kKeys ? L::kRows : 1][kKeys ? L::kSums : 1];
  float less[L::kRows], delta[L::kRows];
  TermShare terms;
};

template <class Unit> __device__ __forceinline__ void as_exponent(float& lse, float& delta) {
  lse = fmaf(-lse, Unit::Powers::kFromE, Unit::kLift), delta *= kUnlift<Unit>;
}

/// Adds one chunk to the sums of a warp's rows, of query head h. stage: the first byte of the stage
/// where it lies, less that of the first stage.
template <class Unit, bool kKeys, bool kTerms, class L>
__device__ __forceinline__ void add_chunk(Gradients<Unit, kKeys>& x, const Problem& p,
                                          const Backward<typename Unit::Type>& f, const OwnedRows& own, int h,
                                          const Chunk& chunk, std::uint32_t stage) {
  using M = Memory<Unit, 2, kKeys>;
  const ScorePlaces<L> places{own, chunk};
  const bool drops = p.sizes.dropout > 0, all = places.is_whole(L::kWarpRows);
  Bits<L> pairs, kept;
  pairs.fill([](int) { return ~0u; });
  if (!all) pairs = counting<!kKeys>(p.t, places);
  if (drops) kept = surviving<!kKeys>(p, h, places);
  if (!pairs.any()) return;
  typename L::Scores s, t;
  Unit::multiply(s, 0, stage + M::stream_a);
  Unit::multiply(t, M::own_b, stage + M::stream_b);
  if (drops) drop(t, kept);
  const float factor = f.multiplier * kUnlift<Unit>;
  const auto weigh = [&](int r, int c, float score, float power, float less, float delta) {
    const float weight = Unit::Powers::exp(fmaf(score, power, less));
    t[r][c] = weight * fmaf(t[r][c], factor, -delta);
    s[r][c] = weight;
  };
  float less[L::kEach] = {}, delta[L::kEach] = {};
  const auto statistics = [&](int c) {  // of streamed queries
    if constexpr (kKeys) {
      const std::uint32_t column = static_cast<std::uint32_t>(L::column(c)) * 4;
      load_shared(less, shared_at(stage + M::lse + column)), load_shared(delta, shared_at(stage + M::delta + column));
#pragma unroll
      for (int i = 0; i < L::kEach; ++i) as_exponent<Unit>(less[i], delta[i]);
    }
  };
  if constexpr (kTerms) {
    float row_sum[L::kRows] = {};
    each_score<!kKeys>(p, h, places, [&](int r, int c, const TermPair& pair) {
      if (c % L::kEach == 0 && r == 0) statistics(c);
      float &weight = s[r][c], &ds = t[r][c];
      const Termed with = termed<typename Unit::Type>(p, pair, weight * f.scale);
      weigh(r, c, with.s, Unit::Powers::kFromE, kKeys ? less[c % L::kEach] : x.less[r],
            kKeys ? delta[c % L::kEach] : x.delta[r]);
      if (with.masked) pairs.clear(r, c);
      const bool attends = pairs.at(r, c);
      if (!attends) weight = ds = 0;
      if constexpr (!kKeys) collect(f.terms, x.terms, pair, with, attends, ds);
      if (kKeys ? f.terms.by_column() : f.terms.by_row()) {
        row_sum[r] += ds;
        if (c == L::kScores - 1)
          if (const float sum = L::sum_of_row(row_sum[r]); L::is_first() && places.has_row(r))
            *f.terms.bias_at(pair) += sum;
      }
      ds *= with.cap_slope;
    });
  } else {
#pragma unroll
    for (int c = 0; c < L::kScores; ++c) {
      if (c % L::kEach == 0) statistics(c);
#pragma unroll
      for (int r = 0; r < L::kRows; ++r)
        weigh(r, c, s[r][c], f.power, kKeys ? less[c % L::kEach] : x.less[r], kKeys ? delta[c % L::kEach] : x.delta[r]);
    }
    if (!all) mask_out(s, pairs, 0.0f), mask_out(t, pairs, 0.0f);
  }
  if (drops) drop(s, kept);
  if constexpr (kKeys) Unit::add_weighted(x.b, s, pairs, stage + M::stream_b, chunk.n, M::own);
  Unit::add_weighted(x.a, t, pairs, stage + M::stream_a, chunk.n, M::own);
}

template <class Unit, bool kKeys, bool kTerms>
__device__ __forceinline__ void differentiate(const Problem& p, const Backward<typename Unit::Type>& f,
                                              const OwnedRows& own) {
  using L = typename Unit::Lanes;
  using M = Memory<Unit, 2, kKeys>;
  using Stride = typename Unit::Stride;
  const int dim = static_cast<int>(p.sizes.dim), each = static_cast<int>(p.sizes.heads / p.sizes.kv_heads);
  const std::int32_t* const list = (kKeys ? p.t.k_token : p.t.q_token).data();
  Unit::template fetch<false>(0, M::own_b, rows_of<Stride>(f.own_a, own.row, own.head),
                              rows_of<Stride>(f.own_b, own.row, own.head), list + own.first, own.n, dim);

  Gradients<Unit, kKeys> x{};
  if (kTerms && !kKeys)
    x.terms.entries = f.terms.share_of(own.head, (static_cast<Index>(blockIdx.x) * L::kThreads + threadIdx.x) / kWarp);
  if constexpr (!kKeys) {
    const Index statistics = statistics_at(p, own, own.head);
#pragma unroll
    for (int r = 0; r < L::kRows; ++r) {
      const Index row = statistics + list[own.entry(L::row(r))];
      x.less[r] = f.lse[row], x.delta[r] = f.delta[row];
      as_exponent<Unit>(x.less[r], x.delta[r]);
    }
  }
  const auto add_head = [&](int h) {  // a query head; what streams by are its rows, or the keys it reads
    __shared__ HeadRows<const typename Unit::Type, Stride> stream_a, stream_b;
    __shared__ Index statistics;
    if (threadIdx.x == 0) {
      const Index from = kKeys ? h : h / each;
      stream_a = rows_of<Stride>(f.stream_a, own.row, from);
      stream_b = rows_of<Stride>(f.stream_b, own.row, from);
      statistics = statistics_at(p, own, h);
    }
    stream<Unit, kKeys>(
        p.t, own.tile,
        [&](const Chunk& c, int stage) {
          const std::uint32_t to = static_cast<std::uint32_t>(stage) * M::kStage;
          const std::int32_t* const tokens = (kKeys ? p.t.q_token : p.t.k_token).data() + c.first;
          Unit::template fetch<true>(to + M::stream_a, to + M::stream_b, stream_a, stream_b, tokens, c.n, dim);
          if (const int row = static_cast<int>(threadIdx.x); kKeys && row < L::kChunk) {
            const Index from = statistics + (row < c.n ? tokens[row] : 0);
            const std::uint32_t lse = shared_at(to + M::lse + static_cast<std::uint32_t>(row) * 4);
            copy_4(lse, f.lse + from, row < c.n);
            copy_4(lse + M::kStatistic, f.delta + from, row < c.n);
          }
        },
        [&](const Chunk& c, int stage) {
          if (L::warp_row() < own.n)
            add_chunk<Unit, kKeys, kTerms, L>(x, p, f, own, h, c, static_cast<std::uint32_t>(stage) * M::kStage);
        });
  };
  if constexpr (kKeys) {
#pragma unroll 1
    for (int i = 0; i < p.n_heads; ++i)
      if (p.heads[i] / each == own.head) add_head(p.heads[i]);
  } else {
    add_head(own.head);
    if (kTerms) collect_distances(f.terms, x.terms);
  }

  if (!is_finite_or_marked<Unit>(zero_if_finite(x.a) + zero_if_finite(x.b), own, f.marks)) return;
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const int there = own.entry(L::row(r));
    const ResultRow to{own.row, list[there], own.head, dim, L::row(r) < own.n};
    const float keep = !f.known || f.known[there] != 0 ? 1.0f : 0.0f;
    write_sum<Unit>(f.a, to, x.a[r], f.scale, keep);
    if constexpr (kKeys) write_sum<Unit>(f.b, to, x.b[r], f.multiplier * kUnlift<Unit>, keep);
  }
}

template <class Unit, bool kKeys, bool kTerms>
__global__ void __launch_bounds__(Unit::Lanes::kThreads, Unit::kBlocks)
    backward_kernel(const __grid_constant__ Problem p, const __grid_constant__ Backward<typename Unit::Type> f) {
  const int head = kKeys ? static_cast<int>(blockIdx.y) : p.heads[blockIdx.y];
  if (kKeys && !reads_any(p, head)) return;
  for_owned<Unit, kKeys>(p, head, f.marks,
                         [&](const OwnedRows& own) { differentiate<Unit, kKeys, kTerms>(p, f, own); });
}

/// A block an entry.
__global__ void shares_kernel(TermSums sums) {
  const Index entry = blockIdx.x, h = blockIdx.y;
  float sum = 0;
  for (Index i = threadIdx.x; i < sums.shares; i += blockDim.x) sum += sums.share_of(h, i)[entry];
  sum = block_reduce<Sum>(sum, 0.0f);
  if (threadIdx.x != 0) return;
  if (entry < sums.entries) static_cast<float*>(sums.to.table)[h * sums.entries + entry] += sum;
  else if (sums.to.slopes) static_cast<float*>(sums.to.slopes)[h] -= sum;
}

// `lanes` neighbours, a power of two, own a row and take N elements of it at a time. Rows of a
// batch, blockIdx.y, go by head, then token, as they lie in memory.
template <int N, class T>
__global__ void delta_kernel(const __grid_constant__ AttentionSizes s, Rows<const T> o, Rows<const T> d_o, float* delta,
                             int lanes, const std::int32_t* if_set) {
  if (if_set && *if_set == 0) return;
  const int lane = threadIdx.x % lanes;
  const auto heads = static_cast<std::uint32_t>(s.heads);
  const Index rows = s.heads * s.queries;
  for (Index b = blockIdx.y; b < s.batch; b += gridDim.y)
    // Whole warps stay together: they add up across lanes.
    for (Index first = (first_element() - threadIdx.x % kWarp) / lanes; first < rows; first += element_step() / lanes) {
      const auto row = static_cast<std::uint32_t>(first) + threadIdx.x % kWarp / lanes;
      const Index h = row % heads, t = row / heads;
      float sum = 0;
      if (row < rows)
        for (Index d = lane * N; d < s.dim; d += lanes * N) {
          const Floats<N> x = load<N>(o.at(b, t, h) + d), y = load<N>(d_o.at(b, t, h) + d);
          for (int e = 0; e < N; ++e) sum += x[e] * y[e];
        }
      for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (row < rows && lane == 0) delta[(b * s.heads + h) * s.queries + t] = sum;
    }
}

/// OfKeys, OfQueries: the way to multiply where a block owns keys, and where it owns queries.
template <class OfKeys, class OfQueries, bool kTerms> void run(Cuda where, const BackwardPass& b, const Marks& marks) {
  using T = typename OfKeys::Type;
  const auto read = [](const Input& x) { return x.rows<const T>(); };
  const Index most = most_blocks<OfKeys>(where, b, marks);
  Index most_of_queries = blocks_for_owned<OfQueries>(b.tiling->q_tile, b.sizes.batch, most);
  if (b.d_terms && (b.d_terms->slopes || b.d_terms->table))
    most_of_queries = std::min(most_of_queries, blocks_of_head(where, b));
  TermSums sums;
  const Tensor shares = shares_of_terms(where, b, OfQueries::Lanes::kThreads / kWarp, sums, most_of_queries);
  Backward<T> f{};
  f.lse = static_cast<const float*>(b.lse), f.delta = static_cast<const float*>(b.delta);
  f.scale = static_cast<float>(b.sizes.scale), f.power = f.scale * OfKeys::Powers::kFromE;
  f.multiplier = static_cast<float>(keep_scale(b.sizes.dropout)), f.terms = sums;
  const auto owned_by = [&]<class Unit, bool kKeys>(Index blocks) {
    each_alone(b, kKeys ? TermSums{} : sums, [&](const AttentionPass& part, Index first_row) {
      const Problem p = problem_of(where, part, first_row);
      const std::span<const std::int32_t> known = kKeys ? p.t.k_known : p.t.q_known;
      f.known = b.listed && !known.empty() ? known.data() : nullptr;
      const auto& tiles = kKeys ? b.tiling->k_tile : b.tiling->q_tile;
      launch("attention", where, backward_kernel<Unit, kKeys, kTerms>,
             grid_of(blocks_for_owned<Unit>(tiles, p.n_rows, blocks), kKeys ? b.sizes.kv_heads : p.n_heads),
             Unit::Lanes::kThreads, Memory<Unit, 2, kKeys>::kSize, p, f);
    });
  };
  f.own_a = read(b.k), f.own_b = read(b.v), f.stream_a = read(b.q), f.stream_b = read(b.d_o);
  f.a = results_of<T>(b.dk, b.dk_before), f.b = results_of<T>(b.dv, b.dv_before), f.marks = {marks.keys, marks.any};
  if (b.dk.data) owned_by.template operator()<OfKeys, true>(most);
  std::swap(f.own_a, f.stream_a), std::swap(f.own_b, f.stream_b);
  f.a = results_of<T>(b.dq, b.dq_before), f.b = {}, f.marks = {marks.queries, marks.any};
  if (b.dq.data) owned_by.template operator()<OfQueries, false>(most_of_queries);
  add_shares(where, sums, b.sizes.heads);
}

/// Sums of both K and V leave room for 16 rows a warp at large widths, else for 32. Two stages of
/// chunks fit beside the owned tiles in 99 KiB, which is what the smallest of these GPUs have.
template <class T, int W, bool kKeys, bool kTerms> struct Setting {
  static constexpr int kM = kTerms || (kKeys && W > 64) ? 1 : 2;
  static constexpr int kChunk = !kTerms && (W == (kKeys ? 96 : 64) || (!kKeys && W == 32)) ? 64 : 32;
  using Unit = TensorCores<T, W, kM, kChunk, kM>;  // a multiprocessor has eight warps
};

}  // namespace

void plain_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  with_type<float, bf16, f16>(b.q.type, [&]<class T>() {
    with_columns(b.sizes.dim, [&]<int Columns>() {
      const auto by = [&]<bool kTerms>() {
        run<Plain<T, Columns, Columns <= 2 && !kTerms ? 2 : 1>, Plain<T, Columns, Columns <= 4 && !kTerms ? 2 : 1>,
            kTerms>(where, b, marks);
      };
      b.terms ? by.template operator()<true>() : by.template operator()<false>();
    });
  });
}

void mma_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  with_type<bf16, f16>(b.q.type, [&]<class T>() {
    with_width(b.sizes.dim, b.terms, [&]<int W, bool kTerms>() {
      run<typename Setting<T, W, true, kTerms>::Unit, typename Setting<T, W, false, kTerms>::Unit, kTerms>(where, b,
                                                                                                           marks);
    });
  });
}

void add_shares(Cuda where, const TermSums& sums, Index heads) {
  if (sums.share) launch("attention", where, shares_kernel, grid_of(sums.entries + 1, heads), kThreads, 0, sums);
}

void attention_delta(Cuda where, const DeltaPass& x) {
  const AttentionSizes& s = x.sizes;
  with_type<float, bf16, f16>(x.o.type, [&]<class T>() {
    const auto o = x.o.rows<const T>(), d_o = x.d_o.rows<const T>();
    const auto in_packs = [](const Rows<const T>& r) {
      return is_aligned(r.data) && r.batch % kPack<T> == 0 && r.token % kPack<T> == 0 && r.head % kPack<T> == 0;
    };
    const auto run = [&]<int N>() {
      int lanes = 1;
      while (lanes < kWarp && lanes * N < s.dim) lanes *= 2;
      const dim3 blocks(blocks_for(s.heads * s.queries * lanes).x,
                        static_cast<unsigned>(std::min<Index>(s.batch, 65535)));
      launch("attention", where, delta_kernel<N, T>, blocks, kThreads, 0, s, o, d_o, static_cast<float*>(x.delta),
             lanes, x.if_set);
    };
    if (s.dim % kPack<T> == 0 && in_packs(o) && in_packs(d_o)) run.template operator()<kPack<T>>();
    else run.template operator()<1>();
  });
}

}  // namespace hilt::kernels
