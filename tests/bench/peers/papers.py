#!/usr/bin/env python3
"""Hilt on the problems of two papers, beside what they are measured against there; PYTHONPATH has hilt.

    papers.py [--quick] [--repeats N] [--limit SECONDS] [notebook[:PROBLEM]] [hilberta[:PROBLEM]]

notebook: the nine sets of Hilbert local attention (arXiv 2511.05832): batch 16, 2 heads of 64, f16, beside
flex_attention on the same sets: with rows in storage order, and with rows that lie along the curve already, whose
gathers are not counted. Without the bias of the notebook: it adds to each key what all queries share.
hilberta: the five problems of HilbertA: 24 heads of 128, bf16; 512 tokens of text and a centre of the image meet all,
the rest its segment of the curve; beside dense attention. `shown`: the share of the saved pairs that is saved time.

A line of JSON a problem and a library, when the problem ends; medians in turn, the cache emptied. Every result and its
gradients are judged against f32 in two heads; an error above 2 % ends with exit code 1. PROBLEM counts from 1. What is
done is on stderr, with seconds: each set has flex_attention compiled, which is told as refused after the limit.
"""
import sys

import beside  # before torch
import hilt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from beside import DEVICE, TYPES, Run, compared, floors, off, tell

flex = torch.compile(flex_attention, dynamic=False) if DEVICE == "cuda" else flex_attention


def order(words, length):
    """Tokens along an order of ours."""
    return torch.tensor(hilt.plan(length, order=words).native.tokens(), device=DEVICE, dtype=torch.long)


def near(size, extent):
    """Neighborhoods of `size` along an axis, pushed inwards at its ends."""
    return lambda t, u: (t.clamp(size // 2, extent - 1 - size // 2) - u).abs() <= size // 2


def on_axes(axis, width):
    return lambda t, u: axis(t // width, u // width) & axis(t % width, u % width)


def along(axis, position):
    return lambda t, u: axis(position[t], position[u])


def notebook(quick):
    """(name, side, pattern, whether it lies along the curve, who meets whom along an axis)."""
    window = lambda n: lambda t, u: t // n == u // n  # noqa: E731
    slide = lambda r: lambda t, u: (t - u).abs() <= r  # noqa: E731
    big, middle, small, least = (32, 24, 16, 14) if quick else (128, 96, 64, 56)
    w, s, k, n, far, band, few = (8, 16, 5, 25, 2, 6, 3) if quick else (16, 64, 17, 289, 8, 60, 7)
    yield f"windows of {w} x {w}", big, f"window2d:{w}x{w}", False, window(w)
    yield f"segments of {s}", small, f"segment:{s}", True, window(s)
    yield f"slides of {few} x {few}", least, f"slide2d:{few // 2}x{few // 2}", False, slide(few // 2)
    yield f"neighborhoods of {k} x {k}", middle, f"neighborhood2d:{k}x{k}", False, near(k, middle)
    yield f"neighborhoods of {n}", middle, f"neighborhood:{n}", True, near(n, middle * middle)
    yield f"slides of {2 * band + 1}", middle, f"slide:{band}", True, slide(band)
    yield f"slides of {2 * far + 1} x {2 * far + 1}", big, f"slide2d:{far}x{far}", False, slide(far)
    yield f"neighborhoods of {few} x {few}", least, f"neighborhood2d:{few}x{few}", False, near(few, least)
    yield f"neighborhoods of {n}", least, f"neighborhood:{n}", True, near(n, least * least)


def hilberta(quick):
    """(text, image, centre, segments, how many tokens the first segment is shorter)."""
    for image, centre, parts, shift in ((4096, 256, 4, 0), (4096, 256, 4, 256), (4096, 256, 16, 0),
                                        (16384, 1024, 4, 0), (16384, 1024, 16, 0)):
        by = 16 if quick else 1
        yield 512 // by, image // by, centre // by, parts, shift // by


def touched(pair, tokens):
    """Of one head, whose rows lie as `tokens`: pairs, and those that the 64 queries of a tile have with its keys."""
    counts = torch.zeros(2, dtype=torch.long, device=DEVICE)
    for i in range(0, len(tokens), 64):
        mask = pair(tokens[i : i + 64, None], tokens[None])
        counts += torch.stack([mask.sum(), len(mask) * mask.any(0).sum()])
    return tuple(counts.tolist())


def exactly(x, pair, b, h):
    """o, dq, dk and dv of a head, in f32."""
    q, k, v, d_o = (t[b, :, h].detach().float().requires_grad_(i < 3) for i, t in enumerate(x))
    token, out = torch.arange(len(q), device=DEVICE), []
    for begin in range(0, len(q), 2048):
        t = token[begin : begin + 2048]
        s = (q[t] @ k.T * q.shape[1]**-0.5).masked_fill(~pair(t[:, None], token[None]), -torch.inf)
        o = torch.softmax(s, 1) @ v
        o.backward(d_o[t])
        out.append(o.detach())
    return torch.cat(out), q.grad, k.grad, v.grad


def judge_of(x, pairs_of):
    """Judges a run by two heads; pairs_of(name) gives its set and the tokens that its rows are of, or None."""
    heads, exact = ((0, 0), (x[0].shape[0] - 1, x[0].shape[2] - 1)), {}

    def judge(name, run):
        pair, tokens = pairs_of(name)
        o, gradients = run.once()
        found = []
        for y in (o, *gradients):
            home = y.detach()
            if tokens is not None:
                home = torch.empty_like(home).index_copy_(1, tokens, home)
            found.append(home)
        worst = 0.0
        for b, h in heads:
            if (pair, b, h) not in exact:
                exact[pair, b, h] = exactly(x, pair, b, h)
            worst = max(worst, off([y[b, :, h] for y in found], exact[pair, b, h]))
        return worst
    return judge


def inputs(batch, length, heads, dim, dtype):
    g = torch.Generator(DEVICE).manual_seed(7)
    return [torch.randn(batch, length, heads, dim, generator=g, device=DEVICE).to(dtype).requires_grad_(i < 3)
            for i in range(4)]


def by_hilt(x, **asked):
    return lambda: (Run(lambda: hilt.attention(*x[:3], **asked), x[:3], x[3]), asked)


def by_flex(x, pair, tokens=None):
    def make():
        rows = x if tokens is None else [t.detach()[:, tokens].requires_grad_(i < 3) for i, t in enumerate(x)]
        met = pair if tokens is None else lambda t, u: pair(tokens[t], tokens[u])
        length = rows[0].shape[1]
        mask = create_block_mask(lambda b, h, t, u: met(t, u), None, None, length, length, DEVICE)
        tell("block mask made")
        attend = lambda: flex(*(t.transpose(1, 2) for t in rows[:3]), block_mask=mask).transpose(1, 2)  # noqa: E731
        return Run(attend, rows[:3], rows[3]), {}
    return make


def by_sdpa(x, backend):
    def attend():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in x[:3])).transpose(1, 2)
    return lambda: (Run(attend, x[:3], x[3]), {})


def chosen(problems, only):
    """All of them, or the one of that number."""
    found = [p for i, p in enumerate(problems, 1) if only in ("", str(i))]
    return found or sys.exit(f"there is no problem {only}")


def run_notebook(told, rates, only):
    right, (batch, heads, dim) = True, (2, 2, 16) if told.quick else (16, 2, 64)
    for name, side, pattern, on_curve, axis in chosen(notebook(told.quick), only):
        length = side * side
        curve = f"hilbert:{side}x{side}"
        tokens = order(curve, length)
        position = torch.argsort(tokens)
        pair = along(axis, position) if on_curve else on_axes(axis, side)
        x = inputs(batch, length, heads, dim, TYPES["f16"])
        runs = {"hilt": by_hilt(x, order=curve, pattern=pattern)}
        orders = [tokens]
        if not on_curve:
            runs["hilt in storage order"] = by_hilt(x, order=f"row:{side}x{side}", pattern=pattern)
            orders.append(torch.arange(length, device=DEVICE))
        runs["flex in storage order"], runs["flex along the curve"] = by_flex(x, pair), by_flex(x, pair, tokens)
        judge = judge_of(x, lambda n: (pair, tokens if n == "flex along the curve" else None))  # noqa: B023
        counts = [touched(pair, o) for o in orders]
        all_heads = batch * heads
        floor = floors(rates, all_heads * length, dim, all_heads * min(tiled for _, tiled in counts))
        line = {"figure": "notebook", "problem": f"{name} on {side} x {side}", "batch": batch, "length": length,
                "heads": heads, "dim": dim, "dtype": "f16", "pairs": counts[0][0]}
        right &= compared(line, runs, judge, floor, told)[0]
    return right


def run_hilberta(told, rates, only):
    right, (heads, dim) = True, (2, 32) if told.quick else (24, 128)
    for text, image, centre, parts, shift in chosen(hilberta(told.quick), only):
        free, length, width = text + centre, text + image, (image - centre) // parts
        pattern = f"segment:{width}" + (f",shift={shift}" if shift else "") + f",prefix={free}"

        def pair(t, u):
            same = (t - free + shift) // width == (u - free + shift) // width  # noqa: B023
            return (t < free) | (u < free) | same  # noqa: B023

        def dense(t, u):
            return (t >= 0) | (u >= 0)
        x = inputs(1, length, heads, dim, TYPES["bf16"])
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}
        if DEVICE == "cpu":
            backends = {"sdpa math": SDPBackend.MATH}
        runs = {"hilt": by_hilt(x, order="row", pattern=pattern)}
        runs.update({f"dense {n}": by_sdpa(x, b) for n, b in backends.items()})
        runs["flex on the same set"] = by_flex(x, pair)
        judge = judge_of(x, lambda n: (dense if n.startswith("dense") else pair, None))  # noqa: B023
        pairs, tiled = touched(pair, torch.arange(length, device=DEVICE))
        floor, saved = floors(rates, heads * length, dim, heads * tiled), 1 - pairs / length**2
        line = {"figure": "hilberta", "problem": f"{text} + {image} tokens, a centre of {centre}, {parts} segments"
                + f", {shift} shorter at first" * bool(shift), "length": length, "heads": heads, "dim": dim,
                "dtype": "bf16", "pairs": pairs, "saved_pairs": round(saved, 4)}
        well, found = compared(line, runs, judge, floor, told)
        right &= well
        whole = next((found[n] for n in found if n.startswith("dense")), None)
        if whole and "hilt" in found:
            shown = [round((1 - ours / theirs) / saved, 4) for ours, theirs in zip(found["hilt"], whole)]
            print(beside.json.dumps({**line, "figure": "hilberta_shown", "forward": shown[0], "backward": shown[1]}),
                  flush=True)
    return right


def main():
    options = beside.options(__doc__)
    options.add_argument("which", nargs="*", default=["notebook", "hilberta"], metavar="NAME[:PROBLEM]")
    told = options.parse_args()
    rates = beside.begun(told, "papers")
    done = []
    for which in told.which:
        name, _, only = which.partition(":")
        done.append({"notebook": run_notebook, "hilberta": run_hilberta}[name](told, rates, only))
    sys.exit(not all(done))


main()
