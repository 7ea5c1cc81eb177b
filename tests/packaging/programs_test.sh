#!/usr/bin/env bash
# hello_tape prints what its first comment says; info prints its block, valid JSON, and one line for a wrong option.
. "$(dirname "$0")/common.sh"
programs=$BUILD/examples

sed -n '/^\/\/ Prints:$/,/^[^/]/p' "$SRC/examples/hello_tape.cpp" | sed -n 's|^//   ||p' >"$scratch/promised"
expect 0 hello_tape "$programs/hello_tape"
diff "$scratch/promised" "$scratch/out" >"$scratch/diff" ||
  fail $'hello_tape: its comment (<) and its output (>) differ:\n'"$(cat "$scratch/diff")"

expect 0 info "$programs/info"
for line in "hilt      $VERSION" 'BLAS      ' 'CUDA      ' 'device    cpu: ' 'ISA       ' 'threads   ' 'memory    '
do says out "$line"; done
narrowest=$(sed -n 's/.*; built for \([a-z0-9]*\).*/\1/p' "$scratch/out")
expect 0 'info, two threads' env HILT_THREADS=2 HILT_ISA="$narrowest" "$programs/info"
says out 'threads   2'
says out "ISA       $narrowest in use"
expect 0 'info --json' "$programs/info" --json
if command -v python3 >/dev/null; then
  expect 0 'info --json read by python3' python3 -c "
import json, subprocess, sys
info = json.loads(subprocess.check_output([sys.argv[1], '--json']))
assert info['version'] == sys.argv[2] and info['threads'] >= 1 and info['isa_active'] in info['isa_built'], info
assert info['devices'] and info['compiler'] and info['blas'], info
assert info['memory_bytes'] >= info['memory_available_bytes'] > 0, info
" "$programs/info" "$VERSION"
fi

expect 2 'info --jsno' "$programs/info" --jsno
one_line_on_stderr
says err "info: error: '--jsno'"
says err 'did you mean --json?'
expect 2 'info with a word too many' "$programs/info" json
one_line_on_stderr
expect 2 'info, bad HILT_THREADS' env HILT_THREADS=none "$programs/info"
one_line_on_stderr
says err "info: error: HILT_THREADS: 'none'"
expect 0 'info --help' "$programs/info" --help
says out '--json'
# A full disk is told, a closed pipe is not.
expect 3 'info to a full disk' sh -c '"$0" >/dev/full' "$programs/info"
says err 'info: error: standard output'
expect 0 'info into a closed pipe' sh -c '"$0" 2>&1 >&3 3>&- | cat' "$programs/info" 3> >(exit 0)
