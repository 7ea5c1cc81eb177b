// Dividing a plan: a rank's part is the same lists with what belongs elsewhere left out.
#include "ops/hilbert/ranks/shards.h"
#include <tuple>
#include "core/error.h"
#include "core/io/text.h"
#include "core/recent.h"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/plan/tiles.h"

namespace hilt {
namespace {

using List = std::vector<std::int32_t>;
constexpr std::array<std::string_view, 2> kTransports{"ring", "gather"};
constexpr std::array<std::string_view, 3> kDealings{"contiguous", "balanced", "auto"};

/// Tile work by position of the query: rows of all key tiles that its tile lists, for every head.
std::vector<double> work_by_position(const Plan& plan) {
  std::map<std::int32_t, double> heads;  // of a tiling
  for (Index h = 0; h < plan.heads(); ++h)
    for (std::int32_t t : plan.tilings_of(h)) ++heads[t];
  std::vector<double> work(at(plan.length()));
  for (const PlanPart& part : plan.parts())
    for (const auto& [index, users] : heads) {
      const Tiling& t = part.tilings[at(index)];
      for (std::size_t i = 0; i < t.q_tile.size(); ++i) {
        const double keys = static_cast<double>(t.keys_of(i));
        for (auto q = t.q_tile[i].begin; q < t.q_tile[i].end; ++q)
          for (Index place = 0; place < part.places.count(1); ++place)
            work[at(part.places.at(place).q + t.q_token[at(q)])] += keys * users;
      }
    }
  return work;
}

void require_positions(const Plan& plan) {
  check(!plan.spec().queries && !plan.spec().cross, "shards: ", plan.queries(), " queries of ", plan.length(),
        " tokens; ranks hold rows of all, so leave queries and cross out");
  check(!plan.takes_order(), "shards: order=given: ranks divide an order, so it must be in the plan, PlanSpec::given");
  check(!plan.looks_at_data(), "shards: ", to_string(plan.spec().pattern),
        " compares the queries and keys of all ranks; name another rule");
  check(plan.spec().documents.empty() || prefix_of(plan.spec().pattern) == 0,
        "shards: ", to_string(plan.spec().pattern), ": documents with a prefix are not for several ranks");
  check(plan.spec().in_order || !plan.spec().documents.empty(),
        "shards: rows of the plan are tokens; ranks hold runs of positions: make the plan with in_order = true");
}

/// The tiling for some queries and keys, given the row of each position in their tensors, or -1.
Tiling cut_down(const Tiling& t, const List& q_row, const List& k_row) {
  Tiling out;
  out.grids = t.grids;
  /// Entries and tiles of a side become others: of each old tile the new one, or -1. Rows of
  /// entries, whose tokens they had so far, become these.
  const auto cut = [&](const Side& side, const List& row) {
    TokenList kept, rows;
    List now;
    for (const Tiling::Range& r : t.*side.tile) {
      const std::int32_t begin = narrow(kept.size());
      for (auto i = r.begin; i < r.end; ++i)
        if (row[at((t.*side.token)[at(i)])] >= 0) kept.push_back(i);
      const std::int32_t end = narrow(kept.size());
      now.push_back(end > begin ? narrow((out.*side.tile).size()) : -1);
      if (end > begin) (out.*side.tile).push_back({begin, end});
    }
    select(side, out, t, &kept);
    if ((out.*side.name).empty()) out.*side.name = out.*side.token;
    for (const std::int32_t position : out.*side.token) rows.push_back(row[at(position)]);
    out.*side.token = std::move(rows);
    return now;
  };
  const List q_tile = cut(kQueries, q_row), k_tile = cut(kKeys, k_row);
  for (std::size_t i = 0; i < t.q_tile.size(); ++i) {
    if (q_tile[i] < 0) continue;
    const Tiling::Range queries = out.q_tile[at(q_tile[i])];
    for (const Tiling::Ref ref : t.met.of(i)) {
      const std::int32_t tile = k_tile[at(ref.tile)];
      if (tile < 0) continue;
      const Tiling::Range keys = out.k_tile[at(tile)];
      const Index all = Index{queries.end - queries.begin} * (keys.end - keys.begin);
      const Index pairs = ref.partial ? PairBits(out).count(queries, keys) : all;
      if (pairs > 0) out.met.add(tile, tile + 1, pairs < all);
      out.pairs += pairs;
    }
    out.met.end_list();
  }
  return out;
}

/// Marks the rows of keys that some query attends to.
void mark_met(const Tiling& t, std::vector<bool>& met) {
  for (std::size_t i = 0; i < t.q_tile.size(); ++i)
    for (const Tiling::Ref ref : t.met.of(i)) {
      const Tiling::Range keys = t.k_tile[at(ref.tile)];
      for (auto key = keys.begin; key < keys.end; ++key)
        if (auto is_met = met[at(t.k_token[at(key)])]; !is_met)
          is_met = !ref.partial || PairBits(t).count(t.q_tile[i], {key, key + 1}, 1) > 0;
    }
}

}  // namespace

Transport parse_transport(std::string_view text) { return Transport(find_name("transport", text, kTransports)); }
std::string_view name_of(Transport transport) { return kTransports[static_cast<std::size_t>(transport)]; }

Index Shards::rows(int rank) const { return std::ssize(positions(rank)); }
std::vector<std::int32_t> Shards::positions(int rank) const {
  List out;
  for (std::size_t i = 0; i < owner.size(); ++i)
    for (Index p = cut[i]; owner[i] == rank && p < cut[i + 1]; ++p) out.push_back(narrow(p));
  return out;
}

Shards contiguous_shards(const Plan& plan, int ranks) {
  check(ranks >= 1, "shards: ", ranks, " ranks");
  require_positions(plan);
  const Index each = std::max<Index>(1, plan.length() / ranks);
  Index unit = 1;
  for (const Branch& b : plan.spec().pattern)
    if (b.kind == Branch::Kind::segment && b.size <= each) unit = std::max(unit, b.size);
  Shards s{ranks, {0}, {}};
  for (int r = 0; r < ranks; ++r) {
    const Index even = plan.length() * (r + 1) / ranks;
    s.cut.push_back(r + 1 == ranks ? plan.length()
                                   : std::max(s.cut.back(), std::min((even + unit / 2) / unit * unit, plan.length())));
    s.owner.push_back(r);
  }
  return s;
}

Shards balanced_shards(const Plan& plan, int ranks, Index chunks_each) {
  check(ranks >= 1 && chunks_each >= 1, "shards: ", ranks, " ranks with ", chunks_each, " chunks each");
  require_positions(plan);
  const std::vector<double> work = work_by_position(plan);
  const Index chunks = ranks * chunks_each;
  Shards s{ranks, {0}, std::vector<int>(at(chunks))};
  std::vector<double> cost;
  for (Index i = 0; i < chunks; ++i) {
    s.cut.push_back(plan.length() * (i + 1) / chunks);
    cost.push_back(std::accumulate(work.begin() + s.cut[at(i)], work.begin() + s.cut[at(i + 1)], 0.0));
  }
  std::vector<std::size_t> dearest(at(chunks));
  std::iota(dearest.begin(), dearest.end(), std::size_t{0});
  std::ranges::stable_sort(dearest, [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  std::vector<std::pair<bool, double>> load(at(ranks));  // whether it takes no more: all hold as many rows
  std::vector<Index> held(at(ranks));
  for (std::size_t chunk : dearest) {
    const auto least = std::ranges::min_element(load);
    s.owner[chunk] = static_cast<int>(least - load.begin());
    least->second += cost[chunk], least->first = ++held[at(s.owner[chunk])] == chunks_each;
  }
  return s;
}

Shards choose_shards(const Plan& plan, int ranks) {
  constexpr double kWorth = 1.1;
  Shards contiguous = contiguous_shards(plan, ranks), balanced = balanced_shards(plan, ranks);
  return imbalance(plan, contiguous) > kWorth * imbalance(plan, balanced) ? balanced : contiguous;
}

double imbalance(const Plan& plan, const Shards& shards) {
  const std::vector<double> work = work_by_position(plan);
  std::vector<double> load(at(shards.ranks));
  for (std::size_t i = 0; i < shards.owner.size(); ++i)
    load[at(shards.owner[i])] += std::accumulate(work.begin() + shards.cut[i], work.begin() + shards.cut[i + 1], 0.0);
  const double total = std::accumulate(load.begin(), load.end(), 0.0);
  return total > 0 ? *std::ranges::max_element(load) * shards.ranks / total : 1;
}

ShardPlan::ShardPlan(PlanPtr plan, Shards shards, int rank, Transport transport)
    : plan_(std::move(plan)), shards_(std::move(shards)), rank_(rank), transport_(transport) {
  check(plan_ != nullptr, "ShardPlan: no plan; make one with make_plan");
  require_positions(*plan_);
  const int ranks = shards_.ranks;
  check(rank >= 0 && rank < ranks, "ShardPlan: rank ", rank, " of ", ranks);
  check(shards_.cut.size() == shards_.owner.size() + 1 && shards_.cut.front() == 0 &&
            shards_.cut.back() == plan_->length() && std::ranges::is_sorted(shards_.cut) &&
            std::ranges::all_of(shards_.owner, [&](int r) { return r >= 0 && r < ranks; }),
        "ShardPlan: the shards do not cover the ", plan_->length(), " positions of the plan once, by ranks below ",
        ranks);
  length_ = shards_.rows(rank);
  const std::span<const PlanPart> parts = row_parts(*plan_);
  const auto rows_of = [&](int r) {
    List rows(at(plan_->length()), -1);
    for (std::int32_t row = 0; const std::int32_t p : shards_.positions(r)) rows[at(p)] = row++;
    return rows;
  };
  // The rows of one rank that some query of another attends to, in any head.
  const auto needs_of = [&](int asking, int owning) {
    std::vector<bool> needs(at(shards_.rows(owning)));
    const List q_row = rows_of(asking), k_row = rows_of(owning);
    for (const PlanPart& part : parts)
      for (const Tiling& t : part.tilings) mark_met(cut_down(t, q_row, k_row), needs);
    return needs;
  };
  const List q_row = rows_of(rank);
  const auto add_stage = [&](const std::vector<int>& to, const std::vector<int>& from) {
    Stage stage;
    List k_row(at(plan_->length()), -1);
    for (int peer : to) {
      const std::vector<bool> need = needs_of(peer, rank);
      Parcel parcel{peer, std::ranges::count(need, true), {}};
      for (std::size_t i = 0; i < need.size() && parcel.count < length_; ++i)
        if (need[i]) parcel.rows.push_back(narrow(i));
      if (parcel.count > 0) stage.send.push_back(std::move(parcel));
    }
    for (int peer : from) {
      const Index before = stage.keys;
      const std::vector<bool> need = peer == rank ? std::vector<bool>(at(length_), true) : needs_of(rank, peer);
      for (std::size_t row = 0; const std::int32_t p : shards_.positions(peer))
        if (need[row++]) k_row[at(p)] = narrow(stage.keys++);
      if (peer != rank && stage.keys > before) stage.receive.push_back({peer, stage.keys - before, {}});
    }
    if (stage.keys > 0 || !stage.send.empty() || from == std::vector{rank})
      for (const PlanPart& part : parts) {
        stage.parts.push_back({length_, length_, {}, part.places});
        for (const Tiling& t : part.tilings) stage.parts.back().tilings.push_back(cut_down(t, q_row, k_row));
      }
    stages_.push_back(std::move(stage));
  };
  add_stage({}, {rank});
  std::vector<int> to, from;
  for (int hop = 1; hop < ranks; ++hop) {
    to.push_back((rank + hop) % ranks), from.push_back((rank - hop + ranks) % ranks);
    if (transport == Transport::gather && hop + 1 < ranks) continue;
    add_stage(to, from);
    to.clear(), from.clear();
  }
}

Dealing parse_dealing(std::string_view text) { return static_cast<Dealing>(find_name("shards", text, kDealings)); }

ShardPlanPtr make_shard_plan(PlanSpec spec, int ranks, int rank, Transport transport, Dealing dealing,
                             const Pattern& dealt_by) {
  // Threads of one process keep one each.
  static Recent<std::tuple<PlanSpec, bool, int, int, Transport, Dealing, Pattern>, ShardPlanPtr> recent(32);
  spec.in_order = spec.documents.empty();
  const auto make = [&] {
    const PlanPtr plan = make_plan(spec);
    PlanSpec dealt = spec;
    if (!dealt_by.empty()) dealt.pattern = dealt_by;
    const PlanPtr by = make_plan(dealt);
    Shards shards = dealing == Dealing::contiguous ? contiguous_shards(*by, ranks)
                    : dealing == Dealing::balanced ? balanced_shards(*by, ranks)
                                                   : choose_shards(*by, ranks);
    return std::make_shared<const ShardPlan>(plan, std::move(shards), rank, transport);
  };
  return in_memory(spec.length, [&] {
    return recent.get({spec, row_order_forced(), ranks, rank, transport, dealing, dealt_by}, make);
  });
}

std::vector<std::int32_t> ShardPlan::tokens_of(int rank) const {
  List tokens = shards_.positions(rank);
  if (!plan_->spec().in_order) return tokens;
  for (std::int32_t& p : tokens) p = plan_->order().token_at[at(p)];
  return tokens;
}

ShardPlan::Bytes ShardPlan::bytes_sent(Index batch, Index kv_heads, Index dim, DType dtype) const {
  Bytes bytes;
  const std::size_t row = at(2 * batch * kv_heads * dim), stat = dtype == DType::f64 ? 8 : 4;  // of keys and values
  for (const Stage& s : stages_) {
    for (const Parcel& p : s.send) bytes.forward += at(p.count) * row * size_of(dtype);
    for (const Parcel& p : s.receive) bytes.backward += at(p.count) * row * stat;  // their gradients return
  }
  bytes.backward += bytes.forward;  // keys and values travel again
  return bytes;
}

}  // namespace hilt
