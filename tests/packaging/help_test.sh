#!/usr/bin/env bash
# ./run WORD --help without a build: examples/help.txt is what the programs say, and nothing is configured for it.
# help_test.sh --write writes it.
. "$(dirname "$0")/common.sh"
said() {
  local program
  for program in train sample compare_gradients attend ring curves hello_tape info; do
    printf '== %s\n' "$program"
    COLUMNS=80 "$BUILD/examples/$program" --help </dev/null
  done
}
if [[ ${1-} == --write ]]; then said >"$SRC/examples/help.txt" && exit; fi
said | diff "$SRC/examples/help.txt" - >"$scratch/diff" ||
  fail $'examples/help.txt is of before; tests/packaging/help_test.sh --write\n'"$(cat "$scratch/diff")"
for word in train compare attend hello; do
  expect 0 "$word --help" env HILT_BUILD="$scratch/none" "$SRC/run" "$word" --help
  says out '-h,--help  '
done
says out 'Print this and exit'
for word in setup build test bench docs; do
  expect 0 "$word --help" env HILT_BUILD="$scratch/none" "$SRC/run" "$word" --help
  says out "  $word "
done
[[ ! -e $scratch/none ]] || fail 'a question for help made a build directory'
