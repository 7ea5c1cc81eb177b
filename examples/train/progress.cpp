// A line about the latest step, cut to the width of the terminal, with the time that is left.
#include "run.h"
#include <sys/ioctl.h>
#include <unistd.h>
#include <cstdlib>
#include <iostream>

namespace train {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

Progress::Progress(const Start& start, Index from)
    : start_(start), from_(from), terminal_(isatty(STDOUT_FILENO)), color_(terminal_ && !std::getenv("NO_COLOR")) {}

Progress::~Progress() {
  if (open_) std::cout << '\n' << std::flush;
}

static std::string duration(double seconds) {
  const auto s = static_cast<long long>(seconds + 0.5);
  if (s < 60) return format("%lld s", s);
  if (s < 3600) return format("%lld min %02lld s", s / 60, s % 60);
  return format("%lld h %02lld min", s / 3600, s / 60 % 60);
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

/// As many of the fields, from the left, as there is room for.
static std::string joined(const std::vector<std::string>& fields, std::size_t room) {
  std::string text;
  for (const std::string& field : fields) {
    const std::string more = text.empty() ? field : text + "  " + field;
    if (width(more) > room) break;
    text = more;
  }
  return text;
}

static std::size_t columns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1u : 79u;
}

std::vector<std::string> Progress::fields_of(const Line& l, Index steps, Detail detail) const {
  const char* const bold = color_ ? "\033[1m" : "";
  const char* const soft = color_ ? "\033[2m" : "";
  const char* const plain = color_ ? "\033[0m" : "";
  std::vector<std::string> fields{
      steps == 0 ? format("step %lld", static_cast<long long>(l.step))
                 : format("step %lld/%lld %3.0f %%", static_cast<long long>(l.step), static_cast<long long>(steps),
                          100 * static_cast<double>(l.step) / static_cast<double>(steps)),
      format("%sloss %.4f%s", bold, l.loss, plain)};
  const auto add = [&](const std::string& field) { fields.push_back(field); };
  if (val_loss_ >= 0) add(format("val %.4f", val_loss_));
  if (detail == Detail::all) {
    const std::string floor = start_.floor >= 0 ? format(" floor %.4f", start_.floor) : "";
    add(format("%s[lnV %.2f uni %.2f bi %.2f%s]%s", soft, start_.uniform, start_.unigram, start_.bigram, floor.c_str(),
               plain));
    add(format("lr %.1e", l.lr));
    add(format("|g| %.2f", l.grad_norm));
  } else if (start_.floor >= 0) {
    add(format("%sfloor %.4f%s", soft, start_.floor, plain));
  }
  add(format("%stok/s", report::count(l.tokens_per_s).c_str()));
  if (detail != Detail::least) {
    const std::string share = start_.peak_gflops > 0 ? format(" %.0f %%", 100 * l.gflops / start_.peak_gflops) : "";
    add(format("%.0f GFLOP/s%s", l.gflops, share.c_str()));
    add(report::bytes(l.bytes));
  }
  if (steps == 0) return fields;
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  const double done = static_cast<double>(l.step - from_);
  add("ETA " + duration(elapsed / done * static_cast<double>(steps - l.step)));
  return fields;
}

void Progress::show(const Line& line, Index steps, bool last) {
  if (line.val_loss >= 0) val_loss_ = line.val_loss;
  const auto now = std::chrono::steady_clock::now();
  if (terminal_) {
    using namespace std::chrono_literals;
    if (now - shown_ < 100ms && !last && line.val_loss < 0) return;
    const std::size_t room = columns();
    std::string text;
    for (const Detail detail : {Detail::all, Detail::some, Detail::least}) {
      const std::vector<std::string> fields = fields_of(line, steps, detail);
      text = joined(fields, room);
      if (text == joined(fields, kUnlimited)) break;
    }
    std::cout << "\r" << text << "\033[K" << std::flush;
    open_ = true;
    if (last) std::cout << '\n' << std::flush, open_ = false;
  } else if (last || line.val_loss >= 0 || line.step == from_ + 1) {
    std::cout << joined(fields_of(line, steps, Detail::all), kUnlimited) << '\n' << std::flush;
  }
  shown_ = now;
}

void Progress::say(const std::string& text) {
  if (open_) std::cout << "\r\033[K";
  open_ = false;
  std::cout << text << '\n' << std::flush;
}

}  // namespace train
