#!/usr/bin/env python3
"""Writes the tables of README.md from the files in tests/bench/results, so that no figure is remembered.

    tests/tools/figures.py            rewrite what stands between the markers
    tests/tools/figures.py --check    exit 1 if that would change anything

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`. NAME.json is what `compare_gradients` wrote, with "date", "commit" and
"command" added by tests/tools/measure; NAME.jsonl is the lane of tests/tools/gpu_lane.
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


def lane(name):
    figures = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    first, ms, floor = figures[0], {}, {}
    for f in figures:
        if "ms" in f and f.get("length") == 65536:
            key = (f["pattern"], f["dim"], f["pass"])
            ms[key + (f["order"], f["figure"] == "peer")] = f["ms"]
            if "floor_ms" in f:
                floor[key] = f["floor_ms"]
    lines = ["| pattern, head dim | Hilt, Hilbert order | Hilt, storage order | PyTorch, Hilbert order | PyTorch, storage order | floor |", "|---|---:|---:|---:|---:|---:|"]
    for pattern, dim in dict.fromkeys((p, d) for p, d, _, _, peer in ms if not peer):
        both = lambda *at: " / ".join(f"{ms[(pattern, dim, x) + at]:.3g}" for x in ("forward", "backward"))
        least = " / ".join(f"{floor[(pattern, dim, x)]:.3g}" for x in ("forward", "backward"))
        lines.append(f"| `{pattern}`, {dim} | {both('hilbert', False)} | {both('row', False)} | {both('hilbert', True)} | {both('row', True)} | {least} |")
    lines += ["", "Milliseconds forward / backward, bf16, one sequence of 65,536 tokens (a 256 x 256 grid), 16 heads. Hilt gathers rows inside its kernels; PyTorch gathers, runs cuDNN, and scatters."
              " Floor: bytes at the measured copy rate, or products at 716 TFLOP/s.",
              f"`tests/tools/gpu_lane`, {first['device']}, driver {first['driver']}, {first['date'][:10]}, commit {first['commit']}."]
    return "\n".join(lines)


def table(name):
    if (RESULTS / f"{name}.jsonl").exists():
        return lane(name)
    r = json.loads((RESULTS / f"{name}.json").read_text())
    c, m = r["config"], r["machine"]
    said = {"dense": "dense, taped", "taped": "naive: the tape, op by op", "hybrid": "hybrid: fused forward, library products back", "fused": "fused both ways"}
    lines = ["| gradient by | forward | backward | keeps | peak | largest error of dq, dk, dv |", "|---|---:|---:|---:|---:|---:|"]
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
    new = re.sub(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", lambda m: m[1] + table(m[2]) + "\n" + m[3], old, flags=re.S)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
