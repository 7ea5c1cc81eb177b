// What a block with T tokens, width C and hidden width H keeps for backward, in numbers:
//
//      T C   each: the residual stream twice (for the norms), both norms' results, q, k, v, attention's output
//      T H   twice: before and after the activation
//      and what the attention mode keeps: lse, or weights (attention_memory). Dropout keeps nothing
#include "run.h"

namespace train {
using program::saturated_product, program::saturated_sum;

/// Numbers of the score terms, f32 beside any weights.
static Index count_terms(const hilt::TransformerConfig& c) {
  const hilt::TermConfig& t = c.terms;
  hilt::Shape all{c.layers * c.heads, t.sink + (t.alibi == hilt::TermConfig::Alibi::learned)},
      table{c.layers * c.heads}, bias{c.layers};
  for (const Index n : t.relative) table.push_back(n);
  for (const Index n : t.bias) bias.push_back(n == 0 ? c.context : n);
  return all.numel() + (t.relative.rank() > 0 ? table.numel() : 0) + (t.bias.rank() > 0 ? bias.numel() : 0);
}

Index count_parameters(const hilt::TransformerConfig& c) {
  const Index bias = c.bias, hidden = c.hidden_width(),
              up = hidden * (c.activation == hilt::Activation::silu_gated ? 2 : 1);
  const Index norm = c.width * (1 + (bias && c.norm == hilt::NormKind::layer));
  const Index keys = hilt::attention_config(c).keys() * hilt::attention_config(c).dim();
  const Index qkv = c.width + 2 * keys;
  const Index block = 2 * norm + c.width * qkv + c.width * c.width + c.width * up + hidden * c.width +
                      bias * (qkv + c.width + up + c.width);
  return c.vocab * c.width + (c.positions == hilt::Positions::learned ? c.context * c.width : 0) + c.layers * block +
         norm + (c.tie_weights ? 0 : c.width * c.outputs()) + count_terms(c);
}

std::size_t MemoryPlan::total() const { return saturated_sum({parameters, gradients, moments, activations, working}); }

MemoryPlan plan_memory(const Settings& s, const hilt::TransformerConfig& c, hilt::Device device, std::size_t most) {
  const hilt::DType dtype = program::dtype_of(s.dtype);
  const auto size = static_cast<Index>(hilt::size_of(dtype)), terms = count_terms(c),
             count = count_parameters(c) - terms;
  MemoryPlan m;
  m.parameters = saturated_sum({saturated_product({count, size}), saturated_product({terms, sizeof(float)})});
  m.gradients = saturated_product({static_cast<Index>(m.parameters), s.accumulate > 1 ? 2 : 1});
  m.moments = saturated_sum({saturated_product({count, sizeof(float), size == 2 ? 3 : 2}),  // 16 bits: and a master
                             saturated_product({terms, sizeof(float), 2})});
  const std::vector<hilt::AttentionConfig> kinds = hilt::attention_configs(c);
  for (const hilt::AttentionConfig& a : kinds)
    m.plan = saturated_sum({m.plan, program::least_plan_bytes(c.context, a.pattern)});

  const std::size_t wide = saturated_product({s.batch, c.context, c.width, size});
  const std::size_t hidden = saturated_product({s.batch, c.context, c.hidden_width(), size});
  const std::size_t logits = saturated_product({s.batch, c.image ? 1 : c.context, c.outputs(), size});
  const std::size_t statistics = saturated_product({s.batch, c.context, 4, sizeof(float)});  // of two norms
  const std::size_t ids =
      saturated_product({s.batch, s.accumulate, c.context, c.image ? c.vocab : 2, sizeof(std::int32_t)});
  const Index kept = c.checkpointing ? 1 : c.layers;  // blocks
  const auto times = [](std::size_t n, Index factor) {
    return n > std::numeric_limits<Index>::max() ? n : saturated_product({static_cast<Index>(n), factor});
  };
  const auto fill = [&](const hilt::AttentionMemory& attention) {
    const std::size_t block = saturated_sum({times(wide, 7), times(hidden, 2), attention.saved, statistics});
    m.activations = saturated_sum(
        {times(block, kept), c.checkpointing ? times(wide, c.layers) : 0, times(wide, 2), logits, statistics / 2, ids});
    m.working = std::max({times(logits, 2), saturated_sum({hidden, wide}),
                          saturated_sum({attention.peak - std::min(attention.peak, attention.saved), wide})});
    if (device.is_cuda()) m.working += std::size_t{32} << 20;  // what the library of products works in
    const std::string blocks = " of " + std::to_string(kept) + " blocks";
    m.largest = {
        {"tokens.weight and its gradient and moments", saturated_product({c.vocab, c.width, 2 * size + 8})},
        {"weights, gradients and moments of a block",
         saturated_sum({m.parameters, m.gradients, m.moments}) / static_cast<std::size_t>(c.layers)},
        {"logits [" + std::to_string(s.batch) + ", " + std::to_string(c.context) + ", " + std::to_string(c.outputs()) +
             "]",
         logits},
        {"mlp activations" + blocks, times(hidden, 2 * kept)},
        {"attention's own" + blocks + ", " + s.backward, saturated_sum({times(attention.saved, kept), attention.peak})},
        {"the plan of attention", m.plan}};
    std::ranges::sort(m.largest, std::greater{}, &MemoryPlan::Part::bytes);
    m.largest.resize(5);
  };
  const bool all_scores = c.backward == hilt::Backward::taped && c.pattern[0].kind == hilt::Branch::Kind::dense;
  const std::size_t scores = all_scores ? saturated_product({s.batch, c.heads, c.context, c.context, size}) / 2 : 0;
  fill({.saved = scores, .peak = scores});
  if (saturated_sum({m.total(), m.plan}) > most) return m;
  m.plan = 0;
  hilt::AttentionMemory of_all{}, of_one{};
  for (Index i = 0; i < std::ssize(kinds); ++i) {
    hilt::PlanPtr plan;
    program::plan_from(
        s.order, i == 0 ? s.pattern : s.pattern_odd, [&] { plan = plan_of(c, i); },
        i == 0 ? "--pattern" : "--pattern-odd");
    m.plan += plan->bytes();
    of_one = hilt::attention_memory(*plan, s.batch, kinds[0].keys(), kinds[0].dim(), dtype, c.backward,
                                    hilt::make_terms(c.terms, c.heads, c.context, dtype), device);
    of_all.saved += of_one.saved * static_cast<std::size_t>((c.layers + std::ssize(kinds) - 1 - i) / std::ssize(kinds));
    of_all.peak = std::max(of_all.peak, of_one.peak);
  }
  of_all.saved /= static_cast<std::size_t>(c.layers);
  fill(of_all);
  m.is_whole = true;
  return m;
}

void require_memory(const MemoryPlan& m, const Settings& s, std::size_t have) {
  const std::size_t need = saturated_sum({m.total(), m.plan});
  if (need <= have) return;
  std::string largest;
  for (const MemoryPlan::Part& part : m.largest)
    largest += (largest.empty() ? "" : ", ") + part.name + ' ' + report::bytes(part.bytes);
  fail_with(
      Code::memory, "memory (", report::bytes(need), "): needed, ", report::bytes(have), " are available and ",
      report::bytes(hilt::memory_stats().live), " in use; the largest: ", largest, "; try ",
      hilt::parse_backward(s.backward) == hilt::Backward::taped ? "--backward fused (taped keeps L x L weights), " : "",
      s.checkpointing ? "" : "--checkpointing, ",
      s.batch > 1 ? "a smaller --batch with --accumulate, or a smaller --context" : "a smaller --context");
}

}  // namespace train
