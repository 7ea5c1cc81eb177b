#!/bin/sh
# A file as a C++ string literal, on standard output. A line `@include NAME` in it stands for the lines of NAME, which
# is looked for beside the file and beside this script.
set -e
beside=$(dirname "$1") shared=$(dirname "$0")
printf 'R"embedded('
while IFS= read -r line || [ -n "$line" ]; do
  case $line in
    '@include '*)
      name=${line#@include }
      if [ -f "$beside/$name" ]; then cat "$beside/$name"; else cat "$shared/$name"; fi
      printf ')embedded"\nR"embedded(' ;;
    *) printf '%s\n' "$line" ;;
  esac
done <"$1"
printf ')embedded"\n'
