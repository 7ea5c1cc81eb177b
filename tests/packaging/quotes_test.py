#!/usr/bin/env python3
"""What compare's page quotes of the kernels (examples/compare/steps.json) stands in the source: each text in exactly
one line. Of hybrid, whose lines are shown, every name has its words, and no name has words that no line needs."""
import json
import os
import pathlib
import re
import sys

sys.path.insert(0, os.environ["SRC"] + "/examples/compare")
from steps import quoted_line

LANGUAGE = set("const constexpr else float if for int return true typename Tensor".split())


def words(text):
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\b\d[\w.]*", "", text)))


def wrong(source, table):
    for kernel in sorted({name for step in table["steps"] for name, place in step.items() if isinstance(place, list)}):
        try:
            quoted = set()
            for file, *text in (step[kernel] for step in table["steps"] if kernel in step):
                quoted |= words(quoted_line((source / file).read_text().splitlines(), *text)[1])
            named = words(" ".join(n["name"] for n in table["names"]))
            assert kernel != "hybrid" or quoted - LANGUAGE <= named, f"no words for {sorted(quoted - LANGUAGE - named)}"
            assert kernel != "hybrid" or named <= quoted, f"words for what no line has: {sorted(named - quoted)}"
        except AssertionError as e:
            yield f"steps.json, {kernel}: {e}"


def main():
    source = pathlib.Path(os.environ["SRC"])
    text = (source / "examples/compare/steps.json").read_text()
    table = json.loads(text)
    found = list(wrong(source / "ops/hilbert", table))
    # The judge: a text that is gone, and a name too many, must be seen.
    first = next(step["cpu"] for step in table["steps"] if "cpu" in step)
    gone, more = json.loads(text), json.loads(text)
    next(step for step in gone["steps"] if "cpu" in step)["cpu"] = [first[0], "no such line"]
    more["names"].append({"name": "no_such_name"})
    for kernel, broken in (("cpu", gone), ("hybrid", more)):
        if not any(w.startswith(f"steps.json, {kernel}:") for w in wrong(source / "ops/hilbert", broken)):
            found.append("the judge overlooks what is not in the source")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
