"""Hilbert attention of libhilt, on tensors of torch, NumPy, JAX or any library that speaks DLPack.

    o = hilt.attention(q, k, v, order="hilbert:64x64", pattern="window2d:16x16")

q is [B, L, H, D], k and v are [B, L, Hk, D], H a multiple of Hk; a transposed view of [B, H, L, D] costs no copy.
"""

import functools
import inspect
import itertools
import math
import numbers
import operator
import re
import sys
import textwrap
import warnings
import weakref
from typing import NamedTuple

from . import _hilt

__version__ = _hilt.version
__all__ = ["Error", "Gradients", "Plan", "attention", "attention_vjp", "order_of_points", "plan", "set_thread_count"]


class Error(RuntimeError):
    """A call that was refused or failed: the library's own sentence, and its code, which never changes: 2 usage,
    3 data, 4 memory, 5 GPU, 6 distributed, 7 not a number, 70 internal."""

    def __init__(self, text, code=2):
        super().__init__(text, code)
        self.code = code

    def __str__(self):
        return str(self.args[0])


_hilt.set_error(Error)


def set_thread_count(threads):
    """Threads that kernels may use from the next call on, in the whole process. Results never depend on it."""
    _hilt.set_thread_count(_whole("threads", threads, 1, 2**31 - 1))


# ---- arguments, one by one: what goes to the library has its type ---------------------------------------------------


def _refuse(name, x, expected):
    shown = " ".join(repr(x).split())
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    raise Error(f"{name} ({shown}): is of type {type(x).__name__}; expected {expected}")


def _word(name, x):
    if isinstance(x, str):
        return str.__str__(x)
    choices = next(c for n, _, c in _hilt.settings if n == name)
    _refuse(name, x, ("True, False or " if name == "causal" else "") + (" | ".join(choices) or "a str"))


def _number(name, x):
    return float(x) if isinstance(x, numbers.Real) else _refuse(name, x, "a number")


def _whole(name, x, low=0, high=2**63 - 1):
    try:
        n = int(operator.index(x))
    except TypeError:
        _refuse(name, x, "a whole number")
    if not low <= n <= high:
        raise Error(f"{name} ({n}): expected a whole number from {low} to {high}")
    return n


def _known(function, given, names):
    for name in given:
        if name not in names:
            near = _hilt.did_you_mean(name, list(names)) or "; help(hilt.attention) lists them"
            raise Error(f"{function}: no argument '{name}'{near}")


def _strict(function):
    """Its last parameter takes the names that it does not know, to say so, and is not shown."""
    shown = inspect.signature(function)
    function.__signature__ = shown.replace(parameters=list(shown.parameters.values())[:-1])
    return function


# ---- what is asked for, as text, which plans and calls are found by -------------------------------------------------

_DEFAULTS = _hilt.defaults  # PlanSpec's; where a word is None, so that words beside a plan can be told


def _documents(rows, number=str):
    """The library's text of a list of int | (H, W) | (T, H, W), the last `...` for the rest of the row; of a list of
    such lists; or of a tensor of lengths, of grids, or of where each begins and the last ends."""
    if isinstance(rows, str):
        return rows
    if hasattr(rows, "tolist") and isinstance(rows := rows.tolist(), list):
        if rows[:1] == [0]:  # no document has 0 tokens: these are sums, cu_seqlens
            rows = [b - a for a, b in itertools.pairwise(rows)]
        rows = [tuple(r) if isinstance(r, list) and len(r) < 4 else r for r in rows]
    if not isinstance(rows, (list, tuple)):
        _refuse("documents", rows, "a list of int | (H, W) | (T, H, W), or a list of such lists")
    if rows and isinstance(rows[0], list):
        return "/".join([_documents(row, number) for row in rows])
    return ",".join(["x".join([number(n) for n in d]) if isinstance(d, (tuple, list)) else
                     "..." if d is ... else number(d) for d in rows])


def _tokens(documents):
    """How many tokens the documents of a row have; 0 where there are none."""
    row = documents.partition("/")[0].split(",")
    return sum([math.prod(map(int, re.findall("[0-9]+", d))) for d in row if d not in ("", "...")])


def _filled(documents, length):
    """The documents without the rest of a row, which is `...` where there is one."""
    for row in documents.split("/"):
        n, named = _tokens(row), row.removesuffix(",...")
        why = f"name the last {length - n} too, or end with `...`: the rest of the row, which gives zeros"
        if n > length:
            why = "a tensor [N, 2] or [N, 3] is of grids, rows of lengths are a list of lists"
        why = "`...` is the rest of a row, and comes last" if "..." in named else why
        if documents and (0 < n < length and named == row or n > length and "x" in row or "..." in named):
            raise Error(f"documents ({row}): are {n} tokens of {length}; {why}")
    return documents.replace(",...", "")


_plans, _numbers = weakref.WeakValueDictionary(), itertools.count(hash("hilt") % 2**62)  # others in each process


class Plan:
    """Who attends to whom in a row of `length` tokens: immutable, hashable, picklable, safe to share between threads.
    `hilt.plan(..)` makes one, or finds it; in a notebook it shows its picture."""

    def __init__(self, length, heads, *settings):
        self.length, self.heads, self.settings = length, heads, settings  # those that a call without a plan has
        try:
            *words, documents, rows = settings
            self.native = native = _hilt.Plan(length, heads, *words, _filled(documents, length), rows)
        except (TypeError, ValueError):
            raise Error("Plan: hilt.plan(..) makes one, from named arguments") from None
        self.call = functools.lru_cache(maxsize=256)(lambda how: _hilt.Call(native, *how))
        self.number = next(_numbers)  # a traced function reads no more of it
        _plans[self.number] = self

    def __eq__(self, other):
        return isinstance(other, Plan) and self.__reduce__() == other.__reduce__()

    def __hash__(self):
        return hash(self.__reduce__())

    def __reduce__(self):
        return Plan, (self.length, self.heads, *self.settings)

    def __repr__(self):
        names = ("order", "pattern", "causal", "dilation_mode", "documents", "queries")
        *words, rows = self.settings
        if rows and rows[-1] - rows[0] == len(rows) - 1:
            rows = range(rows[0], rows[-1] + 1)
        asked = [f"{n}={s!r}" for n, s in zip(names, (*words, rows)) if s not in ("", None)]
        return f"hilt.plan({self.length}, heads={self.heads}, {', '.join(asked)})"

    def stats(self):
        """What the plan costs: tiles of 128 x 128 that it touches, full and partial, of how many; the share `touched`;
        `useful_fraction`, the share of pairs in touched tiles that attend; `pairs`; `empty_rows`; `bytes` of the plan;
        the `order` in use and the `pattern`."""
        return self.native.stats()

    def picture(self, head=0, cells=64):
        """An SVG: the order as a walk over the grid, and the attended set with queries down and keys across, both in
        that order. A cell is as dark as the share of pairs that attend, of at most 16 looked at in each."""
        head, cells = _whole("head", head, 0, self.heads - 1), _whole("cells", cells)
        height, width = self.native.grid()
        cells, side, s = min(cells, self.length), 256, self.stats()
        step, cell = side / max(height, width, 1), side / max(cells, 1)
        tokens = range(self.length) if self.settings[4] else self.native.tokens()  # documents have orders of their own
        at = [divmod(t, width) for t in tokens if t < width * height]
        walk = " ".join([f"{(x + 0.5) * step:.1f},{(y + 0.5) * step:.1f}" for y, x in at])
        size = f'width="{cell:.2f}" height="{cell:.2f}"'
        runs = [tokens[i * self.length // cells : (i + 1) * self.length // cells] for i in range(cells)]
        seen = [run[:: max(1, len(run) // 4)] for run in runs]  # of each cell at most 4 x 4 pairs
        dark = ""
        for i, j in itertools.product(range(cells), range(cells)):
            pairs = [self.native.attends(head, t, u) > 0 for t in seen[i] for u in seen[j]]
            if any(pairs):
                share = sum(pairs) / len(pairs)
                dark += f'<rect x="{j * cell:.2f}" y="{i * cell:.2f}" {size} fill-opacity="{share:.2f}"/>'
        text = f"{s['order']}, {s['pattern']}, causal {self.settings[2]}: "
        text += f"{s['tiles_full'] + s['tiles_partial']} of {s['tiles_total']} tiles touched"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * side + 48} {side + 44}" role="img"'
            f' aria-label="{text}" font-family="sans-serif" font-size="12"><title>{text}</title>'
            f'<rect width="100%" height="100%" fill="#fff"/><polyline transform="translate(16 16)" points="{walk}"'
            f' fill="none" stroke="#2a6f97" stroke-width="1.2"/><g transform="translate({side + 32} 16)" fill="#2a6f97"'
            f' shape-rendering="crispEdges"><rect width="{side}" height="{side}" fill="#eef2f5"/>{dark}</g>'
            f'<text x="16" y="{side + 35}" fill="#333">{text}</text></svg>'
        )

    _repr_html_ = picture


_plan = functools.lru_cache(maxsize=256)(Plan)


@_strict
def plan(length, *, heads=1, order=None, pattern=None, causal=None, dilation_mode=None, documents=None, queries=None,
         **unknown):
    """The plan of `length` tokens; the arguments are those of `attention`. The 256 last ones are kept."""
    _known("plan", unknown, plan.__kwdefaults__)
    settings = _settings(order, pattern, causal, dilation_mode, documents, queries)
    return _plan(_whole("length", length), _whole("heads", heads), *settings)


def _settings(order, pattern, causal, dilation_mode, documents, queries):
    """What a plan is found by."""
    documents = "" if documents is None else _documents(documents)
    queries = None if queries is None else _rows(queries)
    return *_words(order, pattern, causal, dilation_mode), documents, queries


def _words(order, pattern, causal, dilation_mode):
    causal = ("token" if causal else "none") if type(causal) is bool else causal
    words = zip(_DEFAULTS, (order, pattern, causal, dilation_mode))
    return tuple([_DEFAULTS[n] if x is None else x if type(x) is str else _word(n, x) for n, x in words])


def _rows(queries):
    """Tokens that ask, as a tuple of int; the library judges their order."""
    try:
        rows = tuple(map(int, map(operator.index, queries)))
    except TypeError:
        _refuse("queries", queries, "tokens, such as range(3, 8) or [0, 5, 9]")
    for row in (min(rows, default=0), max(rows, default=0)):
        _whole("queries", row, 0, 2**31 - 2)
    return rows


def _alone(plan, order, pattern, causal, dilation_mode, documents, queries):
    """The plan, which is one, with none of its settings beside it."""
    if not order is pattern is causal is dilation_mode is documents is queries is None:
        raise Error("attention: a plan, and what belongs to one (order, pattern, ..): give either")
    return plan if isinstance(plan, Plan) else _refuse("plan", plan, "what hilt.plan(..) gives")


def _asked(order=None, pattern=None, causal=None, dilation_mode=None, documents=None, queries=None, plan=None,
           backward=_hilt.default_backward, scale=None, softcap=None, alibi=None, dropout=0, seed=None):
    """What a call asks for: a plan, what one is found by, how to run it, all of which can be hashed; the slopes; and
    the seed."""
    settings = (order, pattern, causal, dilation_mode, documents, queries)
    settings = _settings(*settings) if plan is None else _alone(plan, *settings).settings
    if type(backward) is not str:
        backward = _word("backward", backward)
    scale, softcap = [x if x is None or type(x) is float else _number(n, x)
                      for n, x in (("scale", scale), ("softcap", softcap))]
    if type(dropout) is not float:
        dropout = _number("dropout", dropout)
    seed = None if seed is None else _whole("seed", seed)
    slopes = None if alibi is True or alibi is False else alibi
    return plan, settings, (backward, scale, softcap, alibi is True, dropout), slopes, seed


@_strict
def attention(q, k, v, *, order=None, pattern=None, causal=None, dilation_mode=None, backward=_hilt.default_backward,
              scale=None, softcap=None, alibi=None, relative=None, bias=None, sink=None, documents=None, queries=None,
              dropout=0, seed=None, plan=None, permutation=None, points=None, return_lse=False, layout=None, **unknown):
    """o [B, L, H, D]: o[b, t, h] = sum over u in A(t) of softmax(scale q[b, t, h] . k[b, u, h']) v[b, u, h'], where
    h' = h // (H / Hk) and A(t) is what `pattern` says, under `causal`.

    q [B, L, H, D]; k, v [B, L, Hk, D], of one type: f64, f32, bf16 or f16. Any strides; where neighbours along D do not
    lie side by side, a copy is made. Torch tensors are differentiable in q, k, v and every tensor below.

    {settings}
    permutation    An order as a value, int32 or int64 [L] or [B, L]: the token at each position, inside each document,
                   as order_of_points gives it. The order is then "given", and one plan serves all such orders
    points         int32 [L, axes] or [B, L, axes]: what `relative` looks at, instead of tokens or a grid
    layout         blhd: [B, L, H, D]; or bhld: q, k, v and o are [B, H, L, D]
    Here causal may be True, for token, or False. alibi is True for the published slopes, or a tensor; relative, bias
    and sink are tensors too. documents is a list of int | (H, W) | (T, H, W), or a list of such lists, one a row; or a
    tensor of lengths, of grids, or of where each begins and the last ends (cu_seqlens). They fill the row, or `...` at
    the end stands for its rest, whose rows are zero. queries are tokens: a range, list or tensor; a shorter q is the
    last, a longer one has no place among the keys: all of those, none causal. Another seed each step. plan, from
    hilt.plan(..), stands instead of order, pattern, causal, dilation_mode, documents and queries.
    return_lse gives (o, lse): with the log-sum-exp of every row, [B, H, L], f32 (f64 for f64), differentiable too.
    """
    if unknown:
        _known("attention", unknown, attention.__kwdefaults__)
    if order is None and permutation is not None and plan is None:
        order = "given"
    if type(return_lse) is not bool:
        _refuse("return_lse", return_lse, "True or False")
    jax = sys.modules.get("jax")
    if jax is not None and any([isinstance(x, jax.core.Tracer) for x in (q, k, v, alibi, relative, bias, sink)]):
        return _by_jax(**locals())
    first = layout is not None and _heads_first(layout)
    if first:
        q, k, v = _swapped(q), _swapped(k), _swapped(v)
    asked = (order, pattern, causal, dilation_mode, documents, queries, plan, backward, scale, softcap, alibi, dropout,
             seed)
    torch = sys.modules.get("torch")
    if torch is not None and q is not None and any([isinstance(x, torch.Tensor) for x in (q, k, v)]):
        from . import _torch  # by no name, which is another where `kernels` loads this

        o, lse = _torch.attention(asked, layout, (q, k, v, relative, bias, sink, permutation, points), return_lse)
    else:
        call, seed, lent = _lent_call(_asked(*asked), layout, q, k, v, relative, bias, sink, permutation, points)
        o, lse = [_like(q, x) for x in _hilt.forward(call, seed, return_lse, lent)]
    if first:
        o = _swapped(o)
    return (o, lse) if return_lse else o


def _by_jax(jax, unknown, **given):
    """Under jax.grad: attention and attention_vjp as they are, on numbers, which other transformations have not."""
    arrays = {n: given.pop(n) for n in Gradients._fields if hasattr(given[n], "shape")}

    def run(arrays):
        if any([isinstance(x, jax.core.Tracer) for x in arrays.values()]):
            raise Error("attention: under jax.jit, vmap or scan there are no numbers yet; call it outside of them")
        return attention(**arrays, **given)

    def back(arrays, d):
        asked = {**given, "d_o": d[0], "d_lse": d[1]} if given["return_lse"] else {**given, "d_o": d}
        d = attention_vjp(**arrays, **{n: x for n, x in asked.items() if n != "return_lse"})
        return ({n: getattr(d, n) for n in arrays},)

    attend = jax.custom_vjp(run)
    attend.defvjp(lambda arrays: (run(arrays), arrays), back)
    return attend(arrays)


def _heads_first(layout):
    if not isinstance(layout, str) or layout not in ("blhd", "bhld"):
        _refuse("layout", layout, "blhd or bhld")
    return layout == "bhld"


def _swapped(x):
    """The other layout of a tensor of rank 4; what is none is refused where it is used."""
    return x.swapaxes(1, 2) if len(getattr(x, "shape", ())) == 4 else x


def _described(doc, names):
    """The text with what the table of settings says of these names."""
    default = {n: f" (default {word})" for n, word in _DEFAULTS.items()}
    rows = [f"{n:14} {', '.join(c) + ': ' if c else ''}{help}{default.get(n, '')}"
            for n, help, c in _hilt.settings if n in names]
    table = "\n".join([textwrap.fill(r, 112, subsequent_indent=" " * 15) for r in rows])
    return inspect.cleandoc(doc).replace("{settings}", table)  # as Python itself does from 3.13


if attention.__doc__:  # not under -OO
    attention.__doc__ = _described(attention.__doc__, attention.__kwdefaults__)


_VJP = [n for n in ("d_lse", *attention.__kwdefaults__) if n != "return_lse"]


class Gradients(NamedTuple("Gradients", [(n, object) for n in ("q", "k", "v", "alibi", "relative", "bias", "sink")])):
    """What `attention_vjp` gives: each of its tensor's shape and type, None where there was none."""


def attention_vjp(q, k, v, d_o, *, d_lse=None, alibi=None, relative=None, bias=None, sink=None, seed=None,
                  permutation=None, points=None, layout=None, **options):
    """Gradients of sum(o * d_o) [+ sum(lse * d_lse)] with respect to q, k, v and the terms' tensors, for NumPy, JAX and
    any DLPack array. d_o [B, L, H, D], or as `layout` says; d_lse [B, H, L]; `options` are those of `attention`."""
    _known("attention_vjp", options, _VJP)
    if permutation is not None and options.get("plan") is None:
        options = {"order": "given", **options}
    asked = _asked(alibi=alibi, seed=seed, **options)
    first = layout is not None and _heads_first(layout)
    if first:
        q, k, v, d_o = map(_swapped, (q, k, v, d_o))
    call, seed, lent = _lent_call(asked, layout, q, k, v, relative, bias, sink, permutation, points)
    o, lse = _hilt.forward(call, seed, True, lent)
    d = [_like(q, x) for x in _hilt.backward(call, seed, (True,) * 7, lent, (o, lse, _lent(d_o), _lent(d_lse)))]
    return Gradients(*map(_swapped, d[:3]), *d[3:]) if first else Gradients(*d)


def order_of_points(points, kind="hilbert", bits=16, documents=None):
    """The permutation for `attention` that puts points [N, 2 or 3], floats or whole numbers, along a curve through
    2**bits cells a side: int64 [N], of the same library. kind: hilbert, morton, hilbert-trans or morton-trans; those
    take the axes in reverse order. documents: the points of each, in turn, which stay apart; rows behind them stay."""
    lengths = [] if documents is None else [_whole("documents", n, 1) for n in documents]
    kind = str.__str__(kind) if isinstance(kind, str) else _refuse("kind", kind, "a str")
    return _like(points, _hilt.order_of_points(_lent(points), kind, _whole("bits", bits, 0, 99), lengths))


def _native(plan, settings, how, q, k, layout="blhd"):
    """The native call of these tensors, or of the plan that was given."""
    if plan is None:
        try:
            asking, asked = q.shape, k.shape
        except AttributeError:
            _refuse(*(("k", k) if hasattr(q, "shape") else ("q", q)), "a tensor [batch, length, heads, dim]")
        if len(asking) != 4 or len(asked) != 4:
            raise Error(f"attention: q and k must be [batch, length, heads, dim], got {list(asking)} and {list(asked)}")
        try:
            plan = _plan(int(asked[1]), int(asking[2]), *settings)
        except Error as e:
            # What names a number of tokens tells that the other axis has it; other plans of [B, H, L, D] prove nothing.
            if layout or ":" not in settings[0] and _tokens(settings[4]) != asked[2]:
                raise
            try:
                plan = _plan(int(asked[2]), int(asking[1]), *settings)  # the call will say so
            except Error:
                raise e from None
        else:
            # No model has so many heads for their width; of fewer, nothing tells which axis is which.
            if layout is None and asked[1] < asked[2] > 2 * asked[3] and asked[1] <= asking[1] and not settings[4]:
                text = (f"hilt.attention: k {list(asked)} is read as {asked[1]} tokens of {asked[2]} heads; if it is "
                        '[batch, heads, length, dim], layout="bhld" says so; if not, layout="blhd"')
                warnings.warn(text, stacklevel=4)
    return plan.call(how)


def _lent_call(asked, layout, q, k, v, *others):
    """Of arrays: the native call, the seed, and all nine tensors."""
    plan, settings, how, slopes, seed = asked
    return _native(plan, settings, how, q, k, layout), seed, tuple(map(_lent, (q, k, v, slopes, *others)))


def _lent(x):
    """x, or a copy of a NumPy array that cannot be lent: read-only, or with negative strides."""
    if getattr(x, "dtype", None) == bool:
        raise Error("attention: a tensor of bool; as a bias a mask is where(mask, 0.0, -inf)")
    flags = getattr(x, "flags", None)
    if flags is not None and hasattr(x, "strides") and (not flags.writeable or min(x.strides, default=0) < 0):
        return x.copy()
    return x.detach().resolve_neg() if hasattr(x, "detach") else x


def _like(q, x):
    """x in q's library, on the same memory; where that does not say how, as what speaks DLPack."""
    if x is None:
        return None
    library = sys.modules[type(q).__module__.partition(".")[0]]
    if library.__name__ == "numpy":
        return library.asarray(x)
    library = q.__array_namespace__() if hasattr(q, "__array_namespace__") else library
    return library.from_dlpack(x) if hasattr(library, "from_dlpack") else x
