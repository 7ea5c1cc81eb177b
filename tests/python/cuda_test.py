"""hilt.attention on CUDA tensors: the CPU's results, torch's streams, allocator, graphs and compiler. Skipped without a
GPU."""

import unittest

import hilt
import support
import torch
from attention_test import FAMILIES, MODES, terms
from hilt import _hilt

CODE = {"order": "row", "pattern": "segment:128", "causal": "token"}


def inputs(length=1024, dtype=torch.bfloat16, grad=True, device="cuda"):
    g = torch.Generator(device).manual_seed(1)
    shape = (2, length, 4, 64)
    return [torch.randn(shape, generator=g, device=device, dtype=dtype, requires_grad=grad) for _ in range(3)]


def step(x, d_o):
    o = hilt.attention(*x, **CODE)
    return o, *torch.autograd.grad(o, x, d_o)


def equal(these, those):
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class OnCuda(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        hilt.attention(*inputs(), **CODE)  # begins the library's own use of the GPU

    def setUp(self):
        self.x = inputs()
        self.d_o = torch.randn_like(self.x[0])

    def agrees(self, name, mode, options):
        def results(device):
            x = [t.detach().to(device).requires_grad_()
                 for t in support.inputs(16, heads=2, kv_heads=1, batch=2, dtype=torch.float32)]
            here = {n: t.detach().float().to(device).requires_grad_() if torch.is_tensor(t) else t
                    for n, t in options.items()}
            learned = [t for t in here.values() if torch.is_tensor(t)]
            o, lse = hilt.attention(*x, backward=mode, return_lse=True, **here)
            loss = (o * o).sum() + lse[torch.isfinite(lse)].sum()
            return o, lse, *torch.autograd.grad(loss, [*x, *learned])

        for got, want in zip(results("cuda"), results("cpu"), strict=True):
            torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=1e-4, msg=lambda m: f"{name}, {mode}: {m}")

    def test_families_and_terms_as_on_the_cpu(self):
        for mode in MODES:
            for name, options in [*FAMILIES.items(), *terms().items()]:
                self.agrees(name, mode, options)

    def test_behind_a_slow_kernel_on_a_side_stream(self):
        want = step(self.x, self.d_o)
        late = [torch.zeros_like(t, requires_grad=True) for t in self.x]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            torch.cuda._sleep(50_000_000)
            for t, value in zip(late, self.x):
                t.copy_(value)
            with torch.enable_grad():
                got = step(late, self.d_o)
            torch.cuda.current_stream().synchronize()
        self.assertTrue(equal(got, want))

    def test_two_streams_share_a_plan(self):
        plan = hilt.plan(1536, heads=4, order="hilbert", pattern="slide:40")  # its lists are not on the GPU yet
        x = inputs(1536)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        got = []
        for s in streams:
            with torch.cuda.stream(s):
                got.append(hilt.attention(*x, plan=plan))
        torch.cuda.synchronize()
        self.assertTrue(all(torch.equal(g, got[0]) for g in got))

    def test_captured_in_a_graph(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(self.x, self.d_o)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(self.x, self.d_o)
        for seed in range(3):
            with torch.no_grad():
                for t in self.x:
                    t.normal_(generator=torch.Generator("cuda").manual_seed(seed))
            graph.replay()
            kept = [t.clone() for t in out]
            others = [hilt.attention(*inputs(2048), **CODE) for _ in range(4)]  # none lies where the graph writes
            sums = [o.double().sum() for o in others]
            graph.replay()
            self.assertTrue(equal(kept, step(self.x, self.d_o)))
            self.assertTrue(equal(sums, [o.double().sum() for o in others]))

    def test_a_plan_of_the_first_time_is_refused_in_a_graph(self):
        graph = torch.cuda.CUDAGraph()
        with self.assertRaisesRegex(hilt.Error, "for the first time while"):
            with torch.cuda.graph(graph):
                hilt.attention(*self.x, order="row", pattern="slide:77")
        self.assertTrue(torch.isfinite(hilt.attention(*self.x, order="row", pattern="slide:77")).all())

    def test_results_are_of_torchs_allocator(self):
        hilt.attention(*self.x, **CODE)
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            o = hilt.attention(*self.x, **CODE)
        self.assertEqual(torch.cuda.memory_allocated() - before, o.numel() * o.element_size())
        del o
        self.assertEqual(torch.cuda.memory_allocated(), before)

    def test_out_of_memory_is_torchs(self):
        torch.cuda.set_per_process_memory_fraction(0.01)
        try:
            with self.assertRaises((torch.OutOfMemoryError, hilt.Error)):
                kept = [step(inputs(65536), torch.randn(2, 65536, 4, 64, device="cuda", dtype=torch.bfloat16))
                        for _ in range(100)]
                del kept
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        self.assertEqual(len(step(self.x, self.d_o)), 4)

    def test_memory_is_flat(self):
        seen = set()
        for i in range(1000):
            step(self.x, self.d_o)
            if i >= 10:
                seen.add((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        self.assertEqual(len(seen), 1, seen)

    def test_autocast(self):
        x = inputs(dtype=torch.float32)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            o = hilt.attention(*x, **CODE)
        self.assertEqual(o.dtype, torch.bfloat16)
        self.assertTrue(torch.equal(o, hilt.attention(*[t.bfloat16() for t in x], **CODE)))
        self.assertEqual(torch.autograd.grad(o.float().sum(), x)[0].dtype, torch.float32)

    def test_opcheck(self):
        q, k, v = self.x
        asked = support.asked(pattern="slide:2", causal=True)
        torch.library.opcheck(torch.ops.hilt.attention.default, (q, k, v, None, None, None, None, None, None, *asked))

    def test_compiled_in_one_graph(self):
        def f(q, k, v):
            return (hilt.attention(q * 2, k, v, **CODE).sin() * v).float().sum()

        compiled = torch.compile(f, fullgraph=True)
        for got, want in zip(torch.autograd.grad(compiled(*self.x), self.x), torch.autograd.grad(f(*self.x), self.x)):
            torch.testing.assert_close(got, want, atol=0.1, rtol=0.02)  # the compiler rounds what is around less often

    @unittest.skipUnless(torch.cuda.device_count() > 1, "one GPU")
    def test_another_gpu_than_the_current_one(self):
        want = step(self.x, self.d_o)
        there = [t.detach().to("cuda:1").requires_grad_() for t in self.x]
        for _ in range(2):
            got = step(there, self.d_o.to("cuda:1"))
            self.assertEqual(torch.cuda.current_device(), 0)
            self.assertTrue(equal([t.to("cuda:0") for t in got], want))
            self.assertTrue(equal(step(self.x, self.d_o), want))



if __name__ == "__main__":
    unittest.main()
