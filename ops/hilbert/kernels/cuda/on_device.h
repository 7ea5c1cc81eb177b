#pragma once
#include "core/tensor.h"
#include "ops/hilbert/kernels/attention.h"
#include "ops/hilbert/kernels/hopper/schedule.h"

// Private: a tiling where a GPU's kernels can read it.

namespace hilt {

/// The lists of a Tiling, in a GPU's memory, under the same names; passed to kernels by value.
struct TilingView {
  std::span<const std::int32_t> q_token, k_token, q_name, k_name, q_known, k_known;
  std::span<const Tiling::Range> q_tile, k_tile;
  std::span<const std::int32_t> keys_begin, queries_begin;  // Tiling::met, and transposed
  std::span<const Tiling::Run> keys, queries;
  constexpr Tiling::Refs keys_of(int tile) const {
    return {keys.data() + keys_begin[tile], keys.data() + keys_begin[tile + 1]};
  }
  constexpr Tiling::Refs queries_of(int tile) const {
    return {queries.data() + queries_begin[tile], queries.data() + queries_begin[tile + 1]};
  }
  bool causal;
  std::span<const std::int32_t> q_rank, k_rank;
  constexpr std::span<const std::int32_t> q_ranks() const { return q_rank; }
  constexpr std::span<const std::int32_t> k_ranks() const { return k_rank; }
  struct Axis {
    std::span<const std::int32_t> key, low, high;
  };
  Axis axis[3];
  std::int32_t boxes = 1;
  std::span<const Tiling::Sites> grids;
};

/// The visits of a Tiling, likewise.
struct VisitsView {
  struct Side {
    std::span<const VisitSide::Owner> owner, part;
    std::span<const VisitSide::Visit> visit;
    bool wide;                          // two steps at a time waste less than they save
    bool busy;                          // an owner, or a part, has a good many steps
    bool uneven;                        // some have more than others
    Index steps;                        // the most of an owner
    double longest;                     // that, among all steps
    std::vector<std::int32_t> portion;  // of owners, see VisitSide; where this process reads it
    Index made, parts;
  };
  Side queries, keys, threes;
  std::span<const std::uint32_t> mask;
  bool mixed, eights;
};

/// The Schedule of its owners of keys, likewise.
struct ScheduleView {
  std::span<const VisitSide::Owner> owner;
  std::span<const kernels::hopper::Schedule::Meeting> meeting;
  Index tiles;  // as there
};

/// A row as score terms see it: its token and its cell, row and column in a half each.
struct alignas(16) RowSite {
  std::int32_t name, yx, frame, unused;
};
constexpr RowSite row_site(std::span<const Tiling::Sites> grids, std::int32_t token) {
  const kernels::Site at = kernels::site_of(grids, !grids.empty(), token);
  return {token, grids.empty() ? 0 : at.b << 16 | at.c, at.a, 0};
}
struct Sites {
  std::vector<RowSite> queries, keys;
};
struct SitesView {
  std::span<const RowSite> queries, keys;
};
constexpr Index kMostTokens = 1 << 24, kMostRows = 1 << 14;  // distances that f32 has exactly; and rows or columns

/// A pass's lists along an order that came with the call, whose tokens are rows and names.
struct kernels::OrderedLists {
  OrderedLists(Cuda where, AttentionPass& pass);  // tells the pass of them, if it has an order
  std::vector<Tensor> memory;
  TilingView lists;
  SitesView sites;
};

/// Copied there by the first call, kept as long as the tiling.
const TilingView& on_device(const Tiling& t, Cuda where);
inline const TilingView& lists_of(const kernels::AttentionPass& pass, Cuda where) {
  return pass.ordered ? pass.ordered->lists : on_device(*pass.tiling, where);
}
const VisitsView& visits_on_device(const Tiling& t, Cuda where);
const SitesView& sites_on_device(const Tiling& t, Cuda where);
const ScheduleView& schedule_on_device(const Tiling& t, Cuda where, Index queries);  // of a tile: 64 or 128

}  // namespace hilt
