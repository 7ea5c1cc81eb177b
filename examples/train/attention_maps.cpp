// Where a few heads of a model look, on a row it never saw: the weights, for the report.
#include <set>
#include "run.h"

namespace train {

/// 0 below 1/64, then twice as much a level: 5 from 1/4 on.
static std::uint8_t level(double weight) {
  return static_cast<std::uint8_t>(std::clamp(static_cast<int>(std::floor(std::log2(weight + 1e-9))) + 7, 0, 5));
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

Json attention_maps(const hilt::Transformer& model, const Task& task, Index width) {
  constexpr Index kTokens = 32, kHeads = 4;
  const hilt::Tape::Pause pause;
  hilt::Transformer plain = model;
  plain.config.keep_order = false;  // rows are then tokens
  const Tensor ids = task.batch(Split::validation, 0, 1).inputs;
  const std::vector<Tensor> packed = operands(plain, ids);
  if (packed.size() != plain.blocks.size() || packed.empty()) return {};
  const Index length = ids.dim(1), shown = std::min(length, kTokens), first = length - shown;
  // A board shows where the middle cell looks; a text shows it for each of the last tokens.
  const Index cell = width > 0 ? length / width / 2 * width + width / 2 : -1;
  const Index columns = width > 0 ? width : shown, count = width > 0 ? length : shown * shown;
  const report::Sheet sheet({{columns, count / columns, count}});
  std::string text;
  std::vector<std::string> symbols;  // of the text, each alone
  if (width == 0)
    for (const std::int32_t id : hilt::slice(ids, 1, first, length).to_vector<std::int32_t>()) {
      text += task.vocabulary().decode({&id, 1});
      symbols.push_back(program::printable(task.vocabulary().decode({&id, 1}), "\n"));
    }
  Json maps = Json::array();
  for (const Index layer : std::set<Index>{0, std::ssize(packed) - 1}) {
    const hilt::HilbertSelfAttention& attention = plain.blocks[at(layer)].attention;
    const Tensor& x = packed[at(layer)];
    std::vector<Index> rows;
    for (Index t = cell < 0 ? first : cell; t < (cell < 0 ? length : cell + 1); ++t) rows.push_back(t);
    const Index key = cell < 0 ? first : 0;  // the first that is shown
    const auto found = hilt::attention_weights(hilt::select(x, 2, 0), hilt::select(x, 2, 1), attention.plan(length),
                                               rows, {.terms = hilt::fitted_terms(attention.terms, x.dtype(), length)});
    for (Index h = 0; h < std::min(x.dim(3), kHeads); ++h) {
      std::vector<std::uint8_t> cells(at(sheet.columns * sheet.rows), 7);  // 7: not attended
      for (const hilt::RowWeights& row : found)
        for (std::size_t i = 0; i < row.keys.size() && row.head == h; ++i) {
          if (row.keys[i] < key) continue;
          std::uint8_t& shade = cells[sheet.cell[at((row.row - rows[0]) * (length - key) + row.keys[i] - key)]];
          shade = std::max(shade == 7 ? std::uint8_t{0} : shade, level(row.weights[i]));
        }
      maps.push_back({{"layer", layer + 1}, {"head", h + 1}, {"cells", report::packed(cells)}});
    }
  }
  return {{"columns", sheet.columns},
          {"rows", sheet.rows},
          {"cell", cell < 0 ? -1 : static_cast<Index>(sheet.cell[at(cell)])},
          {"text", program::printable(text, "\n")},
          {"symbols", symbols},
          {"maps", maps}};
}

}  // namespace train
