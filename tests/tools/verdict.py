#!/usr/bin/env python3
"""What a run of the tests comes to: which programs it needs, what failed with its last lines, what was left out,
seconds, counts.

    verdict.py targets BUILD [programs]    what ninja must make for the tests (or for ./run build), one a line
    verdict.py choose BUILD WORD ..        the arguments of `./run test` as those of meson, one a line, and a filter of
                                           cases
    verdict.py read LANE BUILD             meson's log and GoogleTest's files of BUILD, written as LANE's record
    verdict.py stopped LANE LOG            the record of a lane that did not come to its tests
    verdict.py counted LANE LOG            the record of a lane whose log ends with its own count, `N passed, N failed,
                                           N skipped`; its lines `failed: NAME: WHY` and `left out: NAME: WHY` say which
    verdict.py left-out LANE WHY           the record of a lane that was not begun
    verdict.py show [PIECE]                every record; exit status 1 if anything failed, or nothing passed; of a piece
                                           of the second tier a line in tests/bench/results/deep.jsonl too

A record is a file in the directory HILT_VERDICTS. A script is one test; a GoogleTest binary is its cases, and one
failure more where it ended badly without a failed case to show for it: a crash, a time-out, a sanitizer's report.
"""
import datetime
import html
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
TAIL = 20  # lines of a failure's output


def records():
    return pathlib.Path(os.environ["HILT_VERDICTS"])


def write(lane, passed=0, failed=(), left_out=(), skipped=0, build=0.0, tests=0.0):
    """`failed` are names with output; `left_out` are names with reasons."""
    path = records() / f"{time.time_ns()}.json"
    path.write_text(json.dumps({"lane": lane, "passed": passed, "failed": [[n, o] for n, o in failed],
                                "left_out": [[n, w] for n, w in left_out], "skipped": skipped, "build": build,
                                "tests": tests}))


def since_begun():
    """Seconds since the run began, whose moment HILT_BEGUN is; 0 where nobody says when."""
    return time.time() - float(os.environ.get("HILT_BEGUN", time.time()))


def last_lines(text):
    return "\n".join(text.strip("\n").rstrip().splitlines()[-TAIL:])


# ---- meson ------------------------------------------------------------------------------------------
def introspect(build, what):
    return json.loads((build / f"meson-info/intro-{what}.json").read_text())


def chosen(test, flags):
    """Whether `meson test` runs it, by the names and --suite flags that it is given."""
    suites = {s.split(":")[-1] for s in test["suite"]}
    asked, refused = ({f.split("=")[1] for f in flags if f.startswith(flag)} for flag in ("--suite=", "--no-suite="))
    names = [f for f in flags if not f.startswith("-")]
    return not suites & refused and (not asked or suites & asked) and (not names or test["name"] in names)


def targets(build, flags):
    there = introspect(build, "targets")
    if flags == ["programs"]:
        wanted = [t for t in there if t["build_by_default"]]
    else:
        needs = {d for test in introspect(build, "tests") if chosen(test, flags) for d in test["depends"]}
        wanted = [t for t in there if t["id"] in needs]
    return list(dict.fromkeys(os.path.relpath(name, build.resolve()) for t in wanted for name in t["filename"]))


def choose(build, words):
    """A word is a flag of meson, `quick`, a test, a binary cut into several tests, or else a filter of cases."""
    names = [t["name"] for t in introspect(build, "tests")]
    flags, filters = [], []
    for word in words:
        these = [n for n in names if n == word or re.fullmatch(re.escape(word) + r"_\d+", n)]
        if word.startswith("-"):
            flags.append(word)
        elif word == "quick":
            flags.append("--suite=quick")
        elif these:
            flags += these
        else:
            filters.append(word if "*" in word or "?" in word else f"*{word}*")
    return flags + (["--suite=gtest"] if filters else []), ":".join(filters)


# ---- reading ----------------------------------------------------------------------------------------
def said_by_case(output):
    """What each case of a GoogleTest binary printed, and the case that never ended, if any."""
    parts = re.split(r"^\[ RUN      \] (\S+)$", re.sub(r"\x1b\[[0-9;]*m", "", output), flags=re.M)
    said, open_case = {}, None
    for case, text in zip(parts[1::2], parts[2::2]):
        said[case], *end = re.split(r"^\[(?:       OK |  FAILED  |  SKIPPED )\]", text, maxsplit=1, flags=re.M)
        open_case = None if end else case
    return said, open_case


def why(entry):
    if entry["result"] == "TIMEOUT":
        return "timed out"
    code = entry.get("returncode", 0)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def read(lane, build):
    passed = skipped = 0
    failed, left_out = [], {}
    log = [json.loads(line) for line in (build / "meson-logs/testlog.json").read_text().splitlines()]
    for entry in log:
        suites, name = re.fullmatch(r"(.*?)(?: / | - [^:]*:)(.*)", entry["name"]).groups()  # older and newer Meson
        result = entry["result"]
        printed = entry.get("stdout", "") + entry.get("stderr", "")
        said, open_case = said_by_case(printed)
        bad = cases = 0
        xml = build / f"{name}.xml"
        for case in ElementTree.parse(xml).iter("testcase") if xml.exists() else ():
            cases += 1
            case_name = f"{case.get('classname')}.{case.get('name')}"
            failures, reason = case.findall("failure"), case.find("skipped")
            if failures:
                bad += 1
                messages = "\n".join(f.get("message", "") for f in failures)
                failed.append((f"{name}: {case_name}", last_lines(said.get(case_name) or messages)))
            elif case.get("result") in ("skipped", "suppressed"):
                skipped += 1
                reason = "disabled" if reason is None else html.unescape(reason.get("message", ""))
                left_out.setdefault(reason.strip().splitlines()[-1], []).append(case_name)
            else:
                passed += 1
        if result == "SKIP" and not cases:
            skipped += 1
            reason = last_lines(printed).splitlines()[-1] if printed.strip() else "it does not say why"
            left_out.setdefault(reason, []).append(name)
        elif result in ("OK", "SKIP"):
            passed += "gtest" not in suites
        elif not bad:
            where = f" in {open_case}" if open_case else ""
            failed.append((f"{name}: {why(entry)}{where}", last_lines(said.get(open_case, printed))))
    begun = min((e["starttime"] for e in log), default=time.time())
    ended = max((e["starttime"] + e["duration"] for e in log), default=begun)
    several = lambda names: ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    write(lane, passed, failed, [(several(names), reason) for reason, names in left_out.items()], skipped,
          max(0.0, begun - float(os.environ.get("HILT_BEGUN", begun))), ended - begun)


def counted(lane, printed):
    count = re.fullmatch(r"(\d+) passed, (\d+) failed, (\d+) skipped", (printed.rstrip().splitlines() or [""])[-1])
    passed, failures, skipped = (int(n) for n in count.groups()) if count else (0, 0, 0)
    said = re.findall(r"^failed: ([^:\n]+): ?(.*(?:\n    .*)*)", printed, re.M)
    failed = [(name, text.replace("\n    ", "\n")) for name, text in said]
    if not count or failures > 0 and not failed:
        failed.append(("ended without a count" if not count else f"{failures} failed", last_lines(printed)))
    left_out = re.findall(r"^left out: ([^:\n]+): (.*)", printed, re.M)
    write(lane, passed, failed, left_out, skipped, tests=since_begun())


# ---- showing ----------------------------------------------------------------------------------------
def show(piece=None):
    lanes = [json.loads(path.read_text()) for path in sorted(records().glob("*.json"))]
    for lane in lanes:
        for name, output in lane["failed"]:
            print(f"\nfailed: {lane['lane']}: {name}")
            print("\n".join("    " + line for line in output.splitlines()))
    print()
    for lane in lanes:
        for name, reason in lane["left_out"]:
            print(f"left out: {lane['lane']}: {name}: {reason}")
    print(f"\n{'lane':<12}{'build s':>9}{'tests s':>9}{'passed':>9}{'failed':>9}{'skipped':>9}")
    for lane in lanes:
        print(f"{lane['lane']:<12}{lane['build']:>9.0f}{lane['tests']:>9.0f}{lane['passed']:>9}"
              f"{len(lane['failed']):>9}{lane['skipped']:>9}")
    passed, skipped = sum(x["passed"] for x in lanes), sum(x["skipped"] for x in lanes)
    failed = sum(len(x["failed"]) for x in lanes)
    if piece or os.environ.get("HILT_RECORD"):
        note(piece, [{"lane": x["lane"], "build": round(x["build"]), "tests": round(x["tests"]),
                      "passed": x["passed"], "failed": len(x["failed"]), "skipped": x["skipped"]} for x in lanes
                     if not x["left_out"] or x["passed"] or x["failed"] or x["skipped"]])
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


def note(piece, lanes):
    """One line of tests/bench/results/: deep.jsonl for a piece of the second tier, ci.jsonl for the first, which
    HILT_RECORD names."""
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
    model = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    line = {"what": piece or os.environ["HILT_RECORD"], "date": datetime.date.today().isoformat(),
            "commit": git("rev-parse", "--short", "HEAD") + changed,
            "machine": f"{os.cpu_count()} x {model.group(1) if model else platform.machine()}", "lanes": lanes}
    with open(ROOT / "tests/bench/results" / ("deep.jsonl" if piece else "ci.jsonl"), "a") as out:
        out.write(json.dumps(line) + "\n")


def main(word, *rest):
    if word == "targets":
        print("\n".join(targets(pathlib.Path(rest[0]), list(rest[1:]))))
    elif word == "choose":
        flags, cases = choose(pathlib.Path(rest[0]), rest[1:])
        print("\n".join([cases] + flags))
    elif word == "read":
        read(rest[0], pathlib.Path(rest[1]))
    elif word == "stopped":
        printed = pathlib.Path(rest[1]).read_text(errors="replace")
        write(rest[0], failed=[("it did not come to its tests", last_lines(printed))], build=since_begun())
    elif word == "counted":
        counted(rest[0], pathlib.Path(rest[1]).read_text(errors="replace"))
    elif word == "left-out":
        write(rest[0], left_out=[("all of it", rest[1])])
    elif word == "show":
        return show(*rest)
    else:
        sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
