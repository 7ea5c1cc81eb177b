// A gallery of orders: how each walks a grid, and which tiles of scores a pattern touches in it.
// Prints the tile table.
//
//   curves --grid 64x64 --pattern window2d:16x16
//
//   order      full  partial    of all   touched  useful  jumps
//   row           0      256      1024    25.0 %  25.0 %     63
//   hilbert      64        0      1024    6.25 %   100 %      0
#include <hilt/hilt.h>

#include <charconv>
#include <cstdlib>
#include <iostream>

#include "compare/arrangement.h"
#include "program/outputs.h"
#include "program/program.h"
#include "program/report/html.h"
#include "program/report/text.h"

using namespace hilt;
using report::format;

namespace {

struct Settings {
  std::string grid = "64x64", pattern = "window2d:16x16", causal = "none", out = "out/curves";
};

Grid parse_grid(const std::string& text) {
  constexpr Index kMost = Index{1} << 18;
  const std::size_t x = text.find('x');
  Grid grid;
  const auto read = [](const std::string& digits, Index& value) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    return !digits.empty() && error == std::errc{} && end == digits.data() + digits.size() && value >= 1 &&
           value <= kMost;
  };
  check(x != text.npos && read(text.substr(0, x), grid.height) && read(text.substr(x + 1), grid.width), "--grid (",
        text, "): expected HEIGHTxWIDTH, as in 64x64");
  check(grid.cells() <= kMost, "--grid (", text, "): ", grid.cells(), " cells, at most ", kMost, " can be drawn");
  return grid;
}

/// Steps that do not go to a neighbouring cell.
Index jumps(const compare::Arrangement& a, Index width) {
  Index n = 0;
  for (std::size_t i = 1; i < a.token_at.size(); ++i) {
    const Index from = a.token_at[i - 1], to = a.token_at[i];
    n += std::abs(from / width - to / width) + std::abs(from % width - to % width) != 1;
  }
  return n;
}

void print_table(const std::vector<compare::Arrangement>& orders, Index width) {
  std::cout << "order      full  partial    of all   touched    useful  jumps\n";
  for (const compare::Arrangement& a : orders)
    std::cout << format("%-8s %6lld %8lld %9lld %9s %9s %6lld\n", a.order.c_str(), static_cast<long long>(a.stats.full),
                        static_cast<long long>(a.stats.partial), static_cast<long long>(a.stats.total),
                        report::percent(a.stats.touched()).c_str(), report::percent(a.stats.useful()).c_str(),
                        static_cast<long long>(jumps(a, width)));
}

std::string page_of(const Settings& s, const Plan& plan, const std::vector<compare::Arrangement>& orders,
                    const std::string& words) {
  report::Page page("Orders of a grid", "grid " + report::escape(s.grid) + " \u00b7 pattern <code>" +
                                            report::escape(to_string(plan.spec().pattern)) + "</code> \u00b7 causal " +
                                            s.causal);
  page.paragraph(
      "An order says which token stands next to which in memory. Attention is computed in tiles: 128 queries "
      "that stand together against 128 keys that do. A tile that holds a single attending pair costs "
      "as much as a full one, so a good order for a pattern is one in which its pairs share few tiles.");
  page.paragraph("<b>" + report::escape(words) + "</b>");
  std::vector<std::vector<std::string>> rows{
      {"order", "#full tiles", "#partial", "#of", "#touched", "#useful pairs in them", "#jumps"}};
  std::vector<std::pair<std::string, std::string>> figures;
  const Index token = compare::example_token(plan);
  for (const compare::Arrangement& a : orders) {
    rows.push_back({a.order, "#" + std::to_string(a.stats.full), "#" + std::to_string(a.stats.partial),
                    "#" + std::to_string(a.stats.total), "#" + report::percent(a.stats.touched()),
                    "#" + report::percent(a.stats.useful()), "#" + std::to_string(jumps(a, plan.grid().width))});
    PlanSpec spec = plan.spec();
    spec.order.kind = compare::kOrders[&a - orders.data()];
    figures.emplace_back(compare::figure_of_order(*make_plan(spec), token, a),
                         "<b>" + a.order + "</b>: " + std::to_string(a.touched()) + " of " +
                             std::to_string(a.stats.total) + " tiles, " + report::percent(a.stats.touched()));
  }
  page.table("Tiles of 128 \u00d7 128 scores; jumps are steps to a cell that is not a neighbour.", rows);
  page.figures(figures);
  page.paragraph(
      "Left of each pair: the tokens on their grid, walked in that order; every change of tone is a new tile "
      "of 128. Outlined: the keys of token " +
      std::to_string(token) +
      ". Right: tiles of scores, queries downwards, keys to the right; <span class=\"key full\">blue</span> "
      "full, <span class=\"key part\">amber</span> partial, blank skipped." +
      (plan.tilings().size() > 1 ? " Of several branches the first is drawn; the table counts all." : ""));
  return page.str();
}

int work(const Settings& s) {
  const Grid grid = parse_grid(s.grid);
  PlanSpec spec{.length = grid.cells(),
                .order = {.grid = grid},
                .pattern = program::pattern_of(s.pattern, grid.cells()),
                .causality = parse_causality(s.causal)};
  program::Outputs outputs(s.out);
  std::vector<compare::Arrangement> orders;
  for (Order::Kind kind : compare::kOrders) {
    spec.order.kind = kind;
    orders.push_back(compare::arrangement_of(*make_plan(spec)));
  }
  const PlanPtr plan = make_plan(spec);
  const std::string words =
      compare::order_verdict(orders) + (compare::order_changes_nothing(spec)
                                            ? " The set is the same in every order."
                                            : " This pattern runs along the order: each line is another set.");
  outputs.write("curves.html", page_of(s, *plan, orders, words));
  outputs.commit();
  std::cout << "grid " << s.grid << ", pattern " << to_string(spec.pattern) << ", causal " << s.causal
            << "; tiles of 128 x 128 scores\n\n";
  print_table(orders, grid.width);
  std::cout << '\n' << words << "\nwrote " << outputs.directory() << "/curves.html\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run("curves", [&] {
    Settings settings;
    program::Options options("curves", "How orders walk a grid, and which tiles a pattern touches in them.");
    options.text("--grid", settings.grid, "HxW", "Height and width, in tokens");
    options.text("--pattern", settings.pattern, "PATTERN",
                 "dense, segment:W[,dilation=R], slide:R, neighborhood:K, window2d:HxW, slide2d:RYxRX, "
                 "neighborhood2d:KYxKX; joined by +");
    options.choice("--causal", settings.causal, {"none", "token", "curve"},
                   "Which keys are in the past: of a token, or along the curve");
    options.text("--out", settings.out, "DIR", "Where curves.html goes");
    return options.parse(argc, argv) ? work(settings) : 0;
  });
}
