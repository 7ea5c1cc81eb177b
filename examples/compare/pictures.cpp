// Pictures as data: heat maps as a level a cell, orders as walks and tiles.
#include <nlohmann/json.hpp>
#include "lesson.h"

namespace compare {

/// The largest error of each cell, over sequences, heads and features: 0 below 1/32 of the limit,
/// each level twice the one before, 5 up to the limit, 6 beyond; 7 where there is no token. Of
/// mistakes 0 up to the limit, then each level twice the one before, 6 up to the largest.
static std::string heat(const report::Sheet& sheet, const std::vector<double>& deviation, Index batch, double limit,
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
  for (const Arrangement& a : lesson.orders) {
    Json picture = picture_of(*p.plan, a);
    const double ratio =
        static_cast<double>(a.touched()) / std::max(1.0, static_cast<double>(lesson.orders[0].touched()));
    picture["against_row"] = ratio, picture["better"] = ratio<0.995, picture["worse"] = ratio> 1.005;
    out["orders"].push_back(picture);
  }
  return out;
}

}  // namespace compare
