// compare.json, whose fields are promised to other programs, and trace.json for chrome://tracing
// and Perfetto. This file alone sees the JSON library, which is slow to compile.
#include <cmath>
#include <nlohmann/json.hpp>

#include <sstream>

#include "lesson.h"

namespace compare {
namespace {

using Json = nlohmann::ordered_json;

Json shape_of(const hilt::Shape& shape) { return std::vector<Index>(shape.begin(), shape.end()); }

/// JSON has no infinity: an error that is not finite is null.
Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

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
  return {{"max_abs", number(e.max_abs)},
          {"rel_l2", number(e.rel_l2)},
          {"worst_index", index},
          {"verdict", e.ok ? "ok" : "fail"}};
}

Json mode_of(const Lesson& lesson, const Mode& m) {
  if (!m.ran()) return {{"skipped", m.skipped}};
  Json tape = Json::array();
  for (const hilt::NodeReport& n : m.tape)
    tape.push_back({{"name", n.name},
                    {"shape", shape_of(n.output)},
                    {"saved_bytes", n.saved_bytes},
                    {"unique_bytes", n.unique_bytes},
                    {"forward_ms", n.forward_ms},
                    {"backward_ms", n.backward_ms}});
  Json error;
  for (std::size_t i = 0; i < kTensors.size(); ++i)
    error[kTensors[i]] = error_of(m.error[i], i < 2 ? lesson.problem.q.shape() : lesson.problem.k.shape());
  return {{"nodes", m.tape.size()},
          {"saved_bytes", m.saved_bytes},
          {"peak_bytes", m.peak()},
          {"forward_ms", m.forward_ms},
          {"backward_ms", m.backward_ms},
          {"forward_flops", m.forward_flops},
          {"bytes_moved", m.bytes_moved},
          {"tape", tape},
          {"error", error},
          {"bitwise_repeatable", m.repeatable}};
}

}  // namespace

std::string to_json(const Lesson& lesson) {
  const Settings& s = lesson.settings;
  const hilt::PlanSpec& spec = lesson.problem.plan->spec();
  Json out;
  out["config"] = {{"batch", s.batch},       {"length", s.length},
                   {"heads", s.heads},       {"kv_heads", lesson.problem.kv_heads()},
                   {"head_dim", s.head_dim}, {"order", s.order},
                   {"pattern", s.pattern},   {"dilation_mode", s.dilation_mode},
                   {"causal", s.causal},     {"dropout", s.dropout},
                   {"dtype", s.dtype},       {"device", (std::ostringstream() << lesson.problem.q.device()).str()},
                   {"seed", s.seed},         {"repeat", s.repeat},
                   {"modes", s.modes}};
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
                    {"gemm_gflop_s", lesson.machine.gemm_gflop_s}};
  out["plan"] = {{"order", hilt::to_string(spec.order)}, {"pattern", hilt::to_string(spec.pattern)}};
  out["plan"].update(tiles_of(lesson.tiles));
  for (const Arrangement& a : lesson.orders) out["plan"]["per_order"][a.order] = tiles_of(a.stats);
  for (const Mode& m : lesson.modes) out["modes"][m.name] = mode_of(lesson, m);
  out["verdict"] = lesson.passed() ? "ok" : "fail";
  return out.dump(2) + "\n";
}

// One process a mode. Ops know how long they took, not when they began: they are laid end to end.
std::string chrome_trace(const Lesson& lesson) {
  Json events = Json::array();
  int pid = 0;
  for (const Mode& m : lesson.modes) {
    if (!m.ran()) continue;
    ++pid;
    events.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", pid}, {"tid", 1}, {"args", {{"name", m.name}}}});
    double now = 0;
    const auto add = [&](const std::string& name, const char* pass, double ms, std::size_t live,
                         const hilt::NodeReport& n) {
      events.push_back({{"ph", "X"},
                        {"name", name},
                        {"cat", pass},
                        {"pid", pid},
                        {"tid", 1},
                        {"ts", now * 1000},
                        {"dur", ms * 1000},
                        {"args",
                         {{"shape", shape_of(n.output)},
                          {"dtype", name_of(n.dtype)},
                          {"saved_bytes", n.saved_bytes},
                          {"unique_bytes", n.unique_bytes}}}});
      now += ms;
      events.push_back(
          {{"ph", "C"}, {"name", "live bytes"}, {"pid", pid}, {"ts", now * 1000}, {"args", {{"bytes", live}}}});
    };
    for (const hilt::NodeReport& n : m.tape) add(n.name, "forward", n.forward_ms, n.forward_live, n);
    for (auto n = m.tape.rbegin(); n != m.tape.rend(); ++n)
      add(n->name + " backward", "backward", n->backward_ms, n->backward_live, *n);
  }
  return Json{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

}  // namespace compare
