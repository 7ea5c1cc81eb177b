#!/usr/bin/env bash
# The objects compiled for one instruction set define nothing that another object could be given by the linker: every
# weak or global symbol carries the instruction set in its name, as a template argument or as Eigen's renamed namespace.
# (DW.ref.* is a pointer to the exception handler of the language, not code.)
. "$(dirname "$0")/common.sh"

# leaks NUMBER NAME OBJECT..: NUMBER is the value in enum class Isa, as it stands in mangled names.
leaks() {
  local number=$1 name=$2
  shift 2
  nm -A --defined-only "$@" | awk '$2 ~ /^[A-TV-Zuvw]$/ || $3 ~ /^[A-TV-Zuvw]$/ { print $NF }' |
    grep -vE "3IsaE${number}E|Eigen_$name|^DW[.]ref[.]" | c++filt | sort -u
}

number=0
for isa in base avx2 avx512 avx512_bf16 avx512_amx neon; do
  mapfile -d '' objects < <(find "$BUILD/libhilt_$isa.a.p" -name '*.o' -print0 2>/dev/null)
  if ((${#objects[@]})); then
    found=$(leaks "$number" "$isa" "${objects[@]}") || true
    [[ -z $found ]] || fail $'compiled for '"$isa"$' and free to stand in for the same function elsewhere:\n'"$found"
    checked=$((${checked:-0} + ${#objects[@]}))
  fi
  number=$((number + 1))
done
[[ -n ${checked:-} ]] || fail "no object compiled for an instruction set in $BUILD"
echo "$checked objects"

# The judge itself: a kernel that grows a vector, compiled without inlining, leaves std::vector's code behind.
cat >"$scratch/leak_cpu.cpp" <<'END'
#include <vector>
#include "ops/isa.h"
namespace hilt::kernels {
template <Isa I> void collect(CpuAt<I>, std::vector<float>& out, float x) { out.push_back(x); }
template void collect(CpuAt<kIsa>, std::vector<float>&, float);
}  // namespace hilt::kernels
END
"$CXX" -std=c++20 -O0 -fPIC -DHILT_ISA=base -fvisibility=hidden -I "$SRC" -iquote "$BUILD/core" -I "$BUILD" \
  -c "$scratch/leak_cpu.cpp" -o "$scratch/leak.o"
found=$(leaks 0 base "$scratch/leak.o") || true
[[ $found == *std::vector* && $found != *collect* ]] || fail "std::vector in a kernel goes unnoticed; found: $found"
