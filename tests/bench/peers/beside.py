"""What points.py and papers.py share: times of several libraries in turn, the floors of ../README.md, f32 to judge by,
and lines of JSON. Without a GPU all of it runs on a CPU, which tries the scripts and says nothing of speed.

Imported before torch: a graph here has a kernel or two, and processes that compile them cost more than they save."""
import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import statistics
import sys
import time
import traceback

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
import torch  # noqa: E402
import torch._dynamo  # noqa: E402

for limit in ("cache_size_limit", "recompile_limit"):  # a compiled call for each problem, of either name
    if hasattr(torch._dynamo.config, limit):
        setattr(torch._dynamo.config, limit, 1000)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
ALLOWED = 2e-2  # operands and results of 16 bits
BEGUN = time.perf_counter()


def tell(*what):
    """How far it is, and after how many seconds: on stderr."""
    print(f"{time.perf_counter() - BEGUN:7.1f} s:", *what, file=sys.stderr, flush=True)


class Late(BaseException):
    """No Exception: compilers wrap those, and a library that is tried in several ways goes on with the next."""


@contextlib.contextmanager
def limited(seconds):
    """Late after so many. What no signal reaches ends the script after three times as many, and says where it hangs."""
    def late(*_):
        raise Late(f"longer than {seconds} s")
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again, where it was caught
    faulthandler.dump_traceback_later(3 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def waited():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(call):
    """Its result and milliseconds. On a GPU by events, after work that empties the cache and gives the host time."""
    if DEVICE == "cpu":
        start = time.perf_counter()
        return call(), 1e3 * (time.perf_counter() - start)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    flush = torch.empty(64 << 20, dtype=torch.int32, device=DEVICE)
    for _ in range(8):
        flush.zero_()
    begin.record()
    result = call()
    end.record()
    waited()
    return result, begin.elapsed_time(end)


def rate(work, call, repeats=10):
    return work / (1e-3 * statistics.median([timed(call)[1] for _ in range(repeats + 2)][2:]))


def machine():
    """Bytes a second of a copy, FLOP a second of a product, exponentials a second: 16 a clock and multiprocessor."""
    big = DEVICE == "cuda"
    a = torch.empty(1 << (29 if big else 20), dtype=torch.bfloat16, device=DEVICE)
    b, m = torch.empty_like(a), torch.randn(8192 if big else 256, 8192 if big else 256, device=DEVICE).bfloat16()
    found = {"bytes": rate(4 * a.numel(), lambda: b.copy_(a)), "flops": rate(2 * len(m)**3, lambda: m @ m)}
    found["exps"] = 1e9
    if big:
        khz, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
        if driver.cuDeviceGetAttribute(ctypes.byref(khz), 13, torch.cuda.current_device()) or not khz.value:
            sys.exit("the driver does not say how fast the clock is")
        found["exps"] = 16e3 * khz.value * torch.cuda.get_device_properties(0).multi_processor_count
    return found


def floors(rates, rows, dim, pairs, more_bytes=0):
    """Least milliseconds forward and backward: rows of q, k, v and o in 16 bits, all heads counted, and pairs."""
    of = lambda tensors, products: 1e3 * max((2 * tensors * rows * dim + more_bytes) / rates["bytes"],  # noqa: E731
                                             products * dim * pairs / rates["flops"], pairs / rates["exps"])
    return {"forward_floor_ms": of(4, 4), "backward_floor_ms": of(8, 10)}


def off(got, want):
    """The relative error, of tensors or of tuples of them: the worst."""
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, want))


class Run:
    """forward() gives o. What is learned gets its gradients from d_o."""

    def __init__(self, forward, learned, d_o):
        self.forward, self.learned, self.d_o = forward, learned, d_o
        self.forward_ms, self.backward_ms = [], []

    def once(self):
        """o and the gradients."""
        o = self.forward()
        return o, torch.autograd.grad(o, self.learned, self.d_o)

    def clock(self):
        """Those that take a tenth of a second need fewer. Forward keeps what backward needs: without, a compiled
        function would be compiled once more."""
        if len(self.forward_ms) > 4 and sum(self.medians()) > 100:
            return
        o, ms = timed(self.forward)
        self.forward_ms.append(ms)
        self.backward_ms.append(timed(lambda: torch.autograd.grad(o, self.learned, self.d_o))[1])

    def medians(self):
        """Forward and backward, without the first two."""
        return [statistics.median(x[2:]) for x in (self.forward_ms, self.backward_ms)]


def compared(line, runs, judge, floor, told, ours="hilt"):
    """A line a library: `runs` makes each, or refuses; they are judged first and timed in turn. Whether all were right.
    The lines of ours say how far the best of the others is behind, if it is."""
    right, kept = True, {}

    def attempt(name, work):
        """Whether work() ended. What a library cannot do in the time that it has is told, and the others go on."""
        nonlocal right
        try:
            with limited(told.limit):
                work()
                waited()
            return True
        except (Exception, Late) as error:  # noqa: BLE001
            right &= not name.startswith(ours)
            kept.pop(name, None)
            refused = {"library": name, "refused": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({**line, **refused}), flush=True)
            if isinstance(error, Late):
                traceback.print_exc()
            return False

    def judged(name, make):
        nonlocal right
        run, more = make()
        tell(f"{name}: made")
        run.once()
        waited()
        tell(f"{name}: ran")
        error = judge(name, run)
        right &= error < ALLOWED
        kept[name] = run, {**more, "error": error, **({} if error < ALLOWED else {"wrong": True})}
        tell(f"{name}: judged")

    tell(" ".join(str(line[k]) for k in ("figure", "model", "stage", "problem", "dtype") if k in line))
    for name, make in runs.items():
        attempt(name, lambda: judged(name, make))  # noqa: B023
    for _ in range(told.repeats + 2):
        for name, (run, _) in list(kept.items()):
            attempt(name, run.clock)
    tell("timed")
    found = {name: run.medians() for name, (run, _) in kept.items()}
    peers = [t for n, t in found.items() if not n.startswith(ours)]
    for name, (forward, backward) in found.items():
        out = {**line, "library": name, "forward_ms": forward, "backward_ms": backward, **kept[name][1], **floor}
        for which, ms in (("forward", forward), ("backward", backward)):
            out[f"{which}_ratio"] = ms / floor[f"{which}_floor_ms"]
        if peers and name.startswith(ours):
            out["forward_ahead"], out["backward_ahead"] = (min(t[i] for t in peers) / found[name][i] for i in (0, 1))
        print(json.dumps({k: round(x, 4) if isinstance(x, float) else x for k, x in out.items()}), flush=True)
    return right, found


def options(doc):
    told = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--quick", action="store_true", help="small sizes and few runs, to try the script; also on a CPU")
    told.add_argument("--repeats", type=int, default=20)
    told.add_argument("--limit", type=int, default=60, help="seconds that a library may take to be judged")
    return told


def begun(told, figure):
    """Rates of this machine, which are a line too."""
    rates = machine()
    print(json.dumps({"figure": figure + "_machine", "torch": torch.__version__, **rates, "quick": told.quick,
                      "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"}), flush=True)
    return rates
