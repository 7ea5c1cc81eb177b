#!/usr/bin/env bash
# What READMEs and comments name is there: pages, links, files. READMEs are short, their sentences too, and the words
# are those of the field. Every room has a README and is not too full. First the tree, then the judge: each rule is
# broken once in a copy and must be named.
. "$(dirname "$0")/common.sh"

# Prints `file:line: rule`, or `room: rule`.
violations() (
  cd "$1"
  here=(README.md .github core ops nn examples tests third_party)
  {
    echo 'there .'
    find "${here[@]}" -printf 'there %p\n'
    grep -rnH '' "${here[@]}" --include='*.md' | sed 's/^/page /'
    grep -rnH '//' core ops nn examples tests --include='*.h' --include='*.cpp' --include='*.cu' --include='*.cuh' |
      sed -E 's/^([^:]*:[0-9]+:).*(\/\/.*)/comment \1\2/'
  } | awk '
    function clean(path) {  # a/./b/../c/ -> a/c
      gsub(/\/\.\//, "/", path); sub(/^\.\//, "", path); sub(/\/+$/, "", path)
      while (path ~ /[^\/]+\/\.\.(\/|$)/) sub(/[^\/]+\/\.\.(\/|$)/, "", path)
      return path == "" ? "." : path
    }
    function is_there(path) { return (clean(path) in there) || (clean(room path) in there) }
    # The next match of `what` in text goes to `token`, and text continues behind it.
    function next_match(what) {
      if (!match(text, what)) return 0
      token = substr(text, RSTART, RLENGTH); text = substr(text, RSTART + RLENGTH)
      return 1
    }
    BEGIN {  # what the field calls a producer, a consumer, to return, or nothing
      dialect = "(who (loads|multiplies|sends|stores|fetches)|(go(es)?|went|way|brings?|back|again) home|nobody.s)"
      rooms = "^(core|ops|nn|examples|tests|third_party)/"
      dialect = "(^|[^a-z])" dialect "([^a-z]|$)"
    }
    $1 == "there" { there[$2]; name = $2; sub(/.*\//, "", name); named[name]; next }
    {
      kind = $1; text = substr($0, length($1) + 2)
      file = text; sub(/:.*/, "", file); room = file; sub(/[^\/]*$/, "", room)
      line = substr(text, length(file) + 2); sub(/:.*/, "", line)
      whole = text = substr(text, length(file) + length(line) + 3)
    }
    kind == "page" && /^page [^:]*:[0-9]+:```/ { quoted[file] = !quoted[file] }
    tolower(whole) ~ dialect { print file ":" line ": no word of the field: " whole }
    kind == "page" && file ~ /README\.md$/ && file !~ /^third_party\/.*\// {
      total += split(whole, word, " ")  # as wc -w
      if (file == "README.md" && line + 0 == 141) print "README.md: more than 140 lines"
      if (quoted[file] || whole ~ /^(#|\||    |<!--|```|$)/ || whole ~ /^ *([-*]|[0-9]+\.) /) words = 0
      if (!quoted[file] && whole !~ /^(#|\||    |<!--|```|$)/)
        for (i = 1; i in word; ++i)
          if (word[i] ~ /[.!?][)*"]*$/) words = 0
          else if (word[i] ~ /[A-Za-z0-9]/ && ++words == 30) print file ":" line ": a sentence above 30 words"
      delete word
    }
    kind == "page" && !quoted[file] {
      while (next_match("\\]\\([^)]+\\)")) {
        token = substr(token, 3, length(token) - 3)
        sub(/#.*/, "", token)
        if (token == "" || token ~ /^[a-z]+:/ || clean(room token) in there) continue
        print file ":" line ": no such link: " token
      }
      text = whole
      while (next_match("`[^`]+`")) {
        token = substr(token, 2, length(token) - 2)
        name = token; sub(/.*\//, "", name)
        if (token !~ /^[A-Za-z0-9_.\/-]+$/ || name ~ /^[xX][._]/) continue  # X.cpp: any
        ends_as_file = token ~ /[^.\/]\.(h|cpp|cu|cuh|py|sh|md|in|map|awk)$/
        if (token !~ /\//) missing = ends_as_file && !(name in named)
        else missing = (ends_as_file || token ~ /\/$/ || token ~ rooms) && !is_there(token)
        if (missing) print file ":" line ": no such file: " token
      }
    }
    kind == "comment" && whole ~ /^\/\/[\/<]* *(Of|Who) / {
      print file ":" line ": a comment without a subject: " whole
    }
    kind == "comment" {
      while (next_match("[A-Za-z0-9_.\\/-]+\\.md")) if (!is_there(token)) print file ":" line ": no such page: " token
      text = " " whole
      path = "(core|ops|nn|examples|tests)/[A-Za-z0-9_./-]+\\.(h|cpp|cu|cuh|py|sh|txt)"
      while (next_match("[^A-Za-z0-9_./<-]" path))
        if (!is_there(substr(token, 2))) print file ":" line ": no such file: " substr(token, 2)
    }
    END { if (total > 12000) print "READMEs: " total " words, more than 12000" }'
  find core ops nn examples tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sed 's|/[^/]*$||' |
    sort -u | while read -r room; do
      [[ -f $room/README.md ]] || echo "$room: a room without a README.md"
    done
  (($(find core -mindepth 1 -maxdepth 1 | wc -l) <= 40)) || echo 'core: more than 40 entries'
  (($(find ops/hilbert -maxdepth 1 -type f | wc -l) <= 16)) || echo 'ops/hilbert: more than 16 files'
)

found=$(violations "$SRC")
[[ -z $found ]] || fail $'words without their things:\n'"$found"
! command -v python3 >/dev/null || python3 "$SRC/tests/tools/figures.py" --check ||
  fail 'a table is not what was measured: tests/tools/figures.py'
badges="\`$(sed -n '1s/License/licence/p' "$SRC/LICENSE")\` \`version $VERSION\`"
grep -qF "$badges" "$SRC/README.md" || fail "README.md: another licence or version than $badges"

# listed WORD PARAGRAPH FILE ..: those of the product that say the word are in that paragraph of CONTRIBUTING.
listed() {
  local paragraph file word=$1
  paragraph=$(sed -n "/^\*\*$2\*\*/,/^\$/p" "$SRC/.github/CONTRIBUTING.md")
  cd "$SRC"
  for file in $(grep -rlw --include='*.'{h,cpp,cu,cuh,py,pyi} "$word" "${@:3}"); do
    [[ $paragraph == *"${file##*/}"* || $paragraph == *"\`${file%/*}/\`"* ]] || echo "$file"
  done
}
missing=$(listed softcap 'A score term' core ops nn examples; listed Backward::hybrid 'A mode' core ops nn;
  listed DType::f16 'A dtype' core ops nn)
[[ -z $missing ]] || fail $'not in CONTRIBUTING, though they know a term, a mode or a dtype:\n'"$missing"
[[ $(listed softcap 'A mode' ops) ]] || fail 'the judge overlooks a file that is not listed'

# breaks RULE FILE.. [-- TEXT]: appends the text to files of a copy of the tree.
breaks() {
  local rule=$1 files=() file
  shift
  while (($#)) && [[ $1 != -- ]]; do files+=("$1") && shift; done
  rm -rf "$scratch/copy"
  mkdir "$scratch/copy"
  (cd "$SRC" && cp -r README.md .github core ops nn examples tests third_party "$scratch/copy")
  for file in "${files[@]}"; do
    mkdir -p "$(dirname "$scratch/copy/$file")"
    printf '%s\n' "${2-}" >>"$scratch/copy/$file"
  done
  grep -qF -- "$rule" <<<"$(violations "$scratch/copy")" || fail "the judge overlooks: $rule, in ${files[*]}: ${2-}"
}
breaks 'no such page: RULES.md' core/tape.h -- '/// As RULES.md says.'
breaks 'no such file: ops/tape.h' nn/layers.cpp -- '  // Compare ops/tape.h, which is not there.'
breaks 'no such link: core/TAPE.md' README.md -- 'See [the tape](core/TAPE.md#ids).'
breaks 'no such link: ../core' ops/hilbert/plan/README.md -- '[core](../core)'
breaks 'no such file: ops/gemm.h' README.md -- 'Read `ops/gemm.h`.'
breaks 'no such file: tapes.h' core/README.md -- 'Read `tapes.h`.'
breaks 'no such file: tools/' core/README.md -- 'In `tools/`.'
breaks 'no word of the field' core/tape.h -- '/// For who loads.'
breaks 'no word of the field' core/README.md -- 'Gradients go home.'
breaks 'a comment without a subject' nn/layers.cpp -- 'int of_two();  // Of two.'
breaks 'a sentence above 30 words' core/README.md -- "A sentence $(printf 'of %.0s' {1..29})words."
breaks 'more than 12000' core/README.md -- "$(printf 'word. %.0s' {1..12000})"
breaks 'more than 140 lines' README.md -- "$(printf 'x\n%.0s' {1..140})"
breaks 'core/attic: a room without a README.md' core/attic/old.cpp
breaks 'core: more than 40 entries' core/{1..20}.txt
breaks 'ops/hilbert: more than 16 files' ops/hilbert/{1..10}.txt
