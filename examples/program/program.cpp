// Exceptions become one line on stderr and an exit code; with --debug, a stack as well.
#include "program.h"

#include <execinfo.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <hilt/hilt.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <new>
#include <streambuf>

namespace program {
namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
std::string name;  // of this program: a terminate handler takes no argument

/// What the library repeats may be as long as a command line: words longer than the name of a file
/// are cut.
std::string short_words(const std::string& text) {
  constexpr std::size_t kName = 300;
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    const bool ends = word.ends_with(':') || word.ends_with(';');
    out += word.size() <= kName
               ? word
               : brief(word.substr(0, word.size() - ends)) + (ends ? word.substr(word.size() - 1) : "");
    if (end < text.size()) out += ' ';
    at = end + 1;
  }
  return out;
}

/// One line on stderr about the exception that is being handled; its exit status.
int report() {
  hilt::Code code = hilt::Code::internal;
  std::string text;
  try {
    throw;
  } catch (const hilt::Error& e) { code = e.code(), text = e.what(); } catch (const std::bad_alloc&) {
    code = hilt::Code::memory, text = "out of memory";
  } catch (const std::filesystem::filesystem_error& e) {  // whose paths are a user's: too long, not to be looked at
    code = hilt::Code::data, text = e.path1().string() + ": " + e.code().message();
  } catch (const std::exception& e) { text = std::string("internal: ") + e.what(); } catch (...) {
    text = "internal: an exception of unknown type";
  }
  std::replace(text.begin(), text.end(), '\n', ' ');
  text = printable(short_words(text));  // names of files, and what stands in them, are strangers'
  std::cout.flush();
  std::cerr << name + ": error: " + text + '\n' << std::flush;  // one write: ranks share the stream
  return static_cast<int>(code);
}

// Nobody catches, so nothing has been unwound: the stack is still that of the throw.
[[noreturn]] void report_with_stack() {
  std::array<void*, 64> frames;
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  int status = static_cast<int>(hilt::Code::internal);
  try {
    if (std::current_exception()) status = report();
  } catch (...) {}
  backtrace_symbols_fd(frames.data(), depth, STDERR_FILENO);
  _exit(status);
}

/// Hands everything on, and remembers why that failed first: errno is long another's when the
/// program ends. To a pipe that nobody reads any more it prints no further, which is no failure:
/// see run().
class Remembering : public std::streambuf {
 public:
  explicit Remembering(std::streambuf* under) : under_(under) {}
  int error() const { return error_; }

 private:
  bool noted(bool ok) {
    if (!ok && errno == EPIPE) unheard_ = true;
    if (!ok && error_ == 0) error_ = errno;
    return ok || unheard_;
  }
  int_type overflow(int_type c) override {
    if (traits_type::eq_int_type(c, traits_type::eof())) return traits_type::not_eof(c);
    return unheard_ || noted(!traits_type::eq_int_type(under_->sputc(traits_type::to_char_type(c)), traits_type::eof()))
               ? c
               : traits_type::eof();
  }
  std::streamsize xsputn(const char* text, std::streamsize count) override {
    const std::streamsize written = unheard_ ? count : under_->sputn(text, count);
    return noted(written == count) ? count : written;
  }
  int sync() override { return unheard_ || noted(under_->pubsync() == 0) ? 0 : -1; }

  std::streambuf* under_;
  int error_ = 0;
  bool unheard_ = false;
};

/// std::cout through a Remembering, for as long as it lives.
class Output {
 public:
  ~Output() { std::cout.rdbuf(old_); }
  int finish(int status) const {
    if (!std::cout.flush()) hilt::fail_with(hilt::Code::data, "standard output: ", std::strerror(buffer_.error()));
    return status;
  }

 private:
  std::streambuf* old_ = std::cout.rdbuf();
  Remembering buffer_{old_};
  std::streambuf* installed_ = std::cout.rdbuf(&buffer_);
};

constexpr decltype(RLIMIT_AS) kMemoryLimits[] = {RLIMIT_AS, RLIMIT_DATA};

std::size_t limit_of(decltype(RLIMIT_AS) resource) {
  rlimit limit{};
  return ::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur : kNoLimit;
}

}  // namespace

bool debugging() { return std::get_terminate() == report_with_stack; }

int run(const std::string& program, const std::function<int()>& work) {
  // No file of ours may be given the number of a stream that was closed, and take what is printed.
  while (::fcntl(STDIN_FILENO, F_GETFD) < 0 || ::fcntl(STDOUT_FILENO, F_GETFD) < 0 ||
         ::fcntl(STDERR_FILENO, F_GETFD) < 0)
    if (::open("/dev/null", O_RDWR) < 0) break;
  // `program | head` ends quietly, whatever the parent process ignores. A program whose work is
  // worth more than its words ignores the signal; printing then ends alone.
  std::signal(SIGPIPE, SIG_DFL);
  std::signal(SIGXFSZ, SIG_IGN);  // `ulimit -f` is an error of the write, which is reported and tidied after
  name = program;
  try {
    const char* const tf32 = std::getenv("HILT_TF32");  // read by the products of a GPU, where nothing is checked
    hilt::check(!tf32 || std::string_view(tf32) == "0" || std::string_view(tf32) == "1", "HILT_TF32 (",
                tf32 ? tf32 : "", "): must be 0 or 1");
  } catch (...) { ::_exit(report()); }
  const Output output;
  try {
    hilt::check_version();
    return output.finish(work());
  } catch (const Debug&) { std::set_terminate(report_with_stack); } catch (...) {
    return report();
  }
  const int status = work();
  for (const std::string& line : routes_taken()) std::cerr << name << ": debug: attention " << line << '\n';
  return output.finish(status);
}

std::vector<std::string> routes_taken() {
  std::vector<std::string> lines;
  for (const hilt::AttentionRoute& r : hilt::attention_routes()) {
    std::string line = std::string(r.pass) + " on " + std::string(r.route);
    if (!r.reason.empty()) line += ": " + std::string(r.reason);
    if (std::ranges::find(lines, line) == lines.end()) lines.push_back(std::move(line));
  }
  return lines;
}

namespace {

/// Bytes of the character that `text` begins with; 0 if it is none, by UTF-8, or a control
/// character.
std::size_t visible_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return first >= ' ' && first != 0x7f ? 1 : 0;
  const std::size_t count = first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  for (std::size_t i = 1; i < count; ++i)
    if ((byte(i) & 0xc0) != 0x80) return 0;
  const bool control = first == 0xc2 && second < 0xa0, surrogate = first == 0xed && second >= 0xa0;
  const bool longer_than_needed = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90),
             too_large = first == 0xf4 && second >= 0x90;
  return control || surrogate || longer_than_needed || too_large ? 0 : count;
}

}  // namespace

std::string printable(std::string_view text, std::string_view keep) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t count = keep.find(text[at]) != keep.npos ? 1 : visible_bytes(text.substr(at));
    const auto byte = static_cast<unsigned char>(text[at]);
    if (count > 0) out += text.substr(at, count);
    else (out += "\\x") += {kHex[byte >> 4], kHex[byte & 15]};
    at += std::max<std::size_t>(count, 1);
  }
  return out;
}

std::string brief(const std::string& text) {
  constexpr std::size_t kMost = 100;
  if (text.size() <= kMost) return text;
  std::size_t end = kMost;
  while (end > kMost - 4 && (text[end] & 0xc0) == 0x80) --end;  // no character is cut
  return text.substr(0, end) + ".. of " + std::to_string(text.size()) + " bytes";
}

hilt::Device device_of(const std::string& text) {
  hilt::check(text == "auto" || text == "cpu" || text == "cuda" || text.starts_with("cuda:"), "--device (", text,
              "): must be auto, cpu, cuda or cuda:N");
  return hilt::device_named(text);
}

namespace {

/// f(text); its errors name the option.
template <class F> auto named(const std::string& option, const std::string& text, F&& f) try {
  return f();
} catch (const hilt::Error& e) {
  const std::string what = e.what(), opening = option.substr(2) + " (" + text + "): ";
  hilt::fail_with(e.code(), option, " (", brief(text),
                  "): ", what.starts_with(opening) ? what.substr(opening.size()) : what);
}

}  // namespace

hilt::Order order_of(const std::string& text, hilt::Index length) {
  return named("--order", text, [&] { return hilt::parse_order(text, length); });
}

hilt::Pattern pattern_of(const std::string& text, hilt::Index length) {
  return named("--pattern", text, [&] {
    hilt::Pattern pattern = hilt::parse_pattern(text);
    std::size_t at = 0;  // where the branch begins
    for (const hilt::Branch& b : pattern) {
      const std::size_t end = text.find('+', at);
      const std::string branch = text.substr(at, end - at);
      at = end + 1;
      if (b.kind != hilt::Branch::Kind::blocks) continue;
      const hilt::Index n = (length + b.size - 1) / b.size;
      for (const auto& [i, j] : b.pairs)
        if (i >= n || j >= n)
          hilt::fail_with(hilt::Code::data, branch.substr(branch.find('@') + 1), ": block (", i, ", ", j,
                          ") is outside the ", n, " x ", n, " blocks of ", b.size, " that ", length, " tokens make");
    }
    return pattern;
  });
}

std::size_t memory_available() {
  const hilt::Info info = hilt::info();
  std::size_t left = info.memory_available > 0 ? info.memory_available : kNoLimit, pages[6] = {};
  std::ifstream file("/proc/self/statm");  // size resident shared text library data
  for (std::size_t& n : pages) file >> n;
  for (const auto resource : kMemoryLimits)
    if (const std::size_t limit = limit_of(resource); limit != kNoLimit) {
      const std::size_t taken =
          pages[resource == RLIMIT_AS ? 0 : 5] * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
      left = std::min(left, limit - std::min(limit, taken));
    }
  return left;
}

void require_memory(const std::string& what, std::size_t bytes, const std::string& advice) {
  const auto shown = [](std::size_t n) {
    return std::to_string(n / 1'000'000'000) + "." + std::to_string(n / 100'000'000 % 10) + " GB";
  };
  if (const std::size_t have = memory_available(); bytes > have)
    hilt::fail_with(hilt::Code::memory, what, ": would need ", shown(bytes), ", ", shown(have), " are available; ",
                    advice);
}

std::size_t saturated_sum(std::initializer_list<std::size_t> bytes) {
  std::size_t sum = 0;
  for (const std::size_t n : bytes)
    if (__builtin_add_overflow(sum, n, &sum)) return kNoLimit;
  return sum;
}

std::size_t saturated_product(std::initializer_list<hilt::Index> factors) {
  if (std::ranges::find(factors, 0) != factors.end()) return 0;
  std::size_t product = 1;
  for (const hilt::Index f : factors)
    if (__builtin_mul_overflow(product, static_cast<std::size_t>(f), &product)) return kNoLimit;
  return product;
}

// The order takes 8 bytes a token and the lists of a set as much; each pair of touched tiles 8, of
// which a causal plan has half.
std::size_t least_plan_bytes(hilt::Index length, const hilt::Pattern& pattern) {
  constexpr hilt::Index kToken = 16, kTile = 128;
  const auto tiles = [](hilt::Index n) { return (n + kTile - 1) / kTile; };
  std::size_t bytes = saturated_product({length, kToken});
  for (const hilt::Branch& b : pattern) {
    const bool dense = b.kind == hilt::Branch::Kind::dense;
    if (dense || (b.kind == hilt::Branch::Kind::segment && b.dilation == 1))
      bytes = saturated_sum(
          {bytes, saturated_product({tiles(length), dense ? tiles(length) : tiles(std::min(b.size, length)), 8}) / 2});
  }
  return bytes;
}

namespace {

template <class T> std::optional<std::string> odd_one(const hilt::Tensor& x, bool minus_infinity_too) {
  const hilt::Tensor dense = hilt::contiguous(x);
  const T* const data = dense.data<T>();
  for (hilt::Index i = 0; i < dense.numel(); ++i) {
    if (std::isfinite(data[i]) || (data[i] < 0 && !minus_infinity_too)) continue;
    std::string place;
    hilt::Index rest = i;
    for (int axis = x.rank() - 1; axis >= 0; rest /= x.dim(axis--))
      place = std::to_string(rest % x.dim(axis)) + (place.empty() ? "" : ", ") + place;
    return (std::isnan(data[i]) ? "nan at [" : data[i] > 0 ? "inf at [" : "-inf at [") + place + "]";
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> not_finite(const hilt::Tensor& x, bool minus_infinity_too) {
  const hilt::Tape::Pause pause;
  if (x.dtype() == hilt::DType::f64) return odd_one<double>(hilt::to(x, hilt::Device{}), minus_infinity_too);
  return odd_one<float>(hilt::to(hilt::to(x, hilt::Device{}), hilt::DType::f32), minus_infinity_too);
}

void plan_from(const std::string& order, const std::string& pattern, const std::function<void()>& f) try {
  f();
} catch (const hilt::Error& e) {
  constexpr std::string_view kPlan = "plan: ";
  const std::string_view what = e.what();
  if (!what.starts_with(kPlan)) throw;
  hilt::fail_with(e.code(), "--pattern (", brief(pattern), ") in --order (", brief(order),
                  "): ", what.substr(kPlan.size()));
}

hilt::Device device_of_rank(const std::string& text, int rank) {
  hilt::Device device = device_of(text);
  if (device.is_cuda() && !text.starts_with("cuda:"))
    device.index = rank % static_cast<int>(hilt::gpu_descriptions().size());
  return device;
}

}  // namespace program
