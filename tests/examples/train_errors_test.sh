#!/usr/bin/env bash
# What train and sample say to bad input: one line, the right exit status, soon, nothing written.
. "$SRC/tests/packaging/common.sh"
train=$BUILD/examples/train
cd "$scratch"

most_ms=1000  # 82 to 87 seen
# refused STATUS LINE FLAGS..: LINE is the whole of what it says after `train: error: `.
refused() {
  local status=$1 line=$2
  shift 2
  expect_soon "$status" "train $*" "$train" --out made "$@"
  one_line_on_stderr
  [[ $(cat "$scratch/err") == "train: error: $line" ]] ||
    fail "train $*: said '$(cat "$scratch/err")', expected 'train: error: $line'"
  [[ ! -e made ]] || fail "train $*: left $(find made)"
}

refused 2 "--lr (abc): 'abc' is not a number" --lr abc
refused 2 '--heads (0): must be 1..1024' --heads 0
refused 2 '--width (100): not divisible by --heads 7 (nearest 98, 105)' --width 100 --heads 7
refused 2 "'--segmnt': no such option; --help lists all" --segmnt 4
refused 2 '--grid (128x): expected HEIGHTxWIDTH with sides of 1..1024, as in 16x16' --task life --grid 128x
refused 2 '--grid (128x): expected HEIGHTxWIDTH with sides of 1..1024, as in 16x16' --grid 128x
refused 2 '--grid (9): expected HEIGHTxWIDTH with sides of 1..1024, as in 16x16' --text x --grid 9
refused 2 '--pattern (segment:0): segment: size 0 must be at least 1; as in segment:128' --pattern segment:0
refused 2 '--context (100): --grid 8x8 has 64 cells; leave --context out' --task life --grid 8x8 --context 100
refused 2 '--backward (fsued): must be one of taped, hybrid, fused; did you mean fused?' --backward fsued
refused 2 '--task (live): must be one of stories, life, text, ising, names; did you mean life?' --task live
refused 2 '--schedule (cosin): must be one of cosine, linear, constant, wsd; did you mean cosine?' --schedule cosin
refused 2 '--dtype (f8): must be one of f32, bf16, f16; did you mean f32?' --dtype f8
refused 2 '--dropout (1): must be 0..0.99' --dropout 1
refused 2 '--keep (1): must be 2..1048576' --keep 1
refused 2 '--warmup (50): longer than the whole run, --steps 10' --steps 10 --warmup 50
refused 2 '--seconds (5): --steps 10 is given too; leave one of them out' --steps 10 --seconds 5
refused 2 '--text: --task text needs a file; name one' --task text
refused 2 '--last: --sample-only alone has use for it; leave it out' --last
refused 2 '--last: --sample-only alone has use for it; leave it out' --dry-run --last
refused 2 '--text (x): --task life has no use for it; leave it out' --task life --text x
for task in life ising; do
  refused 2 "--tokens (9): --task $task has no use for it; leave it out" --task $task --tokens 9
done
for n in 192 2147483647; do
  refused 2 "--pattern (slide:2,prefix=$n): a row has 192 tokens, none of which is behind its prefix" \
    --pattern slide:2,prefix=$n
done
refused 2 '--relative (31x32): 32 is even; offsets from -r to r are 2 r + 1' --relative 31x32
refused 2 '--relative (3x3): table [8, 3, 3] is for 2 axes, but order row has no grid; name one, as in row:HxW' \
  --relative 3x3
refused 2 '--bias (8): has rank 1; expected [batch, heads, queries, keys]' --bias 8
refused 2 '--bias (1x3x1xL): axis 1 of [batch, heads, queries, keys] is 3; it broadcasts where it is 1 or 8' \
  --bias 1x3x1xL
refused 2 "--alibi (lerned): alibi: 'lerned' is not one of none, published, learned; did you mean learned?" \
  --alibi lerned
refused 2 "'--documents': no such option; --help lists all" --documents 64,64
tasks='must be one of stories, life, text, ising, names'
refused 2 "--task (images): $tasks" --task images
files="GPT-2's vocab.json and merges.txt or tokenizer.json"
refused 2 "--vocabulary (bpe): needs --tokenizer, a directory with $files" \
  --text x --vocabulary bpe
printf 'task = images\n' >wrong.ini
refused 2 "--task (images): $tasks, wrong.ini:1" --config wrong.ini
refused 2 '--grid (13x12): the exact answer of --task ising is known up to 12x12' --task ising --grid 13x12
refused 2 '--pattern-odd (slide:2): --layers 1 has block 0 alone; leave it out, or take more layers' \
  --pattern-odd slide:2 --layers 1
for order in auto hilbert,scope=segment; do
  refused 2 "--pattern-odd (slide:2): --order $order follows one pattern; name another" --pattern-odd slide:2 \
    --order $order
done
refused 2 '--pattern-odd (segment:0): segment: size 0 must be at least 1; as in segment:128' --pattern-odd segment:0
refused 3 '--text (none): cannot open: No such file or directory' --text none
mkdir directory
refused 3 '--text (directory): is a directory; expected a text' --text directory
: >empty
refused 3 '--text (empty): is empty; expected a text' --text empty
printf 'too short' >short
needs='--context 192 needs at least 386 (a row and the token after it, for training and for validation)'
refused 3 "--text (short): has 9 characters; $needs; use a longer text or a smaller --context" --text short
{ head -c 1000 /dev/zero | tr '\0' a; printf '\xff'; } >broken
refused 3 '--text (broken): invalid UTF-8 at byte 1000; save it as UTF-8, or take bytes, not characters' --text broken
refused 3 '--config (none.ini): No such file or directory; name an INI file, as --print-config writes it' \
  --config none.ini
printf '[run]\nlayers = 2\nlyers = 3\n' >wrong.ini
refused 2 "'lyers': no such key, wrong.ini:3; did you mean --layers? --help lists all" --config wrong.ini
printf 'task = life\ngrid = 9\n' >wrong.ini
refused 2 '--grid (9): expected HEIGHTxWIDTH with sides of 1..1024, as in 16x16' --config wrong.ini
mkfifo pipe
for file in pipe /dev/zero; do refused 3 \
  "--config ($file): not a regular file; name an INI file, as --print-config writes it" --config $file; done
head -c 2000000 /dev/zero >large
refused 3 '--config (large): larger than 1048576 bytes; name an INI file, as --print-config writes it' --config large
printf '\033[31mna\303\257ve\377\n' >colored  # what a file holds must not reach the terminal as it is
refused 3 "--config: '\x1b[31mnaïve\xff': expected key = value, colored:1" --config colored
refused 3 "--prompt: character '~' at byte 3 is not among the 46 the model knows" --prompt 'Mia~'
refused 3 '--out (made): no checkpoint there to go on from; train first, or name the directory of a run' --resume
refused 3 '--out (made): no checkpoint there to go on from; train first, or name the directory of a run' --sample-only

# Errors whose text is the library's: the part that matters.
contains() {
  local status=$1 text=$2
  shift 2
  expect_soon "$status" "train $*" "$train" --out made "$@"
  one_line_on_stderr
  says err "$text"
  [[ ! -e made ]] || fail "train $*: left $(find made)"
}
contains 2 'did you mean hilbert?' --order hilbrt
contains 2 'did you mean segment?' --pattern segmnt:4
contains 2 '192' --order hilbert:16x16
says err '256'
contains 4 'TB): needed' --width 8192 --layers 200 --context 4096
says err 'the largest: '
contains 4 'taped keeps L x L weights' --context 100000 --backward taped
# The largest of everything, and little else that is large: seen from the sizes, before any of it is made.
contains 4 'GB): needed' --context 1048576
contains 4 'TB): needed' --context 1048576 --batch 1 --width 8 --heads 1 --layers 1 --backward taped
contains 4 'TB): needed' --task life --grid 1024x1024 --batch 65536
contains 4 '): needed' --context 1048576 --batch 65536 --width 65536 --layers 1024 --accumulate 65536  # beyond 64 bits
# A text is read whole: one beyond memory is refused before that.
truncate -s 1T huge
contains 4 '--text (huge): would need ' --text huge
says err '; it is read whole; name a part of it'
# What batch systems set: no more than twice what --help maps, rounded up, and 256 MiB, of the 1.04 GB that this one
# needs.
least=4096
until (ulimit -v $least; exec "$train" --help) >/dev/null 2>&1; do
  least=$((2 * least))
  ((least < 1 << 30)) || fail '--help needs more than 1 TiB'
done
(ulimit -v $((least + (256 << 10))); export HILT_THREADS=1; contains 4 ' are available and ' --width 512 --batch 64)
if ! "$BUILD/examples/info" | grep -qi 'cuda:0'; then contains 5 'no usable GPU' --device cuda; fi

# Not a number: the step and where it began; the log of what went well stays.
expect 7 'a learning rate beyond sense' "$train" --layers 1 --heads 1 --width 16 --context 16 --batch 1 --warmup 0 \
  --clip 0 --lr 1e30 --steps 50 --out wild
says err 'train: error: loss ('
says err 'not finite at step '

expect 7 'the same with --debug' "$train" --layers 1 --heads 1 --width 16 --context 16 --batch 1 --warmup 0 --clip 0 \
  --lr 1e30 --steps 50 --out wild2 --debug
grep -A 5 '^train: error: loss (' "$scratch/err" | grep -q 'train(+' || fail "--debug: no stack: $(cat "$scratch/err")"

# Pointless, but allowed: a warning.
expect 0 'a pointless dilation' "$train" --pattern segment:4,dilation=8 --dry-run --out made
sparse='dilation 8 in segments of 4: each row attends to 1 key at most'
says err "train: warning: --pattern (segment:4,dilation=8): $sparse"
expect 0 'a plan' "$train" --dry-run --out made
says out 'planned'
[[ ! -e made ]] || fail 'a dry run wrote something'

# The configuration goes out and comes back, with the task's own defaults.
expect 0 '--print-config' "$train" --task life --grid 8x8 --print-config --out made
cp "$scratch/out" saved.ini
grep -q '^context = 64$' saved.ini || fail "life on 8x8: $(grep context saved.ini)"
expect 0 '--config' "$train" --config saved.ini --print-config
cmp saved.ini "$scratch/out" || fail 'the configuration did not come back'
expect 0 '--print-config of odd values' "$train" --prompt $'  Mia\nhas "a\\ ' --out '"made" ' --print-config
cp "$scratch/out" saved.ini
expect 0 '--config of odd values' "$train" --config saved.ini --print-config
cmp saved.ini "$scratch/out" || fail 'odd values did not come back'
grep -qF 'prompt = "  Mia\nhas \"a\\ "' saved.ini || fail "a value with blanks and lines: $(cat saved.ini)"
expect 0 'an option given twice' "$train" --layers 3 --layers 1 --dry-run --out made
[[ $(cat "$scratch/err") == 'train: warning: --layers: given 2 times; the last counts: 1' ]] ||
  fail "twice: $(cat "$scratch/err")"
for program in "$train" "$train --resume" "$BUILD/examples/sample"; do
  # shellcheck disable=SC2086
  expect 3 "$program with a long name" $program --out "$(printf 'x%.0s' {1..300})"
  one_line_on_stderr
done
expect 0 '--help' "$train" --help
for option in task text steps seconds layers heads width context batch accumulate order pattern backward checkpointing \
  dropout lr schedule warmup \
    weight-decay clip dtype device seed out resume keep sample-every eval-every ranks dry-run sample-only prompt \
    temperature top-k top-p debug; do
  says out "--$option"
done
tr -s ' \n' ' ' <"$scratch/out" | grep -qF -- '--text FILE has to be named again' ||
  fail '--help: --resume does not say that a text is named again'
# sample has what it uses, and no more.
expect 0 'sample --help' "$BUILD/examples/sample" --help
[[ $(grep -oE '^  (-h,)?--[a-z-]+' "$scratch/out" | sed 's/.*--//' |
  xargs) == 'help out prompt temperature top-k top-p stop tokens last seed config print-config debug' ]] \
  ||
  fail "sample --help: $(cat "$scratch/out")"
says out 'Where train put the run'
expect 2 'sample with an option of train' "$BUILD/examples/sample" --layers 2
says err "sample: error: '--layers': no such option"

soon_enough "$train"
