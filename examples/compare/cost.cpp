// Multiplications and bytes moved, counted from the tape's nodes or from the tiles of the plan;
// memory that a mode will need.
#include "cost.h"

namespace compare {
namespace {

bool is_view(const std::string& op) {
  for (const char* name : {"reshape", "permute", "transpose", "slice", "expand", "squeeze", "unsqueeze", "detach"})
    if (op == name) return true;
  return false;
}

}  // namespace

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

Cost cost_of_kernel(const Problem& p, const std::string& mode) {
  const double dim = static_cast<double>(p.dim()), size = static_cast<double>(hilt::size_of(p.dtype));
  double tile_pairs = 0, group_pairs = 0, rows = 0, keys_read = 0;
  const auto extent = [](const hilt::Tiling::Range& r) { return static_cast<double>(r.end - r.begin); };
  for (Index h = 0; h < p.heads(); ++h)
    for (std::int32_t index : p.plan->tilings_of(h)) {
      const hilt::Tiling& t = p.plan->tilings()[static_cast<std::size_t>(index)];
      for (const auto& g : t.group) group_pairs += extent(g.q) * extent(g.k);
      rows += static_cast<double>(t.q_token.size());
      for (std::size_t i = 0; i < t.q_tile.size(); ++i)
        for (auto e = t.keys_begin[i]; e < t.keys_begin[i + 1]; ++e) {
          const double keys = extent(t.k_tile[static_cast<std::size_t>(t.keys[static_cast<std::size_t>(e)].tile)]);
          tile_pairs += extent(t.q_tile[i]) * keys;
          keys_read += keys;
        }
    }
  const double batch = static_cast<double>(p.batch());
  return {.forward_flops = 4 * dim * batch * tile_pairs,
          .backward_flops = 10 * dim * batch * (mode == "hybrid" ? group_pairs : tile_pairs),
          .bytes_moved = size * batch * (rows * (2 * dim + 1) + keys_read * 2 * dim)};
}

std::size_t dense_peak(const Problem& p) {
  // Backward through the softmax holds P, dP and dS; the mask is one more, shared by the heads
  // where all see the same.
  constexpr std::size_t kScores = 3;
  const auto pairs = static_cast<std::size_t>(p.length()) * static_cast<std::size_t>(p.length());
  return (kScores * static_cast<std::size_t>(p.batch() * p.heads()) + p.plan->tilings().size()) * pairs *
         hilt::size_of(p.dtype);
}

}  // namespace compare
