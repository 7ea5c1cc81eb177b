#!/usr/bin/env python3
"""The models of train_bench.cpp in PyTorch, milliseconds of a whole training step: in f32 on a CPU, or by --bf16 as on
a GPU, with autocast to bf16.

    train_bench.py [small|medium|char|gpt2] [--device cuda] [--bf16] [--steps N] [--threads N] [--dropout P] [--compile]
                   [--json]
    train_bench.py --beside BUILD [--rounds N] [--steps N] [--threads N]

--beside: BUILD/tests/bench/hilt_train_bench and this in turn, N rounds, f32 and bf16, on a CPU; a JSON line a model and
a library. Milliseconds of processors are the least mean of a round: on a busy machine they say more.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS = {
    "small": dict(layers=4, heads=4, width=128, context=64, batch=12),
    "medium": dict(layers=6, heads=6, width=384, context=256, batch=8),
    "char": dict(layers=6, heads=6, width=384, context=256, batch=64),
    "gpt2": dict(layers=12, heads=12, width=768, context=1024, batch=32, vocab=50304, bias=True),
}


class Block(nn.Module):
    def __init__(self, width, heads, bias, dropout):
        super().__init__()
        self.heads = heads
        self.p = dropout
        self.drop = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.projection = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)
        x = x + self.drop(self.projection(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Model(nn.Module):
    def __init__(self, layers, heads, width, context, batch, vocab=65, bias=False, dropout=0.0):
        super().__init__()
        self.vocab = vocab
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        self.drop = nn.Dropout(dropout)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.drop(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.view(-1, self.vocab), targets.view(-1))


def beside(args):
    here = pathlib.Path(__file__)
    commit = subprocess.check_output(["git", "-C", here.parent, "rev-parse", "--short=7", "HEAD"], text=True).strip()
    ours, theirs = [args.beside / "tests/bench/hilt_train_bench"], [sys.executable, "-W", "ignore", here]
    environment = os.environ | {"HILT_THREADS": str(args.threads)}
    for name in args.names or ["small", "medium"]:
        s = SETTINGS[name]
        for type in ("f32", "bf16"):
            runs = {"hilt": ours, "PyTorch": [*theirs, "--threads", str(args.threads)]}
            told = [name, "--steps", str(args.steps), "--json"] + ["--bf16"] * (type == "bf16")
            rounds = {library: [] for library in runs}
            for _ in range(args.rounds):
                for library, command in runs.items():
                    line = subprocess.check_output([*command, *told], env=environment, text=True)
                    rounds[library].append(json.loads(line))
            for library, all_of in rounds.items():
                print(json.dumps({
                    "figure": "cpu_step", "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
                    "commit": commit, "torch": torch.__version__, "threads": args.threads, "rounds": args.rounds,
                    "load": os.getloadavg()[0], "library": f"{library} {type}",
                    "problem": f"step, {s['layers']} x {s['width']}, {s['batch']} x {s['context']} tokens",
                    "ms": min(x["best_ms"] for x in all_of),
                    "processors_ms": min(x["processors_ms"] for x in all_of)}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--beside", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.beside:
        return beside(args)
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    on_gpu = args.device != "cpu"
    narrow = torch.autocast(args.device, torch.bfloat16) if on_gpu or args.bf16 else contextlib.nullcontext()
    for name in args.names or ["small", "medium"]:
        s = SETTINGS[name]
        model = Model(**s, dropout=args.dropout).to(args.device)
        count = sum(p.numel() for p in model.parameters())
        decays = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW([dict(params=decays, weight_decay=0.1), dict(params=others, weight_decay=0.0)],
                                      lr=1e-3, betas=(0.9, 0.99), fused=on_gpu)
        forward = torch.compile(model) if args.compile else model
        ids, targets = (torch.randint(model.vocab, (s["batch"], s["context"]), device=args.device) for _ in range(2))
        ms = []
        cpu = 0.0
        for i in range(args.steps + 3):
            start = time.perf_counter()
            if i == 3:
                cpu = time.process_time()
            with narrow:
                loss = forward(ids, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = loss.item()
            if i >= 3:
                ms.append((time.perf_counter() - start) * 1e3)
        cpu = (time.process_time() - cpu) * 1e3 / args.steps  # what a busy machine does not distort
        ms.sort()
        kind = "compiled" if args.compile else "eager"
        if args.json:
            print(json.dumps({"figure": "train_step", "who": "PyTorch " + torch.__version__ + " " + kind, "model": name,
                              "dropout": args.dropout, "parameters": count, "ms": ms[len(ms) // 2],
                              "best_ms": ms[0], "processors_ms": cpu,
                              "tokens_per_s": s["batch"] * s["context"] / ms[len(ms) // 2] * 1e3,
                              "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0, "loss": loss}),
                              flush=True)
            continue
        print(f"PyTorch {torch.__version__} {kind}, {name}: {count} parameters, {args.threads} threads: "
              f"median {ms[len(ms) // 2]:.2f} ms, best {ms[0]:.2f} ms a step, {cpu:.2f} ms of processors, loss "
              f"{loss:.4f}")


if __name__ == "__main__":
    main()
