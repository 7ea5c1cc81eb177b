// A tiling as groups of one size, stacked: a batch of dense blocks with a mask.
#include "ops/hilbert/modes/groups.h"
#include <ranges>
#include "core/recent.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/helpers.h"
#include "ops/hilbert/call.h"
#include "ops/kernels.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace hilt {
namespace {

using List = std::vector<std::int32_t>;
constexpr std::size_t kKept = 8;  // batches of plans on GPUs
constexpr Index kFewTokens = 64;  // the plan of so many keeps its own

bool counts_up(const std::vector<Index>& values, Index n) {
  return std::ranges::equal(values, std::views::iota(Index{0}, n));
}

// ---- which groups -------------------------------------------------------------------------------

/// Queries and keys, of the lists of a tiling, outside of which these queries attend to nothing.
struct DenseBlock {
  List queries, keys;
};
struct DenseBlocks {
  const Tiling* lists;
  std::vector<DenseBlock> blocks;
  GroupShape shape;  // a block with more queries or keys than a group has is several groups

  Index groups_of(const DenseBlock& p) const {
    return parts(std::ssize(p.queries), shape.q) * parts(std::ssize(p.keys), shape.k);
  }
  static Index parts(Index n, Index each) { return (n + each - 1) / each; }
};

List counting(Tiling::Range r) { return query_run(r.begin, r.end - r.begin); }

/// Whole groups, where the tiling has them and they are about as large as each other.
bool take_groups(const Tiling& t, DenseBlocks& out) {
  constexpr double kPadding = 1.3;
  Index pairs = 0;
  GroupShape s{std::ssize(t.group), 0, 0};
  for (const Tiling::Group& g : t.group) {
    const Index q = g.q.end - g.q.begin, k = g.k.end - g.k.begin;
    s.q = std::max(s.q, q), s.k = std::max(s.k, k), pairs += q * k;
  }
  if (t.group.empty() || static_cast<double>(s.pairs()) > kPadding * static_cast<double>(pairs)) return false;
  for (const Tiling::Group& g : t.group) out.blocks.push_back({counting(g.q), counting(g.k)});
  out.lists = &t, out.shape = s;
  return true;
}

/// The lists of tiles of queries, one for all that have the same, and the cheapest size of groups.
void take_lists(const Compact& t, DenseBlocks& out) {
  constexpr double kRowCost = 32;     // of a gathered row, in products of a query and a key
  constexpr double kChainCost = 1.3;  // of a softmax over several groups
  std::map<List, List> queries_of;
  List keys;
  for (std::size_t i = 0; i < t.q_tile.size(); ++i) {
    keys.clear();
    for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
      const List more = counting(t.k_tile[at(t.keys[at(e)].tile)]);
      keys.insert(keys.end(), more.begin(), more.end());
    }
    const List queries = counting(t.q_tile[i]);
    List& all = queries_of[keys];
    all.insert(all.end(), queries.begin(), queries.end());
  }
  queries_of.erase(List{});
  out.lists = &t;
  Index most_queries = 0, most_keys = 0;
  for (auto& [listed, queries] : queries_of) {
    most_queries = std::max(most_queries, std::ssize(queries));
    most_keys = std::max(most_keys, std::ssize(listed));
    out.blocks.push_back({std::move(queries), listed});
  }
  double least = std::numeric_limits<double>::infinity();
  GroupShape best;
  const auto each_size = [](Index most, auto&& f) {
    f(most);
    for (Index n = 16; n < most; n *= 2) f(n), f(std::min(n + n / 2, most));
  };
  each_size(most_queries, [&](Index q) {
    each_size(most_keys, [&](Index k) {
      out.shape = {0, q, k};
      for (const DenseBlock& p : out.blocks) out.shape.groups += out.groups_of(p);
      const double cost = static_cast<double>(out.shape.groups) *
                          (static_cast<double>(q * k) + kRowCost * static_cast<double>(q + 2 * k)) *
                          (k < most_keys ? kChainCost : 1);
      if (cost < least) least = cost, best = out.shape;
    });
  });
  out.shape = best;
}

DenseBlocks blocks_of(const Tiling& t) {
  DenseBlocks out;
  if (!take_groups(t, out)) take_lists(compact(t), out);
  return out;
}

// ---- the groups of a batch ----------------------------------------------------------------------

/// A group: parts of the lists of a block, at one place.
struct PlacedGroup {
  Tiling::Place place;
  std::span<const std::int32_t> queries, keys;
  Index chain, number;  // which of the chains of several groups, -1 where alone, and its place there
};
std::vector<PlacedGroup> groups_at(const DenseBlocks& p, Tiling::Place place, Chains& chains) {
  std::vector<PlacedGroup> out;
  for (const DenseBlock& block : p.blocks)
    for (std::size_t q = 0; q < block.queries.size(); q += at(p.shape.q)) {
      const Index several = DenseBlocks::parts(std::ssize(block.keys), p.shape.k);
      for (Index number = 0; number < several; ++number) {
        const std::span all(block.queries), keys(block.keys);
        const std::size_t k = at(number * p.shape.k);
        out.push_back({place, all.subspan(q, std::min(at(p.shape.q), all.size() - q)),
                       keys.subspan(k, std::min(at(p.shape.k), keys.size() - k)), several > 1 ? chains.n : -1, number});
      }
      chains.longest = std::max(chains.longest, several);
      chains.n += several > 1;
    }
  return out;
}

void link(const std::vector<PlacedGroup>& parts, Chains& chains) {
  const auto groups = std::ssize(parts);
  std::vector<Index> members(at(chains.n * chains.longest), groups), home;
  for (Index g = 0; g < groups; ++g) {
    const PlacedGroup& p = parts[at(g)];
    home.push_back(p.chain < 0 ? g : groups + p.chain);
    if (p.chain >= 0) members[at(p.chain * chains.longest + p.number)] = g;
  }
  chains.members = index_of(members), chains.home = index_of(home);
}

/// Which pairs of the groups attend: outside of the lists, which pads, none.
void fill_masks(const Tiling& t, const std::vector<PlacedGroup>& parts, GroupBatch& b) {
  b.mask = zeros({b.groups, b.q, b.k}, DType::u8);
  Tensor& all = b.queries.present;
  all = zeros({b.groups, b.q, 1}, DType::u8), b.answers = zeros(all.shape(), DType::u8);
  std::uint8_t *const mask = b.mask.mutable_data<std::uint8_t>(), *const present = all.mutable_data<std::uint8_t>(),
                      *const answers = b.answers.mutable_data<std::uint8_t>();
  const auto each_query = [&](auto&& f) {
    for (Index g = 0; g < b.groups; ++g)
      for (Index i = 0; i < std::ssize(parts[at(g)].queries); ++i)
        f(parts[at(g)], i, g * b.q + i, (g - parts[at(g)].number) * b.q + i);
  };
  each_query([&](const PlacedGroup& p, Index i, Index row, Index first_row) {
    const QueryBounds bounds = bounds_of(t, at(p.queries[at(i)]));
    for (std::size_t j = 0; j < p.keys.size(); ++j) {
      const bool attended =
          t.boxes == 1 ? attends(bounds, place_of(t, at(p.keys[j]))) : attends(t, at(p.queries[at(i)]), at(p.keys[j]));
      mask[row * b.k + static_cast<Index>(j)] = attended, answers[first_row] |= attended;
    }
  });
  each_query([&](const PlacedGroup&, Index, Index row, Index first_row) { present[row] = answers[first_row]; });
  if (std::find(present, present + b.groups * b.q, 0) != present + b.groups * b.q) return;
  all = {};
  if (b.chains.n == 0) b.answers = {};
}

GroupBatch batch_of(const Plan& plan, const PlanPart& part, const Tiling& tiling, const std::vector<Index>& heads,
                    Index kv_heads) {
  const DenseBlocks blocks = blocks_of(tiling);
  const Tiling& t = *blocks.lists;
  GroupBatch b{blocks.shape, heads};
  std::vector<PlacedGroup> parts;
  for (Index place = 0; place < part.places.count(1); ++place)
    std::ranges::move(groups_at(blocks, part.places.at(place), b.chains), std::back_inserter(parts));
  b.groups = std::ssize(parts), b.grids = tiling.grids;
  const auto documents = std::ssize(plan.spec().documents);
  const Index own_rows = documents > 1 ? documents : 0;  // where each row of the batch has documents of its own
  const auto rows_of = [&](bool keys, Index n, Index all, Index all_heads, List& name) {
    const TokenList &tokens = keys ? t.k_token : t.q_token, &names = keys ? t.k_names() : t.q_names();
    std::vector<Index> index;
    for (const PlacedGroup& p : parts) {
      const std::span<const std::int32_t> entries = keys ? p.keys : p.queries;
      const Index first = (own_rows > 0 ? p.place.row * all : 0) + (keys ? p.place.k : p.place.q);
      for (Index i = 0; i < n; ++i) {
        const std::size_t entry = at(entries[i < std::ssize(entries) ? at(i) : 0]);
        index.push_back(first + tokens[entry]), name.push_back(p.place.k + names[entry]);
      }
    }
    const bool in_place = counts_up(index, std::max<Index>(own_rows, 1) * all);
    return GroupRows{index_of(index), {}, {}, b.groups, n, all, all_heads, own_rows, in_place};
  };
  b.queries = rows_of(false, b.q, plan.queries(), plan.heads(), b.q_name);
  b.keys = rows_of(true, b.k, plan.length(), kv_heads, b.k_name);
  for (const PlacedGroup& p : parts) {
    if (own_rows > 0) b.row.push_back(p.place.row);
    b.first.push_back(p.place.k);
  }
  std::vector<Index> k_heads;
  for (Index h : heads) k_heads.push_back(h / (plan.heads() / kv_heads));
  if (!counts_up(heads, plan.heads())) b.queries.heads = index_of(heads);
  if (!counts_up(k_heads, kv_heads)) b.keys.heads = index_of(k_heads);
  if (blocks.shape.pairs() > tiling.pairs || b.chains.n > 0) fill_masks(t, parts, b);
  if (b.chains.n > 0) link(parts, b.chains);
  return b;
}

std::vector<GroupBatch> made_batches(const Plan& plan, Index kv_heads, Index branch, Device device) {
  std::vector<GroupBatch> out;
  for (const auto& [index, users_of] : users(plan, branch))
    for (const PlanPart& part : plan.parts()) {
      const Tiling& t = part.tilings[at(index)];
      if (t.pairs > 0) out.push_back(batch_of(plan, part, t, {users_of.begin(), users_of.end()}, kv_heads));
    }
  for (GroupBatch& b : out)
    for (Tensor* x : {&b.queries.index, &b.keys.index, &b.queries.heads, &b.keys.heads, &b.mask, &b.queries.present,
                      &b.answers, &b.chains.members, &b.chains.home})
      if (*x) *x = moved(*x, device);
  return out;
}

// ---- rows in and out ----------------------------------------------------------------------------

/// [B, L, H, D] -> [B, heads, groups, n, D]
Tensor gathered(const Tensor& x, const GroupRows& p) {
  Tensor y = p.rows > 0 ? reshape(x, {1, x.dim(0) * x.dim(1), x.dim(2), x.dim(3)}) : x;
  if (!p.in_place) y = gather(y, 1, p.index);
  if (p.heads) y = gather(y, 2, p.heads);
  return permute(reshape(y, {y.dim(0), p.groups, p.n, y.dim(2), y.dim(3)}), {0, 3, 1, 2, 4});
}
Tensor scattered(const Tensor& x, const GroupRows& p) {
  Tensor y = reshape(permute(x, {0, 2, 3, 1, 4}), {x.dim(0), p.groups * p.n, x.dim(1), x.dim(4)});
  if (p.heads) y = scatter_add(y, 2, p.heads, p.all_heads);
  if (!p.in_place) y = scatter_add(y, 1, p.index, std::max<Index>(p.rows, 1) * p.length);
  return p.rows > 0 ? reshape(y, {p.rows, p.length, y.dim(2), y.dim(3)}) : y;
}

// ---- softmax ------------------------------------------------------------------------------------

/// What a softmax knows of its groups.
struct SoftmaxRows {
  Tensor mask, answers;
  Chains chains;
  bool may_mask;  // a row may have no score but -inf

  Tensor masked(const Tensor& scores) const { return mask ? where(mask, scores, kMinusInfinity) : scores; }
  /// x [B, heads, groups, q, 1]: for each part of a row, f of all its parts; f ignores `neutral`.
  template <class F> Tensor whole(const Tensor& x, double neutral, F&& f) const {
    if (chains.n == 0) return x;
    const Tensor none = full(x.shape().with(2, 1), neutral, x.dtype(), x.device()),
                 parts = gather(cat({x, none}, 2), 2, chains.members);
    const Tensor each = f(reshape(parts, {x.dim(0), x.dim(1), chains.n, chains.longest, x.dim(3)}), 3);
    return gather(cat({x, unsqueeze(each, -1)}, 2), 2, chains.home);
  }
  Tensor sums(const Tensor& x) const {
    return whole(sum(x, {-1}, true), 0, [](const Tensor& parts, int axis) { return sum(parts, {axis}); });
  }
  /// The largest score of a row, 0 where it has none.
  Tensor largest(const Tensor& masked) const {
    const Tensor m = whole(max(masked, {-1}, true), kMinusInfinity,
                           [](const Tensor& parts, int axis) { return max(parts, {axis}); });
    return where(greater(m, scalar_like(m, kMinusInfinity)), m, 0.0);
  }
};

struct GroupSoftmax final : Function {
  SoftmaxRows rows;
  explicit GroupSoftmax(SoftmaxRows its) : rows(std::move(its)) {}
  std::string_view name() const override { return "softmax"; }
  Tensor forward(const Tensor& scores) {
    const Tensor p = weights(rows.masked(scores));
    if (wants(0)) save(p);
    return p;
  }
  Tensor weights(const Tensor& s) const {
    if (!rows.answers && !rows.may_mask) return softmax(s);
    const Tensor e = exp(sub(s, rows.largest(s))), all = rows.sums(e);
    return div(e, where(greater(all, scalar_like(all, 0)), all, 1.0));
  }
  std::vector<Tensor> backward(const Tensor& dp) override {
    const Tensor &p = saved(0), d = dense(dp);
    if (rows.chains.n > 0) return {mul(p, sub(d, rows.sums(mul(p, d))))};
    Tensor ds = empty_like(p);
    visit("softmax", p, [&]<class T>(auto where) {
      const kernels::RowOp<T> rows_of_p{p.numel() / p.dim(-1), p.dim(-1)};
      kernels::along_rows(where, "softmax",
                          kernels::SoftmaxBackward<T>{{rows_of_p, p.data<T>(), d.data<T>(), ds.mutable_data<T>()}});
    });
    return {ds};
  }
};

/// The log-sum-exp of a row keeps the scores: it rounds, so weights are formed again.
struct GroupLogSumExp final : Function {
  SoftmaxRows rows;
  explicit GroupLogSumExp(SoftmaxRows its) : rows(std::move(its)) {}
  std::string_view name() const override { return "logsumexp"; }
  Tensor forward(const Tensor& scores) {
    const Tensor s = rows.masked(scores), m = rows.largest(s), l = add(m, log(rows.sums(exp(sub(s, m)))));
    if (wants(0)) save(s), save(l);
    return rows.answers ? where(rows.answers, l, 0.0) : l;
  }
  std::vector<Tensor> backward(const Tensor& dl) override {
    const Tensor &s = saved(0), &l = saved(1);
    Tensor p = exp(sub(s, l));  // NaN in rows without keys
    if (rows.may_mask) p = where(equal(s, kMinusInfinity), 0.0, p);
    return {rows.mask ? where(rows.mask, mul(p, dl), 0.0) : mul(p, dl)};
  }
};

}  // namespace

std::shared_ptr<const std::vector<GroupBatch>> group_batches(const PlanPtr& plan, Index kv_heads, Index branch,
                                                             Device device) {
  const auto make = [&] {
    return std::make_shared<const std::vector<GroupBatch>>(made_batches(*plan, kv_heads, branch, device));
  };
  if (device.is_cpu() && plan->length() > kFewTokens) return make();
  if (device.is_cpu()) return plan->memo().get<decltype(make())>({narrow(kv_heads), narrow(branch)}, make);
  static auto& recent =  // outlives every device
      *new Recent<std::tuple<PlanPtr, Index, Index, Device>, decltype(make())>(kKept);
  return recent.get({plan, kv_heads, branch, device}, make);
}

GroupShape group_shape(const Tiling& t) { return t.pairs > 0 ? blocks_of(t).shape : GroupShape{}; }

// Each the other's backward, like gather and scatter_add, which they are made of.
Tensor gather_rows(const Tensor& x, const GroupRows& picks) {
  return apply_linear(
      "gather", x, [=](const Tensor& in) { return gathered(in, picks); },
      [=](const Tensor& dy) { return scattered(dy, picks); });
}
Tensor scatter_rows(const Tensor& x, const GroupRows& picks) {
  return apply_linear(
      "scatter_add", x, [=](const Tensor& in) { return scattered(in, picks); },
      [=](const Tensor& dy) {
        const Tensor dx = gathered(dy, picks);
        return picks.present ? where(picks.present, dx, 0.0) : dx;
      });
}
Tensor softmax(const Tensor& scores, const GroupBatch& g, bool may_mask) {
  return apply(GroupSoftmax({g.mask, g.answers, g.chains, may_mask}), scores);
}
Tensor logsumexp(const Tensor& scores, const GroupBatch& g, bool may_mask) {
  return apply(GroupLogSumExp({g.mask, g.answers, g.chains, may_mask}), scores);
}

Tensor dropout_multipliers(const GroupBatch& g, Index batch, Index all_heads, const AttentionOptions& options,
                           DType dtype) {
  const std::uint32_t rate = drop_rate(options.dropout);
  const RandomKey key = options.key.value_or(RandomKey{});
  const auto n_heads = std::ssize(g.heads);
  const Tensor kept = of_pairs(g, batch * n_heads, [&](std::int32_t query, std::size_t group, Index row) {
    const Index of_batch = options.first_batch + (g.row.empty() ? row / n_heads : g.row[group]);
    const Index head = of_batch * all_heads + g.heads[at(row % n_heads)];
    return [key, rate, head = static_cast<std::uint32_t>(head), t = static_cast<std::uint32_t>(query)](auto u) {
      return kernels::attention_keeps(key, head, t, static_cast<std::uint32_t>(u), rate);
    };
  });
  return mul(to(reshape(kept, {batch, n_heads, g.groups, g.q, g.k}), dtype), keep_scale(rate));
}

}  // namespace hilt
