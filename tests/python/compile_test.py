"""The registered op, for a torch that has torch.library.custom_op: one graph under torch.compile, and opcheck."""

import unittest

import hilt
import support
import torch


class Compiled(unittest.TestCase):
    def test_one_graph(self):
        from torch._dynamo.testing import CompileCounter

        slopes = torch.tensor([0.5, 0.1], dtype=torch.float64, requires_grad=True)
        plan = hilt.plan(16, heads=2, order="hilbert:4x4", pattern="window2d:2x2")

        def f(q, k, v):
            y = hilt.attention(q * 2, k, v, pattern="slide:2", alibi=slopes, backward="hybrid", softcap=5.0)
            z, lse = hilt.attention(y, k, v, plan=plan, return_lse=True)
            d = hilt.attention(z, k, v, documents=[10, (2, 3)], dropout=0.25, seed=3)
            return (d.sin() * z).sum() + lse.sum()

        x = support.inputs(16)
        want = torch.autograd.grad(f(*x), [*x, slopes])
        counter = CompileCounter()
        torch.compile(f, backend=counter, fullgraph=True)(*x)
        self.assertEqual(counter.frame_count, 1)
        got = torch.autograd.grad(torch.compile(f, backend="aot_eager", fullgraph=True)(*x), [*x, slopes])
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(got, want)))

    def test_opcheck(self):
        for dtype in (torch.float64, torch.float32):
            q, k, v = support.inputs(16, heads=4, kv_heads=2, dtype=dtype)
            bias = torch.randn(16, 16, dtype=dtype, requires_grad=True)
            how = ("fused", None, None, False, 0.0)
            text = repr((None, ("row", "slide:2", "token", "all_queries", "", None), how))
            torch.library.opcheck(torch.ops.hilt.attention.default, (q, k, v, None, None, bias, None, text, -1))
            with torch.no_grad():
                o, lse = torch.ops.hilt.attention(q, k, v, None, None, bias, None, text, -1)
            wanted = [True, False, True, False, False, True, False]
            detached = [t.detach() for t in (q, k, v, bias, o, lse)]
            q, k, v, bias, o, lse = detached
            args = (q, k, v, None, None, bias, None, text, -1, o, lse, torch.randn_like(o), None, wanted)
            torch.library.opcheck(torch.ops.hilt.attention_backward.default, args)

    def test_fake_and_autocast(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            q = torch.empty(2, 64, 4, 8, dtype=torch.bfloat16)
            o, lse = hilt.attention(q, q, q, pattern="segment:16", return_lse=True)
            self.assertEqual((o.shape, lse.shape, lse.dtype), (q.shape, (2, 4, 64), torch.float32))
        x = support.inputs(16, dtype=torch.float32, grad=False)

        def f(q, k, v):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return hilt.attention(q, k, v)

        self.assertTrue(torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(*x), f(*x)))


if __name__ == "__main__":
    unittest.main()
