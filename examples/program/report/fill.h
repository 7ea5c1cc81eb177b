#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

// Private to examples/: a page from its template, which has all markup, and the program's JSON.

namespace report {

using Json = nlohmann::ordered_json;

/// The template with its tags replaced. A path is a.b.c, looked for in the innermost object first;
/// list.0 is its first element, {{.}} the thing itself:
///     {{path}}                a value, its first 5,000 bytes; markup in it becomes text. {{path|unit}}: a number as
///                             bytes, ms, percent, sci (scientific), count, flops, f0 .. f9 (decimals)
///     {{#path}} .. {{/path}}  once for each element of a list, or once inside what is there,
///                             unless false or empty
///     {{^path}} .. {{/path}}  where the list is empty or the value false, null, 0, "" or missing
///     {{{}}}                  the data but its member `shown`, as JSON inside a <script>
/// Throws where a path that is to be printed is not in the data.
std::string fill(std::string_view page, const Json& data);

/// JSON has no infinity: a number that is not finite is null, and printed as a dash.
Json number(double x);

}  // namespace report
