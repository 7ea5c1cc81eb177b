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
  Options(const std::string& program, const std::string& what_it_does);
  ~Options();
  Options(Options&&) = delete;  // nor copied

  /// What the options that follow have in common, a heading of --help; see Value.
  void group(const std::string& heading);

  void flag(const std::string& name, bool& value, const std::string& help);
  void integer(const std::string& name, std::int64_t& value, std::int64_t low, std::int64_t high,
               const std::string& help);
  void number(const std::string& name, double& value, double low, double high, const std::string& help);
  void number(const std::string& name, std::optional<double>& value, double low, double high, const std::string& help);
  /// `kind` stands for the value in --help: FILE, DIR, ORDER. What it means the program checks.
  void text(const std::string& name, std::string& value, const std::string& kind, const std::string& help);
  /// A text whose value may be left out: then it is `implied`.
  void text_or(const std::string& implied, const std::string& name, std::string& value, const std::string& kind,
               const std::string& help);
  void choice(const std::string& name, std::string& value, const std::vector<std::string>& names,
              const std::string& help);
  /// Some of `names`, with commas between them.
  void list(const std::string& name, std::vector<std::string>& value, const std::vector<std::string>& names,
            const std::string& help);

  /// `--option`, or one of its values as `--option value`, is no more: whoever gives it reads
  /// `instead`.
  void gone(const std::string& what, const std::string& instead);

  /// Calls f once all values are known, before they are used or printed: for defaults that follow
  /// from other options. f may set() those that were not given().
  void then(std::function<void()> f);
  /// `where` the value comes from, for an error.
  void set(const std::string& name, const std::string& value, const std::string& where = "");

  /// False if the user asked for help or the configuration and got it.
  bool parse(int argc, char** argv);
  bool given(const std::string& name) const;
  struct Value {
    std::string key, value;
    bool is_text;               // or a number, true or false
    std::string group, preset;  // preset: the default
  };
  /// Every option but --help and those that parse() adds, in the order they were added.
  std::vector<Value> values() const;
  /// The words that were given, after those of the program.
  std::string command(const std::string& program) const;

 private:
  struct Parser;  // the library behind it is slow to compile: options.cpp alone sees it
  std::unique_ptr<Parser> parser_;
};

}  // namespace program
