#pragma once
#include "plan.h"

// Private to plan/: what a plan makes of its documents.

namespace hilt {

/// Throws unless documents fit rows, order and pattern; looks_at_grid: a branch that does, or null.
void check_documents(const PlanSpec& spec, const Branch* looks_at_grid);

/// A document, which of its tokens ask where not all do, and where its like lie.
struct PlacedDocument {
  Document document;
  std::optional<std::vector<std::int32_t>> queries;
  Tiling::Places places;
};
std::vector<PlacedDocument> placed_documents(const PlanSpec& spec);

/// The parts of a plan of documents as tilings of whole rows: one for each row that has a list.
std::vector<PlanPart> whole_rows(const Plan& plan);

}  // namespace hilt
