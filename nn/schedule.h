#pragma once
#include <string_view>
#include "../core/shape.h"

namespace [[gnu::visibility("default")]] hilt {

/// Learning rate as a pure function of the step, counted from 0. All begin with `warmup` steps that
/// rise linearly from peak / warmup to peak; then, over the rest of `steps` with u running from 0
/// to 1:
///   constant   peak
///   linear     peak + (floor - peak) u
///   cosine     floor + (peak - floor) (1 + cos(pi u)) / 2
///   wsd        peak, and over the last `decay` steps linearly to floor (warm-up, stable, decay)
/// From `steps` on: floor (constant: peak).
struct Schedule {
  enum class Kind : unsigned char { constant, linear, cosine, wsd };  // the shapes above
  Kind kind = Kind::cosine;
  double peak = 1e-3, floor = 0;   // highest and lowest rate
  Index steps = 1000, warmup = 0;  // of the run, and those that warm up
  Index decay = 0;                 // of wsd; 0: a fifth of steps

  double operator()(Index step) const;  // the rate at this step
  friend bool operator==(const Schedule&, const Schedule&) = default;
};
Schedule::Kind parse_schedule(std::string_view text);
std::string_view name_of(Schedule::Kind kind);
/// Throws Code::usage: negative counts, a peak not above 0, a warm-up or floor beyond its bounds.
void check_schedule(const Schedule& schedule);

}  // namespace hilt
