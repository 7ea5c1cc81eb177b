// Where a few heads of a model look, on a row it never saw: the weights, for the report.
#include <algorithm>
#include <cmath>

#include "run.h"

namespace train {

using hilt::Tensor;

/// 0 below 1/64, then twice as much a digit: 5 from 1/4 on.
static char digit(double weight) {
  return static_cast<char>('0' + std::clamp(static_cast<int>(std::floor(std::log2(weight + 1e-9))) + 7, 0, 5));
}

/// q, k and v of every block, [1, L, 3, heads, dim], as they go into attention.
static std::vector<Tensor> operands(const hilt::Transformer& model, const Tensor& ids) {
  std::vector<Tensor> found;
  hilt::set_op_hook([&](std::string_view, const Tensor& y) {
    if (y.rank() == 5 && y.dim(2) == 3 && y.dim(1) == ids.dim(1) && y.dim(3) == model.config.heads) found.push_back(y);
  });
  (void)model.logits(ids);
  hilt::set_op_hook({});
  return found;
}

AttentionMaps attention_maps(const hilt::Transformer& model, const Task& task, Index width) {
  constexpr Index kTokens = 48, kHeads = 4;
  const hilt::Tape::Pause pause;
  hilt::Transformer plain = model;
  plain.config.keep_order = false;  // rows are then tokens
  const Tensor ids = task.batch(Split::validation, 0, 1).inputs;
  const std::vector<Tensor> packed = operands(plain, ids);
  AttentionMaps out;
  if (packed.size() != plain.blocks.size() || packed.empty()) return out;
  const Index length = ids.dim(1), shown = std::min(length, kTokens), first = length - shown;
  // Of a board, where the middle cell looks; of a text, where each of the last tokens does.
  const Index cell = width > 0 ? length / width / 2 * width + width / 2 : -1;
  out.columns = width > 0 ? width : shown, out.rows = width > 0 ? length / width : shown, out.cell = cell;
  if (width == 0) {
    const std::vector<std::int32_t> tokens = ids.to_vector<std::int32_t>();
    out.text = task.vocabulary().decode(std::span(tokens).subspan(at(first)));
  }
  for (Index layer : {Index{0}, static_cast<Index>(packed.size()) - 1}) {
    if (layer == 0 && packed.size() == 1 && !out.maps.empty()) break;
    const hilt::HilbertSelfAttention& attention = plain.blocks[at(layer)].attention;
    const Tensor& x = packed[at(layer)];
    std::vector<Index> rows;
    for (Index t = cell < 0 ? first : cell; t < (cell < 0 ? length : cell + 1); ++t) rows.push_back(t);
    const Index key = cell < 0 ? first : 0;  // the first that is shown
    const auto found = hilt::attention_weights(hilt::select(x, 2, 0), hilt::select(x, 2, 1), attention.plan(length),
                                               rows, {.terms = hilt::fitted_terms(attention.terms, x.dtype(), length)});
    for (Index h = 0; h < std::min(x.dim(3), kHeads); ++h) {
      AttentionMap& map = out.maps.emplace_back(AttentionMap{layer + 1, h + 1, ""});
      for (const hilt::RowWeights& row : found) {
        if (row.head != h) continue;
        std::string cells(at(length - key), '.');
        for (std::size_t i = 0; i < row.keys.size(); ++i)
          if (row.keys[i] >= key) cells[at(row.keys[i] - key)] = digit(row.weights[i]);
        map.cells += cells;
      }
    }
  }
  return out;
}

}  // namespace train
