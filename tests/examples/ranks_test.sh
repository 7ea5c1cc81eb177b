#!/usr/bin/env bash
# Several ranks from outside: ring against one rank, attend over ranks, training on grids that must tell one story, and
# ranks that are lost.
. "$SRC/tests/packaging/common.sh"
programs=$BUILD/examples
cd "$scratch"
export HILT_THREADS=1 HILT_DEADLINE=200  # a guard: no part of this waits for it
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpi=(mpirun --oversubscribe --bind-to none --mca pml ob1 --mca btl self,vader --mca mpi_yield_when_idle 1)
links=threads
# started LINK RANKS: what begins a command that is to be so many ranks.
started() { if [[ $1 == mpi ]]; then begin=("${mpi[@]}" -n "$2"); else begin=(env); fi; }
if grep -q 'kHasMpi = true' "$BUILD/core/config.h" && command -v mpirun >/dev/null; then links+=' mpi'
elif grep -q 'kHasMpi = false' "$BUILD/core/config.h"; then
  expect 6 'MPI that is not built' "$programs/ring" --comm mpi
  says err 'mpi_ranks: built without MPI; install it with: ./run setup --mpi'
else echo 'without MPI: its part is left out'; fi

# ---- ring: the same numbers, and the bytes that the plan says ----
fields='ranks max_error_vs_one_rank bytes_sent_per_rank peak_bytes_per_rank predicted_bytes imbalance ms'
fields+=' one_rank_ms efficiency'
for link in $links; do
  for more in '--dtype f64 --causal token' '--transport gather --pattern segment:512,dilation=4' \
    '--shards balanced --causal curve --dtype f64 --kv-heads 2 --dropout 0.2'; do
    started "$link" 4
    # shellcheck disable=SC2086
    expect 0 "ring over $link $more" "${begin[@]}" "$programs/ring" --length 600 --head-dim 16 --repeat 1 $more
    says out "\"comm\": \"$link\""
    for field in $fields; do grep -q "\"$field\":" out || fail "ring over $link: no $field"; done
  done
done
# Every term of the scores, and documents: the gradient of each tensor is held against one rank's too.
for more in '' '--documents 20x20,100,10x10' '--dtype f32 --transport gather'; do
  # shellcheck disable=SC2086
  expect 0 "ring with terms $more" "$programs/ring" --ranks 3 --length 600 --head-dim 16 --repeat 1 --dtype f64 \
    --softcap 5 --alibi learned --relative 9 --bias 1x4x1xL --sink $more
  for name in o dq dk dv d_slopes d_relative d_bias d_sink; do grep -q "\"$name\":" out ||
    fail "ring with terms $more: no $name"; done
done
expect 0 'ring in segments' "$programs/ring" --ranks 4 --length 1024 --pattern segment:64 --repeat 1
tr -d ' \n' <out | grep -q '"bytes_sent_per_rank":\[0,0,0,0\]' ||
  fail "segments inside shards sent something: $(cat out)"
expect 2 'ring taken apart' "$programs/ring" --heads 3 --kv-heads 2
# Sizes that no machine holds are refused before any of it is made: within 5 s of processor time.
for sizes in '' '--heads 1 --head-dim 1 --ranks 1' '--no-one-rank'; do
  # shellcheck disable=SC2086
  expect 4 "ring without end $sizes" bash -c 'ulimit -t 5 && exec "$@"' refused "$programs/ring" \
    --length 268435456 $sizes
  says err '--length (268435456): would need '
done
grep -q kHasCuda\ =\ true "$BUILD/core/config.h" ||
  { expect 5 'ring without GPUs' "$programs/ring" --comm nccl; says err 'no usable GPU'; }

# ---- train: any grid tells the story of one rank ----
tiny='--layers 1 --heads 2 --width 16 --context 24 --batch 4 --dropout 0.1 --softcap 20 --alibi learned'
tiny+=' --relative 9 --bias 1x1xLxL --sink --eval-rows 4 --sample-every 0 --tokens 8 --steps 12 --save-every 6'
tiny+=' --eval-every 6'
curve() { sed -n 's/.*"step":\([0-9]*\),"loss":\([0-9.]*\).*/\1 \2/p' "$1/log.jsonl"; }
# shellcheck disable=SC2086
expect 0 'one rank' "$programs/train" $tiny --out one
for link in $links; do
  for grid in '4 1' '4 2' '4 4' '3 1'; do
    read -r ranks sequence <<<"$grid"
    started "$link" "$ranks"
    # shellcheck disable=SC2086
    expect 0 "train on $grid over $link" "${begin[@]}" "$programs/train" $tiny --ranks "$ranks" \
      --sequence-ranks "$sequence" --out "$link-$ranks-$sequence"
    paste <(curve one) <(curve "$link-$ranks-$sequence") |
      awk -v name="$grid over $link" '
        NF != 4 || $1 != $3 || $2 - $4 > 2e-4 || $4 - $2 > 2e-4 { print name ": " $0; bad = 1 }
        END { exit bad || NR != 12 }' >&2 ||
      fail "training on $grid over $link is another story"
  done
done
# On a grid, with blocks whose patterns would deal rows out otherwise.
odd='--grid 4x6 --layers 2 --heads 2 --width 16 --batch 4 --eval-rows 4 --sample-every 0 --steps 12 --save-every 6'
odd+=' --eval-every 6 --pattern segment:8 --pattern-odd segment:5,shift=3'
# shellcheck disable=SC2086
expect 0 'ising on one rank' "$programs/train" --task ising $odd --out ising
for grid in '2 1' '4 2' '3 3'; do
  read -r ranks sequence <<<"$grid"
  # shellcheck disable=SC2086
  expect 0 "ising on $grid" "$programs/train" --task ising $odd --ranks "$ranks" --sequence-ranks "$sequence" \
    --comm threads --out "ising-$ranks-$sequence"
  paste <(curve ising) <(curve "ising-$ranks-$sequence") |
    awk '$1 != $3 || $2 - $4 > 2e-4 || $4 - $2 > 2e-4 { bad = 1 } END { exit bad || NR != 12 }' ||
    fail "ising on $grid is another story"
done
# A checkpoint of one grid goes on on another.
mkdir again
cp threads-4-2/ckpt-000006.safetensors again/
expect 0 'another grid' "$programs/train" --resume --ranks 2 --sequence-ranks 2 --out again --tokens 8
paste <(curve one | tail -6) <(curve again | tail -6) |
  awk '$1 != $3 || $2 - $4 > 2e-4 || $4 - $2 > 2e-4 { bad = 1 } END { exit bad || NR != 6 }' ||
  fail 'a run that goes on on another grid is another story'
expect 2 'ranks that do not divide' "$programs/train" --ranks 3 --sequence-ranks 2
says err 'must divide'

# ---- ranks that were given unlike options: what decides the numbers must be the same ----
if [[ $links == *mpi* ]]; then
  unlike() {  # TEXT, what the first rank runs, what the second
    # shellcheck disable=SC2086
    "${mpi[@]}" -n 1 $2 : -n 1 $3 >out 2>err </dev/null && fail "$2 and $3: ended well"
    says err "$1"
  }
  seq 1 300 >text && seq 2 301 | head -c "$(stat -c %s text)" >other
  ring="$programs/ring --length 64"
  unlike 'ring: rank 1 has seed = 2, rank 0 seed = 1' "$ring --seed 1" "$ring --seed 2"
  unlike 'HILT_FORCE_ORDER = row' "$ring" "env HILT_FORCE_ORDER=row $ring"
  train="$programs/train $tiny --out by-hand"
  unlike 'train: rank 1 has HILT_FORCE_ORDER = row, rank 0 HILT_FORCE_ORDER = unset' "$train" \
    "env HILT_FORCE_ORDER=row $train"
  unlike 'text.checksum = ' "$train --text text" "$train --text other"

  unlike 'ranks: rank 1 has program = ring, rank 0 program = train' "$train" "$ring"

  # ---- programs of one rank: the first works, the others end well ----
  for program in 'compare_gradients --length 64 --repeat 2 --modes fused --out c' 'curves --grid 8x8 --out c' \
    'sample --tokens 8 --out one --seed 1' 'train --sample-only --tokens 8 --out one --seed 1'; do
    # shellcheck disable=SC2086
    expect 0 "$program alone" "$programs"/$program
    cp out alone
    # shellcheck disable=SC2086
    expect 0 "$program on two ranks" "${mpi[@]}" -n 2 "$programs"/$program
    [[ $(wc -l <out) == "$(wc -l <alone)" ]] || fail "$program on two ranks: $(cat out)"
  done

  # ---- attend writes what one rank writes; a number that is not that of mpirun is refused ----
  python3 -c '
import random, struct
for name in "qkv":
    header = "{\x27descr\x27: \x27<f8\x27, \x27fortran_order\x27: False, \x27shape\x27: (1, 64, 2, 8), }"
    header = header.ljust(117) + "\n"
    numbers = struct.pack("<1024d", *(random.gauss(0, 1) for _ in range(1024)))
    open(name + ".npy", "wb").write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + numbers)'
  attend="$programs/attend --q q.npy --k k.npy --v v.npy --pattern segment:16"
  # shellcheck disable=SC2086
  expect 0 'attend on one rank' $attend --out of-one
  # shellcheck disable=SC2086
  expect 0 'attend over mpi' "${mpi[@]}" -n 4 $attend --out of-four
  # shellcheck disable=SC2086
  expect 0 'attend over threads' $attend --ranks 4 --out of-threads
  cmp of-four/o.npy of-threads/o.npy || fail 'attend over mpi and over threads differ'
  expect 2 'another number of ranks' "${mpi[@]}" -n 2 "$programs/ring" --ranks 3
  says err '--ranks (3): there are 2; leave it out'
  expect 2 'mpi that nobody started' "$programs/ring" --comm mpi
  says err 'begin with: mpirun -n 4'
fi

# ---- ranks that are lost leave a checkpoint, which goes on bit for bit on any number of ranks ----
# same WHAT FILE FILE: the same tensors to the bit, whatever the words beside them.
same() {
  python3 - "$2" "$3" <<'END' || fail "$1: $2 and $3 differ"
import json, sys
def tensors(path):
    raw = open(path, 'rb').read()
    data = 8 + int.from_bytes(raw[:8], 'little')
    return {name: (x['dtype'], x['shape'], raw[data:][slice(*x['data_offsets'])])
            for name, x in json.loads(raw[8:data]).items() if name != '__metadata__'}
of, other = map(tensors, sys.argv[1:])
sys.exit(not of or of != other)
END
}
open_end="$tiny --schedule constant --keep 3 --steps"
# lost LINK SIGNAL: over MPI one rank of three is sent it, over threads all are. An end is seen by the others, not its
# silence: there the deadline only guards. Seconds are judged where HILT_DEEP is set.
lost() {
  local link=$1 signal=$2 out=$scratch/lost-$1-$2 deadline=200 status=0 parent victim start took last step grid ranks \
    sequence
  [[ ! ${HILT_DEEP-} ]] || deadline=4
  [[ $signal != STOP ]] || deadline=10
  started "$link" 3
  # shellcheck disable=SC2086
  HILT_DEADLINE=$deadline "${begin[@]}" "$programs/train" $open_end 1000000 --ranks 3 --sequence-ranks 3 \
    --out "$out" >lost.out 2>lost.err &
  parent=$!
  # So many checkpoints are kept, so a fast run is soon without its second: two are waited for, whichever.
  until (($(find "$out" -name 'ckpt-*.safetensors' 2>/dev/null | wc -l) >= 2)); do
    kill -0 "$parent" 2>/dev/null || fail "over $link: ended before its second checkpoint: $(cat lost.err)"
    sleep 0.1
  done
  # By its whole path: another run of this test on the machine has ranks of its own. A rank, not mpirun, whose command
  # line holds the name too.
  victim=$(for pid in $(pids_with "$out"); do [[ $(readlink "/proc/$pid/exe") != */train ]] || echo "$pid"; done |
    sort -n | tail -n 1)
  kill -s "$signal" "$victim"
  start=$SECONDS
  wait "$parent" || status=$?
  took=$((SECONDS - start))
  [[ $status != 0 ]] || fail "over $link: a run that lost a rank ended well: $(cat lost.err)"
  case $link$signal in
    mpiKILL) grep -q 'exited on signal 9' lost.err || fail "the killed rank is not told of: $(cat lost.err)" ;;
    mpiSTOP) grep -qE 'error: .*waited 10 s for rank .*suspect: rank [0-2], which does not answer' lost.err ||
      fail "the stopped rank is not told of: $(cat lost.err)" ;;
  esac
  [[ ! ${HILT_DEEP-} ]] || ((took <= deadline + 10)) || fail "over $link: ranks outlived one that was lost by $took s"
  # a guard: mpirun may end before its last rank
  for _ in {1..600}; do [[ $(pids_with "$out") ]] || break; sleep 0.1; done
  [[ ! $(pids_with "$out") ]] || fail "over $link: processes are left: $(pids_with "$out" | xargs)"
  expect 0 "what a lost run over $link left" "$programs/sample" --out "$out" --tokens 8

  # A run that lost nobody, over threads, has the same bits there, and six updates later. A rank that hears of a fault
  # saves what it has, at any step.
  last=$(basename "$(find "$out" -name 'ckpt-*.safetensors' | sort | tail -n 1)")
  step=$((10#${last//[!0-9]/}))
  # shellcheck disable=SC2086
  expect 0 'a run that loses nobody' "$programs/train" $open_end $((step + 6)) --save-every "$step" --ranks 3 \
    --sequence-ranks 3 --out "$out-whole"
  same "the last checkpoint over $link" "$out/$last" "$out-whole/$last"
  for grid in '3 3' '1 1' '2 2' '4 2'; do
    read -r ranks sequence <<<"$grid"
    for from in "$out" "$out-whole"; do
      rm -rf "$from-goes-on"
      mkdir "$from-goes-on"
      cp "$from/$last" "$from-goes-on/"
      expect 0 "going on as $grid" "$programs/train" --resume --ranks "$ranks" --sequence-ranks "$sequence" \
        --steps $((step + 6)) --out "$from-goes-on" --tokens 8
    done
    end=$(printf 'ckpt-%06d.safetensors' $((step + 6)))
    same "going on as $grid" "$out-goes-on/$end" "$out-whole-goes-on/$end"
    [[ $ranks != 3 ]] || same 'going on as before' "$out-goes-on/$end" "$out-whole/$end"
    paste <(curve "$out-whole" | tail -6) <(curve "$out-goes-on") |
      awk '$1 != $3 || $2 - $4 > 2e-4 || $4 - $2 > 2e-4 { bad = 1 } END { exit bad || NR != 6 }' ||
      fail "going on as $grid is another story"
  done
}
lost threads KILL
[[ $links != *mpi* ]] || { lost mpi KILL; lost mpi STOP; }
echo 'passed'
