// Ranks that mpirun has started, for what tests inside one process cannot show of them:
// ranks_mpi story | pieces | size | large | own.
#include <mpi.h>
#include <iostream>
#include <thread>
#include "core/comm/link.h"
#include "core/device.h"
#include "tests/nn/ranks_story.h"
#include "tests/support/error_of.h"
#include "tests/support/ring_problem.h"

namespace hilt {
namespace {

/// Attention and training over all ranks: what one rank says, and to the bit what threads say.
void story(const Comm& comm) {
  double worst = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const Problem p = random_problem(seed);
    const Sharding how{seed % 2 ? Transport::gather : Transport::ring, seed % 3 == 0 ? Index{4} : Index{0}};
    const Outcome many = on_rank(p, comm, how);
    check(many.sent == many.predicted, "other bytes than predicted, seed ", seed, ": ", describe(p, comm.size(), how));
    if (comm.rank() != 0) continue;
    worst = std::max(worst, distance(many.whole, on_one_rank(p)));
    check(worst <= 1e-12, worst, " from one rank, seed ", seed, ": ", describe(p, comm.size(), how));
  }
  Problem inside;
  inside.spec.length = 512, inside.spec.pattern = parse_pattern("segment:64");
  inside.draw(1);
  check(on_rank(inside, comm, {}).sent == std::vector<std::int64_t>(static_cast<std::size_t>(comm.size())),
        "segments inside shards sent something");
  double apart_from_one = 0;
  for (int sequence = 1; sequence <= comm.size(); ++sequence) {
    if (comm.size() % sequence != 0) continue;
    const std::vector<double> over_mpi = trained(comm, sequence);
    if (comm.rank() != 0) continue;
    apart_from_one = std::max(apart_from_one, apart(over_mpi, trained(Comm(), 1)));
    check(apart_from_one <= 1e-12, apart_from_one, " from a training on one rank, ", sequence, " to a sequence");
    run_ranks(comm.size(), [&](const Comm& threads) {
      const std::vector<double> over_threads = trained(threads, sequence);
      check(apart(over_threads, over_mpi) == 0, "threads and MPI give different bits, ", sequence, " to a sequence");
    });
  }
  if (comm.rank() == 0)
    std::cout << comm.size() << " ranks: attention " << worst << ", training " << apart_from_one
              << " from one rank, to the bit that of threads\n";
}

Tensor numbered(Index n, int first) {
  Tensor x = empty({n}, DType::u8);
  for (Index i = 0; i < n; ++i) x.mutable_data<std::uint8_t>()[i] = static_cast<std::uint8_t>(first + i % 251);
  return x;
}

/// Messages of several pieces: around their borders, several under way, and dropped ones.
void pieces(const Comm& comm) {
  mpi_piece = 1000;
  const int p = comm.size(), next = (comm.rank() + 1) % p, previous = (comm.rank() + p - 1) % p;
  const std::vector<Index> sizes{1, 999, 1000, 1001, 1999, 2000, 2001, 25'000};
  std::vector<Tensor> came;
  std::vector<Transfer> transfers;
  for (const Index n : sizes) {
    came.push_back(empty({n}, DType::u8));
    transfers.push_back(comm.exchange({{next, numbered(n, comm.rank())}}, {{previous, came.back()}}));
    Tensor unwanted = empty({n}, DType::u8);
    (void)comm.exchange({{next, numbered(n, 100)}}, {{previous, unwanted}});  // and dropped
  }
  for (std::size_t i = sizes.size(); i-- > 0;) transfers[i].wait();
  for (std::size_t i = 0; i < sizes.size(); ++i)
    check(came[i].to_vector() == numbered(sizes[i], previous).to_vector(), "a message of ", sizes[i],
          " bytes is wrong");
  const std::vector<double> course = trained(comm, p);
  mpi_piece = std::size_t{1} << 30;
  check(apart(trained(comm, p), course) == 0, "pieces change the course of a training");
}

/// Fails, in the third piece.
void size(const Comm& comm) {
  mpi_piece = 1000;
  Tensor shorter = empty({2400}, DType::u8);
  if (comm.rank() == 0) comm.exchange({{1, numbered(2500, 0)}}, {}).wait();
  if (comm.rank() == 1) comm.exchange({}, {{0, shorter}}).wait();
  comm.barrier();
}

/// More bytes than MPI counts in an int, where there is memory for it.
void large(const Comm& comm) {
  constexpr Index n = (Index{1} << 31) + 5;
  constexpr Index places[] = {0, (Index{1} << 30) - 1, Index{1} << 30, (Index{1} << 31) - 1, Index{1} << 31, n - 1};
  const std::size_t available = info().memory_available;
  const double fits = comm.sum(full({}, available > (std::size_t{6} << 30))).item();
  if (fits < comm.size()) {
    if (comm.rank() == 0) std::cout << "left out: a message of 2 GiB wants 6 GiB of memory\n";
    return;
  }
  Tensor x = empty({n}, DType::u8);
  auto* const bytes = x.mutable_data<std::uint8_t>();
  for (std::size_t i = 0; i < std::size(places); ++i)
    bytes[places[i]] = static_cast<std::uint8_t>(comm.rank() ? 0 : 1 + i);
  if (comm.rank() == 0) comm.exchange({{1, x}}, {}, {"large"}).wait();
  if (comm.rank() == 1) comm.exchange({}, {{0, x}}, {"large"}).wait();
  for (std::size_t i = 0; i < std::size(places) && comm.rank() < 2; ++i)
    check(bytes[places[i]] == 1 + i, "byte ", places[i], " of ", n, " has not arrived");
  check(comm.rank() != 0 || comm.traffic().bytes_sent >= static_cast<std::size_t>(n), "not all bytes are counted");
}

void must(int result) { check(result == MPI_SUCCESS, "a call of MPI failed"); }

/// A program that has begun MPI hands over a part of its ranks, and goes on with MPI.
void own() {
  check(error_of([] { (void)mpi_ranks(1); }) == "usage: mpi_ranks: a communicator was named, and MPI has not begun",
        "a communicator before MPI");
  must(MPI_Init(nullptr, nullptr));
  int rank = 0, size = 0, flag = 0;
  std::string elsewhere;
  std::thread([&] { elsewhere = error_of([] { (void)mpi_ranks(); }); }).join();
  must(MPI_Query_thread(&flag));
  check(flag >= MPI_THREAD_SERIALIZED || elsewhere.find("only the thread that began MPI may call it") != elsewhere.npos,
        "on another thread: ", elsewhere);
  MPI_Comm part;
  must(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  must(MPI_Comm_size(MPI_COMM_WORLD, &size));
  const bool last = rank == size - 1;  // is a part of one
  must(MPI_Comm_split(MPI_COMM_WORLD, last, -rank, &part));
  // Whatever is sent on that communicator is this receive's: ours must not be.
  int anything = -1;
  MPI_Request open;
  must(MPI_Irecv(&anything, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, part, &open));
  for (int time = 0; time < 3; ++time) {  // with the part twice, and once with all
    const Comm comm = time < 2 ? mpi_ranks(MPI_Comm_c2f(part)) : mpi_ranks();
    const int ranks = time == 2 ? size : last ? 1 : size - 1;
    check(comm.size() == ranks && comm.name() == (ranks == 1 ? "single" : "mpi"), "a group of another size");
    check(comm.rank() == (time == 2 ? rank : last ? 0 : size - 2 - rank), "ranks in another order");
    const double sum = comm.sum(full({1000}, rank, DType::f64)).to_vector()[999];
    check(sum == (time == 2 ? size * (size - 1) / 2 : last ? rank : (size - 1) * (size - 2) / 2), "sum");
    check(trained(comm, comm.size()).size() > 50, "training");
  }
  must(MPI_Test(&open, &flag, MPI_STATUS_IGNORE));
  check(!flag, "a message of ours went over their communicator");
  must(MPI_Barrier(MPI_COMM_WORLD));
  abort_mpi(3);  // the host began MPI and ends it
  must(MPI_Finalized(&flag));
  check(!flag, "MPI was ended");
  int mine = 0, of_part = 0, sum = 0;
  must(MPI_Comm_rank(part, &mine));
  must(MPI_Comm_size(part, &of_part));
  must(MPI_Send(&rank, 1, MPI_INT, (mine + 1) % of_part, 5, part));
  must(MPI_Wait(&open, MPI_STATUS_IGNORE));
  check(anything == (last ? rank : (rank + 1) % (size - 1)), "their own message is wrong");
  must(MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
  check(sum == size * (size - 1) / 2, "their own sum is wrong");
  must(MPI_Comm_free(&part));
  must(MPI_Finalize());
  check(error_of([] { (void)mpi_ranks(); }).find("MPI has ended in this process") != std::string::npos, "after MPI");
}

}  // namespace
}  // namespace hilt

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    if (what == "own") return hilt::own(), 0;
    const hilt::Comm comm = hilt::mpi_ranks();
    hilt::check(comm.size() > 1, "to be started by mpirun");
    try {
      if (what == "story") hilt::story(comm);
      if (what == "pieces") hilt::pieces(comm);
      if (what == "size") hilt::size(comm);
      if (what == "large") hilt::large(comm);
    } catch (const std::exception& e) {
      comm.abort(e.what());
      throw;
    }
  } catch (const std::exception& e) {
    std::cerr << "ranks_mpi " << what << ": " << e.what() << std::endl;
    hilt::abort_mpi(1);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}
