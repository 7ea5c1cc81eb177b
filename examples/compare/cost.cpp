// Multiplications and bytes moved, counted from the tape's nodes or from the tiles of the plan;
// memory that a mode will need.
#include "lesson.h"

namespace compare {

bool is_view(const std::string& op) {
  constexpr const char* kViews[] = {"reshape", "permute", "transpose", "slice",
                                    "expand",  "squeeze", "unsqueeze", "detach"};
  return std::ranges::find(kViews, op) != std::end(kViews);
}

// Attention has two products: what stands between them is S, until a softmax makes it P.
std::vector<std::string> symbols_of(const std::vector<hilt::NodeReport>& tape) {
  std::vector<std::string> symbols;
  enum { before, scores, weights, after } at = before;
  for (const hilt::NodeReport& n : tape) {
    const bool product = n.name == "matmul";
    std::string symbol;
    if (n.name == "softmax" && at == scores) at = weights, symbol = "P";
    else if (n.name == "logsumexp" && at != before) symbol = "L";
    else if (product && at == weights) at = after, symbol = "O";
    else if (product) at = scores, symbol = "S";
    else if (is_view(n.name) || n.name == "contiguous") symbol = "";
    else if (at == scores) symbol = "S";
    else if (at == weights && n.name == "mul") symbol = "M P";
    symbols.push_back(symbol);
  }
  return symbols;
}

Cost cost_of_tape(const std::vector<hilt::NodeReport>& tape) {
  Cost cost;
  for (const hilt::NodeReport& node : tape) {
    if (is_view(node.name)) continue;
    const double size = static_cast<double>(hilt::size_of(node.dtype)),
                 written = static_cast<double>(node.output.numel());
    cost.bytes_moved += size * written;
    for (const hilt::Shape& input : node.inputs) cost.bytes_moved += size * static_cast<double>(input.numel());
    if (node.name == "matmul") cost.forward_flops += 2 * written * static_cast<double>(node.inputs[0][-1]);
  }
  cost.backward_flops = 2 * cost.forward_flops;
  return cost;
}

Cost cost_of_kernel(const Problem& p, const std::string& mode, int products_back) {
  const double dim = static_cast<double>(p.dim()), size = static_cast<double>(hilt::size_of(p.dtype));
  double tile_pairs = 0, group_pairs = 0, rows = 0, keys_read = 0;
  each_tiling(*p.plan, [&](const hilt::Tiling& t, double times) {
    const hilt::KernelWork work = hilt::kernel_work(t, p.q.device(), p.scored());
    group_pairs += times * static_cast<double>(hilt::group_shape(t).pairs());
    rows += times * static_cast<double>(t.q_token.size());
    tile_pairs += times * static_cast<double>(work.pairs);
    keys_read += times * static_cast<double>(work.keys);
  });
  const double batch = static_cast<double>(p.batch());
  return {.forward_flops = 4 * dim * batch * tile_pairs,
          .backward_flops = 2 * dim * batch * (mode == kHybrid ? 5 * group_pairs : products_back * tile_pairs),
          .bytes_moved = size * batch * (rows * (2 * dim + 1) + keys_read * 2 * dim)};
}

std::size_t dense_peak(const Problem& p) {
  // Backward through the softmax holds P, dP and dS; the mask is one more, shared by the heads
  // where all see the same.
  const hilt::ScoreTerms& t = p.terms;  // each makes one more
  const std::size_t scores = 3 + std::size_t{bool(t.softcap)} + (t.alibi || t.slopes) + bool(t.relative) + bool(t.bias);
  const auto pairs = at(p.length()) * at(p.length());
  return (scores * at(p.batch() * p.heads()) + p.plan->parts().at(0).tilings.size()) * pairs * hilt::size_of(p.dtype);
}

}  // namespace compare
