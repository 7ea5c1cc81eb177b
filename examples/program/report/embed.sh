#!/bin/sh
# A file as a C++ string literal, on standard output. A line `@include NAME` in it stands for the lines of NAME, which
# is looked for beside the file and beside this script. --list FILES of ops/hilbert/: of each {"its name", its text},
set -e
if [ "$1" = --list ]; then
  shift
  for file; do
    printf '{"%s",\n' "${file##*ops/hilbert/}"
    sh "$0" "$file"
    echo '},'
  done
  exit
fi
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
