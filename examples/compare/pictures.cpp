// Pictures as data: heat maps as a digit a cell, orders as walks and tiles.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "../program/report/grid.h"
#include "lesson.h"

namespace compare {
namespace {

using report::Json;

constexpr Index kTile = hilt::Tiling::kTile;
constexpr Index kMostCells = 64;  // a side, that a heat map resolves

/// Tokens on their grid, pooled to at most 64 cells a side; frames stand below each other.
struct Cells {
  Index width, height, pool, columns, rows;
  explicit Cells(const hilt::Grid& g)
      : width(g.width),
        height(g.height * g.frames),
        pool((std::max(width, height) + kMostCells - 1) / kMostCells),
        columns((width + pool - 1) / pool),
        rows((height + pool - 1) / pool) {}
};

/// The largest error of each cell, over sequences, heads and features: 0 below 1/32 of the limit,
/// each digit twice the one before, 5 up to the limit, 6 beyond; a dot where there is no token.
std::string heat(const Cells& c, const std::vector<double>& deviation, Index batch, Index length, double limit) {
  const std::size_t per_token = deviation.size() / at(batch * length);
  std::vector<double> worst(at(c.columns * c.rows), -1);
  for (Index b = 0; b < batch; ++b)
    for (Index t = 0; t < length; ++t) {
      double& cell = worst[at(t / c.width / c.pool * c.columns + t % c.width / c.pool)];
      for (std::size_t i = 0; i < per_token; ++i) cell = std::max(cell, deviation[at(b * length + t) * per_token + i]);
    }
  std::string digits;
  for (double w : worst) {
    int level = 0;
    if (!(w <= limit)) level = 6;
    else if (limit > 0) level = std::clamp(static_cast<int>(std::floor(std::log2(w / limit * 32))) + 1, 0, 5);
    digits += w < 0 ? '.' : static_cast<char>('0' + level);
  }
  return digits;
}

}  // namespace

Json pictures_of(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  const Cells c(shown_grid(*p.plan));
  const hilt::Permutation order = order_in_force(*p.plan);
  const auto tile = [&](Index x, Index y) {
    const Index t = y * c.pool * c.width + x * c.pool;
    return t < p.length() ? Index{order.position_of[at(t)]} / kTile : Index{-1};
  };
  Json out{{"columns", c.columns}, {"rows", c.rows}, {"edges", report::edges_path(c.columns, c.rows, tile)}};
  for (const Mode& m : lesson.modes)
    for (std::size_t i = 0; i < kOfTokens && m.ran(); ++i)
      out["heat"][m.name][kTensors[i]] = heat(c, m.deviation[i], p.batch(), p.length(), m.error[i].limit);
  for (const Broken& b : lesson.broken)
    for (std::size_t i = 0; i < kOfTokens; ++i)
      out["heat"][kMistakes[at(static_cast<Index>(b.mistake))]][kTensors[i]] =
          heat(c, b.deviation[i], 1, p.length(), b.error[i].limit);
  for (const Arrangement& a : lesson.orders) out["orders"].push_back(picture_of(*p.plan, example_token(*p.plan), a));
  return out;
}

}  // namespace compare
