#!/usr/bin/env python3
"""cuDNN and FlashAttention-4 on those of named_problems.txt that they can express: dense rows, windows of the last
tokens, and segments, which are rows of a batch in storage order. A line of JSON each, with its problem; backward by
atomic additions and, for FlashAttention-4, in a fixed order too. Medians; before each run the cache is emptied, for so
long that the host, slower than some kernels, has the launches ready. All is compiled before anything is timed.
"""
import argparse
import json
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def shape(word):
    """Batch, length, causal, and how many tokens before a causal query it sees, or None."""
    batch, length, pattern = int(word["--batch"]), int(word["--length"]), word["--pattern"]
    causal = word["--causal"] == "token"
    if pattern == "dense" and word["--order"] == "row":
        return batch, length, causal, None
    if pattern.startswith("slide:") and word["--order"] == "row" and causal:
        return batch, length, True, int(pattern.split(":")[1])
    if pattern.startswith("segment:") and "," not in pattern and length % int(pattern.split(":")[1]) == 0:
        width = int(pattern.split(":")[1])
        return batch * length // width, width, causal, None
    return None


def median(call, repeats):
    flush, times = torch.empty(64 << 20, dtype=torch.int32, device="cuda"), []
    for i in range(repeats + 3 if repeats else 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(8):
            flush.zero_()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times[3:] or times), 4)


def times(attend, x, repeats, **how):
    with torch.no_grad():
        forward = median(lambda: attend(*x), repeats)
    out = {"forward_ms": forward}
    for name, more in how.items():
        o = attend(*x, **more)
        d_o = torch.randn_like(o)
        out[name] = median(lambda: torch.autograd.grad(o, x, d_o, retain_graph=True), repeats)
    return out


def by_cudnn(causal, window):
    if window is not None:
        return None

    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            rows = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*rows, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return attend


def by_flash(causal, window):
    from flash_attn.cute.interface import flash_attn_func
    more = {} if window is None else {"window_size": (window, 0)}

    def attend(q, k, v, **how):
        o = flash_attn_func(q, k, v, causal=causal, **more, **how)
        return o[0] if isinstance(o, tuple) else o
    return attend


def cases():
    """Each problem with each library: its line, what attends, tensors, and the ways back."""
    libraries = {"cudnn": (by_cudnn, {"backward_ms": {}}),
                 "fa4": (by_flash, {"backward_ms": {"deterministic": False}, "ordered_ms": {"deterministic": True}})}
    for problem in (pathlib.Path(__file__).parents[1] / "named_problems.txt").read_text().splitlines():
        word = dict(zip(*[iter(problem.split())] * 2))
        if what := shape(word):
            batch, length, causal, window = what
            x = [torch.randn(batch, length, int(word[h]), int(word["--head-dim"]), device="cuda", dtype=torch.bfloat16,
                             requires_grad=True) for h in ("--heads", "--kv-heads", "--kv-heads")]
            for library, (made, how) in libraries.items():
                if attend := made(causal, window):
                    yield {"figure": "named_peer", "library": library, "problem": problem}, attend, x, how


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--after", type=pathlib.Path, help="a file: times nothing before it is there")
    told = options.parse_args()
    for repeats in (0, told.repeats):
        for line, attend, x, how in cases():
            try:
                line |= times(attend, x, repeats, **how)
            except Exception as error:  # what a library cannot do is told, and the others go on
                line["error"] = repr(error)[:200]
            if repeats:
                print(json.dumps(line), flush=True)
        while not repeats and told.after and not told.after.exists():
            time.sleep(1)


main()
