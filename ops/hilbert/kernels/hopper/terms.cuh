#pragma once
#include "ops/hilbert/kernels/hopper/common.cuh"
#include "ops/hilbert/kernels/cuda/terms.cuh"

// Score terms on Hopper: the formulas of kernels/terms.h, on the scores that a lane has of 64 x 64.
// What they look at of the rows that stream by lies beside these in shared memory; what they look
// at of a lane's two own rows it keeps.
//
// A table's gradient has no one owner. A warp that owns queries adds to two shares of its own, a
// row of each at a time: keys of one query lie at different entries, but for those beyond the
// table's reach, so lanes seldom meet. add_shares() adds the shares up, in their order.

namespace hilt::kernels::hopper {

/// Terms as a launch is told of them.
struct ScoreTerms {
  Terms of;
  float cap, inverse_cap;  // 0: none
  bool rows_of_q;          // lines of a bias are those of q, else tokens
  std::span<const RowSite> own, stream;
  TermSums sums;
  /// That of an item's row, or of its last.
  __device__ __forceinline__ RowSite own_site(const Item& x, int row) const {
    return site_of(__ldg(reinterpret_cast<const int4*>(own.data()) + x.row + max(min(row, x.rows - 1), 0)));
  }
  __device__ static RowSite site_of(const int4& x) { return {x.x, x.y, x.z, x.w}; }
  bool near;  // a head's table lies beside each of an owner's tiles; else it is read where it is
};
/// Shared memory for a table, and for a warp's shares of its gradient; larger tables are read, and
/// added to, where they are. At large head dims rows take all of it.
template <int D> constexpr std::uint32_t kTableBytes = D > 192 ? 0 : 8 << 10;
template <int D> constexpr std::uint32_t kShareBytesNear = D > 192 ? 0 : 2560;

template <int D> ScoreTerms score_terms(Cuda where, const AttentionPass& pass, bool queries_own) {
  ScoreTerms t{};
  if (pass.terms) t.of = *pass.terms;
  if (t.of.cap != 0) t.cap = static_cast<float>(t.of.cap), t.inverse_cap = static_cast<float>(1 / t.of.cap);
  t.near = t.of.table && t.of.entries * 4 <= kTableBytes<D> && (queries_own || pass.sizes.heads == pass.sizes.kv_heads);
  t.rows_of_q = t.of.bias.query_row != nullptr, t.of.bias.query_row = nullptr;
  const SitesView& sites = sites_on_device(*pass.tiling, where);
  t.own = queries_own ? sites.queries : sites.keys, t.stream = queries_own ? sites.keys : sites.queries;
  return t;
}
/// Copies a head's table there. All threads that load.
__device__ __forceinline__ void copy_table(const ScoreTerms& t, int head, std::uint32_t to) {
  if (!t.near) return;
  const float* const from = static_cast<const float*>(t.of.table) + head * t.of.entries;
  for (int i = static_cast<int>(threadIdx.x); i < t.of.entries; i += kWarpgroup)
    copy_4(to + static_cast<std::uint32_t>(i) * 4, from + i, true);
}

/// The slope of tanh, and it. Where the scores of a warp are all small, which with a cap they
/// mostly are, a polynomial: the unit of exponentials has others to make.
template <int N, class F> __device__ __forceinline__ void for_tanh(float (&s)[N], float inverse_cap, const F& f) {
  constexpr float kSmall = 0.75f;
  float most = 0;
#pragma unroll
  for (float& x : s) x *= inverse_cap, most = fmaxf(most, fabsf(x));
  const auto all = [&](const auto& tanh) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float a = tanh(s[i]), b = tanh(s[i + 1]);
      s[i] = a, s[i + 1] = b;
      f(i, fmaf(-a, a, 1), fmaf(-b, b, 1));
    }
  };
  if (__all_sync(~0u, most <= kSmall))
    all([](float x) {
      const float y = x * x;
      return x * fmaf(y,
                      fmaf(y, fmaf(y, fmaf(y, fmaf(y, -0.00478907659f, 0.0196918276f), -0.0534030169f), 0.133267598f),
                           -0.333330823f),
                      1);
    });
  else  // 1 - 2 / (e^2x + 1)
    all([](float x) { return 1 - __fdividef(2, exp2_fast(x * (2 * kLog2e)) + 1); });
}

/// The terms of a batch and a query head, for a lane: `own` are its rows. kQueries: they are
/// queries, and columns keys.
template <class E, bool kQueries> struct LaneTerms {
  const ScoreTerms& t;
  int b, h;
  const RowSite (&own)[2];
  std::uint32_t columns, table;           // in shared memory: columns' sites, and the table where it is near
  std::span<const std::int32_t> q_token;  // of all queries
  int own_row, row;                       // where the lane's first row and the first column stand in their lists

  /// f(i, own row's number, column's number, column) for the scores of N / 4 pairs of columns.
  template <int N, class F> __device__ __forceinline__ void each(const F& f) const {
    const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int c = 0; c < N / 4; ++c)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int column = first + 8 * c + j;
        const RowSite other =
            ScoreTerms::site_of(load_shared_16(columns + static_cast<std::uint32_t>(column) * sizeof(RowSite)));
#pragma unroll
        for (int r = 0; r < 2; ++r) f(4 * c + 2 * r + j, r, column, other);
      }
  }
  /// f(i, distance).
  template <int N, class F> __device__ __forceinline__ void each_distance(const F& f) const {
    const auto apart = [](int x, int y) { return fabsf(static_cast<float>(x) - static_cast<float>(y)); };
    if (!t.of.slopes_on_grid)
      return each<N>([&](int i, int r, int, const RowSite& other) { f(i, apart(own[r].name, other.name)); });
    each<N>([&](int i, int r, int, const RowSite& other) {
      f(i, apart(own[r].y, other.y) + apart(own[r].x, other.x) + apart(own[r].frame, other.frame));
    });
  }
  /// The line of a bias for an own row, or for a column.
  __device__ __forceinline__ Index line_of(int r, int column, const RowSite& query) const {
    if (!t.rows_of_q) return query.name;
    const int at = kQueries ? own_row + 8 * r : row + column;
    return __ldg(q_token.data() + min(at, static_cast<int>(q_token.size()) - 1));
  }
  /// f(i, line, key).
  template <int N, class F> __device__ __forceinline__ void each_of_bias(const F& f) const {
    each<N>([&](int i, int r, int column, const RowSite& other) {
      f(i, line_of(r, column, kQueries ? own[r] : other), kQueries ? other.name : own[r].name);
    });
  }
  /// s = the scores c q . k with their terms; -inf where a bias masks. slope: that of the cap, by
  /// pairs in f16, where there is one. Returns the bits of what is not masked, of the first 32.
  template <int N>
  __device__ __forceinline__ std::uint32_t add(float (&s)[N], float scale, std::uint32_t (*slope)[16]) const {
    if (t.cap != 0) {
      for_tanh(s, scale * t.inverse_cap, [&](int i, float a, float b) {
        if (slope) (*slope)[i / 2 % 16] = pack_pair<f16>(a, b);
      });
      scale = t.cap;
    }
#pragma unroll
    for (float& x : s) x *= scale;
    if (t.of.slopes) {
      const float steep = -__ldg(static_cast<const float*>(t.of.slopes) + h);
      each_distance<N>([&](int i, float distance) { s[i] = fmaf(steep, distance, s[i]); });
    }
    if (t.near)
      each<N>([&](int i, int r, int, const RowSite& other) {
        s[i] += __int_as_float(load_shared(table + static_cast<std::uint32_t>(entry_of(own[r], other)) * 4));
      });
    else if (t.of.table)
      each<N>([&](int i, int r, int, const RowSite& other) {
        s[i] += __ldg(static_cast<const float*>(t.of.table) + h * t.of.entries + entry_of(own[r], other));
      });
    std::uint32_t kept = ~0u;
    if (t.of.bias.data) {
      const auto add_bias = [&](const auto* bias) {
        each_of_bias<N>([&](int i, Index line, Index key) {
          const float x = static_cast<float>(bias[t.of.bias.offset(b, h, line) + key * t.of.bias.key]);
          s[i] = x == -INFINITY ? x : s[i] + x;
          if (i < 32 && x == -INFINITY) kept &= ~(1u << (i / 2 % 2 * 16 + i / 4 * 2 + i % 2));
        });
      };
      if (t.of.bias.type == DType::f32) add_bias(static_cast<const float*>(t.of.bias.data));
      else add_bias(static_cast<const E*>(t.of.bias.data));
    }
    return kept;
  }
  /// Where the table has the offset of an own row and a column.
  __device__ __forceinline__ int entry_of(const RowSite& mine, const RowSite& other) const {
    const RowSite &q = kQueries ? mine : other, &k = kQueries ? other : mine;
    const auto place = [](int q_at, int k_at, int reach) {
      return __viaddmin_s32_relu(q_at + reach, -k_at, 2 * reach);
    };
    const Site& reach = t.of.reach;
    if (!t.of.table_on_grid) return place(q.name, k.name, reach.c);
    int frame = 0;
    if (reach.a > 0) frame = place(q.frame, k.frame, reach.a) * (2 * reach.b + 1);
    return (frame + place(q.y, k.y, reach.b)) * (2 * reach.c + 1) + place(q.x, k.x, reach.c);
  }
  /// ds = dS, as slopes of the scores before the cap.
  __device__ __forceinline__ void through_cap(float (&ds)[32], const std::uint32_t (&slope)[16]) const {
    if (t.cap == 0) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 steep = unpack_pair<f16>(slope[i]);
      ds[2 * i] *= steep.x, ds[2 * i + 1] *= steep.y;
    }
  }
};

/// Shares of a warp: rows that add at the same time have one each.
constexpr int kWarpShares = 2;
/// Where gradients of terms go; and shares for at most so many blocks.
inline Tensor shares_of_terms(Cuda where, const BackwardPass& b, TermSums& sums, Index& blocks) {
  if (b.d_terms) sums.to = *b.d_terms, sums.to.bias.query_row = nullptr;
  if (!sums.to.slopes && !sums.to.table) return {};
  constexpr Index kOfBlock = kMultiplying / kWarp * kWarpShares;
  sums.entries = sums.to.table ? b.terms->entries : 0;
  blocks = std::min(blocks, kShareBytes / (b.sizes.heads * kOfBlock * (sums.entries + 1) * 4) + 1);
  sums.shares = blocks * kOfBlock;
  Tensor memory = zeros({b.sizes.heads, sums.shares, sums.entries + 1}, DType::f32, {Device::Kind::cuda, where.device});
  sums.share = memory.mutable_data<float>();
  return memory;
}
/// run(pass, first row of the batch) for heads and rows of the batch: one by one where they add to
/// the same elements of a bias's gradient.
template <class Run> void each_alone(const AttentionPass& pass, const TermSums& sums, const Run& run) {
  const PairTensor<void>& bias = sums.to.bias;
  const bool heads = sums.by_pair() && bias.head == 0, rows = sums.by_pair() && bias.batch == 0;
  AttentionPass part = pass;
  if (heads) part.n_heads = std::min<Index>(pass.n_heads, 1);
  if (rows) part.sizes.batch = std::min<Index>(pass.sizes.batch, 1);
  for (Index b = 0; b < pass.sizes.batch; b += std::max<Index>(part.sizes.batch, 1))
    for (Index h = 0; h < pass.n_heads; h += std::max<Index>(part.n_heads, 1))
      part.heads = pass.heads + h, run(part, static_cast<int>(b));
}

/// What a warp that owns queries adds up for the gradients of terms.
template <int D> struct TermCollector {
  float distance = 0, row[2] = {0, 0};

  /// In shared memory, a warp's: 8 rows of dS, and behind them its shares where they are few.
  static constexpr std::uint32_t kPitch = 68 * 4, kRows = 8 * kPitch, kBytes = kRows + kShareBytesNear<D>;
  __device__ static bool shares_are_near(const TermSums& sums) {
    return sums.to.table && kWarpShares * (sums.entries + 1) * 4 <= kShareBytesNear<D>;
  }
  __device__ static std::uint32_t share_count(const TermSums& sums) {
    return static_cast<std::uint32_t>(kWarpShares * (sums.entries + 1));
  }

  /// dS of 16 rows and 64 columns, zeros where nothing attends. All lanes.
  template <class E>
  __device__ __forceinline__ void add(const LaneTerms<E, true>& lane, const float (&ds)[32], std::uint32_t scratch,
                                      float* share) {
    const TermSums& sums = lane.t.sums;
    if (sums.to.slopes)
      lane.template each_distance<32>([&](int i, float apart) { distance = fmaf(ds[i], apart, distance); });
    if (sums.by_row()) add_rows(ds);
    if (sums.by_pair())
      lane.template each_of_bias<32>([&](int i, Index line, Index key) {
        const PairTensor<void>& to = sums.to.bias;
        if (ds[i] != 0) static_cast<float*>(to.data)[to.offset(lane.b, lane.h, line) + key * to.key] += ds[i];
      });
    if (!sums.to.table) return;
    if (shares_are_near(sums)) add_to_table(lane, ds, scratch, Near{scratch + kRows});
    else add_to_table(lane, ds, scratch, Far{share});
  }
  __device__ __forceinline__ void add_rows(const float (&ds)[32]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) row[i / 2 % 2] += ds[i];
  }
  /// The sums of a lane's two rows, in all four lanes of a quad.
  __device__ __forceinline__ void close_rows() {
#pragma unroll
    for (float& x : row) x += __shfl_xor_sync(~0u, x, 1), x += __shfl_xor_sync(~0u, x, 2);
  }
  /// Moves what lies near to a head's shares, or to none, and clears it.
  __device__ __forceinline__ static void empty(const TermSums& sums, std::uint32_t scratch, float* share) {
    if (!shares_are_near(sums)) return;
    __syncwarp();
    for (std::uint32_t i = threadIdx.x % kWarp; i < share_count(sums); i += kWarp) {
      const std::uint32_t at = scratch + kRows + 4 * i;
      if (share) share[i] += __int_as_float(load_shared(at));
      store_shared(at, 0);
    }
    __syncwarp();
  }

 private:
  struct Near {
    std::uint32_t first;
    __device__ float get(int i) const { return __int_as_float(load_shared(first + static_cast<std::uint32_t>(i) * 4)); }
    __device__ void put(int i, float x) const {
      store_shared(first + static_cast<std::uint32_t>(i) * 4, __float_as_int(x));
    }
  };
  struct Far {
    float* first;
    __device__ float get(int i) const { return first[i]; }
    __device__ void put(int i, float x) const { first[i] = x; }
  };

  template <class E, class Share>
  __device__ __forceinline__ void add_to_table(const LaneTerms<E, true>& lane, const float (&ds)[32],
                                               std::uint32_t scratch, const Share& share) const {
    const ScoreTerms& t = lane.t;
    const int its = static_cast<int>(threadIdx.x) % kWarp;
    const auto at_of = [&](int row, int column) {
      return scratch + static_cast<std::uint32_t>(row) * kPitch + static_cast<std::uint32_t>(column) * 4;
    };
    RowSite key[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      key[half] = ScoreTerms::site_of(
          load_shared_16(lane.columns + static_cast<std::uint32_t>(its + 32 * half) * sizeof(RowSite)));
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // of the rows that lanes have
      const RowSite& own = lane.own[h];
      __syncwarp();
#pragma unroll
      for (int c = 0; c < 8; ++c)
        store_shared_pair(at_of(its / 4, 8 * c + its % 4 * 2), ds[4 * c + 2 * h], ds[4 * c + 2 * h + 1]);
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 8 / kWarpShares; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[kWarpShares];
          int at[kWarpShares];
          bool beyond = false;
#pragma unroll
          for (int i = 0; i < kWarpShares; ++i) {
            const int row = r + 8 / kWarpShares * i, from = 4 * row;
            const RowSite query{__shfl_sync(~0u, own.frame, from), __shfl_sync(~0u, own.y, from),
                                __shfl_sync(~0u, own.x, from), __shfl_sync(~0u, own.name, from)};
            x[i] = __int_as_float(load_shared(at_of(row, its + 32 * half)));
            at[i] = lane.entry_of(query, key[half]) + i * static_cast<int>(t.sums.entries + 1);
            beyond = beyond || (x[i] != 0 && is_beyond(t, query, key[half]));
          }
          if (__any_sync(~0u, beyond)) {
#pragma unroll
            for (int i = 0; i < kWarpShares; ++i) add_alike(share, at[i], x[i]);
          } else {
            float was[kWarpShares];
#pragma unroll
            for (int i = 0; i < kWarpShares; ++i) was[i] = x[i] != 0 ? share.get(at[i]) : 0.0f;
#pragma unroll
            for (int i = 0; i < kWarpShares; ++i)
              if (x[i] != 0) share.put(at[i], was[i] + x[i]);
          }
          __syncwarp();  // the next ones' may be of another lane
        }
    }
  }
  /// Whether the offset of a pair is clamped.
  __device__ static bool is_beyond(const ScoreTerms& t, const RowSite& q, const RowSite& k) {
    const Site& reach = t.of.reach;
    if (!t.of.table_on_grid) return abs(q.name - k.name) > reach.c;
    return abs(q.y - k.y) > reach.b || abs(q.x - k.x) > reach.c || abs(q.frame - k.frame) > reach.a;
  }
  /// Adds what lanes have; those with one entry add up first, in their order.
  template <class Share> __device__ static void add_alike(const Share& share, int at, float x) {
    const unsigned some = __ballot_sync(~0u, x != 0), peers = __match_any_sync(~0u, x != 0 ? at : -1);
    float sum = x;
    if (__all_sync(~0u, x == 0 || peers == some)) {
      sum = warp_reduce<Sum>(x);
    } else {
      unsigned rest = x != 0 ? peers & (peers - 1) : 0;  // all but the first, who writes
      while (__any_sync(~0u, rest != 0)) {
        const float other = __shfl_sync(~0u, x, rest != 0 ? __ffs(static_cast<int>(rest)) - 1 : 0);
        if (rest != 0) sum += other, rest &= rest - 1;
      }
    }
    if (x != 0 && static_cast<int>(threadIdx.x) % kWarp == __ffs(static_cast<int>(peers)) - 1)
      share.put(at, share.get(at) + sum);
  }
};

}  // namespace hilt::kernels::hopper
