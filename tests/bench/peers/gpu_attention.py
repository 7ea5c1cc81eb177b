#!/usr/bin/env python3
"""The shapes of gpu_attention_cuda.cpp in PyTorch: scaled_dot_product_attention on segments, in storage order and in
Hilbert order.

Hilbert order is the fair form: [B, L, H, D], rows gathered by index_select whose backward is the inverse gather,
outputs gathered back. A line of JSON a figure, medians of --repeats.
"""
import argparse
import json
import statistics

import torch
import torch.nn.functional as F

H, L = 16, 65536


def hilbert(n):
    """Tokens y * n + x in the order of the curve on an n x n grid."""
    out = []
    for d in range(n * n):
        x = y = 0
        s, rest = 1, d
        while s < n:
            rx = (rest >> 1) & 1
            ry = (rest ^ rx) & 1
            if ry == 0:
                if rx:
                    x, y = s - 1 - x, s - 1 - y
                x, y = y, x
            x, y, rest = x + s * rx, y + s * ry, rest >> 2
            s *= 2
        out.append(y * n + x)
    return torch.tensor(out, device="cuda")


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.inverse = inverse
        return x.index_select(1, index)

    @staticmethod
    def backward(ctx, dy):
        return dy.index_select(1, ctx.inverse), None, None


def segments(q, k, v, w, r):
    """[1, L, H, D] -> the same; every query of a segment meets its every r-th key."""
    d = q.shape[-1]
    q = q.view(L // w, w, H, d).transpose(1, 2)
    k, v = (x.view(L // w, w, H, d)[:, ::r].transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, L, H, d)


def ms(f, repeats):
    times = []
    for i in range(repeats + 5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        prepared = f(None)
        begin.record()
        f(prepared)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:]), min(times[5:])


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=30)
    repeats = options.parse_args().repeats
    pi = hilbert(256)
    rho = torch.argsort(pi)
    for order in ("hilbert", "row"):
        for d, w, r in ((64, 128, 1), (64, 256, 1), (64, 2048, 16), (128, 128, 1), (64, 2048, 1), (64, 2048, 4)):
            sets = [[torch.randn(1, L, H, d, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3)
                     for i in range(4)] for _ in range(3)]
            turn = [0]

            def play(x):
                q, k, v = x[:3]
                if order == "hilbert":
                    q, k, v = (Gather.apply(y, pi, rho) for y in (q, k, v))
                o = segments(q, k, v, w, r)
                return Gather.apply(o, rho, pi) if order == "hilbert" else o

            def forward(prepared):
                turn[0] += 1
                with torch.no_grad():
                    return play(sets[turn[0] % 3])

            def backward(prepared):
                if prepared is None:
                    turn[0] += 1
                    x = sets[turn[0] % 3]
                    return play(x), x
                o, x = prepared
                return torch.autograd.grad(o, x[:3], x[3])

            for name, f in (("forward", forward), ("backward", backward)):
                median, least = ms(f, repeats)
                print(json.dumps({"figure": "peer", "library": f"torch {torch.__version__}", "pass": name, "batch": 1,
                                  "length": L, "heads": H, "dim": d,
                                  "dtype": "bf16", "pattern": f"segment:{w}" + (f",dilation={r}" if r > 1 else ""),
                                  "order": order, "ms": median,
                                  "ms_min": least}), flush=True)


if __name__ == "__main__":
    main()
