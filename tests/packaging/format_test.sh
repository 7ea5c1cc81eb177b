#!/usr/bin/env bash
# One hand: every source as clang-format 14 leaves it, no line over 120 columns, no sentence of a comment over 100
# (formulas and tables, which are indented, may fill the line), and an opening sentence in every .cpp and .cu. Pages and
# scripts keep 120 columns too.
. "$(dirname "$0")/common.sh"
cd "$SRC"

mapfile -t sources < <(find core ops nn examples tests -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o \
  -name '*.cuh' \) | sort)
# What is quoted (raw strings) and what says `clang-format off` keeps its lines.
wide() {
  awk '
    FNR == 1 { free = raw = 0 }
    /clang-format off/ { free = 1 }
    /clang-format on/ { free = 0 }
    /R"[a-z]*\(/ { raw = 1 }
    !free && !raw && length > 120 { print FILENAME ":" FNR ": over 120 columns" }
    !free && !raw && length > 100 && /^ *\/\/\/? [^ ]/ { print FILENAME ":" FNR ": a comment over 100 columns" }
    raw && /\)[a-z]*"/ { raw = 0 }' "$@"
}
found=$(wide "${sources[@]}")
[[ -z $found ]] || fail $'too wide:\n'"$found"
printf '// %0120d\n' 0 >"$scratch/wide.cpp"
[[ $(wide "$scratch/wide.cpp") == *'over 120'*'over 100'* ]] ||
  fail "the judge overlooks a wide line: $(wide "$scratch/wide.cpp")"

# A page's tables, notes for tests and fenced blocks keep their lines. Columns are characters: of UTF-8 the first bytes.
long() {
  awk '
    FNR == 1 { fenced = 0; page = FILENAME ~ /\.md$/ }
    page && /^```/ { fenced = !fenced }
    page && (fenced || /^(\||<!--)/) { next }
    length > 120 { gsub(/[\200-\277]/, ""); if (length > 120) print FILENAME ":" FNR ": over 120 columns" }' "$@"
}
mapfile -t texts < <({
  find README.md .github core ops nn examples tests -type f -regex '.*\.\(md\|sh\|pyi?\)'
  grep -ld skip '^#!.*bash' tests/tools/*
} | sort -u)
found=$(long "${texts[@]}")
[[ -z $found ]] || fail $'too wide:\n'"$found"
printf '# %0120d\n' 0 | tee "$scratch/wide.sh" >"$scratch/wide.md"
[[ $(long "$scratch"/wide.{md,sh} | wc -l) == 2 ]] || fail "the judge overlooks a wide line of $(ls "$scratch"/wide.*)"

silent=$(for source in "${sources[@]}"; do
  [[ $source != *.cpp && $source != *.cu ]] || grep -q '^//' <(head -n 3 "$source") || echo "$source"
done)
[[ -z $silent ]] || fail $'no opening sentence:\n'"$silent"

if [[ $(clang-format --version 2>/dev/null) =~ version\ 14\. ]]; then
  clang-format --dry-run -Werror "${sources[@]}" 2>"$scratch/err" ||
    fail "run clang-format -i on: $(sed -n 's/:[0-9]*:[0-9]*: error.*//p' "$scratch/err" | sort -u | tr '\n' ' ')"
else
  echo 'no clang-format 14: the formatting is not judged'
  exit 77
fi
