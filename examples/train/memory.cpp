// What a block with T tokens, width C and hidden width H keeps for backward, in numbers:
//
//      T C   each: the residual stream twice (for the norms), both norms' results, q, k, v, attention's output
//      T H   twice: before and after the activation
//      and what the attention mode keeps: lse, or weights (attention_memory)
//
// A run with dropout adds nothing: masks are drawn again from their key, but products are no longer
// fused with the sum that follows, so each branch's result is a tensor of its own for a moment.
#include "memory.h"

#include <algorithm>

#include "../program/report/text.h"

namespace train {
namespace {

std::size_t product(std::initializer_list<Index> factors) {
  Index n = 1;
  for (Index f : factors) n = hilt::checked_mul(n, f, "memory plan");
  return static_cast<std::size_t>(n);
}

}  // namespace

Index count_parameters(const hilt::TransformerConfig& c) {
  const Index bias = c.bias, hidden = c.hidden_width(),
              up = hidden * (c.activation == hilt::Activation::silu_gated ? 2 : 1);
  const Index norm = c.width * (1 + (bias && c.norm == hilt::NormKind::layer));
  const Index keys = hilt::attention_config(c).keys() * hilt::attention_config(c).dim();
  const Index qkv = c.width + 2 * keys;
  const Index block = 2 * norm + c.width * qkv + c.width * c.width + c.width * up + hidden * c.width +
                      bias * (qkv + c.width + up + c.width);
  return c.vocab * c.width + (c.positions == hilt::Positions::learned ? c.context * c.width : 0) + c.layers * block +
         norm + (c.tie_weights ? 0 : c.width * c.outputs());
}

MemoryPlan plan_memory(const Settings& s, const hilt::TransformerConfig& c, hilt::Device device) {
  const hilt::DType dtype = s.dtype == "bf16" ? hilt::DType::bf16 : hilt::DType::f32;
  const std::size_t size = hilt::size_of(dtype), count = static_cast<std::size_t>(count_parameters(c));
  MemoryPlan m;
  m.parameters = count * size;
  m.gradients = count * size * (s.accumulate > 1 ? 2 : 1);
  m.moments = count * sizeof(float) * (size == 2 ? 3 : 2);  // with 16-bit weights also their f32 master

  const hilt::PlanPtr plan = hilt::make_plan({.length = c.context,
                                              .heads = c.heads,
                                              .order = c.order,
                                              .pattern = c.pattern,
                                              .dilation_mode = c.dilation_mode,
                                              .causality = c.causality});
  m.plan = plan->bytes();
  const Index kv_heads = hilt::attention_config(c).keys(), dim = hilt::attention_config(c).dim();
  const hilt::AttentionMemory attention = hilt::attention_memory(*plan, s.batch, kv_heads, dim, dtype, c.backward);
  const std::size_t rows = product({s.batch, c.context}), wide = product({s.batch, c.context, c.width}) * size;
  const std::size_t hidden = product({s.batch, c.context, c.hidden_width()}) * size;
  const std::size_t logits = product({s.batch, c.context, c.outputs()}) * size;
  const std::size_t statistics = 4 * rows * sizeof(float);  // mean and 1 / deviation of two norms
  const std::size_t block = 7 * wide + 2 * hidden + attention.saved + statistics;
  const std::size_t layers = static_cast<std::size_t>(c.layers);
  const std::size_t ends = 2 * wide + logits + 2 * rows * sizeof(float) + 2 * rows * sizeof(std::int32_t);
  m.activations = (c.checkpointing ? layers * wide + block : layers * block) + ends;
  m.working = std::max({2 * logits, hidden + wide, attention.peak - std::min(attention.peak, attention.saved) + wide});
  if (device.is_cuda()) m.working += std::size_t{32} << 20;  // what the library of products works in

  m.largest = {
      {"tokens.weight and its gradient and moments", static_cast<std::size_t>(c.vocab * c.width) * (2 * size + 8)},
      {"weights, gradients and moments of a block", (m.parameters + m.gradients + m.moments) / layers},
      {"logits [" + std::to_string(s.batch) + ", " + std::to_string(c.context) + ", " + std::to_string(c.outputs()) +
           "]",
       logits},
      {"mlp activations of " + std::to_string(c.checkpointing ? 1 : c.layers) + " blocks",
       (c.checkpointing ? 1 : layers) * 2 * hidden},
      {"attention's own of " + std::to_string(c.checkpointing ? 1 : c.layers) + " blocks, " + s.backward,
       (c.checkpointing ? 1 : layers) * attention.saved + attention.peak}};
  std::ranges::sort(m.largest, std::greater{}, &MemoryPlan::Part::bytes);
  return m;
}

void require_memory(const MemoryPlan& m, const Settings& s) {
  const hilt::Info info = hilt::info();
  const std::size_t have = info.memory_available;
  if (have == 0 || m.total() + m.plan <= have) return;
  std::string largest;
  for (const MemoryPlan::Part& part : m.largest)
    largest += (largest.empty() ? "" : ", ") + part.name + ' ' + report::bytes(static_cast<double>(part.bytes));
  hilt::fail_with(hilt::Code::memory, "memory (", report::bytes(static_cast<double>(m.total() + m.plan)), "): needed, ",
                  report::bytes(static_cast<double>(have)), " are available and ",
                  report::bytes(static_cast<double>(hilt::memory_stats().live)), " in use; the largest: ", largest,
                  "; try ", s.backward == "taped" ? "--backward fused (taped keeps L x L weights), " : "",
                  s.checkpointing ? "" : "--checkpointing, ",
                  "a smaller --batch with --accumulate, or a smaller --context");
}

std::string to_text(const MemoryPlan& m) {
  const auto show = [](std::size_t n) { return report::bytes(static_cast<double>(n)); };
  return "memory: parameters " + show(m.parameters) + ", gradients " + show(m.gradients) + ", moments " +
         show(m.moments) + ", activations " + show(m.activations) + ", working " + show(m.working) + "; planned " +
         show(m.total());
}

}  // namespace train
