#!/usr/bin/env bash
# compare_gradients and curves: what they print, what they write, and that a wrong gradient fails.
. "$SRC/tests/packaging/common.sh"
programs=$BUILD/examples
cd "$scratch"

# page FILE: one HTML file that stands alone, small, and readable without seeing it.
page() {
  [[ $(stat -c %s "$1") -lt 500000 ]] || fail "$1 has $(stat -c %s "$1") bytes"
  ! grep -qE '(src|href)="[^#"]|https?://|url\(|@import|<script|<link|<iframe' "$1" || fail "$1 refers outside: $(grep -oE '(src|href)="[^#"][^"]*|https?://[^"< ]*|url\([^)]*|@import|<script|<link|<iframe' "$1" | head -3)"
  local figures titles descriptions
  figures=$(grep -o '<svg' "$1" | wc -l) titles=$(grep -oE '<svg[^>]*><title>[^<]+' "$1" | wc -l) descriptions=$(grep -oE '<desc>[^<]+' "$1" | wc -l)
  [[ $figures -gt 0 && $figures == "$titles" && $figures == "$descriptions" ]] || fail "$1: $figures figures, $titles titles, $descriptions descriptions"
  [[ $(grep -o 'role="img"' "$1" | wc -l) == "$figures" ]] || fail "$1: a figure without a role"
  grep -q 'prefers-color-scheme:dark' "$1" || fail "$1 has no dark colors"
  ! grep -qE '>(-?nan|-?inf)|"(-?nan|-?inf)' "$1" || fail "$1 shows a number that is none"
}
# summary: at most 45 lines of 80 columns, no color on a pipe.
summary() {
  [[ $(wc -l <out.txt) -le 45 ]] || fail "$1: $(wc -l <out.txt) lines"
  [[ $(wc -L <out.txt) -le 80 ]] || fail "$1: $(wc -L <out.txt) columns: $(awk 'length > 80' out.txt)"
  ! grep -q $'\033' out.txt || fail "$1: color on a pipe"
}

compare() {  # STATUS, flags: small and quick
  local status=$1
  shift
  expect "$status" "compare_gradients $*" "$programs/compare_gradients" --length 256 --heads 2 --head-dim 16 --repeat 2 --out c "$@"
  cp "$scratch/out" out.txt
}

for flags in '--pattern segment:64' '--pattern neighborhood2d:5x5' '--pattern dense --causal token --kv-heads 1' '--pattern slide:9 --dtype f64' \
    '--pattern segment:32+segment:128,dilation=4 --dilation-mode longnet --dropout 0.2' '--pattern segment:64 --dtype bf16 --modes dense,taped,fused' '--pattern segment:8,dilation=16,offset=9'; do
  # shellcheck disable=SC2086
  compare 0 $flags
  summary "$flags"
  page c/compare.html
  [[ $(ls -A c) == $'compare.html\ncompare.json\ntrace.json' ]] || fail "$flags: wrote $(ls -A c)"
  grep -q '^verdict: ok' out.txt || fail "$flags: $(tail -1 out.txt)"
  grep -qE 'Hilbert order (helps|does nothing|loses)' out.txt || fail "$flags: says nothing about the order"
  for order in row snake morton tiles hilbert; do grep -q "^$order " out.txt || fail "$flags: no line for $order"; done
done

compare 0 --pattern segment:64
for anchor in bill tapes memory time agreement scaling order roofline formulas method; do
  grep -q "id=\"$anchor\"" c/compare.html || fail "the page has no section '$anchor'"
done
# The six formulas stand beside lines that are in the source, under their numbers.
grep -oE '[0-9]+: <code>[^<]*</code></td>' c/compare.html | sed 's/<\/code><\/td>//; s/<code>//; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' >lines
[[ $(wc -l <lines) == 6 ]] || fail "six lines of source expected, got $(cat lines)"
while IFS= read -r line; do
  sed -n "${line%%:*}p" "$SRC/ops/hilbert/modes.cpp" | grep -qF -- "${line#*: }" || fail "modes.cpp does not say '$line'"
done <lines

if command -v python3 >/dev/null; then
  expect 0 'compare.json and trace.json read by python3' python3 - <<'END'
import json
c = json.load(open('c/compare.json'))
assert list(c) == ['config', 'machine', 'plan', 'modes', 'verdict'], list(c)
assert c['verdict'] == 'ok'
assert {'batch', 'length', 'heads', 'kv_heads', 'head_dim', 'order', 'pattern', 'dilation_mode', 'causal', 'dropout', 'dtype', 'device', 'seed', 'repeat', 'modes'} == set(c['config'])
plan = c['plan']
tiles = ['tiles_full', 'tiles_partial', 'tiles_total', 'useful_fraction']
assert list(plan) == ['order', 'pattern'] + tiles + ['per_order'], list(plan)
assert list(plan['per_order']) == ['row', 'snake', 'morton', 'tiles', 'hilbert']
for order in plan['per_order'].values(): assert list(order) == tiles and order['tiles_full'] + order['tiles_partial'] <= order['tiles_total'], order
assert list(c['modes']) == ['dense', 'taped', 'hybrid', 'fused']
for name, m in c['modes'].items():
    assert list(m) == ['nodes', 'saved_bytes', 'peak_bytes', 'forward_ms', 'backward_ms', 'forward_flops', 'bytes_moved', 'tape', 'error', 'bitwise_repeatable'], (name, list(m))
    assert m['nodes'] == len(m['tape']) >= 1 and m['bitwise_repeatable'] is True
    assert sum(n['unique_bytes'] for n in m['tape']) == m['saved_bytes'] > 0
    for n in m['tape']: assert list(n) == ['name', 'shape', 'saved_bytes', 'unique_bytes', 'forward_ms', 'backward_ms'], n
    assert list(m['error']) == ['o', 'dq', 'dk', 'dv']
    for e in m['error'].values():
        assert list(e) == ['max_abs', 'rel_l2', 'worst_index', 'verdict'] and e['verdict'] == 'ok' and len(e['worst_index']) == 4, e
assert c['modes']['hybrid']['nodes'] == c['modes']['fused']['nodes'] == 1
assert c['modes']['taped']['nodes'] > 5
trace = json.load(open('c/trace.json'))
spans = [e for e in trace['traceEvents'] if e['ph'] == 'X']
assert len(spans) == 2 * sum(m['nodes'] for m in c['modes'].values())
assert all(e['dur'] >= 0 and {'name', 'ts', 'pid', 'tid'} <= set(e) for e in spans)
END
fi

# --json prints what is in the file; a chosen mode alone; options from a file, and back again.
compare 0 --json
diff -q out.txt c/compare.json >/dev/null || fail '--json prints something else than compare.json'
compare 0 --modes fused
! grep -q '^taped' out.txt || fail '--modes fused ran taped'
expect 0 '--print-config' "$programs/compare_gradients" --heads 2 --pattern segment:16 --print-config
cp "$scratch/out" saved.ini
expect 0 '--config' "$programs/compare_gradients" --config saved.ini --length 64 --print-config
sed 's/^length = .*/length = 64/' saved.ini | diff - "$scratch/out" >/dev/null || fail "the configuration did not come back: $(cat "$scratch/out")"
expect 0 'compare_gradients --help' "$programs/compare_gradients" --help
for option in batch length heads kv-heads head-dim order pattern dilation-mode causal dropout dtype device seed repeat modes out json config print-config; do
  says out "--$option"
done
says out '(1..1024; default 4)'

# More memory than there is: told beforehand.
expect 0 'a mode too large' "$programs/compare_gradients" --length 131072 --heads 2 --head-dim 1 --pattern slide:1 --modes dense --repeat 2 --out big
says out 'would need'

# A gradient that is off by a thousandth: the program says so and fails. The library in between is the only thing that changes.
cat >wrong.cpp <<'END'
#include <dlfcn.h>
#include <hilt/hilt.h>
namespace [[gnu::visibility("default")]] hilt {
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan, const AttentionOptions& options) {
  using Attention = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const PlanPtr&, const AttentionOptions&);
  static const auto right = reinterpret_cast<Attention>(dlsym(RTLD_NEXT, SYMBOL));
  return mul(right(q, k, mul(v, options.backward == Backward::fused ? 1.001 : 1.0), plan, options), 1.0);
}
}
END
symbol=$(nm -D --defined-only "$BUILD/libhilt.so.0" | awk '{ sub(/@.*/, "", $3); print $3 }' | grep '^_ZN4hilt9attentionERKNS_6TensorES2_S2_')
"$CXX" -std=c++20 -O0 -shared -fPIC -DSYMBOL="\"$symbol\"" -I "$BUILD/include" wrong.cpp -o wrong.so -ldl
expect 1 'a wrong library' env LD_PRELOAD="$scratch/wrong.so" "$programs/compare_gradients" --length 256 --heads 2 --head-dim 16 --repeat 2 --pattern segment:64 --modes taped,fused --out d
grep -q '^verdict: FAILED' "$scratch/out" || fail "a wrong gradient passed: $(cat "$scratch/out")"
grep -E '^fused +[0-9]' "$scratch/out" | grep -q NO || fail 'the wrong mode is not named'
grep -E '^taped +[0-9.e-]+ ok' "$scratch/out" >/dev/null || fail 'a right mode was blamed'
grep -q '"verdict": "fail"' d/compare.json || fail 'compare.json does not say fail'
grep -q 'Something is off' d/compare.html || fail 'compare.html does not say so'

# ---- curves ----
expect 0 curves "$programs/curves" --out g
cp "$scratch/out" out.txt
page g/curves.html
grep -qE '^hilbert +64 +0 +1024 +6.25 % +100 % +0$' out.txt || fail "curves: $(cat out.txt)"
grep -qE '^row +0 +256 +1024 +25.0 % +25.0 % +63$' out.txt || fail "curves: $(cat out.txt)"
for flags in '--grid 7x9 --pattern neighborhood2d:3x3' '--grid 56x56 --pattern neighborhood2d:7x7' '--grid 128x128 --pattern neighborhood2d:17x17' '--grid 1x1 --pattern dense' '--grid 300x20 --pattern segment:100,dilation=3+slide:4' \
    '--grid 64x64 --pattern dense --causal token'; do
  # shellcheck disable=SC2086
  expect 0 "curves $flags" "$programs/curves" $flags --out g
  page g/curves.html
done
