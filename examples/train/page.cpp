// report.html: what was trained, how its loss fell beside what simpler readers reach, and what it
// writes.
#include <algorithm>
#include <cmath>

#include "../program/program.h"
#include "../program/report/chart.h"
#include "../program/report/html.h"
#include "../program/report/text.h"
#include "run.h"

namespace train {
namespace {

using report::escape;
using report::format;
using Points = std::vector<std::pair<double, double>>;

/// At most so many points of a curve: means of runs of steps, so that noise is tamed and nothing is
/// picked out.
template <class Value> Points thinned(const std::vector<Line>& lines, Value value) {
  constexpr std::size_t kMost = 300;
  const std::size_t run = std::max<std::size_t>(1, (lines.size() + kMost - 1) / kMost);
  Points points;
  for (std::size_t i = 0; i < lines.size(); i += run) {
    double sum = 0;
    const std::size_t end = std::min(i + run, lines.size());
    for (std::size_t k = i; k < end; ++k) sum += value(lines[k]);
    points.emplace_back(static_cast<double>(lines[end - 1].step), sum / static_cast<double>(end - i));
  }
  return points;
}

template <class Value> Points evaluated(const std::vector<Line>& lines, Value value) {
  Points points;
  for (const Line& l : lines)
    if (l.val_loss >= 0 && value(l) >= 0) points.emplace_back(static_cast<double>(l.step), value(l));
  return points;
}

report::Axis steps_axis() {
  return {.label = "step", .format = [](double x) { return report::count(x); }};
}

report::LineChart loss_chart(const Story& story, bool close_up) {
  report::LineChart chart;
  const double floor = story.start.floor;
  chart.title = close_up ? "Loss, the last two thirds" : "Loss by step";
  chart.description =
      "Training and validation loss in nats a token, with the losses of simpler readers as dashed lines";
  chart.x = steps_axis();
  chart.y = {.label = "nats a token", .format = [](double y) { return format("%.3g", y); }};
  std::vector<Line> lines = story.lines;
  if (close_up) lines.erase(lines.begin(), lines.begin() + static_cast<std::ptrdiff_t>(lines.size() / 3));
  chart.series = {{.name = "training",
                   .style = "c0",
                   .points = thinned(lines, [](const Line& l) { return l.loss; }),
                   .dots = false},
                  {.name = "validation",
                   .style = "c2",
                   .points = evaluated(lines, [](const Line& l) { return l.val_loss; }),
                   .dots = close_up}};
  if (floor >= 0) chart.marks.push_back({floor, "floor", false});
  if (close_up) return chart;
  chart.marks.push_back({story.start.uniform, "ln V", false});
  chart.marks.push_back({story.start.unigram, "unigram", false});
  if (std::abs(story.start.unigram - story.start.bigram) > 0.02 * story.start.uniform)
    chart.marks.push_back({story.start.bigram, "bigram", false});
  return chart;
}

template <class Value> std::string small_chart(const Story& story, const char* title, const char* unit, Value value) {
  report::LineChart chart;
  chart.title = title;
  chart.description = std::string(title) + " by step";
  chart.x = steps_axis();
  chart.y = {.label = unit, .format = [](double y) {
               return y != 0 && std::abs(y) < 0.01 ? report::scientific(y) : report::count(y);
             }};
  chart.series = {{.name = title, .style = "c2", .points = thinned(story.lines, value), .dots = false, .named = false}};
  return chart.str();
}

void write_yardsticks(report::Page& page, const Story& story) {
  const Start& s = story.start;
  std::vector<std::vector<std::string>> rows{{"reader", "#nats a token", "what it knows"}};
  const auto row = [&](const char* name, double nats, const std::string& knows) {
    rows.push_back({name, format("#%.4f", nats), "~" + knows});
  };
  row("ln V", s.uniform, "that there are " + std::to_string(s.vocabulary) + " symbols");
  row("unigram", s.unigram, "how often each occurs");
  row("bigram", s.bigram, story.settings.is_life() ? "whether the cell lives now" : "the symbol before");
  if (s.floor_without_memory > 0)
    row("the grammar, forgetful", s.floor_without_memory,
        "every rule, but nothing that was said before: names and things told again cost their full price");
  for (const Line& l : {story.lines.back()})
    if (l.val_loss >= 0) row("<b>this model</b>", l.val_loss, "what it learned, on rows it never saw");
  if (s.floor >= 0)
    row("floor", s.floor,
        story.settings.is_life() ? "the rule" : "the grammar and all that was said: no reader can do better");
  page.table("Losses to compare with.", rows);
}

void write_controls(report::Page& page, const Story& story) {
  page.heading("controls", "What the pattern does");
  report::LineChart chart;
  chart.title = "Cells that are wrong, by step";
  chart.description = "Share of wrong cells on unseen boards for three attention patterns, on a logarithmic scale";
  chart.x = steps_axis();
  chart.y = {.label = "wrong cells", .log = true, .format = [](double y) { return report::percent(y); }};
  const double least =
      0.5 / static_cast<double>(story.settings.eval_rows * story.settings.context);  // half a cell stands for none
  const auto wrong = [&](const Line& l) { return l.val_right < 0 ? -1 : std::max(1 - l.val_right, least); };
  std::vector<std::vector<std::string>> rows{{"attention", "pattern", "order", "#FLOP a step", "#cells right"}};
  const auto add = [&](const std::string& name, const std::string& style, const std::string& pattern,
                       const std::string& order, double flops, const std::vector<Line>& lines) {
    chart.series.push_back({.name = name, .style = style, .points = evaluated(lines, wrong), .dots = false});
    rows.push_back({name, "<code>" + escape(pattern) + "</code>", "<code>" + escape(order) + "</code>",
                    "#" + report::count(flops),
                    lines.empty() ? "#" : format("#%.3f %%", 100 * lines.back().val_right)});
  };
  add("this run", "c2", story.settings.pattern, story.settings.order, story.flops, story.lines);
  for (std::size_t i = 0; i < story.controls.size(); ++i) {
    const Control& c = story.controls[i];
    add(c.name, i == 0 ? "c3" : "c1", c.pattern, c.order, c.flops, c.lines);
  }
  page.paragraph(
      "The same model, data and steps; what differs is which cells a cell attends to, and so, a little, the cost. "
      "Sixteen cells in a row "
      "along the Hilbert curve are a square of 4 \u00d7 4, "
      "so most neighbours of a cell are in its segment; sixteen along rows are a strip that holds two of the "
      "eight.");
  page.figure(chart.str(), "Wrong cells on unseen boards.");
  page.table("At the end. The two segment patterns cost the same to the last operation.", rows);
}

void write_run(report::Page& page, const Story& story) {
  page.heading("run", "The run");
  std::vector<std::pair<std::string, std::string>> figures;
  figures.emplace_back(small_chart(story, "Learning rate", "", [](const Line& l) { return l.lr; }), "Learning rate.");
  figures.emplace_back(small_chart(story, "Gradient norm", "", [](const Line& l) { return l.grad_norm; }),
                       "Norm of the gradient, before clipping.");
  figures.emplace_back(small_chart(story, "Tokens a second", "", [](const Line& l) { return l.tokens_per_s; }),
                       "Tokens a second.");
  page.figures(figures);
  const auto bytes = [](std::size_t n) { return "#" + report::bytes(static_cast<double>(n)); };
  const MemoryPlan& m = story.memory;
  page.table("Memory of tensors, planned from the shapes before the first step, and measured after it.",
             {{"parameters", "#gradients", "#moments", "#activations", "#working", "#planned", "#measured"},
              {report::bytes(static_cast<double>(m.parameters)), bytes(m.gradients), bytes(m.moments),
               bytes(m.activations), bytes(m.working), bytes(m.total()), bytes(story.measured_bytes)}});
  std::string command = "train";
  for (const auto& [key, value, is_text, group, preset] : story.options.values())
    if (story.options.given("--" + key)) command += " --" + key + (value == "true" ? "" : " " + value);
  std::string all;
  for (const auto& [key, value, is_text, group, preset] : story.options.values()) all += key + " = " + value + '\n';
  page.raw("<pre class=\"wrap\">" + escape(program::printable(command)) +
           "</pre>\n<details><summary>All options, as a file for --config</summary><pre>" +
           escape(program::printable(all, "\n")) + "</pre></details>\n");
  const hilt::Info i = hilt::info();
  page.paragraph("Hilt " + escape(i.version) + " (" + escape(i.build_type) + ", " + escape(i.compiler) + "), " +
                 escape(i.devices.empty() ? "" : i.devices[0]) + ", " + std::to_string(i.threads) + " threads, " +
                 escape(i.isa_active) + " kernels, products by " + escape(i.blas) +
                 format("; a large product reaches %.0f GFLOP/s.", story.start.peak_gflops));
}

}  // namespace

std::string to_html(const Story& story) {
  const Settings& s = story.settings;
  report::Page page("Training on " + s.task, report::count(static_cast<double>(story.start.parameters)) +
                                                 " parameters, " + std::to_string(s.layers) +
                                                 (s.layers == 1 ? " layer \u00d7 " : " layers \u00d7 ") +
                                                 std::to_string(s.width) + " \u00b7 attention <code>" +
                                                 escape(s.pattern) + "</code> in order <code>" +
                                                 escape(order_in_force(s)) + "</code> \u00b7 backward " + s.backward);
  page.paragraph("<b>" + escape(story.verdict) + "</b>");
  page.heading("loss", "Loss");
  if (!story.lines.empty()) {
    page.figures({{loss_chart(story, false).str(), "Everything, with what simpler readers reach."},
                  {loss_chart(story, true).str(), "The last two thirds, closer."}});
    write_yardsticks(page, story);
  }
  if (!story.controls.empty()) write_controls(page, story);
  if (!story.sample.empty()) {
    page.heading("sample", s.is_life() ? "A board" : "What it writes");
    page.raw((story.settings.is_life() ? "<pre>" : "<pre class=\"wrap\">") +
             escape(program::printable(story.sample, "\n\t")) + "</pre>\n");
  }
  if (!story.lines.empty()) write_run(page, story);
  return page.str();
}

}  // namespace train
