#!/usr/bin/env bash
# names learns three names by heart, with attention fused or taped: its samples are then among them.
. "$SRC/tests/packaging/common.sh"
program=$BUILD/examples/names
cd "$scratch"
printf '%s\n' mira tao benno >three.txt
for mode in fused taped; do
  expect 0 "names --backward $mode" "$program" --text three.txt --backward $mode
  says out 'step 999: loss 0.'
  known=$(tail -n 10 out | grep -cxf three.txt || true)
  ((known >= 9)) || fail "$mode: $known of 10 samples are names it learned: $(tail -n 10 out | paste -sd' ')"
done
printf '%s\n' mira >one.txt
train=$BUILD/examples/train
expect 0 'train --task names' "$train" --task names --out made
says out '4.19 k parameters'
(($(grep -cxE '[a-z]{2,9}' out) >= 8)) || fail "train --task names: no 8 of 10 samples look like names: $(cat out)"
expect 0 'names of a file' "$train" --task names --text three.txt --out three
known=$(grep -cxf three.txt out || true)
((known >= 9)) || fail "train --task names --text: $known of 10 samples are names it learned: $(cat out)"
expect 3 'one name' "$train" --task names --text one.txt --out one
says err 'train: error: --text (one.txt): has 1 names, one a line; expected 2 or more'
expect 3 'names without a file' "$program" --text none.txt
says err 'names: error: --text (none.txt): no such file, or no names in it, one a line'
printf '%s\n' anna Bob >upper.txt
expect 3 'names of other letters' "$program" --text upper.txt
says err "names: error: --text (upper.txt): 'Bob' has more than the letters a to z"
