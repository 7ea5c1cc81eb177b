// Groups of a plan that have one size, stacked: rows are gathered into a batch of dense blocks with
// a mask, and results are scattered back.
#include "ops/hilbert/groups.h"
#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include "core/parallel.h"
#include "ops/hilbert/plan/attends.h"
#include "ops/hilbert/call.h"
#include "ops/ops.h"

namespace hilt {
namespace {

constexpr std::size_t kKept = 8;  // batches of plans on GPUs

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

Tensor index_of(const std::vector<Index>& values) { return from_values(values, {static_cast<Index>(values.size())}); }

bool counts_up(const std::vector<Index>& values, Index n) {
  if (static_cast<Index>(values.size()) != n) return false;
  for (Index i = 0; i < n; ++i)
    if (values[at(i)] != i) return false;
  return true;
}

/// Which tile of a list an entry of q_token or k_token is in.
std::vector<std::int32_t> tile_of(const std::vector<Tiling::Range>& tiles) {
  std::vector<std::int32_t> out;
  for (std::size_t i = 0; i < tiles.size(); ++i)
    out.insert(out.end(), static_cast<std::size_t>(tiles[i].end - tiles[i].begin), static_cast<std::int32_t>(i));
  return out;
}

/// mask [q, k] of one group, from its listed tiles and attends(); returns whether every pair
/// attends.
bool fill_mask(const Tiling& t, const Tiling::Group& g, const std::vector<std::int32_t>& q_tile, std::uint8_t* mask) {
  const Index k = g.k.end - g.k.begin;
  bool all = true;
  for (auto i = g.q.begin; i < g.q.end; ++i) {
    std::uint8_t* const row = mask + Index{i - g.q.begin} * k;
    std::fill_n(row, k, std::uint8_t{0});
    const auto tile = static_cast<std::size_t>(q_tile[static_cast<std::size_t>(i)]);
    for (auto e = t.keys_begin[tile]; e < t.keys_begin[tile + 1]; ++e) {
      const Tiling::Ref ref = t.keys[static_cast<std::size_t>(e)];
      const Tiling::Range keys = t.k_tile[static_cast<std::size_t>(ref.tile)];
      for (auto j = keys.begin; j < keys.end; ++j)
        row[j - g.k.begin] = !ref.partial || attends(t, static_cast<std::size_t>(i), static_cast<std::size_t>(j));
    }
    all = all && std::all_of(row, row + k, [](std::uint8_t m) { return m != 0; });
  }
  return all;
}

GroupBatch batch_of(const Tiling& t, const std::vector<Tiling::Group>& groups, const std::vector<std::int32_t>& q_tile,
                    const Plan& plan, const std::vector<Index>& heads, Index kv_heads) {
  GroupBatch b;
  b.groups = static_cast<Index>(groups.size());
  b.q = groups[0].q.end - groups[0].q.begin;
  b.k = groups[0].k.end - groups[0].k.begin;
  b.heads = heads;
  std::vector<Index> q, k, k_heads;
  for (const Tiling::Group& g : groups) {
    q.insert(q.end(), t.q_token.begin() + g.q.begin, t.q_token.begin() + g.q.end);
    k.insert(k.end(), t.k_token.begin() + g.k.begin, t.k_token.begin() + g.k.end);
    b.q_name.insert(b.q_name.end(), t.q_names().begin() + g.q.begin, t.q_names().begin() + g.q.end);
    b.k_name.insert(b.k_name.end(), t.k_names().begin() + g.k.begin, t.k_names().begin() + g.k.end);
  }
  b.q_index = index_of(q), b.q_in_place = counts_up(q, plan.length());
  b.k_index = index_of(k), b.k_in_place = counts_up(k, plan.length());
  for (Index h : heads) k_heads.push_back(h / (plan.heads() / kv_heads));
  if (!counts_up(heads, plan.heads())) b.q_heads = index_of(heads);
  if (!counts_up(k_heads, kv_heads)) b.k_heads = index_of(k_heads);

  Tensor mask = empty({b.groups, b.q, b.k}, DType::u8);
  std::uint8_t* const bits = mask.mutable_data<std::uint8_t>();
  bool all = true;
  for (Index g = 0; g < b.groups; ++g) all = fill_mask(t, groups[at(g)], q_tile, bits + g * b.q * b.k) && all;
  if (all) return b;
  b.mask = b.softmax_mask = mask;
  Tensor none = empty({b.groups, b.q, 1}, DType::u8);
  std::uint8_t* const flag = none.mutable_data<std::uint8_t>();
  bool any_empty = false;
  for (Index row = 0; row < b.groups * b.q; ++row) {
    flag[row] = std::none_of(bits + row * b.k, bits + (row + 1) * b.k, [](std::uint8_t m) { return m != 0; });
    any_empty = any_empty || flag[row];
  }
  if (!any_empty) return b;
  b.empty = none;
  b.softmax_mask = clone(mask);
  std::uint8_t* const open = b.softmax_mask.mutable_data<std::uint8_t>();
  for (Index row = 0; row < b.groups * b.q; ++row)
    if (flag[row]) std::fill_n(open + row * b.k, b.k, std::uint8_t{1});
  return b;
}

/// [B, L, H, D] -> [B, heads, groups, n, D]
Tensor gathered(const Tensor& x, const Tensor& index, bool in_place, const Tensor& heads, Index groups, Index n) {
  Tensor y = in_place ? x : gather(x, 1, index);
  if (heads) y = gather(y, 2, heads);
  return permute(reshape(y, {y.dim(0), groups, n, y.dim(2), y.dim(3)}), {0, 3, 1, 2, 4});
}
Tensor scattered(const Tensor& x, const Tensor& index, bool in_place, const Tensor& heads, Index groups, Index n,
                 Index length, Index all_heads) {
  Tensor y = reshape(permute(x, {0, 2, 3, 1, 4}), {x.dim(0), groups * n, x.dim(1), x.dim(4)});
  if (heads) y = scatter_add(y, 2, heads, all_heads);
  return in_place ? y : scatter_add(y, 1, index, length);
}

std::vector<TilingBatches> made_batches(const Plan& plan, Index kv_heads, Index branch, Device device) {
  std::vector<TilingBatches> out;
  for (const auto& [index, users_of] : users(plan, branch)) {
    const std::vector<Index> heads(users_of.begin(), users_of.end());
    const Tiling& t = plan.tilings()[static_cast<std::size_t>(index)];
    const std::vector<std::int32_t> q_tile = tile_of(t.q_tile);
    std::map<std::pair<Index, Index>, std::vector<Tiling::Group>> by_size;
    Index queries = 0;
    for (const Tiling::Group& g : t.group) {
      by_size[{g.q.end - g.q.begin, g.k.end - g.k.begin}].push_back(g);
      queries += g.q.end - g.q.begin;
    }
    TilingBatches batches{index, heads, queries == plan.length(), {}};
    for (const auto& [size, groups] : by_size)
      batches.batches.push_back(batch_of(t, groups, q_tile, plan, heads, kv_heads));
    for (const GroupBatch& b : batches.batches) batches.covers = batches.covers && !b.empty;
    for (GroupBatch& b : batches.batches)
      for (Tensor* x : {&b.q_index, &b.k_index, &b.q_heads, &b.k_heads, &b.mask, &b.empty, &b.softmax_mask})
        if (*x) *x = moved(*x, device);
    out.push_back(std::move(batches));
  }
  return out;
}

}  // namespace

std::shared_ptr<const std::vector<TilingBatches>> group_batches(const PlanPtr& plan, Index kv_heads, Index branch,
                                                                Device device) {
  const auto make = [&] {
    return std::make_shared<const std::vector<TilingBatches>>(made_batches(*plan, kv_heads, branch, device));
  };
  if (device.is_cpu()) return make();
  struct Kept {
    std::weak_ptr<const Plan> plan;
    Index kv_heads, branch;
    Device device;
    std::shared_ptr<const std::vector<TilingBatches>> batches;
  };
  static std::mutex mutex;
  static std::list<Kept>& recent = *new std::list<Kept>;  // outlives every device
  const std::lock_guard lock(mutex);
  recent.remove_if([](const Kept& k) { return k.plan.expired(); });
  for (const Kept& k : recent)
    if (k.plan.lock() == plan && k.kv_heads == kv_heads && k.branch == branch && k.device == device) return k.batches;
  recent.push_front({plan, kv_heads, branch, device, make()});
  if (recent.size() > kKept) recent.pop_back();
  return recent.front().batches;
}

Tensor gather_queries(const Tensor& x, const GroupBatch& g) {
  return gathered(x, g.q_index, g.q_in_place, g.q_heads, g.groups, g.q);
}
Tensor gather_keys(const Tensor& x, const GroupBatch& g) {
  return gathered(x, g.k_index, g.k_in_place, g.k_heads, g.groups, g.k);
}
Tensor scatter_queries(const Tensor& x, const GroupBatch& g, Index length, Index heads) {
  return scattered(x, g.q_index, g.q_in_place, g.q_heads, g.groups, g.q, length, heads);
}
Tensor scatter_keys(const Tensor& x, const GroupBatch& g, Index length, Index heads) {
  return scattered(x, g.k_index, g.k_in_place, g.k_heads, g.groups, g.k, length, heads);
}

Tensor dropout_multipliers(const GroupBatch& g, Index batch, Index all_heads, const AttentionOptions& options,
                           DType dtype) {
  const std::uint32_t rate = drop_rate(options.dropout);
  const RandomKey key = options.key.value_or(RandomKey{});
  const auto n_heads = static_cast<Index>(g.heads.size());
  Tensor m = empty({batch, n_heads, g.groups, g.q, g.k}, DType::f64);
  double* const out = m.mutable_data<double>();
  parallel_for(batch * n_heads * g.groups * g.q, 64, [&](Index begin, Index end) {
    for (Index row = begin; row < end; ++row) {
      const Index group = row / g.q % g.groups, bh = row / g.q / g.groups;
      const Index head = (options.first_batch + bh / n_heads) * all_heads + g.heads[at(bh % n_heads)];
      for (Index j = 0; j < g.k; ++j)
        out[row * g.k + j] = kernels::attention_keeps(key, static_cast<std::uint32_t>(head),
                                                      static_cast<std::uint32_t>(g.q_name[at(group * g.q + row % g.q)]),
                                                      static_cast<std::uint32_t>(g.k_name[at(group * g.k + j)]), rate)
                                 ? keep_scale(rate)
                                 : 0;
    }
  });
  return moved(to(m, dtype), g.q_index.device());
}

}  // namespace hilt
