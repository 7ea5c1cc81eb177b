#!/usr/bin/env python3
"""hilt.attention beside flex_attention and scaled_dot_product_attention, from Python, on the same sets; PYTHONPATH has
hilt.

    python_attention.py [table] [calls] [gpt]

table: a JSON line a problem and a library: forward and backward by CUDA events, medians of runs that alternate; peak
memory of both; the largest error of o in 64 rows against f32; what a plan or a block mask takes. calls: what a call
costs the host. gpt: a character model of 6 x 384 on the text of this repository, 500 steps, one line swapped.
"""
import json
import pathlib
import statistics
import sys
import time

import hilt
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

DEVICE, TYPE = "cuda", torch.bfloat16
flex = torch.compile(flex_attention, dynamic=False)


def positions(length, order):
    """Of every token along an order, as our plan has it: the sets are the same."""
    tokens = torch.tensor(hilt.plan(length, order=order).native.tokens(), device=DEVICE)
    return torch.empty_like(tokens).scatter_(0, tokens.long(), torch.arange(length, device=DEVICE)).int()


def window(extent, size):
    """Neighborhoods of `size` cells along an axis, pushed inwards at its ends: FlexAttention's and ours."""
    return lambda t, u: (u - (t - size // 2).clamp(0, extent - size)).clamp(0, size - 1) == u - (t - size // 2).clamp(0,
        extent - size)


class Problem:
    """pair(t, u): who attends to whom; `asked`: the same in our words; score(s, h, t, u, table): what joins a score."""

    def __init__(self, name, batch, length, heads, dim, pair, asked, score=None, table=None):
        self.name, self.shape, self.pair, self.asked = name, (batch, length, heads, dim), pair, asked
        self.score, self.table = score, table
        g = torch.Generator(DEVICE).manual_seed(7)
        self.x = [torch.randn(self.shape, generator=g, device=DEVICE, dtype=TYPE, requires_grad=i < 3)
                  for i in range(4)]
        if table is not None:
            self.table = torch.randn(table, generator=g, device=DEVICE).requires_grad_()

    def learned(self):
        return self.x[:3] + ([self.table] if self.table is not None else [])

    def ours(self):
        start = time.perf_counter()
        hilt.plan(self.shape[1], heads=self.shape[2],
                  **{n: a for n, a in self.asked.items() if n not in ("alibi", "relative")})
        plan_ms = 1e3 * (time.perf_counter() - start)
        more = {"relative": self.table} if self.table is not None else {}
        return (lambda: hilt.attention(*self.x[:3], **self.asked, **more)), plan_ms

    def flex(self):
        torch.cuda.synchronize()
        start = time.perf_counter()
        pair, length = self.pair, self.shape[1]
        mask = create_block_mask(lambda b, h, t, u: pair(t, u), None, None, length, length, DEVICE, _compile=True)
        torch.cuda.synchronize()
        mask_ms = 1e3 * (time.perf_counter() - start)
        table, score = self.table, self.score
        mod = None if score is None else lambda s, b, h, t, u: score(s, h, t, u, table)
        return (lambda: flex(*[t.transpose(1, 2) for t in self.x[:3]], score_mod=mod, block_mask=mask).transpose(1,
            2)), mask_ms

    def sdpa(self):
        batch, length, heads, dim = self.shape
        if self.score is not None or length > 16384:
            return None, 0  # a mask of every pair, or a bias of every head's pairs, would not fit or not learn
        torch.cuda.synchronize()
        start = time.perf_counter()
        t = torch.arange(length, device=DEVICE)
        mask = self.pair(t[:, None], t[None])
        torch.cuda.synchronize()
        mask_ms = 1e3 * (time.perf_counter() - start)
        return (lambda: F.scaled_dot_product_attention(*[t.transpose(1, 2) for t in self.x[:3]],
                                                       attn_mask=mask).transpose(1, 2)), mask_ms

    def error(self, o):
        """The largest difference of 64 rows from f32."""
        _, length, heads, dim = self.shape
        g = torch.Generator().manual_seed(3)
        t = torch.randint(length, (64,), generator=g).to(DEVICE)
        q, k, v = (x[0].detach().float() for x in self.x[:3])
        worst = 0.0
        u = torch.arange(length, device=DEVICE)
        allowed = self.pair(t[:, None], u[None])
        for h in range(heads):
            s = q[t, h] @ k[:, h].T * dim**-0.5
            if self.score is not None:
                s = self.score(s, torch.tensor(h, device=DEVICE), t[:, None], u[None], self.table)
            p = torch.softmax(s.masked_fill(~allowed, -float("inf")), -1)
            worst = max(worst, (p @ v[:, h] - o[0, t, h].float()).abs().max().item())
        return worst


def problems():
    curve = positions(65536, "hilbert:256x256")
    yield Problem("segments of 128 along the curve", 1, 65536, 16, 64, lambda t, u: curve[t] // 128 == curve[u] // 128,
                  {"order": "hilbert:256x256", "pattern": "segment:128"})
    yield Problem("windows of 16 x 16", 16, 16384, 2, 64,
                  lambda t, u: (t // 2048 == u // 2048) & (t % 128 // 16 == u % 128 // 16),
                  {"order": "hilbert:128x128", "pattern": "window2d:16x16"})
    near = window(128, 17)
    around = lambda t, u: near(t // 128, u // 128) & near(t % 128, u % 128)  # noqa: E731
    yield Problem("neighborhoods of 17 x 17", 16, 16384, 2, 64, around,
                  {"order": "hilbert:128x128", "pattern": "neighborhood2d:17x17"})
    yield Problem("the same with a learned bias of 17 x 17", 16, 16384, 2, 64, around,
                  {"order": "hilbert:128x128", "pattern": "neighborhood2d:17x17"},
                  lambda s, h, t, u, table: s + table[h, (t // 128 - u // 128 + 16).clamp(0, 32),
                                                      (t % 128 - u % 128 + 16).clamp(0, 32)], (2, 33, 33))
    ends = torch.tensor([int(65536 * ((i + 1) / 58) ** 1.2) for i in range(58)], device=DEVICE, dtype=torch.int32)
    ends[-1] = 65536
    row = torch.searchsorted(ends, torch.arange(65536, device=DEVICE, dtype=torch.int32), right=True).int()
    lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    yield Problem("58 documents, causal", 1, 65536, 16, 64, lambda t, u: (row[t] == row[u]) & (u <= t),
                  {"order": "row", "causal": "token", "documents": lengths})
    slope = lambda h: torch.exp2(-(h + 1) / 2.0)  # noqa: E731  of 16 heads
    yield Problem("causal with ALiBi", 4, 4096, 16, 64, lambda t, u: u <= t,
                  {"order": "row", "causal": "token", "alibi": True},
                  lambda s, h, t, u, table: s - slope(h) * (t - u))
    axes = (window(16, 5), window(48, 9), window(48, 9))
    yield Problem("5 x 9 x 9 in 16 x 48 x 48", 1, 36864, 16, 128,
                  lambda t, u: axes[0](t // 2304, u // 2304) & axes[1](t // 48 % 48, u // 48 % 48) & axes[2](t % 48,
                      u % 48),
                  {"order": "hilbert:16x48x48", "pattern": "neighborhood3d:5x9x9"})


def timed(f):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    result = f()
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end)


def table():
    for p in problems():
        runs = {}
        for name in ("ours", "flex", "sdpa"):
            try:
                f, made_ms = getattr(p, name)()
                if f is None:
                    continue
                for _ in range(3):
                    o = f()
                    torch.autograd.grad(o, p.learned(), p.x[3])
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                o = f()
                torch.autograd.grad(o, p.learned(), p.x[3])
                torch.cuda.synchronize()
                runs[name] = {"f": f, "made_ms": made_ms, "bytes": torch.cuda.max_memory_allocated() - before,
                              "error": p.error(o), "forward": [], "backward": []}
                del o
            except Exception as e:  # noqa: BLE001  a library that does not take it is a result too
                print(json.dumps({"figure": "python", "problem": p.name, "library": name,
                                  "refused": f"{type(e).__name__}: {e}"[:300]}), flush=True)
        for _ in range(15):
            for r in runs.values():
                o, ms = timed(r["f"])
                r["forward"].append(ms)
                r["backward"].append(timed(lambda: torch.autograd.grad(o, p.learned(), p.x[3]))[1])  # noqa: B023
                del o
        for name, r in runs.items():
            print(json.dumps({"figure": "python", "problem": p.name,
                              "library": {"ours": "hilt", "flex": "flex_attention", "sdpa": "SDPA"}[name],
                              "torch": torch.__version__,
                              "forward_ms": statistics.median(r["forward"]),
                              "backward_ms": statistics.median(r["backward"]), "bytes": r["bytes"],
                              "error": r["error"], "made_ms": r["made_ms"]}), flush=True)
        del p, runs
        torch.cuda.empty_cache()


def calls():
    """By the clock, 500 calls in a row of a small problem, the GPU waited for at the end; and the kernels alone, from a
    graph."""
    x = [torch.randn(1, 256, 2, 64, device=DEVICE, dtype=TYPE) for _ in range(3)]
    plan = hilt.plan(256, heads=2, order="row")
    sdpa = lambda *t: F.scaled_dot_product_attention(*[a.transpose(1, 2) for a in t]).transpose(1, 2)  # noqa: E731
    for name, f in (("hilt, plan=", lambda *t: hilt.attention(*t, plan=plan)),
                    ("hilt, by text", lambda *t: hilt.attention(*t, order="row")), ("SDPA", sdpa)):
        for what in ("forward", "forward + backward"):
            taught = [t.clone().requires_grad_() for t in x]
            forward, both = lambda: f(*x), lambda: torch.autograd.grad(f(*taught), taught, x[0])  # noqa: B023
            run = forward if what == "forward" else both
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(100):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            each = {}
            for kind, once in (("call", run), ("kernels", graph.replay)) * 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(500):
                    once()
                asked = time.perf_counter()
                torch.cuda.synchronize()
                each[kind] = 2e3 * (time.perf_counter() - start), 2e3 * (asked - start)
            print(json.dumps({"figure": "python_call", "who": name, "pass": what, "us": each["call"][0],
                              "host_us": each["call"][1], "kernels_us": each["kernels"][0]}), flush=True)


class Block(torch.nn.Module):
    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
                                       torch.nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm2(x))


def gpt():
    root = pathlib.Path(__file__).resolve().parents[3]
    text = b"".join(sorted(p.read_bytes() for d in ("core", "ops", "nn") for p in (root / d).rglob("*.cpp")))
    data = torch.tensor(list(text), device=DEVICE)
    swapped = {"SDPA": lambda q, k, v: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2),
                                                                      v.transpose(1, 2), is_causal=True).transpose(1,
                                                                          2),
               "hilt": lambda q, k, v: hilt.attention(q, k, v, order="row", causal="token")}
    context, batch, width = 256, 64, 384
    for seed, who in ((1, "SDPA"), (1, "hilt"), (2, "SDPA"), (2, "hilt"), (3, "SDPA")):
        torch.manual_seed(seed)
        body = torch.nn.Sequential(*[Block(width, 6, swapped[who]) for _ in range(6)]).to(DEVICE)
        embed, place = torch.nn.Embedding(256, width).to(DEVICE), torch.nn.Embedding(context, width).to(DEVICE)
        head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 256)).to(DEVICE)
        weights = [p for m in (body, embed, place, head) for p in m.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
        g = torch.Generator().manual_seed(9)
        losses, at = [], torch.arange(context, device=DEVICE)
        for i in range(500):
            if i == 50:
                torch.cuda.synchronize()
                start = time.perf_counter()
            first = torch.randint(len(data) - context - 1, (batch, 1), generator=g).to(DEVICE)
            x = data[first + at]
            with torch.autocast("cuda", dtype=TYPE):
                loss = F.cross_entropy(head(body(embed(x) + place(at))).flatten(0, 1), data[first + at + 1].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.cuda.synchronize()
        rate = 450 * batch * context / (time.perf_counter() - start)
        curve = torch.stack(losses).tolist()
        print(json.dumps({"figure": "python_gpt", "who": who, "seed": seed, "steps": 500, "tokens_per_s": rate,
                          "loss": {str(n): statistics.mean(curve[n - 20 : n]) for n in (20, 100, 200, 300, 400, 500)},
                          "what": "6 layers, 6 heads, width 384, 64 x 256 bytes of this repository's .cpp, bf16 by "
                                  "autocast"}), flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or ["table", "calls", "gpt"]:
        {"table": table, "calls": calls, "gpt": gpt}[name]()
