#pragma once
#include <string>
#include <string_view>
#include <vector>
#include "curve.h"

// Documents one after the other in a row, each attended to as if it stood alone.

namespace [[gnu::visibility("default")]] hilt {

/// a sequence, or an image, of a row.
struct Document {
  Index length = 0;  // in tokens
  Grid grid{};       // without cells: a sequence, which folds

  Document(Index tokens) : length(tokens) {}                           // a sequence
  Document(const Grid& cells) : length(cells.cells()), grid(cells) {}  // an image
  bool folds() const { return grid == Grid{}; }                        // a sequence: an order makes a grid of it
  friend auto operator<=>(const Document&, const Document&) = default;
};
/// Those of one row, from its first token on; what is left of the row belongs to nobody.
using DocumentList = std::vector<Document>;

/// Reads `100,16x16,4x6x6`, lengths and grids; lists joined by `/` are rows, one list is for all.
std::vector<DocumentList> parse_documents(std::string_view text);
std::string to_string(const std::vector<DocumentList>& rows);

}  // namespace hilt
