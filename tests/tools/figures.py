#!/usr/bin/env python3
"""Writes the tables of README.md from the files in tests/bench/results, so that no figure is remembered.

    tests/tools/figures.py            rewrite what stands between the markers
    tests/tools/figures.py --check    exit 1 if that would change anything

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`; NAME.json is what `compare_gradients` wrote, with "date", "commit" and
"command" added by tests/tools/measure.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results"


def size(n):
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5 or unit == "GB":
            return f"{n:.3g} {unit}"
        n /= 1000


def table(name):
    r = json.loads((RESULTS / f"{name}.json").read_text())
    c, m = r["config"], r["machine"]
    said = {"dense": "dense, taped", "taped": "naive: the tape, op by op", "hybrid": "hybrid: fused forward, library products back", "fused": "fused both ways"}
    lines = ["| backward | forward | backward | keeps | peak | largest error of dq, dk, dv |", "|---|---:|---:|---:|---:|---:|"]
    for mode, x in r["modes"].items():
        error = max(x["error"][t]["max_abs"] for t in ("dq", "dk", "dv"))
        lines.append(f"| {said[mode]} | {x['forward_ms']:.3g} ms | {x['backward_ms']:.3g} ms | {size(x['saved_bytes'])} | {size(x['peak_bytes'])} | {error:.1e} |")
    device = m["devices"][-1 if c["device"] != "cpu" else 0]
    lines += ["", f"B {c['batch']}, L {c['length']}, {c['heads']} heads of {c['head_dim']}, {c['dtype']}, order {c['order']}, pattern {c['pattern']}, causal {c['causal']};",
              f"{device}, {m['threads']} threads, {m['isa']}; ceilings measured in the same run: {m['copy_gb_s']:.3g} GB/s copying, {m['gemm_gflop_s']:.3g} GFLOP/s multiplying.",
              f"`{r['command']}`, {r['date']}, commit {r['commit']}."]
    return "\n".join(lines)


def main():
    path = ROOT / "README.md"
    old = path.read_text()
    new = re.sub(r"(<!-- figures: (\S+) -->\n).*?(\n<!-- end -->)", lambda m: m[1] + table(m[2]) + m[3], old, flags=re.S)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
