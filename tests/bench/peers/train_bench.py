#!/usr/bin/env python3
"""The models of train_bench.cpp in PyTorch, eager, f32: milliseconds of a whole training step.

    train_bench.py [small|medium] [--steps N] [--threads N] [--compile]
"""
import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

SETTINGS = {
    "small": dict(layers=4, heads=4, width=128, context=64, batch=12),
    "medium": dict(layers=6, heads=6, width=384, context=256, batch=8),
}
VOCAB = 65


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, layers, heads, width, context, batch):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.t()
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    for name in args.names or list(SETTINGS):
        s = SETTINGS[name]
        model = Model(**s)
        count = sum(p.numel() for p in model.parameters())
        decays = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW([dict(params=decays, weight_decay=0.1), dict(params=others, weight_decay=0.0)], lr=1e-3, betas=(0.9, 0.99))
        forward = torch.compile(model) if args.compile else model
        ids = torch.randint(VOCAB, (s["batch"], s["context"]))
        targets = torch.randint(VOCAB, (s["batch"], s["context"]))
        ms = []
        cpu = 0.0
        for i in range(args.steps + 3):
            start = time.perf_counter()
            if i == 3:
                cpu = time.process_time()
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
        print(f"PyTorch {torch.__version__} {kind}, {name}: {count} parameters, {args.threads} threads: "
              f"median {ms[len(ms) // 2]:.2f} ms, best {ms[0]:.2f} ms a step, {cpu:.2f} ms of processors, loss {loss:.4f}")


if __name__ == "__main__":
    main()
