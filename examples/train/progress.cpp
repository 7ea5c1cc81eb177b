#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>

#include "../report/text.h"

namespace train {

using report::format;

Progress::Progress(const Start& start, Index from)
    : start_(start),
      from_(from),
      terminal_(isatty(STDOUT_FILENO)),
      color_(terminal_ && !std::getenv("NO_COLOR")) {}

Progress::~Progress() {
  if (open_) std::cout << '\n' << std::flush;
}

namespace {

std::string duration(double seconds) {
  const auto s = static_cast<long long>(seconds + 0.5);
  if (s < 60) return format("%lld s", s);
  if (s < 3600) return format("%lld min %02lld s", s / 60, s % 60);
  return format("%lld h %02lld min", s / 3600, s / 60 % 60);
}

/// `text` without what a terminal would break into a second line; escape sequences take no room.
std::string fitted(const std::string& text, std::size_t columns) {
  std::string out;
  std::size_t used = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {
      const std::size_t end = text.find('m', i);
      out.append(text, i, end - i + 1);
      i = end;
    } else if (used < columns) {
      out += text[i], ++used;
    }
  }
  return out;
}

std::size_t columns() {
  winsize size{};
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1u : 79u;
}

}  // namespace

std::string Progress::text_of(const Line& l, Index steps, Detail detail) const {
  const char* const bold = color_ ? "\033[1m" : "";
  const char* const soft = color_ ? "\033[2m" : "";
  const char* const plain = color_ ? "\033[0m" : "";
  std::string text = format(
      "step %lld/%lld %3.0f %%  %sloss %.4f%s", static_cast<long long>(l.step), static_cast<long long>(steps),
      100 * static_cast<double>(l.step) / static_cast<double>(steps), bold, l.loss, plain);
  if (val_loss_ >= 0) text += format("  val %.4f", val_loss_);
  if (detail == Detail::all) {
    text += format("  %s[lnV %.2f uni %.2f bi %.2f", soft, start_.uniform, start_.unigram, start_.bigram);
    if (start_.floor >= 0) text += format(" floor %.4f", start_.floor);
    text += format("]%s  lr %.1e  |g| %.2f", plain, l.lr, l.grad_norm);
  } else if (start_.floor >= 0) {
    text += format("  %sfloor %.4f%s", soft, start_.floor, plain);
  }
  text += format("  %stok/s", report::count(l.tokens_per_s).c_str());
  if (detail != Detail::least) {
    text += format("  %.0f GFLOP/s", l.gflops);
    if (start_.peak_gflops > 0) text += format(" %.0f %%", 100 * l.gflops / start_.peak_gflops);
    text += "  " + report::bytes(static_cast<double>(l.bytes));
  }
  const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  const double done = static_cast<double>(l.step - from_);
  return text + "  ETA " + duration(elapsed / done * static_cast<double>(steps - l.step));
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
      text = text_of(line, steps, detail);
      if (fitted(text, room) == text) break;
    }
    std::cout << "\r" << fitted(text, room) << "\033[K" << std::flush;
    open_ = true;
    if (last) std::cout << '\n' << std::flush, open_ = false;
  } else if (last || line.val_loss >= 0 || line.step == from_ + 1) {
    std::cout << text_of(line, steps, Detail::all) << '\n' << std::flush;
  }
  shown_ = now;
}

void Progress::say(const std::string& text) {
  if (open_) std::cout << "\r\033[K";
  open_ = false;
  std::cout << text << '\n' << std::flush;
}

}  // namespace train
