#!/usr/bin/env bash
# `meson dist` makes a tarball that stands alone: it builds and passes `./run test quick`, and the Debian packages build
# from it. A program compiles against what they install. Minutes of compiling, so only where HILT_DEEP is set.
. "$(dirname "$0")/common.sh"
changelog=$(sed -n '1s/.*(\(.*\)-.*/\1/p' "$SRC/tests/packaging/debian/changelog")
[[ $changelog == "$VERSION" ]] || fail "tests/packaging/debian is of $changelog, the tree of $VERSION"
for package in libhilt${VERSION%.*} libhilt-dev; do
  grep -qx "Package: $package" "$SRC/tests/packaging/debian/control" || fail "debian/control has no $package"
done
[[ ${HILT_DEEP-} ]] || { echo "HILT_DEEP=1 builds the tarball, and packages from it"; exit 77; }
[[ -e $SRC/.git ]] || { echo "no git here, which meson dist needs"; exit 77; }

expect 0 'meson dist' meson dist -C "$BUILD" --no-tests --formats gztar --allow-dirty
tar -C "$scratch" -xf "$BUILD/meson-dist/hilt-$VERSION.tar.gz"
tree=$scratch/hilt-$VERSION
packages=$scratch/packages
if command -v dh >/dev/null && command -v dpkg-buildpackage >/dev/null; then
  cp -r "$tree" "$packages"
  cp -r "$tree/tests/packaging/debian" "$packages/debian"
  (cd "$packages" && expect 0 'dpkg-buildpackage' dpkg-buildpackage -us -uc -b)
  for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$scratch/root"; done
  library=$(dirname "$(find "$scratch/root" -name libhilt.so)")
  expect 0 'compiling against the packages' "$CXX" -std=c++20 -I "$scratch/root/usr/include" \
    "$SRC/examples/embed/project/main.cpp" -L "$library" -lhilt -o "$scratch/program"
  expect 0 'a program' env LD_LIBRARY_PATH="$library" "$scratch/program"
  for file in pkgconfig/hilt.pc cmake/hilt/hiltConfig.cmake libhilt.a; do
    [[ -f $library/$file ]] || fail "libhilt-dev lacks $file"
  done
else
  echo "no debhelper here: apt-get install debhelper"
fi
unset SRC BUILD
cd "$tree"
expect 0 './run build' ./run build --cpu -Dwerror=true
expect 0 './run test quick' ./run test quick
