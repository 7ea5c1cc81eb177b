// compare.html: the lesson for a reader who has not seen the code. Every number in it comes from
// the Lesson.
#include <algorithm>
#include <cmath>

#include "../program/report/html.h"
#include "../program/report/text.h"
#include "figures.h"
#include "lesson.h"
#include "source.h"
#include "words.h"

namespace compare {
namespace {

using report::escape;
using report::format;
using report::Page;

constexpr std::size_t kListed = 40;  // ops of a tape that the page prints

std::string size_text(std::size_t n) { return report::bytes(static_cast<double>(n)); }
std::string dot(const std::string& mode) { return "<span class=\"dot " + style_of(mode) + "\"></span>" + mode; }
std::string verdict(bool ok, const std::string& yes = "ok", const std::string& no = "NO") {
  return "<span class=\"" + std::string(ok ? "good" : "bad") + "\">" + (ok ? yes : no) + "</span>";
}
std::string shape_text(hilt::DType dtype, const hilt::Shape& shape) {
  std::string text(name_of(dtype));
  for (int i = 0; i < shape.rank(); ++i) text += (i ? ", " : " [") + std::to_string(shape[i]);
  return text + (shape.rank() ? "]" : " []");
}
const char* description_of(const std::string& mode) {
  if (mode == "dense")
    return "no plan: all L \u00d7 L scores, a mask, a softmax, a product, one op at a time. The tape "
           "differentiates each op.";
  if (mode == "taped")
    return "the same ops, but only on the blocks of scores that the plan lists. Still nobody wrote a "
           "backward pass.";
  if (mode == "hybrid")
    return "one op. Its forward walks over tiles of scores and stores none of them; its backward is six "
           "formulas in library matrix products.";
  return "one op with the same forward. Its backward is one kernel that does the six formulas tile by tile.";
}

void write_opening(Page& page, const Lesson& lesson) {
  page.raw("<p class=\"verdict" + std::string(lesson.passed() ? "" : " no") + "\">" +
           (lesson.passed() ? verdict(true, "All gradients agree.") +
                                  " Every tensor of every mode that ran is within its limit of the exact "
                                  "one, and every repeat gave the same bits."
                            : verdict(false, "", "Something is off.") +
                                  " A tensor is beyond its limit, or a repeat gave other bits: see <a "
                                  "href=\"#agreement\">Do they agree?</a>") +
           "</p>\n");
  page.paragraph(
      "Attention lets every token average the values of a list of other tokens, weighted by how well its "
      "query fits their keys. To train a model one "
      "also needs the way back: from the gradient of the output <i>o</i> to those of the queries, keys and "
      "values. There are several ways to get it. They give the "
      "same numbers. They differ in what they remember between the passes, and in what they compute a second "
      "time.");
  page.raw("<ul>\n");
  for (const Mode& m : lesson.modes) page.raw("<li><b>" + dot(m.name) + "</b>: " + description_of(m.name) + "</li>\n");
  page.raw("</ul>\n");
  for (const std::string& note : lesson.notes) page.paragraph("<b>Note.</b> " + escape(note) + ".");
}

void write_bill(Page& page, const Lesson& lesson) {
  page.heading("bill", "The bill");
  std::vector<std::vector<std::string>> rows{{"mode", "#ops on the tape", "#keeps for backward", "#peak memory",
                                              "#forward", "#backward", "#products forward", "same bits each run"}};
  for (const Mode& m : lesson.modes) {
    if (m.ran())
      rows.push_back({dot(m.name), "#" + std::to_string(m.tape.size()), "#" + size_text(m.saved_bytes),
                      "#" + size_text(m.peak()), "#" + report::milliseconds(m.forward_ms),
                      "#" + report::milliseconds(m.backward_ms), "#" + report::count(m.forward_flops) + "FLOP",
                      verdict(m.repeatable, "yes", "NO")});
    else
      rows.push_back({dot(m.name), "#\u2013", "#\u2013", "#" + m.skipped, "#\u2013", "#\u2013", "#\u2013", "not run"});
  }
  page.table("Medians of " + std::to_string(lesson.settings.repeat) +
                 " interleaved runs. <i>Keeps</i>: bytes the tape holds from forward to backward, each block "
                 "once, the inputs it keeps "
                 "included. <i>Peak</i>: most bytes alive beyond q, k, v and the gradient of o.",
             rows);
  const Mode *dense = lesson.mode("dense"), *taped = lesson.mode("taped"), *hybrid = lesson.mode("hybrid"),
             *fused = lesson.mode("fused");
  const auto ms = [](const Mode* m) { return m->forward_ms + m->backward_ms; };
  if (dense && taped)
    page.paragraph(
        format("From dense to taped the arithmetic stays op by op; only the plan is new. It leaves %s of the "
               "score products of dense, and %s of its time.",
               report::percent(taped->forward_flops / dense->forward_flops).c_str(),
               report::percent(ms(taped) / ms(dense)).c_str()));
  if (taped && fused && taped->saved_bytes > 0) {
    const double ratio = static_cast<double>(taped->saved_bytes) / static_cast<double>(fused->saved_bytes);
    page.paragraph(format("From taped to fused the sums stay the same and the memory changes: %s against %s kept, %s. ",
                          size_text(taped->saved_bytes).c_str(), size_text(fused->saved_bytes).c_str(),
                          ratio >= 1 ? format("%.1f times less", ratio).c_str()
                                     : format("%.1f times <b>more</b>", 1 / ratio).c_str()) +
                   "Taped keeps a weight for every pair; fused keeps the output and one number for every row, and "
                   "computes the weights again.");
  }
  if (hybrid && fused)
    page.paragraph("Hybrid and fused share their forward kernel: their outputs are " +
                   verdict(lesson.forward_identical, "identical, bit for bit", "NOT identical") +
                   format(". They keep the same, but on the way back hybrid holds whole blocks of weights "
                          "for a while: peak %s against %s.",
                          size_text(hybrid->peak()).c_str(), size_text(fused->peak()).c_str()));
}

std::string bar(double part, double whole, const char* style) {
  return part < 0.015 * whole || whole <= 0
             ? ""
             : format("<span class=\"bar %s\" style=\"width:%.0fpx\"></span>", style, 70 * part / whole);
}

void write_listings(Page& page, const Lesson& lesson) {
  page.heading("tapes", "What is on the tape");
  page.paragraph(
      "A tape is the list of ops that ran, in order. Backward plays it from the bottom up, and each op hands "
      "back the gradient of its inputs from what it kept. "
      "<i>New</i> counts only the storage that no earlier op keeps already; a dash stands for nothing, or "
      "less than 0.01 ms. Bars: time within the mode, forward and backward.");
  for (const Mode& m : lesson.modes) {
    if (!m.ran()) continue;
    double longest = 0;
    for (const hilt::NodeReport& n : m.tape) longest = std::max({longest, n.forward_ms, n.backward_ms});
    std::vector<std::vector<std::string>> rows{
        {"op", "output", "#keeps", "#of that new", "#forward", "", "#backward", ""}};
    for (std::size_t i = 0; i < std::min(m.tape.size(), kListed); ++i) {
      const hilt::NodeReport& n = m.tape[i];
      const auto bytes = [](std::size_t size) { return "#" + (size ? size_text(size) : std::string("\u2013")); };
      const auto time = [](double ms) { return "#" + (ms < 0.01 ? std::string("\u2013") : report::milliseconds(ms)); };
      rows.push_back({"<code>" + escape(n.name) + "</code>", shape_text(n.dtype, n.output), bytes(n.saved_bytes),
                      bytes(n.unique_bytes), time(n.forward_ms), bar(n.forward_ms, longest, "f"), time(n.backward_ms),
                      bar(n.backward_ms, longest, "b")});
    }
    page.table("<b>" + dot(m.name) + "</b>: " + std::to_string(m.tape.size()) + (m.tape.size() == 1 ? " op" : " ops") +
                   ", " + size_text(m.saved_bytes) + " kept" +
                   (m.tape.size() > kListed ? ", the first " + std::to_string(kListed) + " shown" : ""),
               rows);
  }
}

void write_memory_and_time(Page& page, const Lesson& lesson) {
  page.heading("memory", "Memory over time");
  page.paragraph(
      "Bytes alive at the end of each op, beyond q, k, v and the gradient of o. The level at the dashed line "
      "is what one must hold to be able to go back. "
      "Horizontal lines are the peaks of each pass, which may lie inside an op. Mind the scales: each figure "
      "has its own.");
  std::vector<std::pair<std::string, std::string>> figures;
  for (const Mode& m : lesson.modes)
    if (m.ran())
      figures.emplace_back(figure_of_live_bytes(m), "<b>" + m.name + "</b>: " + size_text(m.held_bytes) +
                                                        " between the passes, peak " + size_text(m.peak()) + ".");
  page.figures(figures);
  page.heading("time", "Where the time goes");
  std::vector<std::pair<std::string, std::string>> bars{
      {figure_of_time(lesson, true), "All modes. Each part of a bar is one op; point at it for its name."}};
  if (lesson.mode("dense") && lesson.modes.size() > 1)
    bars.emplace_back(figure_of_time(lesson, false),
                      "Without dense, on a scale of their own. A kernel of one op cannot be cut further from outside.");
  page.figures(bars);
}

std::string index_text(const Lesson& lesson, std::size_t index, std::size_t tensor) {
  const hilt::Shape& shape = (tensor < 2 ? lesson.problem.q : lesson.problem.k).shape();
  auto rest = static_cast<Index>(index);
  std::string text;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    text = std::to_string(rest % shape[axis]) + (text.empty() ? "" : ", ") + text;
    rest /= shape[axis];
  }
  return "[" + text + "]";
}

void write_agreement(Page& page, const Lesson& lesson) {
  page.heading("agreement", "Do they agree?");
  page.paragraph("The judge is " + lesson.oracle +
                 ": the definition, one pair of tokens at a time, sharing no code with what it judges. How "
                 "much error is forgivable? As much as nobody could do "
                 "without: <b>error \u2264 2 \u00d7 error of the naive formula in " +
                 std::string(name_of(lesson.problem.dtype)) + " + " + lesson.floor + "</b>. The naive formula is " +
                 lesson.naive +
                 "; the roundings, of the terms that an element is the sum of, are for where it has luck. "
                 "Both the largest error and the relative error over the whole tensor must pass.");
  std::vector<std::vector<std::string>> rows{
      {"tensor", "mode", "#largest error", "#allowed", "#at [b, t, h, d]", "#relative error", "#allowed", "verdict"}};
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    rows.push_back({std::string("<b>") + kTensors[i] + "</b>", "naive",
                    "#" + report::scientific(lesson.naive_error[i].max_abs), "#",
                    "#" + index_text(lesson, lesson.naive_error[i].worst_index, i),
                    "#" + report::scientific(lesson.naive_error[i].rel_l2), "#", "the yardstick"});
    for (const Mode& m : lesson.modes)
      if (m.ran()) {
        const Error& e = m.error[i];
        rows.push_back({"", dot(m.name), "#" + report::scientific(e.max_abs), "#" + report::scientific(e.limit),
                        "#" + index_text(lesson, e.worst_index, i), "#" + report::scientific(e.rel_l2),
                        "#" + report::scientific(e.rel_limit), verdict(e.ok)});
      }
  }
  page.table("Distance from the exact tensors", rows);
  const Mode* shown = nullptr;
  for (const Mode& m : lesson.modes)
    if (m.ran()) shown = &m;
  if (!shown) return;
  page.paragraph(
      "Where are the errors of <b>" + shown->name +
      "</b>? Each cell is a token at its place in the grid. From one shade to the next the error doubles: up "
      "to 1/32 of the limit "
      "<span class=\"shades\"><i style=\"background:var(--h0)\"></i><i style=\"background:var(--h1)\"></i><i "
      "style=\"background:var(--h2)\"></i><i style=\"background:var(--h3)\"></i><i "
      "style=\"background:var(--h4)\"></i><i style=\"background:var(--h5)\"></i></span> up to the limit; red "
      "lies beyond. The lines are the edges of the tiles the kernels work in. A mistake in how tiles are "
      "joined would show as a pattern along these lines; "
      "rounding shows as noise that ignores them.");
  std::vector<std::pair<std::string, std::string>> figures;
  for (std::size_t i = 0; i < kTensors.size(); ++i)
    figures.emplace_back(figure_of_error(lesson, *shown, i), std::string("<b>") + kTensors[i] + "</b>: largest " +
                                                                 report::scientific(shown->error[i].max_abs) + " of " +
                                                                 report::scientific(shown->error[i].limit) +
                                                                 " allowed");
  page.raw("<div class=\"quad\">\n");
  page.figures(figures);
  page.raw("</div>\n");
}

void write_scaling(Page& page, const Lesson& lesson) {
  page.heading("scaling", "How it grows");
  std::string text = "The same pattern at shorter lengths, on grids folded from them. ";
  if (const Index from = faster_from(lesson, "fused", "dense"))
    text += "Of the lengths measured, fused is faster than dense from " + std::to_string(from) + " tokens on. ";
  else if (lesson.mode("fused") && lesson.mode("dense"))
    text += "Up to the longest length, fused did not become faster than dense. ";
  if (const Index from = faster_from(lesson, "fused", "taped"))
    text += "Fused is faster than taped from " + std::to_string(from) + " on. ";
  else if (lesson.mode("fused") && lesson.mode("taped")) text += "It did not become faster than taped. ";
  page.paragraph(text);
  std::vector<std::pair<std::string, std::string>> figures;
  if (lesson.by_length.size() > 1) {
    figures.emplace_back(figure_of_time_by_length(lesson),
                         "Both scales are logarithmic: a line that rises twice as steeply grows with the "
                         "square of the length.");
    figures.emplace_back(figure_of_bytes_by_length(lesson),
                         "What the tape keeps to go back. Dense keeps a weight for every pair there is, "
                         "whatever the pattern.");
  }
  if (lesson.by_keys.size() > 1) {
    const double crossover = crossover_in_keys(lesson);
    std::string caption =
        "Segments of growing size at " + std::to_string(std::min<Index>(lesson.problem.length(), 1024)) + " tokens. ";
    if (crossover > 0) caption += format("Taped and fused cross at about <b>%.0f keys a row</b>. ", crossover);
    else if (lesson.mode("taped") && lesson.mode("fused")) caption += "Taped and fused do not cross here. ";
    figures.emplace_back(figure_of_bytes_by_keys(lesson), caption);
  }
  page.figures(figures);
  if (lesson.by_keys.size() > 1)
    page.paragraph(
        "Fused does not always save memory. For each row and head both keep q, k and v, or gathered copies "
        "of them; then an op-by-op tape keeps the weights, one number a key, and fused keeps the output and "
        "L, one number a feature "
        "and one more. With fewer keys than features (the head dim here is " +
        std::to_string(lesson.problem.dim()) + ") the weights are the smaller thing to keep.");
}

void write_orders(Page& page, const Lesson& lesson) {
  page.heading("order", "What the order does");
  const Arrangement& row = lesson.orders[0];
  page.paragraph(
      "Kernels do not compute single scores but tiles of 128 \u00d7 128: 128 queries that stand next to each "
      "other in memory against 128 keys that do. A tile costs the same whether all of its pairs "
      "attend or one of them. So it matters in which order the tokens stand. Hilbert order keeps tokens that "
      "are close on the grid close in memory, in both directions at once.");
  page.paragraph("<b>" + escape(order_verdict(lesson.orders)) + "</b> " + escape(order_and_result(lesson)));
  std::vector<std::vector<std::string>> rows{
      {"order", "#full tiles", "#partial", "#of", "#touched", "#useful pairs in them", "#against row"}};
  for (const Arrangement& a : lesson.orders) {
    const double ratio = static_cast<double>(a.stats.full + a.stats.partial) /
                         static_cast<double>(std::max<Index>(row.stats.full + row.stats.partial, 1));
    rows.push_back({a.order, "#" + std::to_string(a.stats.full), "#" + std::to_string(a.stats.partial),
                    "#" + std::to_string(a.stats.total), "#" + report::percent(a.stats.touched()),
                    "#" + report::percent(a.stats.useful()),
                    "#" + (a.order == "row" ? std::string("1")
                           : ratio < 0.995  ? "<span class=\"good\">" + format("%.2f", ratio) + "</span>"
                           : ratio > 1.005  ? "<span class=\"bad\">" + format("%.2f", ratio) + "</span>"
                                            : std::string("1"))});
  }
  page.table(
      "Score tiles that the attended set of this run touches, its tokens standing in each order. Row, snake, "
      "Morton and 8 \u00d7 16 tiles are controls.",
      rows);
  std::vector<std::pair<std::string, std::string>> figures;
  for (const Arrangement& a : lesson.orders)
    figures.emplace_back(figure_of_order(*lesson.problem.plan, example_token(*lesson.problem.plan), a),
                         "<b>" + a.order + "</b>: " + std::to_string(a.stats.full + a.stats.partial) + " of " +
                             std::to_string(a.stats.total) + " tiles, " + report::percent(a.stats.touched()));
  page.figures(figures);
  page.paragraph(
      "Left of each pair: the tokens on their grid, walked in that order; every change of tone is a new tile "
      "of 128. Outlined: the keys of token " +
      std::to_string(example_token(*lesson.problem.plan)) +
      ". The more tiles the outline "
      "cuts, the more tiles its row touches. Right: all score tiles, queries downwards, keys to the right; "
      "<span class=\"key full\">blue</span> full, <span class=\"key part\">amber</span> partial, blank "
      "skipped.");
  page.paragraph(
      "What no order can do: change how many bytes a gathered row has, or help where every tile is needed "
      "anyway, as in dense attention. On small grids with small windows Hilbert order loses, because a row "
      "of the grid "
      "is then shorter than a tile; try <code>--length 1024 --pattern neighborhood2d:7x7</code>.");
}

void write_roofline(Page& page, const Lesson& lesson) {
  page.heading("roofline", "Against the machine");
  page.paragraph(
      format("Two ceilings, both measured in this process with %d threads: copying memory, %.1f GB/s, and "
             "multiplying matrices, %.0f GFLOP/s. Left of the bend memory limits, right of it arithmetic. "
             "A point is a forward pass.",
             lesson.machine.info.threads, lesson.machine.copy_gb_s, lesson.machine.gemm_gflop_s));
  std::vector<std::vector<std::string>> rows{
      {"mode", "#products", "#bytes moved", "#FLOP a byte", "#GFLOP/s", "#of the ceiling above it"}};
  for (const Mode& m : lesson.modes) {
    if (!m.ran() || m.forward_flops == 0) continue;
    const double intensity = m.forward_flops / m.bytes_moved, speed = m.forward_flops / m.forward_ms * 1e-6;
    rows.push_back(
        {dot(m.name), "#" + report::count(m.forward_flops) + "FLOP", "#" + report::bytes(m.bytes_moved),
         format("#%.1f", intensity), format("#%.1f", speed),
         "#" + report::percent(speed / std::min(lesson.machine.gemm_gflop_s, intensity * lesson.machine.copy_gb_s))});
  }
  page.figure(figure_of_roofline(lesson),
              "Forward passes under the ceilings. More than 100 % of the left ceiling is possible: what "
              "stays in a cache need not come from memory.");
  page.table(
      "By formula, not by counter. Products: 2 m n k for each matrix product, nothing for the rest. Bytes of "
      "dense and taped: every op reads its inputs and writes its output, views nothing. Bytes of the "
      "kernels: each tile of queries reads q, "
      "writes o and L, and reads k and v of every tile it touches.",
      rows);
}

void write_formulas(Page& page, const Lesson& lesson) {
  const Problem& p = lesson.problem;
  const double size = static_cast<double>(hilt::size_of(p.dtype));
  double block = 0;
  for (Index h = 0; h < p.heads(); ++h)
    for (std::int32_t index : p.plan->tilings_of(h))
      for (const auto& g : p.plan->tilings()[static_cast<std::size_t>(index)].group)
        block += static_cast<double>(g.q.end - g.q.begin) * static_cast<double>(g.k.end - g.k.begin);
  block *= size * static_cast<double>(p.batch());
  page.heading("formulas", "The six formulas");
  page.paragraph(
      "With L = log \u2211 e<sup>S</sup>, one number a row kept from the forward pass, this is all there is "
      "to the backward pass of attention. Hybrid computes each line for whole blocks. Fused computes the "
      "same lines for one tile "
      "after the other, and never has more than a tile of P, dP or dS. Taped knows none of them: they come "
      "out of the ops' own gradients.");
  std::vector<std::vector<std::string>> rows{
      {"formula", "which is", "#whole buffer", "the line of hybrid, in <code>ops/hilbert/modes.cpp</code>"}};
  for (const Formula& f : kFormulas) {
    const SourceLine line = source_line(f.marker);
    std::string code = line.text.substr(0, line.text.find("//"));
    code.erase(code.find_last_not_of(' ') + 1);
    const std::string buffer = f.buffer;
    rows.push_back(
        {f.formula, std::string("~") + f.what,
         "#" + report::bytes(buffer == "scores" ? block : static_cast<double>((buffer == "q" ? p.q : p.k).bytes())),
         "~" + std::to_string(line.number) + ": <code>" + escape(code) + "</code>"});
  }
  page.table(
      "P, dP and dS have one number for each pair of a block: taped keeps P between the passes, hybrid makes "
      "all three anew, fused a tile at a time.",
      rows);
  if (const SourceLine line = source_line(kFusedMarker); line.number)
    page.paragraph("Fused calls its kernel in line " + std::to_string(line.number) + ": <code>" + escape(line.text) +
                   "</code>");
}

void write_method(Page& page, const Lesson& lesson) {
  const Settings& s = lesson.settings;
  const hilt::Info& i = lesson.machine.info;
  page.heading("method", "How this was measured");
  std::string command = "compare_gradients";
  const Settings usual;
  const auto add = [&](const char* option, const std::string& value, const std::string& otherwise) {
    if (value != otherwise) command += std::string(" ") + option + " " + value;
  };
  add("--batch", std::to_string(s.batch), std::to_string(usual.batch)),
      add("--length", std::to_string(s.length), std::to_string(usual.length));
  add("--heads", std::to_string(s.heads), std::to_string(usual.heads)),
      add("--kv-heads", std::to_string(s.kv_heads), std::to_string(usual.kv_heads));
  add("--head-dim", std::to_string(s.head_dim), std::to_string(usual.head_dim)), add("--order", s.order, usual.order),
      add("--pattern", s.pattern, usual.pattern);
  add("--dilation-mode", s.dilation_mode, usual.dilation_mode), add("--causal", s.causal, usual.causal),
      add("--dtype", s.dtype, usual.dtype);
  add("--dropout", format("%g", s.dropout), "0"), add("--seed", std::to_string(s.seed), std::to_string(usual.seed)),
      add("--repeat", std::to_string(s.repeat), std::to_string(usual.repeat));
  page.raw("<pre class=\"wrap\">" + escape(command) + "</pre>\n");
  page.paragraph("Modes take turns, so that a slow moment of the machine hits all of them; times are medians of " +
                 std::to_string(s.repeat) +
                 " runs. Memory is counted by the library's own storage counters, exactly. q, k, v and the gradient of "
                 "o are standard normal, seed " +
                 std::to_string(s.seed) + ". Everything on this page took " + format("%.1f s.", lesson.seconds));
  page.paragraph("Hilt " + escape(i.version) + " (" + escape(i.build_type) + ", " + escape(i.compiler) + "), " +
                 escape(i.devices.empty() ? "" : i.devices[0]) + ", " + std::to_string(i.threads) + " threads, " +
                 escape(i.isa_active) + " kernels, products by " + escape(i.blas) + ".");
  page.paragraph(
      "<code>compare.json</code> beside this page holds the numbers, <code>trace.json</code> the timeline "
      "for chrome://tracing or Perfetto.");
}

}  // namespace

std::string to_html(const Lesson& lesson) {
  const hilt::PlanSpec& spec = lesson.problem.plan->spec();
  Page page("One attention, and the ways to its gradient",
            escape(sizes_text(lesson)) + " \u00b7 order <code>" + escape(hilt::to_string(spec.order)) +
                "</code> \u00b7 pattern <code>" + escape(hilt::to_string(spec.pattern)) + "</code> \u00b7 causal " +
                std::string(name_of(spec.causality)) + " \u00b7 up to " + std::to_string(lesson.longest_row) +
                " keys a row");
  write_opening(page, lesson);
  write_bill(page, lesson);
  write_listings(page, lesson);
  write_memory_and_time(page, lesson);
  write_agreement(page, lesson);
  write_scaling(page, lesson);
  write_orders(page, lesson);
  write_roofline(page, lesson);
  write_formulas(page, lesson);
  write_method(page, lesson);
  return page.str();
}

}  // namespace compare
