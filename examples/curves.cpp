// A gallery of orders: how each walks a grid, and which tiles of scores a pattern touches in it.
// Prints the tile table.
//
//   curves --grid 64x64 --pattern window2d:16x16
//
//   order      full  partial    of all   touched  useful  jumps
//   row           0      256      1024    25.0 %  25.0 %     63
//   hilbert      64        0      1024    6.25 %   100 %      0
#include <hilt/hilt.h>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include "compare/arrangement.h"
#include "program/program.h"

using namespace hilt;
using report::format;
using report::Json;

namespace {

constexpr std::string_view kPage =
#include "curves.inc"
    ;
constexpr Index kMostListed = 4096;  // cells

struct Settings : AttentionSettings {
  Settings() { order = "hilbert", pattern = "window2d:16x16"; }
  std::string grid = "64x64", out = "out/curves";
};

/// Steps that do not go to a neighbouring cell.
Index jumps(const compare::Arrangement& a, Index width) {
  Index n = 0;
  for (std::size_t i = 1; i < a.walk.token_at.size(); ++i) {
    const Index from = a.walk.token_at[i - 1], to = a.walk.token_at[i];
    n += std::abs(from / width - to / width) + std::abs(from % width - to % width) != 1;
  }
  return n;
}

std::string page_of(const Settings& s, const Plan& plan, const std::vector<compare::Arrangement>& orders,
                    const std::string& words) {
  Json data{{"grid", s.grid}, {"pattern", to_string(plan.spec().pattern)}, {"causal", s.causal},
            {"words", words}, {"branches", plan.tilings().size() > 1},     {"orders", Json::array()}};
  for (const compare::Arrangement& a : orders) {
    Json picture = compare::picture_of(a);
    picture["jumps"] = jumps(a, plan.grid().width);
    data["orders"].insert(data["orders"].begin(), picture);  // Hilbert, the last of them, first
  }
  // What the page's own walk of any rectangle is compared with: this grid's, where it is small.
  if (plan.length() <= kMostListed) data["hilbert"] = orders.back().walk.token_at;
  for (const Grid& box : {Grid{4, 4, 4}, Grid{8, 8, 8}, Grid{12, 8, 4}}) {
    Json walk = Json::array();
    for (Index i = 0; i < box.cells(); ++i) {
      const Cell cell = hilbert_cell(box, i);
      walk.push_back({cell.x, cell.y, cell.z});
    }
    data["boxes"].push_back({{"size", {box.frames, box.height, box.width}}, {"walk", walk}});
  }
  return report::page(kPage, data);
}

int work(const program::Options&, const Settings& s) {
  constexpr Index kMost = Index{1} << 18;
  const Grid grid = program::grid_of(s.grid, kMost);
  check(grid.cells() <= kMost, "--grid (", s.grid, "): ", grid.cells(), " cells, at most ", kMost, " can be drawn");
  PlanSpec spec{.length = grid.cells(),
                .order = {.grid = grid},
                .pattern = program::pattern_of(s.pattern, grid.cells()),
                .causality = parse_causality(s.causal)};
  check(prefix_of(spec.pattern) == 0, "--pattern (", s.pattern, "): a prefix lies on no grid, and grids are drawn");
  program::Outputs outputs(s.out);
  PlanPtr plan;
  program::plan_from("", s.pattern, [&] { plan = make_plan(spec); });
  const std::vector<compare::Arrangement> orders = compare::arrangements_of(*plan);
  const std::string words =
      compare::order_verdict(orders) + (compare::order_changes_nothing(spec)
                                            ? " The set is the same in every order."
                                            : " This pattern runs along the order, and so does its set.");
  outputs.write("curves.html", page_of(s, *plan, orders, words));
  std::cout << "grid " << s.grid << ", pattern " << to_string(spec.pattern) << ", causal " << s.causal
            << "; tiles of 128 x 128 scores\n\norder      full  partial    of all   touched    useful  jumps\n";
  for (const compare::Arrangement& a : orders) std::cout << table_line(a) << format(" %6ld\n", jumps(a, grid.width));
  std::cout << '\n' << words << "\nwrote " << outputs.directory() << "/curves.html\n";
  if (std::cout.flush()) outputs.commit();  // else run() says why; nothing is left
  return 0;
}

void declare(program::Options& options, Settings& s) {
  options.text("--grid", s.grid, "HxW", "Height and width, in tokens");
  program::declare(options, s, {"pattern", "causal"});
  options.text("--out", s.out, "DIR", "Where curves.html goes");
}

}  // namespace

int main(int argc, char** argv) {
  return program::run<Settings>("curves", "How orders walk a grid, and which tiles a pattern touches in them.", argc,
                                argv, declare, work);
}
