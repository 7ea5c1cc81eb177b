#!/usr/bin/env python3
"""The model of ../names.h in PyTorch, from the same start: microseconds of a name, forward, backward and Adam.

    names.py [--steps N] [--compile]
    names.py --beside BUILD [--steps N] [--rounds N] [--compile] [--microgpt FILE]

--beside: BUILD/tests/bench/hilt_names and this in turn, on one thread, N rounds; a JSON line a library, with the least
median of a round, lines of code, and what valgrind counts of Hilt: instructions and allocations of a name.
FILE is a microgpt.py: it learns the same names, shuffled, from weights of its own.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
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
    return {"library": f"an early microgpt.py, CPython {sys.version.split()[0]}", "steps": len(times),
            "us": times[len(times) // 2], "lowest_us": times[0], "lines": lines_of(pathlib.Path(path))}


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
    args = parser.parse_args()
    if args.beside:
        sys.exit(beside(args.beside, args.steps, args.rounds, args.compile, args.microgpt))
    print(json.dumps(run(args.steps, args.compile)))
