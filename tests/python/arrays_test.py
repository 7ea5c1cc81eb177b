"""hilt.attention and hilt.attention_vjp on arrays: NumPy, JAX where it is, and anything with __dlpack__."""

import subprocess
import sys
import unittest
import warnings

import hilt
import numpy


def arrays(dtype="f8"):
    g = numpy.random.default_rng(1)
    return [g.standard_normal((2, 16, 2, 4)).astype(dtype) for _ in range(4)]


class Arrays(unittest.TestCase):
    def test_numpy_without_torch(self):
        self.assertNotIn("torch", sys.modules)
        q, k, v, d_o = arrays()
        o, lse = hilt.attention(q, k, v, order="row", pattern="slide:3", return_lse=True)
        self.assertTrue(type(o) is numpy.ndarray and o.flags.writeable and lse.shape == (2, 2, 16))
        near = abs(numpy.subtract.outer(numpy.arange(16), numpy.arange(16))) <= 3
        s = numpy.where(near, numpy.einsum("bthd,buhd->bhtu", q, k) / 2, -numpy.inf)
        p = numpy.exp(s - numpy.log(numpy.exp(s).sum(-1, keepdims=True)))
        numpy.testing.assert_allclose(o, numpy.einsum("bhtu,buhd->bthd", p, v), atol=1e-12)
        d = hilt.attention_vjp(q, k, v, d_o, order="row", pattern="slide:3")
        numpy.testing.assert_allclose(d.v, numpy.einsum("bhtu,bthd->buhd", p, d_o), atol=1e-12)
        self.assertEqual(d[3:], (None,) * 4)
        # By differences, along a random direction, with terms.
        sink, dl = numpy.array([0.3, -0.2]), numpy.random.default_rng(2).standard_normal((2, 2, 16))
        for mode in ("fused", "hybrid", "taped"):
            how = {"order": "row", "pattern": "slide:3", "alibi": True, "backward": mode}
            d = hilt.attention_vjp(q, k, v, d_o, d_lse=dl, sink=sink, **how)

            def f(x):
                o, lse = hilt.attention(*x[:3], sink=x[3], return_lse=True, **how)
                return (o * d_o).sum() + (lse * dl).sum()

            way = [numpy.random.default_rng(3).standard_normal(x.shape) for x in (q, k, v, sink)]
            there, back = (f([x + e * w for x, w in zip((q, k, v, sink), way)]) for e in (1e-5, -1e-5))
            want = sum((g * w).sum() for g, w in zip((d.q, d.k, d.v, d.sink), way))
            self.assertAlmostEqual((there - back) / 2e-5, want, places=5)

    def test_an_order_of_points(self):
        q, k, v, d_o = arrays()
        points = numpy.stack(numpy.divmod(numpy.arange(16), 4)[::-1], 1)  # x, y of a 4 x 4 grid
        pi = hilt.order_of_points(points, bits=2)
        self.assertEqual(pi.dtype, numpy.int64)
        how = {"pattern": "segment:4"}
        numpy.testing.assert_array_equal(
            hilt.attention(q, k, v, permutation=pi, **how), hilt.attention(q, k, v, order="hilbert:4x4", **how)
        )
        got = hilt.attention_vjp(q, k, v, d_o, permutation=pi.astype("i4"), **how)
        want = hilt.attention_vjp(q, k, v, d_o, order="hilbert:4x4", **how)
        for a, b in zip(got[:3], want[:3]):
            numpy.testing.assert_array_equal(a, b)

    def test_a_table_by_points(self):
        q, k, v, d_o = arrays()
        table = numpy.random.default_rng(4).standard_normal((q.shape[2], 3, 5))
        points = numpy.stack(numpy.divmod(numpy.arange(16), 4), 1).astype("i4")
        numpy.testing.assert_array_equal(
            hilt.attention(q, k, v, relative=table, points=points),
            hilt.attention(q, k, v, relative=table, order="row:4x4"))
        got = hilt.attention_vjp(q, k, v, d_o, relative=table, points=points)
        want = hilt.attention_vjp(q, k, v, d_o, relative=table, order="row:4x4")
        numpy.testing.assert_array_equal(got.relative, want.relative)

    def test_what_cannot_be_lent_is_copied(self):
        q, k, v, _ = arrays("f4")
        want = hilt.attention(q, k, v)
        fixed = q.copy()
        fixed.flags.writeable = False
        numpy.testing.assert_array_equal(hilt.attention(fixed, k, v), want)
        numpy.testing.assert_array_equal(hilt.attention(q[:, ::-1].copy()[:, ::-1], k, v), want)
        numpy.testing.assert_array_equal(
            hilt.attention(q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), k, v), want
        )

    def test_the_right_layout_is_told_why_its_plan_cannot_be_made(self):
        for shape, options in (
            ([1, 50, 2, 10], {"pattern": "window2d:2x2,prefix=3"}),
            ([1, 67, 1, 10], {"pattern": "neighborhood2d:3x3"}),
            ([1, 7, 8, 10], {"pattern": "window2d:2x2"}),
            ([1, 10, 20, 4], {"documents": [12]}),
        ):
            q = numpy.zeros(shape)
            with self.assertRaises(hilt.Error) as raised:
                hilt.plan(shape[1], heads=shape[2], **options)
            with self.assertRaises(hilt.Error) as asked:
                hilt.attention(q, q, q, **options)
            self.assertEqual(str(asked.exception), str(raised.exception))

    def test_errors(self):
        q, k, v, d_o = arrays()
        for call, text in (
            (
                lambda: hilt.attention(q, k, None),
                "must be [batch, length, heads, dim], got [2, 16, 2, 4], [2, 16, 2, 4], []",
            ),
            (lambda: hilt.attention(q, k, [1.0]), "a list; expected a tensor"),
            (lambda: hilt.attention([1.0], k, v), "q ([1.0]): is of type list; expected a tensor [batch, length"),
            (lambda: hilt.attention_vjp(q, k, v, d_o, patern="dense"), "no argument 'patern'; did you mean pattern?"),
            (lambda: hilt.attention(q, k[:, :8], v[:, :8], pattern="slide:2"), "know dense alone, got slide:2"),
            (lambda: hilt.attention(q, k[:, :8], v[:, :8], causal=True), "neither causal, queries"),
            (lambda: hilt.attention(q, k, v[..., :2]), "pad the narrower head dim with zeros, and name the scale"),
            (lambda: hilt.attention(q, k, v, layout="bldh"), "layout ('bldh'): is of type str; expected blhd or bhld"),
            (lambda: hilt.attention(q, k, v, layout=3), "layout (3): is of type int; expected blhd or bhld"),
            (lambda: hilt.attention(q.astype("i4"), k, v), "i32"),
            (lambda: hilt.attention(q, k, v, bias=numpy.ones((16, 16), bool)), "a mask is where(mask, 0.0, -inf)"),
            (lambda: hilt.attention(q, k, v, documents=numpy.array([[10, 6], [4, 12]])),
             "documents (10x6,4x12): are 108 tokens of 16; a tensor [N, 2] or [N, 3] is of grids, rows of lengths are"),
            (lambda: hilt.attention(q, k, v, plan=hilt.plan(16)), "2 heads, but the plan is for heads=1"),
            (lambda: hilt.attention_vjp(q, k, v, d_o[:, :4]), "a gradient f64[2, 4, 2, 4] for o f64[2, 16, 2, 4]"),
        ):
            with self.assertRaises(hilt.Error) as raised:
                call()
            self.assertIn(text, str(raised.exception))

    def test_as_a_program(self):
        for words, status, text in (
            ([], 0, f"hilt {hilt.__version__}\n"),
            (["--cmake-dir"], 2, "hilt: error: --cmake-dir: the wheel has the module alone"),
            (["--zz"], 2, "hilt: error: --zz: expected --version or --cmake-dir"),
        ):
            ran = subprocess.run([sys.executable, "-m", "hilt", *words], capture_output=True, text=True)
            self.assertEqual((ran.returncode, (ran.stdout + ran.stderr).startswith(text)), (status, True), ran)

    def test_a_layout(self):
        """That of others, named, is the same call; what is read as few tokens of many heads is told, not refused."""
        q, k, v, d_o = arrays()
        turned = [x.swapaxes(1, 2) for x in (q, k, v, d_o)]
        options = {"pattern": "slide:2", "causal": True, "alibi": True}
        o, lse = hilt.attention(*turned[:3], layout="bhld", return_lse=True, **options)
        want, want_lse = hilt.attention(q, k, v, return_lse=True, **options)
        numpy.testing.assert_array_equal(o.swapaxes(1, 2), want)
        numpy.testing.assert_array_equal(lse, want_lse)
        d, want = hilt.attention_vjp(*turned, layout="bhld", **options), hilt.attention_vjp(q, k, v, d_o, **options)
        for a, b in zip(d[:3], want[:3]):
            numpy.testing.assert_array_equal(a.swapaxes(1, 2), b)
        few = turned[0]
        for told, call in (
            (True, lambda: hilt.attention(*turned[:3], causal=True)),
            (True, lambda: hilt.attention(few[..., :7], few[..., :7], few[..., :7])),
            (False, lambda: hilt.attention(few, few, few, layout="blhd")),
            (False, lambda: hilt.attention(few, few, few, plan=hilt.plan(2, heads=16))),
            (False, lambda: hilt.attention(few, few, few, documents=[2])),
            (False, lambda: hilt.attention(q[:, :1], q[:, :1], q[:, :1])),
            (False, lambda: hilt.attention(*[numpy.zeros((1, 5, 128, 64))] * 3)),  # a short prompt, Falcon's heads
        ):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call()
            self.assertEqual(len(seen), told)
            if told:
                self.assertRegex(str(seen[0].message), r"is read as \d+ tokens of \d+ heads; if it is \[batch, heads")

    def test_documents_fill_the_row(self):
        q, k, v, _ = arrays()
        with self.assertRaisesRegex(hilt.Error, r"documents \(10,2x2\): are 14 tokens of 16; name the last 2 too, or"):
            hilt.attention(q, k, v, documents=[10, (2, 2)])
        with self.assertRaisesRegex(hilt.Error, r"documents \(9\): are 9 tokens of 16"):
            hilt.plan(16, documents=[[16], [9]])
        whole = hilt.attention(q, k, v, documents=[10, (2, 3)])
        part = hilt.attention(q, k, v, documents=[10, (2, 2), ...])
        numpy.testing.assert_array_equal(part[:, :10], whole[:, :10])
        self.assertFalse(part[:, 14:].any())
        for lengths in (numpy.array([10, 6]), numpy.array([0, 10, 16]), numpy.array([[10, 1], [2, 3]])):
            numpy.testing.assert_allclose(hilt.attention(q, k, v, documents=lengths), whole)
        rows = [[10, 2, 3, 1], [4, 4, 4, 4]]  # four numbers are no grid
        numpy.testing.assert_array_equal(hilt.attention(q, k, v, documents=numpy.array(rows)),
                                         hilt.attention(q, k, v, documents=rows))
        numpy.testing.assert_array_equal(hilt.attention(q, k, v, documents=[(2, 8), ...]),
                                         hilt.attention(q, k, v, documents=[(2, 8)]))
        with self.assertRaisesRegex(hilt.Error, r"documents \(5,\.\.\.,10\): .*comes last"):
            hilt.attention(q, k, v, documents=[5, ..., 10])
        both = hilt.attention(q, k, v, documents=[[10, ...], [10, 6]])
        numpy.testing.assert_array_equal(both[1], whole[1])

    def test_any_library(self):
        class Lent:  # knows DLPack and nothing else
            def __init__(self, x):
                self.x, self.shape = x, x.shape

            def __dlpack__(self):
                return self.x.__dlpack__()

            def __dlpack_device__(self):
                return self.x.__dlpack_device__()

        q, k, v, _ = arrays("f4")
        o = hilt.attention(*[Lent(x) for x in (q, k, v)])
        numpy.testing.assert_array_equal(numpy.from_dlpack(o), hilt.attention(q, k, v))

    def test_jax(self):
        try:
            import jax
        except ImportError:
            self.skipTest("no jax; pip install jax")
        q, k, v, d_o = [jax.numpy.asarray(x) for x in arrays("f4")]
        how = {"order": "hilbert:4x4", "pattern": "window2d:2x2"}
        o = hilt.attention(q, k, v, **how)
        self.assertIsInstance(o, jax.Array)
        numpy.testing.assert_array_equal(o, hilt.attention(*[numpy.array(x) for x in (q, k, v)], **how))
        d = hilt.attention_vjp(q, k, v, d_o, **how)
        numpy.testing.assert_array_equal(d.k, hilt.attention_vjp(*[numpy.array(x) for x in (q, k, v, d_o)], **how).k)

    def test_gradients_of_jax(self):
        try:
            import jax
        except ImportError:
            self.skipTest("no jax; pip install jax")
        q, k, v, _ = [jax.numpy.asarray(x) for x in arrays("f4")]
        with self.assertRaisesRegex(hilt.Error, r"a tensor of bool; as a bias a mask is where\(mask, 0.0, -inf\)"):
            hilt.attention(q, k, v, bias=jax.numpy.ones((16, 16), bool))
        bias = jax.numpy.ones((1, 2, 16, 16)).at[0, 1].set(0.5)

        def loss(q, k, v, bias):
            o, lse = hilt.attention(q, k, v, causal=True, bias=bias, return_lse=True)
            return (o**2).sum() + lse.sum() + (hilt.attention(q, k, v, causal=True, layout="blhd") ** 2).sum()

        def definition(q, k, v, bias):
            def scores(add):
                s = jax.numpy.einsum("bthd,buhd->bhtu", q, k) / 2 + add
                return jax.numpy.where(jax.numpy.tri(16, dtype=bool), s, -jax.numpy.inf)

            def squares(s):
                return (jax.numpy.einsum("bhtu,buhd->bthd", jax.nn.softmax(s), v) ** 2).sum()

            return squares(scores(bias)) + jax.nn.logsumexp(scores(bias), -1).sum() + squares(scores(0))

        every = (0, 1, 2, 3)
        for got, want in zip(jax.grad(loss, every)(q, k, v, bias), jax.grad(definition, every)(q, k, v, bias)):
            numpy.testing.assert_allclose(got, want, atol=2e-5)
        for transformed in (jax.jit(loss), jax.jit(jax.grad(loss)), jax.vmap(lambda *x: loss(*[t[None] for t in x]))):
            with self.assertRaisesRegex(hilt.Error, "under jax.jit, vmap or scan there are no numbers yet; call"):
                transformed(q, k, v, bias.repeat(2, 0))


if __name__ == "__main__":
    unittest.main()
