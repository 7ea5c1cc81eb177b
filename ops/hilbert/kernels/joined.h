#pragma once
#include <span>
#include "ops/hilbert/plan/plan.h"

namespace hilt {

/// Several tilings of a part as one for who owns queries: each row meets the keys of one after the
/// other, and a key stands in k_token once for each. Null where they do not list the same queries.
const Tiling* joined_tiling(const PlanPart& part, std::span<const std::int32_t> tilings);

}  // namespace hilt
