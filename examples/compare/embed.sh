#!/bin/sh
# A file as a C++ string literal, on standard output.
set -e
printf 'R"embedded('
cat "$1"
printf ')embedded"\n'
