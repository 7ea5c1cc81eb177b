// Bytes that each mode keeps and needs at its peak, counted off its code; S is B x heads x q x k.
#include "ops/hilbert/call.h"
#include "ops/hilbert/kernels/compact.h"
#include "ops/hilbert/plan/tiles.h"

namespace hilt {

KernelWork kernel_work(const Tiling& t, Device device, bool scored) {
  KernelWork work;
  const auto count = [](Tiling::Range r) { return Index{r.end - r.begin}; };
  if (!device.is_cpu()) {
    for (std::size_t i = 0; i < t.q_tile.size(); ++i)
      work.keys += t.keys_of(i), work.pairs += t.keys_of(i) * count(t.q_tile[i]);
    return work;
  }
  const Compact& lists = compact(t, !scored);
  for (std::size_t i = 0; i < lists.q_tile.size(); ++i)
    for (auto e = lists.keys_begin[i]; e < lists.keys_begin[i + 1]; ++e) {
      const std::int32_t tile = lists.keys[at(e)].tile;
      const Index queries = count(lists.q_tile[i]), keys = count(lists.k_tile[at(tile)]);
      const std::uint8_t* list = lists.pairs_of(tile);
      work.keys += keys;
      if (!list) work.pairs += queries * keys;
      for (Index row = 0; list && row < queries; ++row, list += 1 + *list) work.pairs += *list;
    }
  return work;
}

static double real(Index n) { return static_cast<double>(n); }
/// Bytes of Hopper's kernels: sums of dQ in one pass; masks that a pass makes, and parts of owners.
static std::array<Index, 2> sums_on_gpu(const Plan& plan, Index batch, Index kv_heads, Index dim, bool ranked) {
  Index one_pass = 0, of_parts = 0;
  for (const auto& [index, users_of] : users(plan, -1))
    for (const PlanPart& part : row_parts(plan)) {
      const Tiling &own = part.tilings[at(index)], &t = ranked ? kernels::with_ranks_of_call(own) : own;
      const Index n = part.places.count(batch);
      const auto [bytes, q, k, masks] = kernels::hopper_sums(t, dim);
      one_pass += n * std::ssize(users_of) * bytes;
      of_parts = std::max({of_parts, masks + 4 * n * plan.heads() * (q > 1) * q * std::ssize(t.q_token) * (dim + 1),
                           masks + 8 * n * kv_heads * (k > 1) * k * std::ssize(t.k_token) * dim});
    }
  return {one_pass, of_parts};
}

/// The same where the plan has its order; ranked: or where a GPU's call brings one, and ranks.
static AttentionMemory memory_along(const Plan& plan, Index batch, Index kv_heads, Index dim, DType dtype,
                                    const AttentionOptions& options, Device where, bool ranked) {
  Call call{PlanPtr(PlanPtr(), &plan), options, 1, batch, plan.queries(), kv_heads, dim};
  Device device;
  for (const Tensor& x : term_inputs(options.terms))
    if (x) device = x.device();
  resolve_terms(call, empty({0}, dtype, device));
  const auto element = static_cast<double>(size_of(dtype));
  const double stat = dtype == DType::f64 ? 8.0 : 4.0;
  const double row = real(batch * plan.queries()) * real(plan.heads()), q = row * real(dim),
               kv = 2 * real(batch * plan.length() * kv_heads * dim);
  const bool narrow = size_of(dtype) == 2, capped = bool(options.terms.softcap), sink = bool(options.terms.sink);
  double sums = 0;  // of the terms' gradients; a bias's may be added up once more
  const TermTensors tensors = term_inputs(call.options.terms);
  for (std::size_t i = 0; i < kTermTensors; ++i)
    if (const Shape sum = tensors[i] ? term_sum_shape(call, i) : Shape{0}; sum.numel() > 0)
      sums += real(sum.numel()) * stat * (sum == tensors[i].shape() ? 1 : 2);
  const auto bytes = [](double saved, double peak) {
    return AttentionMemory{static_cast<std::size_t>(saved), static_cast<std::size_t>(peak)};
  };
  const double kept = q * element + row * stat;  // o and lse
  if (options.backward == Backward::fused) {
    double peak =
        kept + row * stat + (q + kv) * stat + sums + std::max(narrow ? q * element : 0, sink ? 4 * row * stat : 0);
    if (!where.is_cuda() || !narrow) return bytes(kept, peak);
    const auto [one_pass, of_parts] = sums_on_gpu(plan, batch, kv_heads, dim, ranked);
    peak += real(of_parts);
    if (dim <= 128 && !ranked && branch_count(plan) == 1)  // at most: few plans take that route
      peak = std::max(peak, kept + row * stat + (q + kv) * element + real(one_pass));
    return bytes(kept, peak);
  }
  double scores = 0, largest = 0, gathered = 0, gathered_most = 0, masks = 0, indices = 0;
  for (const auto& [index, users_of] : users(plan, -1)) {
    for (const PlanPart& part : plan.parts()) {
      const Tiling& t = part.tilings[at(index)];
      const GroupShape g = group_shape(t);
      const double pairs = real(g.pairs()), places = real(part.places.count(1)),
                   sets = real(part.places.count(batch)) * real(std::ssize(users_of));
      scores += pairs * sets * stat;
      largest = std::max(largest, pairs * sets * stat);
      indices += places * pairs * 4 * (bool(tensors[0]) + bool(tensors[1]) + bool(tensors[2]));  // in tables
      masks += places * ((g.pairs() > t.pairs ? pairs : 0) + real(8 * g.groups * (g.q + g.k)));
      const bool in_place = !narrow && kv_heads == plan.heads() && part.places.are_rows() &&
                            g.groups * g.q == plan.queries() && g.groups * g.k == plan.length() &&
                            t.q_token.counts_up() && t.q_token.size() > 0 && t.q_token[0] == 0;
      if (in_place) continue;
      const double copies = sets * real(g.groups * (g.q + 2 * g.k) * dim) * stat;
      gathered += copies;
      gathered_most = std::max(gathered_most, copies);
    }
  }
  if (options.backward == Backward::hybrid) {
    const double by_terms = capped ? 3 : tensors[0] || tensors[1] ? 2.5 : tensors[2] ? 1 : 0;
    return bytes(kept, kept + (4 + by_terms) * largest + masks + indices + sums + 2 * gathered_most + (q + kv) * stat +
                           q * stat + (narrow ? (3 * q + kv) * stat : 0));
  }
  const double branches = real(branch_count(plan));
  // logsumexp keeps S; the merge keeps each part
  const double merge = branches > 1 || sink ? scores + branches * q * stat : 0;
  const double kept_by_terms = capped * scores + indices;
  return bytes(scores + gathered + masks + merge + kept_by_terms,
               scores + (2 + sink) * largest + gathered + masks + merge + q * stat + kept_by_terms + sums);
}

AttentionMemory attention_memory(const Plan& plan, Index batch, Index kv_heads, Index dim, DType dtype, Backward mode,
                                 const ScoreTerms& terms, Device where) {
  const AttentionOptions options{.backward = mode, .terms = terms};
  const auto takes = where.is_cpu() ? TakesOrder::no : order_taken(plan, options, where);
  const Plan& own = takes == TakesOrder::followed ? followed_plan(plan) : plan;
  const AttentionMemory m = memory_along(own, batch, kv_heads, dim, dtype, options, where, &own != &plan);
  const std::size_t order = 4 * at(batch * plan.length());  // which is kept; a pass has lists along it
  if (takes == TakesOrder::followed) return {m.saved + order, m.peak + order + 40 * at(plan.length())};
  if (takes != TakesOrder::gathered) return m;
  // q, k and v along the order, which are kept; o and its gradient in both orders.
  const std::size_t row = at(batch * dim) * size_of(dtype), q = row * at(plan.length() * plan.heads()),
                    kept = q + 2 * row * at(plan.length() * kv_heads) + 16 * at(plan.length());
  return {m.saved + kept, m.peak + kept + 2 * q};
}

}  // namespace hilt
