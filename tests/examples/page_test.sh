#!/usr/bin/env bash
# The reports in a real browser: no console message, no overflow from 360 to 2,560 px, every figure drawn with the
# JSON's numbers, contrast by day and by night, and switches that do what they say. Skipped where there is no chromium.
. "$SRC/tests/packaging/common.sh"
programs=$BUILD/examples
cd "$scratch"
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo 'skipped: no chromium; apt-get install chromium' >&2
  exit 77
}

# The guard: three pages and what writes them took 37 s beside busy processes. --disable-dev-shm-usage: in a container
# /dev/shm may have 64 MB only. The console's messages are those of the page: "INFO:CONSOLE" and so on, in file:line of
# a URL; what Chromium says of itself on stderr (dbus, GPU, sandbox, fonts) has other file names there and is not read.
browse() {  # flags and URL: the console's messages go to the file console
  local got=0
  timeout 120 "$browser" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars \
    --allow-file-access-from-files --user-data-dir="$scratch/profile" --enable-logging=stderr \
    --virtual-time-budget=60000 "$@" 2>stderr || got=$?
  [[ $got == 0 ]] || fail "chromium: exit status $got (124: the guard of 120 s): $* $(tail -3 stderr)"
  grep CONSOLE stderr >console || true
}
# times FILE: sets every time in the page's JSON, so that no figure hangs on what was measured: a pass of a mode takes
# 40 ms to 1,500 s, a part of it or a run of another length 0.3 us to 0.5 ms, so that parts never add up to more than
# their whole.
times() {
  awk 'function set(text, pattern, list,    v, n, i, line) {
    n = split(list, v, " ")
    while (match(text, pattern)) {
      line = line substr(text, 1, RSTART - 1) substr(text, RSTART, RLENGTH)
      sub(/[0-9.e+-]+$/, "", line); line = line v[i++ % n + 1]; count++
      text = substr(text, RSTART + RLENGTH)
    }
    return line text
  }
  {
    gsub(/"forward_ms":/, "\"forward_ms\": "); gsub(/"backward_ms":/, "\"backward_ms\": ")
    line = set($0, "\"(forward_|backward_)?ms\": ?[0-9.e+-]+", "0.344 0.0003 0.5 0.0421 0.11 0.25 0.0077")
    line = set(line, "\"peak_bytes\":[0-9]+,\"forward_ms\": [0-9.e+-]+", "1500 40 77.7 1500000")
    both = "\"peak_bytes\":[0-9]+,\"forward_ms\": [0-9.e+-]+,\"backward_ms\": [0-9.e+-]+"
    print set(line, both, "40 90 3000000 123.4")
  }
  END { exit count == 0 }' "$1" >set.html || fail "$1: no times in its JSON"
  mv set.html "$1"
}
look() {  # FILE
  browse --dump-dom "file://$SRC/tests/examples/page_test.html?file://$scratch/$1" >dom
  [[ ! -s console ]] || fail "$1: the console says $(head -3 console)"
  grep -q 'page ok' dom || fail "$1: $(sed 's/.*<body>//' dom | head -20)"
}

compare=("$programs/compare_gradients" --length 256 --heads 2 --head-dim 16 --repeat 2)
expect 0 'compare_gradients' "${compare[@]}" --pattern segment:64 --out c
times c/compare.html
look c/compare.html
expect 0 'compare_gradients, three branches' "${compare[@]}" --pattern segment:32+slide:9+segment:128,dilation=4 \
  --kv-heads 1 --dropout 0.2 --causal token --softcap 5 --alibi learned --relative 9 --sink --modes taped,fused --out d
times d/compare.html
look d/compare.html
expect 0 'compare_gradients, 3-D' "${compare[@]}" --order hilbert:4x8x8 --pattern neighborhood3d:3x3x3 --out e
times e/compare.html
look e/compare.html
expect 0 'compare_gradients, documents' "${compare[@]}" --length 6700 --head-dim 4 --documents 64x100,10x10,9x9 \
  --pattern neighborhood2d:3x3 --modes fused --out f
times f/compare.html
look f/compare.html
for grid in 20x33 7x10 15x4 1x5 16x16; do
  expect 0 "curves $grid" "$programs/curves" --grid "$grid" --pattern slide2d:1x1 --out g
  look g/curves.html
done
expect 0 'train' "$programs/train" --layers 1 --width 16 --heads 2 --context 64 --batch 2 --steps 12 --eval-every 4 \
  --sample-every 6 --eval-rows 4 --out t
look t/report.html
expect 0 'train life' "$programs/train" --task life --layers 1 --width 16 --heads 2 --steps 4 --eval-every 2 \
  --eval-rows 4 --out l
look l/report.html

# What the page computes of numbers that a reader moves is what the library computes: three draws, f64.
if command -v python3 >/dev/null; then
  cat >draw.py <<'END'
import json, math, random, struct, subprocess, sys
random.seed(7)
def write(name, x):
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 4, 1, 2), }".ljust(117) + "\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    open(name, "wb").write(start + struct.pack("<8d", *x))
def read(name, columns):
    values = struct.unpack(f"<{4 * columns}d", open(name, "rb").read()[-32 * columns:])
    return [values[i * columns:][:columns] for i in range(4)]
draws = []
for _ in range(3):
    x = {name: [random.uniform(-3, 3) for _ in range(8)] for name in ("Q", "K", "V", "dO")}
    for name, file in zip(x, ("q", "k", "v", "d_o")): write(file + ".npy", x[name])
    flags = "--q q.npy --k k.npy --v v.npy --d-o d_o.npy --causal token --order row --mode fused --out a --scale"
    subprocess.run([sys.argv[1], *flags.split(), repr(math.log(2))], check=True, stdout=subprocess.DEVNULL)
    rows = {name: [v[i:i + 2] for i in range(0, 8, 2)] for name, v in x.items()}
    draws.append({"inputs": rows, "O": read("a/o.npy", 2), "L": read("a/lse.npy", 1)}
                 | {name: read(f"a/{name.lower()}.npy", 2) for name in ("dQ", "dK", "dV")})
print("const draws = " + json.dumps(draws))
END
  python3 draw.py "$programs/attend" >draws.js || fail 'attend of four tokens'
  cat >model.html <<END
<!doctype html><body><script>$(cat "$SRC/examples/compare/four_tokens.js" draws.js)
let off = 0;
for (const { inputs, ...library } of draws) {
  const page = attention(inputs, Math.log(2));
  const differ = (x, ours) => (off = Math.max(off, Number.isFinite(ours) ? Math.abs(x - ours) : 9));
  for (const [name, rows] of Object.entries(library))
    rows.forEach((row, i) => row.forEach((x, j) => differ(x, page[name][i][j])));
}
document.body.textContent = draws.length === 3 && off < 1e-12 ? "model ok" : "WRONG: " + off;
</script>
END
  browse --dump-dom "file://$scratch/model.html" >dom
  grep -q 'model ok' dom ||
    fail "four_tokens.js and the library differ: $(sed 's/.*<body>//' dom | tail -2) $(head -3 console)"
fi

# Screenshots, coarsely: light by day, dark by night, and much on it but not too much.
sed 's/<html lang="en">/<html lang="en" style="color-scheme:dark">/' c/compare.html >dark.html
cp c/compare.html light.html
for scheme in light dark; do
  browse --window-size=1280,2000 --screenshot="$scratch/$scheme.png" "file://$scratch/$scheme.html" >/dev/null
done
cat >shots.html <<'END'
<!doctype html><body><script>
(async () => {
  const shares = [];
  for (const scheme of ["light", "dark"]) {
    const image = new Image();
    image.src = scheme + ".png";
    await image.decode();
    const { width, height } = image;
    const c = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
    c.drawImage(image, 0, 0);
    const { data } = c.getImageData(0, 0, width, height), bright = [];
    for (let i = 0; i < data.length; i += 4) bright.push((data[i] + data[i + 1] + data[i + 2]) / 765);
    const mean = bright.reduce((a, b) => a + b) / bright.length;
    const marked = bright.filter((v) => (scheme === "light" ? v < 0.6 : v > 0.4)).length / bright.length;
    shares.push(scheme === "light" ? mean > 0.85 : mean < 0.25, marked > 0.01 && marked < 0.3,
                `${scheme}: brightness ${mean.toFixed(3)}, marked ${marked.toFixed(3)}`);
  }
  document.body.textContent = shares.includes(false) ? "WRONG: " + shares.join("; ") : "shots ok";
})();
</script>
END
browse --dump-dom "file://$scratch/shots.html" >dom
grep -q 'shots ok' dom || fail "screenshots: $(sed 's/.*<body>//' dom | head -5) $(head -3 console)"
