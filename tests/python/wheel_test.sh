#!/usr/bin/env bash
# `pip install ./examples/embed/python` from a clean clone: isolated, and then, with what is installed already, into the
# build directory that was kept. The wheel works where no tree is, with the newest torch that pip finds: the tests run
# there again, and those that an old torch leaves out.
set -euo pipefail
[[ ${HILT_DEEP-} ]] || { echo "HILT_DEEP=1 builds the wheel by pip, and installs torch"; exit 77; }
/usr/bin/python3 -c 'import ensurepip' 2>/dev/null ||
  { echo "no ensurepip for /usr/bin/python3; ./run setup --python installs it"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH
export HILT_PYTHON_BUILD=$BUILD/wheel SRC
if [[ -e $SRC/.git ]]; then git clone -q "$SRC" "$scratch/clone"
else mkdir "$scratch/clone" && tar -C "$SRC" --exclude='./build*' -c . | tar -C "$scratch/clone" -x; fi  # a tarball
/usr/bin/python3 -m venv "$scratch/env"
pip=("$scratch/env/bin/pip" -q)
rm -rf "$BUILD/wheel"
"${pip[@]}" install "$scratch/clone/examples/embed/python"
"${pip[@]}" install numpy torch jax transformers diffusers meson ninja nanobind
mkdir "$scratch/away"
cp "$SRC"/tests/python/*.py "$scratch/away"
mv "$scratch/clone" "$scratch/gone"
cd "$scratch/away"
for name in arrays attention compile models training; do "$scratch/env/bin/python" "${name}_test.py"; done
"$scratch/env/bin/python" speed.py
mv "$scratch/gone" "$scratch/clone"
"${pip[@]}" uninstall -y hilt
"${pip[@]}" install --no-build-isolation --no-deps "$scratch/clone/examples/embed/python"
"$scratch/env/bin/python" arrays_test.py
rm -rf "$BUILD/wheel"
