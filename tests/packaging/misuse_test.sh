#!/usr/bin/env bash
# Members may be left out of designated initializers; what should not compile says what stands for it.
. "$(dirname "$0")/common.sh"
cd "$scratch"
warnings=(-Wall -Wextra -Werror)

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
