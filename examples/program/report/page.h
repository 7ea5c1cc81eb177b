#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

// Private to examples/: a page is a template, which has all markup, and the program's JSON.
// figures.js fills the one from the other in the reader's browser.

namespace report {

using Json = nlohmann::ordered_json;

/// The template with the data, as JSON inside a <script>, where it says {{{}}}.
std::string page(std::string_view text, const Json& data);

/// JSON has no infinity: a number that is not finite is null, and shown as a dash.
Json number(double x);

}  // namespace report
