#!/usr/bin/env bash
# Every block of C++ in examples/embed/README.md compiles without a warning against the public headers, and runs; and
# what does not compile says what stands for it.
. "$(dirname "$0")/common.sh"

cd "$scratch"
awk '/^```cpp$/ { name = sprintf("block%02d.cpp", ++n); print "#include <hilt/hilt.h>\n#include <thread>\nusing namespace hilt;\nint main() {" >name; next }
     /^```$/ { if (name) print "}" >name; name = ""; next }
     name { print >name }' "$SRC/examples/embed/README.md"
blocks=(block*.cpp)
((${#blocks[@]} >= 5)) || fail "only ${#blocks[@]} blocks found"
warnings=(-Wall -Wextra -Werror)
for block in "${blocks[@]}"; do
  expect 0 "$block: $(cat "$block")" "$CXX" -std=c++20 "${warnings[@]}" -I "$BUILD/include" "$block" -o program -L "$BUILD" -l:libhilt.so.0.2 -pthread
  expect 0 "$block" env LD_LIBRARY_PATH="$BUILD" ./program
done

# Members may be left out of a designated initializer.
cat >named.cpp <<'END'
#include <hilt/hilt.h>
hilt::Linear linear{.weight = hilt::zeros(3)};
hilt::TransformerConfig config{.layers = 1};
hilt::AttentionConfig attention{.width = 4};
hilt::Schedule schedule{.peak = 1};
END
expect 0 'designated initializers' "$CXX" -std=c++20 "${warnings[@]}" -fsyntax-only -I "$BUILD/include" named.cpp

for op in + - '*' /; do
  printf '#include <hilt/hilt.h>\nvoid f(hilt::Tensor x) { x %s= x; }\n' "$op" >wrong.cpp
  expect 1 "x $op= x" "$CXX" -std=c++20 -fsyntax-only -I "$BUILD/include" wrong.cpp
  says err "write x = x $op y"
done
