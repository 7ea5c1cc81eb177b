// Ranks as threads of this process, or as the processes that MPI has started.
#include "program.h"
#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <thread>

namespace program {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kGrace(6000), kLastWord(2000);

/// What work throws, with the rank in its message, unless a failure between ranks names them.
int named(hilt::Comm& comm, const std::function<int(hilt::Comm&)>& work) {
  try {
    return work(comm);
  } catch (...) {
    const hilt::Error e = error_in_flight();
    if (e.code() == hilt::Code::distributed) throw;
    throw hilt::Error(e.code(), "rank " + std::to_string(comm.rank()) + ": " + e.what());
  }
}

/// No thread can be ended from outside. A rank that waited for one has used up the deadline.
void end_in_time(const std::string& program, const hilt::Error& e) {
  const milliseconds patience = (e.code() == hilt::Code::distributed ? milliseconds(0) : hilt::Comm().deadline());
  try {
    std::thread([line = program + ": error: " + printable(e.what()) + '\n', code = static_cast<int>(e.code()),
                 patience] {
      std::this_thread::sleep_for(patience + kGrace);
      std::cerr << line << std::flush;
      ::_exit(code);
    }).detach();
  } catch (const std::system_error&) {}  // nor can one be started
}

int as_threads(const std::string& program, int ranks, const std::function<int(hilt::Comm&)>& work) {
  std::atomic<int> worst = 0;
  std::atomic_flag failed;
  hilt::run_ranks(ranks, [&](hilt::Comm& comm) {
    try {
      if (const int status = named(comm, work)) worst = status;
    } catch (const hilt::Error& e) {
      if (!failed.test_and_set()) end_in_time(program, e);
      throw;
    }
  });
  return worst;
}

int as_process(const std::string& program, hilt::Comm comm, const std::function<int(hilt::Comm&)>& work) {
  try {
    comm.agree("ranks", "program = " + program);
    const int status = named(comm, work);
    comm.barrier({"end"});  // whoever does not come is named
    return status;
  } catch (const hilt::Error& e) {
    if (!comm.abort(e.what())) std::this_thread::sleep_for(kLastWord);  // whoever failed says why and ends us all
    throw;
  }
}

}  // namespace

/// Rank and ranks, as Open MPI, PMI (MPICH, Intel MPI, srun --mpi=pmi2) or Slurm with PMIx says it.
static std::pair<int, int> started() {
  for (const auto& [rank, ranks] : {std::pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                                    {"PMI_RANK", "PMI_SIZE"},
                                    {"PMIX_RANK", "SLURM_STEP_NUM_TASKS"}})
    if (const char* r = std::getenv(rank), *n = std::getenv(ranks); r && n && std::atoi(n) > 1)
      return {std::atoi(r), std::atoi(n)};
  return {0, 1};
}
std::int64_t ranks_started(std::int64_t otherwise) { return started().second > 1 ? started().second : otherwise; }
bool is_first_started() { return started().first == 0; }

int run_as(const std::string& program, std::int64_t ranks, const std::string& over,
           const std::function<int(hilt::Comm&)>& work) {
  const std::int64_t started = ranks_started(1);
  hilt::check(started == 1 || ranks == started, "--ranks (", ranks, "): there are ", started, "; leave it out");
  if (started > 1 || over == "mpi") {
    hilt::Comm comm = hilt::mpi_ranks();
    hilt::check(comm.size() == ranks, "--comm (mpi): nobody started ", ranks, " ranks; begin with: mpirun -n ", ranks);
    return as_process(program, std::move(comm), work);
  }
  return as_threads(program, static_cast<int>(ranks), work);
}

}  // namespace program
