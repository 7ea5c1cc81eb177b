#!/usr/bin/env bash
# One of four ranks is killed, frozen, leaves, throws or runs out of memory, at each moment of a run over threads or
# MPI: every process must end with the right status, one line of ours must name the rank, and nothing be left over.
# OVERS and FATES choose some; nccl, which needs four GPUs, only where it is named, and takes a message of another size
# as it comes. Who is killed is mpirun's to name, and the status its own; but where it lets the others live (outlive: a
# kill under --enable-recovery), each names the rank and ends with 6. Where HILT_DEEP is set, all must end within the
# deadline and ten seconds, in one line of error. Elsewhere no seconds are judged, one frozen rank of each kind is
# tried, and processes that find the same fault at the same time may each say so.
. "$SRC/tests/packaging/common.sh"
deep=${HILT_DEEP-}
deadline=${HILT_DEADLINE-}
ranks=${RANKS:-$BUILD/tests/core/failing_ranks}
at_once=${AT_ONCE:-3}
mkdir "$scratch/cells"

# cell OVER FATE MOMENT: runs it, and says in a file of its own what is wrong, if anything.
cell() {
  local over=$1 fate=$2 moment=$3 mark="hilt-cell-$$-$1-$2-$3" status start wanted=6 wrong=()
  local out=$scratch/cells/$1-$2-$3
  local HILT_DEADLINE=${HILT_DEADLINE:-60}
  if [[ $deep ]]; then HILT_DEADLINE=${deadline:-3}
  elif [[ ! $deadline && $fate =~ stop|outlive ]]; then HILT_DEADLINE=10; fi
  export HILT_DEADLINE
  local mpirun=()
  [[ $over != mpi ]] || mpirun=(mpirun -n 4 --oversubscribe --bind-to none --mca pml ob1 --mca btl self,vader \
    --mca mpi_yield_when_idle 1)
  [[ $fate != outlive ]] || mpirun+=(--enable-recovery)
  # Open MPI's launcher may crash as it passes on why a rank aborts, and then says of no rank that it did: again.
  for _ in 1 2 3; do
    status=0 start=$EPOCHREALTIME
    timeout -k 5 600 "${mpirun[@]}" "$ranks" "$over" "${fate/outlive/kill}" "$moment" "$mark" \
      >"$out.out" 2>"$out.err" </dev/null || status=$?
    if [[ $over != mpi || $status != 139 ]] || grep -q 'exited on signal 11' "$out.err"; then break; fi
  done
  local ms=$(((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}) / 1000))
  case $fate in
    none | check) wanted=0 ;;
    throw) wanted=3 ;;
    memory) wanted=4 ;;
    outlive) wanted=$status ;;
  esac
  # The launcher's status where a rank went without a word; where all heard why, that of whoever it ends first.
  if [[ $over == mpi && $fate =~ kill|exit && $status != 0 ]] || [[ $over == mpi && $status == 6 &&
    $wanted != 0 ]]; then wanted=$status; fi
  [[ $status == "$wanted" ]] || wrong+=("exit status $status, expected $wanted")
  [[ ! $deep ]] || ((ms <= (HILT_DEADLINE + 10) * 1000)) || wrong+=("took $ms ms")
  [[ $fate != outlive ]] || grep -q 'with errorcode 6' "$out.err" || wrong+=('the others did not end with 6')
  if [[ $status != 0 || $fate == outlive ]]; then
    local named='rank 2' lines
    lines=$(grep -c '^failing_ranks: error: ' "$out.err" || true)
    if [[ $over == mpi && $fate =~ kill|exit ]]
    then named='rank 2|exited on signal 9|exiting improperly|non-zero exit code'
    elif ((lines == 0)); then wrong+=('no line of error')
    elif [[ $over != mpi || $deep && $fate != outlive ]] && ((lines > 1))
    then wrong+=('one line of error expected'); fi
    [[ $over == mpi || $(wc -l <"$out.err") == 1 ]] || wrong+=('one line on stderr expected')
    grep -qE "$named" "$out.err" || wrong+=('rank 2 is not named')
    ! grep '^failing_ranks: error: ' "$out.err" | grep -qv 'rank 2' || wrong+=('a line of error without rank 2')
  fi
  for _ in {1..300}; do
    [[ $(pids_with "$mark") ]] || break
    sleep 0.2
  done
  [[ ! $(pids_with "$mark") ]] || wrong+=("processes left over: $(pids_with "$mark" | xargs)")
  printf '%-7s %-6s %-8s %5d ms  %d  %s\n' "$over" "$fate" "$moment" "$ms" "$status" "$(head -c 300 "$out.err" |
    tr '\n' '|')" >"$out.line"
  ((${#wrong[@]} == 0)) || printf '%s; ' "${wrong[@]}" >"$out.wrong"
}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
overs=(threads)
if [[ -n ${OVERS-} ]]; then read -ra overs <<<"$OVERS"
elif ! command -v mpirun >/dev/null; then echo 'mpi left out: there is no mpirun'
elif [[ $("$ranks" mpi none none 2>&1 || true) == *'built without MPI'* ]]; then echo 'mpi left out: built without it'
else overs+=(mpi); fi
for over in "${overs[@]}"; do
  for fate in ${FATES:-none check early size kill outlive stop exit throw memory}; do
    for moment in start hop home sum end goodbye; do
      # Threads are killed together or not at all; what is thrown is thrown by work.
      if [[ $over == threads && $fate =~ kill|exit ]] || [[ $over == threads && $moment == start ]]; then continue; fi
      if [[ $fate$moment == memorystart ]] || [[ $fate =~ none|check && $moment != end ]] ||
        [[ $over$fate == ncclsize ]] ||
        [[ $fate =~ early|size && $moment != hop ]]; then continue; fi
      if [[ $fate =~ stop|outlive && ! $deep && ! ${FATES-} && $moment != hop ]]; then continue; fi
      if [[ $fate == outlive ]] && [[ $over != mpi || $moment =~ start|end|goodbye ]]; then continue; fi
      # A thread that freezes once the others need it no more holds up the end of the process alone.
      if [[ $over$fate$moment == threadsstopgoodbye ]]; then continue; fi
      # Before MPI begins a frozen rank is the launcher's, and what a rank throws is not told.
      if [[ $over == mpi && $moment == start && $fate =~ stop|exit ]]; then continue; fi
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
