#pragma once
#include <hilt/core/comm/comm.h>
#include <functional>
#include <string>

// Private to examples/: a program that is several ranks.

namespace program {

/// How many ranks mpirun or srun has started, by what MPI's environment says; else `otherwise`.
std::int64_t ranks_started(std::int64_t otherwise);

/// Runs work(comm) as `ranks` ranks: where mpirun or srun started this process it is one of them,
/// else they are threads of this process. The exit status once all have ended. What work throws is
/// told to all ranks and thrown; run() then says it. A thread that does not end is left behind:
/// then the process ends here.
int run_as(const std::string& program, std::int64_t ranks, const std::string& over,
           const std::function<int(hilt::Comm&)>& work);

}  // namespace program
