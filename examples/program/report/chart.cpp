// Axes with round ticks, lines, dots and stacked bars, drawn as SVG.
#include "chart.h"

#include <algorithm>
#include <cmath>

#include "svg.h"
#include "text.h"

namespace report {
namespace {

struct Scale {
  double low, high, from, to;  // data, then drawing
  bool log;
  double operator()(double value) const {
    const double share = log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    return from + share * (to - from);
  }
};

/// Round numbers between low and high: 1, 2, 5 times powers of ten, or on a logarithmic axis powers
/// of 10 (of 2 if it is short).
std::vector<double> ticks(double low, double high, bool log) {
  std::vector<double> out;
  if (log) {
    const double base = high / low > 300 ? 10 : high / low > 17 ? 4 : 2;
    double first = std::pow(base, std::ceil(std::log(low) / std::log(base) - 1e-9));
    for (double t = first; t <= high * 1.0001; t *= base) out.push_back(t);
    while (out.size() > 7) {
      std::vector<double> fewer;
      for (std::size_t i = 0; i < out.size(); i += 2) fewer.push_back(out[i]);
      out = fewer;
    }
    return out;
  }
  constexpr int kAbout = 5;
  const double rough = (high - low) / kAbout, power = std::pow(10, std::floor(std::log10(rough)));
  const double step = power * (rough / power < 1.5 ? 1 : rough / power < 3.5 ? 2 : rough / power < 7.5 ? 5 : 10);
  for (double t = std::ceil(low / step - 1e-9) * step; t <= high + 1e-9 * step; t += step)
    out.push_back(std::abs(t) < step * 1e-9 ? 0 : t);
  return out;
}

void fit(Axis& axis, std::vector<double> values) {
  if (axis.low < axis.high) return;
  std::erase_if(values, [&](double v) { return !std::isfinite(v) || (axis.log && v <= 0); });
  if (values.empty()) values = {1, 2};
  const auto [low, high] = std::ranges::minmax(values);
  axis.low = axis.log ? low / 1.3 : std::min(0.0, low);
  axis.high = axis.log ? high * 1.3 : high * 1.05;
  if (axis.high <= axis.low) axis.high = axis.low + 1;
}

double text_width(const std::string& text) { return 6.4 * static_cast<double>(text.size()); }

void draw_legend(Svg& svg, const std::vector<std::pair<std::string, std::string>>& names, double x, double y) {
  for (const auto& [name, style] : names) {
    svg.rect(x, y - 9, 10, 10, "fill " + style);
    svg.text(x + 14, y, name);
    x += 30 + text_width(name);
  }
}

void draw_series(Svg& svg, const Series& s, const Scale& x, const Scale& y) {
  std::string data;
  double last_y = 0;
  for (const auto& [px, py] : s.points) {
    if ((x.log && px <= 0) || (y.log && py <= 0)) continue;
    if (!data.empty() && s.step) data += "L" + coordinate(x(px)) + " " + coordinate(last_y);
    last_y = y(py);
    data += (data.empty() ? "M" : "L") + coordinate(x(px)) + " " + coordinate(last_y);
  }
  if (s.line) svg.path(data, "stroke " + s.style);
  if (!s.dots) return;
  for (const auto& [px, py] : s.points)
    if (!((x.log && px <= 0) || (y.log && py <= 0)))
      svg.circle(x(px), y(py), s.line ? 3 : 5, "fill " + s.style, s.name);
}

}  // namespace

std::string LineChart::str() const {
  Axis ax = x, ay = y;
  std::vector<double> xs, ys;
  std::vector<std::pair<std::string, std::string>> names;
  for (const Series& s : series) {
    for (const auto& [px, py] : s.points) xs.push_back(px), ys.push_back(py);
    if (s.named && !s.points.empty()) names.emplace_back(s.name, s.style);
  }
  for (const Mark& m : marks) (m.vertical ? xs : ys).push_back(m.at);
  fit(ax, xs), fit(ay, ys);
  constexpr double kLeft = 66, kRight = 14, kBottom = 42;
  const double top = names.empty() ? 24 : 40;
  const Scale sx{ax.low, ax.high, kLeft, width - kRight, ax.log}, sy{ay.low, ay.high, height - kBottom, top, ay.log};
  Svg svg(width, height, title, description);
  draw_legend(svg, names, kLeft, 12);
  for (double t : ticks(ay.low, ay.high, ay.log)) {
    svg.line(kLeft, sy(t), width - kRight, sy(t), "grid");
    svg.text(kLeft - 6, sy(t) + 4, ay.format(t), "end");
  }
  for (double t : ticks(ax.low, ax.high, ax.log)) {
    svg.line(sx(t), height - kBottom, sx(t), height - kBottom + 4, "axis");
    svg.text(sx(t), height - kBottom + 17, ax.format(t), "mid");
  }
  svg.line(kLeft, height - kBottom, width - kRight, height - kBottom, "axis");
  svg.text((kLeft + width - kRight) / 2, height - 6, ax.label, "mid soft");
  svg.text(4, top - 10, ay.label, "soft");
  for (const Mark& m : marks)
    if (m.vertical) svg.line(sx(m.at), top, sx(m.at), height - kBottom, "mark");
    else svg.line(kLeft, sy(m.at), width - kRight, sy(m.at), "mark");
  for (const Series& s : series) draw_series(svg, s, sx, sy);
  // Names last, readable over what they stand on; a horizontal mark's under its line where
  // another's is above.
  constexpr double kApart = 12;
  std::vector<double> taken;
  for (const Mark& m : marks) {
    if (m.vertical) {
      const bool left = sx(m.at) > width - kRight - text_width(m.text) - 6;
      svg.text(sx(m.at) + (left ? -5 : 5), top + 11, m.text, left ? "end soft halo" : "soft halo");
      continue;
    }
    double at = sy(m.at) - 5;
    if (std::ranges::any_of(taken, [&](double other) { return std::abs(other - at) < kApart; })) at = sy(m.at) + 13;
    taken.push_back(at);
    svg.text(width - kRight - 2, at, m.text, "end soft halo");
  }
  return svg.str();
}

std::string BarChart::str() const {
  constexpr double kRow = 26, kBar = 17;
  double longest = 0;
  for (const Bar& bar : bars) {
    double sum = 0;
    for (const Part& part : bar.parts) sum += part.size;
    longest = std::max(longest, sum);
  }
  const double top = legend.empty() ? 4 : 26, unit = longest > 0 ? (width - label_width - value_width) / longest : 0;
  Svg svg(width, top + kRow * static_cast<double>(bars.size()) + 2, title, description);
  draw_legend(svg, legend, 0, 12);
  double y = top;
  for (const Bar& bar : bars) {
    svg.text(label_width - 8, y + 13, bar.label, "end");
    double x = label_width;
    for (const Part& part : bar.parts) {
      svg.rect(x, y, part.size * unit, kBar, "fill " + part.style, part.tooltip);
      x += part.size * unit;
    }
    svg.text(x + 6, y + 13, bar.value);
    y += kRow;
  }
  return svg.str();
}

}  // namespace report
