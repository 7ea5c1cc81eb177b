"""What a call of the package costs beyond the library's own: each is timed whole and, inside it, the library alone.
PYTHONPATH=DIR_WITH_HILT python3 tests/python/speed.py"""

import statistics
import time

import hilt
import torch
from hilt import _hilt

torch.set_num_threads(1)


def measured(call, count):
    """Medians over `count` calls: all of it, the library, and what is between them, in seconds."""
    whole, inside = [], []
    for _ in range(count):
        start = time.perf_counter()
        call()
        whole.append(time.perf_counter() - start)
        inside.append(_hilt.last_seconds())
    return statistics.median(whole), statistics.median(inside), statistics.median(w - i for w, i in zip(whole, inside))


class Nothing(torch.autograd.Function):
    """What torch itself takes for three inputs and their gradients."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q.clone()

    @staticmethod
    def backward(ctx, d):
        return ctx.saved_tensors


def tensors(batch, length, heads, dim, grad):
    return [torch.randn(batch, length, heads, dim, requires_grad=grad) for _ in range(3)]


small, taught = tensors(1, 16, 2, 8, False), tensors(1, 16, 2, 8, True)
d_o = torch.randn(1, 16, 2, 8)
plan = hilt.plan(16, heads=2, order="hilbert:4x4", pattern="window2d:2x2")
arrays = [x.numpy() for x in small]
kept = [hilt.attention(*taught, plan=plan) for _ in range(4000)]
idle = [Nothing.apply(*taught) for _ in range(4000)]
rows = {
    "torch, forward, plan=": lambda: hilt.attention(*small, plan=plan),
    "torch, forward, by text": lambda: hilt.attention(*small, order="hilbert:4x4", pattern="window2d:2x2"),
    "torch, forward, recorded": lambda: hilt.attention(*taught, plan=plan),
    "torch, backward": lambda: torch.autograd.grad(kept.pop(), taught, d_o),
    "NumPy, forward, plan=": lambda: hilt.attention(*arrays, plan=plan),
}
print(f"{'16 tokens':28} {'whole':>8} {'library':>8} {'between':>8}   us")
for name, call in rows.items():
    print(f"{name:28} " + " ".join(f"{1e6 * t:8.1f}" for t in measured(call, 3000)))
none = statistics.median([measured(lambda: torch.autograd.grad(idle.pop(), taught, d_o), 1)[0] for _ in range(3000)])
print(f"{'a function that does nothing, backward':46} {1e6 * none:8.1f}")
large = tensors(4, 4096, 8, 64, False)
plan = hilt.plan(4096, heads=8, order="hilbert:64x64", pattern="window2d:16x16")
whole, inside, _ = measured(lambda: hilt.attention(*large, plan=plan), 7)
print(f"4 x 4096 tokens, 8 heads of 64: {1e3 * whole:.1f} ms, the library {1e3 * inside:.1f} ms")
print(f"{inside / whole:.4f} of its speed")
