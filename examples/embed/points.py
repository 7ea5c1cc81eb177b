"""Clouds of points, several in a row as documents. Each layer sees them along another curve, in segments: points that
one curve parts are neighbours on the next. Each batch has its own orders, and all have one plan.

A cloud holds six shapes of four kinds. A point knows where it lies and a hint of its shape's kind, right 2 times in 5;
the hints around it say the rest. `row`: points as they come, at random.

    python points.py [all|morton|row] [SEED] [STEPS] [SEGMENT]
"""

import math
import sys

import hilt
import torch
from torch import nn

KINDS, SHAPES, WIDTH, HEADS, WAVES = 4, 6, 32, 4, 24
CLOUDS = [300, 180, 344, 200]  # points of each
LENGTH = sum(CLOUDS)
CURVES = ("hilbert", "hilbert-trans", "morton", "morton-trans")


def draw(g):
    """Points [L, 3], hints [L] and kinds [L] of a row of clouds."""
    rows = [cloud(points, g) for points in CLOUDS]
    return [torch.cat(x) for x in zip(*rows)]


def cloud(points, g):
    shape = torch.randint(SHAPES, (points,), generator=g)
    kind = torch.randint(KINDS, (SHAPES,), generator=g)[shape]
    axis = torch.randint(3, (SHAPES,), generator=g)[shape]
    x = torch.rand(points, 3, generator=g) * 2 - 1
    sphere = x / x.norm(dim=1, keepdim=True)
    along = nn.functional.one_hot(axis, 3).bool()
    box = torch.where(along, x.sign(), x)  # two sides of it
    rod = torch.where(along, x, torch.zeros(()))
    flat = torch.where(along, torch.zeros(()), x)
    ring = flat / flat.norm(dim=1, keepdim=True)
    x = torch.stack([sphere, box, rod, ring])[kind, torch.arange(points)]
    told = torch.rand(points, generator=g) < 0.2  # 0.2 + 0.8 / 4
    hint = torch.where(told, kind, torch.randint(KINDS, (points,), generator=g))
    return torch.rand(SHAPES, 3, generator=g)[shape] + 0.12 * x, hint, kind


def orders(xyz, curves):
    """The order of each layer: an int64 tensor [L], the point at each position."""
    if curves == "row":
        return [torch.arange(LENGTH)] * len(CURVES)
    return [hilt.order_of_points(xyz, c if curves == "all" else curves, bits=10, documents=CLOUDS) for c in CURVES]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, plan, order):
        q, k, v = self.qkv(self.before(x)).view(1, LENGTH, 3, HEADS, WIDTH // HEADS).unbind(2)
        x = x + self.projection(hilt.attention(q, k, v, plan=plan, permutation=order).flatten(2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in CURVES])
        self.first, self.last = nn.Linear(WAVES + KINDS, WIDTH), nn.Linear(WIDTH, KINDS)
        self.register_buffer("turn", 10 * torch.randn(3, WAVES))
        self.register_buffer("phase", 2 * math.pi * torch.rand(WAVES))

    def forward(self, xyz, hints, plan, curves):
        waves = torch.sin(xyz @ self.turn + self.phase)
        x = self.first(torch.cat([waves, nn.functional.one_hot(hints, KINDS)], 1)).unsqueeze(0)
        for layer, order in zip(self.layers, orders(xyz, curves)):
            x = layer(x, plan, order)
        return self.last(x).squeeze(0)


def main(curves="all", seed=1, steps=400, segment=32):
    torch.manual_seed(int(seed))
    g, steps = torch.Generator().manual_seed(int(seed)), int(steps)
    plan = hilt.plan(LENGTH, heads=HEADS, order="given", pattern=f"segment:{segment}", documents=CLOUDS)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(steps):
        xyz, hints, kinds = draw(g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xyz, hints, plan, curves), kinds).backward()
        optimizer.step()
        schedule.step()
    right = hinted = 0.0
    with torch.no_grad():
        for _ in range(20):
            xyz, hints, kinds = draw(g)
            right += 5 * (model(xyz, hints, plan, curves).argmax(1) == kinds).double().mean().item()
            hinted += 5 * (hints == kinds).double().mean().item()
    print(f"{curves}, seed {seed}: {right:.1f} % of points right after {steps} steps, {hinted:.1f} % by hints alone")
    return right


if __name__ == "__main__":
    main(*sys.argv[1:])
