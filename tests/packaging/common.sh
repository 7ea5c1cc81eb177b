# Sourced by the scripts beside it. The build passes SRC, BUILD and CXX; each script gets a scratch directory.
set -euo pipefail
export LC_ALL=C
scratch=$(mktemp -d)
trap 'for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done; rm -rf "$scratch"' EXIT

fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }
# expect STATUS WHAT COMMAND..: runs it with its output in $scratch/out and $scratch/err.
expect() {
  local want=$1 what=$2 got=0
  shift 2
  [[ " $* " != *' - '* ]] || fail "$what: a script on standard input would not be read"
  "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || got=$?
  [[ $got == "$want" ]] || fail "$what: exit status $got, expected $want; it printed: $(cat "$scratch/out" \
    "$scratch/err")"
}
says() { grep -qF -- "$2" "$scratch/$1" || fail "'$2' is not in what it printed: $(cat "$scratch/$1")"; }
one_line_on_stderr() { [[ $(wc -l <"$scratch/err") == 1 && ! -s $scratch/out ]] ||
  fail "one line on stderr expected: $(cat "$scratch/out" "$scratch/err")"; }
# Processes whose command line holds this. Without pgrep, which a small system lacks.
pids_with() { { grep -lsaF -f <(printf '%s\n' "$1") /proc/[0-9]*/cmdline || true; } |
  sed 's|/proc/\([0-9]*\)/cmdline|\1|'; }
# seen PID COMMAND..: waits until COMMAND succeeds, for as long as process PID lives; false if it never does. The pause
# decides nothing.
seen() {
  local pid=$1 lives=1
  shift
  until "$@"; do
    ((lives)) || return 1
    kill -0 "$pid" 2>/dev/null || lives=0  # what it did last still counts
    sleep 0.01
  done
}
# Milliseconds of processor time of the children that have ended, as $spent. It stands still while others have the
# processor.
spend() {
  local user system
  times >"$scratch/times"
  { read -r _; read -r user system; } <"$scratch/times"
  spent=0
  for part in "$user" "$system"; do
    local seconds=${part#*m}
    seconds=${seconds%s}
    spent=$((spent + 60000 * ${part%m*} + 10#${seconds/./}))
  done
}
# expect_soon STATUS WHAT COMMAND..: as expect, and for less than $most_ms of processor time. By a clock only where
# HILT_DEEP is set.
dearest=0 slow=()
expect_soon() {
  local before start=$EPOCHREALTIME ms
  spend
  before=$spent
  expect "$@"
  ms=$(((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}) / 1000))
  spend
  spent=$((spent - before))
  ((spent < most_ms)) || fail "$2: took $spent ms of processor time, at most $most_ms are right"
  ((spent <= dearest)) || dearest=$spent
  [[ ! ${HILT_DEEP-} ]] || ((ms < 1000)) || slow+=("$2: $ms ms")
}
# soon_enough PROGRAM: what expect_soon found by a clock. It counts where the machine is not to blame: the time of a run
# that does nothing.
soon_enough() {
  echo "the dearest error took $dearest ms of processor time, of $most_ms"
  ((${#slow[@]})) || return 0
  local start=$EPOCHREALTIME
  "$1" --help >/dev/null
  (((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}) / 1000 > 200)) || fail "errors that took longer than a second: ${slow[*]}"
}
