"""python -m hilt: the version. --cmake-dir: why there is nothing for CMake here, and what to do."""

import sys

from . import __version__


def main(words):
    if words in ([], ["--version"]):
        return print("hilt", __version__)
    text = f"{words[0]}: expected --version or --cmake-dir"
    if words == ["--cmake-dir"]:
        text = ("--cmake-dir: the wheel has the module alone, neither headers nor a library; from the same sources "
                "`meson setup build && meson install -C build`, then find_package(hilt)")
    print("hilt: error:", text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
