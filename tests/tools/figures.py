#!/usr/bin/env python3
"""Writes the tables of four READMEs and of names.md from the files in tests/bench/results.

    tests/tools/figures.py            rewrite what stands between the markers
    tests/tools/figures.py --check    exit 1 if that would change anything

A table stands between `<!-- figures: NAME -->` and `<!-- end -->`. NAME.json is what `compare_gradients` wrote, with
"date", "commit" and "command" added by tests/tools/measure; NAME.jsonl is the lane of tests/tools/gpu_lane.
"""
import json
import math
import pathlib
import re
import statistics
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results"


def size(n):
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5 or unit == "GB":
            return f"{n:.3g} {unit}"
        n /= 1000


def speed(pairs, who):
    """Our time and another's, of some problems: who is faster, and from how many times to how many."""
    found = sorted(b / a for a, b in pairs)
    word = "faster than" if found[0] >= 1 else "slower than" if found[-1] < 1 else "beside"
    return f"{word} {who} ({found[0]:.3g} to {found[-1]:.3g} x)"


def stamp(command, f):
    return f"`{command}`, {f['device']}, {f['date'][:10]}, commit {f['commit']}."


def programs(figures):
    """The three modes as compare_gradients, the benchmark of attention and train show them on a GPU."""
    lines = ["| attention | gradient by | forward, ms | backward, ms | keeps beyond q, k, v, o | peak beyond q, k, v, "
             "dO |", "|---|---|---:|---:|---:|---:|"]
    errors, first = [], 0
    for figure in ("compare", "modes"):
        some = [f for f in figures if f.get("figure") == figure]
        first += all(min(some, key=lambda f: (f[x], f["mode"] != "fused"))["mode"] == "fused"
                     for x in ("forward_ms", "backward_ms", "beyond_bytes", "peak_bytes"))
        what = (f"{some[0]['batch']} x {some[0]['length']} tokens, {some[0]['heads']} heads of {some[0]['dim']}, "
                f"`{some[0]['pattern']}`")
        for f in some:
            lines.append(f"| {what} | {f['mode']} | {f['forward_ms']:.3g} | {f['backward_ms']:.3g} | "
                         f"{size(max(0, f['beyond_bytes']))} | {size(f['peak_bytes'])} |")
            what = ""
        f = some[0]
        numbers, keys = (f["batch"] * f["length"] * f["heads"] * f["dim"],
                         f["length"] if f["pattern"] == "dense" else int(f["pattern"].split(":")[1]))
        floor = lambda tensors, products: 1e3 * max(tensors * numbers * 2 / 4.26e12,
                                                    products * 4 * numbers * keys / 716e12)
        lines.append(f"| | floor | {floor(4, 1):.3g} | {floor(8, 2.5):.3g} | | |")
        errors.append("/".join(f"{f.get('error', f.get('relative_error')):.1e}" for f in some))
    lines += ["", f"bf16, Hilbert order. Floor: bytes at 4.26 TB/s, or products at 716 TFLOP/s. Largest error of dq, "
                  f"dk, dv, taped/hybrid/fused, against exact loops: {errors[0]}; relative to f32: {errors[1]}.",
              "", "| gradient by | a step of training | peak | tokens a second |", "|---|---:|---:|---:|"]
    train = [f for f in figures if f.get("figure") == "train"]
    for f in train:
        lines.append(f"| {f['backward']} | {f['ms']:.3g} ms | {size(f['bytes'])} | {f['tokens_per_s']:,.0f} |")
    fastest = min(train, key=lambda f: f["ms"])["backward"]
    return "\n".join([f"Fused is fastest both ways, keeps least and peaks lowest in {first} of 2; training is fastest "
                      f"by {fastest}.", "", *lines, "", f"{train[0]['what']}.",
                      stamp("tests/tools/gpu_lane build bench programs", train[0])])


def steps(figures):
    """Whole training steps beside PyTorch's."""
    named = {"char": "6 x 384, 64 x 256 tokens", "gpt2": "GPT-2 124M, 32 x 1024 tokens"}
    by = {}
    for f in figures:
        if f.get("figure") == "train_step":
            mine, who = by.setdefault(f["model"], {}), "Hilt" if f["who"] == "hilt" else f["who"].split()[-1]
            mine[who] = min(mine.get(who, f), f, key=lambda x: x["ms"])  # of several runs the faster
    over = lambda who: speed(((f["Hilt"]["ms"], f[who]["ms"]) for f in by.values()), who)
    lines = [f"Hilt is {over('eager')} and {over('compiled')}.", "",
             "| model | Hilt | PyTorch, eager | PyTorch, compiled |", "|---|---:|---:|---:|"]
    for model, f in by.items():
        cell = lambda who: f"{f[who]['tokens_per_s']:,.0f} ({f[who]['ms']:.3g} ms, {size(f[who]['peak_bytes'])})"
        lines.append(f"| {named[model]} | {cell('Hilt')} | {cell('eager')} | {cell('compiled')} |")
    one = next(f for f in figures if f.get("figure") == "train_step")
    peer = next(f for f in figures if f.get("figure") == "train_step" and f["who"] != "hilt")["who"].rsplit(" ", 1)[0]
    return "\n".join(lines + ["", f"Tokens a second, causal dense, bf16: ours with f32 masters, {peer} with autocast "
                                  f"and fused AdamW. From batch to updated weights, the norm of the gradient clipped. "
                                  f"Of several runs the faster.",
                              stamp("tests/tools/gpu_lane build steps", one)])


def ring(figures):
    lines = ["| pattern, tokens | 1 GPU | 2 GPUs | 4 GPUs | a GPU of 4 sends | its peak |",
             "|---|---:|---:|---:|---:|---:|"]
    best = {}
    for f in figures:
        if (f.get("gpus_there") == 4 and f.get("figure", "").startswith("ring_") and "bytes_sent" in f
            and "variant" not in f):
            best.setdefault((f["figure"], f["length"], f["pattern"]), {}).setdefault(f["gpus"], f)
    for (_, length, pattern), by in best.items():
        first = by[min(by)]
        name = f"{'causal ' if first['causal'] != 'none' else ''}`{pattern}`, {length:,}"
        cell = lambda n: f"{by[n]['ms']:.4g}" + (f" ({by[1]['ms'] / by[n]['ms'] / n:.2f})" if n > 1 and 1 in by
                                                 else "") if n in by else ""
        sent, peak = by[4]["bytes_sent"], by[4].get("peak_bytes_a_gpu", by[4].get("peak_bytes"))
        lines.append(f"| {name} | {cell(1)} | {cell(2)} | {cell(4)} | "
                     f"{size(max(sent) if isinstance(sent, list) else sent)} | "
                     f"{size(max(peak) if isinstance(peak, list) else peak)} |")
    times = lambda length, by: "/".join(f"{f['ms']:.4g}" for n in (2, 4) for f in figures
                                            if f.get("who", "").endswith("context parallel, " + by)
                                            and (f["length"], f["gpus"]) == (length, n))
    beside = ["PyTorch's context parallelism on 2/4 of them, causal, 65,536 and 131,072 tokens: by " + "; by ".join(
        f"{name} {times(65536, by)} and {times(131072, by)}"
        for by, name in (("flash", "FlashAttention"), ("cudnn", "cuDNN"))) + "."]
    ours = {f["length"]: f["ms"] for f in figures
            if f.get("figure") == "ring_causal" and f.get("gpus") == 4 and "who" not in f}
    peer = lambda by: [(ours[n], next(f["ms"] for f in figures if f.get("who", "").endswith(f"parallel, {by}")
                                      and (f["length"], f["gpus"]) == (n, 4))) for n in (65536, 131072)]
    lines = [f"On 4 GPUs, causal, Hilt is {speed(peer('flash'), 'PyTorch by FlashAttention')}, "
             f"{speed(peer('cudnn'), 'by cuDNN')}.", "", *lines]
    two = [json.loads(line) for line in (RESULTS / "h100_ring.jsonl").read_text().splitlines()]
    at = lambda length, who="": next(f["ms"] for f in two
                                     if (f["length"], f["gpus"], f["figure"]) == (length, 2, "ring_causal")
                                     and f.get("who", "").endswith(who) and bool(who) == ("who" in f))
    beside.append(f"On two H100s ({two[0]['date'][:10]}, commit {two[0]['commit']}) the same: "
                  f"{at(65536):.4g} and {at(131072):.4g}; PyTorch "
                  + "; ".join(f"by {name} {at(65536, by):.4g} and {at(131072, by):.4g}"
                              for by, name in (("flash", "FlashAttention"), ("cudnn", "cuDNN"))) + ".")
    return "\n".join(lines + ["", "16 heads of 128, bf16, milliseconds of forward and backward; in brackets one GPU's "
                                  "time over ours times their number."] + beside
                                  + [stamp("tests/tools/gpu_lane build ring ring_peer",
                                           next(f for f in figures if f.get("figure") == "ring_causal"
                                                and f["gpus"] == 4))])


def both(f, what="_ms"):
    return f"{f['forward' + what]:.3g}/{f['backward' + what]:.3g}"


def newest(figures, library=None):
    """The named problems as the last commit that measured them did, by their options; or those of a peer."""
    found = [f for f in figures if f["figure"].startswith("named") and f.get("library") == library]
    return {f["problem"]: f for f in found if f["commit"] == found[-1]["commit"]}


def sweep(figures):
    """The named problems on an H100 beside peers, and the draw on an H200."""
    now = [json.loads(line) for line in (RESULTS / "h100_named.jsonl").read_text().splitlines()]
    here, cudnn, flash = newest(now), newest(now, "cudnn"), newest(now, "fa4")
    lines = ["| batch x tokens x heads x dims, order but `row`, pattern | Hilt (floor) | cuDNN | FlashAttention-4 |",
             "|---|---:|---:|---:|"]
    for problem in (RESULTS.parent / "named_problems.txt").read_text().splitlines():
        word, f = dict(zip(*[iter(problem.split())] * 2)), here[problem]
        causal = ", causal" if word["--causal"] == "token" else ""
        order = "" if word["--order"] == "row" else f"`{word['--order']}`, "
        peers = [both(x[problem]) if problem in x else "" for x in (cudnn, flash)]
        if problem in flash:
            peers[1] += f"/{flash[problem]['ordered_ms']:.3g}"
        lines.append(f"| {word['--batch']}x{int(word['--length']):,}x{word['--heads']}x{word['--head-dim']}, "
                     f"{order}`{word['--pattern']}`{causal} | {both(f)} ({both(f, '_floor_ms')}) | "
                     f"{' | '.join(peers)} |")
    over = lambda x: sorted(f[x + "_ms"] / f[x + "_floor_ms"] for f in here.values())
    far = lambda i: "/".join(f"{over(x)[i]:.3g}" for x in ("forward", "backward"))
    ahead = lambda peer, way, its: sum(here[p][way] <= x[its] for p, x in peer.items())
    lines = [f"Over its floor Hilt takes {far(len(here) // 2)} x at the median, {far(-1)} x at most. It is as fast as "
             f"cuDNN in {ahead(cudnn, 'forward_ms', 'forward_ms')} of {len(cudnn)} forward, "
             f"{ahead(cudnn, 'backward_ms', 'backward_ms')} backward. As FlashAttention-4 it is in "
             f"{ahead(flash, 'forward_ms', 'forward_ms')} of {len(flash)} forward, "
             f"{ahead(flash, 'backward_ms', 'backward_ms')} backward, {ahead(flash, 'backward_ms', 'ordered_ms')} in a "
             "fixed order, which Hilt's is.", "", *lines]
    summary = next(f for f in figures if f["figure"] == "sweep_summary")
    ratios = lambda way: "/".join(f"{summary[way][p]:.3g}" for p in ("p50", "p90", "p95", "worst"))
    command = "hilt_gpu_attention sweep --problems tests/bench/named_problems.txt"
    lines += ["", "Milliseconds forward/backward, medians of three; FlashAttention-4 backward in any order, and in a "
              "fixed one. Peers have segments in storage order (`tests/bench/peers/named.py`).",
              stamp(command, now[-1]), "",
              f"{summary['problems']} problems drawn on the H200 at {summary['commit']} (`{summary['arguments']}`, "
              f"{summary['failed']} failed) over their floors, median/90th/95th percentile/worst: forward "
              f"{ratios('forward')}, backward {ratios('backward')}."]
    return "\n".join(lines)


def python(figures):
    """hilt.attention beside other libraries from Python, what a call costs, and a model with one line swapped."""
    rows = {}
    for f in figures:
        if f["figure"] == "python" and "error" in f:
            rows.setdefault(f["problem"], {})[f["library"]] = f
    who = ("hilt", "flex_attention", "SDPA")
    lines = ["| | " + " | ".join(who) + " | peak, MB | error | plan or mask, ms |", "|---|" + "---:|" * 6]
    for problem, by in rows.items():
        time = lambda f: both(f) if f else ""
        each = lambda text: "/".join(text(by[w]) for w in who if w in by)
        lines.append(f"| {problem} | " + " | ".join(time(by.get(w)) for w in who)
                     + f" | {each(lambda f: format(f['bytes'] / 1e6, '.0f'))} | "
                       f"{each(lambda f: format(f['error'], '.1e'))} | "
                     f"{each(lambda f: format(f['made_ms'], '.3g'))} |")
    best = {p: min(by, key=lambda w: by[w]["forward_ms"] + by[w]["backward_ms"])
            for p, by in rows.items() if len(by) > 1}
    lost = "; ".join(f"{p}: {w}" for p, w in best.items() if w != "hilt")
    lines = [f"Hilt is fastest in {list(best.values()).count('hilt')} of {len(best)} sets ({lost}).", "", *lines]
    calls = {(f["who"], f["pass"]): f for f in figures if f["figure"] == "python_call"}
    cost = ". ".join(f"{w}: " + ", ".join(f"{p} {calls[w, p]['us']:.0f} us (kernels {calls[w, p]['kernels_us']:.0f})"
                                          for p in ("forward", "forward + backward")) for w in ("hilt, plan=", "SDPA"))
    gpt = [f for f in figures if f["figure"] == "python_gpt"]
    of = lambda who, text: "/".join(text(f) for f in gpt if f["who"] == who)
    told = ". ".join(f"{who}: {of(who, lambda f: format(f['loss']['500'], '.3f'))} at "
                     f"{of(who, lambda f: format(f['tokens_per_s'] / 1e6, '.2f'))} M"
                     for who in dict.fromkeys(f["who"] for f in gpt))
    first = next(f for f in figures if f["figure"] == "python")
    return "\n".join(lines + ["", f"Milliseconds forward/backward, bf16. A call of 256 tokens, 2 heads of 64 (commit "
                                  f"{next(iter(calls.values()))['commit']}). {cost}.",
                              f"{gpt[0]['what'][0].upper()}{gpt[0]['what'][1:]} (commit {gpt[0]['commit']}). Loss of "
                              f"steps 481 to 500 at tokens a second, by seed: {told}.",
                              stamp("tests/bench/peers/python_attention.py", first)])


def cpu_sweep(figures):
    """By family of patterns, of the last commit: how a pair compares with one of dense attention."""
    by = {}
    for f in figures:
        by.setdefault(f["commit"], []).append(f)
    now = list(by)[-1]

    def family(f):
        pattern = f["problem"].split("--pattern ")[1].split()[0]
        return ("sums of dilated segments" if "+" in pattern else "dilated segments" if "dilation" in pattern
                else f"`{pattern.split(':')[0]}`")

    def cell(chosen, ratio):
        x = sorted(f.get(ratio, math.inf) for f in problems if chosen(f))
        return "/".join(f"{x[min(len(x) - 1, int(q * len(x)))]:.3g}" for q in (0.5, 0.9, 0.95, 1))

    problems = [f for f in by[now] if f["figure"] == "sweep"]
    few = lambda f: f.get("keys", 0) < 16
    groups = [(name, lambda f, name=name: family(f) == name)
              for name in sorted({family(f) for f in problems}, key=lambda x: x.strip("`"))]
    groups += [("all, 16 keys a query or more", lambda f: not few(f)), ("all, fewer keys", few),
               ("all", lambda f: True)]
    worst = max(problems, key=lambda f: f.get("ratio", math.inf))
    middle = sorted(f["ratio"] for f in problems)[len(problems) // 2]
    lines = [f"A pair takes {middle:.3g} x as long as a dense one at the median; worst are {family(worst)}.", "",
             "| problems | how many | over dense | over the floor |", "|---|---:|---:|---:|"]
    for name, chosen in groups:
        cells = " | ".join(cell(chosen, ratio) for ratio in ("ratio", "floor_ratio"))
        lines.append(f"| {name} | {sum(map(chosen, problems))} | {cells} |")
    rates = next(f for f in by[now] if f["figure"] == "rates")
    summary = next(f for f in by[now] if f["figure"] == "sweep_summary")
    error = max(f.get("relative_error", 0) for f in problems)
    lines += ["", "Median/90th/95th percentile/worst of a pair's time, forward and backward. "
              f"f32, {rates['threads']} "
              f"thread{'s' if rates['threads'] > 1 else ''};"
              f" the floor's bytes at {rates['copy'] / 1e9:.0f} GB/s. {summary['failed']} failed; the largest "
              f"relative error against f64"
              f" was {error:.1e}.",
              f"`{summary['command']}`, {rates['machine']}, {summary['date']}, commit {now}."]
    return "\n".join(lines)


def cpu_attention(figures):
    """Ours and PyTorch's, a problem a line; then training steps."""
    by, first = {}, figures[0]
    for f in figures:
        by.setdefault(f["problem"], {})[f["library"]] = f
    libraries = list(next(iter(by.values())))
    each = [(of[a][n], of[b][n]) for of in by.values() for a, b in zip(libraries[::2], libraries[1::2])
            for n in ("forward_ms", "backward_ms", "processors_ms") if n in of[a]]
    lines = [f"Hilt is {speed(each, 'PyTorch')}.", "",
             "| | " + " | ".join(libraries) + " |", "|---|" + "---:|" * len(libraries)]
    for problem, of in by.items():
        cells = ("/".join(f"{of[x][n]:,.0f}" if of[x][n] > 999 else f"{of[x][n]:.3g}"
                          for n in ("forward_ms", "backward_ms", "processors_ms") if n in of[x]) for x in libraries)
        lines.append(f"| {problem} | " + " | ".join(cells) + " |")
    threads = f"{first['threads']} thread{'s' if first['threads'] > 1 else ''}"
    clock = "Processor time: other programs ran meanwhile." if first["busy"] else "Wall time."
    rounds = " and ".join(dict.fromkeys(str(f["rounds"]) for f in figures if f["figure"] == "cpu_step"))
    how = (f"Milliseconds forward/backward, the least of {first['rounds']} runs in turn, 4 heads of 64, {threads}. "
           f"{clock} PyTorch {first['torch']}, eager. Steps ({rounds} rounds): layers x width, bf16 with f32 masters "
           f"beside autocast; by `tests/bench/peers/train_bench.py --beside build --threads 1`.")
    return "\n".join(lines + ["", how,
                              f"`tests/bench/peers/cpu_attention.py build{' --busy' if first['busy'] else ''}`, "
                              f"{first['machine']}, {first['date']}, commit {first['commit']}."])


def plans(figures):
    """What stands before a kernel, on the host; sets that differ in order or causality share a row."""
    by, first = {}, figures[0]
    given = [f for f in figures[1:-1] if "ratio" in f]
    for f in figures[1:-1]:
        name, *variant = f["set"].split(", ")
        if f in given:
            continue
        by.setdefault(f"{name}, `{f['pattern']}`", []).append((" ".join(variant), f))
    text = lambda ms: f"{ms:.2g}" if ms < 100 else f"{ms:.0f}"
    cell = lambda sets, *keys: "/".join(text(sum(f[key] for key in keys)) for _, f in sets if keys[-1] in f)
    lines = ["| | GPU | CPU |", "|---|---:|---:|"]
    for name, sets in by.items():
        said = "/".join(variant for variant, _ in sets if variant)
        lines.append(f"| {name}{', ' + said if said else ''} | {cell(sets, 'plan_ms', 'visits_ms', 'short_ms')} | "
                     f"{cell(sets, 'plan_ms', 'cpu_ms')} |")
    patterns, whats = (list(dict.fromkeys(of(f) for f in given))
                       for of in (lambda f: f["pattern"], lambda f: f["set"].split(", ")[1]))
    ratios = ", ".join("/".join(text(f["ratio"]) for f in given if f["pattern"] == p) for p in patterns)
    lines.append(f"| given order, {'/'.join(whats)}: {', '.join(f'`{p}`' for p in patterns)} | | x {ratios} |")
    drawn = figures[-1]
    lines.append(f"| {drawn['count']} drawn, median/p95/worst | "
                 f"{'/'.join(text(drawn[key]) for key in ('median_ms', 'p95_ms', 'worst_ms'))} |  |")
    return "\n".join(lines + ["", "Milliseconds of one thread, medians.",
                              f"`{first['command']}`, {first['machine']}, {first['date']}, commit {first['commit']}."])


def seeds(figures):
    """How far above the entropy the default training ends."""
    first, by = figures[0], {}
    for f in figures[1:]:
        by.setdefault(f["isa"], []).append(f["above_percent"])
    middle = ", ".join(f"{isa} {statistics.median(above):g}" for isa, above in by.items())
    seeds, most = min(len(x) for x in by.values()), max(sum(by.values(), []))
    return "\n".join([f"{seeds} seeds each end at most {most:g} % above the entropy of their grammar, on held-out "
                      f"stories; medians: {middle}.",
                      f"`{first['command']}`, {first['machine']}, {first['date']}, commit {first['commit']}."])


def ci(figures):
    """Lane by lane, a column each run."""
    lanes = [lane["lane"] for lane in figures[-1]["lanes"]]
    lines = ["| lane | " + " | ".join(f"{f['what']}, {f['commit']}" for f in figures) + " |",
             "|---|" + "---:|" * len(figures)]
    for name in lanes:
        there = [next((x for x in f["lanes"] if x["lane"] == name), None) for f in figures]
        lines.append(f"| {name} | " + " | ".join(f"{x['build']}+{x['tests']}" if x else "" for x in there) + " |")
    total = [sum(x["build"] + x["tests"] for x in f["lanes"]) for f in figures]
    lines.append("| all, minutes | " + " | ".join(f"{t / 60:.0f}" for t in total) + " |")
    counts = ["/".join(f"{sum(x[k] for x in f['lanes']):,}" for k in ("passed", "failed", "skipped")) for f in figures]
    lines.append("| passed/failed/skipped | " + " | ".join(counts) + " |")
    machines = "; ".join(dict.fromkeys(f["machine"] for f in figures))
    return "\n".join(lines + ["", f"Seconds of compiling+testing on {machines}: "
                              + ", ".join(f["date"] for f in figures) + "."])


PIECES = {"fuzz": "20,000 configurations of attention, and every header",
          "default": "the default training on base instructions",
          "clocks": "errors within a second, failures within deadlines",
          "python": "the package by pip, the newest torch, Jupyter", "clang": "the tests by another compiler",
          "aarch64": "the tests under qemu", "cuda": "programs of a build for GPUs",
          "undefined": "every check of the undefined-behavior sanitizer",
          "hostile": "5,000 surroundings and each crash point", "long": "40 minutes of training with faults",
          "parsers": "a coverage-guided fuzzer", "mutants": "each known bug"}


def deep(figures):
    """The last run of each piece of the second tier."""
    last, lines = {f["what"]: f for f in figures}, []
    for piece, what in PIECES.items():
        f = last[piece]
        total = {k: sum(x[k] for x in f["lanes"]) for k in ("passed", "failed", "skipped", "build", "tests")}
        counts = "/".join(f"{total[k]:,}" for k in ("passed", "failed", "skipped"))
        lines.append(f"- `{piece}`: {what}. {f['date']}: {counts}, "
                     f"{(total['build'] + total['tests']) / 60:.0f} min")
    return "\n".join(lines)


def routes(figures):
    """Which kernels serve a kind of call on a GPU, and why no faster ones; calls that are served alike share a row."""
    calls = {}
    for f in figures:
        on = lambda gpu: "/".join(dict.fromkeys(r for _, r, _ in f[gpu]))
        others = [x for _, r, x in f["other"] if r == "plain" and x]
        calls.setdefault((on("hopper"), on("other"), "; ".join(dict.fromkeys(others))), []).append(f["call"])
    lines = ["| calls | Hopper | from sm_80 on | why not faster |", "|---|---|---|---|"]
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in calls.items()]
    return "\n".join(lines + ["", "Calls of bf16, 2 heads of 64, where they do not say otherwise."])


def names(figures):
    """The smallest model in Hilt and elsewhere, a name at a time."""
    said = {"fused": "Hilt, fused", "taped": "Hilt, taped", "token": "Hilt, by token", "scalar": "scalar tape"}
    lines = ["| | us | lowest | instructions | allocations | lines |", "|---|---:|---:|---:|---:|---:|"]
    calls, steps = ([f for f in figures if f["figure"] == kind] for kind in ("call", "step"))
    figures = [f for f in figures if f["figure"] == "names"]
    for f in figures:
        counted = lambda key: f"{f[key]:,.0f}" if key in f else ""
        us, lowest = (f"{f[key]:,.{0 if f[key] > 100 else 1}f}" for key in ("us", "lowest_us"))
        lines.append(f"| {said.get(f['library'], f['library'])} | {us} | {lowest} | "
                     f"{counted('instructions')} | {counted('allocations')} | {counted('lines')} |")
    first, losses = figures[0], sorted({f"{f['mean_loss']:.4f}" for f in figures if 'mean_loss' in f})
    return "\n".join(lines + [
        "", f"{first['steps']:,} names, one thread; load {first['load']:.0f}. Mean loss: {', '.join(losses)}.",
        f"`tests/bench/peers/names.py --beside build`, {first['machine']}, {first['date']}, commit {first['commit']}.",
        "", f"| attention of 16 tokens, forward and back ({calls[0]['machine']}, {calls[0]['commit']}) | us | lowest |",
        "|---|---:|---:|",
        *[f"| {f['library']} | {f['us']:.1f} | {f['lowest_us']:.1f} |" for f in calls],
        "", f"| a step of `train` on two threads ({steps[0]['machine']}, {steps[0]['before']}, {steps[0]['commit']}) | "
        "before | now | ratio | seconds before | now |",
        "|---|---:|---:|---:|---:|---:|",
        *[f"| {f['what']} | {f['before_ms']:.1f} ms | {f['now_ms']:.1f} ms | {f['ratio']:.2f} | {f['before_s']:.1f} | "
          f"{f['now_s']:.1f} |" for f in steps]])


def table(name):
    if name in ("ring", "programs", "steps", "sweep", "python", "cpu_sweep", "cpu_attention", "seeds", "ci", "deep",
                "routes", "plans", "names"):
        file = {"ring": "h200_ring", "sweep": "h200_sweep", "python": "h100_python", "seeds": "train_seeds"}.get(name,
            name if name in ("cpu_sweep", "cpu_attention", "ci", "deep", "routes", "plans", "names") else "h200")
        return globals()[name]([json.loads(line) for line in (RESULTS / f"{file}.jsonl").read_text().splitlines()])
    r = json.loads((RESULTS / f"{name}.json").read_text())
    c, m = r["config"], r["machine"]
    said = {"dense": "dense, taped", "taped": "taped: op by op",
            "hybrid": "hybrid: fused forward, library products back", "fused": "fused both ways"}
    lines = ["| gradient by | forward | backward | keeps | peak | largest error of dq, dk, dv |",
             "|---|---:|---:|---:|---:|---:|"]
    # q, k, v and dO, as on the page
    given = 2 * c["batch"] * c["length"] * (c["heads"] + c["kv_heads"]) * c["head_dim"] * {"f64": 8,
        "f32": 4}.get(c["dtype"], 2)
    for mode, x in r["modes"].items():
        error = max(x["error"][t]["max_abs"] for t in ("dq", "dk", "dv"))
        lines.append(f"| {said[mode]} | {x['forward_ms']:.3g} ms | {x['backward_ms']:.3g} ms | "
                     f"{size(x['saved_bytes'])} | {size(given + x['peak_bytes'])} | {error:.1e} |")
    device = m["devices"][-1 if c["device"] != "cpu" else 0]
    lines += ["", f"B {c['batch']}, L {c['length']}, {c['heads']} heads of {c['head_dim']}, {c['dtype']}, order "
                  f"{c['order']}, pattern {c['pattern']}, causal {c['causal']}.",
              f"{device}, {m['threads']} threads, {m['isa']}. Ceilings measured in the same run: {m['copy_gb_s']:.3g} "
              f"GB/s copying, {m['gemm_gflop_s']:.3g} GFLOP/s multiplying.",
              f"`{r['command']}`, {r['date']}, commit {r['commit']}."]
    return "\n".join(lines)


def wrapped(text):
    """Lines of at most 120 columns; a table's rows and what stands in `backticks` stay whole."""
    held = re.sub(r"`[^`]+`", lambda m: m[0].replace(" ", "\0"), text)
    fill = lambda line: textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if line.startswith("|") else fill(line) for line in held.split("\n")).replace("\0", " ")


def main():
    changed = False
    for path in (ROOT / "README.md", ROOT / "tests/README.md", RESULTS / "README.md", RESULTS / "names.md",
                 ROOT / "ops/hilbert/kernels/README.md"):
        old = path.read_text()
        new = re.sub(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)",
                     lambda m: m[1] + wrapped(table(m[2])) + "\n" + m[3], old, flags=re.S)
        changed |= new != old
        if "--check" not in sys.argv[1:]:
            path.write_text(new)
    return int(changed and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
