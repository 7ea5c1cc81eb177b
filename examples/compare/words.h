#pragma once
#include <string>

#include "lesson.h"

// Private to compare_gradients: sentences that the summary and the page share. Plain text; every
// figure in them is this run's.

namespace compare {

std::string sizes_text(const Lesson& lesson);  // batch 1, length 4096 (64x64), heads 4, ..
/// Whether another order would have changed the result or only the work.
std::string order_and_result(const Lesson& lesson);
/// The first length from which `mode` is faster than `other` at all longer ones, of those measured;
/// 0 if none.
Index faster_from(const Lesson& lesson, const std::string& mode, const std::string& other);

/// Keys a row from which taped keeps more than fused, between two measured sizes; 0 if they do not
/// cross there.
double crossover_in_keys(const Lesson& lesson);

}  // namespace compare
