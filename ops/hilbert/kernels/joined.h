#pragma once
#include <span>
#include "ops/hilbert/plan/plan.h"

namespace hilt {

/// Several tilings of a part as one, for kernels that own queries: a row reads the keys of one
/// after the other, and a key stands in k_token once for each. Null where they list other queries.
const Tiling* joined_tiling(const PlanPart& part, std::span<const std::int32_t> tilings);

}  // namespace hilt
