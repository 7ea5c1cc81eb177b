// Sentences that the summary on the terminal and the page share.
#include "lesson.h"

namespace compare {

std::string sizes_text(const Lesson& lesson) {
  const Problem& p = lesson.problem;
  const hilt::Grid g = p.plan->grid();
  std::string text = "batch " + std::to_string(p.batch()) + ", length " + std::to_string(p.length());
  if (lesson.settings.documents.empty())
    text += " (" + (g.frames > 1 ? std::to_string(g.frames) + "x" : "") + std::to_string(g.height) + "x" +
            std::to_string(g.width) + ")";
  text += ", heads " + std::to_string(p.heads());
  if (p.kv_heads() != p.heads()) text += " on " + std::to_string(p.kv_heads()) + " key heads";
  text += ", head dim " + std::to_string(p.dim()) + ", " + std::string(name_of(p.dtype));
  if (p.dropout > 0) text += format(", dropout %g", p.dropout);
  text += program::in_words(lesson.settings.terms);
  if (!lesson.settings.documents.empty()) text += ", documents " + program::brief(lesson.settings.documents);
  return text;
}

std::string route_of(const Lesson& lesson, const std::string& pass) {
  for (const std::string& line : lesson.routes)
    if (line == "backward on hopper" && line.starts_with(pass)) return "hopper_one_owner";
    else if (line.starts_with(pass + " on ")) return line.substr(pass.size() + 4, line.find(':') - pass.size() - 4);
  return "cpu";
}

int products_back(const Lesson& lesson) {
  const std::string route = route_of(lesson, "backward");
  return route == "cpu" || route == "hopper_one_owner" ? 5 : 7;
}

std::string order_and_result(const Lesson& lesson) {
  if (lesson.same_result_in_any_order)
    return "The set is defined without the order: in any order the result is the same, only the work moves.";
  return "The set is defined along the order: the same pattern in another order gives another result. The table keeps "
         "the set and moves the tokens.";
}

Index faster_from(const Lesson& lesson, const std::string& mode, const std::string& other) {
  Index from = 0;
  for (const Sample& s : lesson.by_length) {
    if (!s.ms.contains(mode) || !s.ms.contains(other)) return 0;
    if (s.ms.at(mode) >= s.ms.at(other)) from = 0;
    else if (from == 0) from = s.x;
  }
  return from;
}

double crossover_in_keys(const Lesson& lesson) {
  double keys = 0, balance = 0;  // of the size before: log(taped / fused)
  for (const Sample& s : lesson.by_keys) {
    if (!s.saved_bytes.contains("taped") || !s.saved_bytes.contains("fused")) return 0;
    const double x = std::log(static_cast<double>(s.x)),
                 now = std::log(s.saved_bytes.at("taped") / s.saved_bytes.at("fused"));
    if (balance < 0 && now >= 0) return std::exp(keys + (x - keys) * balance / (balance - now));
    keys = x, balance = now;
  }
  return 0;
}

}  // namespace compare
