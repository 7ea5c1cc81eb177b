#pragma once
#include <ostream>

namespace [[gnu::visibility("default")]] hilt {

/// Where memory lives and kernels run.
struct Device {
  enum class Kind : unsigned char { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  bool is_cpu() const { return kind == Kind::cpu; }
  bool is_cuda() const { return kind == Kind::cuda; }
  friend bool operator==(const Device&, const Device&) = default;
  friend std::ostream& operator<<(std::ostream& os, const Device& d) {
    return d.is_cpu() ? os << "cpu" : os << "cuda:" << d.index;
  }
};

}  // namespace hilt
