#pragma once
#include <string>

#include "lesson.h"

// Private to compare_gradients: the drawings of its page, each as one <svg>.

namespace compare {

std::string figure_of_time(const Lesson& lesson, bool with_dense);
std::string figure_of_live_bytes(const Mode& mode);
std::string figure_of_error(const Lesson& lesson, const Mode& mode, std::size_t tensor);
std::string figure_of_time_by_length(const Lesson& lesson);
std::string figure_of_bytes_by_length(const Lesson& lesson);
std::string figure_of_bytes_by_keys(const Lesson& lesson);
std::string figure_of_roofline(const Lesson& lesson);

/// The color of a mode: a class of the page's style.
std::string style_of(const std::string& mode);
/// Six kinds of ops, for colors: products, softmax, arithmetic, moving, attention, the rest.
struct OpKind {
  const char *name, *style;
};
OpKind kind_of(const std::string& op);

}  // namespace compare
