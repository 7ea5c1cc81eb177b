"""Attention from its definition, in torch: the sets by their formulas, one pair at a time."""

import torch

torch.set_num_threads(1)  # its threads spin, and the tests of the suite run beside each other


def inputs(length, heads=2, dim=4, batch=1, kv_heads=None, dtype=torch.float64, seed=1, grad=True):
    """q, k, v [B, L, H, D]."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, h, dim) for h in (heads, kv_heads or heads, kv_heads or heads)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in shapes]


def asked(**options):
    """What the registered op takes beside its tensors."""
    from hilt import _torch

    names = ("order", "pattern", "causal", "dilation_mode", "documents", "queries", "plan", "backward", "scale",
             "softcap", "alibi", "dropout", "seed", "layout")
    return _torch._flat(*[{"backward": "fused", "dropout": 0.0, **options}.get(n) for n in names])


def mask(length, pair):
    """[L, L] of bool: pair(t, u)."""
    return torch.tensor([[bool(pair(t, u)) for u in range(length)] for t in range(length)])


def attention(q, k, v, allowed, scale=None, add=None, softcap=None, sink=None):
    """o and lse of dense attention under a mask; `add` [.., L, L] joins the scores."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if add is not None:
        s = s + add
    some = allowed.any(-1)  # rows with a key; the others are zero, and nothing comes back from them
    s = s.masked_fill(~allowed & some[:, None], -float("inf"))
    if sink is not None:
        s = torch.cat([s, sink.view(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.unsqueeze(-1))
    return (p[..., : v.shape[2]] @ v * some[:, None]).transpose(1, 2), lse
