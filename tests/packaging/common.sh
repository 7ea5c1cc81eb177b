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
  [[ $got == "$want" ]] || fail "$what: exit status $got, expected $want; it printed: $(cat "$scratch/out" "$scratch/err")"
}
says() { grep -qF -- "$2" "$scratch/$1" || fail "'$2' is not in what it printed: $(cat "$scratch/$1")"; }
one_line_on_stderr() { [[ $(wc -l <"$scratch/err") == 1 && ! -s $scratch/out ]] || fail "one line on stderr expected: $(cat "$scratch/out" "$scratch/err")"; }
# Processes whose command line holds this. Without pgrep, which a small system lacks.
pids_with() { { grep -lsaF -f <(printf '%s\n' "$1") /proc/[0-9]*/cmdline || true; } | sed 's|/proc/\([0-9]*\)/cmdline|\1|'; }
