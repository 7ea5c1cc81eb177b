// Learning rates by name, checked, as closed formulas of the step.
#include "nn/schedule.h"
#include <algorithm>
#include <cmath>
#include <numbers>
#include "core/io/text.h"

namespace hilt {

constexpr std::array<std::string_view, 4> kKinds{"constant", "linear", "cosine", "wsd"};
constexpr Index kDecayShare = 5;  // wsd decays over a fifth of the run unless told

Schedule::Kind parse_schedule(std::string_view text) { return Schedule::Kind(find_name("schedule", text, kKinds)); }
std::string_view name_of(Schedule::Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

void check_schedule(const Schedule& s) {
  check(s.steps >= 1, "schedule: steps ", s.steps, " must be at least 1");
  check(s.warmup >= 0 && s.warmup <= s.steps, "schedule: warmup ", s.warmup, " must be 0..", s.steps,
        ", the number of steps");
  check(s.decay >= 0 && s.decay <= s.steps - s.warmup, "schedule: decay ", s.decay, " must be 0..", s.steps - s.warmup,
        ", the steps after warm-up");
  check(std::isfinite(s.peak) && s.peak > 0, "schedule: peak ", s.peak, " must be positive");
  check(s.floor >= 0 && s.floor <= s.peak, "schedule: floor ", s.floor, " must be 0..", s.peak, ", the peak");
}

double Schedule::operator()(Index step) const {
  check_schedule(*this);
  check(step >= 0, "schedule: step ", step, " must not be negative");
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (kind == Kind::constant) return peak;
  const Index falls = kind != Kind::wsd ? steps - warmup
                      : decay > 0       ? decay
                                        : std::min(std::max<Index>(1, steps / kDecayShare), steps - warmup);
  const Index begin = steps - falls;
  if (step >= steps) return floor;
  if (step < begin) return peak;
  const double u = static_cast<double>(step - begin) / static_cast<double>(falls);
  if (kind == Kind::cosine) return floor + (peak - floor) * (1 + std::cos(std::numbers::pi * u)) / 2;
  return peak + (floor - peak) * u;
}

}  // namespace hilt
