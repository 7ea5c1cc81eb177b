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
            asked = support.asked(pattern="slide:2", causal=True)
            args = (q, k, v, None, None, bias, None, None, None, *asked)
            torch.library.opcheck(torch.ops.hilt.attention.default, args)
            with torch.no_grad():
                o, lse = torch.ops.hilt.attention(*args)
            wanted = [True, False, True, False, False, True, False, False]
            detached = [t.detach() for t in (q, k, v, bias, o, lse)]
            q, k, v, bias, o, lse = detached
            args = (q, k, v, None, None, bias, None, None, None, *asked, o, lse, torch.randn_like(o), None, wanted)
            torch.library.opcheck(torch.ops.hilt.attention_backward.default, args)

    def test_func(self):
        """torch.func's transforms, inside one another, against calls without them; what is not there says so."""
        q, k, v = support.inputs(16, grad=False)
        many = torch.stack([q, 2 * q, -q])
        slopes = torch.tensor([0.5, 0.1], dtype=torch.float64)

        def f(q, slopes=slopes):
            return hilt.attention(q, k, v, pattern="slide:2", alibi=slopes)

        def loss(q, slopes=slopes):
            return (f(q, slopes) ** 2).sum()

        def plain(q):
            q = q.clone().requires_grad_()
            return torch.autograd.grad(loss(q), q)[0]

        self.assertTrue(torch.equal(torch.func.grad(loss)(q), plain(q)))
        each = torch.stack([f(x) for x in many])
        self.assertTrue(torch.equal(torch.vmap(f)(many), each))
        self.assertTrue(torch.equal(torch.vmap(f, in_dims=2)(many.permute(1, 2, 0, 3, 4)), each))
        self.assertTrue(torch.equal(torch.vmap(torch.func.grad(loss))(many), torch.stack([plain(x) for x in many])))
        sums = torch.func.grad(lambda many: (torch.vmap(f)(many) ** 2).sum())(many)
        self.assertTrue(torch.equal(sums, torch.stack([plain(x) for x in many])))
        by_slopes = torch.vmap(f, in_dims=(None, 0))(q, torch.stack([slopes, 2 * slopes]))
        self.assertTrue(torch.equal(by_slopes, torch.stack([f(q), f(q, 2 * slopes)])))
        jacobian = torch.func.jacrev(f)(q)
        torch.testing.assert_close((jacobian * 2 * f(q)[..., None, None, None, None]).sum((0, 1, 2, 3)), plain(q))
        with self.assertRaisesRegex(hilt.Error, "double backward is not supported"):
            torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q)
        with self.assertRaisesRegex(hilt.Error, "forward mode, as in jvp"):
            torch.func.jvp(f, (q,), (q,))

    def test_numbers_that_change(self):
        """Three values of everything that is a number: one graph, never more than one more for what may change, and
        with dynamic=True the first serves all."""
        from torch._dynamo.testing import CompileCounterWithBackend

        q, k, v = support.inputs(24)
        changes = {
            "documents": [[10, 14], [4, 20], [12, 12]],
            "grids": [[(2, 4), 16], [(4, 3), 12], [(3, 2), 18]],
            "rows": [[[10, 14], [4, 20]], [[8, 16], [24 - 5, 5]], [[12, 12], [12, 12]]],
            "tensors": [torch.tensor([10, 14]), torch.tensor([4, 20]), torch.tensor([6, 6, 12])],
            "sums": [torch.tensor([0, 10, 24]), torch.tensor([0, 4, 24]), torch.tensor([0, 6, 12, 24])],
            "counts": [torch.tensor([24 - i] + [1] * i) for i in range(1, 12)],
            "places": [torch.arange(2 + i) for i in range(11)],
            "ranges": [range(3, 5), range(4, 9), *[range(i, 2 * i) for i in range(2, 11)]],
            "plans": [hilt.plan(24, heads=2, pattern=f"slide:{i}") for i in range(1, 12)],
            "scale": [0.5, 0.25, 0.125],
            "softcap": [5.0, 3.0, 2.0],
            "dropout": [0.25, 0.5, 0.125],
            "queries": [[3], [5], [9]],
            "seed": [3, 4, 5],
            "length": [24, 20, 17],
        }
        for name, values in changes.items():
            def f(q, k, v, x):
                if name in ("documents", "grids", "rows", "tensors", "sums", "counts"):
                    return hilt.attention(q, k, v, documents=x, causal=True)
                if name == "queries":
                    return hilt.attention(q[:, :1], k, v, pattern="slide:8", causal=True, queries=x)
                if name in ("places", "ranges"):
                    rows = len(x) if name == "places" else x.stop - x.start
                    return hilt.attention(q[:, :rows], k, v, pattern="slide:8", causal=True, queries=x)
                if name == "plans":
                    return hilt.attention(q, k, v, plan=x)
                if name == "length":
                    return hilt.attention(q[:, :x], k[:, :x], v[:, :x], pattern="slide:4")
                if name == "dropout":
                    return hilt.attention(q, k, v, dropout=x, seed=1)
                return hilt.attention(q, k, v, dropout=0.25, seed=x) if name == "seed" else \
                    hilt.attention(q, k, v, **{name: x})

            for dynamic in (None, True):
                torch._dynamo.reset()
                counter = CompileCounterWithBackend("aot_eager")
                compiled = torch.compile(f, backend=counter, fullgraph=True, dynamic=dynamic)
                tensors = [t.repeat(2, 1, 1, 1).detach() for t in (q, k, v)] if name == "rows" else (q, k, v)
                for i, x in enumerate(values):
                    got, want = compiled(*tensors, x), f(*tensors, x)
                    self.assertTrue(torch.equal(got, want), (name, dynamic, x))
                    if want.requires_grad:
                        got, want = [torch.autograd.grad(y.sin().sum(), [q, k, v]) for y in (got, want)]
                        self.assertTrue(all(map(torch.equal, got, want)), (name, dynamic, x))
                self.assertLessEqual(counter.frame_count, 1 if dynamic else 2, (name, dynamic))

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
