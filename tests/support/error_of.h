#pragma once
#include <string>
#include "core/error.h"

namespace hilt {

/// What f throws as "kind: message", to be compared whole: the message is part of the interface.
/// "nothing" if it returns.
template <class F> std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    const char* kind = "unknown";
    switch (e.code()) {
      case Code::usage: kind = "usage"; break;
      case Code::data: kind = "data"; break;
      case Code::memory: kind = "memory"; break;
      case Code::gpu: kind = "gpu"; break;
      case Code::distributed: kind = "distributed"; break;
      case Code::not_a_number: kind = "not_a_number"; break;
      case Code::internal: kind = "internal"; break;
    }
    return std::string(kind) + ": " + e.what();
  } catch (const std::exception& e) { return std::string("not an hilt::Error: ") + e.what(); }
  return "nothing";
}

}  // namespace hilt
