#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

// Private to examples/: the two charts our reports need.

namespace report {

struct Axis {
  std::string label;
  bool log = false;
  std::function<std::string(double)> format;
  double low = 0, high = 0;  // both 0: from the data
};

struct Series {
  std::string name, style;  // style: a color class
  std::vector<std::pair<double, double>> points;
  bool line = true, dots = true, step = false, named = true;  // named: in the legend
};

/// A dashed line across the plot at one x, or one y, with a word beside it.
struct Mark {
  double at;
  std::string text;
  bool vertical = true;
};

struct LineChart {
  std::string title, description;
  Axis x, y;
  std::vector<Series> series;
  std::vector<Mark> marks;
  double width = 460, height = 290;
  std::string str() const;
};

/// Horizontal bars, each of several parts laid end to end.
struct BarChart {
  struct Part {
    double size;
    std::string style, tooltip;
  };
  struct Bar {
    std::string label, value;
    std::vector<Part> parts;
  };
  std::string title, description;
  std::vector<Bar> bars;
  std::vector<std::pair<std::string, std::string>> legend;  // name, style
  double width = 460, label_width = 76, value_width = 66;
  std::string str() const;
};

}  // namespace report
