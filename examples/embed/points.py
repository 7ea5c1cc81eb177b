"""Clouds of points, several in a row as documents. Each layer sees them along another curve, in segments: points that
one curve parts are neighbours on the next. Each batch has its own orders, and all have one plan.

A cloud holds six shapes of four kinds. A point knows where it lies and a hint of its shape's kind, right 2 times in 5;
the hints around it say the rest. `row`: points as they come, at random.

    python points.py [all|row] [SEED] [STEPS] [SEGMENT]
"""

import sys

import hilt
import torch
from torch import nn

KINDS, SHAPES, WIDTH, HEADS, WAVES = 4, 6, 32, 4, 24
CURVES, CLOUDS = ("hilbert", "hilbert-trans", "morton", "morton-trans"), [300, 180, 344, 200]  # points of each
LENGTH = sum(CLOUDS)


def draw(g):
    """Points [L, 3], hints [L] and kinds [L] of a row of clouds."""
    return [torch.cat(x) for x in zip(*[cloud(points, g) for points in CLOUDS])]


def cloud(points, g):
    shape = torch.randint(SHAPES, (points,), generator=g)
    kind, axis = (torch.randint(n, (SHAPES,), generator=g)[shape] for n in (KINDS, 3))
    x = torch.rand(points, 3, generator=g) * 2 - 1
    sphere = x / x.norm(dim=1, keepdim=True)
    along = nn.functional.one_hot(axis, 3).bool()
    box = torch.where(along, x.sign(), x)  # two sides of it
    rod, flat = torch.where(along, x, 0.0), torch.where(along, 0.0, x)
    ring = flat / flat.norm(dim=1, keepdim=True)
    x = torch.stack([sphere, box, rod, ring])[kind, torch.arange(points)]
    told = torch.rand(points, generator=g) < 0.2  # 0.2 + 0.8 / 4
    hint = torch.where(told, kind, torch.randint(KINDS, (points,), generator=g))
    return torch.rand(SHAPES, 3, generator=g)[shape] + 0.12 * x, hint, kind


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
        self.waves = nn.Linear(3, WAVES)

    def forward(self, xyz, hints, plan, curves):
        waves = torch.sin(20 * self.waves(xyz))
        x = self.first(torch.cat([waves, nn.functional.one_hot(hints, KINDS)], 1)).unsqueeze(0)
        for layer, curve in zip(self.layers, CURVES):
            order = hilt.order_of_points(xyz, curve, 10, CLOUDS) if curves == "all" else torch.arange(LENGTH)
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
    with torch.no_grad():
        right = [model(xyz, hints, plan, curves).argmax(1) == kinds for xyz, hints, kinds in map(draw, [g] * 20)]
    right = 100 * torch.cat(right).double().mean().item()
    print(f"{curves}, seed {seed}: {right:.1f} % of points right after {steps} steps")
    return right


if __name__ == "__main__":
    main(*sys.argv[1:])
