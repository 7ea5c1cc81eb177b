#pragma once
#include <cstdint>
#include "error.h"

// Arithmetic on sizes. Numbers that come from a user or a file may be anything: overflow is an
// error, not a wrap.

namespace [[gnu::visibility("default")]] hilt {

template <class... Parts> std::int64_t checked_mul(std::int64_t a, std::int64_t b, const Parts&... what) {
  std::int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r)) [[unlikely]]
    fail(what..., ": ", a, " x ", b, " overflows 64 bits");
  return r;
}

template <class... Parts> std::int64_t checked_add(std::int64_t a, std::int64_t b, const Parts&... what) {
  std::int64_t r = 0;
  if (__builtin_add_overflow(a, b, &r)) [[unlikely]]
    fail(what..., ": ", a, " + ", b, " overflows 64 bits");
  return r;
}

}  // namespace hilt
