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

constexpr std::uint32_t kPairOfSites = 2 * sizeof(RowSite);

/// As RowSite says, in registers.
struct Seen {
  int a, bc, name, line;
  __device__ static Seen of(const int4& x) { return {x.x, x.y, x.z, x.w}; }
  __device__ int b() const { return bc >> 16; }
  __device__ int c() const { return bc & 0xffff; }
  __device__ __forceinline__ Site site(bool on_grid) const { return on_grid ? Site{a, b(), c()} : Site{0, 0, name}; }
};

/// Terms as a launch is told of them.
struct ScoreTerms {
  Terms of;
  float cap, inverse_cap;  // 0: none
  bool rows_of_q;          // lines of a bias are those of q, else tokens
  std::span<const RowSite> own, stream;
  TermSums sums;
  __device__ int line(const Seen& query) const { return rows_of_q ? query.line : query.name; }
  __device__ static Seen load(std::span<const RowSite> list, int row) {
    return Seen::of(__ldg(reinterpret_cast<const int4*>(list.data()) + row));
  }
};
/// kQueriesOwn: own rows are queries.
inline ScoreTerms score_terms(Cuda where, const AttentionPass& pass, bool queries_own) {
  ScoreTerms t{};
  if (pass.terms) t.of = *pass.terms;
  if (t.of.cap != 0) t.cap = static_cast<float>(t.of.cap), t.inverse_cap = static_cast<float>(1 / t.of.cap);
  t.rows_of_q = t.of.bias.query_row != nullptr, t.of.bias.query_row = nullptr;
  const SitesView& sites = sites_on_device(*pass.tiling, where);
  t.own = queries_own ? sites.queries : sites.keys, t.stream = queries_own ? sites.keys : sites.queries;
  return t;
}

/// The terms of a batch and a query head, for a lane: `own` are its rows. kQueries: they are
/// queries, and columns keys.
template <class E, bool kQueries> struct LaneTerms {
  const ScoreTerms& t;
  int b, h;
  const Seen (&own)[2];
  std::uint32_t columns;  // in shared memory: where those of a lane's first pair of columns lie

  /// f(i, column's, own row's) for the scores of N / 4 pairs of columns.
  template <int N, class F> __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int c = 0; c < N / 4; ++c)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Seen other = Seen::of(load_shared_16(columns + static_cast<std::uint32_t>(8 * c + j) * sizeof(RowSite)));
#pragma unroll
        for (int row = 0; row < 2; ++row)
          f(4 * c + 2 * row + j, kQueries ? own[row] : other, kQueries ? other : own[row]);
      }
  }
  __device__ __forceinline__ std::int64_t bias_at(const Seen& q, const Seen& k) const {
    return t.of.bias.offset(b, h, t.line(q)) + k.name * t.of.bias.key;
  }
  /// s = the scores c q . k with their terms; -inf where a bias masks. slope: that of the cap, by
  /// pairs in f16, where there is one. Returns the bits of what is not masked, of the first 32.
  template <int N>
  __device__ __forceinline__ std::uint32_t add(float (&s)[N], float scale, std::uint32_t (*slope)[16]) const {
#pragma unroll
    for (float& x : s) x *= scale;
    if (t.cap != 0) {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        float steep[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // tanh z = 1 - 2 / (e^2z + 1)
          const float tanh = 1 - __fdividef(2, exp2_fast(s[i + j] * t.inverse_cap * (2 * kLog2e)) + 1);
          s[i + j] = t.cap * tanh, steep[j] = fmaf(-tanh, tanh, 1);
        }
        if (slope) (*slope)[i / 2 % 16] = pack_pair<f16>(steep[0], steep[1]);
      }
    }
    if (t.of.slopes) {
      const float steep = __ldg(static_cast<const float*>(t.of.slopes) + h);
      if (t.of.slopes_on_grid)
        each<N>([&](int i, const Seen& q, const Seen& k) {
          s[i] = fmaf(-steep, static_cast<float>(distance(q.site(true), k.site(true))), s[i]);
        });
      else
        each<N>([&](int i, const Seen& q, const Seen& k) {
          s[i] = fmaf(-steep, static_cast<float>(abs(q.name - k.name)), s[i]);
        });
    }
    if (t.of.table) {
      const float* const table = static_cast<const float*>(t.of.table) + h * t.of.entries;
      each<N>([&](int i, const Seen& q, const Seen& k) { s[i] += __ldg(table + entry_of(q, k)); });
    }
    std::uint32_t kept = ~0u;
    if (t.of.bias.data) {
      const auto add_bias = [&](const auto* bias) {
        each<N>([&](int i, const Seen& q, const Seen& k) {
          const float x = static_cast<float>(bias[bias_at(q, k)]);
          s[i] = x == -INFINITY ? x : s[i] + x;
          if (i < 32 && x == -INFINITY) kept &= ~(1u << (i / 2 % 2 * 16 + i / 4 * 2 + i % 2));
        });
      };
      if (t.of.bias.type == DType::f32) add_bias(static_cast<const float*>(t.of.bias.data));
      else add_bias(static_cast<const E*>(t.of.bias.data));
    }
    return kept;
  }
  __device__ __forceinline__ int entry_of(const Seen& q, const Seen& k) const {
    if (t.of.table_on_grid) return entry(t.of.reach, q.site(true), k.site(true));
    return max(min(q.name - k.name, t.of.reach.c), -t.of.reach.c) + t.of.reach.c;
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
struct TermCollector {
  float distance = 0, row[2] = {0, 0};

  /// dS of 16 rows and 64 columns, zeros where nothing attends. scratch: the warp's, 8 rows of
  /// kPitch in shared memory; all lanes.
  static constexpr std::uint32_t kPitch = 68 * 4, kBytes = 8 * kPitch;
  template <class E>
  __device__ __forceinline__ void add(const LaneTerms<E, true>& lane, const float (&ds)[32], std::uint32_t scratch,
                                      float* share, std::uint32_t sites) {
    const ScoreTerms& t = lane.t;
    const TermSums& sums = t.sums;
    if (sums.to.slopes) {
      const bool on_grid = t.of.slopes_on_grid;
      lane.template each<32>([&](int i, const Seen& q, const Seen& k) {
        distance = fmaf(ds[i], static_cast<float>(kernels::distance(q.site(on_grid), k.site(on_grid))), distance);
      });
    }
    if (sums.by_row()) add_rows(ds);
    if (sums.by_pair())
      lane.template each<32>([&](int i, const Seen& q, const Seen& k) {
        if (ds[i] != 0)
          static_cast<float*>(
              sums.to.bias.data)[sums.to.bias.offset(lane.b, lane.h, t.line(q)) + k.name * sums.to.bias.key] += ds[i];
      });
    if (sums.to.table) add_to_table(lane, ds, scratch, share, sites);
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

 private:
  template <class E>
  __device__ __forceinline__ void add_to_table(const LaneTerms<E, true>& lane, const float (&ds)[32],
                                               std::uint32_t scratch, float* share, std::uint32_t sites) const {
    const ScoreTerms& t = lane.t;
    const int its = static_cast<int>(threadIdx.x) % kWarp;
    const auto at_of = [&](int row, int column) {
      return scratch + static_cast<std::uint32_t>(row) * kPitch + static_cast<std::uint32_t>(column) * 4;
    };
    Seen key[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      key[half] = Seen::of(load_shared_16(sites + static_cast<std::uint32_t>(its + 32 * half) * sizeof(RowSite)));
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // of the rows that lanes have
      const Seen& own = lane.own[h];
#pragma unroll
      for (int c = 0; c < 8; ++c)
        store_shared_pair(at_of(its / 4, 8 * c + its % 4 * 2), ds[4 * c + 2 * h], ds[4 * c + 2 * h + 1]);
      __syncwarp();
#pragma unroll 1
      for (int r = 0; r < 8 / kWarpShares; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[kWarpShares];
          int at[kWarpShares];
          bool beyond = false;
#pragma unroll
          for (int i = 0; i < kWarpShares; ++i) {
            const int row = r + 8 / kWarpShares * i, lane_of_row = 4 * row;
            const Seen query{__shfl_sync(~0u, own.a, lane_of_row), __shfl_sync(~0u, own.bc, lane_of_row),
                             __shfl_sync(~0u, own.name, lane_of_row), 0};
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
            for (int i = 0; i < kWarpShares; ++i) was[i] = x[i] != 0 ? share[at[i]] : 0.0f;
#pragma unroll
            for (int i = 0; i < kWarpShares; ++i)
              if (x[i] != 0) share[at[i]] = was[i] + x[i];
          }
          __syncwarp();  // the next ones' may be of another lane
        }
    }
  }
  /// Whether the offset of a pair is clamped.
  __device__ static bool is_beyond(const ScoreTerms& t, const Seen& q, const Seen& k) {
    const Site a = q.site(t.of.table_on_grid), b = k.site(t.of.table_on_grid), &reach = t.of.reach;
    return abs(a.a - b.a) > reach.a || abs(a.b - b.b) > reach.b || abs(a.c - b.c) > reach.c;
  }
  /// Adds what lanes have; those with one entry add up first, in their order.
  __device__ static void add_alike(float* share, int at, float x) {
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
    if (x != 0 && static_cast<int>(threadIdx.x) % kWarp == __ffs(static_cast<int>(peers)) - 1) share[at] += sum;
  }
};

}  // namespace hilt::kernels::hopper
