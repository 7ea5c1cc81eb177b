// report.html: what was trained, how its loss fell beside simpler readers, and what it writes. Here
// are its numbers; page.html has the words.
#include "run.h"

namespace train {
namespace {

constexpr std::string_view kPage =
#include "page.inc"
    ;

constexpr std::size_t kMostPoints = 300;  // of a curve

/// Means of runs of steps, so that nothing is picked out.
Json curve_of(const std::vector<Line>& lines) {
  const std::size_t run = std::max<std::size_t>(1, (lines.size() + kMostPoints - 1) / kMostPoints);
  Json points = Json::array();
  for (std::size_t i = 0; i < lines.size(); i += run) {
    const std::size_t end = std::min(i + run, lines.size());
    const auto mean = [&](double Line::*value) {
      double sum = 0;
      for (std::size_t k = i; k < end; ++k) sum += lines[k].*value;
      return number(sum / static_cast<double>(end - i));
    };
    points.push_back({{"step", lines[end - 1].step},
                      {"loss", mean(&Line::loss)},
                      {"lr", mean(&Line::lr)},
                      {"grad_norm", mean(&Line::grad_norm)},
                      {"tokens_per_s", mean(&Line::tokens_per_s)}});
  }
  return points;
}

/// At most so many of them, evenly, the last among them.
Json thinned(const std::vector<Json>& all, std::size_t most) {
  const std::size_t n = all.size(), stride = std::max<std::size_t>(1, (n + most - 1) / most);
  Json out = Json::array();
  for (std::size_t i = n == 0 ? 0 : (n - 1) % stride; i < n; i += stride) out.push_back(all[i]);
  return out;
}

/// The best evaluation, and how much worse a later one was.
Json best_of(const std::vector<Line>& evaluated) {
  if (evaluated.empty()) return {};
  const auto best = std::ranges::min_element(evaluated, {}, &Line::val_loss);
  const auto worst_later = std::ranges::max_element(best, evaluated.end(), {}, &Line::val_loss);
  return {{"step", best->step},
          {"loss", number(best->val_loss)},
          {"is_last", best + 1 == evaluated.end()},
          {"risen", number(worst_later->val_loss - best->val_loss)}};
}

}  // namespace

std::string to_html(const Story& story) {
  const Settings& s = story.settings;
  const MemoryPlan& m = story.memory;
  const Profile& task = s.profile();
  std::vector<Json> evaluations, samples;
  std::vector<Line> evaluated = story.lines;
  std::erase_if(evaluated, [](const Line& l) { return !(l.val_loss >= 0); });
  for (const Line& l : evaluated) evaluations.push_back({{"step", l.step}, {"val_loss", number(l.val_loss)}});
  for (const auto& [step, text] : story.samples)
    samples.push_back({{"step", step}, {"text", program::printable(text, "\n\t")}});
  std::string options;
  for (const auto& [key, value, is_text, group, preset] : story.options.values()) options += key + " = " + value + '\n';
  Json data = first_line(story.options, story.start);
  data.update({
      {"task",
       {{"on_grid", task.on_grid},
        {"row", task.row},
        {"reader", task.reader},
        {"before", task.before},
        {"knows", task.knows},
        {"floor", task.floor}}},
      {"symbol", s.task == "text" && s.vocabulary == "characters" ? "character" : task.target},
      {"pattern", s.patterns()},
      {"order", order_in_force(s)},
      {"verdict", story.verdict},
      {"held_out", story.held_out >= 0 ? number(story.held_out) : Json()},
      {"held_out_rows", 4 * s.eval_rows},
      {"exact_floor", story.exact_val_floor > 0 ? number(story.exact_val_floor) : Json()},
      {"best", best_of(evaluated)},
      {"samples", thinned(samples, 8)},
      {"attention", story.attention},
      {"memory", {m.parameters, m.gradients, m.moments, m.activations, m.working, m.total(), story.measured_bytes}},
      {"command", story.options.command("./run train")},
      {"options", program::printable(options, "\n")},
      {"next", next_commands(s)},
      {"curve", curve_of(story.lines)},
      {"evaluations", thinned(evaluations, kMostPoints)},
  });
  return report::page(kPage, data);
}

}  // namespace train
