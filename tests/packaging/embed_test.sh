#!/usr/bin/env bash
# The project of examples/embed by each build system, as a user would build it: against a copy of the installed tree
# that lies elsewhere than it was configured for, shared and static, and with the source tree as a Meson subproject.
# embed_test.sh make|cmake|fetch|meson; 77 if that tool is not here.
. "$(dirname "$0")/common.sh"
tool=$1
command -v "${tool/fetch/cmake}" >/dev/null || { echo "no ${tool/fetch/cmake} here"; exit 77; }

cp -r "$SRC/examples/embed/project" "$scratch/project"
cd "$scratch/project"
meson install -C "$BUILD" --no-rebuild --quiet --destdir "$scratch/stage"
mkdir "$scratch/moved here"
mv "$scratch"/stage/*/* "$scratch/moved here" # prefix is somewhere below
prefix=$(dirname "$(dirname "$(find "$scratch/moved here" -path '*/include/hilt' -type d)")")
libdir=$(dirname "$(find "$prefix" -name libhilt.a)")
export PKG_CONFIG_PATH="$libdir/pkgconfig"
grep -q 'kHasCuda = true' "$prefix/include/hilt/core/config.h" || (($(du -sm "$prefix" | cut -f1) <= 15)) ||
  fail "$(du -sh "$prefix" | cut -f1)B are installed; in a build directory of before: meson configure -Dstrip=true"

# prints PROGRAM..: the output that main.cpp promises.
sed -n '/^\/\/ Prints:$/,/^[^/]/p' main.cpp | sed -n 's|^//   ||p' >"$scratch/promised"
prints() {
  expect 0 "$*" "$@"
  diff "$scratch/promised" "$scratch/out" >"$scratch/diff" ||
    fail $'main.cpp promises (<) and prints (>):\n'"$(cat "$scratch/diff")"
}
# The headers and the project are clean where a project is strict.
strict='-O2 -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror'
uses_shared() { readelf -d "$1" | grep -qF 'libhilt.so.0.3' || fail "$1 does not use libhilt.so.0.3"; }
uses_static() { ! readelf -d "$1" | grep -qF libhilt || fail "$1 uses the shared library"; }

case $tool in
  make)
    # hilt.pc stands alone: no other .pc file has to be there, and only our own headers are shown.
    alone() {
      expect 0 "pkg-config $1" env PKG_CONFIG_LIBDIR="$libdir/pkgconfig" PKG_CONFIG_PATH= pkg-config "$1" hilt
    }
    alone --print-requires-private
    [[ ! -s $scratch/out ]] || fail "hilt.pc asks for $(cat "$scratch/out")"
    alone --cflags
    [[ $(grep -o -- -I "$scratch/out" | wc -l) == 1 ]] ||
      fail "hilt.pc shows other headers than ours: $(cat "$scratch/out")"

    for compiler in "$CXX" clang++; do
      command -v "$compiler" >/dev/null || continue
      expect 0 "make, $compiler" make CXX="$compiler" CXXFLAGS="$strict"
      [[ ! -s $scratch/err ]] || fail "make, $compiler: $(cat "$scratch/err")"
      uses_shared ./embed
      prints env LD_LIBRARY_PATH="$libdir" ./embed
      expect 0 'make clean' make clean
    done
    expect 0 'make STATIC=1' make CXX="$CXX" STATIC=1
    uses_static ./embed
    prints ./embed

    # In place: the build directory, by the file that Meson writes for it.
    in_place=(env "PKG_CONFIG_PATH=$BUILD/meson-uninstalled")
    expect 0 'make clean' make clean
    expect 0 'make, not installed' "${in_place[@]}" make CXX="$CXX"
    prints env LD_LIBRARY_PATH="$BUILD" ./embed
    expect 0 'make clean' make clean
    expect 0 'make STATIC=1, not installed' "${in_place[@]}" make CXX="$CXX" STATIC=1
    prints ./embed

    # Headers of one version, library of another.
    sed -i 's/kVersion = "[^"]*"/kVersion = "0.0.9"/' "$prefix/include/hilt/core/config.h"
    expect 0 'make clean' make clean
    expect 0 'make with other headers' make CXX="$CXX"
    expect 2 'other headers' env LD_LIBRARY_PATH="$libdir" ./embed
    one_line_on_stderr
    says err 'library and header versions differ: the program was compiled for 0.0.9'
    ;;
  cmake)
    expect 0 'cmake' cmake -S . -B build -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$CXX" \
      -DCMAKE_CXX_FLAGS="$strict"
    expect 0 'cmake --build' cmake --build build
    uses_shared build/embed
    prints build/embed
    sed -i 's/PRIVATE hilt::hilt)/PRIVATE hilt::hilt_static)/' CMakeLists.txt
    expect 0 'cmake --build, static' cmake --build build
    uses_static build/embed
    prints build/embed
    cat >"$scratch/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.18)
project(ask CXX)
foreach(request ${VERSION%.*} $VERSION 0.1 0.9 1 ${VERSION%.*}.99)
  unset(hilt_DIR CACHE)
  find_package(hilt \${request} QUIET)
  message(STATUS "asked for \${request}: \${hilt_FOUND}")
endforeach()
unset(hilt_DIR CACHE)
find_package(hilt $VERSION EXACT REQUIRED)
END
    expect 0 'find_package with versions' cmake -S "$scratch" -B "$scratch/ask" -DCMAKE_PREFIX_PATH="$prefix" \
      -DCMAKE_CXX_COMPILER="$CXX"
    for answer in "${VERSION%.*}: 1" "$VERSION: 1" '0.1: 0' '0.9: 0' '1: 0' "${VERSION%.*}.99: 0"; do
      says out "asked for $answer"
    done
    ;;
  fetch)
    # As a part of another CMake project: how it is set up; the whole library again only where HILT_DEEP is set.
    sed -i 's|find_package(hilt .*|include(FetchContent)\
FetchContent_Declare(hilt SOURCE_DIR "'"$SRC"'" SOURCE_SUBDIR core/install)\
FetchContent_MakeAvailable(hilt)|' CMakeLists.txt
    printf '%s\n' 'add_executable(static main.cpp)' 'target_link_libraries(static PRIVATE hilt::hilt_static)' \
      >>CMakeLists.txt
    built=$scratch/built
    for again in first second; do
      expect 0 "cmake, $again" cmake -S . -B "$built" -DCMAKE_CXX_COMPILER="$CXX" \
        -DHILT_OPTIONS='-Dcuda=disabled;-Dmpi=disabled;-Disa=base;-Doptimization=0'
    done
    ! grep -- '-isystem' "$built/CMakeFiles/embed.dir/flags.make" || fail 'headers that are links, as those of a system'
    expect 0 'ninja -n' ninja -C "$built/_deps/hilt-build/meson" -n libhilt.so.0.3 libhilt.a
    says out 'Linking target libhilt.so.0.3'
    if [[ -n ${HILT_DEEP-} ]]; then
      expect 0 'cmake --build' cmake --build "$built"
      uses_shared "$built/embed"
      prints "$built/embed"
      uses_static "$built/static"
      prints "$built/static"
    fi
    expect 1 'cmake, a wrong option of Meson' cmake -S . -B "$scratch/wrong" -DCMAKE_CXX_COMPILER="$CXX" \
      -DHILT_OPTIONS=-Disa=fast
    says err 'hilt: meson setup failed'
    ;;
  meson)
    expect 0 'meson setup, installed' meson setup installed -Dwarning_level=3 -Dwerror=true
    expect 0 'meson compile, installed' meson compile -C installed
    prints env LD_LIBRARY_PATH="$libdir" installed/embed
    # As a subproject: how it configures and what it would build, always; the whole library again, for minutes of
    # compiling, only where HILT_DEEP is set, so kept between runs, and as cheap as it can be had: one instruction set.
    mkdir -p subprojects "$BUILD/embed_meson"
    ln -s "$SRC" subprojects/hilt
    rm -rf "$BUILD/embed_meson/project"
    cp -r . "$BUILD/embed_meson/project"
    cd "$BUILD/embed_meson/project"
    again=()
    [[ ! -f ../build/build.ninja ]] || again=(--reconfigure)
    expect 0 'meson setup, subproject' meson setup "${again[@]}" ../build -Doptimization=0 -Ddebug=false \
      --force-fallback-for=hilt -Dhilt:isa=base
    ! ninja -C ../build -t targets all | grep -q '\.cu\.o' || fail 'the subproject builds CUDA, which nobody asked for'
    expect 0 'meson introspect, subproject' meson introspect --projectinfo ../build
    says out '"name": "hilt"'
    expect 0 'ninja -t query, subproject' ninja -C ../build -t query embed
    says out 'subprojects/hilt/libhilt'  # the program waits for the library of the subproject
    if [[ -n ${HILT_DEEP-} ]]; then
      expect 0 'ninja, subproject' ninja -C ../build embed
      prints ../build/embed
    else
      echo 'the subproject was configured and not compiled: HILT_DEEP is not set'
    fi
    ;;
esac
