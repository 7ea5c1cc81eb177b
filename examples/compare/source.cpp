// Lines of the library's source, which the build put into this program, found by what they say.
#include "source.h"
#include <algorithm>
#include <nlohmann/json.hpp>

namespace compare {
namespace {

constexpr std::string_view kSteps =
#include "steps.inc"
    ;

struct File {
  std::string_view name, text;
};
constexpr File kFiles[] = {
#include "attention_source.inc"
};

}  // namespace

report::Json steps() { return report::Json::parse(kSteps); }

report::Json source_line(const report::Json& place) {
  const std::string name = place[0], marker = place[1], then = place.size() > 2 ? place[2] : place[1];
  report::Json found;
  bool marked = false;
  const auto file = std::ranges::find(kFiles, name, &File::name);
  if (file == std::end(kFiles)) return found;
  int number = 0;
  for (std::string_view rest = file->text; !rest.empty();) {
    const auto end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    ++number;
    if (line.find(marker) != line.npos) {
      if (marked) return {};
      marked = true;
    }
    if (marked && found.is_null() && line.find(then) != line.npos) {
      std::string text(line.substr(0, line.find(" // ")));
      text.erase(text.find_last_not_of(' ') + 1).erase(0, text.find_first_not_of(' '));
      found = {{"file", name}, {"line", number}, {"code", text}};
    }
    rest.remove_prefix(end == rest.npos ? rest.size() : end + 1);
  }
  return found;
}

}  // namespace compare
