// Attention forward by the tensor cores of any GPU since sm_80, for every tiling. mma.cuh tells how
// tiles lie and how rows stream by.
//
//   S = Q K^T     m' = max(m, c rowmax S)     P = e^(c S - m')     l = e^(m - m') l + rowsum P
//   O = e^(m - m') O + (M P) V
//   and at the end      O / l      L = m + log l                  in base 2 inside, natural outside
//
// A block of four warps owns a tile of up to 128 queries and one head, a warp 32 of them: every 16
// x 16 block of K and V that a warp loads from shared memory serves two products. P is rounded to
// the operands' type where it stands: the scores of two products side by side are the left factor
// of the next. The tile with the most keys of a causal list is the last: blocks go through the
// tiles backwards.
//
// What is there already is merged at the end, so the sums here are the same whether or not there is
// any:
//
//   L' = log(e^L + e^L_here)     O' = e^(L - L') O + e^(L_here - L') O_here
#include "ops/hilbert/kernels/cuda/mma.cuh"

namespace hilt::kernels {
namespace {

using namespace tensor_cores;

/// Terms take registers, and code for each score that a lane has: fewer then.
template <bool kTerms> struct Setting {
  static constexpr int kThreads = kTerms ? 256 : 128;
  static constexpr int kM = kTile / 16 / (kThreads / kWarp);  // blocks of 16 queries, a warp's
  static constexpr int kChunk = kTerms ? 32 : 64;             // keys
  static constexpr int kN = kChunk / 8;
};

template <class T> struct Forward {
  Operand<const T> q, k, v;
  Operand<T> o;  // one of these two
  Operand<float> o_wide;
  Operand<const float> before;  // what O was so far, or null
  float* lse;                   // [B, H, L]
  bool fresh;                   // there is nothing to merge with
  std::uint32_t* redo;          // marks, or null
  std::int32_t* any;
  float scale, multiplier;  // of scores, in base 2 where there are no terms, and of weights that survive dropout
};

template <int W, int kChunk> struct Layout {
  static constexpr std::uint32_t kOwned = kTile * Tile<W>::kPitch, kStreamed = kChunk * Tile<W>::kPitch;
  static constexpr std::uint32_t k = kOwned, v = k + kStreamed, kStage = 2 * kStreamed, kSize = kOwned + 2 * kStage;
};

/// The online softmax of a warp's rows: shift is the maximum so far in base 2.
template <int W, int kM> struct Softmax { float shift[kM][2], sum[kM][2], o[kM][W / 8][4]; };

/// The step of the online softmax for one block of 16 rows: raises the maxima to those of new
/// scores, turns these into weights and rescales what was summed before.
template <int W, int kM, int kN>
__device__ __forceinline__ void softmax_step(Softmax<W, kM>& x, int m, float (&s)[kN][4], float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float high = -INFINITY;
#pragma unroll
    for (int c = 0; c < kN; ++c) high = fmaxf(high, fmaxf(s[c][2 * h], s[c][2 * h + 1]));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
    const float before = x.shift[m][h], top = fmaxf(before, high * scale), shift = top == -INFINITY ? 0.0f : top;
    const float factor = exp2_fast(before - shift);
    x.shift[m][h] = top;
    float part[2] = {};
#pragma unroll
    for (int c = 0; c < kN; ++c)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& p = s[c][2 * h + j];
        p = exp2_fast(fmaf(p, scale, -shift));
        part[j] += p;
      }
    x.sum[m][h] = fmaf(x.sum[m][h], factor, part[0] + part[1]);
#pragma unroll
    for (int c = 0; c < W / 8; ++c) x.o[m][c][2 * h] *= factor, x.o[m][c][2 * h + 1] *= factor;
  }
}

/// Where a warp's rows of Q and a chunk's of K and V are in shared memory.
struct Addresses {
  std::uint32_t q, k, v;
};

/// A warp's rows attend to one chunk.
template <class T, int W, bool kTerms, int kM>
__device__ __forceinline__ void attend_chunk(Softmax<W, kM>& x, const Problem& p, float scale, Index b, Index h,
                                             Place place, const Addresses& at) {
  const auto& [q, k, v] = at;
  constexpr int kN = Setting<kTerms>::kN;
  const bool all =
      place.is_whole(0, 8 * kN);  // rows beyond the last come to no harm: their sums are finite and go nowhere
  unsigned pairs[kM], kept[kM], any = 0;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    Place here = place;
    here.row += 16 * m;
    pairs[m] = all ? kEvery<kN> : attending<true, kN>(p.t, here);
    kept[m] = p.sizes.dropout > 0 ? surviving<true, kN>(p, b, h, here) : kEvery<kN>;
    any |= pairs[m];
  }
  if (!__any_sync(~0u, any != 0)) return;
  float s[kM][kN][4];
  multiply<T, W>(s, q, k);
  if constexpr (kTerms)
    each_score<true>(p, b, h, place, [&](int c, int i, const TermPair& pair) {
      const Termed with = termed<T>(p, pair, s[0][c][i] * scale);
      s[0][c][i] = with.masked ? -INFINITY : with.s;
    });
  if (!all) mask_out<kN>(s, pairs, -INFINITY);
#pragma unroll
  for (int m = 0; m < kM; ++m) softmax_step(x, m, s[m], kTerms ? kLog2e : scale);
  if (p.sizes.dropout > 0) drop<kN>(s, kept);
  add_weighted<T, W>(x.o, s, v);
}

template <class T, int W, bool kTerms>
__global__ void __launch_bounds__(Setting<kTerms>::kThreads, 2)
    mma_forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ Forward<T> f) {
  extern __shared__ __align__(128) std::uint8_t memory[];
  constexpr int kThreads = Setting<kTerms>::kThreads, kM = Setting<kTerms>::kM, kChunk = Setting<kTerms>::kChunk;
  using M = Layout<W, kChunk>;
  const std::uint32_t base = shared_address(memory);
  const int tile = static_cast<int>(gridDim.x - 1 - blockIdx.x), warp = static_cast<int>(threadIdx.x) / kWarp,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  const Tiling::Range queries = p.t.q_tile[tile];
  const int n = queries.end - queries.begin, dim = static_cast<int>(p.sizes.dim), mine = warp * kM * 16;
  const Index b = blockIdx.z, h = p.heads.at[blockIdx.y], kv = h / (p.sizes.heads / p.sizes.kv_heads);
  const std::int32_t* const tokens = p.t.q_token.data() + queries.begin;
  Walk<kChunk> walk(p.t.keys_of(tile), p.t.k_tile);
  const HeadRows<const T> k = f.k.at(b, kv), v = f.v.at(b, kv);
  const auto fetch_keys = [&](const Chunk& c, int stage) {
    const std::uint32_t to = base + static_cast<std::uint32_t>(stage) * M::kStage;
    fetch<W, kChunk, kThreads>(to + M::k, to + M::v, k, v, p.t.k_token.data() + c.first, c.n, dim);
  };

  Softmax<W, kM> x{};
#pragma unroll
  for (int m = 0; m < kM; ++m) x.shift[m][0] = x.shift[m][1] = -INFINITY;
  Chunk now = walk.next();
  if (now.n > 0) {
    fetch<W, kTile, kThreads>(base, 0, f.q.at(b, h), HeadRows<const T>{}, tokens, n, dim);
    fetch_keys(now, 0);
  }
  for (int stage = 0; now.n > 0; stage ^= 1) {
    wait_for_copies();
    __syncthreads();  // everybody's copies have landed, and nobody reads the other stage any more
    const Chunk ahead = walk.next();
    if (ahead.n > 0) fetch_keys(ahead, stage ^ 1);
    const std::uint32_t at = base + static_cast<std::uint32_t>(stage) * M::kStage;
    if (mine < n)
      attend_chunk<T, W, kTerms>(x, p, f.scale, b, h, {queries.begin, mine + lane / 4, n - 1, lane % 4 * 2, now},
                                 {base + static_cast<std::uint32_t>(mine) * Tile<W>::kPitch, at + M::k, at + M::v});
    now = ahead;
  }

  float zero = zero_if_finite(x.o);
#pragma unroll
  for (int m = 0; m < kM; ++m) zero = fmaf(x.sum[m][0], 0.0f, fmaf(x.sum[m][1], 0.0f, zero));
  std::uint32_t* const mark =
      f.redo ? f.redo + (b * p.sizes.heads + h) * static_cast<Index>(p.t.q_tile.size()) + tile : nullptr;
  if (!is_finite_or_marked(zero, mark, f.any)) return;
  float* const lse = f.lse + (b * p.sizes.heads + h) * p.sizes.queries;
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = mine + 16 * m + lane / 4 + 8 * half;
      const std::int64_t token = tokens[min(row, n - 1)];
      float sum = x.sum[m][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float shift = x.shift[m][half] == -INFINITY ? 0.0f : x.shift[m][half];
      float l = (shift + log2_fast(sum)) * kLn2, keep = 0, share = sum == 0 ? 0.0f : 1 / sum;
      if (!f.fresh) l = merged(lse[token], l, keep, share);
      __syncwarp();  // all four lanes of a row have read
      share *= f.multiplier;
      const bool writes = row < n;
      if (writes && lane % 4 == 0) lse[token] = l;
      const float* const before = f.before.data ? f.before.at(b, h).row(token) : nullptr;
      const auto write_to = [&](auto* o) {
        write_row<W>(o, writes, dim, [&](int c, int j) {
          const float here = share * x.o[m][c][2 * half + j];
          return keep != 0 && before && 8 * c < dim ? fmaf(keep, before[8 * c + lane % 4 * 2 + j], here) : here;
        });
      };
      if (f.o_wide.data) write_to(f.o_wide.at(b, h).row(token));
      else write_to(f.o.at(b, h).row(token));
    }
}

}  // namespace

void mma_forward(Cuda where, const ForwardPass& pass, const Marks& marks) {
  const AttentionSizes& sizes = pass.sizes;
  const dim3 grid(static_cast<unsigned>(pass.tiling->q_tile.size()), static_cast<unsigned>(pass.n_heads),
                  static_cast<unsigned>(sizes.batch));
  with_type<bf16, f16>(pass.q.type, [&]<class T>() {
    const auto read = [](const Input& x) { return operand_of(x.rows<const T>()); };
    Forward<T> f{};
    f.q = read(pass.q), f.k = read(pass.k), f.v = read(pass.v);
    f.lse = static_cast<float*>(pass.lse), f.fresh = pass.fresh, f.redo = marks.queries, f.any = marks.any;
    f.scale = static_cast<float>(sizes.scale) * (pass.terms ? 1 : kLog2e), f.multiplier = multiplier_of(sizes);
    if (pass.o.type == DType::f32) f.o_wide = operand_of(pass.o.rows<float>());
    else f.o = operand_of(pass.o.rows<T>());
    f.before = operand_of(pass.before.rows<const float>());
    with_width(sizes.dim, pass.terms, [&]<int W, bool kTerms>() {
      using S = Setting<kTerms>;
      launch("attention", where, mma_forward_kernel<T, W, kTerms>, grid, S::kThreads, Layout<W, S::kChunk>::kSize,
             problem_of(where, pass), f);
    });
  });
}

}  // namespace hilt::kernels
