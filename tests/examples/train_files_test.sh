#!/usr/bin/env bash
# What train leaves behind, whatever happens to it: resumed runs, killed ones, interrupts, full and read-only disks.
. "$SRC/tests/packaging/common.sh"
train=$BUILD/examples/train
cd "$scratch"
kills=300 outside=15  # of so many one is killed from outside
[[ ! ${HILT_DEEP-} ]] || outside=1
[[ ${HILT_TEST_SCALE-} != small ]] || kills=30
seed=${HILT_SEED:-1}
export HILT_THREADS=1
tiny='--layers 1 --heads 2 --width 16 --context 16 --batch 2 --dropout 0.1 --eval-rows 2 --sample-every 0 --tokens 8'
# tiny is a list of flags.
# shellcheck disable=SC2086
run() { local status=$1; shift; expect "$status" "train $*" "$train" $tiny "$@"; }

# ---- what a run writes ----
run 0 --steps 20 --save-every 10 --eval-every 5 --keep 5 --out whole
[[ $(cd whole && echo *) == \
  'best.safetensors ckpt-000010.safetensors ckpt-000020.safetensors log.jsonl report.html sample-000020.txt' ]] ||
  fail "wrote $(ls whole)"
[[ $(wc -l <whole/log.jsonl) == 21 ]] || fail "log.jsonl has $(wc -l <whole/log.jsonl) lines"
for word in '"configuration":{' '"build":{' '"machine":{' '"floor":0.'; do
  head -1 whole/log.jsonl | grep -qF "$word" || fail "the first line lacks $word"
done
for word in step loss lr grad_norm ms tokens_per_s gflops bytes; do
  [[ $(grep -c "\"$word\":" whole/log.jsonl) -ge 20 ]] || fail "log lines lack $word"
done
[[ $(grep -c '"val_loss"' whole/log.jsonl) == 4 ]] || fail "evaluated $(grep -c '"val_loss"' whole/log.jsonl) times"
[[ $(stat -c %s whole/report.html) -lt 500000 ]] || fail "report.html is large"
elsewhere='(src|href)="[^#"]|https?://|url\(|@import|<script src|<link|<iframe'
! sed 's|"http://www.w3.org/2000/svg"||' whole/report.html | grep -qE "$elsewhere" ||
  fail "report.html refers outside"
! grep -qE '>(-?nan|-?inf)|"(-?nan|-?inf)' whole/report.html || fail "report.html shows a number that is none"
grep -q 'light-dark(' whole/report.html || fail "report.html has no dark colors"
says out 'next:'
says out 'planned'
says out 'in order row,'  # dense attention gains nothing by another
# Numbers are numbers, truths are truths, and the device is the one that computed.
for word in '"steps":20,' '"lr":0.002,' '"dropout":0.1,' '"resume":false,' '"task":"stories",' '"device":"cpu",'; do
  head -1 whole/log.jsonl | grep -qF "$word" ||
    fail "the configuration in log.jsonl lacks $word: $(head -1 whole/log.jsonl)"
done
# Names that are no text, a prompt longer than the context, and bytes that would move a terminal's cursor.
head -c 3000 /dev/urandom >$'bytes\xff<&"'
prompt=$(printf 'Mia has a red hat. %.0s' {1..3})
run 0 --steps 3 --out $'odd\xff"' --prompt "$prompt"
[[ $(head -c ${#prompt} $'odd\xff"/sample-000003.txt') == "$prompt" ]] ||
  fail 'a long prompt is not what its sample begins with'
run 0 --steps 3 --out bytes --text $'bytes\xff<&"' --vocabulary bytes --tokens 300 --temperature 100
for file in bytes $'odd\xff"'; do
  iconv -f UTF-8 -t UTF-8 "$file/report.html" >/dev/null || fail 'report.html is no UTF-8'
  iconv -f UTF-8 -t UTF-8 "$file/log.jsonl" >/dev/null || fail 'log.jsonl is no UTF-8'
  ! grep -qaP '[\x00-\x08\x0b-\x1f\x7f]' "$file/report.html" || fail 'report.html has control characters'
done
# How many steps fit is unknown before the first few.
run 0 --seconds 0.2 --out fits
grep -q '^step 1  loss ' "$scratch/out" || fail "--seconds: $(cat "$scratch/out")"
! grep -q 1000000000 "$scratch/out" || fail "--seconds: $(cat "$scratch/out")"
# Once they are known, it is a run of so many steps.
run 0 --seconds 0.2 --save-every 5 --out timed
expect 2 'resume what time ended' "$train" --resume --out timed
says err 'there is nothing left to do'
last=$(ls timed/ckpt-* | tail -1)
mv "$last" timed/report.html .
expect 0 'resume before its last checkpoint' "$train" --resume --save-every 5 --out timed
[[ $(ls timed/ckpt-* | tail -1) == "$last" ]] || fail "a run of seconds goes on to others: $(ls timed), not $last"
cmp "$last" "${last#timed/}" || fail 'a resumed run of seconds ends otherwise'
# Nowhere to print to: the run is there, and the reason is the write's.
# shellcheck disable=SC2016,SC2086
expect 3 'train to a full disk' sh -c '"$0" "$@" >/dev/full' "$train" $tiny --steps 5 --out unheard
[[ $(cat "$scratch/err") == 'train: error: standard output: No space left on device' ]] ||
  fail "a full disk: $(cat "$scratch/err")"
[[ -f unheard/ckpt-000005.safetensors ]] || fail 'a run that nobody hears left nothing'
# A narrow terminal gets fewer fields, each of them whole.
if script -qec true /dev/null </dev/null >/dev/null 2>&1; then
  for columns in 22 40 60 90; do
    script -qec "stty cols $columns; '$train' $tiny --steps 9 --out narrow$columns" /dev/null </dev/null >terminal ||
      fail "a terminal of $columns columns: $(cat terminal)"
    tr '\r' '\n' <terminal | sed 's/\x1b\[[0-9;]*[mK]//g' | grep '^step 9/9' >lines
    ! awk -v most=$((columns - 1)) 'length > most' lines | grep . || fail "$columns columns: too long"
    number='[0-9]\.[0-9]{4}'
    fields="(  loss $number(  val $number(  floor $number(  [0-9.]+ k?tok/s(  ETA 0 s)?)?)?)?)?"
    grep -qE "^step 9/9 100 %$fields\$" lines ||
      fail "$columns columns: $(cat lines)"
  done
  script -qec "'$BUILD/examples/sample' --out bytes --temperature 100" /dev/null </dev/null | tr -d '\r' >terminal
  ! grep -qaP '[\x00-\x08\x0b-\x1f\x7f]' terminal || fail "a sample moves the terminal's cursor"
else
  echo 'no terminal can be made here: what one shows is left out'
fi

# ---- the best by validation stays, whatever comes after ----
for i in $(seq 40); do echo "line $((i * 7919 % 101)) of $((i * i % 89))"; done >small
run 0 --text small --lr 0.02 --dropout 0 --eval-every 20 --patience 100 --steps 5000 --schedule constant --keep 2 \
  --eval-rows 50 --out overfit
[[ $(tail -1 "$scratch/out") == overfit/report.html ]] ||
  fail "the last line is not the report's path: $(tail -1 "$scratch/out")"
last=$(tail -2 "$scratch/out" | head -1)
which='validation loss ([0-9.]+) at step ([0-9]+), in'
[[ $last =~ ^"best: "$which\ best\.safetensors"; last: "$which\ ckpt-0*([0-9]+)\.safetensors$ ]] ||
  fail "the last line: $last"
best=${BASH_REMATCH[2]} end=${BASH_REMATCH[4]}
[[ $end == $((best + 100)) && $end -lt 5000 && $end == "${BASH_REMATCH[5]}" ]] || fail "patience: $last"
[[ ${BASH_REMATCH[1]} < ${BASH_REMATCH[3]} ]] || fail "the best is not below the last: $last"
least=$(sed -n 's/.*"val_loss":\([0-9.]*\).*/\1/p' overfit/log.jsonl | sort -n | head -1)
[[ $(printf %.4f "$least") == "${BASH_REMATCH[1]}" ]] || fail "not the least of the log: $last"
[[ $(grep '"best":true' overfit/log.jsonl | tail -1) == "{\"step\":$best,"* ]] || fail 'the log does not mark the best'
! command -v node >/dev/null || node "$SRC/tests/examples/shown.js" overfit/report.html |
  grep "best evaluation was at <b>step $best</b>" >/dev/null || fail 'the report does not mark the best'
grep -aqF "\"step\":\"$best\"" overfit/best.safetensors || fail 'best.safetensors is of another step'
of() { expect 0 "a sample $*" "$BUILD/examples/sample" --temperature 0 --tokens 40 "$@"; cat "$scratch/out"; }
[[ $(of --out overfit) != "$(of --out overfit --last)" ]] || fail 'a sample of the best is one of the last'
cp -r overfit newest && rm newest/best.safetensors
[[ $(of --out newest) == "$(of --out overfit --last)" ]] || fail 'without a best a sample is not of the newest'
# It ended by itself: as it is there is nothing left to do, and what is lost of it is written again.
expect 2 'resume what patience ended' "$train" --resume --text small --out overfit
says err "ends a run of $end steps; there is nothing left to do"
cp -r overfit over
rm over/report.html
expect 0 'resume what patience ended and lacks its report' "$train" --resume --text small --out over
[[ $(ls over) == "$(ls overfit)" ]] || fail "a run that patience ended goes on: $(ls over)"
cmp over/ckpt-000$end.safetensors overfit/ckpt-000$end.safetensors || fail 'a run that patience ended ends otherwise'
run 0 --resume --text small --dropout 0 --steps $((end + 50)) --out overfit
tail -2 "$scratch/out" | grep -q "at step $best, in best.safetensors; last: .* at step $((end + 20))," ||
  fail "a run that goes on forgets its best: $(tail -2 "$scratch/out")"

# ---- resumed is the same as never stopped, byte for byte ----
mkdir half
cp whole/ckpt-000010.safetensors half/
run 0 --resume --steps 20 --save-every 10 --keep 5 --out half
cmp half/ckpt-000020.safetensors whole/ckpt-000020.safetensors || fail 'a resumed run ends otherwise'
# Ten steps and then ten more, where the schedule does not know the end; threads may differ.
run 0 --schedule constant --steps 20 --out c20
run 0 --schedule constant --steps 10 --out c10
expect 0 'resume to more steps' env HILT_THREADS=2 "$train" --resume --steps 20 --out c10 --tokens 8
cmp c10/ckpt-000020.safetensors c20/ckpt-000020.safetensors || fail 'ten and ten steps are not twenty'
[[ $(grep -c '"step"' c10/log.jsonl) == 20 ]] || fail 'the log of a resumed run lacks steps'
run 2 --resume --out c10
says err 'nothing left to do'
# Killed behind its last checkpoint: what was to come then is written, and what is there stays what it was.
for lost in report.html sample-000020.txt; do
  cp -r whole end
  rm "end/$lost"
  run 0 --resume --out end
  [[ $(ls end) == "$(ls whole)" ]] || fail "a run that lost $lost: $(ls end)"
  for file in sample-000020.txt ckpt-000020.safetensors; do cmp whole/$file end/$file || fail "lost $lost: $file"; done
  rm -r end
done
cp -r whole end
cp end/ckpt-000010.safetensors end/ckpt-000005.safetensors
touch -d '1 hour ago' end/report.html  # of before it went on
run 0 --resume --keep 2 --out end
[[ $(ls end) == "$(ls whole)" ]] || fail "a run killed at its end left $(ls end)"
[[ $(tail -1 "$scratch/out") == end/report.html ]] || fail "not the report's path: $(tail -1 "$scratch/out")"
says out 'last: validation loss '
run 2 --resume --out end
says err 'nothing left to do'
# With another configuration: refused, with the difference.
run 2 --resume --lr 0.5 --out half
says err 'lr: 0.002 in the checkpoint, 0.5 asked for'
expect 2 'another width' "$train" --resume --width 32 --out half
says err 'width: 16 in the checkpoint, 32 asked for'
one_line_on_stderr
expect 2 'a board for a run that has none' "$train" --resume --grid 4x4 --out half
says err '--grid: unknown to the checkpoint, 4x4 asked for'
expect 2 'another width for a sample' "$train" --sample-only --width 32 --out half
says err '--sample-only: half/best.safetensors was trained otherwise: --width: 16 in the checkpoint, 32 asked for'
expect 2 'another rate for a sample' "$train" --sample-only --lr 0.5 --out half
says err '--sample-only: half/best.safetensors was trained otherwise: --lr: 0.002 in the checkpoint, 0.5 asked for'
expect 0 'the same rate for a sample' "$train" --sample-only --lr 0.002 --tokens 8 --out half
for flags in --resume --dry-run '--seconds 5' '--from DIR'; do
  # shellcheck disable=SC2086
  expect 2 "a sample and $flags" "$train" --sample-only $flags --out half
  says err '--sample-only: samples and does no more; leave --resume, --dry-run, --seconds and --from out'
done
expect 2 'seconds for a run that goes on' "$train" --resume --seconds 5 --out half
says err '--seconds (5): --resume goes on to the --steps of the checkpoint'
expect 2 'a run that is there' "$train" --out whole
says err '--out (whole): holds a run already, up to ckpt-000020.safetensors; go on with --resume'
expect 3 'nothing to resume' "$train" --resume --out none
says err '--out (none): no checkpoint there'
[[ ! -e none ]] || fail 'a directory was made for nothing'

# The same in 16 bits: their f32 masters are in the checkpoint.
for dtype in bf16 f16; do
  run 0 --dtype $dtype --steps 20 --save-every 10 --out whole-$dtype
  mkdir half-$dtype && cp whole-$dtype/ckpt-000010.safetensors half-$dtype/
  run 0 --resume --out half-$dtype
  cmp half-$dtype/ckpt-000020.safetensors whole-$dtype/ckpt-000020.safetensors ||
    fail "a resumed run in $dtype ends otherwise"
done
# And with every score term, whose options and tensors the checkpoint has: a resumed run and a sample ask for neither.
for dtype in f32 bf16 f16; do
  run 0 --dtype $dtype --softcap 20 --alibi learned --relative 9 --bias 1x2x1xL --sink --steps 20 --save-every 10 \
    --out terms-$dtype
  mkdir half-terms-$dtype && cp terms-$dtype/ckpt-000010.safetensors half-terms-$dtype/
  run 0 --resume --out half-terms-$dtype
  cmp half-terms-$dtype/ckpt-000020.safetensors terms-$dtype/ckpt-000020.safetensors ||
    fail "a resumed run with terms in $dtype ends otherwise"
  expect 0 "a sample with terms in $dtype" "$BUILD/examples/sample" --out terms-$dtype --tokens 4
  run 2 --resume --sink --relative 11 --out half-terms-$dtype
  for tensor in slopes relative bias sink; do
    grep -qa "\"model.blocks.0.attention.$tensor\":{\"dtype\":\"F32\"" terms-$dtype/ckpt-000020.safetensors ||
      fail "the checkpoint lacks $tensor in f32"
  done
done
grep -q '"loss_scale":65536' whole-f16/log.jsonl || fail 'the log of a run in f16 lacks its scale'

# And on a grid, with another pattern in odd blocks; a sample asks for none of it.
# shellcheck disable=SC2086
expect 0 'ising' "$train" ${tiny% --tokens 8} --task ising --layers 2 --steps 8 --save-every 4 --grid 4x4 --out ising
says out "above the exact posterior's there"
mkdir half-ising && cp ising/ckpt-000004.safetensors half-ising/
expect 0 'resume ising' "$train" --resume --out half-ising
cmp half-ising/ckpt-000008.safetensors ising/ckpt-000008.safetensors || fail 'a resumed run on a grid ends otherwise'
grep -qa '"config.pattern-odd":"segment:16,shift=8"' ising/ckpt-000008.safetensors ||
  fail 'the checkpoint lacks the odd pattern'
expect 0 'a sample of ising' "$BUILD/examples/sample" --out ising
says out ' wrong'

# The same for a text, which must be the one it was.
for i in $(seq 200); do printf '%s: na\303\257ve words, \342\202\254 %s\n' "$i" $((i * i)); done >text
run 0 --text text --steps 8 --save-every 4 --out t8
mkdir t4 && cp t8/ckpt-000004.safetensors t4/
run 0 --resume --text text --out t4
cmp t4/ckpt-000008.safetensors t8/ckpt-000008.safetensors || fail 'a resumed run on a text ends otherwise'
rm t4/ckpt-000008.safetensors
sed 's/words/sword/' text >other  # of the same size and characters
run 3 --resume --text other --out t4
says err 't4/ckpt-000004.safetensors: was trained with text.checksum '
echo words >>text
run 3 --resume --text text --out t4
says err 't4/ckpt-000004.safetensors: was trained with text.bytes '

# An order that the environment forces is said, and part of the run.
HILT_FORCE_ORDER=row run 0 --order hilbert --steps 4 --save-every 2 --out forced
says out 'in order row (HILT_FORCE_ORDER, in place of hilbert)'
head -1 forced/log.jsonl | grep -qF '"order_forced":true' ||
  fail "the log says nothing of a forced order: $(head -1 forced/log.jsonl)"
grep -q HILT_FORCE_ORDER forced/report.html || fail 'the report says nothing of a forced order'
rm forced/ckpt-000004.safetensors
run 3 --resume --out forced
says err 'was trained with HILT_FORCE_ORDER row, here it is unset'
expect 3 'a sample in another order' "$BUILD/examples/sample" --out forced --tokens 8
HILT_FORCE_ORDER=row run 0 --resume --out forced

# ---- what befalls a run does not cost its work ----
# launch OUT FLAGS..: a training in the background, that has made its first step. Of a pipe that is held it has one end
# alone.
hold=''
launch() {
  # shellcheck disable=SC2086
  (let_go; exec "$train" $tiny --out "$@") >"${stdout:-$scratch/out}" 2>"$scratch/err" </dev/null &
  running=$!
  seen $running steps_in "$1" 1 || fail "$1: no training begins: $(cat "$scratch/out" "$scratch/err")"
}
let_go() { [[ ! $hold ]] || exec {hold}>&-; hold=''; }
# Without a process of its own, for it is asked often: the lines of the log after the first, as $made.
count_steps() {
  local lines=()
  [[ ! -e $1/log.jsonl ]] || mapfile lines <"$1/log.jsonl"
  made=$((${#lines[@]} - 1))
}
steps_in() { count_steps "$1"; ((made >= $2)); }
# begin OUT FLAGS..: one that ends when it is told to. goes_on OUT: it makes more steps. ends STATUS OUT: how it ends.
begin() { launch "$@" --steps 1000000 --save-every 1000000 --eval-every 1000000; }
goes_on() { count_steps "$1"; seen $running steps_in "$1" $((made + 5)); }
# held OUT FLAGS..: one that cannot end before release: each step prints, into a pipe that is full before the last.
held() {
  local size
  mkfifo "$1.pipe"
  exec {hold}<>"$1.pipe"
  # F_SETPIPE_SZ: a page, whatever its size.
  size=$(python3 -c 'import fcntl; print(fcntl.fcntl(0, 1031, 4096))' <&"$hold")
  steps=$((size / 50 + 20))
  stdout=$1.pipe launch "$@" --steps $steps --eval-every 1
}
release() {
  local reader
  exec {reader}<"$1.pipe"
  let_go
  cat <&"$reader" >"$scratch/out"
  exec {reader}<&-
}
# pause: it stands still, until kill -CONT.
stands() { grep -q '^State:[[:space:]]*T' "/proc/$running/status"; }
pause() { kill -STOP "$running"; seen "$running" stands || fail "it ended: $(cat "$scratch/err")"; }
ends() {
  local got=0
  wait $running || got=$?
  [[ $got == "$1" ]] || fail "$2: exit status $got, expected $1: $(cat "$scratch/out" "$scratch/err")"
  [[ ${3-} == nothing ]] || compgen -G "$2/ckpt-*.safetensors" >/dev/null || fail "$2: its work is lost: $(ls "$2")"
}
cp other text
# A text is read once: it may go, change or become shorter, and the run goes on with what it read.
begin read-once --text text
rm text
goes_on read-once || fail "a text that lost its name: $(cat "$scratch/err")"
kill -INT $running; ends 130 read-once
says err "go on with: ./run train --resume --out read-once --text text"
cp other text
begin overwritten --text text
: >text
goes_on overwritten || fail "a text that became empty: $(cat "$scratch/err")"
kill -INT $running; ends 130 overwritten
cp other text
held gone-at-the-end --text text  # named no more when it ends
rm text
release gone-at-the-end
ends 0 gone-at-the-end
[[ -f $(printf 'gone-at-the-end/ckpt-%06d.safetensors' $steps) && ! -e text ]] ||
  fail 'a text was there to the end, or its run was not saved'

# A terminal that closes, a batch system that ends its jobs; nohup.
signals='HUP TERM INT'
ignored=0x$(awk '/^SigIgn/ { print $2 }' /proc/$$/status)
(((ignored & 1) == 0)) || signals='TERM INT'  # this test runs under nohup itself
for signal in $signals; do
  begin "by-$signal"
  kill -$signal $running
  [[ $signal == INT ]] || kill -$signal $running 2>/dev/null || true  # shells and systems say it twice
  ends 130 "by-$signal"
done
trap '' HUP
begin nohup
trap - HUP
kill -HUP $running
goes_on nohup || fail 'a hangup ends what nohup started'
kill -INT $running; ends 130 nohup

# Nobody reads on: it is printed no more, and trained on.
for streams in '2>/dev/null' '2>&1'; do
  # shellcheck disable=SC2086
  unread="\"$train\" $tiny --steps 30 --eval-every 1 --out unread $streams"
  status=$(eval "{ $unread; echo \$? >unread.status; } | head -1 >/dev/null"; cat unread.status)
  [[ $status == 0 && -f unread/ckpt-000030.safetensors && -f unread/report.html ]] ||
    fail "into a closed pipe: $status, $(ls unread)"
  rm -r unread
done
# The same where the reader is surely gone while steps are left, and print.
mkfifo reader
exec {hold}<>reader
stdout=reader launch left --steps 1000000 --save-every 1000000 --eval-every 1
read -r _ <&"$hold"
let_go
goes_on left || fail "nobody reads on: $(cat "$scratch/err")"
kill -INT $running; ends 130 left
# Closed streams: what would be printed there is not written into a file.
# shellcheck disable=SC2086
"$train" $tiny --steps 5 --out mute <&- >&- 2>&- || fail "without streams: $?"
! grep -v '^{.*}$' mute/log.jsonl || fail 'the log has what was printed'
# A directory that goes away, or is another by now: said, and not a success.
begin removed
pause
rm -r removed; mkdir removed
kill -INT $running; kill -CONT $running; ends 130 removed nothing
says err 'removed: cannot write: another directory has taken its name'
held vanished
pause
rm -r vanished
kill -CONT $running
release vanished
ends 3 vanished nothing
says err 'train: error: --out (vanished): cannot write: No such file or directory'

# ---- samples ----
expect 0 'a sample' "$train" --sample-only --out whole --prompt 'Mia has a' --tokens 30 --seed 5
cp out first
expect 0 'the same by its own name' "$BUILD/examples/sample" --out whole --prompt 'Mia has a' --tokens 30 --seed 5
cmp first out || fail 'sample and train --sample-only differ'
[[ $(head -c 9 first) == 'Mia has a' ]] || fail "a sample begins with $(head -1 first)"
expect 0 'the likeliest' "$train" --sample-only --out whole --temperature 0 --tokens 30 --seed 1
cp out first
expect 0 'the likeliest again' "$train" --sample-only --out whole --temperature 0 --tokens 30 --seed 2
cmp first out || fail 'at temperature 0 the seed matters'
all=$(of --out whole --prompt Mia --seed 3 --temperature 1)
stop=${all:20:3} drawn=${all:3}
[[ $(of --out whole --prompt Mia --seed 3 --temperature 1 --stop "$stop") == "Mia${drawn%%"$stop"*}" ]] ||
  fail "--stop $stop: $(cat "$scratch/out"), without it: $all"
grep -qE '^[0-9]+ tokens in [0-9.]+ s, [0-9]+ a second$' "$scratch/err" ||
  fail "a sample does not say how fast it was: $(cat "$scratch/err")"
expect 3 'a character it does not know' "$train" --sample-only --out whole --prompt 'x~'
says err "--prompt: character '~' at byte 1"

# ---- damaged checkpoints ----
mkdir bad
head -c 5000 whole/ckpt-000020.safetensors >bad/ckpt-000020.safetensors
expect 3 'a truncated checkpoint' "$train" --resume --out bad
one_line_on_stderr
# flip FILE OFFSET: another byte there.
# shellcheck disable=SC2059
flip() {
  local byte
  byte=$(od -An -tu1 -j "$2" -N 1 "$1")
  printf "\\x$(printf %02x $((255 - byte)))" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}
cp c20/ckpt-000020.safetensors bad/
flip bad/ckpt-000020.safetensors $(($(stat -c %s bad/ckpt-000020.safetensors) - 9))
expect 3 'a flipped byte of the optimizer' "$train" --resume --steps 30 --out bad
says err 'train: error: bad/ckpt-000020.safetensors: damaged: tensor optimizer.'
one_line_on_stderr
cp whole/ckpt-000020.safetensors bad/
flip bad/ckpt-000020.safetensors $(($(od -An -tu8 -N 8 bad/ckpt-000020.safetensors) + 20))
expect 3 'a flipped byte of the model' "$train" --sample-only --out bad
says err 'damaged: tensor model.'
printf '\x80\x04\x95pickled' >bad/ckpt-000020.safetensors
expect 3 'a pickle' "$train" --resume --out bad
: >bad/ckpt-000020.safetensors
expect 3 'an empty file' "$train" --resume --out bad

# An earlier one that is whole is named, with how to go on from it: and so one does.
cp whole/ckpt-000010.safetensors bad/
for size in 0 100 5000 -1; do
  head -c "$size" whole/ckpt-000020.safetensors >bad/ckpt-000020.safetensors
  for program in "$train --resume" "$BUILD/examples/sample"; do
    # shellcheck disable=SC2086
    expect 3 "$size bytes of a checkpoint" $program --out bad
    one_line_on_stderr
    says err "; ckpt-000010.safetensors beside it is whole: to go on from there, move bad/ckpt-000020.safetensors away \
and resume"
  done
done
mv bad/ckpt-000020.safetensors bad/away
run 0 --resume --steps 20 --save-every 10 --keep 5 --out bad
cmp bad/ckpt-000020.safetensors whole/ckpt-000020.safetensors ||
  fail 'a run resumed from the earlier one ends otherwise'

# ---- an early end: its report has a best evaluation, and no loss on all the held-out rows ----
launch luck --steps 1000000 --save-every 1000000 --eval-every 1
goes_on luck; kill -INT $running; ends 130 luck
if command -v node >/dev/null; then
  node "$SRC/tests/examples/shown.js" luck/report.html >shown.html
  grep -q 'best evaluation was at' shown.html || fail 'the report of an early end marks no best'
  ! grep -q 'held-out loss above' shown.html || fail 'the report of an early end speaks of a loss that it has not'
fi

# ---- four at once, and no name for what they write: each has a directory ----
mkdir four
(cd four; for _ in 1 2 3 4; do
  # shellcheck disable=SC2086
  "$train" $tiny --steps 2 >/dev/null 2>"$BASHPID" </dev/null &
done; wait)
for i in '' -2 -3 -4; do
  [[ -f four/out/train$i/ckpt-000002.safetensors ]] || fail "four runs: no train$i: $(cat four/[0-9]*)"
  grep -qF "\"out\":\"out/train$i\"" four/out/train$i/log.jsonl || fail "train$i: its log names another directory"
done

# ---- two trainers, one directory ----
begin shared
# shellcheck disable=SC2086
expect 3 'a second trainer' "$train" $tiny --steps 10 --out shared
says err 'another program writes to this directory'
# ---- an interrupt: the step is finished, a checkpoint saved, 130 ----
kill -INT $running; ends 130 shared
step=$(tail -1 shared/log.jsonl | sed 's/{"step":\([0-9]*\),.*/\1/')
[[ -f shared/$(printf 'ckpt-%06d.safetensors' "$step") ]] || fail "no checkpoint of the last step, $step: $(ls shared)"
[[ -f shared/report.html ]] || fail 'no report after an interrupt'

# ---- killed at many moments: what is there can be resumed, and ends as if nothing had happened ----
steps=150
seq 400 >numbers  # a text costs less to begin with than stories
often="--steps $steps --save-every 2 --keep 2 --eval-every 1000 --text numbers"
faults=(LD_PRELOAD="$BUILD/tests/hostile/libfaults.so" HILT_FAULT_UNDER="$(pwd -P)/victim")
# shellcheck disable=SC2086
expect 0 'a run that is not killed' env "${faults[@]}" HILT_FAULT_TRACE=calls "$train" $tiny $often --out victim
mv victim never
calls=$(wc -l <calls)  # that change a file
((calls > 5 * steps)) || fail "$calls calls of a run change its files: they are not counted"
# A moment is a state. Most die by themselves, before one of the calls of 20 steps, which costs nobody a wait. Some are
# killed as they begin to speak, or when $more steps are made since the last checkpoint, or then a checkpoint is half
# written.
echo "kill -9: HILT_SEED=$seed"
RANDOM=$seed killed=0 alone=0 attempts=0 resumed=0 finished=0 torn=0
moment() {
  local said=()
  mapfile said <kill.out
  if ((more == 0)); then
    ((${#said[@]}))
  else
    [[ ${said[*]} == *'memory after'* ]] && steps_in victim $((from + more))
  fi
}
is_torn() { compgen -G 'victim/*.tmp*' >/dev/null; }
while ((killed < kills)); do
  rm -rf victim
  status=1 again=''
  while ((status != 0)); do
    again=''
    ! compgen -G 'victim/ckpt-*.safetensors' >/dev/null || again=--resume
    [[ -z $again ]] || resumed=$((resumed + 1))
    ((++attempts < 12 * kills + 50)) || fail "only $killed of $attempts runs could be killed"
    : >kill.out
    from=0 how=() more=$((RANDOM % 45)) half=$((RANDOM % 2)) at=$((1 + RANDOM % (calls * 20 / steps)))
    ((killed < kills && RANDOM * outside < 32768)) || how=("${faults[@]}" HILT_FAULT_HOW=kill HILT_FAULT_AT="$at")
    ((killed < kills)) || how=()  # enough are killed, and this one may finish
    env "${how[@]}" "$train" $tiny $again $often --out victim >kill.out 2>kill.err &
    pid=$!
    if ((killed < kills && ${#how[@]} == 0)); then
      for file in victim/ckpt-*.safetensors; do [[ $file == *'*'* ]] || from=$((10#${file//[!0-9]/})); done
      if seen $pid moment && ((half)); then until is_torn || ! kill -0 $pid 2>/dev/null; do :; done; fi
      kill -9 $pid 2>/dev/null || true
    fi
    status=0; wait $pid 2>/dev/null || status=$?
    # Killed once all was there, it has nothing left to do.
    [[ $status != 2 || ! -f victim/report.html ]] || ! grep -q 'nothing left to do' kill.err || status=0
    [[ $status == 0 || $status == 137 ]] || fail "a run failed by itself ($status): $(cat kill.err)"
    if [[ $status != 0 ]]; then
      killed=$((killed + 1)) alone=$((alone + (${#how[@]} > 0)))
      ! is_torn || torn=$((torn + 1))
    fi
  done
  [[ -f victim/report.html && $(compgen -G 'victim/ckpt-*' | wc -l) == 2 ]] ||
    fail "after $killed kills a run ended with $(ls victim)"
  cmp victim/ckpt-000$steps.safetensors never/ckpt-000$steps.safetensors ||
    fail "after $killed kills a run ended otherwise"
  finished=$((finished + 1))
done
echo "kill -9: $killed runs killed, $alone of them before one of their own calls, $torn with a file half written," \
  "$resumed resumed, every resume worked; all $finished finished runs equal the uninterrupted one byte for byte"

# ---- a full disk: training goes on ----
(
  ulimit -f 8  # blocks of 1024: the log fits, a checkpoint does not
  expect 3 'a full disk' "$train" $tiny --steps 12 --save-every 6 --out full
)
says err 'train: warning: full/ckpt-000006.safetensors: cannot write'
says err 'training goes on, the last good checkpoint is none yet'
(
  ulimit -f 8  # nor does all of this log, or the report
  expect 3 'a fuller disk' "$train" $tiny --steps 100 --out fuller
)
# The line that crosses the limit is written in part, which is called no space; where one ends just at the limit, the
# next is too large. Which it is, the digits of the times in the log decide.
why='fuller/log.jsonl: cannot write: (No space left on device|File too large); training goes on'
[[ $(grep -cE "$why" "$scratch/err") == 1 ]] ||
  fail "a log that found no room: $(cat "$scratch/err")"
! grep -v '}$' fuller/log.jsonl || fail 'a line of the log is cut short'
says out 'wrote fuller: log.jsonl, samples, no checkpoint'
says err 'its last checkpoint could not be saved; there is none'
! compgen -G 'full/*ckpt*' >/dev/null || fail "a full disk left $(ls full)"

# ---- a directory one may not write to: said before training ----
if [[ $(id -u) != 0 ]]; then
  mkdir readonly && chmod a-w readonly
  expect 3 'a read-only directory' "$train" $tiny --out readonly/run
  says err 'readonly'
fi
expect 3 'a file in the way' "$train" $tiny --out first
expect 3 'no such place' "$train" $tiny --out /proc/hilt
one_line_on_stderr
