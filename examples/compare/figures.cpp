// The page's drawings: time an op takes, memory over time, errors of every element, times over
// lengths.
#include "figures.h"

#include <algorithm>
#include <cmath>

#include "../program/report/chart.h"
#include "../program/report/grid.h"
#include "../program/report/svg.h"
#include "../program/report/text.h"
#include "words.h"

namespace compare {
namespace {

using report::format;

constexpr Index kTile = hilt::Tiling::kTile;
constexpr Index kMostCells = 64;  // a side, that a picture of the grid resolves

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

std::string length_text(double x) { return format("%.0f", x); }

template <class F>
std::vector<report::Series> by_mode(const Lesson& lesson, const std::vector<Sample>& samples, F&& value) {
  std::vector<report::Series> out;
  for (const Mode& mode : lesson.modes) {
    if (!mode.ran()) continue;
    report::Series s{.name = mode.name, .style = style_of(mode.name)};
    for (const Sample& sample : samples) {
      const auto& table = value(sample);
      if (const auto found = table.find(mode.name); found != table.end())
        s.points.emplace_back(static_cast<double>(sample.x), found->second);
    }
    out.push_back(std::move(s));
  }
  return out;
}

std::string listed(const Lesson& lesson, auto&& value) {
  std::string text;
  for (const Mode& mode : lesson.modes)
    if (mode.ran()) text += (text.empty() ? "" : "; ") + mode.name + " " + value(mode);
  return text + ".";
}

}  // namespace

std::string style_of(const std::string& mode) {
  return mode == "dense" ? "c0" : mode == "taped" ? "c1" : mode == "hybrid" ? "c2" : "c3";
}

OpKind kind_of(const std::string& op) {
  const auto has = [&](const char* word) { return op.find(word) != op.npos; };
  if (has("matmul")) return {"products", "k0"};
  if (has("softmax") || has("logsumexp")) return {"softmax", "k1"};
  if (has("gather") || has("scatter") || has("cat") || has("contiguous") || has("reshape") || has("permute") ||
      has("transpose") || has("slice") || has("squeeze"))
    return {"moving", "k3"};
  if (has("attention")) return {"one kernel", "k4"};
  return {"arithmetic", "k2"};
}

std::string figure_of_time(const Lesson& lesson, bool with_dense) {
  report::BarChart chart;
  chart.title = std::string("Time of each op, forward and backward") + (with_dense ? "" : ", on the plan");
  chart.description =
      "Stacked bars, one for each pass of each mode: " + listed(lesson, [](const Mode& m) {
        return report::milliseconds(m.forward_ms) + " forward and " + report::milliseconds(m.backward_ms) + " backward";
      });
  chart.label_width = 112, chart.value_width = 74, chart.width = 480;
  std::vector<std::string> seen;
  for (const Mode& mode : lesson.modes) {
    if (!mode.ran() || (mode.name == "dense" && !with_dense)) continue;
    for (const bool forward : {true, false}) {
      report::BarChart::Bar bar{.label = mode.name + (forward ? " forward" : " backward"),
                                .value = report::milliseconds(forward ? mode.forward_ms : mode.backward_ms)};
      for (const hilt::NodeReport& node : mode.tape) {
        const double ms = forward ? node.forward_ms : node.backward_ms;
        if (ms < 1e-3 * (forward ? mode.forward_ms : mode.backward_ms)) continue;  // views
        const OpKind kind = kind_of(node.name);
        bar.parts.push_back({ms, kind.style, node.name + ", " + report::milliseconds(ms)});
        if (std::ranges::find(seen, kind.name) == seen.end())
          seen.push_back(kind.name), chart.legend.emplace_back(kind.name, kind.style);
      }
      if (!forward) std::ranges::reverse(bar.parts);
      chart.bars.push_back(std::move(bar));
    }
  }
  return chart.str();
}

std::string figure_of_live_bytes(const Mode& mode) {
  report::Series live{.name = "live",
                      .style = style_of(mode.name),
                      .points = {{0, 0}},
                      .dots = mode.tape.size() < 4,
                      .step = true,
                      .named = false};
  double time = 0, turn = 0;
  for (const hilt::NodeReport& node : mode.tape)
    live.points.emplace_back(time += node.forward_ms, static_cast<double>(node.forward_live));
  live.points.emplace_back(time = turn = std::max(time, mode.forward_ms), static_cast<double>(mode.held_bytes));
  for (std::size_t n = mode.tape.size(); n-- > 0;)
    live.points.emplace_back(time += mode.tape[n].backward_ms, static_cast<double>(mode.tape[n].backward_live));
  const double end = std::max(time, turn + mode.backward_ms);
  report::Series forward{
      .name = "peak",
      .style = "thin",
      .points = {{0, static_cast<double>(mode.forward_peak)}, {turn, static_cast<double>(mode.forward_peak)}},
      .dots = false,
      .named = false};
  report::Series backward = forward;
  backward.points = {{turn, static_cast<double>(mode.backward_peak)}, {end, static_cast<double>(mode.backward_peak)}};
  report::LineChart chart;
  chart.title = "Live bytes over time, " + mode.name;
  chart.description = mode.name + ": at most " + report::bytes(static_cast<double>(mode.forward_peak)) +
                      " in the forward pass, " + report::bytes(static_cast<double>(mode.held_bytes)) +
                      " held between the passes, at most " + report::bytes(static_cast<double>(mode.backward_peak)) +
                      " in the backward pass.";
  chart.x = {.label = "time, ms", .format = [](double x) { return format("%g", x); }, .low = 0, .high = end};
  chart.y = {.label = mode.name + ": bytes beyond q, k, v, d_o",
             .format = [](double y) { return y == 0 ? std::string("0") : report::bytes(y); }};
  chart.series = {forward, backward, live};
  chart.y.high = 1.2 * static_cast<double>(mode.peak());  // room for a word above the curve
  chart.marks = {{turn, "backward", true}};
  chart.height = 220;
  return chart.str();
}

std::string figure_of_error(const Lesson& lesson, const Mode& mode, std::size_t tensor) {
  const Problem& p = lesson.problem;
  const hilt::Grid grid = p.plan->grid();
  const Index width = grid.width, height = grid.height * grid.frames,
              pool = (std::max(width, height) + kMostCells - 1) / kMostCells;
  const Index columns = (width + pool - 1) / pool, rows = (height + pool - 1) / pool;
  const std::vector<double>& deviation = mode.deviation[tensor];
  const std::size_t per_token = deviation.size() / at(p.batch() * p.length());
  std::vector<double> worst(at(columns * rows), -1);
  for (Index b = 0; b < p.batch(); ++b)
    for (Index t = 0; t < p.length(); ++t) {
      double& cell = worst[at(t / width / pool * columns + t % width / pool)];
      for (std::size_t i = 0; i < per_token; ++i)
        cell = std::max(cell, deviation[at(b * p.length() + t) * per_token + i]);
    }
  const Error& e = mode.error[tensor];
  // h0 below 1/32 of the limit, each class twice the one before, h5 up to the limit, h6 beyond.
  const auto level = [&](Index x, Index y) {
    const double w = worst[at(y * columns + x)];
    if (w < 0) return -1;
    return w > e.limit    ? 6
           : e.limit == 0 ? 0
                          : std::clamp(static_cast<int>(std::floor(std::log2(w / e.limit * 32))) + 1, 0, 5);
  };
  constexpr double kSide = 250;
  const double scale = kSide / static_cast<double>(std::max(columns, rows));
  report::Svg svg(kSide + 2, scale * static_cast<double>(rows) + 2,
                  std::string("Where ") + kTensors[tensor] + " of " + mode.name + " errs most",
                  "The grid of tokens; each cell is the largest error over heads and features. Largest " +
                      report::scientific(e.max_abs) + ", allowed " + report::scientific(e.limit) +
                      ". Lines are the edges of the tiles of 128 tokens.");
  for (int h = 0; h <= 6; ++h)
    svg.path(report::cells_path(columns, rows, [&](Index x, Index y) { return level(x, y) == h; }),
             "cell h" + std::to_string(h), 1, 1, scale);
  const auto tile = [&](Index x, Index y) {
    const Index t = y * pool * width + x * pool;
    return t < p.length() ? Index{p.plan->order().position_of[at(t)]} / kTile : Index{-1};
  };
  svg.path(report::edges_path(columns, rows, tile), "edge", 1, 1, scale);
  return svg.str();
}

std::string figure_of_time_by_length(const Lesson& lesson) {
  report::LineChart chart;
  chart.title = "Time of forward and backward against length";
  chart.description = "At the longest: " +
                      listed(lesson, [&](const Mode& m) { return report::milliseconds(m.forward_ms + m.backward_ms); });
  chart.x = {.label = "tokens", .log = true, .format = length_text};
  chart.y = {.label = "forward + backward", .log = true, .format = [](double ms) {
               return ms >= 1000 ? format("%g s", ms / 1000) : format("%g ms", ms);
             }};
  chart.series = by_mode(
      lesson, lesson.by_length, [](const Sample& s) -> const auto& { return s.ms; });
  return chart.str();
}

std::string figure_of_bytes_by_length(const Lesson& lesson) {
  report::LineChart chart;
  chart.title = "Bytes the tape keeps, against length";
  chart.description = "At the longest: " +
                      listed(lesson, [&](const Mode& m) { return report::bytes(static_cast<double>(m.saved_bytes)); });
  chart.x = {.label = "tokens", .log = true, .format = length_text};
  chart.y = {.label = "kept by the tape", .log = true, .format = report::bytes};
  chart.series = by_mode(
      lesson, lesson.by_length, [](const Sample& s) -> const auto& { return s.saved_bytes; });
  return chart.str();
}

std::string figure_of_bytes_by_keys(const Lesson& lesson) {
  report::LineChart chart;
  chart.title = "Bytes the tape keeps, against keys a row";
  const double crossover = crossover_in_keys(lesson);
  chart.description = "Segments of growing size at one length. Taped grows with the keys of a row, fused does not. " +
                      (crossover > 0 ? "They cross at " + format("%.0f", crossover) + " keys a row; the head dim is " +
                                           std::to_string(lesson.problem.dim()) + "."
                                     : std::string());
  chart.x = {.label = "keys a row", .log = true, .format = length_text};
  chart.y = {.label = "kept by the tape", .log = true, .format = report::bytes};
  chart.series = by_mode(
      lesson, lesson.by_keys, [](const Sample& s) -> const auto& { return s.saved_bytes; });
  chart.marks = {{static_cast<double>(lesson.problem.dim()), "head dim", true}};
  return chart.str();
}

std::string figure_of_roofline(const Lesson& lesson) {
  const double peak = lesson.machine.gemm_gflop_s, copy = lesson.machine.copy_gb_s, ridge = peak / copy;
  report::LineChart chart;
  chart.title = "Forward passes under the measured ceilings";
  chart.description = "Ceilings: " + format("%.1f GB/s copying, %.0f GFLOP/s multiplying. ", copy, peak) +
                      listed(lesson, [](const Mode& m) {
                        return format("%.0f GFLOP/s at %.1f flops a byte", m.forward_flops / m.forward_ms * 1e-6,
                                      m.forward_flops / m.bytes_moved);
                      });
  double low = ridge / 8, high = ridge * 8;
  for (const Mode& m : lesson.modes)
    if (m.ran() && m.forward_flops > 0) {
      const double x = m.forward_flops / m.bytes_moved;
      low = std::min(low, x / 2), high = std::max(high, x * 2);
      chart.series.push_back({.name = m.name,
                              .style = style_of(m.name),
                              .points = {{x, m.forward_flops / m.forward_ms * 1e-6}},
                              .line = false});
    }
  chart.series.insert(chart.series.begin(), {.name = "ceiling",
                                             .style = "ink",
                                             .points = {{low, low * copy}, {ridge, peak}, {high, peak}},
                                             .dots = false,
                                             .named = false});
  chart.x = {.label = "flops a byte",
             .log = true,
             .format = [](double x) { return format("%g", x); },
             .low = low,
             .high = high};
  chart.y = {.label = "GFLOP/s", .log = true, .format = [](double y) { return format("%g", y); }};
  return chart.str();
}

}  // namespace compare
