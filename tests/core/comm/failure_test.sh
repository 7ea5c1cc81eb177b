#!/usr/bin/env bash
# One of four ranks is killed, frozen, leaves, throws or runs out of memory, at each moment of a run: every process must end with the right status and one
# line that names the rank, and nothing be left over. OVERS and FATES choose some; nccl, which needs four GPUs, only where it is named, and takes a message
# of another size as it comes.
# Where HILT_DEEP is set, all must end within the deadline and ten seconds. Elsewhere no seconds are judged, and the deadline is long, so that a rank that is
# only slow is not taken for the lost one; of those that only silence shows, one frozen rank is tried, and whoever never came.
# A rank that comes when rank 0 has already given up on another waits for the deadline too.
. "$SRC/tests/packaging/common.sh"
deep=${HILT_DEEP-}
deadline=${HILT_DEADLINE-}
ranks=${RANKS:-$BUILD/tests/core/failing_ranks}
at_once=${AT_ONCE:-3}
mkdir "$scratch/cells"

# cell OVER FATE MOMENT: runs it, and says in a file of its own what is wrong, if anything.
cell() {
  local over=$1 fate=$2 moment=$3 mark="hilt-cell-$$-$1-$2-$3" status=0 start=$EPOCHREALTIME wanted=6 wrong=()
  local out=$scratch/cells/$1-$2-$3
  local HILT_DEADLINE=${HILT_DEADLINE:-60}
  if [[ $deep ]]; then HILT_DEADLINE=${deadline:-3}
  elif [[ ! $deadline && ( $fate == stop || $moment =~ start|meeting ) ]]; then HILT_DEADLINE=10; fi
  export HILT_DEADLINE
  timeout -k 5 600 "$ranks" "$over" "$fate" "$moment" "$mark" >"$out.out" 2>"$out.err" </dev/null || status=$?
  local ms=$(((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}) / 1000))
  case $fate in
    none | check) wanted=0 ;;
    throw) wanted=3 ;;
    memory) wanted=4 ;;
  esac
  # mpirun returns the status of whoever ended first.
  if [[ $over == mpi && $status == 6 && $wanted != 0 ]]; then wanted=6; fi
  [[ $status == "$wanted" ]] || wrong+=("exit status $status, expected $wanted")
  [[ ! $deep ]] || ((ms <= (HILT_DEADLINE + 10) * 1000)) || wrong+=("took $ms ms")
  if [[ $status != 0 ]]; then
    local named='rank 2|did not come .*: 2'
    [[ $over$fate$moment != mpikillstart ]] || named+='|a rank was ended by signal 9'  # mpirun does not always say which
    [[ $(grep -c '^failing_ranks: error: ' "$out.err") == 1 && $(wc -l <"$out.err") == 1 ]] || wrong+=('one line on stderr expected')
    grep -qE "$named" "$out.err" || wrong+=('rank 2 is not named')
  fi
  for _ in {1..300}; do
    [[ $(pids_with "$mark") ]] || break
    sleep 0.2
  done
  [[ ! $(pids_with "$mark") ]] || wrong+=("processes left over: $(pids_with "$mark" | xargs)")
  printf '%-7s %-6s %-8s %5d ms  %d  %s\n' "$over" "$fate" "$moment" "$ms" "$status" "$(head -c 300 "$out.err" | tr '\n' '|')" >"$out.line"
  ((${#wrong[@]} == 0)) || printf '%s; ' "${wrong[@]}" >"$out.wrong"
}

overs=(threads tcp)
if [[ -n ${OVERS-} ]]; then read -ra overs <<<"$OVERS"
elif ! command -v mpirun >/dev/null; then echo 'mpi left out: there is no mpirun'
elif [[ $("$ranks" mpi none none 2>&1 || true) == *'built without MPI'* ]]; then echo 'mpi left out: built without it'
else overs+=(mpi); fi
for over in "${overs[@]}"; do
  for fate in ${FATES:-none check early size kill stop exit throw memory}; do
    for moment in start meeting hop home sum end goodbye; do
      # Threads are killed or frozen together or not at all; what is thrown is thrown by work, or before.
      # A rank that runs out of memory before there is a link is one that throws.
      if [[ $over == threads && $fate =~ kill|stop|exit ]] || [[ $over == threads && $moment =~ start|meeting ]]; then continue; fi
      if [[ $fate =~ throw|memory && $moment == meeting ]] || [[ $fate$moment == memorystart ]] || [[ $fate =~ none|check && $moment != end ]] ||
        [[ $over$fate == ncclsize ]] || [[ $fate == early && $moment != hop ]] || [[ $fate == size && $moment != hop ]]; then continue; fi
      if [[ $fate == stop && ! $deep && ! ${FATES-} && $over$moment != tcphop ]]; then continue; fi
      # A rank killed while MPI begins can lock mpirun up; how that ends is a matter of seconds.
      if [[ $over$fate == mpikill && $moment =~ start|meeting && ! $deep && ! ${FATES-} ]]; then continue; fi
      while (($(jobs -rp | wc -l) >= at_once)); do wait -n || true; done
      cell "$over" "$fate" "$moment" &
    done
  done
done
wait
sort "$scratch"/cells/*.line
for wrong in "$scratch"/cells/*.wrong; do
  [[ -e $wrong ]] || continue
  printf '%s: %s it said: %s\n' "$(basename "$wrong" .wrong)" "$(cat "$wrong")" "$(cat "${wrong%.wrong}.err")" >&2
  bad=1
done
[[ -z ${bad-} ]] || fail 'cells above'
[[ $deep ]] || echo 'seconds, and other frozen ranks, are judged where HILT_DEEP is set'
