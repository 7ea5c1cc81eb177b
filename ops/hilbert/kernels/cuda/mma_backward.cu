// Attention backward by the tensor cores of any GPU since sm_80, for every tiling: twice over the
// scores, so that every sum stays with its owner, nothing is added from two sides, and the bits are
// the same every time. mma.cuh tells how tiles lie and how rows stream by.
//
//   keys       a block owns keys, queries stream by
//                  S^T = K Q^T     P^T = e^(c S^T - L)     dP^T = V dO^T     dS^T = P^T (M dP^T - Delta)
//                  dV += (M P^T) dO     dK += dS^T Q
//   queries    a block owns queries, keys stream by
//                  S = Q K^T       P = e^(c S - L)         dP = dO V^T       dS = P (M dP - Delta)           dQ += dS K
//
// Both are one kernel: what a block owns and what streams by are two pairs of rows, (K, V) and (Q,
// dO), and P and dS are left factors of the next products where they were computed. With grouped
// heads a block that owns keys goes through the query heads that read them, one by one.
//
// f16 keeps numbers below 2^-14 with fewer bits, and a softmax over thousands of keys is made of
// such: there P is 2^10 times as large until the end, and the factor that brings dS back rides on
// its subtraction.
#include "ops/hilbert/kernels/cuda/mma.cuh"

namespace hilt::kernels {
namespace {

using namespace tensor_cores;

template <class T> struct Pair { Operand<T> a, b; };  // (K, V) or (Q, dO), or the gradients of what is owned

template <class T> struct Pass {
  Pair<const T> own, stream;
  const float *lse, *delta;   // [B, H, L]
  Pair<T> to;                 // written: these, or
  Pair<float> to_wide;        // these, with
  Pair<const float> before;   // added, where there are any:
  const std::int32_t* known;  // of the owned rows these; null: all
  std::uint32_t* redo;        // marks, or null
  std::int32_t* any;
  float scale, scale_log2, multiplier;  // of scores, the same in base 2, and of weights that survive dropout
  TermSums terms;
};

/// Sums of both K and V leave room for 16 rows a warp at large widths, else for 32. Two stages of
/// chunks fit beside the owned tiles in 99 KiB, which is what the smallest of these GPUs have.
template <int W, bool kKeys, bool kTerms> struct Setting {
  static constexpr int kM = kTerms || (kKeys && W > 64) ? 1 : 2;  // blocks of 16 rows, a warp's
  static constexpr int kThreads = kTile / 16 / kM * kWarp;
  static constexpr int kChunk = !kTerms && (W == (kKeys ? 96 : 64) || (!kKeys && W == 32)) ? 64 : 32;
  static constexpr int kN = kChunk / 8;
  static constexpr int kBlocks = kM;  // a multiprocessor has: eight warps
  static constexpr std::uint32_t kOwned = kTile * Tile<W>::kPitch, kStreamed = kChunk * Tile<W>::kPitch,
                                 kStatistic = kChunk * 4;
  static constexpr std::uint32_t own_b = kOwned, stream_a = 2 * kOwned, stream_b = stream_a + kStreamed,
                                 lse = stream_b + kStreamed, delta = lse + kStatistic,
                                 kStage = 2 * (kStreamed + kStatistic), kSize = 2 * kOwned + 2 * kStage;
};

template <class T> constexpr float kLift = std::is_same_v<T, f16> ? 10 : 0;  // P is times 2^kLift
template <class T> constexpr float kUnlift = std::is_same_v<T, f16> ? 1.0f / 1024 : 1.0f;

/// What a warp adds up for the first and the second of the owned pair, and what it knows of the
/// rows it owns: queries' statistics.
template <int W, bool kKeys, bool kTerms> struct Sums {
  static constexpr int kM = Setting<W, kKeys, kTerms>::kM;
  float a[kM][W / 8][4], b[kKeys ? kM : 1][kKeys ? W / 8 : 1][4];
  float lse[kM][2], delta[kM][2];
  TermShare terms;
};

/// Adds one chunk to the sums of a warp's rows. stage: the first byte of the stage it lies in, less
/// that of the first stage.
template <class T, int W, bool kKeys, bool kTerms>
__device__ __forceinline__ void add_chunk(Sums<W, kKeys, kTerms>& x, const Problem& p, const Pass<T>& f, Index batch,
                                          Index h, Place place, std::uint32_t own, std::uint32_t stage) {
  using S = Setting<W, kKeys, kTerms>;
  constexpr int M = S::kM, N = S::kN;
  const bool drops = p.sizes.dropout > 0, all = place.is_whole(16 * M, S::kChunk);
  unsigned pairs[M], kept[M], any = 0;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    Place here = place;
    here.row += 16 * m;
    pairs[m] = all ? kEvery<N> : attending<!kKeys, N>(p.t, here);
    kept[m] = drops ? surviving<!kKeys, N>(p, batch, h, here) : kEvery<N>;
    any |= pairs[m];
  }
  if (!__any_sync(~0u, any != 0)) return;
  float s[M][N][4], t[M][N][4];
  multiply<T, W>(s, own, stage + S::stream_a);
  multiply<T, W>(t, own + S::own_b, stage + S::stream_b);
  if (drops) drop<N>(t, kept);
  const float factor = f.multiplier * kUnlift<T>;
  const auto statistics = [&](int c, float2& l, float2& d) {  // of streamed queries
    if constexpr (kKeys) {
      const std::uint32_t column = static_cast<std::uint32_t>(8 * c + place.column) * 4;
      l = load_two(stage + S::lse + column), d = load_two(stage + S::delta + column);
      l.x = fmaf(-l.x, kLog2e, kLift<T>), l.y = fmaf(-l.y, kLog2e, kLift<T>);
      d.x *= kUnlift<T>, d.y *= kUnlift<T>;
    }
  };
  const auto weigh = [&](int m, int c, int i, float score, float scale_log2, const float2& l, const float2& d) {
    const float less = kKeys ? (i % 2 ? l.y : l.x) : x.lse[m][i / 2],
                delta = kKeys ? (i % 2 ? d.y : d.x) : x.delta[m][i / 2];
    const float weight = exp2_fast(fmaf(score, scale_log2, less));
    t[m][c][i] = weight * fmaf(t[m][c][i], factor, -delta);
    s[m][c][i] = weight;
  };
  if constexpr (kTerms) {
    float row_sum[2] = {};
    each_score<!kKeys>(p, batch, h, place, [&](int c, int i, const TermPair& pair) {
      float &weight = s[0][c][i], &ds = t[0][c][i];
      float2 l{}, d{};
      statistics(c, l, d);
      const Termed with = termed<T>(p, pair, weight * f.scale);
      weigh(0, c, i, with.s, kLog2e, l, d);
      const bool attends = (pairs[0] >> (4 * c + i) & 1) && !with.masked;
      if (!attends) weight = ds = 0;
      if constexpr (!kKeys) collect(f.terms, x.terms, pair, with, attends, ds);
      if (kKeys ? f.terms.by_column() : f.terms.by_row()) {
        float& sum = row_sum[i / 2];
        sum += ds;
        if (c == N - 1 && i % 2 == 1) {  // its last
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (place.column == 0 && place.has_row(i / 2)) *f.terms.bias_at(pair) += sum;
        }
      }
      ds *= with.cap_slope;
    });
  } else {
#pragma unroll
    for (int c = 0; c < N; ++c) {
      float2 l{}, d{};
      statistics(c, l, d);
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) weigh(m, c, i, s[m][c][i], f.scale_log2, l, d);
    }
  }
  if (drops) drop<N>(s, kept);
  if (!all && !kTerms) mask_out<N>(s, pairs, 0.0f), mask_out<N>(t, pairs, 0.0f);
  if constexpr (kKeys) add_weighted<T, W>(x.b, s, stage + S::stream_b);
  add_weighted<T, W>(x.a, t, stage + S::stream_a);
}

/// Gradients of the rows of a block. Causal lists: early keys and late queries have the most pairs,
/// and begin.
template <class T, int W, bool kKeys, bool kTerms>
__device__ __forceinline__ void differentiate(const Problem& p, const Pass<T>& f, int tile, Index b) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  using S = Setting<W, kKeys, kTerms>;
  constexpr int kThreads = S::kThreads, kChunk = S::kChunk, M = S::kM;
  const std::uint32_t base = shared_address(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp,
            mine = warp * M * 16;
  const auto& tiles = kKeys ? p.t.k_tile : p.t.q_tile;
  const Tiling::Range owned = tiles[tile];
  const int n = owned.end - owned.begin, dim = static_cast<int>(p.sizes.dim),
            each = static_cast<int>(p.sizes.heads / p.sizes.kv_heads);
  const int own_head = kKeys ? static_cast<int>(blockIdx.y) : p.heads.at[blockIdx.y];
  if (kKeys && !reads_any(p, own_head)) return;
  const std::int32_t* const tokens = (kKeys ? p.t.k_token : p.t.q_token).data() + owned.begin;
  const std::int32_t* const stream_tokens = (kKeys ? p.t.q_token : p.t.k_token).data();
  fetch<W, kTile, kThreads>(base, base + S::own_b, f.own.a.at(b, own_head), f.own.b.at(b, own_head), tokens, n, dim);

  Sums<W, kKeys, kTerms> x{};
  if (kTerms && !kKeys)
    x.terms.entries = f.terms.share_of(own_head, static_cast<Index>(blockIdx.x) * kThreads / kWarp + warp);
  if constexpr (!kKeys) {
    const Index statistics = (b * p.sizes.heads + own_head) * p.sizes.queries;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Index at = statistics + tokens[min(mine + 16 * m + lane / 4 + 8 * half, n - 1)];
        x.lse[m][half] = fmaf(-f.lse[at], kLog2e, kLift<T>), x.delta[m][half] = f.delta[at] * kUnlift<T>;
      }
  }
  const auto add_head = [&](int h) {  // a query head; what streams by are its rows, or the keys it reads
    const int from = kKeys ? h : h / each;
    const HeadRows<const T> stream_a = f.stream.a.at(b, from), stream_b = f.stream.b.at(b, from);
    const Index statistics = (b * p.sizes.heads + h) * p.sizes.queries;
    Walk<kChunk> walk =
        kKeys ? Walk<kChunk>(p.t.queries_of(tile), p.t.q_tile) : Walk<kChunk>(p.t.keys_of(tile), p.t.k_tile);
    const auto fetch_chunk = [&](const Chunk& c, int stage) {
      const std::uint32_t to = base + static_cast<std::uint32_t>(stage) * S::kStage;
      const std::int32_t* const list = stream_tokens + c.first;
      fetch<W, kChunk, kThreads>(to + S::stream_a, to + S::stream_b, stream_a, stream_b, list, c.n, dim);
      if (const int row = static_cast<int>(threadIdx.x); kKeys && row < kChunk) {
        const Index at = statistics + (row < c.n ? list[row] : 0);
        copy_4_or_zero(to + S::lse + static_cast<std::uint32_t>(row) * 4, f.lse + at, row < c.n);
        copy_4_or_zero(to + S::delta + static_cast<std::uint32_t>(row) * 4, f.delta + at, row < c.n);
      }
    };
    Chunk now = walk.next();
    __syncthreads();  // nobody reads the rows of the head before any more
    if (now.n > 0) fetch_chunk(now, 0);
    for (int stage = 0; now.n > 0; stage ^= 1) {
      wait_for_copies();
      __syncthreads();  // everybody's copies have landed, and nobody reads the other stage any more
      const Chunk ahead = walk.next();
      if (ahead.n > 0) fetch_chunk(ahead, stage ^ 1);
      if (mine < n)
        add_chunk<T, W, kKeys, kTerms>(x, p, f, b, h, {owned.begin, mine + lane / 4, n - 1, lane % 4 * 2, now},
                                       base + static_cast<std::uint32_t>(mine) * Tile<W>::kPitch,
                                       base + static_cast<std::uint32_t>(stage) * S::kStage);
      now = ahead;
    }
  };
  if constexpr (kKeys) {
#pragma unroll 1
    for (int i = 0; i < p.n_heads; ++i)
      if (p.heads.at[i] / each == own_head) add_head(p.heads.at[i]);
  } else {
    add_head(own_head);
  }
  wait_for_copies();
  if (kTerms && !kKeys) collect_distances(f.terms, x.terms);

  const float zero = zero_if_finite(x.a) + (kKeys ? zero_if_finite(x.b) : 0.0f);
  std::uint32_t* const mark =
      f.redo ? f.redo + (b * p.sizes.heads + own_head) * static_cast<Index>(tiles.size()) + tile : nullptr;
  if (!is_finite_or_marked(zero, mark, f.any)) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mine + 16 * m + lane / 4 + 8 * half;
      const bool writes = row < n;
      const std::int64_t token = tokens[min(row, n - 1)];
      const bool known = !f.known || f.known[owned.begin + min(row, n - 1)] != 0;
      const auto write = [&](const Operand<T>& to, const Operand<float>& to_wide, const Operand<const float>& before,
                             const auto& sum, float times) {
        const float* const there = known && before.data ? before.at(b, own_head).row(token) : nullptr;
        const auto value = [&](int c, int j) {
          const float here = sum[m][c][2 * half + j] * times;
          return there && 8 * c < dim ? here + there[8 * c + lane % 4 * 2 + j] : here;
        };
        if (to_wide.data) write_row<W>(to_wide.at(b, own_head).row(token), writes, dim, value);
        else write_row<W>(to.at(b, own_head).row(token), writes, dim, value);
      };
      write(f.to.a, f.to_wide.a, f.before.a, x.a, f.scale);
      if constexpr (kKeys) write(f.to.b, f.to_wide.b, f.before.b, x.b, f.multiplier * kUnlift<T>);
    }
}

template <class T, int W, bool kKeys, bool kTerms>
__global__ void __launch_bounds__(Setting<W, kKeys, kTerms>::kThreads, Setting<W, kKeys, kTerms>::kBlocks)
    mma_backward_kernel(const __grid_constant__ Problem p, const __grid_constant__ Pass<T> f) {
  const auto tiles = static_cast<int>((kKeys ? p.t.k_tile : p.t.q_tile).size());
  const auto own = [&](int tile, Index b) {
    differentiate<T, W, kKeys, kTerms>(p, f, kKeys ? tile : tiles - 1 - tile, b);
  };
  if constexpr (!kTerms) {
    own(static_cast<int>(blockIdx.x), blockIdx.z);
  } else {  // blocks with sums of their own may be few
    for (Index i = blockIdx.x; i < tiles * p.n_places; i += gridDim.x) {
      own(static_cast<int>(i % tiles), p.first_place + i / tiles);
      __syncthreads();
    }
  }
}

}  // namespace

void mma_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  const AttentionSizes& sizes = b.sizes;
  with_type<bf16, f16>(b.q.type, [&]<class T>() {
    const auto read = [](const Input& x) { return operand_of(x.rows<const T>()); };
    const Pair<const T> keys{read(b.k), read(b.v)}, queries{read(b.q), read(b.d_o)};
    TermSums sums;
    const auto pass = [&](const Pair<const T>& own, const Pair<const T>& stream, const Output& a, const Output& c,
                          const Input& a_before, const Input& c_before, std::span<const std::int32_t> known,
                          std::uint32_t* redo) {
      Pass<T> f{};
      f.own = own, f.stream = stream;
      f.lse = static_cast<const float*>(b.lse), f.delta = static_cast<const float*>(b.delta);
      f.redo = redo, f.any = marks.any, f.scale = static_cast<float>(sizes.scale), f.scale_log2 = f.scale * kLog2e;
      f.multiplier = multiplier_of(sizes), f.terms = sums;
      if (a.type == DType::f32) f.to_wide = {operand_of(a.rows<float>()), operand_of(c.rows<float>())};
      else f.to = {operand_of(a.rows<T>()), operand_of(c.rows<T>())};
      f.before = {operand_of(a_before.rows<const float>()), operand_of(c_before.rows<const float>())};
      f.known = b.listed && !known.empty() ? known.data() : nullptr;
      return f;
    };
    with_width(sizes.dim, b.terms, [&]<int W, bool kTerms>() {
      using K = Setting<W, true, kTerms>;
      using Q = Setting<W, false, kTerms>;
      Index most = std::ssize(b.tiling->q_tile) * sizes.batch;
      const Tensor shares = prepare(where, b, Q::kThreads / kWarp, sums, most);
      const auto grid = [](const Problem& p, Index tiles, Index heads, Index blocks) {
        return dim3(static_cast<unsigned>(kTerms ? std::min(tiles * p.n_places, blocks) : tiles),
                    static_cast<unsigned>(heads), static_cast<unsigned>(kTerms ? 1 : p.n_places));
      };
      const auto of_keys = [&](const Problem& p) {
        launch("attention", where, mma_backward_kernel<T, W, true, kTerms>,
               grid(p, std::ssize(b.tiling->k_tile), sizes.kv_heads, Index{1} << 30), K::kThreads, K::kSize, p,
               pass(keys, queries, b.dk, b.dv, b.dk_before, b.dv_before, p.t.k_known, marks.keys));
      };
      const auto of_queries = [&](const Problem& p) {
        launch("attention", where, mma_backward_kernel<T, W, false, kTerms>,
               grid(p, std::ssize(b.tiling->q_tile), p.n_heads, most), Q::kThreads, Q::kSize, p,
               pass(queries, keys, b.dq, b.dq, b.dq_before, b.dq_before, p.t.q_known, marks.queries));
      };
      if (b.dk.data) in_portions(where, b, of_keys);
      if (b.dq.data) in_portions(where, b, of_queries, sums);
      add_shares(where, sums, sizes.heads);
    });
  });
}

}  // namespace hilt::kernels
