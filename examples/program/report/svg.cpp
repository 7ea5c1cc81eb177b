// Shapes and words of a drawing as SVG text, with short coordinates.
#include "svg.h"

#include <cmath>

#include "text.h"

namespace report {
namespace {

std::string tooltip_of(const std::string& text) { return text.empty() ? "/>" : "><title>" + escape(text) + "</title>"; }

}  // namespace

std::string coordinate(double x) {
  std::string text = format("%.2f", x);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

Svg::Svg(double width, double height, const std::string& title, const std::string& description) {
  head_ = "<svg viewBox=\"0 0 " + coordinate(width) + " " + coordinate(height) + "\" role=\"img\" aria-label=\"" +
          escape(title) + "\"><title>" + escape(title) + "</title><desc>" + escape(description) + "</desc>\n";
}

void Svg::rect(double x, double y, double width, double height, const std::string& style, const std::string& tooltip) {
  body_ += "<rect class=\"" + style + "\" x=\"" + coordinate(x) + "\" y=\"" + coordinate(y) + "\" width=\"" +
           coordinate(width) + "\" height=\"" + coordinate(height) + "\"" + tooltip_of(tooltip) +
           (tooltip.empty() ? "\n" : "</rect>\n");
}

void Svg::line(double x1, double y1, double x2, double y2, const std::string& style) {
  path("M" + coordinate(x1) + " " + coordinate(y1) + "L" + coordinate(x2) + " " + coordinate(y2), style);
}

void Svg::circle(double x, double y, double radius, const std::string& style, const std::string& tooltip) {
  body_ += "<circle class=\"" + style + "\" cx=\"" + coordinate(x) + "\" cy=\"" + coordinate(y) + "\" r=\"" +
           coordinate(radius) + "\"" + tooltip_of(tooltip) + (tooltip.empty() ? "\n" : "</circle>\n");
}

void Svg::path(const std::string& data, const std::string& style, double x, double y, double scale) {
  if (data.empty()) return;
  body_ += "<path class=\"" + style + "\"";
  if (x != 0 || y != 0 || scale != 1)
    body_ +=
        " transform=\"translate(" + coordinate(x) + " " + coordinate(y) + ") scale(" + format("%.6g", scale) + ")\"";
  body_ += " d=\"" + data + "\"/>\n";
}

void Svg::text(double x, double y, const std::string& text, const std::string& style) {
  body_ += "<text" + (style.empty() ? "" : " class=\"" + style + "\"") + " x=\"" + coordinate(x) + "\" y=\"" +
           coordinate(y) + "\">" + escape(text) + "</text>\n";
}

}  // namespace report
