from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

__version__: str
__all__ = ["Error", "Gradients", "Plan", "attention", "attention_vjp", "order_of_points", "plan", "set_thread_count"]

class _Tensor(Protocol):
    """A torch.Tensor, numpy.ndarray, jax.Array, ..: what lends itself by DLPack."""

    def __dlpack_device__(self) -> Any: ...

_T = TypeVar("_T", bound=_Tensor)
_Document = int | tuple[int, int] | tuple[int, int, int]
_Rows = str | _Tensor | Sequence[_Document | EllipsisType | Sequence[_Document | EllipsisType]]  # a row is a list
_Queries = Iterable[int] | _Tensor
_Causal = bool | Literal["none", "token", "curve"]
_DilationMode = Literal["all_queries", "longnet", "head_groups", "residue"]

class Error(RuntimeError):
    code: int
    def __init__(self, text: str, code: int = ...) -> None: ...

class Plan:
    length: int
    heads: int
    settings: tuple[str, str, str, str, str, tuple[int, ...] | None]
    def __init__(self, length: int, heads: int, *settings: Any) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def picture(self, head: int = 0, cells: int = 64) -> str: ...

def set_thread_count(threads: int) -> None: ...
def plan(
    length: int, *, heads: int = 1, order: str | None = None, pattern: str | None = None, causal: _Causal | None = None,
    dilation_mode: _DilationMode | None = None, documents: _Rows | None = None, queries: _Queries | None = None,
) -> Plan: ...
@overload
def attention(
    q: _T, k: _T, v: _T, *, order: str | None = None, pattern: str | None = None, causal: _Causal | None = None,
    dilation_mode: _DilationMode | None = None, backward: str = ..., scale: float | None = None,
    softcap: float | None = None, alibi: bool | _T | None = None, relative: _T | None = None, bias: _T | None = None,
    sink: _T | None = None, documents: _Rows | None = None, queries: _Queries | None = None,
    dropout: float = 0, seed: int | None = None, plan: Plan | None = None, permutation: _Tensor | None = None,
    points: _Tensor | None = None, return_lse: Literal[False] = False, layout: Literal["blhd", "bhld"] | None = None,
) -> _T: ...
@overload
def attention(
    q: _T, k: _T, v: _T, *, order: str | None = None, pattern: str | None = None, causal: _Causal | None = None,
    dilation_mode: _DilationMode | None = None, backward: str = ..., scale: float | None = None,
    softcap: float | None = None, alibi: bool | _T | None = None, relative: _T | None = None, bias: _T | None = None,
    sink: _T | None = None, documents: _Rows | None = None, queries: _Queries | None = None,
    dropout: float = 0, seed: int | None = None, plan: Plan | None = None, permutation: _Tensor | None = None,
    points: _Tensor | None = None, return_lse: Literal[True], layout: Literal["blhd", "bhld"] | None = None,
) -> tuple[_T, _T]: ...

class Gradients(NamedTuple):
    q: Any; k: Any; v: Any; alibi: Any; relative: Any; bias: Any; sink: Any

def attention_vjp(
    q: _T, k: _T, v: _T, d_o: _T, *, d_lse: _T | None = None, alibi: bool | _T | None = None,
    relative: _T | None = None, bias: _T | None = None, sink: _T | None = None, seed: int | None = None,
    permutation: _Tensor | None = None, points: _Tensor | None = None, layout: Literal["blhd", "bhld"] | None = None,
    **options: Any,
) -> Gradients: ...
def order_of_points(
    points: _T, kind: str = "hilbert", bits: int = 16, documents: Iterable[int] | None = None) -> Any: ...
