// Attention on any GPU, for every pattern, type and head dim up to 256: the plain version that the
// faster ones are compared with.
//
//   forward    a block owns up to 64 queries of one tile and head, a warp 8 of them; keys stream by in chunks
//              of 32, in ascending order:
//                  S = (c Q) K^T     m' = max(m, rowmax S)     P = e^(S - m')     l = e^(m - m') l + rowsum P
//                  O = e^(m - m') O + (M P) V                  and at the end     O / l     L = m + log l
//   backward   twice over the scores, so that every sum stays with its owner and nothing is added from two sides:
//                  a block owns keys, queries stream by      dV += (M P)^T dO      dK += dS^T (c Q)
//                  a block owns queries, keys stream by      dQ += dS K
//              with P = e^(S - L), dP = dO V^T, dS = P (M dP - Delta)
//
// Both halves of every step have one form. Scores: a lane has one streamed row and takes its
// products with the 8 owned rows of the warp. Sums: a lane has every 32nd column and runs over the
// streamed rows. All arithmetic is f32. Pairs that do not attend are left out by a bit a pair, not
// multiplied by zero: 0 x NaN is NaN. Score terms (terms.cuh) are added to S where it stands.
#include "core/cuda/pack.cuh"
#include "ops/hilbert/kernels/cuda/kernels.h"
#include "ops/hilbert/kernels/cuda/terms.cuh"

namespace hilt::kernels {
namespace {

using namespace cuda;

constexpr int kChunk = kWarp;  // streamed rows at a time, one a lane
constexpr int kOwn = 8;        // rows a warp owns
constexpr int kPad = 4;  // floats after a streamed row: lanes that read 16 bytes each of their own row use all banks

/// How a head dim of up to 32 x kColumns is worked on.
template <int Columns> struct Shape32 {
  static constexpr int kColumns = Columns;  // a lane's
  static constexpr int kWidth = kWarp * Columns;
  static constexpr int kPitch = kWidth + kPad;  // of streamed rows
  static constexpr int kWarps = Columns <= 4 ? 8 : 4;
  static constexpr int kRows = kWarps * kOwn;  // a block owns
  static constexpr int kParts = static_cast<int>(Tiling::kTile) / kRows;
};

/// Rows token[0, n) of a head.
template <class T> struct Gathered {
  Rows<const T> x;
  Index b, h;
  const std::int32_t* token;
  int n;
};
/// to[row][0, kWidth) = factor x rows, zeros beyond n and dim. All threads of the block.
template <int kRows, int kWidth, int kPitch, class T>
__device__ void fetch(const Gathered<T>& from, int dim, float factor, float* to) {
  for (int i = threadIdx.x; i < kRows * kWidth; i += blockDim.x) {
    const int r = i / kWidth, d = i % kWidth;
    to[r * kPitch + d] =
        r < from.n && d < dim ? factor * static_cast<float>(from.x.at(from.b, from.token[r], from.h)[d]) : 0.0f;
  }
}
template <class S, class T> __device__ void fetch_owned(const Gathered<T>& from, int dim, float factor, float* to) {
  fetch<S::kRows, S::kWidth, S::kWidth>(from, dim, factor, to);
}
template <class S, class T> __device__ void fetch_chunk(const Gathered<T>& from, int dim, float factor, float* to) {
  fetch<kChunk, S::kWidth, S::kPitch>(from, dim, factor, to);
}

/// s[r] = own[r] . streamed[lane]
template <class S> __device__ void scores(const float* own, const float* streamed, float (&s)[kOwn]) {
  const float* const mine = streamed + threadIdx.x % kWarp * S::kPitch;
  for (float& x : s) x = 0;
  for (int d = 0; d < S::kWidth; d += 4) {
    const float4 k = *reinterpret_cast<const float4*>(mine + d);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const float4 q = *reinterpret_cast<const float4*>(own + r * S::kWidth + d);
      s[r] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, s[r]))));
    }
  }
}

/// sum[r] += weight[r][j] streamed[j] for the pairs whose bit is set.
template <class S>
__device__ void add_up(const float* weight, const unsigned (&pairs)[kOwn], const float* streamed, int n,
                       float (&sum)[kOwn][S::kColumns]) {
  const int lane = threadIdx.x % kWarp;
  for (int j = 0; j < n; ++j) {
    float x[S::kColumns];
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) x[c] = streamed[j * S::kPitch + c * kWarp + lane];
#pragma unroll
    for (int r = 0; r < kOwn; ++r)
      if (pairs[r] >> j & 1) {
        const float w = weight[r * kChunk + j];
#pragma unroll
        for (int c = 0; c < S::kColumns; ++c) sum[r][c] = fmaf(w, x[c], sum[r][c]);
      }
  }
}

/// M of query i and key j of the lists.
__device__ float multiplier(const Problem& p, Tiling::Place at, Index h, int i, int j) {
  if (p.sizes.dropout == 0) return 1;
  return survives(p, at, h, i, j) ? static_cast<float>(keep_scale(p.sizes.dropout)) : 0.0f;
}

/// What a block owns at a time: rows [first, first + n) of a tile, for a head and a place.
struct Own {
  int tile, first, n;
  Index head;
  Tiling::Place at;
};

/// Which tiles are asked for, [batch, heads, tiles] of marks, and whether any is; null: all.
struct Asked {
  const std::uint32_t* only = nullptr;
  const std::int32_t* any = nullptr;
};

/// f(own) for all that is asked for of some tiles and the head of this block; all threads together.
template <class S, class F>
__device__ __forceinline__ void for_owned(const Problem& p, std::span<const Tiling::Range> tiles, Index head,
                                          const Asked& asked, const F& f) {
  if (asked.only && *asked.any == 0) return;
  const Index parts = static_cast<Index>(tiles.size()) * S::kParts, all = parts * p.n_places;
  for (Index i = blockIdx.x; i < all; i += gridDim.x) {
    const auto part = static_cast<int>(i % parts), tile = part / S::kParts;
    const Index place = p.first_place + i / parts;
    const std::uint32_t mark =
        asked.only ? asked.only[(place * p.sizes.heads + head) * static_cast<Index>(tiles.size()) + tile] : kWholeTile;
    if (mark == 0) continue;
    int begin = tiles[tile].begin + part % S::kParts * S::kRows, end = min(tiles[tile].end, begin + S::kRows);
    const int front = static_cast<int>(mark & 0xffff), back = static_cast<int>(mark >> 16);
    if (back == 0) end = min(end, tiles[tile].begin + front);
    if (front == 0) begin = max(begin, tiles[tile].end - back);
    if (begin >= end) continue;
    f(Own{tile, begin, end - begin, head, p.places.at(static_cast<int>(place))});
    __syncthreads();  // before shared memory is filled again
  }
}

template <class T> struct Forward {
  Rows<const T> q, k, v;
  Rows<T> o;  // or f32: one of the two is written
  Rows<float> o_wide;
  Rows<const float> before;  // what O was so far, or null: zeros
  float* lse;
  bool fresh;
};

template <class T, class S, bool kTerms> __device__ void attend(const Problem& p, const Forward<T>& f, const Own& own) {
  extern __shared__ float4 shared[];
  float* const q_tile = reinterpret_cast<float*>(shared);
  float* const k_chunk = q_tile + S::kRows * S::kWidth;
  float* const v_chunk = k_chunk + kChunk * S::kPitch;
  float* const weights = v_chunk + kChunk * S::kPitch;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, dim = static_cast<int>(p.sizes.dim);
  const Tiling::Place& place = own.at;
  const Index b = place.row, h = own.head, kv = h / (p.sizes.heads / p.sizes.kv_heads);
  const auto k = f.k.from(place.k), v = f.v.from(place.k);
  const auto o = f.o.from(place.q);
  const auto o_wide = f.o_wide.from(place.q);
  const int mine = warp * kOwn, rows = min(max(own.n - mine, 0), kOwn);  // this warp's, within the block
  const std::int32_t* const tokens = p.t.q_token.data() + own.first;
  float* const stat = f.lse + (b * p.sizes.heads + h) * p.sizes.queries + place.q;
  const auto before = f.before.from(place.q);
  fetch_owned<S, T>({f.q.from(place.q), b, h, tokens, own.n}, dim, static_cast<float>(p.sizes.scale), q_tile);

  TermSide owned;  // of row r in lane r
  if (kTerms && rows > 0) owned = side_of<false>(p, place, own.first + mine + min(lane, rows - 1));
  float m[kOwn], l[kOwn], sum[kOwn][S::kColumns];
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    m[r] = f.fresh || r >= rows ? -INFINITY : stat[tokens[mine + r]];
    l[r] = m[r] == -INFINITY ? 0.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c)
      sum[r][c] = l[r] != 0 && before.data && c * kWarp + lane < dim
                      ? before.at(b, tokens[mine + r], h)[c * kWarp + lane]
                      : 0.0f;
  }

  for (const Tiling::Ref ref : p.t.keys_of(own.tile)) {
    const Tiling::Range keys = p.t.k_tile[ref.tile];
    for (int first = keys.begin; first < keys.end; first += kChunk) {
      const int n = min(keys.end - first, kChunk);
      const std::int32_t* const key_tokens = p.t.k_token.data() + first;
      __syncthreads();
      fetch_chunk<S, T>({k, b, kv, key_tokens, n}, dim, 1.0f, k_chunk);
      fetch_chunk<S, T>({v, b, kv, key_tokens, n}, dim, 1.0f, v_chunk);
      __syncthreads();
      if (rows == 0) continue;
      float s[kOwn];
      unsigned pairs[kOwn];
      scores<S>(q_tile + mine * S::kWidth, k_chunk, s);
      float* const weight = weights + warp * kOwn * kChunk;
      TermSide key;
      if (kTerms) key = side_of<true>(p, place, first + min(lane, n - 1));
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        bool attend = r < rows && lane < n && (!ref.partial || attends(p.t, own.first + mine + r, first + lane));
        if (kTerms) {
          const Termed x = termed<T>(p, {b, h, owned.of_lane(r), key}, s[r]);
          s[r] = x.s, attend = attend && !x.masked;
        }
        pairs[r] = __ballot_sync(~0u, attend);
        if (pairs[r] == 0) continue;
        float top = attend ? s[r] : -INFINITY;
        for (int step = kWarp / 2; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        top = fmaxf(top, m[r]);
        const float shift = top == -INFINITY ? 0.0f : top;
        float w = attend ? math::exp(s[r] - shift) : 0.0f;
        if (top != m[r]) {
          const float factor = math::exp(m[r] - shift);
          l[r] *= factor;
#pragma unroll
          for (int c = 0; c < S::kColumns; ++c) sum[r][c] *= factor;
          m[r] = top;
        }
        l[r] += warp_reduce<Sum>(w);
        if (attend) w *= multiplier(p, place, h, own.first + mine + r, first + lane);
        weight[r * kChunk + lane] = w;
      }
      __syncwarp();
      add_up<S>(weight, pairs, v_chunk, n, sum);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    if (r >= rows) continue;
    const std::int32_t token = tokens[mine + r];
    const float share = l[r] == 0 ? 0.0f : 1 / l[r];
#pragma unroll
    for (int c = 0; c < S::kColumns; ++c) {
      const int d = c * kWarp + lane;
      if (d >= dim) continue;
      if (o_wide.data) o_wide.at(b, token, h)[d] = sum[r][c] * share;
      else o.at(b, token, h)[d] = static_cast<T>(sum[r][c] * share);
    }
    if (lane == 0) stat[token] = m[r] + math::log(l[r]);
  }
}

template <class T, class S, bool kTerms>
__global__ void __launch_bounds__(S::kWarps* kWarp)
    forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ Forward<T> f, Asked asked) {
  for_owned<S>(p, p.t.q_tile, p.heads.at[blockIdx.y], asked, [&](const Own& own) { attend<T, S, kTerms>(p, f, own); });
}

/// P and dS of the owned rows and one streamed row a lane, from S and dP.
struct Weights {
  float p, ds;
};
__device__ Weights weights_of(float s, float dp, float lse, float delta, float m) {
  const float p = math::exp(s - lse);
  return {m * p, p * (m * dp - delta)};
}

/// What a block owns and what streams by: (K, V) and (Q, dO), or the other way round. Of the owned
/// pair the gradients, of T or f32, with the sums so far where a row has any; dQ alone for queries.
template <class T> struct Pair { Rows<T> a, b; };
template <class T> struct Backward {
  Pair<const T> own, stream;
  const float *lse, *delta;  // [B, H, Lq]
  Pair<T> to;
  Pair<float> to_wide;
  Pair<const float> before;
  const std::int32_t* known;  // which of the owned rows have sums; null: all
  TermSums terms;
};

/// The rows that a warp owns, and which of them have sums so far; null: all.
struct WarpRows {
  Index b, head;
  const std::int32_t *token, *known;
  int n, dim;
};
/// Writes sums to one of the two, with those so far.
template <class T, int kColumns>
__device__ __forceinline__ void write_sums(const Rows<T>& to, const Rows<float>& to_wide,
                                           const Rows<const float>& before, const WarpRows& own,
                                           const float (&sum)[kOwn][kColumns], float times) {
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    if (r >= own.n) continue;
    const bool adds = before.data && (!own.known || own.known[r] != 0);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int d = c * kWarp + static_cast<int>(threadIdx.x) % kWarp;
      if (d >= own.dim) continue;
      const float all = times * sum[r][c] + (adds ? before.at(own.b, own.token[r], own.head)[d] : 0.0f);
      if (to.data) to.at(own.b, own.token[r], own.head)[d] = static_cast<T>(all);
      else to_wide.at(own.b, own.token[r], own.head)[d] = all;
    }
  }
}

template <class T, class S, bool kKeys, bool kTerms>
__device__ void differentiate(const Problem& p, const Backward<T>& f, const Own& own) {
  extern __shared__ float4 shared[];
  float* const own_a = reinterpret_cast<float*>(shared);
  float* const own_b = own_a + S::kRows * S::kWidth;
  float* const chunk_a = own_b + S::kRows * S::kWidth;
  float* const chunk_b = chunk_a + kChunk * S::kPitch;
  float* const ds_weights = chunk_b + kChunk * S::kPitch;
  float* const p_weights = ds_weights + S::kRows * kChunk;  // of keys alone
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, dim = static_cast<int>(p.sizes.dim);
  const Tiling::Place& place = own.at;
  const Index own_head = own.head;
  const Index b = place.row, each = p.sizes.heads / p.sizes.kv_heads;
  const int mine = warp * kOwn, rows = min(max(own.n - mine, 0), kOwn);
  const Index own_row = kKeys ? place.k : place.q, stream_row = kKeys ? place.q : place.k;
  const std::int32_t* const tokens = (kKeys ? p.t.k_token : p.t.q_token).data() + own.first;
  const float scale = static_cast<float>(p.sizes.scale);
  fetch_owned<S, T>({f.own.a.from(own_row), b, own_head, tokens, own.n}, dim, kKeys ? 1.0f : scale, own_a);
  fetch_owned<S, T>({f.own.b.from(own_row), b, own_head, tokens, own.n}, dim, 1.0f, own_b);

  float a_sum[kOwn][S::kColumns] = {}, b_sum[kOwn][S::kColumns] = {};
  TermSide owned_sides;  // of row r in lane r
  if (kTerms && rows > 0) owned_sides = side_of<kKeys>(p, place, own.first + mine + min(lane, rows - 1));
  TermShare share;
  if (kTerms && !kKeys) share.entries = f.terms.share_of(own_head, Index{blockIdx.x} * S::kWarps + warp);
  const auto add_head = [&](Index h) {  // a query head; what streams by are its rows, or the keys it reads
    const Index statistics = (b * p.sizes.heads + h) * p.sizes.queries + place.q, from = kKeys ? h : h / each;
    const float *const row_lse = f.lse + statistics, *const row_delta = f.delta + statistics;
    float l[kOwn], x[kOwn];  // of owned queries, or of the lane's
#pragma unroll
    for (int r = 0; r < kOwn && !kKeys; ++r) {
      const std::int32_t t = r < rows ? tokens[mine + r] : 0;
      l[r] = r < rows ? row_lse[t] : 0.0f, x[r] = r < rows ? row_delta[t] : 0.0f;
    }
    for (const Tiling::Ref ref : kKeys ? p.t.queries_of(own.tile) : p.t.keys_of(own.tile)) {
      const Tiling::Range range = (kKeys ? p.t.q_tile : p.t.k_tile)[ref.tile];
      for (int first = range.begin; first < range.end; first += kChunk) {
        const int n = min(range.end - first, kChunk);
        const std::int32_t* const list = (kKeys ? p.t.q_token : p.t.k_token).data() + first;
        __syncthreads();
        fetch_chunk<S, T>({f.stream.a.from(stream_row), b, from, list, n}, dim, kKeys ? scale : 1.0f, chunk_a);
        fetch_chunk<S, T>({f.stream.b.from(stream_row), b, from, list, n}, dim, 1.0f, chunk_b);
        __syncthreads();
        if (rows == 0) continue;
        float s[kOwn], dp[kOwn];
        unsigned pairs[kOwn];
        scores<S>(own_a + mine * S::kWidth, chunk_a, s);
        scores<S>(own_b + mine * S::kWidth, chunk_b, dp);
        if (kKeys) {
          const std::int32_t t = lane < n ? list[lane] : 0;
          l[0] = lane < n ? row_lse[t] : 0.0f, x[0] = lane < n ? row_delta[t] : 0.0f;
        }
        TermSide streamed;
        if (kTerms) streamed = side_of<!kKeys>(p, place, first + min(lane, n - 1));
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
          const int i = kKeys ? first + lane : own.first + mine + r, j = kKeys ? own.first + mine + r : first + lane;
          bool attend = r < rows && lane < n && (!ref.partial || attends(p.t, i, j));
          TermSide query, key;
          const TermPair pair{b, h, query, key};
          Termed with;
          if (kTerms) {
            const TermSide owned = owned_sides.of_lane(r);
            query = kKeys ? streamed : owned, key = kKeys ? owned : streamed;
            with = termed<T>(p, pair, s[r]);
            s[r] = with.s, attend = attend && !with.masked;
          }
          pairs[r] = __ballot_sync(~0u, attend);
          Weights w{};
          if (attend) w = weights_of(s[r], dp[r], l[kKeys ? 0 : r], x[kKeys ? 0 : r], multiplier(p, place, h, i, j));
          if (kKeys) p_weights[(mine + r) * kChunk + lane] = w.p;
          if (kTerms) {
            if (!kKeys) collect(f.terms, share, pair, with, attend, w.ds);
            if (kKeys ? f.terms.by_column() : f.terms.by_row())
              if (const float sum = warp_reduce<Sum>(w.ds); lane == 0) *f.terms.bias_at(pair) += sum;
            w.ds *= with.cap_slope;
          }
          ds_weights[(mine + r) * kChunk + lane] = w.ds;
        }
        __syncwarp();
        if (kKeys) add_up<S>(p_weights + mine * kChunk, pairs, chunk_b, n, b_sum);
        add_up<S>(ds_weights + mine * kChunk, pairs, chunk_a, n, a_sum);
      }
    }
  };
  if constexpr (kKeys) {
    for (int i = 0; i < p.n_heads; ++i)
      if (p.heads.at[i] / each == own_head) add_head(p.heads.at[i]);
  } else {
    add_head(own_head);
    if (kTerms) collect_distances(f.terms, share);
  }
  if (kKeys && !reads_any(p, own_head)) return;
  const std::int32_t* const known = f.known ? f.known + own.first + mine : nullptr;
  const WarpRows out{b, own_head, tokens + mine, known, rows, dim};
  write_sums(f.to.a.from(own_row), f.to_wide.a.from(own_row), f.before.a.from(own_row), out, a_sum,
             kKeys ? 1.0f : scale);
  if (kKeys) write_sums(f.to.b.from(own_row), f.to_wide.b.from(own_row), f.before.b.from(own_row), out, b_sum, 1.0f);
}

template <class T, class S, bool kKeys, bool kTerms>
__global__ void __launch_bounds__(S::kWarps* kWarp, S::kColumns <= (kKeys ? 2 : 4) && !kTerms ? 2 : 1)
    backward_kernel(const __grid_constant__ Problem p, const __grid_constant__ Backward<T> f, Asked asked) {
  for_owned<S>(p, kKeys ? p.t.k_tile : p.t.q_tile, kKeys ? Index{blockIdx.y} : Index{p.heads.at[blockIdx.y]}, asked,
               [&](const Own& own) { differentiate<T, S, kKeys, kTerms>(p, f, own); });
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

/// f.operator()<Shape32>() for the head dim.
template <class F> void with_shape(Index dim, F&& f) {
  check(dim <= kPlainDim, "attention: head dim ", dim, " on a GPU must be at most ", kPlainDim,
        "; use backward = taped, or the CPU");
  if (dim <= 32) f.template operator()<Shape32<1>>();
  else if (dim <= 64) f.template operator()<Shape32<2>>();
  else if (dim <= 128) f.template operator()<Shape32<4>>();
  else f.template operator()<Shape32<8>>();
}

/// A block for all that is owned, or at most so many for a head, which take turns: where marks say
/// what is asked for, which is rare, and where each has sums of its own.
template <class S> Index blocks_for_owned(const std::vector<Tiling::Range>& tiles, Index places, Index most) {
  return std::min(std::ssize(tiles) * S::kParts * places, most);
}
dim3 grid_of(Index blocks, Index heads) { return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads)); }
constexpr Index kAnyBlocks = Index{1} << 30;

/// One type after the other, as the template arguments of f.
template <class F> void with_gpu_type(DType type, F&& f) { with_type<float, bf16, f16>(type, f); }

}  // namespace

void add_shares(Cuda where, const TermSums& sums, Index heads) {
  if (sums.share) launch("attention", where, shares_kernel, grid_of(sums.entries + 1, heads), kThreads, 0, sums);
}

void plain_forward(Cuda where, const ForwardPass& f, const Marks& marks) {
  const Asked asked{marks.queries, marks.any};
  const Index most = asked.only ? blocks_of_head(where, f) : kAnyBlocks;
  with_gpu_type(f.q.type, [&]<class T>() {
    const bool widens = f.o.type == DType::f32;
    Forward<T> rows{f.q.rows<const T>(), f.k.rows<const T>(), f.v.rows<const T>()};
    rows.o = {widens ? nullptr : static_cast<T*>(f.o.data), f.o.batch, f.o.token, f.o.head};
    rows.o_wide = {widens ? static_cast<float*>(f.o.data) : nullptr, f.o.batch, f.o.token, f.o.head};
    rows.before = f.before.rows<const float>(), rows.lse = static_cast<float*>(f.lse), rows.fresh = f.fresh;
    with_shape(f.sizes.dim, [&]<class S>() {
      constexpr std::size_t kShared =
          sizeof(float) * (S::kRows * S::kWidth + 2 * kChunk * S::kPitch + S::kRows * kChunk);
      in_portions(where, f, [&](const Problem& p) {
        launch("attention", where, f.terms ? forward_kernel<T, S, true> : forward_kernel<T, S, false>,
               grid_of(blocks_for_owned<S>(f.tiling->q_tile, p.n_places, most), p.n_heads), S::kWarps * kWarp, kShared,
               p, rows, asked);
      });
    });
  });
}

void plain_backward(Cuda where, const BackwardPass& b, const Marks& marks) {
  with_gpu_type(b.q.type, [&]<class T>() {
    const bool direct = sizeof(T) == 2 && (b.dq.data ? b.dq : b.dk).type == b.q.type;
    const auto read = [](const Input& x) { return x.rows<const T>(); };
    const Pair<const T> keys{read(b.k), read(b.v)}, queries{read(b.q), read(b.d_o)};
    TermSums sums;
    const auto pass = [&](const Pair<const T>& own, const Pair<const T>& stream, const Output& a, const Output& c,
                          const Input& a_before, const Input& c_before, std::span<const std::int32_t> known) {
      Backward<T> f{own, stream, static_cast<const float*>(b.lse), static_cast<const float*>(b.delta)};
      if (direct) f.to = {a.rows<T>(), c.rows<T>()};
      else f.to_wide = {a.rows<float>(), c.rows<float>()};
      f.before = {a_before.rows<const float>(), c_before.rows<const float>()};
      f.known = b.listed && !known.empty() ? known.data() : nullptr;
      f.terms = sums;
      return f;
    };
    with_shape(b.sizes.dim, [&]<class S>() {
      constexpr std::size_t kTiles = 2 * (S::kRows * S::kWidth + kChunk * S::kPitch), kWeights = S::kRows * kChunk;
      const Index most = marks.any ? blocks_of_head(where, b) : kAnyBlocks;
      Index most_of_queries = blocks_for_owned<S>(b.tiling->q_tile, b.place_count(), most);
      const Tensor shares = prepare(where, b, S::kWarps, sums, most_of_queries);
      const auto run = [&](auto kernel, const Problem& p, dim3 grid, std::size_t weights, const Backward<T>& f,
                           const std::uint32_t* only) {
        launch("attention", where, kernel, grid, S::kWarps * kWarp, sizeof(float) * (kTiles + weights), p, f,
               Asked{only, marks.any});
      };
      const auto of_keys = [&](const Problem& p) {
        run(b.terms ? backward_kernel<T, S, true, true> : backward_kernel<T, S, true, false>, p,
            grid_of(blocks_for_owned<S>(b.tiling->k_tile, p.n_places, most), b.sizes.kv_heads), 2 * kWeights,
            pass(keys, queries, b.dk, b.dv, b.dk_before, b.dv_before, p.t.k_known), marks.keys);
      };
      const auto of_queries = [&](const Problem& p) {
        run(b.terms ? backward_kernel<T, S, false, true> : backward_kernel<T, S, false, false>, p,
            grid_of(blocks_for_owned<S>(b.tiling->q_tile, p.n_places, most_of_queries), p.n_heads), kWeights,
            pass(queries, keys, b.dq, b.dq, b.dq_before, b.dq_before, p.t.q_known), marks.queries);
      };
      if (b.dk.data) in_portions(where, b, of_keys);
      if (b.dq.data) in_portions(where, b, of_queries, sums);
      add_shares(where, sums, b.sizes.heads);
    });
  });
}

void attention_delta(Cuda where, const DeltaPass& x) {
  const AttentionSizes& s = x.sizes;
  with_gpu_type(x.o.type, [&]<class T>() {
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
