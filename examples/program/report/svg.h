#pragma once
#include <string>

// Private to examples/: figures by hand. Colors are CSS classes, so that the page decides between
// light and dark.

namespace report {

/// A drawing in units of its own, scaled to the width it is given. Readers that cannot see it get
/// title and description.
class Svg {
 public:
  Svg(double width, double height, const std::string& title, const std::string& description);

  void rect(double x, double y, double width, double height, const std::string& style, const std::string& tooltip = "");
  void line(double x1, double y1, double x2, double y2, const std::string& style);
  void circle(double x, double y, double radius, const std::string& style, const std::string& tooltip = "");
  /// `data` in SVG's path language, scaled and moved: drawn in cells, say, and placed in units.
  void path(const std::string& data, const std::string& style, double x = 0, double y = 0, double scale = 1);
  /// `style` may say `end` or `mid` for the side of (x, y) on which the text stands.
  void text(double x, double y, const std::string& text, const std::string& style = "");

  std::string str() const { return head_ + body_ + "</svg>"; }

 private:
  std::string head_, body_;
};

/// A coordinate with at most two decimals.
std::string coordinate(double x);

}  // namespace report
