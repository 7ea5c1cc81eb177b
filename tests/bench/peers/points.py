#!/usr/bin/env python3
"""Attention of Point Transformer V3 and LitePT, at the shapes of their stages, by Hilt and by what they call;
PYTHONPATH has hilt.

    points.py [--quick] [--repeats N] [--limit SECONDS] [--type bf16] [--type f16] [PTv3] [PTv3-table] [LitePT]

Three rooms as a scanner sees them, cells of 2 cm on surfaces, each cut to 102,400 points, as on each GPU of the
published training; a stage pools 2 x 2 x 2 cells. A block gathers qkv [N, 3 C] along a curve, attends in patches of
1,024 and puts its rows back; `order_ms` is the codes and the sort of all four curves, once a stage. A cloud ends with
a patch of its last 1,024 points: theirs gathers some of them twice, ours is told `tail=borrow`. LitePT turns q and k
by x, y and z, by the same function on both sides. PTv3-table adds to a score what three tables say of the points'
distances.

Libraries: hilt; varlen, of torch; cudnn and flash, SDPA on patches of one size; fa2 and fa4, FlashAttention's varlen,
if they are there; for tables eager, as PTv3 does it, flex_attention, and SDPA with a mask. `kernel_forward_ms` and
`kernel_backward_ms` are theirs on rows that lie in order already. A head dim that a library refuses is padded.

A line of JSON a stage, type and library; medians in turn, the cache emptied. Every result and its gradients are judged
against f32; an error above 2 % ends with exit code 1. The orders of hilt and of this script must be the same.
"""
import functools
import sys

import beside  # before torch
import hilt
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from beside import DEVICE, TYPES, Run, compared, floors, off, timed

flex = torch.compile(flex_attention, dynamic=False) if DEVICE == "cuda" else flex_attention
CURVES = "morton", "morton-trans", "hilbert", "hilbert-trans"
# Stage, channels, heads, blocks of it; 2b and 3b have those of the decoder too.
PTV3 = (0, 32, 2, 2), (0, 64, 4, 2), (1, 64, 4, 4), (2, 128, 8, 4), (3, 256, 16, 8), (4, 512, 32, 2)
LITEPT = (3, 252, 14, 6), (4, 504, 28, 2)


# ---- clouds, and the orders of a stage ------------------------------------------------------------------------------

def room(g, cell, most):
    """Cells [N, 3] on floor, walls and furniture of a room, in no order: the nearest ones to one of them."""
    size, sides = torch.tensor([6.0, 5.0, 2.7]), []
    for low, extent in [(torch.zeros(3), size)] + [
            (torch.rand(3, generator=g) * torch.tensor([5.0, 4.0, 0.3]), 0.4 + torch.rand(3, generator=g))
            for _ in range(10)]:
        for axis in range(3):
            for end in (0, 1):
                area = extent.prod() / extent[axis]
                x = torch.rand(int(6 * area / cell**2), 3, generator=g)
                x[:, axis] = end
                sides.append(low + extent * x)
    x = torch.cat(sides)
    x = x[x[:, 2] < 2.6]  # no ceiling
    cells = torch.unique(((x + 0.003 * torch.randn(x.shape, generator=g)).clamp(0) / cell).int(), dim=0)
    middle = cells[torch.randint(len(cells), (1,), generator=g)]
    cells = cells[(cells - middle).square().sum(1).argsort()[:most]]
    return cells[torch.randperm(len(cells), generator=g)]


def spread(x):
    """Two zeros after each bit."""
    for shift, mask in ((32, 0x1F00000000FFFF), (16, 0x1F0000FF0000FF), (8, 0x100F00F00F00F00F),
                        (4, 0x10C30C30C30C30C3), (2, 0x1249249249249249)):
        x = (x | x << shift) & mask
    return x


def code(cells, curve, bits):
    """Of each cell along a curve: interleaved bits, after Skilling's transform for Hilbert's."""
    x = list(cells.long().unbind(1))
    if curve.endswith("-trans"):
        x.reverse()
    if curve.startswith("morton"):
        return spread(x[0]) | spread(x[1]) << 1 | spread(x[2]) << 2
    for bit in reversed(range(1, bits)):
        low = (1 << bit) - 1
        for i in range(3):
            there = (x[i] >> bit & 1).bool()
            t = torch.where(there, 0, (x[0] ^ x[i]) & low)
            x[i] = x[i] ^ t
            x[0] = x[0] ^ torch.where(there, low, t)
    x[1] = x[1] ^ x[0]
    x[2] = x[2] ^ x[1]
    t = torch.zeros_like(x[0])
    for bit in range(1, bits):
        t = t ^ torch.where((x[2] >> bit & 1).bool(), (1 << bit) - 1, 0)
    return spread(x[2] ^ t) | spread(x[1] ^ t) << 1 | spread(x[0] ^ t) << 2


class Stage:
    """Clouds behind one another: cells [N, 3] from 0 on, how many each has, and how rows lie."""

    def __init__(self, clouds):
        self.cells, self.lengths = torch.cat(clouds).to(DEVICE), [len(c) for c in clouds]
        self.bits = max(1, int(self.cells.max()).bit_length())
        self.cloud = torch.repeat_interleave(torch.arange(len(clouds)), torch.tensor(self.lengths)).to(DEVICE)

    def theirs(self):
        """Orders [4, N] and where each point is in them."""
        codes = torch.stack([code(self.cells, c, self.bits) | self.cloud << 3 * self.bits for c in CURVES])
        order = torch.argsort(codes)
        place = torch.arange(order.shape[1], device=DEVICE).repeat(len(CURVES), 1)
        return order, torch.zeros_like(order).scatter_(1, order, place)

    def ours(self):
        return [hilt.order_of_points(self.cells, c, self.bits, self.lengths) for c in CURVES]

    def slots(self, patch):
        """The position in each slot of a patch, where patches begin and end, and the slot of each position."""
        slots, begins, home, first = [], [0], [], 0
        for n in self.lengths:
            own, tail = torch.arange(n), n % patch
            home.append(own + begins[-1])
            if n > patch and tail:  # the patch before lends its last points
                own = torch.cat([own, own[n - patch : n - tail]])
            slots.append(own + first)
            at = begins[-1]
            begins += [at + end for end in (*range(patch, len(own), patch), len(own))]
            first += n
        return torch.cat(slots).to(DEVICE), torch.tensor(begins), torch.cat(home).to(DEVICE)

    def pooled(self):
        """The stage after: a cell where there was one of eight, along z."""
        clouds = [torch.unique(c >> 1, dim=0) for c in self.cells.cpu().split(self.lengths)]
        return Stage([c[torch.argsort(code(c, "morton", self.bits))] for c in clouds])


# ---- what a block does ----------------------------------------------------------------------------------------------

def turned(x, cells):
    """x [N, H, D] by the points: a third of D for each axis."""
    d = x.shape[-1] // 6
    angle = cells[:, :, None].float() * 100.0**(-torch.arange(d, device=x.device) / d)
    parts = x.float().unflatten(-1, (3, 2, d))
    a, b, cos, sin = parts[..., 0, :], parts[..., 1, :], angle.cos()[:, None], angle.sin()[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -2).flatten(-3).to(x.dtype)


turn = torch.compile(turned) if DEVICE == "cuda" else turned


class Block:
    """qkv [N, 3 C] to o [N, C], forward and back."""

    def __init__(self, stage, patch, channels, heads, dtype, table, turns):
        # Where no varlen kernel runs, which is with tables, a patch of theirs has no more points than a cloud.
        self.patch = min(patch, *stage.lengths) if table else patch
        self.stage, self.heads, self.dim, self.turns = stage, heads, channels // heads, turns
        g = torch.Generator(DEVICE).manual_seed(7)
        rows = sum(stage.lengths)
        draw = lambda *shape: torch.randn(*shape, generator=g, device=DEVICE)  # noqa: E731
        self.qkv, self.d_o = draw(rows, 3 * channels).to(dtype).requires_grad_(), draw(rows, channels).to(dtype)
        self.order = stage.theirs()[0][CURVES.index("hilbert")]
        self.bound = int((4 * patch)**(1 / 3) * 2)  # as published
        self.table = draw(heads, 3, 2 * self.bound + 1).requires_grad_() if table else None
        self.learned = [self.qkv] + [self.table] * table
        slots, self.begins, home = stage.slots(self.patch)
        self.slots, self.home = self.order[slots], home[torch.argsort(self.order)]
        self.exact = None
        self.widths = torch.diff(self.begins).tolist()
        self.ends, self.widest = self.begins.to(DEVICE, torch.int32), max(self.widths)

    def split(self, qkv, cells):
        q, k, v = qkv.view(-1, 3, self.heads, self.dim).unbind(1)
        return (turn(q, cells), turn(k, cells), v) if self.turns else (q, k, v)

    def by_hilt(self):
        length, words = len(self.order), {"order": "given", "pattern": f"segment:{self.patch},tail=borrow"}
        plan = hilt.plan(length, heads=self.heads, documents=self.stage.lengths, **words)

        def forward():
            more = {}
            if self.table is not None:
                x, y, z = self.table.unbind(1)
                whole = x[:, :, None, None] + y[:, None, :, None] + z[:, None, None]
                more = {"relative": whole, "points": self.stage.cells}
            q, k, v = (t[None] for t in self.split(self.qkv, self.stage.cells))
            return hilt.attention(q, k, v, plan=plan, permutation=self.order, **more).flatten(2)[0]
        return Run(forward, self.learned, self.d_o), {}

    def as_they(self, attend):
        """attend(q, k, v, cells) on rows in patches, between their gathers; kernel: without those."""
        def whole():
            cells = self.stage.cells[self.slots]
            return attend(*self.split(self.qkv[self.slots], cells), cells).reshape(len(self.slots), -1)[self.home]
        rows = [t.detach().contiguous().requires_grad_() for t in self.split(self.qkv.detach()[self.slots],
                                                                            self.stage.cells[self.slots])]
        cells, d_o = self.stage.cells[self.slots], self.d_o[self.slots].unflatten(1, (self.heads, -1))
        learned = rows + self.learned[1:]
        kernel = Run(lambda: attend(*rows, cells).reshape(d_o.shape), learned, d_o)
        for _ in range(7):
            kernel.clock()
        names, medians = ("kernel_forward_ms", "kernel_backward_ms"), kernel.medians()
        return Run(whole, self.learned, self.d_o), dict(zip(names, medians))

    def varlen(self, function):
        """Padded to a head dim that it takes."""
        refusal = None
        for dim in (self.dim, 32, 64):
            pad = max(0, dim - self.dim)

            def attend(q, k, v, cells, pad=pad):
                padded = (F.pad(t, (0, pad)) if pad else t for t in (q, k, v))
                o = function(*padded, self.ends, self.widest, self.dim**-0.5 if pad else None)
                return (o[0] if isinstance(o, tuple) else o)[..., : self.dim]
            try:
                run, more = self.as_they(attend)
                return run, {**more, **({"padded": dim, "refused_unpadded": refusal} if refusal else {})}
            except Exception as error:  # noqa: BLE001  told, with the next head dim
                refusal = refusal or f"{type(error).__name__}: {error}"[:200]
        raise RuntimeError(refusal)

    def patches(self, x):
        """[patches, heads, patch, dim]"""
        if min(self.widths) < self.widest:
            raise RuntimeError(f"patches of {min(self.widths)} to {self.widest} points are no batch")
        return x.unflatten(0, (-1, self.widest)).transpose(1, 2)

    def sdpa(self, backend):
        def attend(q, k, v, cells):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*map(self.patches, (q, k, v))).transpose(1, 2)
        return self.as_they(attend)

    def scores(self, cells):
        """What the tables say: [patches, heads, patch, patch]."""
        x = cells.unflatten(0, (-1, self.widest))
        apart = (x[:, :, None] - x[:, None]).clamp(-self.bound, self.bound) + self.bound
        flat = self.table.transpose(0, 1).transpose(1, 2).reshape(-1, self.heads)  # [3 (2 r + 1), heads]
        at = apart + torch.arange(3, device=DEVICE) * (2 * self.bound + 1)
        return flat.index_select(0, at.reshape(-1)).view(*at.shape, -1).sum(3).permute(0, 3, 1, 2)

    def eager(self):
        def attend(q, k, v, cells):
            q, k, v = map(self.patches, (q, k, v))
            s = (q.float() * self.dim**-0.5) @ k.float().transpose(2, 3) + self.scores(cells)
            return (torch.softmax(s, -1).to(v.dtype) @ v).transpose(1, 2)
        return self.as_they(attend)

    def masked(self):
        def attend(q, k, v, cells):
            q, k, v = map(self.patches, (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.scores(cells).to(q.dtype)).transpose(1, 2)
        return self.as_they(attend)

    def flex(self):
        def attend(q, k, v, cells):
            x, y, z = cells.unflatten(0, (-1, self.widest)).unbind(2)
            tables, r = self.table, self.bound

            def score(s, b, h, i, j):
                found = [tables[h, n, (c[b, i] - c[b, j]).clamp(-r, r) + r] for n, c in enumerate((x, y, z))]
                return s + found[0] + found[1] + found[2]
            return flex(*map(self.patches, (q, k, v)), score_mod=score).transpose(1, 2)
        return self.as_they(attend)

    def judge(self, name, run):
        self.exact = self.exact or self.exactly()
        o, gradients = run.once()
        return off([o.detach(), *gradients], self.exact)

    def exactly(self):
        """o and the gradients in f32, a patch at a time."""
        qkv = self.qkv.detach().float().requires_grad_()
        tables = self.table.detach().requires_grad_() if self.table is not None else None
        d_o, out = torch.zeros(len(self.slots), self.d_o.shape[1], device=DEVICE), []
        d_o[self.home] = self.d_o.float()
        for begin, end in zip(self.begins.tolist(), self.begins.tolist()[1:]):
            token = self.slots[begin:end]
            q, k, v = qkv[token].view(-1, 3, self.heads, self.dim).unbind(1)
            if self.turns:
                q, k = turned(q, self.stage.cells[token]), turned(k, self.stage.cells[token])
            s = torch.einsum("thd,uhd->htu", q, k) * self.dim**-0.5
            if tables is not None:
                x = self.stage.cells[token]
                at = (x[:, None] - x[None]).clamp(-self.bound, self.bound) + self.bound
                s = s + tables[:, 0, at[..., 0]] + tables[:, 1, at[..., 1]] + tables[:, 2, at[..., 2]]
            o = torch.einsum("htu,uhd->thd", torch.softmax(s, -1), v).flatten(1)
            o.backward(d_o[begin:end])
            out.append(o.detach())
        return torch.cat(out)[self.home], qkv.grad, *([tables.grad] if tables is not None else [])


def libraries(block, table):
    yield "hilt", block.by_hilt
    if table:
        yield from (("eager", block.eager), ("flex", block.flex), ("sdpa with a mask", block.masked))
        return

    def torch_varlen():
        from torch.nn.attention.varlen import varlen_attn
        return block.varlen(lambda q, k, v, ends, n, scale: varlen_attn(q, k, v, ends, ends, n, n,
                                                                   **({"scale": scale} if scale else {})))

    def fa2():
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        return block.varlen(lambda q, k, v, ends, n, scale: flash_attn_varlen_func(q, k, v, ends, ends, n, n,
                                                                                   softmax_scale=scale))

    def fa4():
        from flash_attn.cute.interface import flash_attn_varlen_func
        return block.varlen(lambda q, k, v, ends, n, scale: flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=n, max_seqlen_k=n, softmax_scale=scale))

    def by_patch():
        def each(q, k, v, ends, n, scale):
            rows = [[t.transpose(0, 1) for t in x.split(block.widths)] for x in (q, k, v)]
            return torch.cat([F.scaled_dot_product_attention(*x).transpose(0, 1) for x in zip(*rows)])
        return block.varlen(each)
    if DEVICE == "cpu":
        yield "patch by patch", by_patch
    yield from (("varlen", torch_varlen), ("fa2", fa2), ("fa4", fa4))
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION") if DEVICE == "cuda" else ("MATH",):
        yield name.partition("_")[0].lower(), functools.partial(block.sdpa, getattr(SDPBackend, name))


# ---- all of it ------------------------------------------------------------------------------------------------------

def order_ms(stage, repeats):
    """Of theirs and ours, which must be the same; no two points of a cloud have a cell."""
    same = torch.equal(stage.theirs()[0], torch.stack(stage.ours()))
    if not same:
        sys.exit("hilt's orders are not those of this script")
    each = [[timed(f)[1] for _ in range(repeats)] for f in (stage.theirs, stage.ours)]
    return [beside.statistics.median(x) for x in each]


def main():
    options = beside.options(__doc__)
    options.add_argument("--type", action="append", choices=TYPES, help="bf16 and f16, unless said")
    options.add_argument("which", nargs="*", default=["PTv3", "PTv3-table", "LitePT"], metavar="PTv3|PTv3-table|LitePT")
    told = options.parse_args()
    rates, right = beside.begun(told, "points"), True
    g = torch.Generator().manual_seed(11)
    cell, most, patch = (0.3, 1000, 64) if told.quick else (0.02, 102400, 1024)
    stages = [Stage([room(g, cell, most) for _ in range(3)])]
    while len(stages) < 5:
        stages.append(stages[-1].pooled())
    sorts = [order_ms(s, told.repeats) for s in stages]
    for model in told.which:
        table, turns = model == "PTv3-table", model == "LitePT"
        for at, channels, heads, blocks in LITEPT if turns else PTV3:
            for word in told.type or TYPES:
                block = Block(stages[at], patch, channels, heads, TYPES[word], table, turns)
                rows = len(block.order)
                pairs = heads * sum(n * min(n, block.patch) for n in stages[at].lengths)
                floor = floors(rates, heads * rows, channels // heads, pairs)
                line = {"figure": "points", "model": model, "stage": at, "points": rows, "clouds": stages[at].lengths,
                        "heads": heads, "dim": channels // heads, "patch": block.patch, "blocks": blocks, "dtype": word,
                        "order_ms": round(sorts[at][0], 4), "hilt_order_ms": round(sorts[at][1], 4)}
                right &= compared(line, dict(libraries(block, table)), block.judge, floor, told)[0]
    sys.exit(not right)


main()
