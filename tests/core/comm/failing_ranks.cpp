// A run of four ranks in which one meets a fate at a moment: failing_ranks OVER FATE MOMENT. The
// last argument is the test's mark.
//   fate    none | check | early | size | kill | stop | exit | throw | memory
//   moment  start | hop | home | sum | end | goodbye: before the link is there, on a hop of the ring, on
//           the hop that returns gradients, between sums, in the last barrier, when the others have nothing left
//           to do
#include <hilt/core/comm/comm.h>
#include <signal.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>
#include "examples/program/program.h"

namespace {

using hilt::Tensor;
constexpr int kRanks = 4, kVictim = 2;
std::string fate, moment;
bool threads = false;

struct Early {};  // leaves work as if it were done

void meet_fate() {
  if (fate == "kill") ::raise(SIGKILL);
  while (fate == "stop" && threads) ::pause();  // a signal would stop all of them
  if (fate == "stop") ::raise(SIGSTOP);
  if (fate == "exit") ::_exit(0);
  if (fate == "early") throw Early();
  if (fate == "throw") hilt::fail_with(hilt::Code::data, "rank 2 cannot read its shard");
  if (fate == "memory") (void)hilt::empty({hilt::Index{1} << 45}, hilt::DType::f64);
}
void now(const std::string& where, int rank) {
  if (where == moment && rank == kVictim) meet_fate();
}

bool holds(const Tensor& x, int value) {
  const std::vector<double> all = x.to_vector();
  return std::ranges::all_of(all, [&](double v) { return v == value; });
}

/// What every link must do, beside failing well: for those that core_test cannot run inside one
/// process.
void check_link(hilt::Comm& comm) {
  const int rank = comm.rank(), next = (rank + 1) % kRanks, previous = (rank + kRanks - 1) % kRanks;
  const auto require = [&](bool ok, const char* what) { hilt::check(ok, what); };
  // Several under way on one route, small and large, waited for from the last on.
  std::vector<Tensor> came;
  std::vector<hilt::Transfer> transfers;
  for (int i = 0; i < 12; ++i) {
    came.push_back(hilt::empty({i % 3 == 2 ? 700001 : i + 1}));
    transfers.push_back(
        comm.exchange({{next, hilt::full(came.back().shape(), 100 * rank + i)}}, {{previous, came.back()}}));
  }
  for (std::size_t i = transfers.size(); i-- > 0;) transfers[i].wait();
  for (std::size_t i = 0; i < came.size(); ++i)
    require(holds(came[i], 100 * previous + static_cast<int>(i)), "messages out of order");
  // What nobody waits for: as it comes, then with all of it here before this rank gives it up, then
  // before this rank asks. Every rank but 0 waits for its turn, which the one before passes on
  // behind what it has sent.
  const hilt::Comm turns = comm.split(0, rank);
  const auto turn = [&] {
    Tensor passed = hilt::empty({1});
    if (rank > 0) turns.exchange({}, {{previous, passed}}).wait();
  };
  for (int early = 0; early < 3; ++early) {
    Tensor first = hilt::empty({300000}), second = hilt::empty({2});
    if (early == 2) turn();
    {
      const hilt::Transfer dropped = comm.exchange({{next, hilt::full({300000}, 1)}}, {{previous, first}});
      if (early == 1) turn();
    }
    hilt::Transfer kept = comm.exchange({{next, hilt::full({2}, 2 + early)}}, {{previous, second}});
    if (early > 0 && next > 0) turns.exchange({{next, hilt::full({1}, 0)}}, {}).wait();
    kept.wait();
    require(holds(second, 2 + early), "a dropped transfer left its message to the next");
  }
  const hilt::Comm row = comm.split(rank / 2, -rank), column = comm.split(rank % 2, rank);
  require(row.sum(hilt::full({3}, rank)).to_vector()[2] == (rank < 2 ? 1 : 5), "sum of a row");
  require(column.gather(hilt::full({}, rank)).to_vector() == std::vector<double>{0.0 + rank % 2, 2.0 + rank % 2},
          "gather of a column");
  require(comm.gather_text(std::string(static_cast<std::size_t>(rank), 'x'))[3] == "xxx", "gather_text");
}

/// Two rounds of a ring, as forward and backward do it, a sum of gradients, and the end.
int work(hilt::Comm& comm, hilt::Device device) {
  const int rank = comm.rank(), next = (rank + 1) % kRanks, previous = (rank + kRanks - 1) % kRanks;
  if (fate == "check") check_link(comm);
  Tensor held = hilt::full({100000}, rank, hilt::DType::f32, device);
  for (int hop = 1; hop <= kRanks; ++hop) {
    if (hop == 2) now("hop", rank);
    if (hop == kRanks) now("home", rank);
    if (fate == "size" && hop == 2 && rank == kVictim) held = hilt::zeros({99999}, hilt::DType::f32, device);
    Tensor came = hilt::empty({100000}, hilt::DType::f32, device);
    comm.exchange({{next, held}}, {{previous, came}}, {hop == kRanks ? "homeward" : "ring", hop}).wait();
    held = came;
  }
  if (!holds(held, rank)) return 1;
  for (int step = 0; step < 3; ++step) {
    if (step == 1) now("sum", rank);
    const Tensor total = comm.sum(held);
    if (!holds(total, 6)) return 1;
  }
  now("end", rank);
  if (moment == "end") comm.barrier();
  now("goodbye", rank);
  if (rank == 0) std::cout << "all is well over " << comm.name() << '\n';
  return 0;
}

int rank_of_environment() {
  const char* const text = std::getenv("OMPI_COMM_WORLD_RANK");
  return text ? std::atoi(text) : -1;
}

}  // namespace

int main(int argc, char** argv) {
  return program::run("failing_ranks", [&] {
    hilt::check(argc >= 4, "usage: failing_ranks threads|mpi|nccl FATE MOMENT [MARK]");
    const std::string over = argv[1];
    fate = argv[2], moment = argv[3], threads = over != "mpi";
    now("start", rank_of_environment());
    // Over NCCL the ranks are threads, and each has a GPU.
    return program::run_as("failing_ranks", kRanks, over, [&](hilt::Comm& met) {
      try {
        if (over != "nccl") return work(met, {});
        const hilt::Device gpu{hilt::Device::Kind::cuda, met.rank()};
        hilt::Comm comm = hilt::nccl_ranks(met, gpu);
        return work(comm, gpu);
      } catch (const Early&) { return 0; }
    });
  });
}
