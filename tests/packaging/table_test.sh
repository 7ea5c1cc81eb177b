#!/usr/bin/env bash
# What an attention is told stands in one table, ops/hilbert/make_attention.cpp, which names backward modes by theirs:
# no other code spells a mode's name. First the tree, then the judge: a literal in a copy must be named.
. "$(dirname "$0")/common.sh"

table=$(grep -rlE 'Backward::[a-z]+, "[a-z]+", "' "$SRC/ops" --include='*.cpp')
[[ $(wc -l <<<"$table") == 1 ]] || fail "the table of backward modes stands in several files: $table"
names=$(grep -oE 'Backward::[a-z]+, "[a-z]+", "' "$table" | cut -d'"' -f2 | xargs | tr ' ' '|')
[[ $names == *'|'* ]] || fail "no names of modes in $table"

# Prints `file:line:text` of each literal.
literals() (
  cd "$1"
  grep -rnE "[\"'](${names})[\"']" core ops nn examples --include='*.h' --include='*.cpp' --include='*.cu' \
    --include='*.cuh' \
    --include='*.py' --include='*.pyi' --include='*.js' | grep -vF "${table#"$SRC"/}:" || true
)
found=$(literals "$SRC")
[[ -z $found ]] || fail $'a mode is spelt outside the table of modes; use name_of():\n'"$found"

mkdir "$scratch/copy"
(cd "$SRC" && cp -r core ops nn examples "$scratch/copy")
for file in examples/train/settings.cpp examples/embed/python/hilt/__init__.py; do
  echo "const char* mode = \"${names%%|*}\";" >>"$scratch/copy/$file"
  grep -qF "$file" <<<"$(literals "$scratch/copy")" || fail "the judge overlooks the name of a mode in $file"
done

# The options that programs share are declared by the table: none has a second help.
for name in order pattern dilation-mode causal documents softcap relative bias sink transport shards; do
  ! grep -rnE "options\.(flag|integer|number|text|text_or|choice)\((\"[a-z]+\", )?\"--$name\"" "$SRC/examples" \
    --include='*.cpp' >"$scratch/out" ||
    fail "--$name is declared beside the table: $(cat "$scratch/out")"
done
