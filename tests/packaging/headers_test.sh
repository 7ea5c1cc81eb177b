#!/usr/bin/env bash
# Each public header compiles alone, without a warning, by the compiler of the build and, with HILT_DEEP=1, by clang;
# and the headers that are installed are those that open their namespace with default visibility.
. "$(dirname "$0")/common.sh"

(cd "$BUILD/include/hilt" && find -L . -name '*.h' ! -path ./hilt.h ! -path ./core/config.h | sort) >"$scratch/listed"
(cd "$SRC" && find ./core ./ops $(ls -d ./nn 2>/dev/null) -name '*.h' -exec grep \
  -lF 'namespace [[gnu::visibility("default")]] hilt' {} + | sort) >"$scratch/public"
diff "$scratch/listed" "$scratch/public" >"$scratch/diff" ||
  fail $'the lists in meson.build (<) and the headers with default visibility (>) differ:\n'"$(cat "$scratch/diff")"

warnings=(-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror)
# alone HEADER COMPILER FLAG ..: what a stranger's first include costs him in messages.
alone() {
  local header=${1#./}
  shift
  echo "#include <hilt/$header>" | "$@" -x c++ - >"$scratch/${header//\//_}.err" 2>&1 ||
    { echo "<hilt/$header>"; head -n 20 "$scratch/${header//\//_}.err"; return 1; }
}
export -f alone
export scratch
for compiler in "$CXX" ${HILT_DEEP:+clang++}; do
  command -v "$compiler" >/dev/null || continue
  { echo ./hilt.h; echo ./core/config.h; cat "$scratch/listed"; } |
    xargs -P "$(nproc)" -I {} bash -c 'alone "$@"' alone {} "$compiler" -std=c++20 -fsyntax-only "${warnings[@]}" -I \
    "$BUILD/include" >"$scratch/err" ||
    fail "$compiler: headers that do not compile alone: $(cat "$scratch/err")"
  # One file by two paths, in the tree and through <hilt/..>, is still one file.
  printf '#include "core/tape.h"\n#include "ops/ops.h"\n#include <hilt/hilt.h>\n' |
    "$compiler" -std=c++20 -fsyntax-only "${warnings[@]}" -I "$BUILD/include" -iquote "$BUILD/core" -I "$SRC" \
    -x c++ - || fail "$compiler: a header seen twice"
done
