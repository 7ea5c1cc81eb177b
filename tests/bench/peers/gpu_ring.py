#!/usr/bin/env python3
"""PyTorch's context parallelism on the GPUs of one host, beside hilt_gpu_ring: causal attention, 16 heads of 128, bf16,
forward + backward.

    gpu_ring.py [GPUS] [--lengths N ..] [--repeats N]

A line of JSON a length: the median by the clock, from when all ranks are ready to when all are done.
"""
import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, DIM = 16, 128
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def check(mesh, backend):
    """That the ranks attend to each other's rows, not each to its own: F.scaled_dot_product_attention is what
    context_parallel replaces."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, 4096, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(backend):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)), torch.no_grad():
            (got,) = context_parallel_unshard(mesh, [F.scaled_dot_product_attention(q, k, v, is_causal=True)], [2])
    assert (got - want).abs().max().item() < 0.05, "context_parallel does not compute this attention"


def rank_main(rank, world, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK=str(rank), WORLD_SIZE=str(world))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    for name, backend in BACKENDS.items():
        try:
            check(mesh, backend)
        except (AssertionError, NotImplementedError, RuntimeError) as e:
            if rank == 0:
                print(f"{name} left out: {e}", flush=True)
            continue
        for length in args.lengths:
            measure(rank, world, args, mesh, name, backend, length)
    dist.destroy_process_group()


def measure(rank, world, args, mesh, name, backend, length):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ms = []
    with context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)):
        for x in (q, k, v):
            x.requires_grad = True
        upstream = torch.randn_like(q)
        for i in range(args.repeats + 2):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(upstream)
            torch.cuda.synchronize()
            dist.barrier()
            if i >= 2:
                ms.append((time.perf_counter() - start) * 1e3)
            for x in (q, k, v):
                x.grad = None
        for x in (q, k, v):
            x.requires_grad = False
    if rank == 0:
        ms.sort()
        print(json.dumps({"figure": "ring_causal", "who": "PyTorch " + torch.__version__ + " context parallel, " + name,
                          "gpus": world, "length": length, "heads": HEADS,
                          "dim": DIM, "dtype": "bf16", "ms": ms[len(ms) // 2], "ms_min": ms[0], "ms_max": ms[-1]}),
                          flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="?", type=int, default=torch.cuda.device_count())
    parser.add_argument("--lengths", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    mp.spawn(rank_main, args=(arguments.gpus, arguments), nprocs=arguments.gpus)
