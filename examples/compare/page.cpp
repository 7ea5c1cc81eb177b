// compare.html: what the template asks for beyond compare.json, all of it from the Lesson.
#include <nlohmann/json.hpp>
#include <sstream>
#include "lesson.h"
#include "source.h"

namespace compare {
namespace {

constexpr std::string_view kPage =
#include "page.inc"
    ;

/// The step table: the forward pass downwards, and beside it, upwards, what undoes it. A step whose
/// line of source is not known, or not one, has none.
Json steps_of(const Lesson& lesson, const Json& modes) {
  constexpr const char* kRows[][2] = {{"S", "dK"}, {"", "dQ"}, {"L", "dS"}, {"P", "Delta"},
                                      {"O", "dP"}, {"", "dV"}, {"a", "P2"}, {"", "S2"}};
  const std::string& by_ops = lesson.mode(kTaped) ? kTaped : kDense;
  const Json all = steps(), tape = lesson.mode(by_ops) ? modes[by_ops]["tape"] : Json::array();
  const auto step_of = [&](const std::string& id, const std::string& pass) {
    Json step = *std::ranges::find_if(all["steps"], [&](const Json& s) { return s["id"] == id; });
    const std::string route = route_of(lesson, pass);
    const auto quote = [&](const std::string& where) {
      return step.contains(where) ? source_line(step[where]) : Json();
    };
    step["keeps"] = 0.0;
    for (const Json& n : tape) {
      if (step["node"] == "" || !(n["symbol"] == step["node"] || (step["node"] == "O" && n["symbol"] == "M P")))
        continue;
      step["keeps"] = step["keeps"].get<double>() + (pass == "forward" ? n["unique_bytes"].get<double>() : 0);
      if (step.contains("rule_of_parts")) step["rule"] = step["rule_of_parts"];
    }
    if (lesson.problem.dropout > 0 && step.contains("rule_of_dropout")) step["rule"] = step["rule_of_dropout"];
    step[kFused] = quote(route == "cpu_pairs" && !step.contains(route) ? "cpu" : route);  // as in whole products
    step[kHybrid] = quote(kHybrid), step["rows"] = 1;
    return step;
  };
  Json rows = Json::array();
  std::size_t first = 0;
  for (const auto& [forward, backward] : kRows) {
    rows.push_back(
        {{"forward", *forward ? step_of(forward, "forward") : Json()}, {"backward", step_of(backward, "backward")}});
    if (*forward) first = rows.size() - 1;
    else rows[first]["forward"]["rows"] = 2;
  }
  return {{"rows", rows}, {"names", all["names"]}};
}

/// What break_it() found, with the words of steps.json.
Json mistakes_of(const Json& broken) {
  Json out = Json::array();
  const Json all = steps();
  for (Json mistake : all["mistakes"]) {
    const auto found = broken.find(mistake["name"].get<std::string>());
    if (found == broken.end()) return out;
    mistake.update(*found);
    if (mistake["name"] != "none" &&
        std::ranges::all_of(mistake["error"], [](auto& e) { return e["verdict"] == "ok"; }))
      mistake["how"] = "On this problem the mistake changes nothing that the judge can see.";
    out.push_back(mistake);
  }
  return out;
}

/// Ops in at most so many lines: where there are more each line is several, one after the other,
/// with what they kept and took.
Json folded(const Json& ops, std::size_t most) {
  const std::size_t several = (ops.size() + most - 1) / most;
  Json lines = Json::array();
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const bool is_first = i % several == 0;
    if (is_first) lines.push_back(ops[i]);
    Json& line = lines.back();
    if (is_first && several > 1) line["name"] = ops[i]["name"].get<std::string>() + " ..", line["symbol"] = "";
    for (const auto& [key, value] : ops[i].items())
      if (key == "forward_live" || key == "live") line[key] = value;  // backward goes through the first last
      else if (!is_first && (key.ends_with("bytes") || key.ends_with("ms")))
        line[key] = line[key].get<double>() + value.get<double>();
  }
  return lines;
}

/// As tables show them: without views.
Json listed(const Json& ops) {
  Json shown = Json::array();
  for (const Json& op : ops)
    if (!is_view(op["name"])) shown.push_back(op);
  return folded(shown, 40);
}

/// The modes as a list, with what the tables show of each.
Json ways_of(const Lesson& lesson, const Json& modes) {
  Json ways = Json::array();
  for (const Mode& m : lesson.modes) {
    Json way = modes[m.name];
    way["name"] = m.name;
    way["ran"] = m.ran();
    if (m.ran())
      way["one"] = m.tape.size() == 1, way["listed"] = listed(way["tape"]),
      way["inside"] = listed(way["inside_backward"]);
    way["peak"] = m.peak() + lesson.problem.input_bytes();
    way["total_ms"] = m.forward_ms + m.backward_ms;
    ways.push_back(way);
  }
  return ways;
}

Json agreement_of(const Json& json) {
  constexpr const char* kOnPage[] = {"O", "dQ", "dK", "dV"};
  Json out = Json::array();
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    const char* const tensor = kTensors[i];
    if (!json["naive_error"].contains(tensor)) continue;
    Json row{{"tensor", i < kOfTokens ? kOnPage[i] : tensor},
             {"naive", json["naive_error"][tensor]},
             {"modes", Json::array()}};
    for (const auto& [name, mode] : json["modes"].items()) {
      if (!mode.contains("error")) continue;
      Json e = mode["error"][tensor];
      e["name"] = name, e["ok"] = e["verdict"] == "ok";
      row["modes"].push_back(e);
    }
    out.push_back(row);
  }
  return out;
}

/// Bytes of one number for each pair of the blocks that taped and hybrid multiply, in f32 at least.
double score_bytes(const Problem& p) {
  double pairs = 0;
  each_tiling(*p.plan, [&](const hilt::Tiling& t, double times) {
    pairs += times * static_cast<double>(hilt::group_shape(t).pairs());
  });
  return pairs * (p.dtype == hilt::DType::f64 ? 8 : 4) * static_cast<double>(p.batch());
}

/// a against b of two modes that ran: their quotients, for sentences.
Json compared(const Lesson& lesson, const std::string& first, const std::string& second) {
  const Mode *a = lesson.mode(first), *b = lesson.mode(second);
  if (!a || !b) return {};
  const auto over = [](double x, double y) { return y > 0 ? x / y : 0; };
  const double kept = over(static_cast<double>(a->saved_bytes), static_cast<double>(b->saved_bytes));
  return {{"kept", kept},
          {"in_words", kept_in_words(kept)},
          {"flops", over(b->forward_flops, a->forward_flops)},
          {"ms", over(b->forward_ms + b->backward_ms, a->forward_ms + a->backward_ms)},
          {"saved_a", a->saved_bytes},
          {"saved_b", b->saved_bytes},
          {"peak_a", a->peak() + lesson.problem.input_bytes()},
          {"peak_b", b->peak() + lesson.problem.input_bytes()}};
}

/// As info prints the one that the run was on.
std::string device_of(const Lesson& lesson) {
  const std::string name = (std::ostringstream() << lesson.problem.q.device()).str();
  for (const std::string& device : lesson.machine.info.devices)
    if (device.starts_with(name)) return device;
  return name;
}

}  // namespace

std::string to_html(const Lesson& lesson, Json json) {
  const Problem& p = lesson.problem;
  const hilt::PlanSpec& spec = p.plan->spec();
  const double all = static_cast<double>(p.length()) * static_cast<double>(p.length()) * static_cast<double>(p.heads());
  const Json pictures = pictures_of(lesson);
  json["steps"] = steps_of(lesson, json["modes"]);
  json["ways"] = ways_of(lesson, json["modes"]);
  for (auto& [name, mode] : json["modes"].items())
    for (const char* ops : {"tape", "inside_backward"})
      if (mode.contains(ops)) mode[ops] = folded(mode[ops], 96);
  std::string routes;
  for (const std::string& line : lesson.routes) routes += (routes.empty() ? "" : ", ") + line;
  json["page"] = {
      {"passed", lesson.passed()},
      {"sizes", sizes_text(lesson)},
      {"command", lesson.options.command("./run compare")},
      {"notes", lesson.notes},
      {"longest_row", lesson.longest_row},
      {"pairs", lesson.pairs},
      {"product_flops", 2 * p.dim()},
      {"twice", products_back(lesson) == 7},
      {"groups", p.heads() == p.kv_heads() ? 0 : p.heads() / p.kv_heads()},
      {"frames", p.plan->grid().frames > 1 || !spec.documents.empty()},
      {"share_of_pairs", static_cast<double>(lesson.pairs) / all},
      {"scale", p.scale},
      {"short", p.dtype == hilt::DType::bf16  ? 8
                : p.dtype == hilt::DType::f16 ? 11
                                              : 0},
      {"short_parts", p.dtype == hilt::DType::bf16 ? 256 : 2048},
      {"oracle", lesson.oracle},
      {"naive", lesson.naive},
      {"floor", lesson.floor},
      {"seconds", lesson.seconds},
      {"device", device_of(lesson)},
      {"on_cpu", p.q.device().is_cpu()},
      {"all_pairs", std::ranges::all_of(lesson.problem.plan->spec().pattern,
                                        [](const hilt::Branch& b) { return b.kind == hilt::Branch::Kind::dense; })},
      {"threads", threads_text(lesson)},
      {"routes", routes},
      {"agreement", agreement_of(json)},
      {"forward_identical", lesson.forward_identical},
      {"mistakes", mistakes_of(json["broken"])},
      {"dense_fused", compared(lesson, kDense, kFused)},
      {"dense_taped", compared(lesson, kDense, kTaped)},
      {"taped_fused", compared(lesson, kTaped, kFused)},
      {"hybrid_fused", compared(lesson, kHybrid, kFused)},
      {"score_bytes", score_bytes(p)},
      {"dense_bytes", all * static_cast<double>(hilt::size_of(p.dtype)) * static_cast<double>(p.batch())},
      {"q_bytes", p.q.bytes()},
      {"qkv_bytes", p.q.bytes() + 2 * p.k.bytes()},
      {"input_bytes", p.input_bytes()},
      {"lse_bytes", at(p.batch() * p.heads() * p.length()) * (p.dtype == hilt::DType::f64 ? 8 : 4)},
      {"crossover", crossover_in_keys(lesson)},
      {"short_length", std::min<Index>(p.length(), 1024)},
      {"order_verdict", order_verdict(lesson)},
      {"order_and_result", order_and_result(lesson)},
      {"same_result", lesson.same_result_in_any_order},
  };
  // What figures are drawn from is in the page as data; all else only where it is shown.
  Json data{{"pictures", pictures}, {"input_bytes", p.input_bytes()}, {"head_dim", p.dim()}};
  for (const char* drawn : {"modes", "broken", "by_length", "by_keys", "machine"}) data[drawn] = json[drawn];
  data["short_length"] = json["page"]["short_length"];
  data["shown"] = std::move(json);
  return report::fill(kPage, data);
}

}  // namespace compare
