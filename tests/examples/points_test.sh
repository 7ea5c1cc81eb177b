#!/usr/bin/env bash
# examples/embed/points.cpp: points along four curves learn from their neighbours, points as they come do not.
. "$SRC/tests/packaging/common.sh"
right() {  # CURVES: the percentage
  expect 0 "points $1" "$BUILD/examples/points" "$1" 1 250
  sed -E 's/.*: ([0-9]+)\.[0-9] % of points right.*/\1/' "$scratch/out"
}
along=$(right all) aside=$(right row)
[[ $along -ge 60 && $aside -le 50 ]] || fail "$along % along the curves, $aside % as they come"
[[ $(wc -l <"$SRC/examples/embed/points.cpp") -le 120 ]] || fail 'points.cpp is to stay a page'
