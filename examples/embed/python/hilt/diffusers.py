"""Models by Hilt whose attention is torch's scaled_dot_product_attention, in modules with a `processor`."""

import copy
import functools

import torch

from ._torch import Error, sdpa


class _Instead(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = sdpa if function is torch.nn.functional.scaled_dot_product_attention else function
        return function(*args, **(kwargs or {}))


def _by_hilt(processor):
    @functools.wraps(processor.__call__)  # diffusers reads its signature
    def call(*args, **kwargs):
        with _Instead():
            return processor.__call__(*args, **kwargs)

    return type(processor.__name__, (processor,), {"__call__": call})


def use(model):
    """Has the attention of a model, or of a pipeline's models, computed by Hilt, self and cross, and gives it back."""
    parts = [m for m in getattr(model, "components", {"": model}).values() if isinstance(m, torch.nn.Module)]
    found = [m for part in parts for m in part.modules() if callable(getattr(m, "processor", None))]
    if not found:
        raise Error(f"hilt.diffusers.use: in this {type(model).__name__} is no module with a `processor`")
    for module in found:
        processor = copy.copy(module.processor)
        processor.__class__ = _by_hilt(type(processor))
        module.processor = processor
    return model
