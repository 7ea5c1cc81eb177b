"""A small GPT written with torch.nn, its attention swapped by one line: it trains as with torch's own softmax. And the
example of points, for a few steps: along four curves they learn from their neighbours, as they come they do not. And
the smallest model, which loses the same in torch as in C++, from the same start."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import hilt
import support  # noqa: F401, one thread for torch
import torch
from torch import nn

STEPS, LENGTH, WIDTH, HEADS = 500 if os.environ.get("HILT_DEEP") else 60, 64, 32, 4
TEXT = "".join(f.read_text() for f in sorted(pathlib.Path(__file__).parent.glob("*.py")))
SYMBOLS = sorted(set(TEXT))
DATA = torch.tensor([SYMBOLS.index(c) for c in TEXT])


def softmax_attention(q, k, v):
    """[B, L, H, D], causal, in torch."""
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
    past = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    return (s.masked_fill(~past, -float("inf")).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def hilt_attention(q, k, v):
    return hilt.attention(q, k, v, order="row", causal="token")


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        x = x + self.out(self.attend(q, k, v).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, attend, symbols):
        super().__init__()
        self.token, self.place = nn.Embedding(symbols, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(attend), Block(attend))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols))

    def forward(self, t):
        return self.head(self.blocks(self.token(t) + self.place.weight[: t.shape[1]]))


def curve(attend, seed):
    """Losses on the characters of these tests."""
    torch.manual_seed(seed)
    model = Gpt(attend, len(SYMBOLS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        at = torch.randint(len(DATA) - LENGTH - 1, (8, 1)) + torch.arange(LENGTH + 1)
        logits = model(DATA[at[:, :-1]])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), DATA[at[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


class Training(unittest.TestCase):
    def test_the_curve_is_that_of_softmax(self):
        theirs, other = curve(softmax_attention, 1), curve(softmax_attention, 2)
        ours = curve(hilt_attention, 1)
        spread = (theirs - other).abs().mean()
        apart = (theirs - ours).abs().max()
        print(
            f"{STEPS} steps: {theirs[0]:.4f} -> {theirs[-1]:.4f} softmax, {ours[-1]:.4f} hilt; apart by {apart:.1e}, "
            f"seeds by {spread:.1e}"
        )
        self.assertLess(theirs[-1], theirs[0] - 1)
        self.assertLess(apart, spread)

    def test_points_learn_from_neighbours_along_curves(self):
        sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "embed"))
        import points

        deep = bool(os.environ.get("HILT_DEEP"))
        along, aside = (points.main(curves, steps=250 if deep else 150) for curves in ("all", "row"))
        self.assertGreater(along, aside + (20 if deep else 5))

    def test_names_lose_the_same_in_torch_and_every_way_of_ours(self):
        sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "bench" / "peers"))
        import names

        ways = ["fused", "taped", "token", "scalar"]
        said = subprocess.run([os.environ["NAMES"], "1000", *ways], check=True, capture_output=True, text=True).stdout
        ours, theirs = [json.loads(line) for line in said.splitlines()], names.run(1000, False)
        self.assertEqual([o["library"] for o in ours], ways)
        for way in ours:
            for loss in ("mean_loss", "last_loss"):
                self.assertAlmostEqual(way[loss], theirs[loss], delta=1e-4, msg=f"{way['library']}: {loss}")


if __name__ == "__main__":
    unittest.main()
