#!/usr/bin/env bash
# The shared library exports names of namespace hilt and nothing else, and all that a public header promises.
. "$(dirname "$0")/common.sh"

library=$BUILD/libhilt.so.0.3
foreign() {
  nm -D --defined-only "$1" | awk '{ print $3 }' |
    grep -vE '^_Z(N[KOR]*|T[VIST]N|GV?Z?N[KOR]*|ZN[KOR]*)4hilt' | c++filt
}
found=$(foreign "$library") || true
[[ -z $found ]] || fail $'exported, but not of namespace hilt:\n'"$found"

nm -DC --defined-only "$library" | cut -d' ' -f3- >"$scratch/exports"
# Every op of the catalogue.
ops=$(sed -nE 's/^(Tensor|double|void|std::vector<Tensor>) ([a-z_0-9]+)\(.*/\2/p' "$SRC/ops/ops.h" | sort -u)
for name in $ops; do
  grep -qF "hilt::$name(" "$scratch/exports" || fail "ops/ops.h declares $name, which libhilt does not define or export"
done

# No function that a public header names is hidden by accident: a friend that only its class declares, a template that
# is instantiated where the namespace is reopened without its visibility.
declared=$(find -L "$BUILD/include/hilt" -name '*.h' -exec cat {} +)
mapfile -t objects < <(find "$BUILD"/libhilt_*.p -name '*.o' ! -path '*_base.a.p/*' ! -path '*_avx*.a.p/*' \
  ! -path '*_neon.a.p/*')
((${#objects[@]} > 10)) || fail "only ${#objects[@]} objects of the library are there"
private='\{lambda|\(anonymous|hilt::(kernels|detail)::|^(guard|typeinfo|vtable)'
readelf -sW "${objects[@]}" | awk '$6 == "HIDDEN" && $5 ~ /GLOBAL|WEAK/ && $7 != "UND" { print $8 }' | sort -u |
  c++filt | grep -F 'hilt::' | grep -vE "$private" >"$scratch/hidden" || true
typed='<(double|float|int|long|unsigned char|hilt::bf16|hilt::f16)>$'
while read -r symbol; do
  call=${symbol%%(*}
  [[ $call != *'<'* || $call =~ $typed || $call == *'operator<<' ]] || continue
  name=${call##*::}
  name=${name%%<[a-z]*}
  # A member of a class that no public header knows is private, as is an overload for such types.
  owner=${call%::"$name"*} && owner=${owner##*::}
  [[ $owner == hilt ]] || grep -qw "$owner" <<<"$declared" || continue
  for type in $(grep -oE 'hilt::[A-Za-z_0-9]+' <<<"${symbol#*"$name"}" | sed 's/hilt:://'); do
    grep -qw "$type" <<<"$declared" || continue 2
  done
  grep -qE "(^|[^a-zA-Z_.])$name\(" <<<"$declared" && hidden+=$'\n'$symbol
done <"$scratch/hidden"
[[ -z ${hidden-} ]] || fail "declared in a public header, hidden in the library:$hidden"

# What a program may have linked to is a list: a change of it is meant, or a mistake. Without what is inline, which a
# compiler may leave out; as g++ names it; of a build without CUDA, whose list every build has.
listed() {
  nm -D --defined-only "$1" | awk '$2 ~ /[BDRT]/ || $3 ~ /(from_values|to_vector)I/ { print $3 }' | c++filt |
    sed 's/std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >/std::string/g
         s/std::basic_string_view<char, std::char_traits<char> >/std::string_view/g' | sort -u
}
if ! "$CXX" -dM -E -x c++ /dev/null | grep -q __clang__ && grep -q 'kHasCuda = false' "$BUILD/core/config.h"; then
  listed "$library" >"$BUILD/exports.txt"
  (($(wc -l <"$BUILD/exports.txt") > 400)) || fail "only $(wc -l <"$BUILD/exports.txt") exports were found"
  diff "$SRC/tests/packaging/exports.txt" "$BUILD/exports.txt" >"$scratch/changed" ||
    fail "tests/packaging/exports.txt has (<) and libhilt exports (>):
$(cat "$scratch/changed")
where that is meant, copy $BUILD/exports.txt there; programs linked to what is gone or changed need a new series"
fi

# Nothing of it needs a library whose settings are the host's: a BLAS has one number of threads for the whole process.
[[ ! $(readelf -d "$library"; nm -D "$library") =~ openblas|libblas|[sd]gemm_ ]] ||
  fail "libhilt uses a BLAS of the system"

# The judge itself.
echo 'namespace hilt { void ours() {} } void theirs() {}' | "$CXX" -shared -fPIC -x c++ - -o "$scratch/foreign.so"
[[ $(foreign "$scratch/foreign.so") == 'theirs()' ]] ||
  fail "a foreign symbol goes unnoticed: $(foreign "$scratch/foreign.so")"
