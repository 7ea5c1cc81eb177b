// JSON that strangers wrote: the file, the syntax, and that a key holds what is expected there.
#include "json_file.h"
#include "file.h"

namespace train {

using namespace hilt;

std::string content_of(const std::string& path, const char* option) {
  constexpr Index kMost = Index{1} << 30;
  const File file(path, option);
  if (file.size() > kMost) file.bad("has ", file.size(), " bytes; at most ", kMost, " are read");
  std::string content(static_cast<std::size_t>(file.size()), '\0');
  file.read(0, content);
  return content;
}

json read_json(std::string_view text, const std::string& what) try {
  return json::parse(text, [&](int depth, json::parse_event_t, json&) {
    return depth < 16 ? true : (fail_with(Code::data, what, ": nested more than 16 deep"), false);
  });
} catch (const json::parse_error& e) {
  fail_with(Code::data, what, ": not JSON at byte ", std::max<std::size_t>(e.byte, 1) - 1);
} catch (const json::exception&) { fail_with(Code::data, what, ": a number in it is out of range"); }

const json& member(const json& in, const char* key, json::value_t kind, const std::string& what) {
  const bool there = in.is_object() && in.contains(key);
  if (there && in[key].type() == kind) return in[key];
  fail_with(Code::data, what, ": '", key, "' should be of type ",
            kind == json::value_t::number_unsigned ? "whole number" : json(kind).type_name(), ", is ",
            there ? shown(in[key].dump()) : "missing");
}

}  // namespace train
