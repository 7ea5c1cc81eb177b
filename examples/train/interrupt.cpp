// The first interrupt only sets a flag, which the loop reads after each step; the second ends the
// process.
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "run.h"

namespace train {
namespace {

std::atomic<bool> asked{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a handler may touch nothing else");

void on_signal(int) {
  constexpr int kInterrupted = 130;
  if (asked.exchange(true)) ::_exit(kInterrupted);
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return asked; }

}  // namespace train
