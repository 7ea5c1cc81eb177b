#!/usr/bin/env bash
# A name means one thing: all sources of the library are read as one. Eight of them make an object, and which eight
# hangs on Meson and on what is found, so no two may use a name for different things.
. "$(dirname "$0")/common.sh"
cd "$SRC"
mpi=$(pkg-config --cflags ompi-c 2>/dev/null || pkg-config --cflags mpich 2>/dev/null) || mpi=''
mapfile -t sources < <(find core ops nn -name '*.cpp' ! -name '*_cpu.cpp' ! -name '*_cuda.cpp' ! -name nccl.cpp \
  ! -name walk.cpp ! -path 'core/cuda/*' | sort)
[[ $mpi ]] || mapfile -t sources < <(printf '%s\n' "${sources[@]}" | grep -v /mpi.cpp)
# read_as_one SOURCE ..: their syntax, and no more.
read_as_one() {
  printf '#include "%s"\n' "$@" >"$scratch/one.cpp"
  # shellcheck disable=SC2086
  "$CXX" -std=c++20 -fsyntax-only -I . -I "$BUILD" -iquote "$BUILD/core" $mpi -DOMPI_SKIP_MPICXX \
    -DMPICH_SKIP_MPICXX -pthread "$scratch/one.cpp" >"$scratch/out" 2>&1
}
((${#sources[@]} > 40)) || fail "only ${#sources[@]} sources"
read_as_one "${sources[@]/#/$SRC/}" || fail $'a name with two meanings:\n'"$(grep -m 9 error "$scratch/out")"
echo 'namespace { struct Step {}; }' | tee "$scratch/a.cpp" >"$scratch/b.cpp"
! read_as_one "$scratch"/[ab].cpp || fail 'the judge overlooks a name with two meanings'
echo "${#sources[@]} sources"
