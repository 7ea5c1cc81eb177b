"""transformers' models by Hilt: register(), then attn_implementation="hilt"."""

import torch
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from ._torch import as_bias, sdpa


class _Mask(torch.Tensor):
    """A mask that hilt.attention has options for; whatever else looks at it sees the mask, made then."""

    @staticmethod
    def __new__(cls, options, dense, *shape, device):
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.options, mask.dense = options, dense
        return mask

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*tree_map_only(cls, lambda mask: mask.dense(), args),
                        **tree_map_only(cls, lambda mask: mask.dense(), kwargs or {}))


def _read(function, found):
    """Whether the function is one of transformers' own that have options, all of which it adds to what was found."""
    inside = dict(zip(function.__code__.co_freevars, [c.cell_contents for c in function.__closure__ or ()]))
    name = function.__qualname__.partition(".")[0]
    found[name] = inside
    if function.__module__ != masking_utils.__name__:
        return False
    if name == "and_masks":
        return all([_read(f, found) for f in inside["mask_functions"]])
    if name == "remap_positions_for_packed_sequence":
        return _read(inside["mask_function"], found)
    return name in ("causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
                    "sliding_window_bidirectional_overlay", "packed_sequence_mask_function")


def _runs(row):
    """A row of padding as documents: padding, whose rows become 0, one run of tokens, and `...`; None of others."""
    values, counts = [x.tolist() for x in torch.unique_consecutive(row, return_counts=True)]
    if sum(values) != 1:
        return None
    end = values.index(True) + 1
    return counts[:end] + [...] * (end < len(counts))


def _options(found, padding, rows, keys, first):
    """Those of a mask of `rows` queries, the first of them at key `first`; None where there are none."""
    causal, options = "causal_mask_function" in found, {}
    behind, around = [found.get(f"sliding_window_{name}") for name in ("overlay", "bidirectional_overlay")]
    packed = found.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    if behind and (around or not causal) or packed is None and "remap_positions_for_packed_sequence" in found:
        return None
    if behind or around:
        options["pattern"] = f"slide:{behind['sliding_window'] - 1 if behind else around['sliding_window']}"
    if causal:
        options["causal"] = True
    if options and rows != keys:  # else they may be of another sequence
        options["queries"] = range(first, first + rows)
    if packed is not None:
        options["documents"] = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in packed]
    if padding is not None and not padding.all():
        documents = [_runs(row) for row in padding]
        if causal and packed is None and None not in documents:
            options["documents"], options["seen"] = documents, padding[:, None, first : first + rows, None]
        else:  # a row of it is for all queries
            options["attn_mask"] = padding[:, None, None]
    return options


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=masking_utils.causal_mask_function,
          attention_mask=None, device="cpu", **how):
    def dense(**skips):
        return masking_utils.sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
                                       attention_mask, device=device, **{**how, **skips})

    found, none = {}, {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if q_length == 1 or torch.compiler.is_compiling() or not _read(mask_function, found):
        return dense()
    first = int(q_offset) - kv_offset
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding[:, kv_offset : kv_offset + kv_length]
    options = _options(found, padding, q_length, kv_length, first)
    if options is None or "queries" in options and not 0 <= first <= kv_length - q_length:
        return dense()
    return _Mask(options, lambda: dense(**none), batch_size, 1, q_length, kv_length, device=device)


def _attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None,
            s_aux=None, position_bias=None, **_):
    options, seen = {"attn_mask": attention_mask, "softcap": softcap, "sink": s_aux}, None
    if isinstance(attention_mask, _Mask):
        options.update({"attn_mask": None, **attention_mask.options})
        seen = options.pop("seen", None)
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options["is_causal"] = causal and query.shape[2] > 1
    if position_bias is not None:
        mask = options["attn_mask"]
        options["attn_mask"] = position_bias if mask is None else position_bias + as_bias(mask, position_bias)
    o = sdpa(query, key, value, dropout_p=dropout, scale=scaling, **options)
    return (o if seen is None else o.masked_fill(~seen, 0)).transpose(1, 2), None


def register():
    """Adds "hilt" to what transformers knows as attn_implementation."""
    AttentionInterface.register("hilt", _attend)
    AttentionMaskInterface.register("hilt", _mask)
