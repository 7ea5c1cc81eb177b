#!/usr/bin/env bash
# `./run docs` makes the site without a warning: every public symbol has its words, every link and anchor leads
# somewhere, search is there and one short style sheet. Then the judge: what it must name is put into a copy of the
# tree.
. "$(dirname "$0")/common.sh"
command -v doxygen >/dev/null || { echo 'no doxygen: the documentation is not made; ./run docs installs it' &&
  exit 77; }
export HILT_BUILD=$BUILD

expect 0 'run docs' "$SRC/run" docs "$scratch/site"
says out 'docs: '
cat "$scratch/out"
for page in index.html classhilt_1_1Tape.html ops_hilbert.html core_install.html search/search.js style.css; do
  [[ -s $scratch/site/$page ]] || fail "no $page"
done
(($(wc -l <"$SRC/tests/tools/docs/style.css") <= 200)) || fail 'the style sheet has more than 200 lines'
! grep -lE 'href="[^"]*(tabs|search)\.css"' "$scratch"/site/*.html || fail 'a page with a style sheet of Doxygen'
expect 1 'a directory with something else' "$SRC/run" docs "$SRC/core"
says err 'was not made here'

# The same without a header's sentence, of a private thing, and with a link that leads nowhere.
mkdir "$scratch/copy"
(cd "$SRC" && cp -r README.md .github core ops nn examples tests third_party "$scratch/copy")
cp -rL "$BUILD/include/hilt" "$scratch/include"
make() { expect "$1" "$2" "$scratch/copy/tests/tools/docs/make.py" "$scratch/include" "$scratch/site"; }
end='}  // namespace hilt'
sed -i "s|^$end|namespace detail { int hidden(int); }\nint bare(int);\n&|" "$scratch/include/core/tape.h"
echo 'See [the curve](ops/hilbert/README.md#no-such-heading).' >>"$scratch/copy/README.md"
make 1 'a bare function and a broken anchor'
says err 'hilt/core/tape.h:'
says err 'bare(int)'
says err 'broken link: index.html: ops_hilbert.html#ops_hilbert-no-such-heading'
! grep -q hidden "$scratch/err" || fail "a private name is judged: $(cat "$scratch/err")"
says err 'docs: error: 1 warnings, 1 broken links'
