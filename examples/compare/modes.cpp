// Runs every mode that fits in memory, interleaved, and judges its tensors against the exact ones.
// What a mode has to compute and to move is counted from the tape's nodes or the tiles of the plan.
#include <cstring>
#include "lesson.h"

namespace compare {

Json error_of(const Error& e, const hilt::Shape& shape) {
  Json index = Json::array();
  auto rest = static_cast<Index>(e.worst_index);
  for (int axis = shape.rank() - 1; axis >= 0; rest /= std::max<Index>(shape[axis--], 1))
    index.insert(index.begin(), rest % std::max<Index>(shape[axis], 1));
  return {{"max_abs", e.max_abs}, {"rel_l2", e.rel_l2},      {"worst_index", index}, {"verdict", e.ok ? "ok" : "fail"},
          {"limit", e.limit},     {"rel_limit", e.rel_limit}};
}
std::string route_of(const Lesson& lesson, const std::string& pass) {
  for (const std::string line : lesson.machine["routes"])
    if (line == "backward on hopper" && line.starts_with(pass)) return "hopper_one_owner";
    else if (line.starts_with("backward on hopper: in one pass") && line.starts_with(pass)) return "hopper_one_pass";
    else if (line.starts_with(pass + " on ")) return line.substr(pass.size() + 4, line.find(':') - pass.size() - 4);
  return "cpu";
}

int products_back(const Lesson& lesson) {
  const std::string route = route_of(lesson, "backward");
  return route.starts_with("cpu") || route.starts_with("hopper_one_") ? 5 : 7;
}

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = hilt::dense(a), y = hilt::dense(b);
  return x.shape() == y.shape() && x.dtype() == y.dtype() && std::memcmp(x.raw(), y.raw(), x.bytes()) == 0;
}

/// The most bytes the dense baseline needs at once.
std::size_t dense_peak(const Problem& p) {
  // Backward through the softmax holds P, dP and dS; the mask is one more, shared by the heads
  // where all see the same.
  const hilt::ScoreTerms& t = p.terms;  // each makes one more
  const std::size_t scores = 3 + std::size_t{bool(t.softcap)} + (t.alibi || t.slopes) + bool(t.relative) + bool(t.bias);
  const auto pairs = at(p.length()) * at(p.length());
  return (scores * at(p.batch() * p.heads()) + p.plan->parts().at(0).tilings.size()) * pairs * hilt::size_of(p.dtype);
}

/// Facts of a mode that has yet to run: why it will not.
Json does_not_fit(const Problem& p, const std::string& mode) {
  const std::size_t need = mode == kDense ? dense_peak(p)
                                          : hilt::attention_memory(*p.plan, p.batch(), p.kv_heads(), p.dim(), p.dtype,
                                                                   hilt::parse_backward(mode), p.terms, p.q.device())
                                                .peak,
                    free = hilt::info().memory_available + hilt::memory_stats().pooled;
  if (need <= free) return Json::object();
  return {{"skipped", "would need " + report::bytes(need) + ", " + report::bytes(free) + " are free"}};
}

/// Whether an op moves no data.
bool is_view(const std::string& op) {
  constexpr const char* kViews[] = {"reshape", "permute", "transpose", "slice",
                                    "expand",  "squeeze", "unsqueeze", "detach"};
  return std::ranges::find(kViews, op) != std::end(kViews);
}

/// Ops, each with what it computes in the page's symbols: S, P, M P, O, L; "" for views and what
/// only carries rows to their places. Attention has two products: what stands between them is S,
/// until a softmax makes it P.
Json ops_of(const std::vector<hilt::NodeReport>& ops) {
  Json out = Json::array();
  enum { before, scores, weights, after } at = before;
  for (const hilt::NodeReport& n : ops) {
    const bool product = n.name == "matmul";
    const char* symbol = "";
    if (n.name == "softmax" && at == scores) at = weights, symbol = "P";
    else if (n.name == "logsumexp" && at != before) symbol = "L";
    else if (product && at == weights) at = after, symbol = "O";
    else if (product) at = scores, symbol = "S";
    else if (is_view(n.name) || n.name == "contiguous") symbol = "";
    else if (at == scores) symbol = "S";
    else if (at == weights && n.name == "mul") symbol = "M P";
    out.push_back({{"name", n.name},
                   {"shape", std::vector<Index>(n.output.begin(), n.output.end())},
                   {"saved_bytes", n.saved_bytes},
                   {"unique_bytes", n.unique_bytes},
                   {"forward_ms", n.forward_ms},
                   {"backward_ms", n.backward_ms},
                   {"dtype", name_of(n.dtype)},
                   {"symbol", symbol},
                   {"view", is_view(n.name)},
                   {"forward_live", n.forward_live},
                   {"backward_live", n.backward_live}});
  }
  return out;
}

/// Matrix products alone, 2 m n k each; and bytes of the forward pass, as if nothing stayed in a
/// cache from one use to the next.
struct Cost {
  double forward_flops = 0, backward_flops = 0, bytes_moved = 0;
};
/// An op-by-op tape: every matmul, backward two more each; every op that is not a view reads its
/// inputs and writes its output.
Cost cost_of_tape(const std::vector<hilt::NodeReport>& tape) {
  Cost cost;
  for (const hilt::NodeReport& node : tape) {
    if (is_view(node.name)) continue;
    const double size = static_cast<double>(hilt::size_of(node.dtype)),
                 written = static_cast<double>(node.output.numel());
    cost.bytes_moved += size * written;
    for (const hilt::Shape& input : node.inputs) cost.bytes_moved += size * static_cast<double>(input.numel());
    if (node.name == "matmul") cost.forward_flops += 2 * written * static_cast<double>(node.inputs[0][-1]);
  }
  cost.backward_flops = 2 * cost.forward_flops;
  return cost;
}

/// The kernels: 4 D flops for every pair of a touched tile forward. Backward 2 D a product: the
/// scores again, then dP, dQ, dK, dV; the hybrid does so for every pair of a group. Bytes: each
/// query tile reads q, writes o and L, and reads k and v of every tile it touches.
Cost cost_of_kernel(const Problem& p, const std::string& mode, int products_back) {
  const double dim = static_cast<double>(p.dim()), size = static_cast<double>(hilt::size_of(p.dtype));
  double tile_pairs = 0, group_pairs = 0, rows = 0, keys_read = 0;
  each_tiling(*p.plan, [&](const hilt::Tiling& t, double times) {
    const hilt::KernelWork work = hilt::kernel_work(t, p.q.device(), p.scored());
    group_pairs += times * static_cast<double>(hilt::group_shape(t).pairs());
    rows += times * static_cast<double>(t.q_token.size());
    tile_pairs += times * static_cast<double>(work.pairs);
    keys_read += times * static_cast<double>(work.keys);
  });
  const double batch = static_cast<double>(p.batch());
  return {.forward_flops = 4 * dim * batch * tile_pairs,
          .backward_flops = 2 * dim * batch * (mode == kHybrid ? 5 * group_pairs : products_back * tile_pairs),
          .bytes_moved = size * batch * (rows * (2 * dim + 1) + keys_read * 2 * dim)};
}

Json errors_of(std::span<const Error> errors, const Problem& p) {
  Json out;
  for (std::size_t i = 0; i < errors.size(); ++i)
    if (p.input(i)) out[kTensors[i]] = error_of(errors[i], p.input(i).shape());
  return out;
}

/// What is shown of a mode: one of its runs, so that parts add up. The first run's tensors are the
/// ones that are judged.
Json facts_of(const Lesson& lesson, const Mode& mode, std::span<const Trial> runs) {
  std::vector<const Trial*> by_time;  // but the first, which asks the system for memory
  for (const Trial& run : runs.subspan(1)) by_time.push_back(&run);
  std::ranges::sort(by_time, {}, &Trial::ms);
  const Trial& run = *by_time[(by_time.size() - 1) / 2];
  const bool by_ops = mode.name == kDense || mode.name == kTaped;
  const Cost cost = by_ops ? cost_of_tape(run.tape) : cost_of_kernel(lesson.problem, mode.name, products_back(lesson));
  const Json tape = ops_of(run.tape);
  std::map<std::string, std::size_t> kept;
  for (const Json& n : tape)
    if (n["symbol"] != "") kept[n["symbol"]] += n["unique_bytes"].get<std::size_t>();
  return {{"nodes", run.tape.size()},
          {"saved_bytes", run.saved_bytes},
          {"peak_bytes", std::max(run.forward_peak, run.backward_peak)},
          {"forward_ms", run.forward_ms},
          {"backward_ms", run.backward_ms},
          {"forward_flops", cost.forward_flops},
          {"bytes_moved", cost.bytes_moved},
          {"tape", tape},
          {"error", errors_of(mode.error, lesson.problem)},
          {"bitwise_repeatable", mode.repeatable},
          {"held_bytes", run.held_bytes},
          {"forward_peak_bytes", run.forward_peak},
          {"backward_peak_bytes", run.backward_peak},
          {"backward_flops", cost.backward_flops},
          {"inside_backward", ops_of(run.inside)},
          {"kept_by_symbol", kept}};
}

ExactProblem exact_problem(const Problem& p) {
  ExactProblem out{p.batch(), p.length(), p.heads(), p.kv_heads(), p.dim(), p.scale, p.dropout, p.key, {}, {}, {}, {}};
  out.q = p.q.to_vector(), out.k = p.k.to_vector(), out.v = p.v.to_vector(), out.d_o = p.d_o.to_vector();
  out.terms = exact_terms(*p.plan, p.terms);
  return out;
}

/// The floor, relative to the terms. In 16 bits one rounding to nearest: of the result, since all
/// before it is f32. In f32 and f64 four: the sums themselves are in that type, and the recomputed
/// scores are summed in another order than the first time.
double rounding_of(hilt::DType dtype) {
  switch (dtype) {
    case hilt::DType::f64: return 4 * 0x1p-53;
    case hilt::DType::bf16: return 0x1p-8;
    case hilt::DType::f16: return 0x1p-11;
    default: return 4 * 0x1p-24;
  }
}

/// The claims of the derivation, tried on rows of this run: with L of the fused forward pass and o
/// of a mode, in f64 otherwise. Each number is 0 but for rounding.
Json check_rows(const Problem& p, const ExactProblem& exact, const AttendedSets& sets, const std::vector<double>& o) {
  constexpr Index kRows = 512;
  const hilt::AttentionOptions options{.scale = p.scale, .dropout = p.dropout, .key = p.key, .terms = p.terms};
  const ExactTerms& terms = exact.terms;
  const std::size_t dim = at(p.dim());
  const std::vector<double> lse = hilt::attention_with_lse(p.q, p.k, p.v, p.plan, options).lse.to_vector();
  Index rows = 0;
  double weights_off = 0, delta_off = 0, slopes_off = 0;  // the latter two against the largest term
  const Index stride = std::max<Index>(1, p.length() / kRows);
  for (Index t = 0; t < p.length(); t += stride) {  // of the first sequence and head
    const auto& keys = sets.head(0).row(t);
    if (keys.empty()) continue;
    const double *const query = &exact.q[at(t * p.heads()) * dim], *const slope = &exact.d_o[at(t * p.heads()) * dim];
    const double delta = dot(slope, &o[at(t * p.heads()) * dim], dim);
    // A sink is a key whose value is zero.
    double weights = terms.has_sink() ? std::exp(terms.tensor[3][0] - lse[at(t)]) : 0, by_weights = 0,
           slopes = -weights * delta, size = 0;
    for (const std::int32_t u : keys) {
      const std::size_t key = at(u * p.kv_heads() * p.dim());
      const double z = p.scale * dot(query, &exact.k[key], dim);
      const double weight = std::exp(terms.score(z, 0, 0, t, u, std::identity()).first - lse[at(t)]);
      const double d_weight = dropout_multiplier(p.key, 0, t, u, p.dropout) * dot(slope, &exact.v[key], dim);
      weights += weight, by_weights += weight * d_weight, slopes += weight * (d_weight - delta);
      size = std::max(size, std::abs(d_weight));
    }
    ++rows;
    weights_off = std::max(weights_off, std::abs(weights - 1));
    delta_off = std::max(delta_off, std::abs(by_weights - delta) / size);
    slopes_off = std::max(slopes_off, std::abs(slopes) / size);
  }
  return {{"rows", rows}, {"weights_sum", weights_off}, {"delta", delta_off}, {"slopes_sum", slopes_off}};
}

}  // namespace

void judge_modes(Lesson& lesson) {
  const Problem& p = lesson.problem;
  const AttendedSets sets = attended_sets(*p.plan);
  const ExactProblem problem = exact_problem(p);
  const Tensors exact = exact_attention(problem, sets, p.dtype), naive = naive_attention(problem, sets, p.dtype);
  const Tensors terms = term_sizes(problem, sets, p.dtype);
  for (std::size_t h : sets.of_head) lesson.pairs += sets.sets[h].pairs();
  for (const KeyLists& set : sets.sets)
    for (Index t = 0; t < p.length(); ++t) lesson.longest_row = std::max(lesson.longest_row, std::ssize(set.row(t)));
  lesson.orders = arrangements_of(*p.plan);
  std::array<Error, kTensors.size()> naive_error;
  for (std::size_t i = 0; i < kTensors.size(); ++i) naive_error[i] = measure(naive[i], exact[i]);
  lesson.naive_error = errors_of(naive_error, p);

  hilt::clear_attention_fallbacks();
  hilt::clear_attention_routes();
  for (const std::string& name : lesson.settings.modes) lesson.modes.push_back({name, does_not_fit(p, name)});
  std::map<std::string, std::function<Trial()>> pass;
  std::map<std::string, std::vector<Trial>> runs;
  for (std::int64_t repeat = 0; repeat <= lesson.settings.repeat; ++repeat)
    for (Mode& mode : lesson.modes) {  // interleaved: a slow moment hits every mode
      if (!mode.ran()) continue;
      if (repeat == 0) pass[mode.name] = pass_of(p, mode.name, sets);
      Trial run = pass[mode.name]();
      for (std::size_t i = 0; i < kTensors.size() && repeat > 0; ++i)
        mode.repeatable = mode.repeatable && (!p.input(i) || same_bits(run.result[i], runs[mode.name][0].result[i]));
      if (repeat > 0) run.result = {};
      runs[mode.name].push_back(std::move(run));
    }
  lesson.machine["routes"] = program::routes_taken();
  for (Mode& mode : lesson.modes) {
    if (!mode.ran()) continue;
    for (std::size_t i = 0; i < kTensors.size(); ++i) {
      if (!p.input(i)) continue;
      const std::vector<double> x = runs[mode.name][0].result[i].to_vector();
      mode.error[i] = judge(x, exact[i], terms[i], naive_error[i], rounding_of(p.dtype));
      for (std::size_t j = 0; i < kOfTokens && j < x.size(); ++j)
        mode.deviation[i].push_back(std::abs(x[j] - exact[i][j]));
    }
    mode.facts = facts_of(lesson, mode, runs[mode.name]);
  }
  for (const Mode& mode : lesson.modes)
    if (mode.ran()) lesson.checks = check_rows(p, problem, sets, runs[mode.name][0].result[0].to_vector());
  lesson.broken = break_it(problem, sets, order_in_force(*p.plan), exact, naive, terms, rounding_of(p.dtype));
  if (lesson.mode(kHybrid) && lesson.mode(kFused))
    lesson.forward_identical = same_bits(runs[kHybrid][0].result[0], runs[kFused][0].result[0]);
  lesson.notes = program::oddities_of(*p.plan);
  std::ranges::copy(program::fallbacks_taken(), std::back_inserter(lesson.notes));
  if (p.q.device().is_cuda())
    for (const std::string line : lesson.machine["routes"]) lesson.notes.push_back("attention " + line);
}

}  // namespace compare
