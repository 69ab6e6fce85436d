"""What functions of torch do with their arguments: change one in place, or ask for no value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from tfstyle_dist.core import torch_internals

_Tensor: Any = torch.Tensor
_DUNDERS = frozenset({
    "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__",
    "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imatmul__", "__setitem__",
})  # fmt: skip
_STATISTICS = {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}
"""Functions that change their second and third argument if the one of this name, their sixth, says so."""
EMBEDDINGS = frozenset({functional.embedding, functional.embedding_bag})
"""Functions that change the rows of their second argument that are longer than ``max_norm``."""
_NOT_WRITES = frozenset({"requires_grad_", "retain_grad_", "share_memory_", "rename_"})
_mutating: dict[Any, bool] = {}


def _writes(func: Any) -> bool:
    """Whether ``func`` changes its first argument in place, by torch's naming rule."""
    known = _mutating.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        known = name in _DUNDERS or (name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES)
        _mutating[func] = known
    return known


def written_by(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call changes in place, a tensor or several; ``None``: nothing.

    Args:
        func: as ``__torch_function__`` gets it.
        args: its arguments.
        kwargs: those with names; the functions of ``torch.nn.init`` call what they fill ``tensor``.
    """
    out = kwargs.get("out")
    if out is not None:
        return out
    if func in _STATISTICS:
        trains = args[5] if len(args) > 5 else kwargs.get(_STATISTICS[func])
        return [*args[1:3], *(kwargs[n] for n in ("running_mean", "running_var") if n in kwargs)] if trains else None
    if func in EMBEDDINGS:
        return None if kwargs.get("max_norm") is None else args[1]
    if _writes(func) or kwargs.get("inplace"):
        return args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    return None


METADATA = frozenset({
    _Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.ndim.__get__, _Tensor.requires_grad.__get__,
    _Tensor.is_leaf.__get__, _Tensor.layout.__get__, _Tensor.is_sparse.__get__, _Tensor.is_meta.__get__, _Tensor.size,
    _Tensor.dim, _Tensor.numel, _Tensor.stride, _Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_contiguous,
})  # fmt: skip
"""Functions that ask for no value: a shape must not aggregate an ON_READ variable over the replicas."""
WITHOUT_VALUE = METADATA | {
    _Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.requires_grad.__set__,
    _Tensor.requires_grad_, _Tensor.device.__get__, _Tensor.is_cuda.__get__, torch_internals.version_of,
}  # fmt: skip
"""These, and others that are about the object alone, such as its gradient."""
