#!/usr/bin/env bash
# The reports in a real browser: no console message, no overflow from 360 to 2,560 px, every figure drawn with the JSON's
# numbers, contrast by day and by night, and switches that do what they say. Skipped where there is no chromium.
. "$SRC/tests/packaging/common.sh"
programs=$BUILD/examples
cd "$scratch"
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
  echo 'skipped: no chromium; apt-get install chromium' >&2
  exit 77
}

browse() {  # flags and URL: the console's messages go to the file console
  timeout 120 "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --allow-file-access-from-files --user-data-dir="$scratch/profile" \
      --enable-logging=stderr --virtual-time-budget=60000 "$@" 2>stderr
  grep CONSOLE stderr >console || true
}
look() {  # FILE
  browse --dump-dom "file://$SRC/tests/examples/page_test.html?file://$scratch/$1" >dom
  [[ ! -s console ]] || fail "$1: the console says $(head -3 console)"
  grep -q 'page ok' dom || fail "$1: $(sed 's/.*<body>//' dom | head -20)"
}

compare=("$programs/compare_gradients" --length 256 --heads 2 --head-dim 16 --repeat 2)
expect 0 'compare_gradients' "${compare[@]}" --pattern segment:64 --out c
look c/compare.html
expect 0 'compare_gradients, three branches' "${compare[@]}" --pattern segment:32+slide:9+segment:128,dilation=4 --kv-heads 1 --dropout 0.2 --causal token --softcap 5 --alibi learned --relative 9 --sink --modes taped,fused --out d
look d/compare.html
expect 0 'compare_gradients, 3-D' "${compare[@]}" --order hilbert:4x8x8 --pattern neighborhood3d:3x3x3 --out e
look e/compare.html
expect 0 'compare_gradients, documents' "${compare[@]}" --length 6700 --head-dim 4 --documents 64x100,10x10,9x9 --pattern neighborhood2d:3x3 --modes fused --out f
look f/compare.html
for grid in 20x33 7x10 15x4 1x5 16x16; do
  expect 0 "curves $grid" "$programs/curves" --grid "$grid" --pattern slide2d:1x1 --out g
  look g/curves.html
done
expect 0 'train' "$programs/train" --layers 1 --width 16 --heads 2 --context 64 --batch 2 --steps 12 --eval-every 4 --sample-every 6 --eval-rows 4 --out t
look t/report.html
expect 0 'train life' "$programs/train" --task life --controls --layers 1 --width 16 --heads 2 --steps 4 --eval-every 2 --eval-rows 4 --out l
look l/report.html

# Screenshots, coarsely: light by day, dark by night, and much on it but not too much.
sed 's/<html lang="en">/<html lang="en" style="color-scheme:dark">/' c/compare.html >dark.html
cp c/compare.html light.html
for scheme in light dark; do browse --window-size=1280,2000 --screenshot="$scratch/$scheme.png" "file://$scratch/$scheme.html" >/dev/null; done
cat >shots.html <<'END'
<!doctype html><body><script>
(async () => {
  const shares = [];
  for (const scheme of ["light", "dark"]) {
    const image = new Image();
    image.src = scheme + ".png";
    await image.decode();
    const c = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height }).getContext("2d");
    c.drawImage(image, 0, 0);
    const { data } = c.getImageData(0, 0, image.width, image.height), bright = [];
    for (let i = 0; i < data.length; i += 4) bright.push((data[i] + data[i + 1] + data[i + 2]) / 765);
    const mean = bright.reduce((a, b) => a + b) / bright.length, other = bright.filter((v) => (scheme === "light" ? v < 0.6 : v > 0.4)).length / bright.length;
    shares.push(scheme === "light" ? mean > 0.85 : mean < 0.25, other > 0.01 && other < 0.3, `${scheme}: brightness ${mean.toFixed(3)}, marked ${other.toFixed(3)}`);
  }
  document.body.textContent = shares.includes(false) ? "WRONG: " + shares.join("; ") : "shots ok";
})();
</script>
END
browse --dump-dom "file://$scratch/shots.html" >dom
grep -q 'shots ok' dom || fail "screenshots: $(sed 's/.*<body>//' dom | head -5) $(head -3 console)"
