#!/usr/bin/env bash
# Ranks over MPI tell the story of one rank and, to the bit, that of threads; send more than MPI counts; and leave a
# host's own MPI alone.
. "$SRC/tests/packaging/common.sh"
command -v mpirun >/dev/null || { echo 'left out: there is no mpirun'; exit 77; }
export HILT_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ranks() { mpirun --oversubscribe --bind-to none --mca pml ob1 --mca btl self,vader --mca mpi_yield_when_idle 1 \
  -n "$1" "$RANKS" "$2"; }
for n in 2 3 4; do
  expect 0 "the story of $n ranks" ranks $n story
  cat "$scratch/out"
done
expect 0 'messages in pieces' ranks 3 pieces
expect 1 'messages of a wrong size' ranks 2 size
says err 'ranks_mpi size: rank 0 sent 2500 bytes where rank 1 expects 2400: the ranks do not run the same call'
expect 0 'a message of 2 GiB' ranks 2 large
cat "$scratch/out"
expect 0 "a host's own communicator" ranks 4 own
echo 'passed'
