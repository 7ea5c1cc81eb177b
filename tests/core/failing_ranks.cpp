// A run of four ranks in which one meets a fate at a moment: failing_ranks OVER FATE MOMENT. The last argument is the test's mark.
//   fate    none | kill | stop | exit | throw | memory
//   moment  start | meeting | hop | home | sum | end | goodbye: before the link is there, while the ranks meet, on a hop of the ring, on
//           the hop that brings home, between sums, in the last barrier, when the others have nothing left to do
#include <hilt/core/comm.h>
#include <signal.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include "examples/program.h"
#include "examples/ranks.h"

namespace {

using hilt::Tensor;
constexpr int kRanks = 4, kVictim = 2;
std::string fate, moment;

void meet_fate() {
  if (fate == "kill") ::raise(SIGKILL);
  if (fate == "stop") ::raise(SIGSTOP);
  if (fate == "exit") ::_exit(0);
  if (fate == "throw") hilt::fail_with(hilt::Code::data, "rank 2 cannot read its shard");
  if (fate == "memory") (void)hilt::empty({hilt::Index{1} << 45}, hilt::DType::f64);
}
void now(const std::string& where, int rank) {
  if (where == moment && rank == kVictim) meet_fate();
}

/// Two rounds of a ring, as forward and backward do it, a sum of gradients, and the end.
int work(hilt::Comm& comm) {
  const int rank = comm.rank(), next = (rank + 1) % kRanks, previous = (rank + kRanks - 1) % kRanks;
  Tensor held = hilt::full({100000}, rank);
  for (int hop = 1; hop <= kRanks; ++hop) {
    if (hop == 2) now("hop", rank);
    if (hop == kRanks) now("home", rank);
    Tensor came = hilt::empty_like(held);
    comm.exchange({{next, held}}, {{previous, came}}, {hop == kRanks ? "homeward" : "ring", hop}).wait();
    held = came;
  }
  for (int step = 0; step < 3; ++step) {
    if (step == 1) now("sum", rank);
    const Tensor total = comm.sum(held);
    if (total.to_vector()[0] != 6) return 1;
  }
  now("end", rank);
  if (moment == "end") comm.barrier();
  now("goodbye", rank);
  if (rank == 0) std::cout << "all is well over " << comm.name() << '\n';
  return 0;
}

int rank_of_environment() {
  for (const char* variable : {"RANK", "OMPI_COMM_WORLD_RANK"})
    if (const char* const text = std::getenv(variable)) return std::atoi(text);
  return -1;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run("failing_ranks", [&] {
    hilt::check(argc >= 4, "usage: failing_ranks threads|tcp|mpi FATE MOMENT [MARK]");
    const std::string over = argv[1];
    fate = argv[2], moment = argv[3];
    now("start", rank_of_environment());
    // While the others meet: after it has said hello, or in the middle of MPI's beginning.
    std::jthread early;
    if (moment == "meeting" && rank_of_environment() == kVictim) early = std::jthread([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(15));
      meet_fate();
    });
    return program::run_as("failing_ranks", kRanks, over == "mpi" ? program::Over::mpi : over == "tcp" ? program::Over::tcp : program::Over::threads, argc, argv, work);
  });
}
