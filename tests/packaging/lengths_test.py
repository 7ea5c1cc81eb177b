#!/usr/bin/env python3
"""No function of product or tests has more than 100 lines or 8 parameters, as universal-ctags sees them, but those of
STILL, which must be as long as they are to stand there."""
import os
import pathlib
import subprocess
import sys
import tempfile

LINES, PARAMETERS = 100, 8
SKIPPED = 77
STILL = set()
FORMAT = "%{line}\t%{end}\t%F\t%N\t%S"


def parameters(signature):
    """How many there are in (std::map<int, int> x, int y = f(1, 2)) const."""
    depth, count, text = 0, 1, ""
    for c in signature.replace("->", "."):
        depth += (c in "([{<") - (c in ")]}>")
        if depth == 0:
            break
        count += c == "," and depth == 1
        text += c
    return 0 if text[1:].strip() in ("", "void") else count


def functions(files):
    """(file, line, name, lines, parameters) of each."""
    call = "ctags --options=NONE --languages=C++ --langmap=C++:+.cu.cuh --kinds-C++=f --fields=+neS -x -L -".split()
    found = subprocess.run(call + ["--_xformat=" + FORMAT], input="\n".join(map(str, files)), check=True,
                           capture_output=True, text=True).stdout
    for line in found.splitlines():
        first, last, file, name, signature = line.split("\t")
        yield file, int(first), name, int(last or first) - int(first) + 1, parameters(signature)


def too_much(files):
    return [f"{file}:{line}: {name} has {lines} lines and {count} parameters"
            for file, line, name, lines, count in sorted(functions(files)) if lines > LINES or count > PARAMETERS]


def judge_itself():
    """A kernel and a test are functions too, and what stands inside a parameter is none."""
    body = " {\n" + "  f();\n" * (LINES - 2) + "}\n"
    few = ", ".join(f"std::map<int, T> p{i} = {{{i}, g(1, 2)}}" for i in range(PARAMETERS))
    kernel = "template <class T>\n__global__ void __launch_bounds__(f(1, 2), 1) {}(const __grid_constant__ T t)"
    member = f"struct S {{\n  int a({few}) const;\n  int b({few}) const {{ return 1; }}\n}};\n"
    right = [kernel.format("a") + body, "TEST(Some, Name)" + body, member, "void c(void) {}\n"]
    wrong = [x.replace(" {\n", " {\n\n", 1) for x in right[:2]] + [member.replace("b(", "b(int more, ")]
    with tempfile.TemporaryDirectory() as scratch:
        for texts, want in ((right, 0), (wrong, len(wrong))):
            file = pathlib.Path(scratch, "some.cu")
            file.write_text("\n".join(texts))
            found = too_much([file])
            if len(found) != want:
                sys.exit(f"FAILED: finds {len(found)} of {want}: {found}")


def main():
    try:
        version = subprocess.run(["ctags", "--version"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        version = ""
    if "Universal Ctags" not in version:
        print("no universal-ctags: lengths of functions are not judged")
        sys.exit(SKIPPED)
    judge_itself()
    os.chdir(os.environ["SRC"])
    rooms = "core", "ops", "nn", "examples", "tests"
    kinds = ".h", ".cpp", ".cu", ".cuh"
    files = sorted(file for room in rooms for file in pathlib.Path(room).rglob("*") if file.suffix in kinds)
    found = too_much(files)
    known = {name for name in STILL if any(f": {name} has" in line for line in found)}
    if known != STILL:
        sys.exit(f"FAILED: no longer too long, so no longer of STILL: {', '.join(sorted(STILL - known))}")
    found = [line for line in found if not any(f": {name} has" in line for name in STILL)]
    if found:
        sys.exit(f"FAILED: at most {LINES} lines and {PARAMETERS} parameters:\n" + "\n".join(found))
    print(f"{len(files)} files: no function above {LINES} lines or {PARAMETERS} parameters, but {len(STILL)}")


main()
