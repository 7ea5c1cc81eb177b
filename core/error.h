#pragma once
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace [[gnu::visibility("default")]] hilt {

/// What went wrong, in kind. The values are also the exit codes of our programs and never change.
enum class Code : int {
  usage = 2,         // an argument: a shape, a type, an option
  data = 3,          // a file or its content
  memory = 4,        // out of memory
  gpu = 5,           // no usable GPU, or it failed
  distributed = 6,   // a rank or a link between ranks
  not_a_number = 7,  // a loss or gradient stopped being finite
  internal = 70,     // a bug of ours
};

/// Every failure of this library. The message: the op, what it expected, what came, what to do.
class Error : public std::runtime_error {
 public:
  /// NUL bytes in the text are written out: what() ends at one.
  Error(Code code, std::string text) : std::runtime_error(without_nul(std::move(text))), code_(code) {}
  Code code() const noexcept { return code_; }

 private:
  static std::string without_nul(std::string text) {  // what() ends at one
    for (std::size_t at; (at = text.find('\0')) != text.npos;) text.replace(at, 1, "\\x00");
    return text;
  }
  Code code_;
};

/// Where all text of ours is made: the same whatever the global locale, which is the program's.
struct TextStream : std::ostringstream {
  TextStream() { imbue(std::locale::classic()); }
};

/// Throws Error(code), the parts put together as text.
template <class... Parts> [[noreturn, gnu::cold, gnu::noinline]] void fail_with(Code code, const Parts&... parts) {
  TextStream text;
  (text << ... << parts);
  throw Error(code, std::move(text).str());
}

/// Throws Code::usage, the parts put together as text.
template <class... Parts> [[noreturn]] void fail(const Parts&... parts) { fail_with(Code::usage, parts...); }

/// Precondition of a public function. The parts are formatted only when the check fails.
template <class... Parts> void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail_with(Code::usage, parts...);
}

}  // namespace hilt
