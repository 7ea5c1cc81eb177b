#!/usr/bin/env bash
# Who may include whom. First the tree, then the judge: each rule is broken once in a copy and must be named.
. "$(dirname "$0")/common.sh"

# Prints `file:line: rule` for each include that breaks one.
violations() (
  cd "$1"
  directories=$(ls -d core ops nn examples 2>/dev/null || true)
  # shellcheck disable=SC2086
  {
    find $directories -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -printf 'file %p\n'
    grep -rlF 'namespace [[gnu::visibility("default")]] hilt' --include='*.h' $directories | sed 's/^/public /'
    grep -rnE '^[[:space:]]*#[[:space:]]*include' --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' $directories |
      sed -E 's/^([^:]*):([0-9]+):.*([<"])([^>"]*)[>"].*/include \1 \2 \3 \4/'
  } | awk '
    function clean(path) {  # a/b/../c -> a/c
      while (path ~ /[^\/]+\/\.\.\//) sub(/[^\/]+\/\.\.\//, "", path)
      return path
    }
    function bad(rule) { print $2 ":" $3 ": " rule }
    BEGIN { rank["core"] = 1; rank["ops"] = 2; rank["nn"] = 3; rank["examples"] = 4; file["core/config.h"]; public["core/config.h"] }
    $1 == "file" { file[$2] }
    $1 == "public" { public[$2] }
    $1 == "include" && $4 == "<" {
      if ($5 ~ /^(Eigen|unsupported)\// && $2 !~ /\.cpp$/) bad("Eigen only in .cpp files")
      if ($5 ~ /^(cuda|cublas|curand|cusparse|cusolver|nvtx|nvml|nvrtc|mma|cooperative_groups|cub\/|thrust\/|cute\/)/ && $2 !~ /^core\/cuda\/|\.cu$|\.cuh$|_(cuda|nccl)\.cpp$/)
        bad("CUDA headers only in core/cuda, *.cu, *.cuh, *_cuda.cpp and comm_nccl.cpp")
      if ($5 ~ /^(nccl|mpi)\.h$/ && user[$5]++) bad($5 " in one .cpp only")
      if ($5 ~ /^(nccl|mpi)\.h$/ && $2 !~ /\.cpp$/) bad($5 " in one .cpp only")
      if ($5 ~ /^CLI\// && user["CLI"]++) bad("CLI11 in one .cpp only")
      if ($5 ~ /^hilt\// && $2 !~ /^examples\//) bad("<hilt/..> is for users; inside, include by path")
      if (($2 in public) && $5 ~ /[.\/]/) bad("a public header includes standard C++ headers and public headers alone")
    }
    $1 == "include" && $4 == "\"" && $5 !~ /\.inc$/ {  # .inc: generated
      here = $2; sub(/[^\/]*$/, "", here)
      target = clean(here $5)
      relative = target in file
      if ($5 == "config.h" && here == "core/") relative = 1
      if (!relative) target = $5
      if (!(target in file)) { bad("\"" $5 "\" is neither beside this file nor a path from the root"); next }
      split($2, from, "/"); split(target, to, "/")
      if (rank[to[1]] > rank[from[1]]) bad(from[1] " may not include " to[1])
      if (($2 in public) && !relative) bad("public headers include each other by relative path")
      if (($2 in public) && !(target in public)) bad("a public header includes standard C++ headers and public headers alone")
      if (from[1] == "nn" && to[1] != "nn" && target != "core/text.h" && !(target in public)) bad("nn uses the public headers of ops and core alone")
      # core/text.h has spelling suggestions, nothing of tensors; its .cpp is compiled into the programs
      if (from[1] == "examples" && to[1] != "examples" && target != "core/text.h") bad("programs use <hilt/..> alone")
    }'
)

found=$(violations "$SRC")
[[ -z $found ]] || fail $'includes that break the layers:\n'"$found"

# breaks RULE FILE TEXT..: appends the lines to a file of a copy of the tree.
breaks() {
  local rule=$1 file=$2
  shift 2
  rm -rf "$scratch/copy"
  mkdir "$scratch/copy"
  (cd "$SRC" && cp -r core ops nn examples "$scratch/copy")
  mkdir -p "$(dirname "$scratch/copy/$file")"
  printf '%s\n' "$@" >>"$scratch/copy/$file"
  violations "$scratch/copy" | grep -F "$file" | grep -qF "$rule" || fail "the judge overlooks: $rule, in $file: $*"
}
breaks 'core may not include ops' core/tensor.cpp '#include "ops/ops.h"'
breaks 'core may not include ops' core/dispatch.h '#  include "../ops/ops.h"'
breaks 'ops may not include examples' ops/view.cpp '#include "examples/program.h"'
breaks 'Eigen only in .cpp files' ops/helpers.h '#include <Eigen/Core>'
breaks 'CUDA headers only' core/storage.cpp '#include <cuda_runtime.h>'
breaks 'mpi.h in one .cpp only' core/tape.cpp '#include <mpi.h>' '#include <mpi.h>'
breaks 'nccl.h in one .cpp only' core/strided.h '#include <nccl.h>'
breaks 'standard C++ headers and public headers alone' core/tape.h '#include <sys/mman.h>'
breaks 'standard C++ headers and public headers alone' core/tape.h '#include "dispatch.h"'
breaks 'by relative path' ops/ops.h '#include "core/tape.h"'
breaks 'nn uses the public headers' nn/layers.h '#include "core/strided.h"'
breaks 'programs use <hilt/..> alone' examples/info.cpp '#include "core/tensor.h"'
breaks '<hilt/..> is for users' ops/view.cpp '#include <hilt/hilt.h>'
breaks 'CLI11 in one .cpp only' examples/info.cpp '#include <CLI/CLI.hpp>' '#include <CLI/CLI.hpp>'
breaks 'neither beside this file' ops/view.cpp '#include "tensor.h"'
