// What a run says: of itself before it begins, of the latest step in a line cut to the width of the
// terminal, and what to try once it is over.
#include "run.h"
#include <sys/ioctl.h>
#include <unistd.h>
#include <cstdlib>
#include <iostream>

namespace train {

void warn(const std::string& text) { std::cerr << "train: warning: " << program::printable(text) << std::endl; }

void describe(const Settings& s, const hilt::TransformerConfig& config, const MemoryPlan& memory) {
  const hilt::Info info = hilt::info();
  std::cout << "task " << s.task << (s.text.empty() ? "" : " " + s.text) << ": " << config.vocab << " symbols, rows of "
            << s.context << ", " << s.batch * s.accumulate * s.context << " tokens a step\n"
            << "model: " << s.layers << " layers x " << s.width << ", " << s.heads << " heads, "
            << report::count(static_cast<double>(count_parameters(config))) << " parameters, " << s.dtype
            << "; attention " << s.patterns() << " in order " << order_in_force(s) << ", "
            << hilt::name_of(config.causality) << (config.causality == hilt::Causality::none ? "" : " causal")
            << program::terms_in_words(s) << ", backward " << s.backward << '\n'
            << "memory: parameters " << report::bytes(memory.parameters) << ", gradients "
            << report::bytes(memory.gradients) << ", moments " << report::bytes(memory.moments) << ", activations "
            << report::bytes(memory.activations) << ", working " << report::bytes(memory.working)
            << (memory.is_whole ? "; planned " : "; planned at least ") << report::bytes(memory.total()) << '\n'
            << "machine: " << info.threads << " threads, " << info.isa_active << ", products by " << info.blas << '\n';
  for (Index i = 0; memory.is_whole && i < std::ssize(hilt::attention_configs(config)); ++i)
    for (const std::string& line : program::oddities_of(*plan_of(config, i), i == 0 ? "--pattern" : "--pattern-odd"))
      warn(line);
  const std::string line =
      "in a line: loss of the batch, and val of held-out rows, in nats; lr: learning rate; |g|: norm "
      "of the gradient; %: of the speed of a large product; what others lose: lnV knows the "
      "symbols, uni how often each comes, bi ";
  if (!s.dry_run) std::cout << program::wrapped(line + s.profile().before + "; floor: the least", 100, 2) << '\n';
}

/// As a shell reads it back.
static std::string quoted(const std::string& word) {
  if (word.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+:,@%") == word.npos)
    return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return program::printable(out + "'");
}

std::string resume_command(const Settings& s) {
  return "./run train --resume --out " + quoted(s.out) + (s.text.empty() ? "" : " --text " + quoted(s.text));
}

std::string next_commands(const Settings& s) {
  const std::string prompt = s.task == "stories" ? " --prompt \"Mia has a\"" : "",
                    other = s.task == "life" ? "stories" : "life   ";
  return "  ./run sample --out " + quoted(s.out) + prompt + " --seed 2\n  ./run train --task " + other +
         "             another task\n  ./run train --text FILE --seconds 300  your own text\n";
}

// ---- the latest step ----------------------------------------------------------------------------
constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

Progress::Progress(const Start& start, Index from)
    : start_(start), from_(from), terminal_(isatty(STDOUT_FILENO)), color_(terminal_ && !std::getenv("NO_COLOR")) {}

Progress::~Progress() {
  if (open_) std::cout << '\n' << std::flush;
}

static std::string duration(double seconds) {
  const auto s = static_cast<Index>(seconds + 0.5);
  if (s < 60) return format("%ld s", s);
  if (s < 3600) return format("%ld min %02ld s", s / 60, s % 60);
  return format("%ld h %02ld min", s / 3600, s / 60 % 60);
}

/// Columns that `text` takes; escape sequences take none.
static std::size_t width(const std::string& text) {
  std::size_t used = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') i = text.find('m', i);
    else ++used;
  }
  return used;
}

/// As many of the fields of this detail, from the left, as there is room for.
std::string Progress::joined(const std::vector<Field>& fields, Detail detail, std::size_t room) {
  std::string text;
  for (const Field& field : fields) {
    if (detail < field.first || detail > field.last) continue;
    const std::string more = text.empty() ? field.text : text + "  " + field.text;
    if (width(more) > room) break;
    text = more;
  }
  return text;
}

static std::size_t columns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1u : 79u;
}

std::vector<Progress::Field> Progress::fields_of(const Line& l, Index steps) const {
  const char *const bold = color_ ? "\033[1m" : "", *const soft = color_ ? "\033[2m" : "",
                    *const plain = color_ ? "\033[0m" : "";
  const std::string floor = start_.floor >= 0 ? format("floor %.4f", start_.floor) : "",
                    share = start_.peak_gflops > 0 ? format(" %.0f %%", 100 * l.gflops / start_.peak_gflops) : "";
  std::vector<Field> fields{{steps == 0 ? format("step %ld", l.step)
                                        : format("step %ld/%ld %3.0f %%", l.step, steps,
                                                 100 * static_cast<double>(l.step) / static_cast<double>(steps))},
                            {format("%sloss %.4f%s", bold, l.loss, plain)}};
  if (val_loss_ >= 0) fields.push_back({format("val %.4f", val_loss_)});
  fields.push_back({format("%s[lnV %.2f uni %.2f bi %.2f%s%s]%s", soft, start_.uniform, start_.unigram, start_.bigram,
                           floor.empty() ? "" : " ", floor.c_str(), plain),
                    all, all});
  if (!floor.empty()) fields.push_back({soft + floor + plain, some, least});
  fields.push_back({format("lr %.1e", l.lr), all, all});
  fields.push_back({format("|g| %.2f", l.grad_norm), all, all});
  fields.push_back({report::count(l.tokens_per_s) + "tok/s"});
  fields.push_back({format("%.0f GFLOP/s%s", l.gflops, share.c_str()), all, some});
  fields.push_back({report::bytes(l.bytes), all, some});
  if (steps == 0) return fields;
  const double elapsed = program::seconds_since(began_), done = static_cast<double>(l.step - from_);
  fields.push_back({"ETA " + duration(elapsed / done * static_cast<double>(steps - l.step))});
  return fields;
}

void Progress::show(const Line& line, Index steps, bool last) {
  if (line.val_loss >= 0) val_loss_ = line.val_loss;
  const auto now = std::chrono::steady_clock::now();
  const std::vector<Field> fields = fields_of(line, steps);
  if (terminal_) {
    using namespace std::chrono_literals;
    if (now - shown_ < 100ms && !last && line.val_loss < 0) return;
    const std::size_t room = columns();
    std::string text;
    for (const Detail detail : {all, some, least}) {
      text = joined(fields, detail, room);
      if (text == joined(fields, detail, kUnlimited)) break;
    }
    std::cout << "\r" << text << "\033[K" << std::flush;
    open_ = true;
    if (last) std::cout << '\n' << std::flush, open_ = false;
  } else if (last || line.val_loss >= 0 || line.step == from_ + 1) {
    std::cout << joined(fields, all, kUnlimited) << '\n' << std::flush;
  }
  shown_ = now;
}

void Progress::say(const std::string& text) {
  if (open_) std::cout << "\r\033[K";
  open_ = false;
  std::cout << text << '\n' << std::flush;
}

}  // namespace train
