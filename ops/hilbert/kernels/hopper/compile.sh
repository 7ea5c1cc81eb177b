#!/bin/sh
# compile.sh INPUT OUTPUT DEPFILE COMPILER [flags]: compiles, and fails where the assembler reports C75xx: wgmma
# serialized, registers short, setmaxnreg ignored. It calls them information; a kernel they are true of is several times
# slower.
[ $# -ge 4 ] || { echo "usage: compile.sh INPUT OUTPUT DEPFILE COMPILER [flags]" >&2; exit 2; }
input=$1 output=$2 depfile=$3
shift 3
log=$output.log
"$@" -MD -MF "$depfile" -c "$input" -o "$output" 2>"$log" || { cat "$log" >&2; exit 1; }
cat "$log" >&2
if grep -q 'C75[0-9][0-9]' "$log"; then
  rm -f "$output"
  exit 1
fi
