// In place of mpi.cpp where there is no MPI.
#include "core/comm/comm.h"

namespace hilt {

Comm mpi_ranks() {
  fail_with(
      Code::distributed,
      "mpi_ranks: built without MPI; install libopenmpi-dev, delete the build directory and build with -Dmpi=enabled");
}

}  // namespace hilt
