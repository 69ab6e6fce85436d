"""Variables, and tensors on parameter servers, as arguments of ``torch.autograd.Function`` and of ``torch.func``.

These ask no ``__torch_function__``: they would take the tensor that stands for the values, whose gradient nobody reads
and whose memory may be old.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.process_hooks import Hooks, Patch, install_for
from tfstyle_dist.core.torch_internals import FUNC_WRAPS, func, outside_of_transforms, version_of

if TYPE_CHECKING:
    from tfstyle_dist.variables.store import ParameterStore


def _apply(original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    """What needs no gradient stays what it is: operations on it in ``forward`` find its value, and may write to it."""
    given = [*args, *kwargs.values()]
    meant = [a._tfstyle_value() if _stands_for_value(a) and a.requires_grad else a for a in given]
    before = [(value, version_of(value)) for tensor, value in zip(given, meant, strict=True) if tensor is not value]
    found = original(function, *meant[: len(args)], **dict(zip(kwargs, meant[len(args) :], strict=True)))
    for value, version in before:
        if version_of(value) != version:
            raise RuntimeError(
                f"{function.__name__}.forward wrote to a variable that it was given, and which requires a gradient. "
                "The write would reach one copy of it alone; write to it after the call."
            )
    return found


def _stands_for_value(argument: Any) -> bool:
    return hasattr(type(argument), "_tfstyle_value")


def _wrap(original: Callable[..., Any], tensor: Any, *args: Any) -> Any:
    if _stands_for_value(tensor):
        with outside_of_transforms():  # a value that is a copy on a device would be of the level that is being made
            tensor = tensor._tfstyle_value()
    return original(tensor, *args)


_function_calls = Hooks(
    patches=[
        Patch(torch.autograd.Function, "apply", _apply),
        Patch(func.eager_transforms, FUNC_WRAPS["eager_transforms"], _wrap),
        Patch(func.vmap, FUNC_WRAPS["vmap"], _wrap),
    ]
)
_stores: weakref.WeakSet[ParameterStore] = weakref.WeakSet()


def give_values_to_functions(store: ParameterStore) -> None:
    """From now on functions get the values, as long as the store lives, and with it what it has.

    Args:
        store: of the variables, or of what is on servers.
    """
    if store not in _stores:
        _stores.add(store)
        install_for(store, [_function_calls])
