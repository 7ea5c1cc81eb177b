#!/usr/bin/env python3
"""The model of ../names.h in PyTorch, from the same start: microseconds of a name, forward, backward and Adam.

    names.py [--steps N] [--compile]
    names.py --beside BUILD [--steps N] [--rounds N] [--compile] [--microgpt FILE]
    names.py --calls BUILD [--rounds N]
    names.py --train BUILD --before BUILD [--rounds N]

--beside: BUILD/tests/bench/hilt_names and this in turn, on one thread, N rounds; a JSON line a library, with the least
median of a round, lines of code, and what valgrind counts of Hilt: instructions and allocations of a name.
FILE is a microgpt.py: it learns the same names, shuffled, from weights of its own; so does `train --task names`.
--calls: attention of 16 tokens forward and back, in C++, through torch, and torch's own. --train: steps of the trainer
and its processor seconds, beside those of an earlier build, in turn.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve()
WIDTH, HEADS, POSITIONS, LETTERS, END = 16, 4, 16, 27, 26
SHAPES = [(LETTERS, WIDTH), (POSITIONS, WIDTH), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH),
          (4 * WIDTH, WIDTH), (WIDTH, LETTERS)]


class Draws:
    def __init__(self, seed):
        self.state = seed

    def below(self, n):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % n


def made_names(count):
    draws, names = Draws(12345), []
    for _ in range(count):
        name = "".join("bdfgklmnrstvz"[draws.below(13)] + "aeiou"[draws.below(5)] for _ in range(2 + draws.below(3)))
        if draws.below(2):
            name += "nrs"[draws.below(3)]
        names.append([END] + [ord(c) - ord("a") for c in name] + [END])
    return names


def start():
    draws = Draws(1)
    return [[[0.08 * (sum(draws.below(1 << 20) for _ in range(12)) / (1 << 20) - 6) for _ in range(columns)]
             for _ in range(rows)] for rows, columns in SHAPES]


def run(steps, compiled):
    import torch
    from torch.nn import functional as F
    torch.set_num_threads(1)
    weights = [torch.tensor(w, requires_grad=True) for w in start()]
    adam = torch.optim.Adam(weights, lr=0.01, betas=(0.85, 0.99), eps=1e-8)
    # Those before each letter, and itself: -inf hides the others. A call of SDPA is there from PyTorch 2 on.
    attend = getattr(F, "scaled_dot_product_attention", None)
    hide = torch.full((POSITIONS, POSITIONS), float("-inf")).triu(1)

    def norm(x):
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()

    def loss_of(ids, targets):
        letters, positions, qkv, out, up, down, head = weights
        n = len(ids)
        x = norm(letters[ids] + positions[:n])
        q, k, v = (norm(x) @ qkv).view(n, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        if attend:
            a = attend(q, k, v, is_causal=True)
        else:
            a = torch.softmax(q @ k.transpose(1, 2) / (WIDTH // HEADS) ** 0.5 + hide[:n, :n], -1) @ v
        x = x + a.transpose(0, 1).reshape(n, WIDTH) @ out
        x = x + torch.relu(norm(x) @ up) @ down
        return F.cross_entropy(x @ head, targets)

    if compiled:
        loss_of = torch.compile(loss_of, dynamic=True)
    names, times, losses = made_names(10000), [], []
    for step in range(steps):
        begin = time.perf_counter()
        name = names[step % len(names)][:POSITIONS + 1]
        for group in adam.param_groups:
            group["lr"] = 0.01 * (1 - step / steps)
        adam.zero_grad()
        loss = loss_of(torch.tensor(name[:-1]), torch.tensor(name[1:]))
        loss.backward()
        adam.step()
        losses.append(loss.item())
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    return {"library": f"PyTorch {torch.__version__}{', compiled' if compiled else ''}", "steps": steps,
            "us": times[steps // 2], "lowest_us": times[0], "mean_loss": sum(losses) / steps, "last_loss": losses[-1]}


def microgpt(path, steps=100):
    """Microseconds from one of its lines `step ..` to the next."""
    text = re.sub(r"(?m)^block_size = \d+", f"block_size = {POSITIONS}", pathlib.Path(path).read_text())
    with tempfile.TemporaryDirectory() as scratch:
        pathlib.Path(scratch, "input.txt").write_text(
            "\n".join("".join(chr(ord("a") + i) for i in name[1:-1]) for name in made_names(10000)))
        with subprocess.Popen([sys.executable, "-u", "-c", text], cwd=scratch, stdout=subprocess.PIPE, text=True) as p:
            seen = [time.perf_counter() for line, _ in zip((x for x in p.stdout if x.startswith("step")), range(steps))]
            p.kill()
    times = sorted(1e6 * (b - a) for a, b in zip(seen, seen[1:]))
    return {"library": f"microgpt.py, CPython {sys.version.split()[0]}", "steps": len(times),
            "us": times[len(times) // 2], "lowest_us": times[0], "lines": lines_of(pathlib.Path(path))}


def trained(build, options, environment=None):
    """Milliseconds of each step of train, its losses, and its processor seconds."""
    with tempfile.TemporaryDirectory() as scratch:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([pathlib.Path(build, "examples/train").resolve(), "--device", "cpu", "--out", "run", *options],
                       cwd=scratch, env=environment, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = pathlib.Path(scratch, "run/log.jsonl").read_text().splitlines()[1:]
    return ([json.loads(line)["ms"] for line in lines],
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def train_names(build, steps, environment):
    times = sorted(1e3 * ms for ms in trained(build, ["--task", "names", "--steps", str(steps)], environment)[0])
    return {"library": "train --task names", "steps": steps, "us": times[steps // 2], "lowest_us": times[0]}


def calls(build, rounds):
    """Microseconds of attention of 16 tokens, 4 heads of 4, causal, forward and back: the least median of a round."""
    import hilt
    import torch
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 16, 4, 4, requires_grad=True) for _ in range(3))
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]  # each as it wants them
    d, plan, sdpa = torch.randn(1, 16, 4, 4), hilt.plan(16, heads=4, causal="token"), torch.nn.functional
    ways = {"through torch": (lambda: hilt.attention(q, k, v, plan=plan), (q, k, v), d),
            "SDPA of torch": (lambda: sdpa.scaled_dot_product_attention(*theirs, is_causal=True), theirs,
                              d.transpose(1, 2).contiguous())}
    best = {}
    for _ in range(rounds):
        said = subprocess.run([pathlib.Path(build, "tests/bench/hilt_names").resolve(), "3000", "call"], check=True,
                              env=dict(os.environ, HILT_THREADS="1"), capture_output=True, text=True).stdout
        rows = [dict(json.loads(said), library="C++")]
        for library, (call, inputs, slope) in ways.items():
            times = []
            for _ in range(3000):
                begin = time.perf_counter()
                torch.autograd.grad(call(), inputs, slope)
                times.append(1e6 * (time.perf_counter() - begin))
            rows.append({"library": library, "us": sorted(times)[1500], "lowest_us": min(times)})
        for row in rows:
            if row["library"] not in best or row["us"] < best[row["library"]]["us"]:
                best[row["library"]] = row
    for library, row in best.items():
        print(json.dumps({"figure": "call", "library": library, "us": row["us"], "lowest_us": row["lowest_us"],
                          "load": os.getloadavg()[0]}))


def steps_beside(build, before, rounds):
    for what, options in (("the default", []), ("4 layers x 128", ["--layers", "4"])):
        ms, seconds = {}, {}
        for turn in range(rounds):
            for which, where in (("before", before), ("now", build))[:: -1 if turn % 2 else 1]:
                times, spent = trained(where, ["--steps", "40", *options])
                ms.setdefault(which, []).append(sorted(times)[20])
                seconds.setdefault(which, []).append(spent)
        middle = lambda x: sorted(x)[len(x) // 2]
        print(json.dumps({"figure": "step", "what": what, "rounds": rounds, "load": os.getloadavg()[0],
                          **{f"{w}_ms": middle(ms[w]) for w in ms}, **{f"{w}_s": middle(seconds[w]) for w in ms},
                          "ratio": middle([b / a for a, b in zip(ms["before"], ms["now"])])}))


def lines_of(path):
    """Without blank lines and comments."""
    return sum(bool(re.match(r"\s*[^\s/#]", line)) for line in path.read_text().splitlines())


def counted(program, mode, environment):
    """Instructions and allocations of a name: what 200 more of them add."""
    def of(tool, pattern):
        counts = []
        for steps in ("100", "300"):
            said = subprocess.run(["valgrind", *tool, program, steps, mode], env=environment, capture_output=True,
                                  text=True, check=True).stderr
            counts.append(int(re.search(pattern, said)[1].replace(",", "")))
        return (counts[1] - counts[0]) / 200
    return {"instructions": of(["--tool=callgrind", "--callgrind-out-file=/dev/null"], r"Collected : (\d+)"),
            "allocations": of([], r"total heap usage: ([\d,]+) allocs")}


def beside(build, steps, rounds, compiled, python):
    program = str(pathlib.Path(build, "tests/bench/hilt_names").resolve())
    environment = dict(os.environ, HILT_THREADS="1")
    lines = {"fused": lines_of(HERE.parents[1] / "names.h"), "scalar": lines_of(HERE.parent / "scalar_tape.h")}
    best = {}
    for _ in range(rounds):
        said = subprocess.run([program, str(steps)], env=environment, capture_output=True, text=True, check=True).stdout
        peers = [run(steps, False)] + ([run(steps, True)] if compiled else [])
        for f in [json.loads(line) for line in said.splitlines()] + peers:
            if f["library"] not in best or f["us"] < best[f["library"]]["us"]:
                best[f["library"]] = f
    best["train"] = min((train_names(build, steps, environment) for _ in range(rounds)), key=lambda f: f["us"])
    if python:
        best["microgpt"] = microgpt(python)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE.parent, capture_output=True, text=True)
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    for library, f in best.items():
        if library in ("fused", "taped", "token", "scalar"):
            f |= counted(program, library, dict(environment, HILT_ISA=os.environ.get("HILT_ISA", "avx2")))
        print(json.dumps({"figure": "names", "date": str(datetime.date.today()), "commit": git.stdout.strip(),
                          "machine": cpu, "rounds": rounds, "load": os.getloadavg()[0], **f,
                          **({"lines": lines[library]} if library in lines else {})}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--beside", metavar="BUILD")
    parser.add_argument("--microgpt", metavar="FILE")
    parser.add_argument("--calls", metavar="BUILD")
    parser.add_argument("--train", metavar="BUILD")
    parser.add_argument("--before", metavar="BUILD")
    args = parser.parse_args()
    if bool(args.train) != bool(args.before):
        parser.error("--train and --before name two builds")
    for build in filter(None, (args.calls, args.beside)):
        if not pathlib.Path(build, "tests/bench/hilt_names").exists():
            parser.error(f"{build} has no tests/bench/hilt_names: ninja -C {build} tests/bench/hilt_names")
    if args.calls:
        sys.exit(calls(args.calls, args.rounds))
    if args.train:
        sys.exit(steps_beside(args.train, args.before, args.rounds))
    if args.beside:
        sys.exit(beside(args.beside, args.steps, args.rounds, args.compile, args.microgpt))
    print(json.dumps(run(args.steps, args.compile)))
