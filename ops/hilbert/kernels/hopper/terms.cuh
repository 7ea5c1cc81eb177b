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

constexpr int kPlanes = 3;  // of a RowSite, in shared memory one after the other

/// Terms as a launch is told of them.
struct ScoreTerms {
  Terms of;
  float cap, inverse_cap;  // 0: none
  bool rows_of_q;          // lines of a bias are those of q, else tokens
  std::span<const RowSite> own, stream;
  TermSums sums;
  bool near;       // a head's table lies beside each of an owner's tiles; else it is read where it is
  bool counts_up;  // so do streamed tokens, from `first`
  bool frames;     // keys of a query may differ by these alone
  int first;
  // A table's reach and twice that, by token or, packed as sites are, by row and column; and what
  // rows and columns count for, in entries and, where these fit, in bytes.
  unsigned most, reach;
  int width, factors;
  static __device__ RowSite site_of(const int4& x) { return {x.x, x.y, x.z, x.w}; }
  /// That of an item's row, or of its last.
  __device__ __forceinline__ RowSite own_site(const Item& x, int row) const {
    return site_of(__ldg(reinterpret_cast<const int4*>(own.data()) + x.row + max(min(row, x.rows - 1), 0)));
  }
  /// The entry of an offset is this of a column and what `own_place` makes of the row: counted from
  /// the front where keys own, from the back where queries do.
  __device__ __forceinline__ unsigned own_place(const RowSite& own) const {
    return of.table_on_grid ? __vsub2(reach, static_cast<unsigned>(own.yx)) : reach - static_cast<unsigned>(own.name);
  }
  __device__ __forceinline__ unsigned place(unsigned own, unsigned column) const {
    return of.table_on_grid ? __viaddmin_s16x2_relu(column, own, most)
                            : static_cast<unsigned>(__viaddmin_s32_relu(static_cast<int>(column), static_cast<int>(own),
                                                                        static_cast<int>(most)));
  }
  __device__ __forceinline__ int entry(unsigned place) const {
    return of.table_on_grid ? static_cast<int>(place >> 16) * width + static_cast<int>(place & 0xffff)
                            : static_cast<int>(place);
  }
  /// What a third axis adds.
  __device__ __forceinline__ int frame_entry(int own, int column) const {
    return __viaddmin_s32_relu(column, of.reach.a - own, 2 * of.reach.a) * width * (2 * of.reach.b + 1);
  }
};

/// Shared memory for a table, and for a warp's shares of its gradient; larger tables are read, and
/// added to, where they are. At large head dims rows take all of it.
template <int D> constexpr std::uint32_t kTableBytes = D > 192 ? 0 : 8 << 10;
template <int D> constexpr std::uint32_t kShareBytesNear = D > 192 ? 0 : 2560;

/// queries_own: own rows are queries.
template <int D> ScoreTerms score_terms(Cuda where, const AttentionPass& pass, bool queries_own) {
  ScoreTerms t{};
  if (pass.terms) t.of = *pass.terms;
  if (t.of.cap != 0) t.cap = static_cast<float>(t.of.cap), t.inverse_cap = static_cast<float>(1 / t.of.cap);
  t.near = t.of.table && t.of.entries * 4 <= kTableBytes<D> && (queries_own || pass.sizes.heads == pass.sizes.kv_heads);
  t.rows_of_q = t.of.bias.query_row != nullptr, t.of.bias.query_row = nullptr;
  const SitesView& sites = pass.ordered ? pass.ordered->sites : sites_on_device(*pass.tiling, where);
  t.own = queries_own ? sites.queries : sites.keys, t.stream = queries_own ? sites.keys : sites.queries;
  const TokenList& names = queries_own ? pass.tiling->k_names() : pass.tiling->q_names();
  t.counts_up = !pass.along && names.counts_up(), t.first = names.empty() ? 0 : names[0];
  t.frames = std::ranges::any_of(pass.tiling->grids, [](const Tiling::Sites& grid) { return grid.frames > 1; });
  const Site& reach = t.of.reach;
  t.reach = static_cast<unsigned>(t.of.table_on_grid ? reach.b << 16 | reach.c : reach.c), t.most = 2 * t.reach;
  t.width = 2 * reach.c + 1, t.factors = t.of.table_on_grid && t.width < 64 ? 4 * t.width << 8 | 4 : 0;
  return t;
}
/// Copies a head's table there, from its back where queries own. All threads that load.
__device__ __forceinline__ void copy_table(const ScoreTerms& t, int head, std::uint32_t to, bool queries_own) {
  if (!t.near) return;
  const auto n = static_cast<int>(t.of.entries);
  const float* const from = static_cast<const float*>(t.of.table) + head * n;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kWarpgroup)
    copy_4(to + static_cast<std::uint32_t>(i) * 4, from + (queries_own ? n - 1 - i : i), true);
}
/// And sites of a stage's rows, plane by plane.
template <int kRows>
__device__ __forceinline__ void copy_site(const ScoreTerms& t, std::uint32_t to, int mine, int row, bool there) {
  const auto* const from = reinterpret_cast<const std::int32_t*>(t.stream.data() + max(row, 0));
#pragma unroll
  for (int plane = 0; plane < kPlanes; ++plane)
    copy_4(to + static_cast<std::uint32_t>(plane * kRows + mine) * 4, from + plane, there);
}

/// s = cap tanh(scale s / cap). Where the scores of a warp are small beside the cap, which they
/// mostly are, a polynomial: the unit of exponentials has others to make.
template <int N> __device__ __forceinline__ void cap_scores(float (&s)[N], float scale, float cap, float inverse_cap) {
  constexpr float kSmall = 0.375f;
  const float ratio = scale * inverse_cap, square = ratio * ratio;
  float most = 0;
#pragma unroll
  for (const float x : s) most = fmaxf(most, fabsf(x));
  const float a = -0.333323454f * square * scale, b = 0.132899993f * square * square * scale,
              c = -0.0485012121f * square * square * square * scale;
  const auto small = [&](float x) { return x * fmaf(x * x, fmaf(x * x, fmaf(x * x, c, b), a), scale); };
  if (__all_sync(~0u, most * ratio <= kSmall)) {
#pragma unroll
    for (float& x : s) x = small(x);
  } else {  // 1 - 2 / (e^2x + 1), of each that is not: its bits are its own
#pragma unroll
    for (float& x : s)
      x = fabsf(x) * ratio <= kSmall ? small(x) : cap * (1 - __fdividef(2, exp2_fast(x * ratio * (2 * kLog2e)) + 1));
  }
}
/// Its slope where a score came to be x.
__device__ __forceinline__ float cap_slope(float x, float inverse_cap) {
  return fmaf(-x * inverse_cap, x * inverse_cap, 1);
}

/// The terms of a batch and a query head, for a lane: `own` are its rows. kQueries: they are
/// queries, and columns keys; kColumns: of a stage.
template <class E, bool kQueries, int kColumns> struct LaneTerms {
  const ScoreTerms& t;
  int b, h;
  const RowSite (&own)[2];
  std::uint32_t columns, table;           // in shared memory: columns' sites, and the table where it is near
  std::span<const std::int32_t> q_token;  // of all queries
  int own_row;                            // where the lane's first row stands in its list
  const int (&row)[kColumns / kCell];     // and every 64th column

  static __device__ __forceinline__ int first() { return static_cast<int>(threadIdx.x) % 4 * 2; }
  /// f(i, own row's number, column, its value in a plane) for all scores.
  template <class F> __device__ __forceinline__ void each(int plane, const F& f) const {
    const std::uint32_t at = columns + static_cast<std::uint32_t>(plane * kColumns + first()) * 4;
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      const int2 x = load_shared<int2>(at + static_cast<std::uint32_t>(c) * 32);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        f(4 * c + 2 * r, r, first() + 8 * c, x.x), f(4 * c + 2 * r + 1, r, first() + 8 * c + 1, x.y);
    }
  }
  /// f(i, distance).
  template <class F> __device__ __forceinline__ void each_distance(const F& f) const {
    if (t.of.slopes_on_grid) {
      const std::uint32_t frames = columns + 2 * kColumns * 4;
      each(1, [&](int i, int r, int column, int yx) {
        const int frame = load_shared<int>(frames + static_cast<std::uint32_t>(column) * 4);
        f(i, static_cast<float>(abs((own[r].yx >> 16) - (yx >> 16)) + abs((own[r].yx & 0xffff) - (yx & 0xffff)) +
                                abs(own[r].frame - frame)));
      });
    } else if (t.counts_up) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i)
        f(i, fabsf(static_cast<float>(own[i / 2 % 2].name - t.first - row[i / 32] - first()) -
                   static_cast<float>(column_of(i))));
    } else {
      each(0, [&](int i, int r, int, int name) { f(i, static_cast<float>(abs(own[r].name - name))); });
    }
  }
  /// The line of a bias for an own row, or for a column.
  __device__ __forceinline__ Index line_of(int r, int column, int query) const {
    if (!t.rows_of_q) return query;
    const int at = kQueries ? own_row + 8 * r : row[column / kCell] + column % kCell;
    return __ldg(q_token.data() + min(at, static_cast<int>(q_token.size()) - 1));
  }
  /// f(i, line, key).
  template <class F> __device__ __forceinline__ void each_of_bias(const F& f) const {
    each(0, [&](int i, int r, int column, int name) {
      f(i, line_of(r, column, kQueries ? own[r].name : name), kQueries ? name : own[r].name);
    });
  }
  /// An entry of the table.
  __device__ __forceinline__ float value(int at) const {
    if (t.near) return load_shared<float>(table + static_cast<std::uint32_t>(at) * 4);
    return __ldg(static_cast<const float*>(t.of.table) + h * t.of.entries + (kQueries ? t.of.entries - 1 - at : at));
  }
  /// The entry of all pairs of a warp and 64 columns, beyond an end of a table of tokens; or -1.
  __device__ __forceinline__ int end_of_table() const {
    if (t.of.table_on_grid || !t.counts_up || kColumns > kCell) return -1;
    const auto column = static_cast<unsigned>(t.first + row[0]);
    unsigned low = t.most, high = 0;
#pragma unroll
    for (const RowSite& its : own)
      low = min(low, t.place(t.own_place(its), column)),
      high = max(high, t.place(t.own_place(its), column + kCell - 1));
    return __all_sync(~0u, low == t.most) ? static_cast<int>(t.most) : __all_sync(~0u, high == 0) ? 0 : -1;
  }
  __device__ __forceinline__ void add_table(float (&s)[kColumns / 2]) const {
    const unsigned mine[2] = {t.own_place(own[0]), t.own_place(own[1])};
    if (const int end = end_of_table(); end >= 0) {
      const float x = value(end);
#pragma unroll
      for (float& its : s) its += x;
      return;
    }
    if (t.near && t.of.table_on_grid && t.factors != 0 && t.of.reach.a == 0) {
      each(t.of.table_on_grid, [&](int i, int r, int, int x) {
        s[i] += load_shared<float>(
            __dp2a_lo(t.place(mine[r], static_cast<unsigned>(x)), static_cast<unsigned>(t.factors), table));
      });
      return;
    }
    const std::uint32_t frames = columns + 2 * kColumns * 4;
    each(t.of.table_on_grid, [&](int i, int r, int column, int x) {
      int at = t.entry(t.place(mine[r], static_cast<unsigned>(x)));
      if (t.of.reach.a > 0)
        at += t.frame_entry(own[r].frame, load_shared<int>(frames + static_cast<std::uint32_t>(column) * 4));
      s[i] += value(at);
    });
  }
  /// s = the scores c q . k with their terms; -inf where a bias masks. slope: that of the cap, by
  /// pairs in f16, where there is one. Returns the bits of what is not masked, of the first 32.
  __device__ __forceinline__ std::uint32_t add(float (&s)[kColumns / 2], float scale,
                                               std::uint32_t (*slope)[16]) const {
    if (t.cap != 0) {
      cap_scores(s, scale, t.cap, t.inverse_cap);
      if (slope)
#pragma unroll
        for (int i = 0; i < 16; ++i)
          (*slope)[i] = pack_pair<f16>(cap_slope(s[2 * i], t.inverse_cap), cap_slope(s[2 * i + 1], t.inverse_cap));
    } else {
#pragma unroll
      for (float& x : s) x *= scale;
    }
    if (t.of.slopes) {
      const float steep = -__ldg(static_cast<const float*>(t.of.slopes) + h);
      each_distance([&](int i, float distance) { s[i] = fmaf(steep, distance, s[i]); });
    }
    if (t.of.table) add_table(s);
    std::uint32_t kept = ~0u;
    if (t.of.bias.data) {
      const auto add_bias = [&](const auto* bias) {
        each_of_bias([&](int i, Index line, Index key) {
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
/// What a warp that owns queries adds up for the gradients of terms.
template <int D> struct TermCollector {
  float distance = 0, row[2] = {0, 0}, end[2] = {0, 0};  // ends of a table

  /// In shared memory, a warp's: 8 rows of dS, and behind them its shares where they are few.
  static constexpr std::uint32_t kPitch = 68 * 4, kRows = 8 * kPitch, kBytes = kRows + kShareBytesNear<D>;
  __device__ static bool shares_are_near(const TermSums& sums) {
    return sums.to.table && kWarpShares * (sums.entries + 1) * 4 <= kShareBytesNear<D>;
  }

  /// dS of 16 rows and 64 columns, zeros where nothing attends. All lanes.
  template <class E>
  __device__ __forceinline__ void add(const LaneTerms<E, true, kCell>& lane, const float (&ds)[32],
                                      std::uint32_t scratch, float* share) {
    const TermSums& sums = lane.t.sums;
    if (sums.to.slopes) lane.each_distance([&](int i, float apart) { distance = fmaf(ds[i], apart, distance); });
    if (sums.by_row()) add_rows(ds);
    if (sums.by_pair())
      lane.each_of_bias([&](int i, Index line, Index key) {
        const PairTensor<void>& to = sums.to.bias;
        if (ds[i] != 0) static_cast<float*>(to.data)[to.offset(lane.b, lane.h, line) + key * to.key] += ds[i];
      });
    if (!sums.to.table) return;
    if (const int its = lane.end_of_table(); its >= 0) {
      float sum = 0;
#pragma unroll
      for (float x : ds) sum += x;
      end[0] += its == 0 ? 0 : sum, end[1] += its == 0 ? sum : 0;
      return;
    }
    if (shares_are_near(sums)) add_to_table(lane, ds, scratch, &shared<float>(scratch + kRows));
    else add_to_table(lane, ds, scratch, share);
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
    for (std::uint32_t i = threadIdx.x % kWarp; i < static_cast<std::uint32_t>(kWarpShares * (sums.entries + 1));
         i += kWarp) {
      float& near = shared<float>(scratch + kRows + 4 * i);
      if (share) share[i] += near;
      near = 0;
    }
    __syncwarp();
  }

 private:
  template <class E>
  __device__ __forceinline__ void add_to_table(const LaneTerms<E, true, kCell>& lane, const float (&ds)[32],
                                               std::uint32_t scratch, float* share) const {
    const ScoreTerms& t = lane.t;
    const int its = static_cast<int>(threadIdx.x) % kWarp;
    float* const rows = &shared<float>(scratch);
    const auto seen = [&](int plane, int column) { return (&shared<int>(lane.columns))[plane * kCell + column]; };
    const int on_grid = t.of.table_on_grid, frames = on_grid && t.frames, last = static_cast<int>(t.of.entries) - 1;
    const int key[2] = {seen(on_grid, its), seen(on_grid, its + 32)};
    const int frame[2] = {frames ? seen(2, its) : 0, frames ? seen(2, its + 32) : 0};
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // of the rows that lanes have
      const auto own = static_cast<int>(t.own_place(lane.own[h]));
      __syncwarp();
#pragma unroll
      for (int c = 0; c < 8; ++c)
        store_shared(scratch + kPitch * (its / 4) + 32 * c + 8 * (its % 4),
                     float2{ds[4 * c + 2 * h], ds[4 * c + 2 * h + 1]});
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
            const int row = r + 8 / kWarpShares * i;
            const auto query = static_cast<unsigned>(__shfl_sync(~0u, own, 4 * row)),
                       column = static_cast<unsigned>(key[half]);
            x[i] = rows[row * kPitch / 4 + its + 32 * half];
            const unsigned place = t.place(query, column);
            at[i] = t.entry(place);
            bool out = place != (on_grid ? __vadd2(query, column) : query + column);
            if (frames) {
              const int from = __shfl_sync(~0u, lane.own[h].frame, 4 * row);
              at[i] += t.frame_entry(from, frame[half]), out = out || abs(from - frame[half]) > t.of.reach.a;
            }
            at[i] = last - at[i] + i * static_cast<int>(t.sums.entries + 1);
            beyond = beyond || (x[i] != 0 && out);
          }
          if (__any_sync(~0u, beyond)) {
#pragma unroll
            for (int i = 0; i < kWarpShares; ++i)
              add_by_entry(x[i] != 0, at[i], x[i], [&](int entry, float sum) { share[entry] += sum; });
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
};

}  // namespace hilt::kernels::hopper
