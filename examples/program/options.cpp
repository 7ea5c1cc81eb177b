// Options bound to variables, over CLI11: ranges, proposals for misspelt names, the same in a file.
#include "program.h"
#include <CLI/CLI.hpp>
#include <hilt/core/io/text.h>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>

namespace program {
using namespace hilt;
namespace {

/// "; did you mean ..?", or nothing.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& names, std::string_view prefix = "") {
  const std::vector<std::string_view> views(names.begin(), names.end());
  return hilt::did_you_mean(name, views, prefix);
}

template <class T> std::string shortest(T value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return std::string(text, end);
}

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == text.npos ? "" : text.substr(first, last - first + 1);
}

/// A value as read_config() takes it back: in quotes, with \\, \" and \n for what they hide, where
/// it begins or ends with a blank or a quote or goes over lines.
std::string quoted(const std::string& value) {
  if (value == trimmed(value) && !value.starts_with('"') && value.find('\n') == value.npos) return value;
  std::string out = "\"";
  for (const char c : value)
    out += c == '\n' ? "\\n" : c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
  return out + '"';
}

std::string unquoted(const std::string& text, const std::string& where) {
  if (!text.starts_with('"')) return text;
  std::string out;
  std::size_t at = 1;
  for (; at < text.size() && text[at] != '"'; ++at) {
    const bool escaped = text[at] == '\\' && ++at < text.size();
    if (at < text.size()) out += escaped && text[at] == 'n' ? '\n' : text[at];
  }
  if (at + 1 != text.size())
    fail_with(Code::data, "--config: ", brief(text), ": a quote that is not closed at its end, ", where);
  return out;
}

template <class T> std::string range_of(T low, T high) { return shortest(low) + ".." + shortest(high); }

/// Reads numbers of this range into a value.
template <class T, class Value> auto reader(T low, T high, Value& value) {
  return [=, &value](const std::string& text) {
    T read{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), read);
    if (text.empty() || end != text.data() + text.size() || error == std::errc::invalid_argument)
      fail("'", brief(text), "' is not a ", std::is_integral_v<T> ? "whole " : "", "number");
    if (error == std::errc::result_out_of_range || !(read >= low && read <= high)) fail("must be ", low, "..", high);
    value = read;
  };
}

const std::string& one_of(const std::string& text, const std::vector<std::string>& names) {
  const auto found = std::ranges::find(names, text);
  if (found == names.end()) fail("must be one of ", joined(names, ", "), did_you_mean(text, names));
  return *found;
}

constexpr std::size_t kHelp = 50;  // columns beside the names of the options

struct Entry : Options::Value {
  std::string name{};
  CLI::Option* option = nullptr;
  std::function<void(const std::string&)> set{};  // throws what is wrong with the value, without naming the option
  std::function<std::string()> get{};
  bool from_file = false;
};

}  // namespace

struct Options::Parser {
  CLI::App app;
  std::vector<Entry> entries;
  std::string config, group;
  bool print_config = false;
  std::function<void()> then;
  std::map<std::string, std::string> gone;  // what to use instead

  explicit Parser(const std::string& program, const std::string& what_it_does) : app(what_it_does, program) {
    app.set_help_flag("-h,--help", "Print this and exit");
    app.get_formatter()->column_width(28);
    app.allow_extras();
  }

  /// Without a kind of value it is a flag.
  void add(const std::string& name, const std::string& kind, const std::string& help,
           std::function<void(const std::string&)> set, std::function<std::string()> get, bool is_text = true) {
    const auto known = [](const CLI::results_t&) { return true; };  // what is said is read when all is known
    CLI::Option* const option =
        kind.empty() ? app.add_flag(name) : app.add_option(name, known)->type_name(kind)->take_last();
    option->description(wrapped(help, kHelp));
    if (!group.empty()) option->group(group);
    entries.push_back({{name.substr(2), "", is_text, group, ""}, name, option, std::move(set), std::move(get)});
  }

  Entry* find(const std::string& name) {
    const auto found = std::ranges::find(entries, name, &Entry::name);
    return found == entries.end() ? nullptr : &*found;
  }

  std::string suggestion(const std::string& unknown) const {
    if (const auto found = gone.find(unknown); found != gone.end()) return "; " + found->second;
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options())
      if (const std::string name = option->get_name(); name.starts_with("--")) names.push_back(name.substr(2));
    const std::string typed = unknown.substr(std::min(unknown.find_first_not_of('-'), unknown.size()));
    const std::string near = did_you_mean(typed, names, "--");
    return near + (near.empty() ? "; " : " ") + "--help lists all";
  }

  void set(Entry& e, const std::string& value, const std::string& where) const try {
    if (const auto found = gone.find(e.name + ' ' + value); found != gone.end()) fail(found->second);
    check(value.find('\0') == value.npos, "a byte 0 is no text");
    e.set(value);
  } catch (const Error& error) {
    const std::string reason = error.what();
    const auto advice = std::min(reason.find("; "), reason.size());  // what went wrong, where, then what to try
    fail_with(error.code(), e.name, " (", brief(value), "): ", reason.substr(0, advice),
              where.empty() ? "" : ", " + where, reason.substr(advice));
  }

  void read_config();
};

// Lines of `key = value`; # and ; open comments, [sections] are for the eye.
void Options::Parser::read_config() {
  constexpr std::uintmax_t kMost = 1 << 20;
  const auto refuse = [&](const std::string& why) {
    fail_with(Code::data, "--config (", config, "): ", why, "; name an INI file, as --print-config writes it");
  };
  std::error_code error;
  const auto status = std::filesystem::status(config, error);  // first: a pipe may have nobody at its other end
  if (error) refuse(error.message());
  if (!std::filesystem::is_regular_file(status))
    refuse(std::filesystem::is_directory(status) ? "a directory" : "not a regular file");
  if (std::filesystem::file_size(config, error) > kMost) refuse("larger than " + std::to_string(kMost) + " bytes");
  std::ifstream file(config);
  if (!file) refuse(std::strerror(errno));
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (number == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);  // a byte order mark
    const std::string text = trimmed(line), where = config + ":" + std::to_string(number);
    if (text.find('\0') != text.npos)
      fail_with(Code::data, "--config: '", brief(text), "': a byte 0 is no text, ", where);
    if (text.empty() || text[0] == '#' || text[0] == ';' || text[0] == '[') continue;
    const auto equals = text.find('=');
    if (equals == text.npos) fail_with(Code::data, "--config: '", brief(text), "': expected key = value, ", where);
    const std::string key = trimmed(text.substr(0, equals));
    Entry* const e = find("--" + key);
    if (!e) fail("'", brief(key), "': no such key, ", where, suggestion("--" + key));
    if (e->from_file) fail("'", key, "': given twice, ", where, "; leave one out");
    set(*e, unquoted(trimmed(text.substr(equals + 1)), where), where);
    e->from_file = true;
  }
}

Options::Options(const std::string& program, const std::string& does) : parser_(new Parser(program, does)) {}
Options::~Options() = default;
void Options::group(Text heading) { parser_->group = heading; }
void Options::gone(Text what, Text instead) { parser_->gone[what] = instead; }
void Options::then(std::function<void()> f) { parser_->then = std::move(f); }

void Options::flag(Text name, bool& value, Text help) {
  const auto set = [&value](const std::string& text) { value = one_of(text, {"true", "false"}) == "true"; };
  const auto get = [&value] { return std::string(value ? "true" : "false"); };
  parser_->add(name, "", help, set, get, false);
}

void Options::integer(Text name, std::int64_t& value, std::int64_t low, std::int64_t high, Text help) {
  const bool optional = value < low;  // until it is given there is none
  const std::string preset = optional ? "" : "; default " + shortest(value);
  const auto get = [=, &value] { return value < low ? "" : shortest(value); };
  parser_->add(name, "N", help + " (" + range_of(low, high) + preset + ")", reader(low, high, value), get, optional);
}

void Options::number(Text name, double& value, double low, double high, Text help) {
  const std::string range = range_of(low, high) + "; default " + shortest(value);
  const auto get = [&value] { return shortest(value); };
  parser_->add(name, "X", help + " (" + range + ")", reader(low, high, value), get, false);
}

void Options::number(Text name, std::optional<double>& value, double low, double high, Text help) {
  parser_->add(name, "X", help, reader(low, high, value), [&value] { return value ? shortest(*value) : ""; });
}

void Options::text(Text name, std::string& value, Text kind, Text help) {
  const auto set = [&value](const std::string& text) {
    check(!text.empty(), "needs a value");
    value = text;
  };
  parser_->add(name, kind, help + (value.empty() ? "" : " (default " + value + ")"), set, [&value] { return value; });
}

void Options::text_or(Text implied, Text name, std::string& value, Text kind, Text help) {
  text(name, value, kind, help);
  parser_->entries.back().option->expected(0, 1)->default_str(implied);
}

void Options::choice(Text name, std::string& value, const Texts& names, Text help) {
  const auto set = [names, &value](const std::string& text) { value = one_of(text, names); };
  parser_->add(name, "NAME", help + " (" + joined(names, ", ") + "; default " + value + ")", set,
               [&value] { return value; });
}

void Options::list(Text name, Texts& value, const Texts& names, Text help) {
  const auto set = [names, &value](const std::string& text) {
    std::vector<std::string> words;
    for (const std::string_view word : split_text(text, ',')) words.push_back(one_of(std::string(word), names));
    value = words;
  };
  parser_->add(name, "NAMES", help + " (some of " + joined(names, ",") + "; default " + joined(value, ",") + ")", set,
               [&value] { return joined(value, ","); });
}

bool Options::parse(int argc, char** argv) {
  for (Entry& e : parser_->entries) e.preset = e.get();
  CLI::App& app = parser_->app;
  app.add_option("--config", parser_->config, "Read options from an INI file")->type_name("FILE");
  app.add_flag("--print-config", parser_->print_config, "Print all options as an INI file and exit");
  app.add_flag("--debug")->description(
      wrapped("After an error, print the stack of where it was thrown; unfinished files stay", kHelp));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ArgumentMismatch& e) {
    const std::string text = e.what();
    fail(text.substr(0, text.find_first_of(": ")), ": needs one value");
  } catch (const CLI::ParseError& e) { fail(e.what()); }
  if (const std::vector<std::string> unknown = app.remaining(); !unknown.empty()) {
    const std::string name = unknown[0].substr(0, unknown[0].find('='));
    fail("'", brief(name), "': no such ", name.starts_with('-') ? "option" : "argument", parser_->suggestion(name));
  }
  if (!parser_->config.empty()) parser_->read_config();
  for (Entry& e : parser_->entries)
    if (e.option->count() > 0) parser_->set(e, e.option->results().back(), "");
  for (const Entry& e : parser_->entries)
    if (e.option->count() > 1 && !std::getenv("RANK"))  // several ranks would all say so
      std::cerr << app.get_name() + ": warning: " + e.name + ": given " + std::to_string(e.option->count()) +
                       " times; the last counts: " + printable(brief(e.get())) + '\n';
  if (parser_->then) parser_->then();
  if (!is_first_started() && !parser_->find("--ranks")) return false;
  if (!parser_->print_config) return true;
  for (const auto& [key, value, is_text, group, preset] : values())
    std::cout << (value.empty() ? "# " : "") << key << " = " << quoted(value) << '\n';
  return false;
}

void Options::set(Text name, Text value, Text where) {
  Entry* const e = parser_->find(name);
  check(e, "'", name, "': no such option");
  parser_->set(*e, value, where);
}

bool Options::given(Text name) const {
  const Entry* e = parser_->find(name);
  return e && (e->option->count() > 0 || e->from_file);
}

std::string Options::command(Text program) const {
  std::string text = program;
  for (const auto& [key, value, is_text, group, preset] : values())
    if (given("--" + key)) text += " --" + key + (value == "true" ? "" : " " + value);
  return printable(text);
}

std::vector<Options::Value> Options::values() const {
  std::vector<Value> all(parser_->entries.begin(), parser_->entries.end());
  for (std::size_t i = 0; i < all.size(); ++i) all[i].value = parser_->entries[i].get();
  return all;
}

}  // namespace program
