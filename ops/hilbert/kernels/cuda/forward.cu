// Attention forward on any GPU, either way to multiply (loop.cuh):
//
//   S = Q K^T     m' = max(m, c rowmax S)     P = e^(c S - m')     l = e^(m - m') l + rowsum P
//   O = e^(m - m') O + (M P) V                and at the end       O / l      L = m + log l
//
// A block owns queries, keys stream by. Score terms (terms.cuh) are added to c S where it stands.
// What is there already is merged at the end, so the sums here are the same whether or not there is
// any:
//
//   L' = log(e^L + e^L_here)     O' = e^(L - L') O + e^(L_here - L') O_here
#include "ops/hilbert/kernels/cuda/mma.cuh"
#include "ops/hilbert/kernels/cuda/plain.cuh"

namespace hilt::kernels {
namespace {

template <class T> struct Forward {
  Rows<const T> q, k, v;
  Results<T> o;
  float* lse;               // [B, H, Lq]
  bool fresh;               // there is nothing to merge with
  float scale, multiplier;  // of scores, and of weights that survive dropout
  float power;              // what brings scores to exponents: where it folds, with their scale
  TileMarks marks;
};

/// The online softmax of a lane's rows: shift is the maximum so far, as an exponent.
template <class L> struct Softmax {
  float shift[L::kRows], sum[L::kRows];
  typename L::Sums o;
};

/// The step of the online softmax: raises the maxima to those of new scores, turns these into
/// weights and rescales what was summed before.
template <class Unit, class L>
__device__ __forceinline__ void softmax_step(Softmax<L>& x, typename L::Scores& s, float power) {
  using Powers = typename Unit::Powers;
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    float high = -INFINITY;
#pragma unroll
    for (int c = 0; c < L::kScores; ++c) high = fmaxf(high, s[r][c]);
    high = L::top_of_row(high);
    const float before = x.shift[r], top = fmaxf(before, high * power), shift = top == -INFINITY ? 0.0f : top;
    const float factor = Powers::exp(before - shift);
    x.shift[r] = top;
    float part[2] = {};
#pragma unroll
    for (int c = 0; c < L::kScores; ++c) {
      s[r][c] = Powers::exp(fmaf(s[r][c], power, -shift));
      part[c % 2] += s[r][c];
    }
    x.sum[r] = fmaf(x.sum[r], factor, part[0] + part[1]);
#pragma unroll
    for (int c = 0; c < L::kSums; ++c) x.o[r][c] *= factor;
  }
}

/// A warp's rows attend to one chunk. stage: the first byte of the stage where it lies, less that
/// of the first stage.
template <class Unit, bool kTerms, class L>
__device__ __forceinline__ void attend_chunk(Softmax<L>& x, const Problem& p, const Forward<typename Unit::Type>& f,
                                             const OwnedRows& own, const Chunk& chunk, std::uint32_t stage) {
  using M = Memory<Unit, 1, false>;
  const ScorePlaces<L> places{own, chunk};
  // Rows beyond the last come to no harm: their sums are finite and go nowhere.
  const bool drops = p.sizes.dropout > 0, all = places.is_whole(0);
  Bits<L> pairs, kept;
  pairs.fill([](int) { return ~0u; });
  if (!all) pairs = counting<true>(p.t, places);
  if (drops) kept = surviving<true>(p, own.head, places);
  if (!pairs.any()) return;
  typename L::Scores s;
  Unit::multiply(s, 0, stage + M::stream_a);
  if constexpr (!kTerms && !Unit::kFolds)
    for (auto& row : s) row[0] *= f.scale;
  if constexpr (kTerms)
    each_score<true>(p, own.head, places, [&](int r, int c, const TermPair& pair) {
      const Termed with = termed<typename Unit::Type>(p, pair, s[r][c] * f.scale);
      s[r][c] = with.s;
      if (with.masked) pairs.clear(r, c);
    });
  if (!all || kTerms) mask_out(s, pairs, -INFINITY);
  softmax_step<Unit>(x, s, f.power);
  if (drops) drop(s, kept);
  Unit::add_weighted(x.o, s, pairs, stage + M::stream_b, chunk.n, M::own);
}

template <class Unit, bool kTerms>
__device__ __forceinline__ void attend(const Problem& p, const Forward<typename Unit::Type>& f, const OwnedRows& own) {
  using L = typename Unit::Lanes;
  using M = Memory<Unit, 1, false>;
  using Stride = typename Unit::Stride;
  const int dim = static_cast<int>(p.sizes.dim);
  __shared__ HeadRows<const typename Unit::Type, Stride> k, v;
  if (threadIdx.x == 0) {
    const Index head = own.head / (p.sizes.heads / p.sizes.kv_heads);
    k = rows_of<Stride>(f.k, own.row, head), v = rows_of<Stride>(f.v, own.row, head);
  }
  Unit::template fetch<false>(0, 0, rows_of<Stride>(f.q, own.row, own.head), {}, p.t.q_token.data() + own.first, own.n,
                              dim);

  Softmax<L> x{};
#pragma unroll
  for (float& shift : x.shift) shift = -INFINITY;
  stream<Unit, false>(
      p.t, own.tile,
      [&](const Chunk& c, int stage) {
        const std::uint32_t to = static_cast<std::uint32_t>(stage) * M::kStage;
        Unit::template fetch<true>(to + M::stream_a, to + M::stream_b, k, v, p.t.k_token.data() + c.first, c.n, dim);
      },
      [&](const Chunk& c, int stage) {
        if (L::warp_row() < own.n)
          attend_chunk<Unit, kTerms, L>(x, p, f, own, c, static_cast<std::uint32_t>(stage) * M::kStage);
      });

  float zero = zero_if_finite(x.o);
#pragma unroll
  for (const float sum : x.sum) zero = fmaf(sum, 0.0f, zero);
  if (!is_finite_or_marked<Unit>(zero, own, f.marks)) return;
  float* const lse = f.lse + statistics_at(p, own, own.head);
#pragma unroll
  for (int r = 0; r < L::kRows; ++r) {
    const Index token = p.t.q_token[own.entry(L::row(r))];
    const float sum = L::sum_of_row(x.sum[r]), shift = x.shift[r] == -INFINITY ? 0.0f : x.shift[r];
    float l = (shift + Unit::Powers::log(sum)) * Unit::Powers::kToE, keep = 0, share = sum == 0 ? 0.0f : 1 / sum;
    if (!f.fresh) l = merged<typename Unit::Powers>(lse[token], l, keep, share);
    __syncwarp();  // all lanes of a row have read
    const bool writes = L::row(r) < own.n;
    if (writes && L::is_first()) lse[token] = l;
    write_sum<Unit>(f.o, {own.row, token, own.head, dim, writes}, x.o[r], share * f.multiplier, keep);
  }
}

template <class Unit, bool kTerms>
__global__ void __launch_bounds__(Unit::Lanes::kThreads, Unit::kBlocks)
    forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ Forward<typename Unit::Type> f) {
  for_owned<Unit, false>(p, p.heads[blockIdx.y], f.marks,
                         [&](const OwnedRows& own) { attend<Unit, kTerms>(p, f, own); });
}

template <class Unit, bool kTerms> void run(Cuda where, const ForwardPass& pass, const Marks& marks) {
  using T = typename Unit::Type;
  const auto read = [](const Input& x) { return x.rows<const T>(); };
  Forward<T> f{};
  f.q = read(pass.q), f.k = read(pass.k), f.v = read(pass.v), f.o = results_of<T>(pass.o, pass.before);
  f.lse = static_cast<float*>(pass.lse), f.fresh = pass.fresh, f.scale = static_cast<float>(pass.sizes.scale);
  f.multiplier = static_cast<float>(keep_scale(pass.sizes.dropout)),
  f.power = Unit::Powers::kFromE * (Unit::kFolds && !kTerms ? f.scale : 1);
  f.marks = {marks.queries, marks.any};
  const Index most = most_blocks<Unit>(where, pass, marks);
  each_alone(pass, {}, [&](const AttentionPass& part, Index first_row) {
    const Problem p = problem_of(where, part, first_row);
    launch("attention", where, forward_kernel<Unit, kTerms>,
           grid_of(blocks_for_owned<Unit>(pass.tiling->q_tile, p.n_rows, most), p.n_heads), Unit::Lanes::kThreads,
           Memory<Unit, 1, false>::kSize, p, f);
  });
}

}  // namespace

void plain_forward(Cuda where, const ForwardPass& pass, const Marks& marks) {
  with_type<float, bf16, f16>(pass.q.type, [&]<class T>() {
    with_columns(pass.sizes.dim, [&]<int Columns>() {
      using Unit = Plain<T, Columns, 1>;
      pass.terms ? run<Unit, true>(where, pass, marks) : run<Unit, false>(where, pass, marks);
    });
  });
}

void mma_forward(Cuda where, const ForwardPass& pass, const Marks& marks) {
  with_type<bf16, f16>(pass.q.type, [&]<class T>() {
    with_width(pass.sizes.dim, pass.terms, [&]<int W, bool kTerms>() {
      run<TensorCores<T, W, kTerms ? 1 : 2, kTerms ? 32 : 64, 2>, kTerms>(where, pass, marks);
    });
  });
}

}  // namespace hilt::kernels
