#!/usr/bin/env python3
"""Puts known bugs back, one at a time, and expects the tests to notice.

    tests/mutants/run.py [--build DIR] [--list] [--every N] [--seconds S] [NAME ..]

mutants.txt lists them: a name, a file, the text to replace (once in that file, however it is broken into lines), its replacement, and the tests that must
fail. The tree is copied, so the working tree is never touched; one build directory is reused, so a mutant costs one compiled
file and a link. A mutant that survives, or no longer applies (chosen or not), is a failure. The last line counts.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_mutants():
    """Blocks separated by blank lines; `key: value` lines, and a value may go on in lines that start with four spaces."""
    mutants, text = [], (ROOT / "tests/mutants/mutants.txt").read_text()
    for block in re.split(r"\n\s*\n", text):
        entry, key = {}, None
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line.startswith("    ") and key:
                entry[key] += ("\n" if entry[key] else "") + line[4:]
            elif ":" in line:
                key, value = line.split(":", 1)
                entry[key] = value[1:] if value.startswith(" ") else value
        if entry:
            missing = {"name", "file", "from", "to", "test"} - entry.keys()
            if missing:
                sys.exit(f"mutants.txt: {entry.get('name', block)}: lacks {', '.join(sorted(missing))}")
            mutants.append(entry)
    return mutants


def pattern_of(text):
    """The text, however it is broken into lines: formatting moves blanks, not words."""
    parts = [re.escape(p) for p in re.findall(r"\w+|[^\w\s]", text)]
    glue = [r"\s+" if re.match(r"\w", a[-1]) and re.match(r"\w", b[-1]) else r"\s*" for a, b in zip(parts, parts[1:])]
    return re.compile("".join(p + g for p, g in zip(parts, glue + [""])))


def copy_tree(target):
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in files.splitlines():
        source, copy = ROOT / name, target / name
        if not source.is_file():
            continue
        if copy.is_file() and copy.read_bytes() == source.read_bytes():
            continue  # keeps its time: nothing to recompile
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
        os.utime(copy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build-mutants")
    parser.add_argument("--list", action="store_true", help="names and files, and nothing else")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="the first of every N, in the order of the file")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="begin no other after so many; at least one is tried")
    parser.add_argument("names", nargs="*", help="these alone")
    args = parser.parse_args()
    begun = time.monotonic()
    mutants = every = read_mutants()
    unknown = set(args.names) - {m["name"] for m in mutants}
    if unknown:
        sys.exit(f"mutants: error: no mutant named {', '.join(sorted(unknown))}; see --list")
    if args.names:
        mutants = [m for m in mutants if m["name"] in args.names]
    mutants = mutants[::args.every]
    if args.seconds < float("inf"):  # those it comes to are from all over the file
        mutants = [m for _, m in sorted(enumerate(mutants), key=lambda numbered: numbered[0] * 0.618 % 1)]
    if args.list:
        for m in mutants:
            print(f"{m['name']:40} {m['file']}")
        return 0

    source, build = args.build / "source", args.build / "build"
    copy_tree(source)
    if not (build / "build.ninja").exists():
        # One instruction set and little optimization: what is tested is the arithmetic, and compiling is what costs.
        subprocess.run(["meson", "setup", build, source, "-Dcuda=disabled", "-Dwide_isa=false", "-Dexamples=false", "-Doptimization=1", "-Ddebug=false"],
                       check=True, stdout=subprocess.DEVNULL)
    environment = os.environ | {"HILT_TEST_SCALE": "small"}
    binaries = sorted({m["test"].split()[0] for m in mutants})
    subprocess.run(["ninja", "-C", build] + [f"tests/{b}" for b in binaries], check=True, stdout=subprocess.DEVNULL)

    for test in sorted({m["test"] for m in mutants}):  # a test that fails anyway would kill everything
        binary, gtest_filter = test.split(maxsplit=1)
        sound = subprocess.run([build / "tests" / binary, f"--gtest_filter={gtest_filter}", "--gtest_brief=1"], env=environment, capture_output=True, text=True)
        if sound.returncode or " 0 tests" in sound.stdout:
            sys.exit(f"mutants: error: {test}: must run and pass without a mutant:\n{sound.stdout[-1500:]}")

    killed = failed = 0
    for m in every:
        times = len(pattern_of(m["from"]).findall((ROOT / m["file"]).read_text()))
        if m not in mutants and times != 1:
            failed += 1
            print(f"{m['name']:44} DOES NOT APPLY: its text stands {times} times in {m['file']}", flush=True)
    for tried, m in enumerate(mutants):
        start = time.monotonic()
        if tried and start - begun > args.seconds:
            print(f"mutants: {tried} of {len(mutants)} chosen were tried in {start - begun:.0f} s")
            break
        binary, gtest_filter = m["test"].split(maxsplit=1)
        path = source / m["file"]
        original = path.read_text()
        verdict = None
        found = list(pattern_of(m["from"]).finditer(original))
        if len(found) != 1:
            verdict = f"DOES NOT APPLY: its text stands {len(found)} times in {m['file']}"
        else:
            path.write_text(original[:found[0].start()] + m["to"] + original[found[0].end():])
            try:
                compiled = subprocess.run(["ninja", "-C", build, f"tests/{binary}"], capture_output=True, text=True)
                if compiled.returncode:
                    verdict = "DOES NOT COMPILE:\n" + compiled.stdout[-1500:]
                else:
                    try:
                        run = subprocess.run([build / "tests" / binary, f"--gtest_filter={gtest_filter}", "--gtest_brief=1"], env=environment,
                                             capture_output=True, text=True, timeout=300)
                        if run.returncode == 0:
                            ran = re.search(r"\[==========\] (\d+) tests? ", run.stdout)
                            verdict = f"SURVIVED {ran.group(1) if ran else 'no'} tests ({gtest_filter})"
                    except subprocess.TimeoutExpired:
                        pass  # a hang is noticed too
            finally:
                path.write_text(original)
        killed, failed = killed + (verdict is None), failed + (verdict is not None)
        print(f"{m['name']:44} {verdict or 'killed'}  {time.monotonic() - start:.0f} s", flush=True)
    print(f"mutants: {killed} of {killed + failed} killed")
    print(f"{killed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
