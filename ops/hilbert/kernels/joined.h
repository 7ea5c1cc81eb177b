#pragma once
#include <span>
#include "ops/hilbert/plan/plan.h"

namespace hilt {

/// Several tilings of a part as one, for kernels that own queries: a row reads the keys of one
/// after the other, and a key stands in k_token once for each. Null where they list other queries.
const Tiling* joined_tiling(const PlanPart& part, std::span<const std::int32_t> tilings);

/// The parts of a plan; where they are documents, those of a row as one part, for GPUs, which would
/// do one after the other. Their own parts where heads merge several sets.
std::span<const PlanPart> row_parts(const Plan& plan);

}  // namespace hilt
