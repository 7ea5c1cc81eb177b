// Asked to end: by a keyboard, a batch system, or a terminal that goes away. The first time only
// sets a flag, which the loop reads after each step; the second ends the process.
#include <signal.h>
#include <unistd.h>
#include <atomic>
#include "run.h"

namespace train {
namespace {

std::atomic<bool> asked{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a handler may touch nothing else");

void on_signal(int signal) {
  constexpr int kInterrupted = 130;
  if (asked.exchange(true) && signal == SIGINT) ::_exit(kInterrupted);
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  struct sigaction hangup {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP})
    if (signal != SIGHUP || hangup.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);  // nohup ignores it
}

bool interrupted() { return asked; }

}  // namespace train
