"""hilt.attention on torch tensors: against the definition, against differences, and as a citizen of torch."""

import inspect
import itertools
import os
import pathlib
import pickle
import subprocess
import threading
import unittest
import unittest.mock

import hilt
import support
import torch
from hilt import _hilt

MODES = ("fused", "hybrid", "taped")
# One of each family, on 16 tokens, a 4 x 4 or 4 x 2 x 2 grid.
FAMILIES = {
    "dense": {},
    "segment": {"order": "hilbert", "pattern": "segment:4"},
    "dilated": {"order": "hilbert", "pattern": "segment:8,dilation=2", "dilation_mode": "longnet"},
    "branches": {"order": "hilbert", "pattern": "segment:4+segment:16,dilation=4"},
    "slide": {"pattern": "slide:2", "causal": "token"},
    "neighborhood": {"order": "hilbert", "pattern": "neighborhood:3"},
    "window2d": {"order": "hilbert:4x4", "pattern": "window2d:2x2,shift=1x1"},
    "slide2d": {"order": "hilbert:4x4", "pattern": "slide2d:1x1"},
    "neighborhood2d": {"order": "hilbert:4x4", "pattern": "neighborhood2d:3x3", "causal": "token"},
    "window3d": {"order": "hilbert:4x2x2", "pattern": "window3d:2x2x1"},
    "slide3d": {"order": "hilbert:4x2x2", "pattern": "slide3d:1x1x0"},
    "neighborhood3d": {"order": "hilbert:4x2x2", "pattern": "neighborhood3d:3x1x1"},
    "blocks": {"pattern": "blocks:4@local:1"},
    "union": {"pattern": "slide:1|blocks:4@global_local:1:0"},
    "documents": {"pattern": "segment:4", "documents": [5, (2, 3), ...]},
    "tail": {"order": "hilbert", "pattern": "segment:6,tail=borrow"},
}


def terms():
    g = torch.Generator().manual_seed(2)

    def table(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()

    return {
        "none": {},
        "softcap": {"softcap": 0.7},
        "published": {"alibi": True},
        "alibi": {"alibi": table(2)},
        "relative": {"relative": table(2, 7)},
        "bias": {"bias": table(1, 2, 1, 16)},
        "sink": {"sink": table(2)},
        "dropout": {"dropout": 0.3, "seed": 5},
        "scale": {"scale": 0.2},
    }


def grid_pair(rule):
    return lambda t, u: rule(t // 4 - u // 4, t % 4 - u % 4)


class AgainstTheDefinition(unittest.TestCase):
    SETS = {
        "dense": lambda t, u: True,
        "slide": lambda t, u: abs(t - u) <= 2 and u <= t,
        "slide2d": grid_pair(lambda dy, dx: abs(dy) <= 1 and abs(dx) <= 1),
        "documents": lambda t, u: (t < 4 and u < 4)
        or (4 <= t < 5 and 4 <= u < 5)
        or (5 <= t < 9 and 5 <= u < 9)
        or (9 <= t < 11 and 9 <= u < 11),
    }

    def test_forward_and_gradients(self):
        for name, pair in self.SETS.items():
            options = {**FAMILIES[name], "order": "row"}
            allowed = support.mask(16, pair)
            for mode in MODES:
                x = support.inputs(16, heads=4, kv_heads=2, batch=2)
                some = allowed.any(-1)
                o, lse = hilt.attention(*x, backward=mode, return_lse=True, **options)
                want, want_lse = support.attention(*x, allowed)
                w = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(3))
                w_lse = torch.randn(lse.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(4)) * some
                torch.testing.assert_close(o, want)
                self.assertTrue((lse[..., ~some] == -float("inf")).all())
                torch.testing.assert_close(lse[..., some], want_lse[..., some])
                ours = torch.autograd.grad((o * w).sum() + (lse[..., some] * w_lse[..., some]).sum(), x)
                theirs = torch.autograd.grad((want * w).sum() + (want_lse[..., some] * w_lse[..., some]).sum(), x)
                for a, b in zip(ours, theirs):
                    torch.testing.assert_close(a, b, msg=lambda m: f"{name}, {mode}: {m}")

    def test_terms(self):
        t = torch.arange(16)
        distance = (t[:, None] - t).double()
        for name, options in terms().items():
            given = {n: x for n, x in options.items() if torch.is_tensor(x)}
            if name == "dropout":
                continue
            x = support.inputs(16)
            add = {
                "published": -torch.tensor([2.0**-4, 2.0**-8]).double().view(1, 2, 1, 1) * distance.abs(),
                "alibi": (
                    -options.get("alibi", torch.ones(2)).view(1, 2, 1, 1) * distance.abs() if name == "alibi" else None
                ),
                "relative": (
                    options["relative"][:, (distance.long().clamp(-3, 3) + 3)][None] if name == "relative" else None
                ),
                "bias": options.get("bias"),
            }.get(name)
            how = {n: options[n] for n in ("scale", "softcap", "sink") if n in options}
            want, _ = support.attention(*x, torch.ones(16, 16, dtype=torch.bool), add=add, **how)
            o = hilt.attention(*x, **options)
            torch.testing.assert_close(o, want)
            every = [*x, *given.values()]
            for a, b in zip(torch.autograd.grad((o**2).sum(), every), torch.autograd.grad((want**2).sum(), every)):
                torch.testing.assert_close(a, b, msg=lambda m: f"{name}: {m}")


class Gradcheck(unittest.TestCase):
    """Every mode x family x term, in f64. HILT_DEEP=1: every element, not a random projection."""

    def check(self, mode):
        fast = not os.environ.get("HILT_DEEP")
        for family, options in FAMILIES.items():
            for term, more in terms().items():
                x = support.inputs(16, dim=3)
                given = {n: t for n, t in more.items() if torch.is_tensor(t)}
                rest = {n: t for n, t in more.items() if n not in given}

                def run(q, k, v, *tensors):
                    named = dict(zip(given, tensors))
                    return hilt.attention(q, k, v, backward=mode, **options, **named, **rest)

                with self.subTest(family=family, term=term):
                    self.assertTrue(torch.autograd.gradcheck(run, [*x, *given.values()], fast_mode=fast))

    def test_fused(self):
        self.check("fused")

    def test_hybrid(self):
        self.check("hybrid")

    def test_taped(self):
        self.check("taped")


class Citizen(unittest.TestCase):
    def test_nothing_is_copied(self):
        x = [torch.randn(2, 4, 64, 8) for _ in range(3)]
        seen = [t.transpose(1, 2) for t in x]
        for t, s in zip(x, seen):
            self.assertEqual(_hilt.address(s), t.data_ptr())
            self.assertEqual(_hilt.address(s[:, 3:]), s[:, 3:].data_ptr())
        call = hilt._native(*hilt._asked()[:3], *seen[:2])
        arrays = [t.numpy() for t in seen]
        taken = _hilt.forward(call, None, True, (*arrays, *[None] * 6))[0]
        self.assertEqual(
            torch.utils.dlpack.from_dlpack(taken.capsule()).data_ptr(), taken.__array_interface__["data"][0]
        )

        def extra(*tensors):  # bytes held for a while, beyond what is given back
            hilt.attention(*tensors, pattern="segment:16")
            _hilt.peak_bytes()
            o = hilt.attention(*tensors, pattern="segment:16")
            return _hilt.peak_bytes() + 0 * o.numel()

        self.assertEqual(extra(*seen), extra(*[t.contiguous() for t in seen]))
        strided = torch.randn(2, 64, 4, 16)[..., ::2]  # neighbours along D apart: the stated copy
        self.assertGreaterEqual(extra(strided, *seen[1:]), strided.numel() * 4)
        torch.testing.assert_close(
            hilt.attention(strided, *seen[1:]), hilt.attention(strided.contiguous(), *seen[1:]), rtol=0, atol=0
        )

    def test_no_grad_and_inference_mode(self):
        x = support.inputs(16)
        o = hilt.attention(*x)
        self.assertTrue(o.requires_grad)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                y = hilt.attention(*x)
            self.assertFalse(y.requires_grad)
            self.assertTrue(torch.equal(y, o))
        asked = []
        spy = unittest.mock.patch.object(_hilt, "backward", lambda *a, f=_hilt.backward: asked.append(a[2]) or f(*a))
        self.enterContext(spy) if hasattr(self, "enterContext") else spy.start()
        only_k = hilt.attention(x[0].detach(), x[1], x[2].detach())
        only_k.sum().backward()
        self.assertIsNotNone(x[1].grad)
        self.assertIsNone(x[0].grad)
        self.assertEqual(tuple(asked[0]), (False, True, False) + (False,) * 6)

    def test_autocast(self):
        x = support.inputs(16, dtype=torch.float32)
        bias = torch.randn(16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            o = hilt.attention(*x, bias=bias)
        self.assertEqual(o.dtype, torch.bfloat16)
        o.sum().backward()
        self.assertEqual({x[0].grad.dtype, bias.grad.dtype}, {torch.float32})
        low = [t.detach().bfloat16() for t in x]
        self.assertTrue(torch.equal(o, hilt.attention(*low, bias=bias.detach())))

    def test_double_backward_is_refused_with_a_sentence(self):
        x = support.inputs(16)
        (d,) = torch.autograd.grad((hilt.attention(*x) ** 2).sum(), x[0], create_graph=True)
        with self.assertRaisesRegex(hilt.Error, "double backward is not supported"):
            d.sum().backward()

    def test_forward_mode_is_refused_with_a_sentence(self):
        from torch.autograd import forward_ad

        q, k, v = support.inputs(16, grad=False)
        with forward_ad.dual_level(), self.assertRaisesRegex(hilt.Error, "forward mode, as in jvp, is not supported"):
            hilt.attention(forward_ad.make_dual(q, q), k, v)

    def test_what_was_written_to_is_noticed(self):
        x = support.inputs(16)
        o = hilt.attention(*x)
        with torch.no_grad():
            x[0].zero_()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            o.sum().backward()

    def test_checkpoints_and_other_threads(self):
        from torch.utils.checkpoint import checkpoint

        x = support.inputs(64)
        want = torch.autograd.grad((hilt.attention(*x, pattern="slide:3") ** 2).sum(), x)
        for reentrant in (True, False):
            o = checkpoint(lambda *t: hilt.attention(*t, pattern="slide:3"), *x, use_reentrant=reentrant)
            [t.grad.zero_() for t in x if t.grad is not None]
            (o**2).sum().backward()
            self.assertTrue(all(torch.equal(t.grad, w) for t, w in zip(x, want)))
        plan = hilt.plan(64, heads=2, pattern="slide:3")
        for mode in MODES:
            found = []

            def work():
                y = (hilt.attention(*x, plan=plan, backward=mode) ** 2).sum()
                other = threading.Thread(target=lambda: found.append(torch.autograd.grad(y, x)))
                other.start()
                other.join()

            many = [threading.Thread(target=work) for _ in range(4)]
            [t.start() for t in many]
            [t.join() for t in many]
            self.assertEqual(len(found), 4)
            self.assertTrue(all(torch.equal(a, b) for f in found for a, b in zip(f, found[0])), mode)

    def test_same_bits_for_any_number_of_threads(self):
        x = support.inputs(512, dtype=torch.float32)
        results = []
        for threads in (1, 2, 3):
            hilt.set_thread_count(threads)
            o = hilt.attention(*x, pattern="segment:128,dilation=2+slide:40")
            results.append([o.detach(), *torch.autograd.grad((o**2).sum(), x)])
        hilt.set_thread_count(os.cpu_count() or 1)
        for r in results[1:]:
            self.assertTrue(all(torch.equal(a, b) for a, b in zip(r, results[0])))

    def test_types(self):
        for dtype, near in (
            (torch.float64, 1e-12),
            (torch.float32, 1e-5),
            (torch.bfloat16, 2e-2),
            (torch.float16, 3e-3),
        ):
            x = support.inputs(16, dtype=dtype, grad=False)
            o, lse = hilt.attention(*x, return_lse=True)
            want, _ = support.attention(*[t.double() for t in x], torch.ones(16, 16, dtype=torch.bool))
            self.assertEqual((o.dtype, lse.dtype), (dtype, dtype if dtype == torch.float64 else torch.float32))
            self.assertLess((o.double() - want).abs().max(), near * 4)

    def test_errors_are_the_librarys(self):
        q, k, v = support.inputs(16, grad=False)
        cases = {
            "attention: q is f64, k f32, v f64; convert with to()": lambda: hilt.attention(q, k.float(), v),
            "attention: 16 tokens, but the plan is for 8": lambda: hilt.attention(q, k, v, plan=hilt.plan(8, heads=2)),
            "give either": lambda: hilt.attention(q, k, v, plan=hilt.plan(16, heads=2), pattern="dense"),
            "needs a seed": lambda: hilt.attention(q, k, v, dropout=0.1),
            "got [2, 3]": lambda: hilt.attention(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)),
            "torch.int64": lambda: hilt.attention(q.long(), k.long(), v.long()),
            "float16; as a bias a mask is torch.where(mask, 0.0, -torch.inf)": lambda: hilt.attention(
                q, k, v, bias=torch.ones(16, 16) > 0
            ),
            "on meta": lambda: hilt.attention(q.to("meta"), k.to("meta"), v.to("meta")),
            "relative: table [3, 5] does not fit heads 2": lambda: hilt.attention(
                q, k, v, relative=torch.ones(3, 5).double()
            ),
        }
        for text, call in cases.items():
            with self.assertRaises(hilt.Error) as raised:
                call()
            self.assertIn(text, str(raised.exception))
            self.assertEqual(raised.exception.code, 2)
        self.assertEqual(str(pickle.loads(pickle.dumps(raised.exception))), str(raised.exception))

    @unittest.skipUnless(os.environ.get("ATTEND"), "no program attend")
    def test_an_error_has_the_text_of_the_program(self):
        import tempfile

        import numpy

        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "x.npy")
            numpy.save(path, numpy.ones((1, 16, 2, 4)))
            for option, value in (("order", "hilbrt"), ("order", "snake:3x3"), ("pattern", "slide:-1")):
                ran = subprocess.run(
                    [
                        os.environ["ATTEND"],
                        *[f"--{n}={path}" for n in "qkv"],
                        f"--{option}={value}",
                        f"--out={directory}/out",
                    ],
                    capture_output=True,
                    text=True,
                )
                with self.assertRaises(hilt.Error) as raised:
                    hilt.plan(16, heads=2, **{option: value})
                self.assertEqual(ran.stderr.strip(), f"attend: error: --{raised.exception}")
                self.assertEqual(ran.returncode, raised.exception.code)


class Arguments(unittest.TestCase):
    def test_whatever_is_given_is_taken_or_refused_with_a_sentence(self):
        """Every argument, every odd value: nothing raises but hilt.Error, and no signature of the binding is shown."""
        import numpy

        odd = [None, True, False, 0, -1, 3, 2**70, 0.5, float("nan"), "", "zz", b"x", 1j, object(), [], [1], [[]], (),
               (3, 5)]
        odd += [{}, range(3, 8), [5, (2, 3)], [None], numpy.float32(0.5), numpy.int64(3), numpy.ones(3),
                numpy.array(["a"])]
        odd += [torch.ones(3), torch.tensor(3), torch.tensor(0.5), torch.ones(1, 16, 2, 4).double(), torch.float32,
                type]
        q, k, v = support.inputs(16)
        arrays = [x.detach().numpy() for x in (q, k, v)]
        plan = hilt.plan(16, heads=2)
        for x in odd:
            for name in [*hilt.attention.__kwdefaults__, "zz"]:
                given = {name: x}
                self.judge(lambda: hilt.attention(q, k, v, **given), name, x)
                self.judge(lambda: hilt.attention(*arrays, **given), name, x)
                self.judge(lambda: hilt.attention_vjp(*arrays, arrays[0], **given), name, x)
            for name in [*hilt.plan.__kwdefaults__, "zz"]:
                self.judge(lambda: hilt.plan(16, **{name: x}), name, x)
            for i in range(4):
                given = [*arrays, arrays[0]]
                given[i] = x
                self.judge(lambda: hilt.attention_vjp(*given), i, x)
                self.judge(lambda: hilt.attention_vjp(*given, plan=plan), i, x)
                if i < 3:
                    given = [q, k, v]
                    given[i] = x
                    self.judge(lambda: hilt.attention(*given), i, x)
                    self.judge(lambda: hilt.attention(*given, plan=plan), i, x)
            self.judge(lambda: hilt.plan(x), "length", x)
            self.judge(lambda: plan.picture(x, 4), "head", x)
            self.judge(lambda: plan.picture(0, x), "cells", x)
            self.judge(lambda: hilt.Plan(16, 2, "row", "dense", "none", "all_queries", "", x), "Plan", x)
            if x is not True:
                self.judge(lambda: hilt.set_thread_count(x), "threads", x)
        hilt.set_thread_count(os.cpu_count() or 1)

    def judge(self, call, name, x):
        try:
            call()
        except hilt.Error as e:
            self.assertNotRegex(str(e), "arg[0-9]|incompatible|\n")
        except Exception as e:
            self.fail(f"{name}={x!r}: {type(e).__name__}: {e}")

    def test_what_is_said(self):
        q, k, v = support.inputs(16, grad=False)
        cases = {
            "causal (3): is of type int; expected True, False or none | token | curve": lambda: hilt.plan(16, causal=3),
            "order (5): is of type int; expected a str": lambda: hilt.attention(q, k, v, order=5),
            "seed (-1): expected a whole number from 0 to": lambda: hilt.attention(q, k, v, seed=-1),
            "attention: no argument 'patern'; did you mean pattern?": lambda: hilt.attention(q, k, v, patern="dense"),
            "attention: no argument 'is_causal'; did you mean causal?": lambda: hilt.attention(q, k, v, is_causal=True),
            "attention_vjp: no argument 'd_lze'; did you mean d_lse?": lambda: hilt.attention_vjp(q, k, v, q, d_lze=1),
            "plan: no argument 'ordr'; did you mean order?": lambda: hilt.plan(16, ordr="row"),
            "plan (7): is of type int; expected what hilt.plan(..) gives": lambda: hilt.attention(q, k, v, plan=7),
            "k (array([[": lambda: hilt.attention(q, k.numpy(), v),
            "q (array([[": lambda: hilt.attention(q.numpy(), k, v),
            "is of type ndarray; expected a torch.Tensor, as others are": lambda: hilt.attention(q, k.numpy(), v),
            "hilt.plan(..) makes one": lambda: hilt.Plan(16, 2),
        }
        for text, call in cases.items():
            with self.assertRaises(hilt.Error) as raised:
                call()
            self.assertIn(text, str(raised.exception))

    def test_what_goes_for_a_number_or_a_word(self):
        import numpy

        q, k, v = support.inputs(16, grad=False)
        want = hilt.attention(q, k, v, scale=0.5, dropout=0.25, seed=3, causal="token")
        got = hilt.attention(q, k, v, scale=numpy.float32(0.5), dropout=numpy.float64(0.25), seed=numpy.int64(3),
                             causal=True)
        self.assertTrue(torch.equal(got, want))
        self.assertTrue(torch.equal(hilt.attention(q, k, v, scale=1), hilt.attention(q, k, v, scale=1.0)))

    def test_the_layout_of_others_is_recognised(self):
        q, k, v = [x.transpose(1, 2) for x in support.inputs(16, grad=False)]  # [B, H, L, D]
        plan = hilt.plan(16, heads=2, pattern="slide:2")
        for call in (
            lambda: hilt.attention(q, k, v, plan=plan),
            lambda: hilt.attention(q, k, v, order="hilbert:4x4"),
            lambda: hilt.attention(*[x.numpy() for x in (q, k, v)], documents=[10, (2, 3)]),
        ):
            with self.assertRaisesRegex(hilt.Error,
                                        r"\[1, 2, 16, 4\] for a plan of 16 tokens looks like \[batch, heads"):
                call()
        with self.assertRaisesRegex(hilt.Error, "2 tokens"):  # fits neither way
            hilt.attention(q, k, v, order="hilbert:4x8")


class Queries(unittest.TestCase):
    """Tokens, as in C++: rows of the full call, in every mode; without them a shorter q is the last rows."""

    def test_rows_of_the_full_call(self):
        slopes = torch.tensor([0.3, 0.1], dtype=torch.float64, requires_grad=True)
        for name in ("slide", "neighborhood2d", "branches"):
            options = FAMILIES[name]
            for mode, rows in itertools.product(MODES, (range(3, 8), [0, 3, 4, 11])):
                q, k, v = support.inputs(16)
                part = q[:, rows].detach().requires_grad_()
                whole, whole_lse = hilt.attention(q, k, v, alibi=slopes, backward=mode, return_lse=True, **options)
                o, lse = hilt.attention(
                    part, k, v, alibi=slopes, backward=mode, queries=rows, return_lse=True, **options
                )
                torch.testing.assert_close(o, whole[:, rows])
                torch.testing.assert_close(lse, whole_lse[..., rows])
                ours = torch.autograd.grad((o**2).sum() + lse.sum(), [part, k, v, slopes])
                loss = (whole[:, rows] ** 2).sum() + whole_lse[..., rows].sum()
                theirs = torch.autograd.grad(loss, [q, k, v, slopes])
                for a, b in zip(ours, (theirs[0][:, rows], *theirs[1:])):
                    torch.testing.assert_close(a, b, msg=lambda m: f"{name}, {mode}: {m}")
                last = hilt.attention(q[:, 11:], k, v, alibi=slopes, backward=mode, **options)
                torch.testing.assert_close(last, whole[:, 11:])
        for rows, text in ((range(12, 17), "row 16 is not among the 16"), ((12, 5), "row 5 comes twice or late")):
            with self.assertRaisesRegex(hilt.Error, text):
                hilt.plan(16, queries=rows)
        plan = hilt.plan(16, queries=range(3, 8))
        self.assertEqual(plan, hilt.plan(16, queries=[3, 4, 5, 6, 7]))
        self.assertEqual(plan, pickle.loads(pickle.dumps(plan)))
        for shown in (plan, hilt.plan(16, queries=[0, 3, 4]), hilt.plan(16, order="snake", documents=[10, (2, 3)])):
            self.assertEqual(eval(repr(shown)), shown)
        self.assertIn("queries=range(3, 8)", repr(plan))


    def test_of_another_sequence(self):
        """A q longer than its keys, by the shapes alone: dense, against the definition, with what goes with it."""
        q, _, _ = support.inputs(20, heads=4, batch=2)
        _, k, v = support.inputs(7, heads=4, kv_heads=2, batch=2, seed=3)
        add = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
        add[0, ..., 5:] = -float("inf")  # keys that are padding, as a row that all queries share
        want, want_lse = support.attention(q, k, v, torch.ones(20, 7, dtype=torch.bool), add=add)
        want_d = torch.autograd.grad(want.sin().sum() + want_lse.sum(), [q, k, v])
        for mode in MODES:
            o, lse = hilt.attention(q, k, v, bias=add, backward=mode, order="hilbert", return_lse=True)
            torch.testing.assert_close(o, want)
            for a, b in zip(torch.autograd.grad(o.sin().sum() + lse.sum(), [q, k, v]), want_d):
                torch.testing.assert_close(a, b)
        for options, text in (({"causal": True}, "neither causal"), ({"documents": [7]}, "documents"),
                              ({"pattern": "slide:2"}, "know dense alone, got slide:2"), ({"alibi": True}, "alibi: ")):
            with self.assertRaisesRegex(hilt.Error, text):
                hilt.attention(q, k, v, **options)


class Orders(unittest.TestCase):
    """An order as a value: one plan, and a permutation with each call."""

    def test_is_the_order_of_that_name(self):
        q, k, v = support.inputs(64, batch=2)
        pi = torch.tensor(hilt.plan(64, order="hilbert").native.tokens())
        for mode, dtype in itertools.product(MODES, (torch.int32, torch.int64)):
            got = hilt.attention(q, k, v, permutation=pi.to(dtype), pattern="segment:16", backward=mode)
            want = hilt.attention(q, k, v, order="hilbert", pattern="segment:16", backward=mode)
            self.assertTrue(torch.equal(got, want))
            for a, b in zip(*[torch.autograd.grad((o * o).sum(), (q, k, v)) for o in (got, want)]):
                self.assertTrue(torch.equal(a, b))
        plan = hilt.plan(64, heads=2, order="given", pattern="segment:16")
        each = torch.stack([pi, torch.randperm(64, generator=torch.Generator().manual_seed(1))])
        got = hilt.attention(q, k, v, plan=plan, permutation=each)
        for b in range(2):
            own = [x[b : b + 1] for x in (q, k, v)]
            self.assertTrue(torch.equal(got[b : b + 1], hilt.attention(*own, plan=plan, permutation=each[b])))

    def test_a_table_by_points_is_that_of_their_grid(self):
        q, k, v = support.inputs(24, batch=2)
        table = torch.randn(2, 3, 5, dtype=q.dtype, requires_grad=True)
        one = torch.tensor([divmod(t, 6) for t in range(24)], dtype=torch.int32)
        want = hilt.attention(q, k, v, order="row:4x6", relative=table)
        for points, mode in itertools.product((one, torch.stack([one, one + 50])), MODES):
            got = hilt.attention(q, k, v, relative=table, points=points, backward=mode)
            torch.testing.assert_close(got, want)
            for a, b in zip(*[torch.autograd.grad((o * o).sum(), (q, k, v, table), retain_graph=True)
                              for o in (got, want)]):
                torch.testing.assert_close(a, b)
        with self.assertRaisesRegex(hilt.Error, "are for a table, and there is none"):
            hilt.attention(q, k, v, points=one)

    def test_against_the_definition(self):
        q, k, v = support.inputs(24)
        points = torch.rand(24, 3, generator=torch.Generator().manual_seed(2))
        for causal in (False, True):
            pi = hilt.order_of_points(points, "morton-trans", documents=[10, 14])
            self.assertEqual((pi.dtype, sorted(pi[:10].tolist())), (torch.int64, list(range(10))))
            rho = torch.argsort(pi)

            def pair(t, u):
                begin = 0 if t < 10 else 10
                same = (t < 10) == (u < 10) and (rho[t] - begin) // 4 == (rho[u] - begin) // 4
                return same and (u <= t or not causal)

            want, lse = support.attention(q, k, v, support.mask(24, pair))
            o, got_lse = hilt.attention(q, k, v, permutation=pi, pattern="segment:4", documents=[10, 14],
                                        causal=causal, return_lse=True)
            torch.testing.assert_close(o, want)
            torch.testing.assert_close(got_lse, lse)

    def test_what_is_wrong_is_named(self):
        q, k, v = support.inputs(8)
        for permutation, code, text in (
            (torch.tensor([0, 1, 2, 3, 4, 5, 6, 6]), 3, "row 0: token 6 is at position 6 and again at 7"),
            (torch.arange(8.0), 2, "a tensor of type torch.float32; expected torch.int32 or int64"),
            (torch.arange(7), 2, "the permutation is [7]; expected [8] or [1, 8]"),
            ([0, 1], 2, "permutation ([0, 1]): is of type list; expected a torch.Tensor, as others are"),
        ):
            with self.assertRaises(hilt.Error) as e:
                hilt.attention(q, k, v, permutation=permutation)
            self.assertIn(text, str(e.exception))
            self.assertEqual(e.exception.code, code)
        with self.assertRaisesRegex(hilt.Error, "a permutation goes with order=given"):
            hilt.attention(q, k, v, order="hilbert", permutation=torch.arange(8))
        with self.assertRaisesRegex(hilt.Error, "each call brings a permutation"):
            hilt.attention(q, k, v, order="given")
        with self.assertRaisesRegex(hilt.Error, "no 'hilber'|did you mean"):
            hilt.order_of_points(torch.rand(4, 2), "hilber")


class Readme(unittest.TestCase):
    def test_its_blocks_run(self):
        with open(os.path.join(os.environ["SRC"], "examples", "embed", "python", "README.md")) as f:
            blocks = [b.split("```")[0] for b in f.read().split("```python\n")[1:]]
        self.assertEqual(len(blocks), 3)
        names = {}
        for block in blocks:
            if "scaled_dot_product" not in block or hasattr(torch.nn.functional, "scaled_dot_product_attention"):
                exec(block, names)


    def test_a_lazy_minus_is_read(self):
        x = torch.fft.fft(torch.randn(1, 16, 2, 8), dim=1).conj()
        q, k = x.imag.detach().requires_grad_(), x.real.contiguous()
        self.assertTrue(q.is_neg())
        minus = q.detach().resolve_neg().requires_grad_()
        d_o = torch.fft.fft(torch.randn(1, 16, 2, 8), dim=1).conj().imag
        o, want = hilt.attention(q, k, k), hilt.attention(minus, k, k)
        torch.testing.assert_close(o, want, rtol=0, atol=0)
        o.backward(d_o), want.backward(d_o.resolve_neg())
        torch.testing.assert_close(q.grad, minus.grad, rtol=0, atol=0)
        d, want = hilt.attention_vjp(q, k, k, d_o), hilt.attention_vjp(minus, k, k, d_o.resolve_neg())
        torch.testing.assert_close(d[0], want[0], rtol=0, atol=0)

    def test_whose_default_is_which(self):
        """One order where none is named, of Python, C++ and programs; what is there to show the curve begins with it,
        as the page says."""
        examples = pathlib.Path(os.environ["SRC"]) / "examples"
        said = {}
        for help in ("\n" + (examples / "help.txt").read_text()).split("\n== "):
            if "--order ORDER" in help:
                order = " ".join(help[help.index("--order ORDER") : help.index("--pattern")].split())
                said[help.split()[0]] = order.rpartition("(default ")[2]
        self.assertEqual(said, {"attend": "row)", "ring": "row)", "train": "hilbert)", "compare_gradients": "hilbert)"})
        self.assertEqual(_hilt.defaults["order"], "row")
        page = " ".join((examples / "embed/python/README.md").read_text().split())
        self.assertIn("`row` order (`train` and `compare` show `hilbert`)", page)


class Plans(unittest.TestCase):
    def test_a_plan(self):
        plan = hilt.plan(4096, heads=2, order="hilbert:64x64", pattern="window2d:16x16")
        self.assertIs(plan, hilt.plan(4096, heads=2, order="hilbert:64x64", pattern="window2d:16x16"))
        again = pickle.loads(pickle.dumps(plan))
        self.assertEqual((again, hash(again)), (plan, hash(plan)))
        self.assertNotEqual(plan, hilt.plan(4096, heads=2, order="hilbert:64x64", pattern="window2d:8x8"))
        stats = plan.stats()
        self.assertEqual(stats["pairs"], 4096 * 256)
        self.assertEqual(stats["touched"], (stats["tiles_full"] + stats["tiles_partial"]) / stats["tiles_total"])
        self.assertAlmostEqual(stats["touched"], 0.0625)  # as the picture in README.md says
        self.assertIn("window2d:16x16", repr(plan))
        import xml.dom.minidom

        picture = xml.dom.minidom.parseString(plan._repr_html_())
        walk = picture.getElementsByTagName("polyline")[0].getAttribute("points").split()
        self.assertEqual(len(walk), 4096)
        dark = [float(r.getAttribute("fill-opacity") or 0) for r in picture.getElementsByTagName("rect")]
        self.assertAlmostEqual(sum(dark) / 64**2, 256 / 4096)  # a cell is 64 positions, which is a square of 8 x 8
        fine = xml.dom.minidom.parseString(hilt.plan(128, order="row", pattern="slide:3").picture())
        dark = [float(r.getAttribute("fill-opacity") or 0) for r in fine.getElementsByTagName("rect")]
        self.assertAlmostEqual(sum(dark) * 4, 128 * 7 - 12)  # a cell is 2 x 2 pairs, and all are looked at
        self.assertIn("<svg", hilt.plan(30, pattern="slide:2", documents=[10, (4, 5)]).picture())

    def test_settings(self):
        """Signature and text say what the library's table does."""
        told = inspect.signature(hilt.attention).parameters
        settings = {name: choices for name, _, choices in _hilt.settings}
        for name in set(told) - {"q", "k", "v", "plan", "return_lse"}:
            self.assertIn(f"\n{name} ", hilt.attention.__doc__)
            if name in _hilt.defaults:
                self.assertIsNone(told[name].default)
                self.assertIn(f"(default {_hilt.defaults[name]})", " ".join(hilt.attention.__doc__.split()))
            if settings.get(name):
                self.assertIn(_hilt.defaults.get(name, told[name].default), settings[name])

    @unittest.skipUnless(os.environ.get("SETS"), "no program sets")
    def test_equal_words_are_equal_sets_in_both_languages(self):
        """What is left out is the default of C++'s PlanSpec; causal is the one word that Python has more of."""
        for asked in ({}, *FAMILIES.values(), {"pattern": "slide:4"}, {"causal": "token"}, {"causal": "curve"},
                      {"order": "snake:4x4", "pattern": "slide:2", "causal": "curve"}):
            words = {n: x for n, x in asked.items() if n != "documents"}
            rows = {"documents": "5,2x3"} if "documents" in asked else {}
            ran = subprocess.run([os.environ["SETS"], "16", "2", *[f"{n}={x}" for n, x in {**words, **rows}.items()]],
                                 capture_output=True, text=True, check=True)
            attends = hilt.plan(16, heads=2, **asked).native.attends
            ours = ["".join([str(attends(h, t, u)) for u in range(16)]) for h in range(2) for t in range(16)]
            self.assertEqual(ours, ran.stdout.split(), asked)
        for flag, word in ((True, "token"), (False, "none")):
            self.assertEqual(hilt.plan(16, causal=flag), hilt.plan(16, causal=word))

    def test_documents(self):
        rows = [[5, (2, 3), ...], [(3, 3), 2, ...]]
        self.assertEqual(hilt.plan(16, documents=rows), hilt.plan(16, documents="5,2x3,.../3x3,2,..."))
        x = support.inputs(16, batch=2, grad=False)
        o = hilt.attention(*x, documents=rows, pattern="segment:4")
        alone = hilt.attention(*[t[1:, 9:11] for t in x], pattern="segment:4")
        self.assertTrue(torch.equal(o[1:, 9:11], alone))


if __name__ == "__main__":
    unittest.main()
