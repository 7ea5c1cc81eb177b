// compare.html: compare.json and what the page has beyond it, pictures and sentences.
#include <nlohmann/json.hpp>
#include "lesson.h"

namespace compare {
namespace {

constexpr std::string_view kPage =
#include "page.inc"
    ;
constexpr std::string_view kSteps =
#include "steps.inc"
    ;

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
      out["heat"][kMistakes[at(static_cast<Index>(b.mistake))]][kTensors[i]] =
          heat(sheet, b.deviation[i], 1, b.error[i].limit, true);
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
  const Mode *taped = lesson.mode(kTaped), *fused = lesson.mode(kFused);
  json["input_bytes"] = p.input_bytes();
  json["pictures"] = pictures_of(lesson);
  json["steps"] = Json::parse(kSteps);
  json["page"] = {{"sizes", sizes_text(lesson)},
                  {"command", lesson.options.command("./run compare")},
                  {"notes", lesson.notes},
                  {"longest_row", lesson.longest_row},
                  {"pairs", lesson.pairs},
                  {"kernels", {{"forward", route_of(lesson, "forward")}, {"backward", route_of(lesson, "backward")}}},
                  {"by_ops", taped ? kTaped : kDense},
                  {"twice", products_back(lesson) == 7},
                  {"frames", p.plan->grid().frames > 1 || !p.plan->spec().documents.empty()},
                  {"oracle", lesson.oracle},
                  {"naive", lesson.naive},
                  {"floor", lesson.floor},
                  {"seconds", lesson.seconds},
                  {"forward_identical", lesson.forward_identical},
                  {"score_bytes", score_bytes(p)},
                  {"kept_in_words", taped && fused ? kept_in_words(*taped, *fused) : ""},
                  {"crossover", crossover_in_keys(lesson)},
                  {"order_verdict", order_verdict(lesson)},
                  {"order_and_result", order_and_result(lesson)},
                  {"same_result", lesson.same_result_in_any_order}};
  return {alone, report::page(kPage, json)};
}

}  // namespace compare
