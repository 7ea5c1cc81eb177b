#!/usr/bin/env bash
# Members may be left out of designated initializers; what should not compile says what stands for it.
. "$(dirname "$0")/common.sh"
cd "$scratch"
compiles() { expect "$1" "$2" "$CXX" -std=c++20 -fsyntax-only -I "$BUILD/include" "$3"; }

# For structs that a caller fills, each member alone: no other one is missed. DLPack's are C, plans make tilings,
# and a message is all of it.
python3 - "$BUILD/include/hilt" >named.cpp <<'END'
import pathlib, re, sys
print('''#include <hilt/hilt.h>
#define NAME(S, M) void f(std::type_identity<S> s, int (*)[__COUNTER__ + 1]) { \\
  [](auto t) { using T = typename decltype(t)::type; if constexpr (std::is_aggregate_v<T>) (void)T{.M = {}}; }(s); }
namespace hilt {''')
for path in sorted(pathlib.Path(sys.argv[1]).rglob('*.h')):
    if path.name in ('dlpack.h', 'tiling.h', 'comm.h'): continue
    scopes = []  # (indent, name) of the structs around a line; None: of no interest
    for line in path.read_text().split('\n'):
        indent, code = len(line) - len(line.lstrip()), line.split('//')[0].rstrip()
        while scopes and code.startswith(' ' * scopes[-1][0] + '}'): scopes.pop()
        if code.strip() == 'private:': scopes[-1] = (scopes[-1][0], None)
        opened = re.match(r' *(?:template.*)?(?:struct|class) (?:\[\[.*\]\] )?(\w+)[^;]*\{$', code)
        if opened:
            plain = 'template' not in code and ' : ' not in code and (not scopes or scopes[-1][1])
            scopes.append((indent, opened[1] if plain else None))
        elif scopes and scopes[-1][1] and indent == scopes[-1][0] + 2:
            member = re.match(r' *(?!using|static|friend|enum|explicit|return)[\w:][\w:<>, *]*? \**(\w+)(?:\{.*\}| = '
                              r'[^(]*)?(?:, .*)?;$', code)
            if member and 'operator' not in code: print('NAME(%s, %s)' % ('::'.join(name for _, name in scopes),
                                                                          member[1]))
print('}')
END
for compiler in "$CXX" clang++; do
  command -v "$compiler" >/dev/null || continue
  (($(grep -c ^NAME named.cpp) > 200)) || fail "only $(grep -c ^NAME named.cpp) members were found"
  expect 0 "designated initializers, $compiler" "$compiler" \
    -std=c++20 -Wall -Wextra -Wpedantic -Wconversion -Wmissing-field-initializers -Werror \
    -fsyntax-only -I "$BUILD/include" named.cpp
done

for op in + - '*' /; do
  printf '#include <hilt/hilt.h>\nvoid f(hilt::Tensor x) { x %s= x; }\n' "$op" >wrong.cpp
  compiles 1 "x $op= x" wrong.cpp
  says err "write x = x $op y"
done

# What would be read after its owner is gone.
for dangling in 'Checkpoint("c").file()' 'SafetensorsFile("c").metadata()' 'SafetensorsFile("c").entries()' \
  'SafetensorsFile("c").find("t")'; do
  printf '#include <hilt/hilt.h>\nvoid f() { (void)hilt::%s; }\n' "$dangling" >wrong.cpp
  compiles 1 "$dangling" wrong.cpp
  says err 'deleted function'
done
