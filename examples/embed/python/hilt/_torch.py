"""Attention as torch knows it: an autograd function and, where torch compiles, a registered op."""

import ast
import functools
import re
import sys

import torch
from torch.autograd import forward_ad
from torch._C import _from_dlpack as from_dlpack  # that of torch.utils, which asks first what it was given, costs more

from . import attention as hilt_attention
from . import Error, Gradients, _alone, _asked, _documents, _hilt, _native, _plans, _refuse, _words

# Whether torch.func's grad, vmap and so on are at work, from torch 2.0: then a tensor may have no memory.
_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_OP, _OPS = hasattr(torch.library, "custom_op"), getattr(torch.ops, __package__)
_PLAIN = {torch.Tensor, torch.nn.Parameter}
if hasattr(torch, "get_autocast_dtype"):
    _ASK = {d: [functools.partial(f, d) for f in (torch.is_autocast_enabled, torch.get_autocast_dtype)]
            for d in ("cpu", "cuda")}
else:
    _ASK = {"cpu": [torch.is_autocast_cpu_enabled, torch.get_autocast_cpu_dtype],
            "cuda": [torch.is_autocast_enabled, torch.get_autocast_gpu_dtype]}

if hasattr(torch._C, "_cuda_getCurrentRawStream"):  # work on a GPU is torch's own: its stream, its allocator
    _hilt.set_host(torch._C._cuda_getCurrentRawStream, torch._C._cuda_cudaCachingAllocator_raw_alloc,
                   torch._C._cuda_cudaCachingAllocator_raw_delete)


def _taken(given):
    """Tensors that own the memory they were given, until torch lets go; from torch 2.10 they are that already."""
    return tuple([x if x is None or isinstance(x, torch.Tensor) else from_dlpack(x.capsule()) for x in given])


def _forward(call, seed, with_lse, tensors):
    return _taken(_hilt.forward(call, seed, with_lse, tuple([x if x is None else x.resolve_neg() for x in tensors])))


def _gradients(call, seed, wanted, o, lse, d_o, d_lse, *tensors):
    """Of those tensors that are wanted."""
    *tensors, d_o, d_lse = [x if x is None else x.resolve_neg() for x in (*tensors, d_o, d_lse)]
    d = _taken(_hilt.backward(call, seed, wanted, tuple(tensors), (o, lse, d_o, d_lse)))
    return tuple([x for x in d if x is not None])


def _remember(ctx, call, seed, tensors, output):
    ctx.call, ctx.seed = call, seed
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


class _Gradients(torch.autograd.Function):
    """Gradients that are not differentiable themselves, and say so when somebody tries."""

    @staticmethod
    def forward(ctx, *inputs):
        return _gradients(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        raise Error(
            "attention: its gradients have no gradient: double backward is not supported; "
            "leave out create_graph=True, or compute what is differentiated twice with torch's own ops"
        )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, seed, *tensors):
        o, lse = output = _forward(call, seed, True, tensors)
        _remember(ctx, call, seed, tensors, output)
        return o, lse

    @staticmethod
    def backward(ctx, d_o, d_lse):
        *tensors, o, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        of = _gradients
        if torch.is_grad_enabled() or _transforming():
            of = (_TransformedGradients if _transforming() else _Gradients).apply
        d = iter(of(ctx.call, ctx.seed, wanted, o, lse, d_o, d_lse, *tensors))
        return (None, None, *[next(d) if w else None for w in wanted])

    @staticmethod
    def jvp(ctx, *tangents):
        raise Error("attention: forward mode, as in jvp, is not supported; torch.func.grad and vjp are")


def _transformed(function, run, remember):
    """The function as torch.func takes it. Not the only one: with setup_context torch takes 40 us more a call."""

    def vmap(info, in_dims, *inputs):  # a call for each example, with the same seed
        calls = [transformed.apply(*[x.select(d, i) if isinstance(d, int) else x for x, d in zip(inputs, in_dims)])
                 for i in range(info.batch_size)]
        return tuple([torch.stack(x) for x in zip(*calls)]), (0,) * len(calls[0])
    parts = {"forward": run, "setup_context": remember, "vmap": vmap}
    transformed = type(function.__name__, (function,), {name: staticmethod(part) for name, part in parts.items()})
    return transformed


_TransformedAttention = _transformed(_Attention, lambda call, seed, *tensors: _forward(call, seed, True, tensors),
                                     lambda ctx, i, output: _remember(ctx, *i[:2], i[2:], output))
_TransformedGradients = _transformed(_Gradients, _gradients, lambda ctx, inputs, output: None)


def attention(asked, layout, tensors, return_lse):
    """o and lse, which is None where nobody asks. The tensors are all but the slopes."""
    q, k, v = tensors[:3]
    slopes = None if asked[10] is True or asked[10] is False else asked[10]
    traced = _OP and (torch.compiler.is_compiling() or type(q) not in _PLAIN)
    if not traced:
        plan, settings, how, slopes, seed = _asked(*asked)
    tensors = (q, k, v, slopes, *tensors[3:])
    try:
        recorded = any([x is not None and x.requires_grad for x in tensors]) and torch.is_grad_enabled()
    except AttributeError:
        names = (*Gradients._fields, "permutation", "points")
        name, x = next(t for t in zip(names, tensors) if not isinstance(t[1], (torch.Tensor, type(None))))
        _refuse(name, x, "a torch.Tensor, as others are")
    enabled, type_of = _ASK.get(q.device.type, (bool, None))
    if enabled():
        dtype = type_of()
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
        tensors = (q, k, v, *tensors[3:])
    if traced:
        return _OPS.attention(*tensors, *_flat(*asked, layout))
    call = _native(plan, settings, how, q, k, layout)
    if _transforming():
        return _TransformedAttention.apply(call, seed, *tensors)
    if recorded or forward_ad._current_level >= 0:
        return _Attention.apply(call, seed, *tensors)
    return _forward(call, seed, return_lse, tensors)


# ---- as torch's own function, for models of others ------------------------------------------------------------------

def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, **options):
    """torch's function of that name, [B, H, L, D] in and out; `options` are those of hilt.attention. Dropout's seed
    comes from torch's generator."""
    rows, dim, wide = query.shape[-2], query.shape[-1], value.shape[-1]
    if dropout_p:
        options.update(dropout=dropout_p, seed=torch.randint(2**63 - 1, (), device="cpu"))
    if is_causal:  # torch counts both from the first, Hilt from the last
        key, value, options["causal"] = key[:, :, :rows], value[:, :, :rows], True
    if attn_mask is not None:
        options["bias"] = as_bias(attn_mask, query)[..., : rows if is_causal else None]
    if wide != dim:
        scale = dim**-0.5 if scale is None else scale
        query, key, value = [torch.nn.functional.pad(x, (0, max(dim, wide) - x.shape[3])) for x in (query, key, value)]
    return hilt_attention(query, key, value, scale=scale, layout="bhld", **options)[..., :wide]


def as_bias(mask, q):
    """What a mask adds to scores; what it repeats stays one."""
    mask = mask[tuple([slice(0, 1) if step == 0 else slice(None) for step in mask.stride()])]
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -float("inf"))
    return mask.to(q.dtype)


# ---- the registered op: words in one text, and what may change from call to call as numbers --------------------------


def _flat(order, pattern, causal, dilation_mode, documents, queries, plan, backward, scale, cap, alibi, dropout,
          seed, layout):
    """An asked call as the op takes it. Numbers of a traced function may be symbols: they are in no text."""
    numbers, changing, words = [], [], (None,) * 5

    def number(n):
        numbers.append(n)
        return "#"

    constant_at_all = getattr(sys.modules.get("torch.fx.experimental.symbolic_shapes"), "has_static_value", None)

    def constant(x):  # or a symbol, which a float stays where it multiplies a tensor, and nowhere else
        if x is None or constant_at_all is None or constant_at_all(x):
            return x
        changing.append(torch.ones((), dtype=torch.float64) * x)
        return "#"

    def tensor(x):
        if isinstance(x, range):  # else how many there are is in the graph
            return torch.arange(x.start, x.stop, x.step, device="cpu")
        return x if x is None or isinstance(x, torch.Tensor) else torch.tensor(x, device="cpu")

    places = documents if isinstance(documents, torch.Tensor) else None
    if plan is not None:
        number(_alone(plan, order, pattern, causal, dilation_mode, documents, queries).number)
    else:
        text = None if documents is places else _documents(documents, number)
        words = *_words(order, pattern, causal, dilation_mode), text
    text = repr((*words, backward, constant(scale), constant(cap), alibi is True, constant(dropout), layout))
    return places, tensor(queries), torch.stack(changing) if changing else None, tensor(seed), text, numbers


_read = functools.lru_cache(maxsize=256)(ast.literal_eval)


def _op_call(q, k, slopes, places, queries, changing, seed, text, numbers):
    """The native call, and the seed."""
    *words, documents, backward, scale, cap, published, dropout, layout = _read(text)
    numbers, changing, plan = iter(numbers), iter(() if changing is None else changing.tolist()), None
    if words[0] is None:
        plan = _plans.get(next(numbers)) or _refuse("plan", text, "one that somebody keeps")
    elif documents is not None:
        documents = re.sub("#", lambda _: str(next(numbers)), documents)
    scale, cap, dropout = [next(changing) if x == "#" else x for x in (scale, cap, dropout)]
    given = *words, places if documents is None else documents, queries if queries is None else queries.tolist()
    plan, settings, how, _, seed = _asked(*given, plan, backward, scale, cap, published or slopes, dropout, seed)
    return _native(plan, settings, how, q, k, layout), seed


if _OP:
    _INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? relative, Tensor? bias, Tensor? sink"
    _INPUTS += ", Tensor? permutation, Tensor? points, Tensor? places, Tensor? queries, Tensor? changing, Tensor? seed"
    _INPUTS += ", str asked, SymInt[] numbers"
    _GIVEN = "Tensor o, Tensor lse, Tensor? d_o, Tensor? d_lse, bool[] wanted"

    @torch.library.custom_op(f"{__package__}::attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)")
    def _op(*inputs):
        call, seed = _op_call(inputs[0], inputs[1], inputs[3], *inputs[9:])
        return _forward(call, seed, True, inputs[:9])

    @_op.register_fake
    def _(q, *inputs):
        stat = torch.float64 if q.dtype == torch.float64 else torch.float32
        return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=stat)

    @torch.library.custom_op(f"{__package__}::attention_backward", mutates_args=(),
                             schema=f"({_INPUTS}, {_GIVEN}) -> Tensor[]")
    def _op_backward(*inputs):
        *inputs, o, lse, d_o, d_lse, wanted = inputs
        call, seed = _op_call(inputs[0], inputs[1], inputs[3], *inputs[9:])
        return list(_gradients(call, seed, wanted, o, lse, d_o, d_lse, *inputs[:9]))

    @_op_backward.register_fake
    def _(*inputs):
        return [x.new_empty(x.shape) for x, w in zip(inputs[:7], inputs[-1]) if w]

    def _keep(ctx, inputs, output):
        ctx.asked = inputs[13:]
        ctx.save_for_backward(*inputs[:13], *output)
        ctx.set_materialize_grads(False)

    def _op_gradients(ctx, d_o, d_lse):
        *tensors, o, lse = ctx.saved_tensors
        wanted = [bool(w) for w in ctx.needs_input_grad[:8]]
        d = iter(_OPS.attention_backward(*tensors, *ctx.asked, o, lse, d_o, d_lse, wanted))
        return (*[next(d) if w else None for w in wanted], *[None] * 7)

    _op.register_autograd(_op_gradients, setup_context=_keep)
    _op_backward.register_autograd(_Gradients.backward, setup_context=lambda *_: None)
