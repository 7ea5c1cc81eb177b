// The JSON of a page, so that no text in it ends the <script> it stands in.
#include "page.h"
#include <cmath>
#include <nlohmann/json.hpp>

namespace report {

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

std::string page(std::string_view text, const Json& data) {
  std::string json = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (auto at = json.find('<'); at != json.npos; at = json.find('<', at)) json.replace(at, 1, "\\u003c");
  constexpr std::string_view kHere = "{{{}}}";
  const std::size_t here = text.find(kHere);
  return std::string(text.substr(0, here)) + json + std::string(text.substr(here + kHere.size()));
}

}  // namespace report
