#!/usr/bin/env bash
# Compiles the fuzzer of parsers.cpp with clang's libFuzzer and runs each of its parsers, one after the other.
#
#   tests/fuzz/run.sh BUILD [seconds a parser, 60] [parser ..]
#
# What parses is compiled here, with coverage, addresses and undefined behavior watched; the rest comes from BUILD, a
# build of examples/train without MPI whose sources are an object each (-Db_pch=false). What is found new stays in
# BUILD/fuzz/corpus; a crash in BUILD/fuzz, with the line that plays it again. `minimize` instead of seconds puts the
# least that covers as much, in inputs of 300 bytes, into tests/fuzz/corpus.tar.xz, beside the seeds in
# tests/fuzz/corpus. The last line counts.
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
build=$(readlink -f "$1") seconds=${2:-60} out=$(readlink -f "$1")/fuzz
shift; (($#)) && shift
command -v clang++-19 >/dev/null || { echo 'fuzz: left out: there is no clang++-19 here'
echo '0 passed, 0 failed, 1 skipped'; exit 77; }
mkdir -p "$out/corpus"
tar -xJf "$root/tests/fuzz/corpus.tar.xz" -C "$out/corpus" --skip-old-files
cd "$root" || exit 70
sources=(tests/fuzz/parsers.cpp core/error.cpp core/shape.cpp core/dtype.cpp core/io/{npy,safetensors,text}.cpp \
  ops/hilbert/plan/*.cpp ops/hilbert/terms.cpp nn/checkpoint.cpp
  examples/program/{options,program}.cpp examples/train/{settings,sample}.cpp
  examples/train/tasks/{vocabulary,gpt2_files}.cpp)
flags=(-std=c++20 -O1 -g1 -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=vptr \
  -fno-sanitize-recover=all
  -I. -I"$build" -Iexamples -I"$build/include" -iquote "$build/core" -pthread)
jobs=0
for source in "${sources[@]}"; do
  [[ -f $source ]] || continue
  object=$out/${source//\//_}.o
  [[ $object -nt $source && $object -nt $build/libhilt.a ]] && continue
  clang++-19 "${flags[@]}" -c "$source" -o "$object" || touch "$out/failed" &
  ((++jobs % $(nproc))) || wait
done
wait
[[ ! -e $out/failed ]] || { rm "$out/failed"; echo 'fuzz: compiling failed'; echo '0 passed, 1 failed, 0 skipped'
exit 1; }
clang++-19 -fsanitize=fuzzer,address,undefined "$out"/*.o \
  "$build"/examples/{libtrain_parts,libtasks,program/libreport,program/libprogram}.a "$build/libhilt.a" -pthread \
  -o "$out/parsers" || exit 1
parsers=("$@")
((${#parsers[@]})) || parsers=(npy safetensors checkpoint tokenizer utf8 pattern order documents plan terms command)
passed=0 failed=0 all=0
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
cd "$out" || exit 70
for parser in "${parsers[@]}"; do
  mkdir -p "corpus/$parser"
  export HILT_FUZZ_PARSER=$parser
  if [[ $seconds == minimize ]]; then
    mkdir -p "least/$parser"
    ./parsers -merge=1 -max_len=300 "least/$parser" "corpus/$parser" 2>&1 | tail -n 1
    continue
  fi
  begin=$SECONDS code=0
  nice -n 19 ./parsers -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=256 -max_len=4096 \
    -print_final_stats=1 -artifact_prefix="$parser-" \
    "corpus/$parser" "$root/tests/fuzz/corpus/$parser" >"$parser.log" 2>&1 || code=$?
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$parser.log")
  all=$((all + ${runs:-0}))
  echo "$parser: ${runs:-0} executions in $((SECONDS - begin)) s, $(find "corpus/$parser" -type f |
    wc -l) in the corpus"
  if ((code == 0)); then passed=$((passed + 1)); else
    failed=$((failed + 1))
    grep -aE 'ERROR|SUMMARY|not so|Test unit written' "$parser.log"
    echo "  again: HILT_FUZZ_PARSER=$parser $out/parsers $out/$parser-..."
  fi
done
[[ $seconds != minimize ]] || tar -cJf "$root/tests/fuzz/corpus.tar.xz" -C least --sort=name --mtime=@0 --owner=0 \
  --group=0 .
echo "$all executions"
echo "$passed passed, $failed failed, 0 skipped"
((failed == 0))
