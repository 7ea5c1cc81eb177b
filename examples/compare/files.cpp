// compare.json, whose fields are promised to other programs, and compare.html: that and what the
// page has beyond it, pictures and sentences.
#include <sstream>
#include "lesson.h"

namespace compare {
namespace {

constexpr std::string_view kPage =
#include "page.inc"
    ;
constexpr std::string_view kSteps =
#include "steps.inc"
    ;

Json tiles_of(const hilt::TileStats& s) {
  return {
      {"tiles_full", s.full}, {"tiles_partial", s.partial}, {"tiles_total", s.total}, {"useful_fraction", s.useful()}};
}

Json broken_of(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  Json out = Json::object();
  for (const Broken& b : lesson.broken) {
    Json errors;  // of the first sequence, the heads of the first key head
    for (std::size_t i = 0; i < b.error.size(); ++i)
      errors[kTensors[i]] = error_of(b.error[i], {1, p.length(), i < 2 ? p.heads() / p.kv_heads() : 1, p.dim()});
    out[b.name()] = {{"error", errors},
                     {"query", b.query},
                     {"gradient", b.slope},
                     {"finite_difference", b.difference},
                     {"row_sum_of_ds", b.row_sum}};
  }
  return out;
}

Json to_json(const Lesson& lesson) {
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
                        {"modes", lesson.settings.modes}});
  out["machine"] = lesson.machine;
  out["plan"] = {{"order", hilt::to_string(spec.order)}, {"pattern", hilt::to_string(spec.pattern)}};
  out["plan"].update(tiles_of(lesson.problem.plan->stats()));
  for (const Arrangement& a : lesson.orders) out["plan"]["per_order"][a.order] = tiles_of(a.stats);
  for (const Mode& m : lesson.modes) out["modes"][m.name] = m.facts;
  out["verdict"] = lesson.passed() ? "ok" : "fail";
  out["naive_error"] = lesson.naive_error;
  out["by_length"] = lesson.by_length;
  out["by_keys"] = lesson.by_keys;
  out["checks"] = lesson.checks;
  out["broken"] = broken_of(lesson);
  out["by_hand"] = by_hand();
  return out;
}

/// batch 1, length 4096 (64x64), heads 4, ..
std::string sizes_text(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  std::string text = "batch " + std::to_string(p.batch()) + ", length " + std::to_string(p.length());
  if (lesson.settings.documents.empty()) text += " (" + hilt::to_string(p.plan->grid()) + ")";
  text += ", heads " + std::to_string(p.heads());
  if (p.kv_heads() != p.heads()) text += " on " + std::to_string(p.kv_heads()) + " key heads";
  text += ", head dim " + std::to_string(p.dim()) + ", " + std::string(name_of(p.dtype));
  if (p.dropout > 0) text += format(", dropout %g", p.dropout);
  text += program::terms_in_words(lesson.settings);
  if (!lesson.settings.documents.empty()) text += ", documents " + program::brief(lesson.settings.documents);
  return text;
}

/// What fused keeps against what taped keeps: "2.1 times less"; nothing where one did not run.
std::string kept_in_words(const Lesson& lesson) {
  const Mode *taped = lesson.mode(kTaped), *fused = lesson.mode(kFused);
  if (!taped || !fused) return "";
  const double x = taped->number("saved_bytes") / fused->number("saved_bytes");
  if (std::abs(std::log(x)) < std::log(1.05)) return "as much, within 5 %";
  return x > 1 ? format("%.1f times less", x) : format("%.1f times more", 1 / x);
}

/// Keys a row from which taped keeps more than fused, between two measured sizes; 0 if they do not
/// cross there.
double crossover_in_keys(const Lesson& lesson) {
  double keys = 0, balance = 0;  // of the size before: log(taped / fused)
  for (const Json& sample : lesson.by_keys) {
    const Json& saved = sample["saved_bytes"];
    if (!saved.contains(kTaped) || !saved.contains(kFused)) return 0;
    const double x = std::log(sample["keys"].get<double>()),
                 now = std::log(saved[kTaped].get<double>() / saved[kFused].get<double>());
    if (balance < 0 && now >= 0) return std::exp(keys + (x - keys) * balance / (balance - now));
    keys = x, balance = now;
  }
  return 0;
}

/// The largest error of each cell, over sequences, heads and features: 0 below 1/32 of the limit,
/// each level twice the one before, 5 up to the limit, 6 beyond; 7 where there is no token. Of
/// mistakes 0 up to the limit, then each level twice the one before, 6 up to the largest.
std::string heat(const report::Sheet& sheet, const std::vector<double>& deviation, Index batch, double limit,
                 bool mistaken = false) {
  const std::size_t per_token = deviation.size() / at(batch) / sheet.cell.size();
  std::vector<double> worst(at(sheet.columns * sheet.rows), -1);
  for (std::size_t i = 0; i < deviation.size(); ++i) {
    double& cell = worst[sheet.cell[i / per_token % sheet.cell.size()]];
    if (!(deviation[i] <= cell)) cell = std::isnan(deviation[i]) ? INFINITY : deviation[i];
  }
  std::vector<std::uint8_t> levels;
  const double top = mistaken ? *std::ranges::max_element(worst) : limit;
  for (double w : worst) {
    const double doublings = top > 0 ? std::clamp(std::floor(std::log2(w / top * 32)) + 1, 0.0, 6.0) : 0;
    const double level = w <= limit ? (mistaken ? 0 : std::min(doublings, 5.0))
                         : mistaken ? std::max(doublings, 1.0)
                                    : 6;
    levels.push_back(static_cast<std::uint8_t>(w < 0 ? 7 : level));
  }
  return report::packed(levels);
}

Json pictures_of(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  const report::Sheet sheet = sheet_of(*p.plan);
  Json out{{"columns", sheet.columns},
           {"rows", sheet.rows},
           {"tiles", tiles_on(sheet, order_in_force(*p.plan).position_of)}};
  for (const Mode& m : lesson.modes)
    for (std::size_t i = 0; i < kOfTokens && m.ran(); ++i)
      out["heat"][m.name][kTensors[i]] = heat(sheet, m.deviation[i], p.batch(), m.error[i].limit);
  for (const Broken& b : lesson.broken)
    for (std::size_t i = 0; i < kOfTokens; ++i)
      out["heat"][b.name()][kTensors[i]] = heat(sheet, b.deviation[i], 1, b.error[i].limit, true);
  for (const Arrangement& a : lesson.orders) out["orders"].push_back(picture_of(a));
  return out;
}

/// Ops in at most 96 lines: where there are more each line is several, one after the other, with
/// what they kept and took, and `live` as after the last.
Json folded(const Json& ops, std::string_view live) {
  constexpr std::size_t kMost = 96;
  const std::size_t several = (ops.size() + kMost - 1) / kMost;
  Json lines = Json::array();
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const bool is_first = i % several == 0;
    if (is_first) lines.push_back(ops[i]);
    Json& line = lines.back();
    if (is_first && several > 1)
      line["name"] = ops[i]["name"].get<std::string>() + " ..", line["symbol"] = "", line["view"] = false;
    for (const auto& [key, value] : ops[i].items())
      if (key == live) line[key] = value;
      else if (!is_first && (key.ends_with("bytes") || key.ends_with("ms")))
        line[key] = line[key].get<double>() + value.get<double>();
  }
  return lines;
}

/// Bytes of one number for each pair of the blocks that taped and hybrid multiply, in f32 at least.
double score_bytes(const Problem& p) {
  double pairs = 0;
  each_tiling(*p.plan, [&](const hilt::Tiling& t, double times) {
    pairs += times * static_cast<double>(hilt::group_shape(t).pairs());
  });
  return pairs * (p.dtype == hilt::DType::f64 ? 8 : 4) * static_cast<double>(p.batch());
}

}  // namespace

Files files_of(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  Json json = to_json(lesson);
  const std::string alone = json.dump(2) + "\n";
  for (auto& [name, mode] : json["modes"].items()) {
    if (!mode.contains("tape")) continue;
    mode["tape"] = folded(mode["tape"], "forward_live");  // backward goes through the first last
    mode["inside_backward"] = folded(mode["inside_backward"], "backward_live");
  }
  const bool same_result = order_changes_nothing(p.plan->spec());
  const std::string by_pairs = route_of(lesson, "forward") == "cpu_pairs" ? "Fused took single pairs. In tiles: " : "";
  json["input_bytes"] = p.input_bytes();
  json["pictures"] = pictures_of(lesson);
  json["steps"] = Json::parse(kSteps);
  json["page"] = {
      {"sizes", sizes_text(lesson)},
      {"command", lesson.options.command("./run compare")},
      {"notes", lesson.notes},
      {"longest_row", lesson.longest_row},
      {"pairs", lesson.pairs},
      {"kernels", {{"forward", route_of(lesson, "forward")}, {"backward", route_of(lesson, "backward")}}},
      {"twice", products_back(lesson) == 7},
      {"frames", p.plan->grid().frames > 1 || !p.plan->spec().documents.empty()},
      {"oracle", p.dtype == hilt::DType::f64 ? "plain loops in long double" : "plain loops in f64"},
      {"naive", "the same loops in " + std::string(name_of(p.dtype))},
      {"floor", hilt::size_of(p.dtype) > 2 ? "four roundings" : "one rounding"},
      {"seconds", lesson.seconds},
      {"forward_identical", lesson.forward_identical},
      {"score_bytes", score_bytes(p)},
      {"kept_in_words", kept_in_words(lesson)},
      {"crossover", crossover_in_keys(lesson)},
      {"order_verdict", same_result ? by_pairs + order_verdict(lesson.orders)
                                    : "These counts do not compare orders: the set is cut along each of them. "
                                      "Patterns of the grid, like window2d:16x16, do compare them."},
      {"order_and_result", same_result ? "The set is defined without the order: in any order the result is the same, "
                                         "only the work moves."
                                       : "In another order the same pattern is another set of pairs, and gives "
                                         "another result."},
      {"same_result", same_result}};
  return {alone, report::page(kPage, json), json["page"]};
}

}  // namespace compare
