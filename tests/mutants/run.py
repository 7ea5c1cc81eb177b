#!/usr/bin/env python3
"""Puts known bugs back, one at a time, and expects the tests to notice.

    tests/mutants/run.py [--build DIR] [--list | --check] [--every N] [--jobs J] [NAME ..]
    tests/mutants/run.py --gpu DIR [NAME ..]

mutants.txt lists them: a name, a file, the text to replace (once in that file, however it is broken into lines), its
replacement, and the tests that must fail; what `needs` names must stand in /proc/cpuinfo. The tree is copied, so the
working tree is never touched, and each job reuses a copy with its build directory: a mutant costs one compiled file and
a link. A mutant that survives, or no longer applies (chosen or not), is a failure. The last line counts.

Those that need `gpu` run with --gpu, where there is one, in the working tree and its build directory DIR: `objects`,
ninja's names, are all that is compiled anew, for one type and head dim, and kept aside meanwhile.
"""
import argparse
import concurrent.futures
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_mutants():
    """Blocks separated by blank lines; `key: value` lines, and a value may go on in lines that start with four
    spaces."""
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
            missing |= {"objects"} - entry.keys() if entry.get("needs") == "gpu" else set()
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
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True,
                           text=True).stdout
    for name in files.splitlines():
        source, copy = ROOT / name, target / name
        if not source.is_file():
            continue
        if copy.is_file() and copy.read_bytes() == source.read_bytes():
            continue  # keeps its time: nothing to recompile
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
        os.utime(copy)


def prepare(tree, binaries):
    """A copy with its tests compiled as .ci/run compiles its first lane, from whose compiler cache they come."""
    copy_tree(tree)
    if not (tree / "build/build.ninja").exists():
        subprocess.run(["meson", "setup", tree / "build", tree, "-Dcuda=disabled", "-Dwerror=true", "-Dexamples=false",
                        "-Dpython=disabled"], check=True, stdout=subprocess.DEVNULL)
    compile_tests(tree / "build", binaries)


def compile_tests(build, binaries):
    subprocess.run(["ninja", "-C", build] + [f"tests/{b}" for b in binaries], check=True, stdout=subprocess.DEVNULL)


def run_test(tree, test, build=None):
    binary, gtest_filter = test.split(maxsplit=1)
    command = [(build or tree / "build") / "tests" / binary, f"--gtest_filter={gtest_filter}", "--gtest_brief=1",
               "--gtest_fail_fast"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200 if build else 600,
                          env=os.environ | {"HILT_TEST_SCALE": "small", "SRC": str(tree)})


def verdict_on_gpu(mutant, build):
    """The same in the working tree, whose build knows of nothing: the source keeps its time, and the objects go."""
    path, objects = ROOT / mutant["file"], [build / name for name in mutant["objects"].split()]
    original, times = path.read_text(), path.stat()
    binary, aside = mutant["test"].split()[0], build / "mutants-aside"
    aside.mkdir(exist_ok=True)
    for o in objects:
        os.replace(o, aside / o.name)
    try:
        path.write_text(pattern_of(mutant["from"]).sub(lambda _: mutant["to"], original))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        compiled = subprocess.run(["ninja", "-C", build, f"tests/{binary}"], capture_output=True, text=True)
        if compiled.returncode:
            return "does not compile\n" + compiled.stdout[-1500:]
        run = run_test(ROOT, mutant["test"], build)
        ran = re.search(r"\[==========\] (\d+) tests? ", run.stdout)
        return None if run.returncode else f"survived {ran[1] if ran else 'no'} tests ({mutant['test']})"
    except subprocess.TimeoutExpired:
        return None  # a hang is noticed too
    finally:
        path.write_text(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        for o in objects:
            os.replace(aside / o.name, o)
            os.utime(o)  # newer than what was linked with the other one


def verdict_on(mutant, tree):
    """Nothing, if the tests notice it."""
    path = tree / mutant["file"]
    original = path.read_text()
    found = list(pattern_of(mutant["from"]).finditer(original))
    path.write_text(original[:found[0].start()] + mutant["to"] + original[found[0].end():])
    try:
        compiled = subprocess.run(["ninja", "-C", tree / "build", f"tests/{mutant['test'].split()[0]}"],
                                  capture_output=True, text=True)
        if compiled.returncode:
            return "does not compile\n" + compiled.stdout[-1500:]
        run = run_test(tree, mutant["test"])
        if run.returncode == 0:
            ran = re.search(r"\[==========\] (\d+) tests? ", run.stdout)
            return f"survived {ran[1] if ran else 'no'} tests ({mutant['test']})"
    except subprocess.TimeoutExpired:
        pass  # a hang is noticed too
    finally:
        path.write_text(original)
    return None


def failure(name, why):
    print(f"failed: {name}: " + "\n    ".join(why.rstrip().splitlines()), flush=True)


def main():
    cores = os.cpu_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build-mutants")
    parser.add_argument("--list", action="store_true", help="names and files, and nothing else")
    parser.add_argument("--check", action="store_true", help="only whether each text stands once")
    parser.add_argument("--every", type=int, default=1, metavar="N",
                        help="the first of every N, in the order of the file")
    parser.add_argument("--jobs", type=int, default=max(min(2, cores), cores // 3), metavar="J", help="so many at once")
    parser.add_argument("--gpu", type=pathlib.Path, metavar="DIR", help="those that need a GPU, in this build")
    parser.add_argument("names", nargs="*", help="these alone")
    args = parser.parse_args()
    every = read_mutants()
    unknown = set(args.names) - {m["name"] for m in every}
    if unknown:
        sys.exit(f"mutants: error: no mutant named {', '.join(sorted(unknown))}; see --list")
    chosen = [m for m in every if not args.names or m["name"] in args.names][::args.every]
    there = pathlib.Path("/proc/cpuinfo").read_text().split() + [None]
    if args.gpu:
        there, chosen = ["gpu"], [m for m in chosen if m.get("needs") == "gpu"]
    lacking = [m for m in chosen if m.get("needs") not in there]
    chosen = [m for m in chosen if m not in lacking]
    if args.list:
        for m in chosen:
            print(f"{m['name']:40} {m['file']}")
        return 0

    for m in lacking:
        print(f"left out: {m['name']}: this machine has no {m['needs']}")
    passed = failed = 0
    times = {m["name"]: len(pattern_of(m["from"]).findall((ROOT / m["file"]).read_text())) for m in every}
    for m in every:
        if times[m["name"]] != 1:
            failed += 1
            failure(m["name"], f"its text stands {times[m['name']]} times in {m['file']}")
    if args.check:
        print(f"{len(every) - failed} passed, {failed} failed, 0 skipped")
        return 1 if failed else 0

    chosen = [m for m in chosen if times[m["name"]] == 1]
    build = args.gpu and args.gpu.resolve()
    jobs = 1 if build else args.jobs
    trees = [ROOT] if build else [args.build.resolve() / str(job) for job in range(1, jobs + 1)]
    binaries = sorted({m["test"].split()[0] for m in chosen})
    if not build:
        prepare(trees[0], binaries)  # what this one compiles, the others find in the cache
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda tree: prepare(tree, binaries), trees[1:]))
    free = queue.Queue()
    for tree in trees:
        free.put(tree)

    def try_one(mutant):
        tree, start = free.get(), time.monotonic()
        try:
            verdict = verdict_on_gpu(mutant, build) if build else verdict_on(mutant, tree)
            return mutant, verdict, time.monotonic() - start
        finally:
            free.put(tree)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # A test that fails anyway would kill everything.
        tests = sorted({m["test"] for m in chosen})
        for test, run in zip(tests, pool.map(lambda test: run_test(trees[0], test, build), tests)):
            if run.returncode or " 0 tests" in run.stdout:
                failed += 1
                failure(test, "must run and pass without a mutant\n" + (run.stdout + run.stderr)[-1500:])
                chosen = [m for m in chosen if m["test"] != test]
        for mutant, verdict, seconds in pool.map(try_one, chosen):
            passed, failed = passed + (verdict is None), failed + (verdict is not None)
            if verdict:
                failure(mutant["name"], verdict)
            else:
                print(f"{mutant['name']:44} killed  {seconds:.0f} s", flush=True)
    if build:  # without mutants, as it was
        compile_tests(build, binaries)
    print(f"{passed} passed, {failed} failed, {len(lacking)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
