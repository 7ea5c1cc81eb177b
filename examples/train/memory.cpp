// What a block with T tokens, width C and hidden width H keeps for backward, in numbers:
//
//      T C   each: the residual stream twice (for the norms), both norms' results, q, k, v, attention's output
//      T H   twice: before and after the activation
//      and what the attention mode keeps: lse, or weights (attention_memory). Dropout keeps nothing
#include "run.h"

namespace train {

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
  const Index norm = c.width * ((c.norm != hilt::NormKind::plain) + (bias && c.norm == hilt::NormKind::layer));
  const Index keys = hilt::attention_config(c).keys() * hilt::attention_config(c).dim();
  const Index qkv = c.width + 2 * keys;
  const Index block = 2 * norm + c.width * qkv + c.width * c.width + c.width * up + hidden * c.width +
                      bias * (qkv + c.width + up + c.width);
  return c.vocab * c.width + (c.positions == hilt::Positions::learned ? c.context * c.width : 0) + c.layers * block +
         norm + (c.tie_weights ? 0 : c.width * c.vocab) + count_terms(c);
}

MemoryPlan plan_memory(const Settings& s, const hilt::TransformerConfig& c, hilt::Device device, double most) {
  const hilt::DType dtype = program::dtype_of(s.dtype);
  const auto size = static_cast<double>(hilt::size_of(dtype)), terms = static_cast<double>(count_terms(c)),
             count = static_cast<double>(count_parameters(c)) - terms, layers = static_cast<double>(c.layers);
  MemoryPlan m;
  m.parameters = count * size + terms * 4;
  m.gradients = m.parameters * (s.accumulate > 1 ? 2 : 1);
  m.moments = count * 4 * (size == 2 ? 3 : 2) + terms * 8;  // of 16 bits there is a master too
  const std::vector<hilt::AttentionConfig> kinds = hilt::attention_configs(c);
  for (const hilt::AttentionConfig& a : kinds) m.plan += program::least_plan_bytes(c.context, a.pattern);

  const auto of_tokens = [&](Index numbers) { return program::product_of({s.batch, c.context, numbers}); };
  const double wide = of_tokens(c.width) * size, hidden = of_tokens(c.hidden_width()) * size,
               logits = of_tokens(c.vocab) * size, statistics = of_tokens(4) * 4,  // of two norms
      ids = of_tokens(s.accumulate) * 2 * 4;
  const double kept = c.checkpointing ? 1 : layers;   // blocks
  const auto fill = [&](double saved, double peak) {  // what attention keeps of a block, and takes at the worst moment
    const double block = 7 * wide + 2 * hidden + saved + statistics;
    m.activations = block * kept + (c.checkpointing ? wide * layers : 0) + 2 * wide + logits + statistics / 2 + ids;
    m.working = std::max({2 * logits, hidden + wide, peak - std::min(peak, saved) + wide});
    if (device.is_cuda()) m.working += 32 << 20;  // what the library of products works in
    const std::string blocks = format(" of %.0f blocks", kept);
    m.largest = {
        {"tokens.weight and its gradient and moments", program::product_of({c.vocab, c.width}) * (2 * size + 8)},
        {"weights, gradients and moments of a block", (m.parameters + m.gradients + m.moments) / layers},
        {(std::ostringstream() << "logits " << hilt::Shape{s.batch, c.context, c.vocab}).str(), logits},
        {"mlp activations" + blocks, hidden * 2 * kept},
        {"attention's own" + blocks + ", " + s.backward, saved * kept + peak},
        {"the plan of attention", m.plan}};
    std::ranges::sort(m.largest, std::greater{}, &MemoryPlan::Item::second);
    m.largest.resize(5);
  };
  const bool all_scores = c.backward == hilt::Backward::taped && c.pattern[0].kind == hilt::Branch::Kind::dense;
  const double scores = all_scores ? of_tokens(c.context * c.heads) * size / 2 : 0;
  fill(scores, scores);
  if (m.total() + m.plan > most) return m;
  m.plan = 0;
  double saved = 0, peak = 0;
  for (Index i = 0; i < std::ssize(kinds); ++i) {
    hilt::PlanPtr plan;
    program::plan_from(
        s.order, i == 0 ? s.pattern : s.pattern_odd, [&] { plan = plan_of(c, i); },
        i == 0 ? "--pattern" : "--pattern-odd");
    m.plan += static_cast<double>(plan->bytes());
    const hilt::AttentionMemory one =
        hilt::attention_memory(*plan, s.batch, kinds[0].keys(), kinds[0].dim(), dtype, c.backward,
                               hilt::make_terms(c.terms, c.heads, c.context, dtype), device);
    const Index blocks = (c.layers + std::ssize(kinds) - 1 - i) / std::ssize(kinds);
    saved += static_cast<double>(one.saved) * static_cast<double>(blocks) / layers;
    peak = std::max(peak, static_cast<double>(one.peak));
  }
  fill(saved, peak);
  m.is_whole = true;
  return m;
}

void require_memory(const MemoryPlan& m, const Settings& s, double have) {
  const double need = m.total() + m.plan;
  if (need <= have) return;
  std::string largest;
  for (const auto& [name, bytes] : m.largest)
    largest += (largest.empty() ? "" : ", ") + name + ' ' + report::bytes(bytes);
  fail_with(
      Code::memory, "memory (", report::bytes(need), "): needed, ", report::bytes(have), " are available and ",
      report::bytes(hilt::memory_stats().live), " in use; the largest: ", largest, "; try ",
      hilt::parse_backward(s.backward) == hilt::Backward::taped ? "--backward fused (taped keeps L x L weights), " : "",
      s.checkpointing ? "" : "--checkpointing, ",
      s.batch > 1 ? "a smaller --batch with --accumulate, or a smaller --context" : "a smaller --context");
}

// ---- what is known before the first step --------------------------------------------------------
hilt::AdamW adamw_of(const Settings& s) {
  return {.lr = s.lr, .beta1 = s.like == "microgpt" ? 0.85 : 0.9, .beta2 = 0.99, .weight_decay = s.weight_decay};
}

Task::Exact exact_of(const Task& task, Index rows) {
  std::vector<Task::Exact> each(static_cast<std::size_t>(rows));
  hilt::parallel_for(rows, 1, [&](Index begin, Index end) {
    std::vector<std::int32_t> inputs(static_cast<std::size_t>(task.length())), targets(inputs.size());
    for (Index r = begin; r < end; ++r) {
      task.row(Split::validation, r, inputs.data(), targets.data());
      each[static_cast<std::size_t>(r)] = task.exact(inputs.data(), targets.data());
    }
  });
  Task::Exact sum{0, 0};
  for (const Task::Exact& e : each) sum.cost += e.cost, sum.right += e.right;
  const double targets = static_cast<double>(rows * task.length());
  return each[0].cost < 0 ? Task::Exact{} : Task::Exact{sum.cost / targets, sum.right / targets};
}

Start measure_start(const Settings& s, const Task& task, const hilt::TransformerConfig& config, hilt::Device device) {
  constexpr Index kCounted = 1 << 16;  // tokens, enough for two digits of a bigram's entropy
  Start start{yardsticks(task, std::max<Index>(1, kCounted / task.length()))};
  start.floor = task.floor() >= 0 ? task.floor() : exact_of(task, s.eval_rows).cost;
  start.floor_without_memory = task.floor_without_memory();
  start.peak_gflops = program::product_gflops(device, program::dtype_of(s.dtype), device.is_cpu() ? 512 : 4096);
  start.parameters = count_parameters(config);
  start.vocabulary = task.vocabulary().size();
  start.tokens_per_step = s.batch * s.accumulate * s.context;
  return start;
}

}  // namespace train
