#!/usr/bin/env bash
# What attend, compare_gradients and curves say to bad input: one line, the right exit status, soon, nothing written.
. "$SRC/tests/packaging/common.sh"
programs=$BUILD/examples
cd "$scratch"
most_ms=1000  # 82 to 87 seen
# What a first start reads from the disk is not the error's time.
for program in attend compare_gradients curves; do "$programs/$program" --help >/dev/null; done

# A .npy of zeros: file, descr, shape as in the header, bytes of data.
npy() {
  local header="{'descr': '$2', 'fortran_order': False, 'shape': ($3), }"
  printf '\x93NUMPY\x01\x00' >"$1"
  local length=$(((10 + ${#header} + 1 + 63) / 64 * 64 - 10))
  printf "\\x$(printf %02x $((length % 256)))\\x$(printf %02x $((length / 256)))" >>"$1"
  printf '%-*s\n' $((length - 1)) "$header" >>"$1"
  head -c "$4" /dev/zero >>"$1"
}
npy q.npy '<f4' '1, 16, 4, 8' 2048
npy k.npy '<f4' '1, 16, 2, 8' 1024
npy three.npy '<f4' '1, 16, 3, 8' 1536
npy wide.npy '<f8' '1, 16, 4, 8' 4096
npy short.npy '<f4' '1, 8, 4, 8' 1024
npy flat.npy '<f4' '16, 32' 2048
npy whole.npy '<i4' '1, 16, 4, 8' 2048
npy cut.npy '<f4' '1, 16, 4, 8' 512
npy half.npy '<f2' '1, 16, 4, 8' 1024
: >empty.npy
printf '\x89PNG\r\n\x1a\nnot an array' >picture.npy
printf '\x80\x04\x95pickled' >pickle.npy
mkdir directory.npy

# refused STATUS TEXT PROGRAM FLAGS..: TEXT must stand in the one line.
refused() {
  local status=$1 text=$2 program=$3
  shift 3
  expect_soon "$status" "$program $*" "$programs/$program" --out made "$@"
  one_line_on_stderr
  says err "$program: error: "
  says err "$text"
  [[ ! -e made ]] || fail "$program $*: left $(find made)"
}
attend() {
  local status=$1 text=$2 files=()
  shift 2
  for file in q.npy k.npy v.npy; do
    [[ " $* " == *" --${file%.npy} "* ]] || files+=("--${file%.npy}" "${file/v/k}")
  done
  refused "$status" "$text" attend "${files[@]}" "$@"
}

# ---- the command line ----
refused 2 "'--segmnt': no such option; --help lists all" compare_gradients --segmnt 4
refused 2 "'--d': no such option; did you mean --d-o, --dilation-mode, --documents or --device? --help lists all" \
  attend --d
refused 2 "'--Patt': no such option; did you mean --pattern? --help lists all" attend --Patt dense
refused 2 "'--patern': no such option; did you mean --pattern?" attend --patern dense
refused 2 "'dense': no such argument" curves dense
refused 2 "--heads (0): must be 1..1024" compare_gradients --heads 0
refused 2 "--heads (abc): 'abc' is not a whole number" compare_gradients --heads abc
refused 2 "--heads (4x): '4x' is not a whole number" compare_gradients --heads 4x
refused 2 "--heads (99999999999999999999): must be 1..1024" compare_gradients --heads 99999999999999999999
refused 2 "--heads: needs one value" compare_gradients --heads
refused 2 "--dropout (1.5): must be 0..0.99" compare_gradients --dropout 1.5
refused 2 "--dropout (nan): must be 0..0.99" compare_gradients --dropout nan
refused 2 "--kv-heads (3): must divide --heads, 4" compare_gradients --kv-heads 3
# What an exercise has no use for is not dropped.
for other in '--answer 2' '--check sol.py' --json '--length 7' '--config seven.ini'; do
  printf 'length = 7\n' >seven.ini
  # shellcheck disable=SC2086
  refused 2 'has no use for it; leave one of them out' compare_gradients --exercise 1 $other
done
for flags in '--answer 1 --json' '--check sol.py --pattern segment:4'; do
  # shellcheck disable=SC2086
  refused 2 'has no use for it; leave one of them out' compare_gradients $flags
done
refused 2 "--dtype (f8): must be one of f64, f32, bf16, f16; did you mean" compare_gradients --dtype f8
refused 2 "--modes (fsued): must be one of dense, taped, hybrid, fused; did you mean fused?" \
  compare_gradients --modes fsued
refused 2 "--causal (past): must be one of none, token, curve" compare_gradients --causal past
refused 2 "'hilbrt' is not one of row, snake, morton, tiles, hilbert, auto, given; did you mean hilbert?" \
  compare_gradients --order hilbrt
refused 2 "--order (given): a file says which" compare_gradients --order given
refused 2 "1024" compare_gradients --length 1024 --order hilbert:64x64
says err 4096
refused 2 "--order (hilbrt): " attend --q q.npy --k k.npy --v k.npy --order hilbrt
for program in compare_gradients curves 'attend --q q.npy --k k.npy --v k.npy'; do
  # shellcheck disable=SC2086
  refused 2 "--pattern (segment:0): segment: size 0 must be at least 1; as in segment:128" $program --pattern segment:0
done
for program in 'compare_gradients --length 16' 'curves --grid 4x4' 'attend --q q.npy --k k.npy --v k.npy'; do
  for n in 16 2147483647; do
    # shellcheck disable=SC2086
    refused 2 "--pattern (slide:2,prefix=$n): a row has 16 tokens, none of which is behind its prefix" $program \
      --pattern slide:2,prefix=$n
  done
done
refused 2 "did you mean segment?" compare_gradients --pattern segmnt:4
refused 2 "'SEGMENT' is not one of dense, segment, slide, neighborhood, window2d, slide2d, neighborhood2d, window3d, \
slide3d, neighborhood3d, blocks; did you mean segment?" curves --pattern SEGMENT:4
refused 2 "--pattern (segment): segment: needs a size; as in segment:128" compare_gradients --pattern segment
refused 2 "expected HEIGHTxWIDTH" compare_gradients --pattern window2d:8
refused 2 "--grid (128x): expected HEIGHTxWIDTH" curves --grid 128x
refused 2 "--grid (0x4): expected HEIGHTxWIDTH" curves --grid 0x4
refused 2 "at most" curves --grid 100000x100000
refused 3 "blocks.npy" curves --pattern blocks:64@blocks.npy
blocks() {  # FILE, TEXT
  refused 3 "--pattern (blocks:4@$1): $1: $2" attend --q q.npy --k k.npy --v k.npy --pattern "blocks:4@$1"
}
npy rank.npy '<i4' '4,' 16
npy floats.npy '<f4' '2, 2' 16
npy odd.npy '<i4' '2, 3' 24
npy far.npy '<i4' '1, 2' 0 && printf '\0\0\0\0\4\0\0\0' >>far.npy
npy negative.npy '<i4' '1, 2' 0 && printf '\0\0\0\0\xff\xff\xff\xff' >>negative.npy
blocks rank.npy 'expected integers of shape [n, 2], got i32[4]'
blocks floats.npy 'expected integers of shape [n, 2], got f32[2, 2]'
blocks odd.npy 'expected integers of shape [n, 2], got i32[2, 3]'
blocks far.npy 'block (0, 4) is outside the 4 x 4 blocks of 4 that 16 tokens make'
refused 2 "--pattern (blocks:4@top:2) in --order (row): blocks:4@top:2 chooses the keys of a block of queries by \
all of them, later ones too, so causal token would leak" \
  attend --q q.npy --k k.npy --v k.npy --pattern blocks:4@top:2 --causal token
refused 2 "each sequence chooses blocks of its own" compare_gradients --batch 2 --pattern blocks:64@top:2
refused 2 "auto takes a grid and no options" compare_gradients --order auto,chunk=16
refused 2 "--relative (16x17): 16 is even; offsets from -r to r are 2 r + 1" compare_gradients --relative 16x17
refused 2 "--relative (3x3x3x3): has 4 axes; at most 3" compare_gradients --relative 3x3x3x3
for size in 99999999999 9223372036854775807; do
  refused 4 "--relative ($size): would need" compare_gradients --relative $size
done
refused 2 "--relative (9999999999x9999999999): " compare_gradients --relative 9999999999x9999999999
refused 2 "--relative (3x3): table [4, 3, 3] is for 2 axes, but order hilbert has no grid; name one, as in row:HxW" \
  compare_gradients --relative 3x3 --length 256
refused 2 "--bias (4x4): has rank 2; expected [batch, heads, queries, keys]" compare_gradients --bias 4x4
refused 2 "--bias (1x3x1xL): axis 1 of [batch, heads, queries, keys] is 3; it broadcasts where it is 1 or 4" \
  compare_gradients --bias 1x3x1xL --length 256
refused 2 "--bias (1x1x700000x700000): axis 2 of [batch, heads, queries, keys] is 700000" \
  compare_gradients --bias 1x1x700000x700000 --length 256
refused 2 "--bias (LxLxLxL): L is the number of queries or keys, not of sequences or heads" \
  compare_gradients --bias LxLxLxL
refused 2 "--alibi (lerned): alibi: 'lerned' is not one of none, published, learned; did you mean learned?" \
  compare_gradients --alibi lerned
refused 2 "--softcap (-1): must be 0.." compare_gradients --softcap -1
refused 2 "--documents (100/28): 2 lists for as many rows, but one set is shown" \
  compare_gradients --length 128 --documents 100/28
refused 2 "documents" compare_gradients --length 128 --documents 100,64
blocks negative.npy 'row 0 is (0, -1); block numbers count from 0'
"$BUILD/examples/info" | grep -q "device    cuda:0" || refused 5 "no usable GPU" compare_gradients --device cuda
refused 2 "--device (tpu): must be auto, cpu, cuda or cuda:N" compare_gradients --device tpu

# ---- more than fits in memory, or in a minute of judging ----
refused 4 "the inputs and what judges them: would need" compare_gradients --length 131072 --heads 1024 --head-dim 1024
refused 2 "--length (131072): judging every pair" \
  compare_gradients --length 131072 --pattern dense --heads 1 --repeat 2 --modes dense,taped
grep -qE '; --length [0-9]+ would fit, or' "$scratch/err" || fail "no length that fits is named: $(cat "$scratch/err")"
refused 2 "--length (65536): judging every pair" \
  compare_gradients --length 65536 --order hilbert:256x256 --pattern dense

# ---- --debug: the same line, and the stack of the throw ----
for program in 'attend --scale wide --q q.npy --k k.npy --v k.npy' 'compare_gradients --heads 0' \
  'compare_gradients --order hilbrt' 'curves --grid 1' 'hello_tape --nope' 'info --nope'; do
  # shellcheck disable=SC2086
  expect 2 "$program" "$programs"/$program
  one_line_on_stderr
  cp "$scratch/err" line
  # shellcheck disable=SC2086
  expect 2 "$program --debug" "$programs"/$program --debug
  head -1 "$scratch/err" | diff line - || fail "$program: says something else under --debug"
  [[ $(grep -c "${program%% *}(" "$scratch/err") -ge 4 ]] || fail "$program --debug: no stack: $(cat "$scratch/err")"
  expect 0 "${program%% *} --help" "$programs/${program%% *}" --help
  says out '--debug'
done
expect 3 '--debug and a file' "$programs/attend" --debug --q none.npy
says err '_ZN4hilt9fail_with'
expect 0 '--debug without an error' "$programs/hello_tape" --debug
[[ ! -s $scratch/err ]] || fail "--debug prints without an error: $(cat "$scratch/err")"

# A pipe whose only reader is gone before the program begins.
mkfifo unread
to_nobody() {
  local reader writer
  # shellcheck disable=SC2094
  exec {reader}<>unread {writer}>unread {reader}>&-
  (exec "$@" >&"$writer")
}

# ---- nowhere to print to: the reason is that of the failed write ----
for program in hello_tape info 'curves --grid 8x8 --out full' 'attend --q q.npy --k k.npy --v k.npy --out full' \
  'compare_gradients --length 16 --heads 1 --head-dim 4 --repeat 2 --out full'; do
  # shellcheck disable=SC2016,SC2086
  expect 3 "$program to a full disk" sh -c '"$0" "$@" >/dev/full' "$programs"/$program
  [[ $(cat "$scratch/err") == "${program%% *}: error: standard output: No space left on device" ]] ||
    fail "a full disk: $(cat "$scratch/err")"
  [[ ! -e full ]] || fail "$program to a full disk leaves $(ls -A full)"
  # A pipe that nobody reads is no failure: the files are there.
  if [[ $program == *--out* ]]; then
    # shellcheck disable=SC2086
    expect 0 "$program to nobody" to_nobody "$programs"/$program
    [[ $(ls full) ]] || fail "$program to nobody: no files"
    rm -r full
  fi
done

# ---- a file of options ----
printf '# defaults\n[attention]\nheads = 2\nlenght = 64\n' >wrong.ini
refused 2 "'lenght': no such key, wrong.ini:4; did you mean --length?" compare_gradients --config wrong.ini
printf 'heads = many\n' >wrong.ini
refused 2 "--heads (many): 'many' is not a whole number, wrong.ini:1" compare_gradients --config wrong.ini
printf 'heads\n' >wrong.ini
refused 3 "expected key = value, wrong.ini:1" compare_gradients --config wrong.ini
refused 3 "--config (none.ini): No such file" compare_gradients --config none.ini
refused 3 "--config (directory.npy): a directory" compare_gradients --config directory.npy

printf 'out = a\0b\n' >wrong.ini
refused 3 "--config: 'out = a\x00b': a byte 0 is no text, wrong.ini:1" curves --config wrong.ini
printf 'heads = 2\nheads = 4\n' >wrong.ini
refused 2 "'heads': given twice, wrong.ini:2; leave one out" compare_gradients --config wrong.ini
printf 'out = "a\n' >wrong.ini
refused 3 'a quote that is not closed at its end, wrong.ini:1' curves --config wrong.ini

# ---- what is too long, in a name or in a message ----
long=$(printf 'x%.0s' {1..300})
for program in 'attend --q q.npy --k k.npy --v k.npy' 'curves --grid 8x8' 'compare_gradients --length 64 --repeat 2'; do
  # shellcheck disable=SC2086
  expect 3 "$program with a long name" "$programs"/$program --out "$long"
  one_line_on_stderr
  says err ': File name too long'
done
attend 3 'File name too long' --q "$long"
refused 3 'File name too long' curves --config "$long"
refused 2 ".. of 300 bytes' is not a whole number" compare_gradients --heads "$long"
refused 2 '.. of 600 bytes' compare_gradients --order "$long$long"
refused 2 '.. of 302 bytes' curves "--$long"
(($(wc -c <"$scratch/err") < 400)) || fail "a message repeats all of it: $(cat "$scratch/err")"

# ---- the environment ----
for junk in 4G -1 '' ' 5' 18446744073709551616; do
  HILT_POOL_BYTES=$junk attend 2 "HILT_POOL_BYTES ($junk): not a number of bytes"
done
HILT_TF32=yes refused 2 'HILT_TF32 (yes): must be one of 0, 1' curves

# ---- files ----
refused 2 "--q: needs a .npy file" attend
attend 3 none.npy --q none.npy
attend 3 directory.npy --q directory.npy
attend 3 empty.npy --q empty.npy
attend 3 picture.npy --q picture.npy
attend 3 pickle.npy --q pickle.npy
attend 3 cut.npy --q cut.npy
attend 3 "--q (whole.npy): elements are i32; expected f64 or f32" --q whole.npy
attend 3 "--q (half.npy): elements are f16; expected f64 or f32" --q half.npy
attend 3 "--q (flat.npy): shape [16, 32] has 2 axes" --q flat.npy
attend 3 "--k: is f64 and --q is f32" --k wide.npy
attend 3 "--q (q.npy): 16 rows, and --k has 8 tokens; each query is one" --k short.npy
attend 2 "--queries: 'x' is not a whole number" --queries 3:x
attend 2 "--queries (0:15): names 15 tokens, and --q has 16 rows" --queries 0:15
attend 2 "--queries (1:16): 1:16 reaches beyond the 16 rows of --k" --queries 1:16
attend 2 "--queries (3:9223372036854775807): " --queries 3:9223372036854775807
attend 2 "--queries (0:2000000000): " --queries 0:2000000000
attend 2 "--weights (3,16): 16 reaches beyond the 16 rows of --q" --weights 3,16
attend 2 "--weights (5,3): 3 comes twice or late; name rows in ascending order" --weights 5,3
attend 3 "--sink (q.npy): sink: " --sink q.npy
attend 3 "--bias (k.npy): bias: [1, 16, 2, 8] does not broadcast" --bias k.npy
attend 3 "--v: shape [1, 16, 4, 8], expected [1, 16, 2, 8]" --v q.npy
attend 3 "--k: 3 key heads cannot serve the 4 heads of --q evenly" --k three.npy --v three.npy
attend 3 "--d-o: shape [1, 16, 2, 8], expected [1, 16, 4, 8]" --d-o k.npy
# An array without elements is as large as it says on its other axes: of those nothing is made.
for shape in '1, 0, 2147483648, 1' '0, 1, 1099511627776, 1' '1, 1, 1099511627776, 0'; do
  rm -f heads.npy
  npy heads.npy '<f4' "$shape" 0
  attend 3 ' heads; at most 65535 are served' --q heads.npy --k heads.npy --v heads.npy
done
npy rows.npy '<f4' '1099511627776, 0, 1, 1' 0
npy many-points.npy '<f4' '1099511627776, 0, 2' 0
expect_soon 0 'points of no tokens' "$programs/attend" --q rows.npy --k rows.npy --v rows.npy \
  --order points:many-points.npy --out none

# ---- numbers: what is finite stays finite or is refused, what is not passes with a warning ----
numbers() {  # FILE, descr, shape, count, bytes of each
  npy "$1" "$2" "$3" 0
  # shellcheck disable=SC2059
  for ((i = 0; i < $4; ++i)); do printf "$5"; done >>"$1"
}
numbers huge.npy '<f4' '1, 16, 2, 8' 256 '\x99\x76\x96\x7e'           # 1e38
numbers wider.npy '<f8' '1, 16, 2, 8' 256 '\x9c\x75\0\x88\x3c\xe4\x37\x7e'  # 1e300
numbers nan.npy '<f4' '1, 16, 2, 8' 256 '\0\0\xc0\x7f'
attend 7 'o: nan at [0, 0, 0, 0], though all inputs are finite' --q huge.npy --k huge.npy
attend 7 'o: ' --q wider.npy --k wider.npy --v wider.npy --dtype f32
attend 7 '; try --dtype f64, or scale the inputs down' --v huge.npy --q huge.npy --k huge.npy --dtype f16
expect 0 'attend to what is no number' "$programs/attend" --q q.npy --k k.npy --v nan.npy --out nans
says err 'attend: warning: --v (nan.npy): holds nan at [0, 0, 0, 0]'
expect 0 'attend to nothing' "$programs/attend" --q q.npy --k k.npy --v k.npy --pattern segment:4,dilation=8 \
  --out nothing

# ---- what attend cannot do ----
attend 2 "--mode (fsued): must be one of taped, hybrid, fused; did you mean fused?" --mode fsued
attend 2 "--scale (wide): 'wide' is not a number" --scale wide
attend 2 "--dtype (f8): must be one of f64, f32, bf16, f16" --dtype f8
attend 2 "16" --order hilbert:4x5
attend 2 '--pattern (segment:8,offset=9) in --order (row): offset 9 must be below the dilation, 1' \
  --order row --pattern segment:8,offset=9
attend 2 '--pattern (neighborhood:2) in --order (row): neighborhood:2: the number of keys must be odd' \
  --pattern neighborhood:2
attend 2 '--documents (4x): ' --documents 4x
attend 2 'the documents of row 0 hold 17 tokens, but a row has 16' --documents 9,2x4
attend 2 'window2d:2x2 needs a grid in every document; one of row 0 has 3 tokens and no grid' \
  --pattern window2d:2x2 --documents 2x4,3
attend 2 'order hilbert:4x4 names a grid, and grids belong to documents: 9' --order hilbert:4x4 --documents 9
attend 2 '--documents (9/7): 2 lists, but --q has 1 rows' --documents 9/7
attend 2 '--ranks (1024): more than the 16 tokens of --k' --ranks 1024
for mode in taped hybrid; do
  attend 2 "--ranks (2): --mode $mode is for one rank; use fused" --ranks 2 --mode $mode
done
npy many.npy '<f4' '1, 64, 4, 8' 8192
(
  ulimit -f 4
  expect 3 'more than ulimit -f lets it write' "$programs/attend" --q many.npy --k many.npy --v many.npy --out limited
)
says err 'File too large'
[[ ! -e limited ]] || fail "more than ulimit -f lets it write: left $(ls -A limited)"
if ! "$BUILD/examples/info" | grep -q "device    cuda:0"; then attend 5 "no usable GPU: " --device cuda; fi

# ---- where it goes ----
: >file
for program in 'attend --q q.npy --k k.npy --v k.npy' compare_gradients curves; do
  # shellcheck disable=SC2086
  expect 3 "$program into a file" "$programs"/$program --out file/here
  one_line_on_stderr
done
# A name that is taken by a directory: the files before it must not appear either.
mkdir -p taken/lse.npy
expect 3 'attend onto a directory' "$programs/attend" --q q.npy --k k.npy --v k.npy --out taken
[[ $(ls -A taken) == lse.npy ]] || fail "left behind: $(ls -A taken)"

soon_enough "$programs/attend"
