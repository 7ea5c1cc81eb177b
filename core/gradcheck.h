#pragma once
#include "tape.h"

namespace [[gnu::visibility("default")]] hilt {

struct GradcheckOptions {                   // how gradcheck() differentiates and what it lets pass
  double step = 1e-6;                       // of the central difference
  double absolute = 1e-7, relative = 1e-6;  // passes if |analytic - numeric| <= absolute + relative |numeric|
  std::uint64_t seed = 1;                   // of the random cotangent
};

struct GradcheckResult {  // what gradcheck() found
  bool ok = true;         // every derivative passed
  Index checked = 0;      // partial derivatives compared
  double worst = 0;       // largest |analytic - numeric| / (absolute + relative |numeric|); above 1 fails
  std::string where{};    // that one: input, element, both numbers
  explicit operator bool() const { return ok; }
};

/// Compares fn's gradient with central differences, element by element, in f64 and against a random
/// cotangent (a plain sum hides errors: that of softmax(x) is constant). fn must be deterministic.
GradcheckResult gradcheck(const Composite& fn, const std::vector<Tensor>& inputs, const GradcheckOptions& options = {});

}  // namespace hilt
