// Templates: the text between tags is copied, a tag is looked up in the data.
#include "fill.h"
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>
#include "text.h"

namespace report {
namespace {

using Scopes = std::vector<const Json*>;    // innermost last
constexpr std::size_t kMostPrinted = 5000;  // bytes of one value

const Json* find(const Scopes& scopes, std::string_view path) {
  if (path == ".") return scopes.back();
  const auto named = [](const Json& value, std::string_view name) -> const Json* {
    if (value.is_array() && name == "0" && !value.empty()) return &value[0];
    const auto found = value.is_object() ? value.find(std::string(name)) : value.end();
    return found == value.end() ? nullptr : &*found;
  };
  const Json* value = nullptr;
  for (auto scope = scopes.rbegin(); scope != scopes.rend() && !value; ++scope)
    if ((*scope)->is_object()) value = named(**scope, path.substr(0, path.find('.')));
  for (auto dot = path.find('.'); dot != path.npos && value; dot = path.find('.')) {
    path.remove_prefix(dot + 1);
    value = named(*value, path.substr(0, path.find('.')));
  }
  return value;
}

bool holds(const Json* value) {
  if (!value || value->is_null() || *value == Json(false) || *value == Json("")) return false;
  if (value->is_number()) return value->get<double>() != 0;
  return value->is_primitive() || !value->empty();
}

std::string in_unit(double x, std::string_view unit, std::string_view tag) {
  if (unit == "bytes") return bytes(x);
  if (unit == "ms") return milliseconds(x);
  if (unit == "percent") return percent(x);
  if (unit == "sci") return scientific(x);
  if (unit == "count") return count(x);
  if (unit == "flops") return flops(x);
  if (unit.size() == 2 && unit[0] == 'f') return format("%.*f", unit[1] - '0', x);
  throw std::logic_error("template: no unit as in {{" + std::string(tag) + "}}");
}

std::string printed(const Scopes& scopes, std::string_view tag) {
  const auto bar = tag.find('|');
  const Json* value = find(scopes, tag.substr(0, bar));
  if (!value) throw std::logic_error("template: {{" + std::string(tag) + "}} is not in the data");
  if (value->is_null()) return "\u2013";
  std::string text;
  if (value->is_string()) text = value->get<std::string>();
  else if (value->is_number() && bar != tag.npos) text = in_unit(value->get<double>(), tag.substr(bar + 1), tag);
  else text = value->is_number_float() ? format("%.4g", value->get<double>()) : value->dump();
  if (text.size() > kMostPrinted) {
    std::size_t end = kMostPrinted;
    while ((text[end] & 0xc0) == 0x80) --end;  // not inside a character
    text = text.substr(0, end) + " .. " + count(static_cast<double>(text.size() - end)) + "B more";
  }
  if (bar == tag.npos) return escape(text);
  for (auto space = text.find(' '); space != text.npos; space = text.find(' ')) text.replace(space, 1, "\u00a0");
  return escape(text);  // a number and its unit stay on one line
}

std::string as_script(Json data) {
  data.erase("shown");
  std::string text = data.dump(-1, ' ', false, Json::error_handler_t::replace);
  for (auto at = text.find('<'); at != text.npos; at = text.find('<', at)) text.replace(at, 1, "\\u003c");
  return text;
}

/// Fills up to the end of the section `name` (empty: of the page) and takes that off `page`.
void fill_section(std::string_view& page, std::string_view name, Scopes& scopes, bool shown, std::string& out) {
  for (;;) {
    const auto open = page.find("{{");
    if (shown) out += page.substr(0, open);
    if (open == page.npos && name.empty()) return;
    const auto close = open == page.npos ? open : page.find("}}", open);
    if (close == page.npos) throw std::logic_error("template: {{#" + std::string(name) + "}} does not end");
    const std::string_view tag = page.substr(open + 2, close - open - 2);
    page.remove_prefix(close + 2);
    if (tag == "{") {
      page.remove_prefix(1);
      if (shown) out += as_script(*scopes.front());
    } else if (tag.starts_with('/')) {
      if (tag.substr(1) != name) throw std::logic_error("template: {{" + std::string(tag) + "}} ends another section");
      return;
    } else if (tag.starts_with('#') || tag.starts_with('^')) {
      const Json* value = shown ? find(scopes, tag.substr(1)) : nullptr;
      const bool inside = shown && holds(value) == (tag[0] == '#');
      const std::string_view section = page;
      const std::size_t turns = inside && tag[0] == '#' && value->is_array() ? value->size() : 1;
      for (std::size_t i = 0; i < turns; ++i) {
        page = section;
        if (inside && tag[0] == '#') scopes.push_back(value->is_array() ? &(*value)[i] : value);
        fill_section(page, tag.substr(1), scopes, inside, out);
        if (inside && tag[0] == '#') scopes.pop_back();
      }
    } else if (shown) {
      out += printed(scopes, tag);
    }
  }
}

}  // namespace

Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

std::string fill(std::string_view page, const Json& data) {
  std::string out;
  Scopes scopes{&data};
  fill_section(page, "", scopes, true, out);
  return out;
}

}  // namespace report
