#!/usr/bin/env bash
# Which room may include which. First the tree, then the judge: each rule is broken once in a copy and must be named.
. "$(dirname "$0")/common.sh"

# Prints `file:line: rule` for each include that breaks one.
violations() (
  cd "$1"
  directories=$(ls -d core ops nn examples 2>/dev/null || true)
  # shellcheck disable=SC2086
  {
    find $directories -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -printf 'file %p\n'
    grep -rlF 'namespace [[gnu::visibility("default")]] hilt' --include='*.h' $directories | sed 's/^/public /'
    grep -rnE '^[[:space:]]*#[[:space:]]*include' --include='*.h' --include='*.cpp' --include='*.cu' \
      --include='*.cuh' $directories |
      sed -E 's/^([^:]*):([0-9]+):.*([<"])([^>"]*)[>"].*/include \1 \2 \3 \4/'
  } | awk '
    function clean(path) {  # a/b/../c -> a/c
      while (path ~ /[^\/]+\/\.\.\//) sub(/[^\/]+\/\.\.\//, "", path)
      return path
    }
    function bad(rule) { print $2 ":" $3 ": " rule }
    BEGIN {
      rank["core"] = 1; rank["ops"] = 2; rank["nn"] = 3; rank["examples"] = 4
      file["core/config.h"]; public["core/config.h"]
    }
    $1 == "file" { file[$2] }
    $1 == "public" { public[$2] }
    $1 == "include" && $4 == "<" {
      if ($5 ~ /^(Eigen|unsupported)\// && $2 !~ /\.cpp$/) bad("Eigen only in .cpp files")
      if ($5 ~ /^(cuda|cublas|curand|cusparse|cusolver|nvtx|nvml|nvrtc|mma|cooperative_groups|cub\/|thrust\/|cute\/)/ &&
          $2 !~ /^core\/cuda\/|\.cu$|\.cuh$|_cuda\.cpp$|\/nccl\.cpp$/)
        bad("CUDA headers only in core/cuda, *.cu, *.cuh, *_cuda.cpp and core/comm/nccl.cpp")
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
      if (($2 in public) && !(target in public))
        bad("a public header includes standard C++ headers and public headers alone")
      if (from[1] == "nn" && to[1] != "nn" && !(target in public))
        bad("nn uses the public headers of ops and core alone")
      if (from[1] == "examples" && to[1] != "examples") bad("programs use <hilt/..> alone")
      # Rooms within the layers: what a directory may know, see its README.

      if (here ~ /^core\/$/ && target ~ /^core\/(comm|io)\//) bad("the heart includes neither core/comm nor core/io")
      if (here ~ /^core\/io\// && target ~ /^core\/(comm|cuda)\//) bad("core/io knows neither ranks nor GPUs")
      if (here ~ /^ops\/hilbert\/plan\// && target ~ /^ops\// && target !~ /^ops\/hilbert\/plan\//)
        bad("plan/ includes core and itself alone")
      if (here ~ /^ops\/hilbert\/ranks\// && target ~ /^ops\// && target !~ /^ops\/hilbert\/(plan|ranks)\//)
        bad("ranks/ includes core, plan/ and itself alone")
      if (here ~ /^ops\/hilbert\/kernels\// && target ~ /^ops\/hilbert\/[^\/]*$/)
        bad("kernels/ does not look up at its callers")
      includes[$2] = includes[$2] " " target
      if (target ~ /^ops\/hilbert\/kernels\// && here !~ /^ops\/hilbert\//) bad("kernels/ is private to ops/hilbert")
      if (target ~ /^ops\/hilbert\/kernels\/(cuda|hopper)\// && here !~ /^ops\/hilbert\/kernels\//)
        bad("attention knows its kernels by kernels/attention.h alone")
      if (target ~ /^ops\/gemm\// && target != "ops/gemm/gemm.h" && here !~ /^ops\/gemm\//)
        bad("ops/gemm has one door, gemm.h")
      if (here ~ /^examples\/train\/tasks\// && target !~ /^examples\/train\/tasks\//)
        bad("tasks/ knows the library alone")
      if (here ~ /^examples\/program\// && target !~ /^examples\/program\//) bad("program/ knows no program")
    }
    # What a room must not see it must not see through others either.
    function reaches(from, what,  list, n, i) {
      if (from ~ what) return 1
      if ((what, from) in seen) return seen[what, from]
      seen[what, from] = 0
      n = split(includes[from], list, " ")
      for (i = 1; i <= n; ++i) if (reaches(list[i], what)) return seen[what, from] = 1
      return 0
    }
    END {
      for (f in includes) {
        if (f ~ /^ops\/hilbert\/(plan|ranks)\// && reaches(f, "^core/(cuda/|tensor|tape|storage|dispatch|device)"))
          print f ": plan/ and ranks/ see no tensor and no GPU"
        if (f ~ /^ops\/hilbert\/kernels\// && reaches(f, "^core/tape")) print f ": kernels/ sees no tape"
      }
    }'
  grep -rnoE 'std::mutex' ops/hilbert/plan ops/hilbert/ranks ops/hilbert/kernels |
    sed 's/:std::mutex$/: a Memo has its own lock; threads with two plans share none/' || true
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
  grep -F "$file" <<<"$(violations "$scratch/copy")" | grep -F "$rule" >/dev/null ||
    fail "the judge overlooks: $rule, in $file: $*"
}
breaks 'core may not include ops' core/tensor.cpp '#include "ops/ops.h"'
breaks 'core may not include ops' core/dispatch.h '#  include "../ops/ops.h"'
breaks 'ops may not include examples' ops/view.cpp '#include "examples/program/program.h"'
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
breaks 'the heart includes neither' core/tape.cpp '#include "core/comm/link.h"'
breaks 'core/io knows neither' core/io/npy.cpp '#include "core/cuda/context.h"'
breaks 'plan/ includes core and itself alone' ops/hilbert/plan/plan.cpp '#include "ops/ops.h"'
breaks 'see no tensor and no GPU' ops/hilbert/plan/plan.cpp '#include "core/tensor.h"'
breaks 'see no tensor and no GPU' ops/hilbert/plan/tiling.h '#include "../../../core/tensor.h"'
breaks 'see no tensor and no GPU' ops/hilbert/plan/plan.cpp '#include "core/random.h"'
breaks 'ranks/ includes core, plan/ and itself alone' ops/hilbert/ranks/shards.cpp '#include "ops/hilbert/ring.h"'
breaks 'plan/ includes core and itself alone' ops/hilbert/plan/plan.cpp '#include "ops/hilbert/ranks/shards.h"'
breaks 'see no tensor and no GPU' ops/hilbert/ranks/shards.h '#include "../../../core/tensor.h"'
breaks 'threads with two plans share none' ops/hilbert/kernels/compact.cpp 'static std::mutex mutex;'
breaks 'kernels/ sees no tape' ops/hilbert/kernels/cuda/forward.cu '#include "core/tape.h"'
breaks 'kernels/ does not look up' ops/hilbert/kernels/attention_cpu.cpp '#include "ops/hilbert/call.h"'
breaks 'kernels/ is private' ops/softmax.cpp '#include "ops/hilbert/kernels/attention.h"'
breaks 'attention knows its kernels' ops/hilbert/call.cpp '#include "ops/hilbert/kernels/cuda/kernels.h"'
breaks 'ops/gemm has one door' ops/linear.cpp '#include "ops/gemm/gemm_cpu.cpp"'
breaks 'tasks/ knows the library alone' examples/train/tasks/task.cpp '#include "../settings.h"'
breaks 'program/ knows no program' examples/program/program.cpp '#include "../train/settings.h"'
