#!/usr/bin/env bash
# What one types first must work: the default run ends within 5 % of the entropy on the widest instruction set there is,
# and the base one takes the same first steps. HILT_DEFAULT=base: the base one alone, to its end, and nothing else.
# HILT_TEST_SCALE=small begins both and ends none.
. "$SRC/tests/packaging/common.sh"
cd "$scratch"

# losses OUT: of the first 50 steps.
losses() { sed -n 's/^{"step":[0-9]*,"loss":\([0-9.e-]*\),.*/\1/p' "$1/log.jsonl" 2>/dev/null | head -50; }
# begin OUT: the default run, stopped after 50 steps, which are awaited as long as it lives.
begin() {
  "$BUILD/examples/train" --device cpu --out "$1" >said 2>&1 &
  local running=$! got=0
  until [[ $(losses "$1" | wc -l) == 50 ]]; do
    kill -0 $running || fail "the default run ended: $(cat said)"
    sleep 0.1
  done
  kill -INT $running
  wait $running || got=$?
  [[ $got == 130 ]] || fail "the default run, stopped: exit status $got: $(cat said)"
}

# whole OUT: the default run to its end.
whole() {
  expect 0 'the default run' "$BUILD/examples/train" --device cpu --out "$1"
  local above
  above=$(sed -n 's/.* \([-0-9.]*\) % above the grammar.s entropy there, .*/\1/p' "$scratch/out")
  awk -v x="$above" 'BEGIN { exit !(x != "" && x < 5) }' ||
    fail "$1: the default run ended ${above:-?} % above the entropy"
  echo "$1: the default run ended $above % above the entropy"
}

case ${HILT_DEFAULT-} in
  base)
    HILT_ISA=base whole base
    exit
    ;;
  '') ;;
  *) fail "HILT_DEFAULT=$HILT_DEFAULT: base, or not set" ;;
esac
expect 0 info "$BUILD/examples/info"
narrowest=$(sed -n 's/.*; built for \([a-z0-9]*\).*/\1/p' "$scratch/out")
HILT_ISA=$narrowest begin base
if [[ ${HILT_TEST_SCALE-} == small ]]; then begin widest; else whole widest; fi
paste <(losses base) <(losses widest) >both
awk '{ d = $1 - $2; if (d < -0.01 || d > 0.01) { print "step " NR ": " $0; bad = 1 } } END { exit bad || NR != 50 }' \
  both ||
  fail "the narrowest instructions and the widest take other first steps"
