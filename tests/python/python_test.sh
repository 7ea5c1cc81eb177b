#!/usr/bin/env bash
# One file of tests of the package, with the module of this build. python_test.sh PYTHON MODULE NAME, where NAME is
# attention, arrays, .., or typing; without a MODULE, or without what the tests import, 77: a skip.
set -euo pipefail
python=$1 module=$2 name=$3
here=$(cd -- "$(dirname -- "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
needs=(numpy)
case $name in
  typing) needs+=(mypy) ;;
  arrays) ;;
  models) needs+=(torch transformers diffusers) ;;
  *) needs+=(torch) ;;
esac
left_out() { echo "no $* for $python; ./run setup --python installs it"; exit 77; }
[[ -n $module ]] || left_out nanobind, or no headers,
for part in "${needs[@]}"; do "$python" -c "import $part" 2>/dev/null || left_out "$part"; done

[[ $name != compile ]] || "$python" -c 'import torch; torch.library.custom_op' 2>/dev/null ||
  { echo "the torch of $python has no torch.library.custom_op, 2.4 has; pip install torch"; exit 77; }

[[ $name != cuda ]] || "$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null ||
  { echo "no GPU that torch can use"; exit 77; }

mkdir "$scratch/hilt"
ln -s "$SRC"/examples/embed/python/hilt/*.* "$module" "$scratch/hilt"
export PYTHONPATH=$scratch:$here PYTHONDONTWRITEBYTECODE=1
if [[ $name == typing ]]; then
  cd "$scratch"
  rm hilt/{_torch,transformers,diffusers}.py # the public types are in one file; those of torch take a minute to read
  cp "$here/typed_client.py" .
  "$python" -m mypy --strict --cache-dir "$BUILD/mypy" typed_client.py hilt/__init__.pyi
  "$python" -m mypy.stubtest hilt --ignore-missing-stub
else
  "$python" "$here/${name}_test.py"
fi
