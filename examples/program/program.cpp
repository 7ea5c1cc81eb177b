// Exceptions become one line on stderr and an exit code; with --debug, a stack as well.
#include "program.h"
#include <execinfo.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <hilt/core/io/text.h>
#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <new>
#include <sstream>
#include "report/report.h"

namespace program {
using namespace hilt;
namespace {

std::string program_name;  // of this program: a terminate handler takes no argument

/// What the library repeats may be long: words longer than the name of a file are cut.
std::string short_words(const std::string& text) {
  constexpr std::size_t kName = 300;
  std::vector<std::string> words;
  for (const std::string_view word : split_text(text, ' ')) {
    const std::size_t end = word.size() - (word.ends_with(':') || word.ends_with(';'));
    const std::string cut = brief(std::string(word.substr(0, end)));
    words.push_back(word.size() <= kName ? std::string(word) : cut + std::string(word.substr(end)));
  }
  return joined(words, " ");
}

const Options* asked = nullptr;  // of this program

/// The error with the option it came from: where the library names a score term or the path of a
/// file, the user typed an option.
std::string with_option(const Error& e) {
  const std::string text = e.what();
  const bool is_file = e.code() == Code::data;
  if (!is_file && e.code() != Code::usage) return text;
  const std::size_t at = text.starts_with("rank ") ? text.find(": ") + 2 : 0, colon = text.find(": ", at);
  if (!asked || colon == text.npos) return text;
  const std::string what = text.substr(at, colon - at);
  for (const auto& [key, value, is_text, group, preset] : asked->values())
    if (is_text && !value.empty() &&
        ((is_file ? value : key) == what || value == "points:" + what || what == key + "_of_points"))
      return text.substr(0, at) + "--" + key + " (" + brief(value) + ")" + text.substr(colon);
  return text;
}

/// One line on stderr about the exception that is being handled; its exit status.
int report() {
  const Error error = error_in_flight();
  std::string text = with_option(error);
  std::replace(text.begin(), text.end(), '\n', ' ');
  text = printable(short_words(text));  // names of files, and what stands in them, are strangers'
  std::cout.flush();
  std::cerr << program_name + ": error: " + text + '\n' << std::flush;  // one write: ranks share the stream
  return static_cast<int>(error.code());
}

// Nobody catches, so nothing has been unwound: the stack is still that of the throw.
[[noreturn]] void report_with_stack() {
  std::array<void*, 64> frames;
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  int status = static_cast<int>(Code::internal);
  try {
    if (std::current_exception()) status = report();
  } catch (...) {}
  backtrace_symbols_fd(frames.data(), depth, STDERR_FILENO);
  _exit(status);
}

/// Stands in for the buffer of std::cout while it lives: passes output on and keeps the first
/// errno, which is lost by the end of the program. When the reader of a pipe has gone it stops
/// printing, which is no failure: see run().
class Output : public std::streambuf {
 public:
  Output() : under_(std::cout.rdbuf(this)) {}
  ~Output() override { std::cout.rdbuf(under_); }
  int finish(int status) const {
    if (!std::cout.flush()) fail_with(Code::data, "standard output: ", std::strerror(error_));
    return status;
  }

 private:
  bool noted(bool ok) {
    if (!ok && error_ == 0) error_ = errno;
    return ok || reader_left();
  }
  bool reader_left() const { return error_ == EPIPE; }
  int_type overflow(int_type c) override {
    return reader_left() || noted(under_->sputc(static_cast<char>(c)) != EOF) ? c : EOF;
  }
  int sync() override { return reader_left() || noted(under_->pubsync() == 0) ? 0 : -1; }

  std::streambuf* under_;
  int error_ = 0;
};

template <class F> auto named(const std::string& option, const std::string& text, F&& f) try {
  for (std::size_t at = 0; at < text.size();)
    check(next_utf8(text, at).has_value(), "not UTF-8 at byte ", at,
          "; checkpoints and reports repeat it, so rename the file");
  return f();
} catch (const Error& e) {
  const std::string kind = option.substr(2, option.find('-', 2) - 2);  // --pattern-odd is a pattern
  const std::string what = e.what(), opening = kind + " (" + text + "): ";
  fail_with(e.code(), option, " (", brief(text), "): ", what.starts_with(opening) ? what.substr(opening.size()) : what);
}

/// What line_of says of each, once.
template <class T, class F> std::vector<std::string> each_once(const std::vector<T>& all, F&& line_of) {
  std::vector<std::string> lines;
  for (const T& one : all)
    if (const std::string line = line_of(one); std::ranges::find(lines, line) == lines.end()) lines.push_back(line);
  return lines;
}

}  // namespace

Error error_in_flight() try { throw; } catch (const Error& e) {
  return e;
} catch (const std::bad_alloc&) {
  return {Code::memory, "out of memory"};
} catch (const std::filesystem::filesystem_error& e) {  // whose paths are a user's: too long, not to be looked at
  return {Code::data, e.path1().string() + ": " + e.code().message()};
} catch (const std::system_error& e) {
  if (e.code() != std::errc::resource_unavailable_try_again)
    return {Code::internal, std::string("internal: ") + e.what()};
  return {Code::memory,
          "no more threads can be started; set HILT_THREADS=1, or raise the limits on threads and memory"};
} catch (const std::exception& e) { return {Code::internal, std::string("internal: ") + e.what()}; } catch (...) {
  return {Code::internal, "internal: an exception of unknown type"};
}

void remember(const Options& options) { asked = &options; }

/// Whether --debug is among the words of this process.
static bool debugging() {
  std::ifstream words("/proc/self/cmdline");
  for (std::string word; std::getline(words, word, '\0');)
    if (word == "--debug") return true;
  return false;
}

int run(const std::string& program, const std::function<int()>& work) {
  // No file of ours may be given the number of a stream that was closed, and take what is printed.
  while (::fcntl(STDIN_FILENO, F_GETFD) < 0 || ::fcntl(STDOUT_FILENO, F_GETFD) < 0 ||
         ::fcntl(STDERR_FILENO, F_GETFD) < 0)
    if (::open("/dev/null", O_RDWR) < 0) break;
  // `program | head` ends quietly, whatever the parent process ignores. A program whose work is
  // worth more than its words ignores the signal; printing then ends alone.
  std::signal(SIGPIPE, SIG_DFL);
  std::signal(SIGXFSZ, SIG_IGN);  // `ulimit -f` is an error of the write, which is reported and tidied after
  program_name = program;
  try {
    // A build without a GPU reads none of them, and one with a GPU late.
    using Words = std::vector<std::string>;
    for (const auto& [name, good] :
         {std::pair("HILT_TF32", Words{"0", "1"}), {"HILT_ROUTE", {"plain", "mma", "hopper"}}})
      if (const char* const text = std::getenv(name); text && *text)
        check(std::ranges::count(good, text) > 0, name, " (", text, "): must be one of ", joined(good, ", "));
    if (const char* const text = std::getenv("HILT_GPU_POOL_BYTES"))
      check(number_in<std::uint64_t>(text).has_value(), "HILT_GPU_POOL_BYTES (", text, "): not a number of bytes");
  } catch (...) { ::_exit(report()); }
  const Output output;
  if (!debugging()) try {
      check_version();
      return output.finish(work());
    } catch (...) {
      const int status = report();
      abort_mpi(status);
      return status;
    }
  std::set_terminate(report_with_stack);
  const int status = work();
  for (const std::string& line : routes_taken()) std::cerr << program_name << ": debug: attention " << line << '\n';
  return output.finish(status);
}

std::vector<std::string> routes_taken() {
  return each_once(attention_routes(), [](const AttentionRoute& r) {
    return std::string(r.pass) + " on " + std::string(r.route) + (r.reason.empty() ? "" : ": ") + std::string(r.reason);
  });
}

std::vector<std::string> fallbacks_taken() {
  return each_once(attention_fallbacks(), [](const Fallback& f) {
    return std::string(name_of(f.asked)) + " ran as " + std::string(name_of(f.ran)) + ": " + f.reason;
  });
}

std::vector<std::string> oddities_of(const Plan& plan, const std::string& option) {
  std::vector<std::string> lines;
  const PlanSpec& spec = plan.spec();
  for (const Branch& b : spec.pattern)
    if (b.kind == Branch::Kind::segment && b.dilation > 1 && b.dilation >= b.size)
      lines.push_back(option + " (" + to_string(Pattern{b}) + "): dilation " + std::to_string(b.dilation) +
                      " in segments of " + std::to_string(b.size) + ": each row attends to 1 key at most");
  const Index rows = plan.queries() * std::max<Index>(1, std::ssize(spec.documents));
  if (const Index empty = plan.empty_rows())
    lines.push_back(std::to_string(empty) + " of " + std::to_string(rows) +
                    " rows attend to nothing: o and gradients are 0, lse -inf");
  if (plan.order_forced()) lines.push_back("HILT_FORCE_ORDER=row is set: every order is the identity");
  return lines;
}

std::string printable(std::string_view text, std::string_view keep) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    const std::optional<char32_t> c = next_utf8(text, end);
    const bool kept = keep.find(text[at]) != keep.npos, seen = c && *c >= ' ' && (*c < 0x7f || *c >= 0xa0);
    const auto byte = static_cast<unsigned char>(text[at]);
    if (kept || seen) out += text.substr(at, end - at);
    else (out += "\\x") += {kHex[byte >> 4], kHex[byte & 15]}, end = at + 1;
    at = end;
  }
  return out;
}

std::string wrapped(const std::string& text, std::size_t columns, std::size_t indent) {
  std::istringstream words(text);
  std::string out, word;
  std::size_t column = 0;
  while (words >> word) {
    if (column > 0 && column + 1 + word.size() > columns) out += "\n" + std::string(indent, ' '), column = indent;
    else if (column > 0) out += ' ', ++column;
    out += word;
    column += word.size();
  }
  return out;
}

std::string joined(const std::vector<std::string>& words, const std::string& between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string brief(const std::string& text) {
  constexpr std::size_t kMost = 100;
  if (text.size() <= kMost) return text;
  std::size_t end = kMost;
  while (end > kMost - 4 && (text[end] & 0xc0) == 0x80) --end;  // no character is cut
  return text.substr(0, end) + ".. of " + std::to_string(text.size()) + " bytes";
}

Device device_of(const std::string& text, DType dtype, int rank) {
  if (text == "auto" && dtype == DType::f64) return {};
  const bool is_one = text.starts_with("cuda:");
  check(text == "auto" || text == "cpu" || text == "cuda" || is_one, "--device (", text,
        "): must be auto, cpu, cuda or cuda:N");
  Device device = device_named(text);
  if (device.is_cuda() && !is_one) device.index = rank % static_cast<int>(gpu_descriptions().size());
  return device;
}

Order order_of(const std::string& text, Index length) {
  return named("--order", text, [&] {
    const Order order = parse_order(text, length);
    check(order.kind != Order::Kind::given, "order (given): a file says which, and attend reads one; here ",
          "name an order");
    return order;
  });
}

Pattern pattern_of(const std::string& text, Index length, const std::string& option) {
  return named(option, text, [&] {
    Pattern pattern = parse_pattern(text);
    const Index behind = behind_prefix(pattern, length);
    std::size_t at = 0;  // where the branch begins
    for (const Branch& b : pattern) {
      const std::size_t end = text.find('+', at);
      const std::string branch = text.substr(at, end - at);
      at = end + 1;
      if (b.kind != Branch::Kind::blocks || b.lists != Branch::Lists::given) continue;
      const Index n = (behind + b.size - 1) / b.size;
      for (const auto& [i, j] : b.pairs)
        if (i >= n || j >= n)
          fail_with(Code::data, branch.substr(branch.find('@') + 1), ": block (", i, ", ", j, ") is outside the ", n,
                    " x ", n, " blocks of ", b.size, " that ", behind, " tokens make");
    }
    return pattern;
  });
}

Grid grid_of(const std::string& text, Index most) {
  const auto [height, width] = cut_text(text, 'x');
  const auto side = [](std::string_view number) { return number_in<Index>(number).value_or(0); };
  const Grid grid{.width = side(width), .height = side(height)};
  check(std::min(grid.height, grid.width) >= 1 && std::max(grid.height, grid.width) <= most, "--grid (", text,
        "): expected HEIGHTxWIDTH with sides of 1..", most, ", as in 16x16");
  return grid;
}

DType dtype_of(const std::string& text) {
  for (const DType t : {DType::f64, DType::f32, DType::bf16, DType::f16})
    if (text == name_of(t)) return t;
  fail("--dtype (", brief(text), "): must be one of f64, f32, bf16, f16");
}

static void declare(Options& options, AttentionSettings& settings, const AttentionSetting& s, const std::string& more) {
  std::string name = "--" + std::string(s.name);
  std::ranges::replace(name, '_', '-');
  const std::string help = std::string(s.help) + more, kind(s.kind);
  std::visit(
      [&](auto field) {
        auto& value = settings.*field;
        using T = std::remove_reference_t<decltype(value)>;
        if constexpr (std::is_same_v<T, bool>) options.flag(name, value, help);
        else if constexpr (std::is_same_v<T, Index>)
          options.integer(name, value, static_cast<Index>(s.low), static_cast<Index>(s.high), help);
        else if constexpr (!std::is_same_v<T, std::string>) options.number(name, value, s.low, s.high, help);
        else if (!s.choices.empty()) options.choice(name, value, {s.choices.begin(), s.choices.end()}, help);
        else if (const std::size_t bar = kind.find('|'); bar != kind.npos)  // it may be left out
          options.text_or(kind.substr(0, bar), name, value, kind, help);
        else options.text(name, value, kind, help);
      },
      s.field);
}

void declare(Options& options, AttentionSettings& settings, std::initializer_list<const char*> names,
             const std::string& more) {
  for (const char* name : names) declare(options, settings, attention_setting(name), more);
}

static std::vector<AttentionSetting> terms() {
  std::vector<AttentionSetting> found = attention_settings();
  std::erase_if(found, [](const auto& s) { return s.reader != AttentionSetting::Reader::terms; });
  return found;
}

void declare_terms(Options& options, AttentionSettings& settings) {
  for (const AttentionSetting& s : terms()) declare(options, settings, s, "");
}

void declare_drawn(Options& options, DrawnSettings& s, std::array<Index, 2> tokens, Index least_runs) {
  options.integer("--batch", s.batch, tokens[0], 4096, "Sequences");
  options.integer("--length", s.length, tokens[0], tokens[1], "Tokens of a sequence, over all ranks");
  options.integer("--heads", s.heads, 1, 1024, "Query heads");
  options.integer("--kv-heads", s.kv_heads, 0, 1024, "Key heads, a divisor of --heads; 0 is as many");
  options.integer("--head-dim", s.head_dim, 1, 1024, "Features of a head");
  declare(options, s, {"order", "pattern", "dilation_mode", "causal", "documents"});
  declare_terms(options, s);
  declare(options, s, {"dropout"});
  options.choice("--dtype", s.dtype, {"f64", "f32", "bf16", "f16"}, "Type of q, k and v");
  options.text("--device", s.device, "auto|cpu|cuda", "Where to compute");
  declare(options, s, {"seed"}, ", and of the random inputs");
  options.integer("--repeat", s.repeat, least_runs, 1000, "Timed runs; the one of median time counts");
}

PlanSpec spec_of(const AttentionSettings& a, Index length, Index heads) {
  Pattern pattern = pattern_of(a.pattern, length);
  PlanSpec spec{.length = length,
                .heads = heads,
                .order = order_of(a.order, behind_prefix(pattern, length)),
                .pattern = std::move(pattern),
                .dilation_mode = parse_dilation_mode(a.dilation_mode),
                .causality = parse_causality(a.causal)};
  if (!a.documents.empty())
    spec.documents = named("--documents", a.documents, [&] { return parse_documents(a.documents); });
  return spec;
}

TermConfig terms_of(const AttentionSettings& settings, Index heads) {
  TermConfig config{.softcap = settings.softcap, .sink = settings.sink};
  for (const AttentionSetting& s : terms())
    if (const auto field = std::get_if<std::string AttentionSettings::*>(&s.field))
      if (const std::string& text = settings.**field; !text.empty())
        named("--" + std::string(s.name), text, [&] { read_term(config, s.name, text); });
  require_memory("--relative (" + brief(settings.relative) + ")", product_of({heads, 8, config.relative.numel()}),
                 "offsets that no two tokens have need no entry");
  return config;
}

std::string terms_in_words(const AttentionSettings& settings) {
  std::ostringstream text;
  for (const AttentionSetting& s : terms())
    std::visit(
        [&](auto field) {
          const auto& value = settings.*field;
          using T = std::remove_cvref_t<decltype(value)>;
          if (value == T{}) return;
          text << ", " << s.name;
          if constexpr (std::is_same_v<T, std::string>) text << ' ' << brief(value);
          else if constexpr (std::is_same_v<T, double>) text << ' ' << value;
        },
        s.field);
  return text.str();
}

ScoreTerms drawn_terms(const TermConfig& config, Index heads, Index length, DType dtype, Device device,
                       std::uint64_t seed) {
  ScoreTerms terms = make_terms(config, heads, length, dtype);
  std::uint64_t stream = 4;
  visit_terms(terms, [&](const std::string& name, Tensor& x) {
    ++stream;
    if (name != "slopes") x = to(randn(x.shape(), {seed, stream}, DType::f64), x.dtype());
    x = moved(x, device);
  });
  return terms;
}

Named with_gradients(const std::array<Tensor, 4>& inputs, const ScoreTerms& terms,
                     const std::function<Tensor()>& forward) {
  const auto& [q, k, v, d_o] = inputs;
  Named out{{"dq", q}, {"dk", k}, {"dv", v}};
  ScoreTerms given = terms;
  visit_terms(given, [&](const std::string& name, Tensor& x) { out.emplace_back("d_" + name, x); });
  Tape tape;
  for (const auto& [name, x] : out) tape.watch(x);
  const Tensor o = forward();
  // Where nothing attends to anything, o may be a constant to the tape.
  const Gradients g = tape.knows(o) ? tape.backward(o, d_o) : Gradients();
  for (auto& [name, x] : out) x = g.has(x) ? g[x] : zeros_like(x);
  out.emplace(out.begin(), "o", o);
  return out;
}

Named of_all_ranks(Named results, const ShardPlan& shard, const Comm& comm) {
  for (auto& [name, x] : results) x = name.starts_with("d_") ? comm.sum(x) : whole_of_rows(x, shard, comm);
  return results;
}

double product_gflops(Device device, DType dtype, Index side) {
  if (device.is_cpu() && dtype != DType::f64) dtype = DType::f32;
  const Tensor a = moved(to(randn({side, side}, {1, 1}), dtype), device);
  const double n = static_cast<double>(side);
  return 2 * n * n * n / seconds_of(10, device, [&] { (void)matmul(a, a); })[0] * 1e-9;
}

std::size_t memory_available() {
  const Info info = hilt::info();
  std::size_t left = info.memory_available > 0 ? info.memory_available : SIZE_MAX, pages[6] = {};
  std::ifstream file("/proc/self/statm");  // size resident shared text library data
  for (std::size_t& n : pages) file >> n;
  for (const auto& [resource, taken] : {std::pair(RLIMIT_AS, pages[0]), {RLIMIT_DATA, pages[5]}}) {
    rlimit limit{};
    if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    left = std::min(left, limit.rlim_cur - std::min(limit.rlim_cur, taken * std::size_t(::sysconf(_SC_PAGESIZE))));
  }
  return left;
}

void require_memory(const std::string& what, double bytes, const std::string& advice) {
  if (const std::size_t have = memory_available(); bytes > static_cast<double>(have))
    fail_with(Code::memory, what, ": would need ", report::bytes(std::min(bytes, 0x1p64)), ", ", report::bytes(have),
              " are available; ", advice);
}

// The order takes 8 bytes a token and the lists of a set as much; each pair of touched tiles 8, of
// which a causal plan has half; each pair of blocks of a rule 8.
double least_plan_bytes(Index length, const Pattern& pattern) {
  constexpr Index kToken = 16, kTile = 128, kHalfPair = 4;
  const auto tiles = [](Index n) { return (n + kTile - 1) / kTile; };
  double bytes = product_of({length, kToken});
  for (const Branch& b : pattern) {
    const bool dense = b.kind == Branch::Kind::dense;
    if (dense || (b.kind == Branch::Kind::segment && b.dilation == 1))
      bytes += product_of({tiles(length), tiles(dense ? length : std::min(b.size, length)), kHalfPair});
  }
  return bytes;
}

std::optional<std::string> not_finite(const Tensor& x, bool minus_infinity_too) {
  const std::vector<double> data = x.to_vector();
  for (std::size_t i = 0; i < data.size(); ++i) {
    if (std::isfinite(data[i]) || (data[i] < 0 && !minus_infinity_too)) continue;
    std::string place;
    auto rest = static_cast<Index>(i);
    for (int axis = x.rank() - 1; axis >= 0; rest /= x.dim(axis--))
      place = std::to_string(rest % x.dim(axis)) + (place.empty() ? "" : ", ") + place;
    return (std::isnan(data[i]) ? "nan at [" : data[i] > 0 ? "inf at [" : "-inf at [") + place + "]";
  }
  return std::nullopt;
}

void plan_from(const std::string& order, const std::string& pattern, const std::function<void()>& f,
               const std::string& option) try {
  f();
} catch (const Error& e) {
  constexpr std::string_view kPlan = "plan: ";
  const std::string_view what = e.what();
  if (!what.starts_with(kPlan)) throw;
  fail_with(e.code(), option, " (", brief(pattern), order.empty() ? "" : ") in --order (" + brief(order),
            "): ", what.substr(kPlan.size()));
}

}  // namespace program
