"""Clouds of points, several in a row as documents. Each layer sees them along another curve, in segments: points that
one curve parts are neighbours on the next. Each batch has its own orders, and all have one plan.

A cloud holds six shapes of four kinds. A point knows where it lies and a hint of its shape's kind, right 2 times in 5;
the hints around it say the rest. Ways, of which tests/bench/results/points.jsonl has five seeds each:
all, a curve a layer; row, points at random; groups, each layer with all curves, one a head; tail, all where a cloud's
last segment borrows; table, all with a table of how far the cells of two points lie apart; turn, all turned by x, y, z.

    python points.py [WAY] [SEED] [STEPS] [SEGMENT]
"""
import sys
import time
import hilt
import torch
from torch import nn

KINDS, SHAPES, WIDTH, HEADS, WAVES, CELLS = 4, 6, 48, 4, 24, 9
CURVES, CLOUDS = ("hilbert", "hilbert-trans", "morton", "morton-trans"), [300, 180, 344, 200]  # points of each
LENGTH = sum(CLOUDS)


def cloud(points, g):
    """Points [L, 3], hints [L] and kinds [L]."""
    shape = torch.randint(SHAPES, (points,), generator=g)
    kind, axis = (torch.randint(n, (SHAPES,), generator=g)[shape] for n in (KINDS, 3))
    x = torch.rand(points, 3, generator=g) * 2 - 1
    along = nn.functional.one_hot(axis, 3).bool()
    box = torch.where(along, x.sign(), x)  # two sides of it
    rod, flat = torch.where(along, x, 0.0), torch.where(along, 0.0, x)
    sphere, ring = (y / y.norm(dim=1, keepdim=True) for y in (x, flat))
    x = torch.stack([sphere, box, rod, ring])[kind, torch.arange(points)]
    told = torch.rand(points, generator=g) < 0.2  # 0.2 + 0.8 / 4
    hint = torch.where(told, kind, torch.randint(KINDS, (points,), generator=g))
    return torch.rand(SHAPES, 3, generator=g)[shape] + 0.12 * x, hint, kind


def turned(x, xyz):
    """Heads [1, L, H, D], a third of each by a coordinate: at two speeds."""
    angle = xyz[:, None, :, None] * torch.tensor([4.0, 16.0])
    a, b = x.view(*x.shape[:3], 3, 2, 2).unbind(4)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 4).view(x.shape)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.table = nn.Parameter(torch.zeros(HEADS, CELLS, CELLS, CELLS))

    def forward(self, x, xyz, way, **how):
        q, k, v = self.qkv(self.before(x)).view(1, LENGTH, 3, HEADS, WIDTH // HEADS).unbind(2)
        if way == "turn":
            q, k = turned(q, xyz), turned(k, xyz)
        if way == "table":
            how |= {"relative": self.table, "points": (20 * xyz).int()}
        swap = (lambda y: y.transpose(0, 2)) if way == "groups" else (lambda y: y)  # a row a head
        x = x + self.projection(swap(hilt.attention(*map(swap, (q, k, v)), **how)).flatten(2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in CURVES])
        self.first, self.last = nn.Linear(WAVES + KINDS, WIDTH), nn.Linear(WIDTH, KINDS)
        self.waves = nn.Linear(3, WAVES)

    def forward(self, xyz, hints, plan, way):
        x = self.first(torch.cat([torch.sin(20 * self.waves(xyz)), nn.functional.one_hot(hints, KINDS)], 1))[None]
        orders = torch.stack([hilt.order_of_points(xyz, curve, 10, CLOUDS) for curve in CURVES])
        for one, order in zip(self.layers, orders):
            x = one(x, xyz, way, plan=plan, permutation={"groups": orders, "row": torch.arange(LENGTH)}.get(way, order))
        return self.last(x).squeeze(0)


def main(way="all", seed=1, steps=400, segment=32):
    torch.manual_seed(int(seed))
    g, steps, right, ms = torch.Generator().manual_seed(int(seed)), int(steps), 0.0, 0.0
    heads, tail = 1 if way == "groups" else HEADS, ",tail=borrow" * (way == "tail")
    plan = hilt.plan(LENGTH, heads=heads, order="given", pattern=f"segment:{segment}{tail}", documents=CLOUDS)
    model, start = Model(), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for step in range(steps + 20):  # the last ones only look
        xyz, hints, kinds = (torch.cat(x) for x in zip(*[cloud(points, g) for points in CLOUDS]))
        with torch.set_grad_enabled(step < steps):
            said = model(xyz, hints, plan, way)
        right += 5 * (said.argmax(1) == kinds).double().mean().item()
        if step < steps:
            optimizer.zero_grad()
            nn.functional.cross_entropy(said, kinds).backward()
            optimizer.step()
            schedule.step()
            right, ms = 0.0, 1e3 * (time.process_time() - start) / steps
    print(f'{{"way": "{way}", "seed": {seed}, "steps": {steps}, "right": {right:.2f}, "processor_ms": {ms:.1f}}}')
    return right


if __name__ == "__main__":
    main(*sys.argv[1:])
