#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Private to examples/: the command line of a program, and the same keys in an INI file.

namespace program {

/// The options of one program, each bound to a variable, its default. --help shows them all;
/// --config FILE reads `key = value` lines, which the command line overrides; --print-config writes
/// such a file; --debug is for finding our bugs.
class Options {
 public:
  using Text = const std::string&;
  using Texts = std::vector<std::string>;
  Options(Text program, Text what_it_does);
  ~Options();
  Options(Options&&) = delete;  // nor copied

  /// What the options that follow have in common, a heading of --help; see Value.
  void group(Text heading);

  void flag(Text name, bool& value, Text help);
  void integer(Text name, std::int64_t& value, std::int64_t low, std::int64_t high, Text help);
  void number(Text name, double& value, double low, double high, Text help);
  void number(Text name, std::optional<double>& value, double low, double high, Text help);
  /// `kind` stands for the value in --help: FILE, DIR, ORDER. What it means the program checks.
  void text(Text name, std::string& value, Text kind, Text help);
  /// A text whose value may be left out: then it is `implied`.
  void text_or(Text implied, Text name, std::string& value, Text kind, Text help);
  void choice(Text name, std::string& value, const Texts& names, Text help);
  /// Some of `names`, with commas between them.
  void list(Text name, Texts& value, const Texts& names, Text help);

  /// Calls f once all values are known, before they are used or printed: for defaults that follow
  /// from other options. f may set() those that were not given().
  void then(std::function<void()> f);
  /// `where` the value comes from, for an error.
  void set(Text name, Text value, Text where = "");

  /// False if all is done: what was asked is printed, or without --ranks another rank works.
  bool parse(int argc, char** argv);
  bool given(Text name) const;
  struct Value {
    std::string key, value;
    bool is_text;               // or a number, true or false
    std::string group, preset;  // preset: the default
  };
  /// Every option but --help and those that parse() adds, in the order they were added.
  std::vector<Value> values() const;
  /// The words that were given, after those of the program.
  std::string command(Text program) const;

 private:
  struct Parser;  // the library behind it is slow to compile: options.cpp alone sees it
  std::unique_ptr<Parser> parser_;
};

}  // namespace program
