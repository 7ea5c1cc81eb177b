// Finds a line of ops/hilbert/attention.cpp, which the build put into this program, by what it
// says.
#include "source.h"

#include <algorithm>

namespace compare {
namespace {

constexpr std::string_view kSource =
#include "attention_source.inc"
    ;

}  // namespace

SourceLine source_line(std::string_view containing) {
  SourceLine found;
  int number = 0;
  for (std::string_view rest = kSource; !rest.empty();) {
    const auto end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    ++number;
    if (line.find(containing) != line.npos) {
      if (found.number) return {};
      found = {number, std::string(line.substr(std::min(line.find_first_not_of(' '), line.size())))};
    }
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  }
  return found;
}

}  // namespace compare
