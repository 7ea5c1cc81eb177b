#!/usr/bin/env python3
"""Attention on a CPU beside PyTorch's scaled_dot_product_attention: 4 heads of 64, forward and backward, two threads.

    cpu_attention.py BUILD [--rounds N] [--busy] [--where DIR]

--busy: other programs run too, so one thread each, and processor time.
BUILD has tests/bench/hilt_cpu_attention. All are asked in turn, N rounds; prints a JSON line a problem and a library,
the least and the median milliseconds. Where this Python has no torch, one with torch 2.11 is made in DIR, by pip.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("build", type=pathlib.Path)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--busy", action="store_true")
parser.add_argument("--where", type=pathlib.Path, default=pathlib.Path("/tmp/torch-2.11"))
options = parser.parse_args()
try:
    import torch
except ImportError:
    if not (options.where / "bin/pip").exists():
        subprocess.run([sys.executable, "-m", "venv", options.where], check=True)
        subprocess.run([options.where / "bin/pip", "install", "-q", "torch==2.11.0"], check=True)
    python = str(options.where / "bin/python3")
    if sys.executable == python:
        raise
    os.execv(python, [python, *sys.argv])

THREADS, HEADS, DIM = 1 if options.busy else 2, 4, 64
now = time.process_time if options.busy else time.perf_counter
torch.set_num_threads(THREADS)
PROBLEMS = {
    "dense 1,024": (1024, "dense", "none"),
    "causal 1,024": (1024, "dense", "token"),
    "dense 4,096": (4096, "dense", "none"),
    "causal 4,096": (4096, "dense", "token"),
    "segments of 256": (4096, "segment:256", "none"),
}


class Ours:
    def __init__(self, type):
        environment = {n: x for n, x in os.environ.items() if not n.startswith("HILT_")}
        environment |= {"HILT_THREADS": str(THREADS)}
        self.type = type
        command = [options.build / "tests/bench/hilt_cpu_attention"] + ["busy"] * options.busy
        self.program = subprocess.Popen(command, env=environment, text=True, stdin=-1, stdout=-1)
        self.machine = self.program.stdout.readline().strip()

    def __call__(self, problem):
        print(*problem, self.type, file=self.program.stdin, flush=True)
        return [float(x) for x in self.program.stdout.readline().split()]


class Theirs:
    def __init__(self, type):
        self.type, self.known = {"f32": torch.float32, "bf16": torch.bfloat16}[type], {}

    def __call__(self, problem):
        length, pattern, causal = problem
        segment = int(pattern.split(":")[1]) if ":" in pattern else length  # a batch of them
        if problem not in self.known:
            draw = lambda i: torch.randn(length // segment, HEADS, segment, DIM).to(self.type).requires_grad_(i < 3)
            self.known[problem] = [draw(i) for i in range(4)]
        *x, cotangent = self.known[problem]
        begin = now()
        o = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal == "token")
        middle = now()
        torch.autograd.grad(o, x, cotangent)
        return 1e3 * (middle - begin), 1e3 * (now() - middle)


best = Ours("bf16")
libraries = {"hilt f32": Ours("f32"), "PyTorch f32": Theirs("f32"), "hilt bf16": best, "PyTorch bf16": Theirs("bf16")}
commit = subprocess.run(["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "--short=7", "HEAD"],
                        capture_output=True, text=True, check=True).stdout.strip()
for name, problem in PROBLEMS.items():
    times = {library: [] for library in libraries}
    for turn in range(options.rounds + 2):
        for library, run in libraries.items():
            times[library].append(run(problem)) if turn >= 2 else run(problem)
    for library, all_of in times.items():
        forward, backward = zip(*all_of)
        day = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"
        print(json.dumps({"figure": "cpu_attention", "date": day, "commit": commit, "machine": best.machine,
                          "torch": torch.__version__, "threads": THREADS, "problem": name, "library": library,
                          "rounds": options.rounds, "busy": options.busy, "load": os.getloadavg()[0],
                          "forward_ms": min(forward), "backward_ms": min(backward),
                          "forward_median_ms": statistics.median(forward),
                          "backward_median_ms": statistics.median(backward)}), flush=True)
