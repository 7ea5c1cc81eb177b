// report.html: what was trained, how its loss fell beside simpler readers, and what it writes.
#include <nlohmann/json.hpp>
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
template <class T> std::vector<T> thinned(const std::vector<T>& all, std::size_t most) {
  const std::size_t n = all.size(), stride = std::max<std::size_t>(1, (n + most - 1) / most);
  std::vector<T> out;
  for (std::size_t i = n == 0 ? 0 : (n - 1) % stride; i < n; i += stride) out.push_back(all[i]);
  return out;
}

std::vector<const Line*> evaluations_of(const std::vector<Line>& lines) {
  std::vector<const Line*> out;
  for (const Line& l : lines)
    if (l.val_loss >= 0) out.push_back(&l);
  return out;
}

Json readers_of(const Story& story) {
  const Start& s = story.start;
  const bool life = story.settings.is_life(), ising = story.settings.is_ising();
  Json rows = Json::array();
  const auto row = [&](const char* name, double nats, const std::string& knows) {
    rows.push_back({{"name", name}, {"nats", number(nats)}, {"choices", number(std::exp(nats))}, {"knows", knows}});
  };
  row("ln V", s.uniform, "that there are " + std::to_string(s.vocabulary) + " symbols");
  row("unigram", s.unigram, "how often each occurs");
  if (!story.settings.is_images())
    row("bigram", s.bigram,
        life    ? "whether the cell lives now"
        : ising ? "the spin itself, as noise left it"
                : "the symbol before");
  if (s.floor_without_memory > 0)
    row("the grammar, forgetful", s.floor_without_memory,
        "every rule, but nothing that was said before: names and things told again cost their full price");
  if (story.held_out >= 0) row("this model", story.held_out, "what it learned, on rows it never saw");
  if (story.exact_val_floor > 0)
    row(ising ? "the exact posterior, on the same rows" : "the grammar, on the same rows", story.exact_val_floor,
        ising ? "every noisy spin, and how lattices come about" : "all that was said before");
  if (s.floor >= 0)
    row("floor", s.floor,
        life    ? "the rule"
        : ising ? "the same, on the rows of evaluations along the way"
                : "the grammar and all that was said: no reader does better on average over all rows; on few rows luck "
                  "may");
  return rows;
}

Json controls_of(const Story& story) {
  Json out = Json::array();
  if (story.controls.empty()) return out;
  const double cells = static_cast<double>(story.settings.eval_rows * story.settings.context);
  const auto add = [&](const std::string& name, const std::string& pattern, const std::string& order, double flops,
                       const std::vector<Line>& lines) {
    Json wrong = Json::array();
    for (const Line* l : thinned(evaluations_of(lines), kMostPoints))  // half a cell stands for none
      if (l->val_right >= 0) wrong.push_back({l->step, std::max(1 - l->val_right, 0.5 / cells)});
    out.push_back({{"name", name},
                   {"pattern", pattern},
                   {"order", order},
                   {"flops", flops},
                   {"wrong", wrong},
                   {"right", lines.empty() ? Json() : number(lines.back().val_right)}});
  };
  add("this run", story.settings.patterns(), story.settings.order, story.flops, story.lines);
  for (const Control& c : story.controls) {
    add(c.name, c.pattern + (c.pattern_odd.empty() ? "" : " / " + c.pattern_odd), c.order, c.flops, c.lines);
    out.back()["right"] = number(c.mean().right);
    Json each = Json::array();
    for (const Score& s : c.scores) each.push_back(number(s.excess()));
    out.back()["seeds"] = each, out.back()["above"] = number(c.mean().excess());
  }
  return out;
}

Json samples_of(const Story& story) {
  Json out = Json::array();
  for (const auto& [step, text] : thinned(story.samples, 8))
    out.push_back({{"step", step},
                   {"text", program::printable(text, "\n\t")},
                   {"last", step == story.samples.back().first},
                   {"is_board", story.settings.is_grid() && !story.settings.is_images()}});
  return out;
}

Json best_of(const std::vector<Line>& lines) {
  const std::vector<const Line*> all = evaluations_of(lines);
  if (all.empty()) return {};
  const Line* best = *std::ranges::min_element(all, {}, &Line::val_loss);
  double worst_later = best->val_loss;
  for (const Line* l : all)
    if (l->step > best->step) worst_later = std::max(worst_later, l->val_loss);
  return {{"step", best->step},
          {"loss", number(best->val_loss)},
          {"is_last", best == all.back()},
          {"rose", worst_later - best->val_loss >= 0.00005},
          {"risen", number(worst_later - best->val_loss)}};
}

}  // namespace

std::string to_html(const Story& story, const Json& attention) {
  const Settings& s = story.settings;
  const Start& start = story.start;
  const MemoryPlan& m = story.memory;
  std::string options;
  for (const auto& [key, value, is_text, group, preset] : story.options.values()) options += key + " = " + value + '\n';
  Json evaluations = Json::array(), simple = Json::array({{"ln V", start.uniform}, {"unigram", start.unigram}});
  for (const Line* l : thinned(evaluations_of(story.lines), kMostPoints))
    evaluations.push_back({{"step", l->step}, {"val_loss", number(l->val_loss)}});
  if (std::abs(start.unigram - start.bigram) > 0.02 * start.uniform) simple.push_back({"bigram", start.bigram});
  Json differences = Json::array();
  for (const Difference& d : differences_of(story.controls))
    differences.push_back(
        {{"name", d.name}, {"mean", number(d.mean)}, {"spread", number(d.spread)}, {"is_larger", d.is_larger()}});
  const int threads = hilt::info().threads;
  Json data = first_line(story.options, start);
  data.update({
      {"symbol", s.target() == "token" && s.vocabulary == "characters" ? "character" : s.target()},
      {"is_life", s.is_life()},
      {"pattern", s.patterns()},
      {"ordered", s.patterns() != "dense" || hilt::row_order_forced()},
      {"threads", threads == 1 ? "1 thread" : std::to_string(threads) + " threads"},
      {"order", order_in_force(s)},
      {"verdict", story.verdict},
      {"lines", !story.lines.empty()},
      {"held_out", story.held_out >= 0 ? number(story.held_out) : Json()},
      {"held_out_rows", 4 * s.eval_rows},
      {"choices", number(std::exp(story.held_out))},
      {"exact_floor", story.exact_val_floor > 0 ? number(story.exact_val_floor) : Json()},
      {"simple", simple},
      {"readers", readers_of(story)},
      {"best", best_of(story.lines)},
      {"controls", controls_of(story)},
      {"reader", s.is_ising() ? "exact posterior" : "grammar"},
      {"differences", differences},
      {"sample_title", s.is_grid() ? "What it says of unseen " + s.row() + "s" : "What it writes"},
      {"samples", samples_of(story)},
      {"attention", attention},
      {"is_board", s.is_grid()},
      {"memory", {m.parameters, m.gradients, m.moments, m.activations, m.working, m.total(), story.measured_bytes}},
      {"command", story.options.command("./run train")},
      {"options", program::printable(options, "\n")},
      {"next", next_commands(s)},
      {"curve", curve_of(story.lines)},
      {"evaluations", evaluations},
  });
  return report::page(kPage, data);
}

}  // namespace train
