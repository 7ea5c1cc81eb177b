#!/usr/bin/env bash
# ./run: words, errors, set-up without root, and the count that ends ./run test.
. "$(dirname "$0")/common.sh"
export HILT_BUILD=$BUILD
unset MESON_TEST_ITERATION GTEST_FILTER HILT_RECORD  # no run of CI
run=$SRC/run

expect 2 'a wrong word' "$run" tset
one_line_on_stderr
says err "run: error: no word 'tset'"
says err 'did you mean test?'
expect 2 'a word like nothing' "$run" frobnicate
one_line_on_stderr
! grep -q 'did you mean' "$scratch/err" || fail "a far-fetched suggestion: $(cat "$scratch/err")"
expect 2 'no word' "$run"
says err 'usage: ./run WORD'
expect 0 help "$run" --help
says out 'usage: ./run WORD'
if ! command -v nvcc >/dev/null; then
  expect 2 'CUDA without a compiler' "$run" build --cuda
  one_line_on_stderr
  says err 'run: error: --cuda: '
fi
expect 2 'a wrong flag of build' "$run" build fast
one_line_on_stderr
expect 2 'a wrong flag of setup' "$run" setup --pyhton
one_line_on_stderr
for word in train compare attend ring curves; do
  program=$word
  [[ $word != compare ]] || program=compare_gradients
  [[ ! -f $SRC/examples/$program.cpp ]] || continue
  expect 2 "$word before it exists" "$run" "$word" --anything
  one_line_on_stderr
  says err "run: error: $word: this version has no such program yet; words: setup build test bench"
done

# From another directory, flags passed on, and nothing but the program's own words.
expect 0 'info from elsewhere' env -C / "$run" info --json
says out '"version"'
[[ ! -s $scratch/err ]] || fail "a second call says more than the program: $(cat "$scratch/err")"
! grep -q $'\033' "$scratch/out" || fail 'colors in a pipe'
expect 2 'flags go to the program' "$run" info --jsno
says err "info: error: '--jsno'"

# Without root: everything there is fine; otherwise the command to type, once.
mkdir "$scratch/bin"
ln -s "$(command -v bash)" "$scratch/bin/bash"
for tool in env dirname awk xargs sed tr cat grep head tail meson ninja pkg-config g++
do ln -s "$(command -v "$tool")" "$scratch/bin/$tool"; done
printf '#!/bin/sh\necho 1000\n' >"$scratch/bin/id"
printf '#!/bin/sh\nexit 1\n' >"$scratch/bin/sudo"
printf '#!/bin/sh\necho "apt-get was called: $*" >&2\nexit 1\n' >"$scratch/bin/apt-get"
chmod +x "$scratch"/bin/{id,sudo,apt-get}
as_user=(env "PATH=$scratch/bin" HILT_BUILD="$scratch/build" "$run")
expect 0 'setup by a user, all there' "${as_user[@]}" setup
rm "$scratch/bin/pkg-config" "$scratch/bin/ninja"
printf '#!/bin/sh\nfor last; do :; done\n[ "$last" != gtest ]\n' >"$scratch/bin/pkg-config"
chmod +x "$scratch/bin/pkg-config"
for word in setup build info test; do
  expect 2 "$word by a user, two packages missing" "${as_user[@]}" "$word"
  one_line_on_stderr
  missing='ninja-build libgtest-dev'
  says err "run: error: missing $missing: installing needs root; run: sudo apt-get install -y $missing"
done
[[ ! -e $scratch/build ]] || fail 'something was written before the error'

# The verdict on runs made up here: a binary with one case of each kind, a crash, a time-out, a leak found at exit,
# scripts.
mkdir "$scratch/meson-logs"
log=$scratch/meson-logs/testlog.json
result() {
  local more='"starttime": 1, "duration": 2.5, "env": {}, "command": []'
  printf '{"name": "%s", "stdout": "%s", "result": "%s", "returncode": %d, '"$more"'}\n' "$@" >>"$log"
}
export HILT_VERDICTS=$scratch/verdicts HILT_BEGUN=0
verdict=$SRC/tests/tools/verdict.py
# shows STATUS WHAT: the verdict on the log as it is.
shows() {
  rm -rf "$HILT_VERDICTS" && mkdir "$HILT_VERDICTS"
  "$verdict" read a-lane "$scratch"
  expect "$1" "$2" "$verdict" show
}
has() { [[ $(cat "$scratch/out") == *"$1"* ]] || fail "'$1' is not in what it printed: $(cat "$scratch/out")"; }
cat >"$scratch/a_test.xml" <<'END'
<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="5" failures="1" disabled="1" errors="0" time="0.1" name="AllTests">
  <testsuite name="A" tests="5" failures="1" disabled="1" skipped="1" errors="0">
    <testcase name="good/0" value_param="1" status="run" result="completed" time="0." classname="A" />
    <testcase name="good/1" status="run" result="completed" time="0." classname="A" />
    <testcase name="bad" status="run" result="completed" time="0." classname="A">
      <failure message="one" type=""><![CDATA[one]]></failure>
      <failure message="two" type=""><![CDATA[two]]></failure>
    </testcase>
    <testcase name="skips" status="run" result="skipped" time="0." classname="A">
      <skipped message="no GPU"/>
    </testcase>
    <testcase name="DISABLED_x" status="notrun" result="suppressed" time="0." classname="A" />
  </testsuite>
</testsuites>
END
many=$(printf 'line %s\\n' {1..30})
good='[ RUN      ] A.good/0\nhush\n[       OK ] A.good/0 (1 ms)\n'
result 'hilt:gtest / a_test' "$good[ RUN      ] A.bad\n$many[  FAILED  ] A.bad (1 ms)\n" FAIL 1
shows 1 'one failed case'
says out 'failed: a-lane: a_test: A.bad'
[[ $(grep -c '^    line ' "$scratch/out") == 20 ]] && ! grep -q 'line 10$' "$scratch/out" ||
  fail "not the last 20 lines: $(cat "$scratch/out")"
! grep -q hush "$scratch/out" || fail 'what another case printed is shown'
says out '2 passed, 1 failed, 2 skipped'
result 'hilt:gtest / b_test' '[ RUN      ] B.first\n[       OK ] B.first\n[ RUN      ] B.second\nits last words\n' \
  FAIL -11
result 'hilt:gtest / c_test' '' TIMEOUT -15
result 'hilt:script / layering' '' OK 0
result 'hilt:script+quick / embed' 'looks for it\nno \"tool\" here\n' SKIP 77
result 'hilt:script / isa' 'a symbol\n' FAIL 1
shows 1 'everything'
has $'failed: a-lane: b_test: killed by SIGSEGV in B.second\n    its last words'
says out 'failed: a-lane: c_test: timed out'
has $'failed: a-lane: isa: exit status 1\n    a symbol'
says out 'left out: a-lane: embed: no "tool" here'
says out 'left out: a-lane: A.skips: no GPU'
[[ $(tail -n 1 "$scratch/out") == '3 passed, 4 failed, 3 skipped' ]] || fail "the count: $(cat "$scratch/out")"
# Failures, what was left out, the lanes, the counts: in this order.
order=$(grep -oE '^(failed:|left out:|lane  |a-lane|[0-9]+ passed)' "$scratch/out" | uniq | tr '\n' ' ')
[[ $order == 'failed: left out: lane   a-lane 3 passed ' ]] || fail "the order of what is shown: $order"
sed -i '/bad"/,/<\/testcase>/d' "$scratch/a_test.xml"
: >"$log"
result 'hilt:gtest / a_test' 'LeakSanitizer' FAIL 23
shows 1 'a leak at exit'
has $'failed: a-lane: a_test: exit status 23\n    LeakSanitizer'
says out '2 passed, 1 failed, 2 skipped'
: >"$log"
result 'gtest - hilt:a_test' '' OK 0  # as newer Meson calls it
result 'script+quick - hilt:layering' '' OK 0
shows 0 'nothing failed'
says out '3 passed, 0 failed, 2 skipped'
# Lanes that did not come to their tests, or count by themselves, stand beside the others.
printf 'compiling\nno such header\n' >"$scratch/stopped"
printf 'failed: a_bug: survived 3 tests\n    (Tape.*)\nleft out: more: no time\n1 passed, 1 failed, 0 skipped\n' \
  >"$scratch/counted"
"$verdict" stopped b-lane "$scratch/stopped"
"$verdict" counted mutants "$scratch/counted"
"$verdict" left-out cuda 'there is no nvcc'
expect 1 'all lanes' "$verdict" show
has $'failed: b-lane: it did not come to its tests\n    compiling\n    no such header'
has $'failed: mutants: a_bug\n    survived 3 tests\n    (Tape.*)'
says out 'left out: cuda: all of it: there is no nvcc'
says out 'left out: mutants: more: no time'
says out '4 passed, 2 failed, 2 skipped'
