#!/usr/bin/env bash
# compare_gradients and curves: what they print, what they write, and that a wrong gradient fails.
. "$SRC/tests/packaging/common.sh"
programs=$BUILD/examples
cd "$scratch"

# page FILE: one HTML file that stands alone and is small. Where node is there, shown.html is what its readers see.
page() {
  [[ $(stat -c %s "$1") -lt 500000 ]] || fail "$1 has $(stat -c %s "$1") bytes"
  local outside='(src|href)="[^#"]|https?://|url\(|@import|<script src|<link|<iframe'
  sed 's|"http://www.w3.org/2000/svg"||' "$1" >without_namespace  # which names SVG and is never fetched
  ! grep -qE "$outside" without_namespace ||
    fail "$1 refers outside: $(grep -oE "($outside).{0,60}" without_namespace | head -3)"
  ! grep -q '^@include' "$1" || fail "$1: $(grep '^@include' "$1" | head -3)"
  command -v node >/dev/null || return 0
  node "$SRC/tests/examples/shown.js" "$1" >shown.html 2>stderr || fail "$1: $(grep Error stderr)"
  ! grep -qF '{{' shown.html ||
    fail "$1 has a tag that was not filled: $(grep -oE '.{0,20}\{\{.{0,40}' shown.html | head -3)"
  ! grep -qE '>(-?(nan|inf)|NaN|-?Infinity|undefined)|"(-?nan|-?inf)' shown.html ||
    fail "$1 shows a number that is none"
}
# summary: at most 45 lines of 80 columns, no color on a pipe.
summary() {
  [[ $(wc -l <out.txt) -le 45 ]] || fail "$1: $(wc -l <out.txt) lines"
  [[ $(wc -L <out.txt) -le 80 ]] || fail "$1: $(wc -L <out.txt) columns: $(awk 'length > 80' out.txt)"
  ! grep -q $'\033' out.txt || fail "$1: color on a pipe"
}

small=(--length 256 --heads 2 --head-dim 16 --repeat 2)
compare() {  # STATUS, flags: small and quick
  local status=$1
  shift
  expect "$status" "compare_gradients $*" "$programs/compare_gradients" "${small[@]}" --out c "$@"
  cp "$scratch/out" out.txt
}

# reads WHAT, arguments: a script of python3 comes on standard input, which expect does not pass on.
reads() {
  local what=$1
  shift
  cat >script.py
  expect 0 "$what" python3 script.py "$@"
}

# sentences: what the page says of taped and fused is what their numbers say, and they multiply about the same: a dense
# block is multiplied whole, also where it is causal; of few keys a query fused takes the pairs alone.
sentences() {
  command -v python3 >/dev/null && command -v node >/dev/null || return 0
  reads "the sentences of $1" "$1" <<'END'
import json, math, re, sys
modes, page = json.load(open('c/compare.json'))['modes'], open('shown.html').read()
taped, fused = modes['taped'], modes['fused']
if taped['forward_flops'] == 0: sys.exit()  # nobody attends to anything
products, kept = fused['forward_flops'] / taped['forward_flops'], taped['saved_bytes'] / fused['saved_bytes']
said = re.search(r'the same pairs as taped, with ([0-9.]+).% of its products.*?'
                 r'<b>(?:as much, within (5) %|([0-9.]+) times (less|more))</b>', page)
assert said, 'the page says nothing of taped and fused'
assert abs(float(said[1]) / 100 - products) <= 0.005 * products + 0.0005, (said[1], products)
if said[2]: assert 1 / 1.051 <= kept <= 1.051, kept
else: assert abs(float(said[3]) - (kept if said[4] == 'less' else 1 / kept)) <= 0.051, (said[3], said[4], kept)
flags = sys.argv[1]
least = 0.5 if 'causal' in flags else 0.2 if re.search('slide|window|neighborhood', flags) else 0.7
assert least <= products <= 1.1, products
assert taped['nodes'] <= 20 or re.search(r'\+|--(softcap|alibi|relative|bias|sink|documents)', flags), taped['nodes']
# A matrix of weights is as large as the tape's, which are f32 at least; nothing is kept that is not alive at the peak.
def size(text):
    return float(re.match('[0-9.]+', text)[0]) * {'B': 1, 'kB': 1e3, 'MB': 1e6}[re.search('[kM]?B', text)[0]]
matrix = sum((8 if n['dtype'] == 'f64' else 4) * math.prod(n['shape']) for n in taped['tape'] if n['symbol'] == 'P')
assert abs(size(re.search('one matrix over all pairs takes (.*?) here', page)[1]) - matrix) <= 0.005 * matrix, matrix
for step, said in re.findall(r'data-panel="([SLPO])".*?<p class="rule">(.*?)\.(?: Its op .*)?</p>', page):
    symbols = (step, 'M P') if step == 'O' else (step,)
    keeps = sum(n['unique_bytes'] for n in taped['tape'] if n['symbol'] in symbols)
    told = size(re.search(r'\(([0-9.]+\u00a0[kM]?B)\)', said)[1]) if ')' in said.replace('exp(S − L)', '') else 0
    assert abs(told - keeps) <= 0.005 * keeps, (step, said, keeps)
for row in re.findall(r'</span>(?:dense|taped|hybrid|fused)</th><td class="n">.*?</td><td class="n">(.*?)</td>'
                      r'<td class="n">(.*?)</td>', page.split('id="memory"')[0]):
    assert size(row[0]) <= size(row[1]), row
assert taped['tape'] and not fused['inside_backward'], 'the time of the fused kernel is counted to an op'
merges = any(n['symbol'] == 'L' for n in taped['tape'])
assert ('logsumexp of each part' in page) == merges and ('not needed: P itself is kept' in page) != merges
END
}

for flags in '--pattern segment:64' '--pattern neighborhood2d:5x5' '--pattern window2d:4x4' \
  '--pattern slide2d:1x2 --length 1024' '--pattern dense --causal token --kv-heads 1' '--pattern slide:9 --dtype f64' \
  '--pattern segment:32+segment:128,dilation=4 --dilation-mode longnet --dropout 0.2' \
  '--pattern segment:64 --dtype bf16 --modes dense,taped,fused' '--pattern segment:8,dilation=16,offset=9'; do
  # shellcheck disable=SC2086
  compare 0 $flags
  summary "$flags"
  page c/compare.html
  [[ $(ls -A c) == $'compare.html\ncompare.json' ]] || fail "$flags: wrote $(ls -A c)"
  sentences "$flags"
  grep -q '^verdict: ok' out.txt || fail "$flags: $(tail -1 out.txt)"
  grep -qE 'Hilbert order (helps|does nothing|loses)|These counts do not compare orders' out.txt ||
    fail "$flags: says nothing about the order"
  for order in row snake morton tiles hilbert; do grep -q "^$order " out.txt || fail "$flags: no line for $order"; done
done

# Score terms and documents: every mode is right; the gradient of every tensor among them is judged and shown.
terms() {  # WHICH of slopes, relative, bias and sink, flags
  local which=$1 row there given
  shift
  given=$(grep -oE -- '--(softcap|alibi|relative|bias|sink|documents)' <<<"$*" | wc -l)
  compare 0 --pattern segment:64 "$@"
  summary "$*"
  page c/compare.html
  grep -q '^verdict: ok' out.txt || fail "$*: $(tail -1 out.txt)"
  [[ ! -f shown.html || $(grep -c '<p class="term">' shown.html) == "$given" ]] ||
    fail "$*: the page does not say what each term does"
  sentences "$*"
  for row in slopes relative bias sink; do
    there=0
    [[ " $which " != *" $row "* ]] || there=1
    [[ ! -f shown.html || $(grep -c "<th scope=\"row\">d_$row</th>" shown.html) == "$there" ]] ||
      fail "$*: the page does not have d_$row $there times"
    [[ $(grep -c "\"d_$row\": {" c/compare.json) == $((there * 5)) ]] ||
      fail "$*: compare.json lacks d_$row of a mode or of the yardstick, or has too many"
  done
}
terms 'slopes relative bias sink' --softcap 5 --alibi learned --relative 17x17 --order hilbert:16x16 --bias 1x2x1xL \
  --sink
terms 'bias' --alibi --bias 1x1xLxL --dtype bf16 --kv-heads 1 --dropout 0.2
terms 'relative sink' --relative 9 --sink --softcap 3 --dtype f64 --causal token --batch 2
terms 'slopes relative' --documents 8x8,5x16,10x11 --pattern neighborhood2d:3x3 --alibi learned --relative 7x7
terms 'sink' --documents 100,64 --sink --dtype f16

compare 0 --pattern segment:64
for anchor in what hand player steps why bill memory time agreement break scaling order roofline questions method; do
  grep -q "id=\"$anchor\"" c/compare.html || fail "the page has no section '$anchor'"
done
# The eight backward steps have lines of hybrid that are in the source, under their numbers; all thirteen have lines of
# the fused kernel, three around each.
page c/compare.html
if [[ -f shown.html ]]; then
  grep -oE '<code>[^<]*</code><span class="place">[a-z_/]+\.cpp:[0-9]+' shown.html |
    sed 's/<code>\(.*\)<\/code>.*>\(.*\)/\2:\1/; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g' >lines
  [[ $(wc -l <lines) == 8 ]] || fail "8 lines of source expected, got $(cat lines)"
  while IFS=: read -r file number code; do
    sed -n "${number}p" "$SRC/ops/hilbert/$file" | grep -qF -- "$code" || fail "$file:$number does not say '$code'"
  done <lines
  fused='<span class="place">kernels/(attention_cpu\.cpp|backward_cpu\.h):[0-9]+'
  [[ $(grep -oE "$fused" shown.html | wc -l) == 13 ]] || fail 'a step without its line of the fused kernel'
  [[ $(grep -c '<span class="here">' shown.html) == 13 ]] ||
    fail 'a step without its line among those of the fused kernel'
  sed -n '/<b>Fused<\/b>/,/<\/section>/p' shown.html |
    sed -n 's/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g; s/&quot;/"/g; s/.*<span class="here">//p' >lines
  while read -r code; do
    grep -qF -- "$code" "$SRC"/ops/hilbert/kernels/{attention_cpu.cpp,backward_cpu.h} || fail "no source says '$code'"
  done <lines
  one_node='<th scope="row"><span class="dot" style="--color:var(--fused)"></span>fused</th><td class="n">1</td>'
  for text in 'All gradients agree' "$one_node" 'Why Δ = dO · O'; do
    grep -qF "$text" shown.html || fail "the page does not say '$text'"
  done
fi
# Exercises: a file has one step and no other's answer; as it is written it fails, with the answer in its place it
# passes.
for n in 6 1 2 3 4 5; do
  command -v python3 >/dev/null || break
  expect 0 "--exercise $n" "$programs/compare_gradients" --exercise "$n" --out x
  expect 1 "--check of exercise $n as it is" "$programs/compare_gradients" --check "x/exercise_$n.py"
  says out 'should be '
  says out 'not yet'
  [[ $(grep -cE '^def (Delta|dS|dQ|dK|dV|meet)' "x/exercise_$n.py") == 1 ]] || fail "exercise $n has other steps in it"
  expect 0 "--answer $n" "$programs/compare_gradients" --answer "$n"
  line=$(cat "$scratch/out")
  ! grep -qF "$line" "x/exercise_$n.py" || fail "exercise $n has its answer in it"
  { grep -v 'left out' "x/exercise_$n.py" && echo "    $line"; } >x/done.py
  expect 0 "--check of exercise $n, done" "$programs/compare_gradients" --check x/done.py
  says out 'all checks passed'
done
# A known mistake is named; what fits these four tokens alone is none.
mistaken() {  # NUMBER, its last line, what --check says
  { grep -v 'left out' "x/exercise_$1.py" && echo "    $2"; } >x/mistaken.py
  expect 1 "--check of $2" "$programs/compare_gradients" --check x/mistaken.py
  says out "$3"
}
if command -v python3 >/dev/null; then
  mistaken 2 'return [[p * dp for p, dp in zip(*rows)] for rows in zip(P, dP)]' 'it looks as if Delta is not subtracted'
  mistaken 2 'return [[dp - d for dp in row] for row, d in zip(dP, Delta)]' 'it looks as if P is not multiplied'
  mistaken 3 'return product(dS, K)' 'it looks as if c is left out'
  mistaken 4 'return times(c * c, product(transposed(dS), Q))' 'it looks as if c is there twice'
  mistaken 4 'return times(c, product(dS, Q))' 'it looks as if dS is not transposed'
  mistaken 5 'return product(P, dO)' 'it looks as if P is not transposed'
  mistaken 5 'return [[1.75, 1.5], [0.125, 1.75], [0, 1.5], [0.125, 0.25]]' ' with other numbers'
  mistaken 6 'return top, l + sum(w), [x + y for x, y in zip(a, product([w], V)[0])]' \
    'it looks as if l and a are not rescaled'
fi
for n in 0 7; do
  for option in exercise answer; do
    expect 2 "--$option $n" "$programs/compare_gradients" "--$option" $n --out x
    says err "--$option ($n): must be 1..6"
  done
done
# What a learner wrote is not written over, and a file cannot pass by leaving early, by numbers too many, or by a change
# of what it was given.
if command -v python3 >/dev/null; then
  expect 2 '--exercise 5 again' "$programs/compare_gradients" --exercise 5 --out x
  says err 'x/exercise_5.py is there; remove it, or name another --out'
  printf 'import sys\nsys.exit(0)\n' >x/early.py
  expect 3 'a file that leaves' "$programs/compare_gradients" --check x/early.py
  says err 'line 2: SystemExit: 0'
  sed 's/return product(.*/& + [[1, 2]]/' x/done.py >x/more.py
  expect 1 'a row too many' "$programs/compare_gradients" --check x/more.py
  says out 'dV is no matrix of 4 x 2 numbers'
  sed 's/^    return \(product(.*\)/    x = \1\n    for row in P: row[0] = 9\n    return x/' x/done.py >x/own.py
  expect 0 'a file that changes what it was given, last' "$programs/compare_gradients" --check x/own.py
fi
# The four tokens are those of the page; what is no such file is one line.
if command -v python3 >/dev/null; then
  expect 0 'the four tokens' python3 -c "
import json
text = open('$SRC/examples/compare/check.py').read().split('def ')[0]
names = {}
exec(text, names)
hand = json.load(open('c/compare.json'))['by_hand']['matrices']
for name in ('Q', 'K', 'V', 'dO'): assert names[name] == hand[name], name"
  expect 3 '--check of nothing' "$programs/compare_gradients" --check nothing.py
  says err 'compare_gradients: error: --check (nothing.py): No such file or directory; name one that --exercise wrote'
  expect 3 '--check of what is no file' "$programs/compare_gradients" --check /dev/full
  says err 'compare_gradients: error: --check (/dev/full): not a regular file'
  # The verdict is not the file's to give, nor what stands on the terminal.
  judged() {  # STATUS, what is said, what stands in front of a file that is right, where it is said
    { echo "$3"; cat x/done.py; } >x/own.py
    expect "$1" "--check of $3" "$programs/compare_gradients" --check x/own.py
    says "${4-err}" "$2"
  }
  judged 3 'error: --check (x/own.py): line 1: BaseException: ' 'raise BaseException'
  judged 3 'error: --check (x/own.py): line 1: GeneratorExit: \x1b[31mred' 'raise GeneratorExit("\x1b[31mred")'
  judged 3 'error: --check (x/own.py): it ended before' 'import os; os._exit(0)'
  judged 3 '.. of ' 'raise type("N" * 70000, (Exception,), {})("m" * 70000)'
  (($(wc -c <"$scratch/err") < 500)) || fail "a name of 70,000 characters: $(wc -c <"$scratch/err") bytes"
  judged 3 'error: --check (x/own.py): line ' 'import __main__; __main__.fail = print; raise OSError'
  judged 0 '| \x1b]0;title\x07' 'print("\x1b]0;title\x07")' out
  judged 0 '| ..' 'print("x\n" * 100000)' out
  (($(wc -c <"$scratch/out") < 50000)) || fail "what a file prints: $(wc -c <"$scratch/out") bytes"
  expect 3 'a name with an escape' "$programs/compare_gradients" --check $'\033[31mno'
  says err 'error: --check (\x1b[31mno): No such file'
  ! grep -q $'\033' "$scratch/out" "$scratch/err" || fail 'an escape came through'
  sed 's/return product(.*/return None/' x/done.py >x/none.py
  expect 1 'a matrix that is none' "$programs/compare_gradients" --check x/none.py
  says out 'dV is no matrix of 4 x 2 numbers'
fi
# A page with much on it: six parts, terms, all modes.
expect 0 'a large page' "$programs/compare_gradients" --length 4096 --heads 1 --head-dim 4 --repeat 2 --softcap 5 \
  --alibi learned --relative 9 --sink --out large \
  --pattern segment:64+segment:256,dilation=4+slide2d:2x2+segment:32+slide:5+segment:512,dilation=16
page large/compare.html
# And others with more of something than fits: branches, documents, scattered keys, tokens; each is bounded.
branches=$(printf 'segment:%d+' $(seq 4 63))
documents='--length 958 --documents 37,101,53,211,97,149,67,83,131,29'
for flags in "--length 512 --pattern ${branches%+}" "$documents --pattern segment:64+slide:9+segment:128,dilation=4" \
  '--length 4096 --pattern slide2d:63x63,dilation=4 --modes fused' \
  '--length 16384 --pattern slide:1 --order morton --modes taped,fused' \
  '--length 4096 --order hilbert:2x2x1024 --pattern neighborhood3d:1x1x3' \
  '--length 20000 --pattern segment:8 --modes fused'; do
  # shellcheck disable=SC2086
  expect 0 "compare_gradients $flags" "$programs/compare_gradients" --heads 1 --head-dim 4 --repeat 2 $flags --out large
  page large/compare.html
  [[ $(stat -c %s large/compare.html) -lt 350000 ]] ||
    fail "$flags: $(stat -c %s large/compare.html) bytes: what bounds a page does not"
done
# Pages are data and templates: no source of a program has markup in a string, and what draws them stays small.
markup='"[^"]*</?(svg|table|tr|td|th|div|p|h[1-6]|path|span|figure)[ >]'
! grep -rnE "$markup" "$SRC/examples" --include=*.cpp --include=*.h ||
  fail 'a program prints markup'
lines=$(cat "$SRC"/examples/{compare/{page.html,lesson.js,four_tokens.js,hand.js},curves.{html,js},train/page.html} \
  "$SRC"/examples/program/report/{page.css,figures.js} | wc -l)
[[ $lines -le 1800 ]] || fail "the templates have $lines lines"
if command -v python3 >/dev/null; then
  reads 'compare.json read by python3' <<'END'
import json
c = json.load(open('c/compare.json'))
assert list(c)[:5] == ['config', 'machine', 'plan', 'modes', 'verdict'], list(c)
assert c['verdict'] == 'ok'
assert {'batch', 'length', 'heads', 'kv_heads', 'head_dim', 'order', 'pattern', 'dilation_mode', 'causal', 'documents',
        'softcap', 'alibi', 'relative', 'bias', 'sink', 'dropout', 'dtype', 'device', 'seed', 'repeat',
        'modes'} == set(c['config']), list(c['config'])
plan = c['plan']
tiles = ['tiles_full', 'tiles_partial', 'tiles_total', 'useful_fraction']
assert list(plan) == ['order', 'pattern'] + tiles + ['per_order'], list(plan)
assert list(plan['per_order']) == ['row', 'snake', 'morton', 'tiles', 'hilbert']
for order in plan['per_order'].values():
    assert list(order) == tiles, order
    assert order['tiles_full'] + order['tiles_partial'] <= order['tiles_total'], order
assert list(c['modes']) == ['dense', 'taped', 'hybrid', 'fused']
for name, m in c['modes'].items():
    assert list(m)[:10] == ['nodes', 'saved_bytes', 'peak_bytes', 'forward_ms', 'backward_ms', 'forward_flops',
                            'bytes_moved', 'tape', 'error', 'bitwise_repeatable'], (name, list(m))
    assert m['nodes'] == len(m['tape']) >= 1 and m['bitwise_repeatable'] is True
    assert sum(n['unique_bytes'] for n in m['tape']) == m['saved_bytes'] > 0
    for n in m['tape']:
        assert list(n)[:6] == ['name', 'shape', 'saved_bytes', 'unique_bytes', 'forward_ms', 'backward_ms'], n
    assert list(m['error']) == ['o', 'dq', 'dk', 'dv']
    for e in m['error'].values():
        assert list(e)[:4] == ['max_abs', 'rel_l2', 'worst_index', 'verdict'], e
        assert e['verdict'] == 'ok' and len(e['worst_index']) == 4, e
assert c['modes']['hybrid']['nodes'] == c['modes']['fused']['nodes'] == 1
assert c['modes']['taped']['nodes'] > 5
tape = c['modes']['taped']['tape']
assert [n['symbol'] for n in tape if n['name'] in ('matmul', 'softmax')] == ['S', 'P', 'O'], tape
assert sum(n['name'] == 'matmul' for n in c['modes']['hybrid']['inside_backward']) == 5
assert max(c['checks'][k] for k in ('weights_sum', 'delta', 'slopes_sum')) < 1e-5 and c['checks']['rows'] == 256
hand = c['by_hand']['matrices']
assert hand['O'] == [[4, 0], [2, 2], [1.5, 2.5], [3, .5]], hand
assert hand['dS'] == [[0, 0, 0, 0], [1, -1, 0, 0], [-2.5, 3, -.5, 0], [0, .5, 1, -1.5]], hand
plain, taped, fused = c['config'], c['modes']['taped'], c['modes']['fused']
row, qkv = 4 * 256 * 2, 3 * 4 * 256 * 2 * 16  # what is kept, part by part
assert fused['saved_bytes'] == qkv + qkv // 3 + row, fused['saved_bytes']
assert taped['saved_bytes'] == qkv + 64 * row, taped['saved_bytes']
assert c['by_hand']['apart'] < 1e-12
assert 0 < c['machine']['steady'] <= 1 and 0 < c['machine']['processor_share'] < 1.1, c['machine']
wrong = {name: [t for t, e in b['error'].items() if e['verdict'] != 'ok'] for name, b in c['broken'].items()}
assert wrong['none'] == [] and wrong['no_delta'] == wrong['scaled_twice'] == ['dq', 'dk'], wrong
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
sed 's/^length = .*/length = 64/' saved.ini | diff - "$scratch/out" >/dev/null ||
  fail "the configuration did not come back: $(cat "$scratch/out")"
# Windows are the default where tokens have a plane, in whatever order it is walked.
for flags in '--length 1024' '--order row --length 1024' '--length 1009' '--length 128 --order row:8x16' \
  '--length 128 --documents 100,28'; do
  pattern=$([[ $flags == *1024 ]] && echo window2d:16x16 || echo segment:256)
  # shellcheck disable=SC2086
  expect 0 "the default pattern of $flags" "$programs/compare_gradients" $flags --print-config
  says out "pattern = $pattern"
done
expect 0 'compare_gradients --help' "$programs/compare_gradients" --help
for option in exercise check answer batch length heads kv-heads head-dim order pattern dilation-mode causal documents \
  softcap alibi relative bias sink dropout dtype device seed repeat modes out json config print-config; do
  says out "--$option"
done
says out '(1..1024; default 4)'

# More memory than there is: told beforehand.
expect 0 'a mode too large' "$programs/compare_gradients" --length 131072 --heads 2 --head-dim 1 --pattern slide:1 \
  --modes dense --repeat 2 --out big
says out 'would need'

# A gradient that is off by a thousandth: the program says so and fails. The library in between is the only thing that
# changes.
cat >wrong.cpp <<'END'
#include <dlfcn.h>
#include <hilt/hilt.h>
namespace [[gnu::visibility("default")]] hilt {
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options) {
  using Attention = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const PlanPtr&, const AttentionOptions&);
  static const auto right = reinterpret_cast<Attention>(dlsym(RTLD_NEXT, SYMBOL));
  return mul(right(q, k, mul(v, options.backward == Backward::fused ? 1.001 : 1.0), plan, options), 1.0);
}
}
END
symbol=$(nm -D --defined-only "$BUILD/libhilt.so" | awk '{ sub(/@.*/, "", $3); print $3 }' |
  grep '^_ZN4hilt9attentionERKNS_6TensorES2_S2_')
"$CXX" -std=c++20 -O0 -shared -fPIC -DSYMBOL="\"$symbol\"" -I "$BUILD/include" wrong.cpp -o wrong.so -ldl
expect 1 'a wrong library' env LD_PRELOAD="$scratch/wrong.so" "$programs/compare_gradients" "${small[@]}" \
  --pattern segment:64 --modes taped,fused --out d
grep -q '^verdict: FAILED' "$scratch/out" || fail "a wrong gradient passed: $(cat "$scratch/out")"
grep -E '^fused +[0-9]' "$scratch/out" | grep -q NO || fail 'the wrong mode is not named'
grep -E '^taped +[0-9.e-]+ ok' "$scratch/out" >/dev/null || fail 'a right mode was blamed'
grep -q '"verdict": "fail"' d/compare.json || fail 'compare.json does not say fail'
page d/compare.html
[[ ! -f shown.html ]] || grep -q 'Something is off' shown.html || fail 'compare.html does not say so'

# The gradient of one term's tensor off by a hundredth: that tensor is named, and no other.
cat >wrong.cpp <<'END'
#include <dlfcn.h>
#include <hilt/hilt.h>
#include <cstdlib>
namespace [[gnu::visibility("default")]] hilt {
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const PlanPtr& plan,
                 const AttentionOptions& options) {
  using Attention = Tensor (*)(const Tensor&, const Tensor&, const Tensor&, const PlanPtr&, const AttentionOptions&);
  static const auto right = reinterpret_cast<Attention>(dlsym(RTLD_NEXT, SYMBOL));
  AttentionOptions other = options;
  visit_terms(other.terms, [wrong = std::string(std::getenv("WRONG"))](const std::string& name, Tensor& x) {
    if (name == wrong) x = add(mul(x, 1.01), mul(detach(x), -0.01));
    if (name == "relative" && wrong == "moved") x = cat({slice(x, 1, 1, 7), slice(x, 1, 0, 1)}, 1);
  });
  return right(q, k, v, plan, other);
}
}
END
"$CXX" -std=c++20 -O0 -shared -fPIC -DSYMBOL="\"$symbol\"" -I "$BUILD/include" wrong.cpp -o wrong.so -ldl
for tensor in slopes relative bias sink; do
  expect 1 "a wrong gradient of $tensor" env WRONG=$tensor LD_PRELOAD="$scratch/wrong.so" \
    "$programs/compare_gradients" "${small[@]}" --pattern segment:64 --alibi learned --relative 31 --bias 1x2x1xL \
    --sink --modes fused --out d
  command -v python3 >/dev/null || continue
  expect 0 "what is wrong with $tensor" python3 -c "
import json
wrong = [t for t, e in json.load(open('d/compare.json'))['modes']['fused']['error'].items() if e['verdict'] != 'ok']
assert wrong == ['d_$tensor'], wrong"
done
# Terms that are wide, in 16 bits: what dense attention loses by storing them is allowed, and a table that is read one
# entry off is not.
narrow=(--order row:2x3x4 --pattern neighborhood3d:1x3x3 --length 24 --relative 7 --sink --heads 2 --kv-heads 1
  --head-dim 12 --batch 2 --repeat 2 --dtype bf16 --seed 180 --out d)
expect 0 'terms in 16 bits' "$programs/compare_gradients" "${narrow[@]}"
expect 1 'a table read one entry off' env WRONG=moved LD_PRELOAD="$scratch/wrong.so" \
  "$programs/compare_gradients" "${narrow[@]}"
grep -E '^fused +[0-9.e+-]+ NO' "$scratch/out" >/dev/null || fail 'a table read one entry off passed'

# ---- curves ----
expect 0 curves "$programs/curves" --out g
cp "$scratch/out" out.txt
page g/curves.html
grep -qE '^hilbert +64 +0 +1024 +6.25 % +100 % +0$' out.txt || fail "curves: $(cat out.txt)"
grep -qE '^row +0 +256 +1024 +25.0 % +25.0 % +63$' out.txt || fail "curves: $(cat out.txt)"
for flags in '--grid 7x9 --pattern neighborhood2d:3x3' '--grid 56x56 --pattern neighborhood2d:7x7' \
  '--grid 128x128 --pattern neighborhood2d:17x17' '--grid 1x1 --pattern dense' \
  '--grid 300x20 --pattern segment:100,dilation=3+slide:4' \
  '--grid 64x64 --pattern dense --causal token'; do
  # shellcheck disable=SC2086
  expect 0 "curves $flags" "$programs/curves" $flags --out g
  page g/curves.html
done
