#pragma once
#include <string>
#include <vector>

// Private to examples/: one HTML file that needs no other, light or dark as the reader's system is.

namespace report {

/// A page under construction. Text given to it is HTML; escape() what may hold < or &.
class Page {
 public:
  Page(const std::string& title, const std::string& subtitle);

  void heading(const std::string& anchor, const std::string& text);  // also a line of the table of contents
  void paragraph(const std::string& html);
  void raw(const std::string& html) { body_ += html; }
  /// A figure with its caption; several stand side by side where there is room.
  void figure(const std::string& svg, const std::string& caption);
  void figures(const std::vector<std::pair<std::string, std::string>>& svg_and_caption);
  /// The first row is the header. A cell may begin with `#` to be set as a number, flush right, or
  /// with `~` for prose that wraps.
  void table(const std::string& caption, const std::vector<std::vector<std::string>>& rows);

  std::string str() const;

 private:
  std::string title_, subtitle_, contents_, body_;
  int tables_ = 0;
};

}  // namespace report
