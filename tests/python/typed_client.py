"""What mypy --strict reads as a client's program; never run."""

import numpy as np
from numpy.typing import NDArray

import hilt

Floats = NDArray[np.float64]


def use(q: Floats, k: Floats, v: Floats) -> Floats:
    plan: hilt.Plan = hilt.plan(q.shape[1], heads=q.shape[2], order="hilbert:4x4", pattern="window2d:2x2")
    o: Floats = hilt.attention(q, k, v, plan=plan, sink=q[0, 0, :, 0], alibi=True)
    both: tuple[Floats, Floats] = hilt.attention(q, k, v, documents=[5, (2, 3)], return_lse=True)
    some: Floats = hilt.attention(q[:, 3:8], k, v, causal=True, queries=range(3, 8))
    d: hilt.Gradients = hilt.attention_vjp(q, k, v, both[0], pattern="slide:3")
    pi = hilt.order_of_points(q[0, :, 0, :3], "morton", documents=[q.shape[1]])
    o = hilt.attention(q, k, v, permutation=pi, pattern="segment:4")
    try:
        hilt.attention(q, k, v, causal="tokens")  # type: ignore[call-overload]
        hilt.attention(q, k, v, patern="dense")  # type: ignore[call-overload]
    except hilt.Error as e:
        print(e.code + 1, d.q, some, plan.picture().upper(), {plan: 1})
    return o
