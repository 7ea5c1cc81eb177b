#pragma once
#include <hilt/core/comm/comm.h>
#include <functional>
#include <string>

// Private to examples/: a program that is several ranks.

namespace program {

/// Runs work(comm) as `ranks` ranks over a --comm: threads of this process, or processes that run
/// this very program with the same arguments, joined by mpi or tcp. The exit status once all have
/// ended, after at most one line on stderr. A process that torchrun, mpirun or this function
/// started is one rank and runs work itself. What work throws is told to all ranks.
int run_as(const std::string& program, int ranks, const std::string& over, int argc, char** argv,
           const std::function<int(hilt::Comm&)>& work);

}  // namespace program
