// Sets chosen by q and k: for queries' blocks the blocks of keys whose means are most alike.
#include <cmath>
#include "core/tape.h"
#include "ops/hilbert/attention.h"
#include "ops/ops.h"

namespace hilt {

/// The row of each position of a plan, those of a prefix aside.
static std::vector<std::int32_t> row_of_position(const Plan& plan) {
  const PlanSpec& spec = plan.spec();
  std::vector<std::int32_t> rows;
  // Positions are tokens where the order arranges work alone.
  if ((spec.order.scope == Order::Scope::order_only) != spec.in_order) rows = query_run(0, spec.length);
  else rows = spec.in_order ? plan.order().position_of : plan.order().token_at;
  rows.erase(rows.begin(), rows.begin() + spec.outside());
  return rows;
}

/// Means of x [1, L, H, D] over `size` positions and the heads of a key head: [Hk, blocks, D].
static Tensor block_means(const Tensor& x, const Tensor& rows, Index kv_heads, Index size) {
  const Tensor along = gather(to(x, DType::f64), 1, rows);
  const Index length = along.dim(1), whole = length / size * size;
  const auto means = [&](Index begin, Index end, Index each) {
    return mean(
        reshape(slice(along, 1, begin, end), {(end - begin) / each, each, kv_heads, x.dim(2) / kv_heads, x.dim(3)}),
        {1, 3});
  };
  std::vector<Tensor> parts;
  if (whole > 0) parts.push_back(means(0, whole, size));
  if (whole < length) parts.push_back(means(whole, length, length - whole));
  return permute(cat(parts, 0), {1, 0, 2});
}

/// For each key head of one sequence. Ties go to the smaller block; what is no number comes last.
static std::vector<BlockPairs> top_blocks(const Tensor& q, const Tensor& k, const Tensor& rows, Index size,
                                          Index most) {
  const Index kv_heads = k.dim(2), n = (rows.dim(0) + size - 1) / size;
  std::vector<BlockPairs> chosen(static_cast<std::size_t>(kv_heads));
  if (q.dim(0) == 0 || n == 0) return chosen;
  std::vector<double> score =
      matmul(block_means(q, rows, kv_heads, size), transpose(block_means(k, rows, kv_heads, size))).to_vector<double>();
  for (double& s : score) s = std::isnan(s) ? -std::numeric_limits<double>::infinity() : s;
  for (Index row = 0; row < kv_heads * n; ++row) {
    const double* const of = score.data() + row * n;
    std::vector<std::int32_t> best = query_run(0, n);
    const auto end = best.begin() + std::min(most, n);
    std::ranges::partial_sort(best, end, [&](auto a, auto b) { return of[a] > of[b] || (of[a] == of[b] && a < b); });
    for (auto block = best.begin(); block < end; ++block)
      chosen[static_cast<std::size_t>(row / n)].emplace_back(static_cast<std::int32_t>(row % n), *block);
  }
  return chosen;
}

PlanPtr plan_of_sequence(const PlanPtr& plan, const Tensor& q, const Tensor& k, Index sequence) {
  check(plan != nullptr, "attention: no plan; make one with make_plan");
  if (!plan->looks_at_data()) return plan;
  for (const Tensor* x : {&q, &k})
    check(x->rank() == 4 && x->dim(1) == plan->length(), "attention: q ", q.shape(), " and k ", k.shape(),
          " must be [batch, ", plan->length(), ", heads, dim]");
  const Tape::Pause pause;
  const auto own = [&](const Tensor& x) { return x.dim(0) == 0 ? x : slice(x, 0, sequence, sequence + 1); };
  const Tensor rows = moved(from_values(row_of_position(*plan), {plan->length() - plan->spec().outside()}), q.device());
  PlanSpec spec = plan->spec();
  for (Branch& b : spec.pattern)
    if (b.looks_at_data()) b.chosen = top_blocks(own(q), own(k), rows, b.size, b.numbers[0]);
  return std::make_shared<const Plan>(std::move(spec));  // not to be remembered: the next one is another
}

}  // namespace hilt
