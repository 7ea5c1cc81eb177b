// compare.json, whose fields are promised to other programs.
#include <nlohmann/json.hpp>
#include <sstream>
#include "lesson.h"

namespace compare {
namespace {

Json shape_of(const hilt::Shape& shape) { return std::vector<Index>(shape.begin(), shape.end()); }

Json tiles_of(const hilt::TileStats& s) {
  return {
      {"tiles_full", s.full}, {"tiles_partial", s.partial}, {"tiles_total", s.total}, {"useful_fraction", s.useful()}};
}

Json error_of(const Error& e, const hilt::Shape& shape) {
  Json index = Json::array();
  auto rest = static_cast<Index>(e.worst_index);
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    index.insert(index.begin(), rest % std::max<Index>(shape[axis], 1));
    rest /= std::max<Index>(shape[axis], 1);
  }
  return {{"max_abs", e.max_abs}, {"rel_l2", e.rel_l2},      {"worst_index", index}, {"verdict", e.ok ? "ok" : "fail"},
          {"limit", e.limit},     {"rel_limit", e.rel_limit}};
}
Json errors_of(std::span<const Error> errors, const Problem& p) {
  Json out;
  for (std::size_t i = 0; i < errors.size(); ++i)
    if (p.input(i)) out[kTensors[i]] = error_of(errors[i], p.input(i).shape());
  return out;
}

Json ops_of(const std::vector<hilt::NodeReport>& ops) {
  Json out = Json::array();
  const std::vector<std::string> symbols = symbols_of(ops);
  for (std::size_t i = 0; i < ops.size(); ++i)
    out.push_back({{"name", ops[i].name},
                   {"shape", shape_of(ops[i].output)},
                   {"saved_bytes", ops[i].saved_bytes},
                   {"unique_bytes", ops[i].unique_bytes},
                   {"forward_ms", ops[i].forward_ms},
                   {"backward_ms", ops[i].backward_ms},
                   {"dtype", name_of(ops[i].dtype)},
                   {"symbol", symbols[i]},
                   {"view", is_view(ops[i].name)},
                   {"forward_live", ops[i].forward_live},
                   {"backward_live", ops[i].backward_live}});
  return out;
}

Json mode_of(const Lesson& lesson, const Mode& m) {
  if (!m.ran()) return {{"skipped", m.skipped}};
  const Json tape = ops_of(m.tape);
  std::map<std::string, std::size_t> kept;
  for (const Json& n : tape)
    if (n["symbol"] != "") kept[n["symbol"]] += n["unique_bytes"].get<std::size_t>();
  return {{"nodes", m.tape.size()},
          {"saved_bytes", m.saved_bytes},
          {"peak_bytes", m.peak()},
          {"forward_ms", m.forward_ms},
          {"backward_ms", m.backward_ms},
          {"forward_flops", m.forward_flops},
          {"bytes_moved", m.bytes_moved},
          {"tape", tape},
          {"error", errors_of(m.error, lesson.problem)},
          {"bitwise_repeatable", m.repeatable},
          {"held_bytes", m.held_bytes},
          {"forward_peak_bytes", m.forward_peak},
          {"backward_peak_bytes", m.backward_peak},
          {"backward_flops", m.backward_flops},
          {"inside_backward", ops_of(m.inside)},
          {"kept_by_symbol", kept}};
}

Json samples_of(const std::vector<Sample>& samples, const char* x) {
  Json out = Json::array();
  for (const Sample& s : samples) out.push_back({{x, s.x}, {"ms", s.ms}, {"saved_bytes", s.saved_bytes}});
  return out;
}

Json broken_of(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  Json out = Json::object();
  for (const Broken& b : lesson.broken) {
    Json errors;  // of the first sequence, the heads of the first key head
    for (std::size_t i = 0; i < b.error.size(); ++i)
      errors[kTensors[i]] = error_of(b.error[i], {1, p.length(), i < 2 ? p.heads() / p.kv_heads() : 1, p.dim()});
    out[kMistakes[static_cast<std::size_t>(b.mistake)]] = {{"error", errors},
                                                           {"query", b.query},
                                                           {"gradient", b.slope},
                                                           {"finite_difference", b.difference},
                                                           {"row_sum_of_ds", b.row_sum}};
  }
  return out;
}

}  // namespace

Json to_json(const Lesson& lesson) {
  const Settings& s = lesson.settings;
  const hilt::PlanSpec& spec = lesson.problem.plan->spec();
  Json out;
  for (const auto& [key, value, is_text, group, preset] : lesson.options.values()) {
    std::string name = key;
    std::ranges::replace(name, '-', '_');
    if (name != "out" && name != "json" && group != kExercises)
      out["config"][name] = is_text ? Json(value) : Json::parse(value);
  }
  out["config"].update({{"kv_heads", lesson.problem.kv_heads()},
                        {"device", (std::ostringstream() << lesson.problem.q.device()).str()},
                        {"modes", s.modes}});
  const hilt::Info& i = lesson.machine.info;
  out["machine"] = {{"version", i.version},
                    {"build_type", i.build_type},
                    {"compiler", i.compiler},
                    {"blas", i.blas},
                    {"devices", i.devices},
                    {"isa", i.isa_active},
                    {"threads", i.threads},
                    {"memory_bytes", i.memory},
                    {"routes", lesson.routes},
                    {"copy_gb_s", lesson.machine.copy_gb_s},
                    {"gemm_gflop_s", lesson.machine.gemm_gflop_s},
                    {"measured_twice", lesson.machine.measured_twice}};
  out["plan"] = {{"order", hilt::to_string(spec.order)}, {"pattern", hilt::to_string(spec.pattern)}};
  out["plan"].update(tiles_of(lesson.tiles));
  for (const Arrangement& a : lesson.orders) out["plan"]["per_order"][a.order] = tiles_of(a.stats);
  for (const Mode& m : lesson.modes) out["modes"][m.name] = mode_of(lesson, m);
  out["verdict"] = lesson.passed() ? "ok" : "fail";
  out["naive_error"] = errors_of(lesson.naive_error, lesson.problem);
  out["by_length"] = samples_of(lesson.by_length, "length");
  out["by_keys"] = samples_of(lesson.by_keys, "keys");
  out["checks"] = {{"rows", lesson.checks.rows},
                   {"weights_sum", lesson.checks.weights_sum},
                   {"delta", lesson.checks.delta},
                   {"slopes_sum", lesson.checks.slopes_sum}};
  out["broken"] = broken_of(lesson);
  out["by_hand"] = by_hand();
  return out;
}

}  // namespace compare
