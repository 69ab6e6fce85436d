"""What shares memory with a variable outside of steps: ``v.data``, ``v.detach()``, ``v[0]``, ``v.view(-1)``.

A program may write to it, and means the variable. The memory is that of one copy of several, or of a copy of what is on
parameter servers, so a write must go to the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableSynchronization
from tfstyle_dist.core.program_line import stack_from
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.variables.record import Placement, Record, raw
from tfstyle_dist.variables.torch_functions import WITHOUT_VALUE, written_by


class Alias(torch.Tensor):
    """A tensor in the memory of a variable: who writes to it writes to the variable."""

    _tfstyle_of: Record
    _tfstyle_base: torch.Tensor

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch operation comes through here."""
        if func is torch.Tensor.detach and is_new_parameter(sys._getframe(1)):
            raise no_parameter(f"the memory of {args[0]._tfstyle_of.describe()!r}", args[0]._tfstyle_of)
        return _call(func, args, kwargs or {})

    def _tfstyle_value(self) -> torch.Tensor:
        """A plain tensor in the memory that the calling thread means."""
        return _plain(self)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor: a copy belongs to no strategy."""
        if id(self) not in memo:
            memo[id(self)] = _plain(self).clone()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # the stub has Any
        return repr(_plain(self))


def is_new_parameter(caller: FrameType) -> bool:
    """Whether ``torch.nn.Parameter`` has asked; what it then says itself is about classes, or of no leaf."""
    codes = (one.f_code for one in stack_from(caller))  # a mode, as a default device is one, may be between
    return next((c for c in codes if c.co_name != "__torch_function__"), None) is torch.nn.Parameter.__new__.__code__


def no_parameter(given: str, record: Record) -> TypeError:
    """That a variable, or a view of one, cannot become a parameter beside it.

    Args:
        given: what ``torch.nn.Parameter`` got.
        record: of the variable.
    """
    remote = record.placement is Placement.REMOTE
    where = "lives on parameter servers already" if remote else "the strategy keeps in several copies"
    text = (
        f"torch.nn.Parameter was called with {given}, which {where}: it cannot become another parameter. Give it the "
        "values, torch.nn.Parameter(p.detach().clone())."
    )
    elsewhere = (
        " Where the call is not yours, as in torch.nn.utils.weight_norm, build the module before strategy.scope() and "
        "call strategy.experimental_adopt(module); torch.nn.utils.parametrizations makes modules that cannot be sent "
        "to a worker."
    )
    return TypeError(text + elsewhere if remote else text)


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function of torch with plain tensors in the place of aliases."""
    if func in WITHOUT_VALUE:
        with raw():
            return func(*args, **kwargs)
    if func is torch.autograd.grad:
        with raw():
            return func(*map(_leaf, args), **{name: _leaf(value) for name, value in kwargs.items()})
    written = written_by(func, args, kwargs)
    new_args = [_plain(value, written is not None) for value in args]
    new_kwargs = {name: _plain(value, written is not None) for name, value in kwargs.items()}
    result = func(*new_args, **new_kwargs)
    for target in written if isinstance(written, list | tuple) else (written,):
        if isinstance(target, Alias):
            target._tfstyle_of.write_through(target._tfstyle_base)
    if written is not None and result is written_by(func, new_args, new_kwargs):
        return written
    if func is torch.Tensor.numpy:
        result.flags.writeable = False  # nothing can be noticed of a write to an array
    first = args[0] if args else None
    return aliased(first._tfstyle_of, first._tfstyle_base, result) if isinstance(first, Alias) else result


def _leaf(value: Any) -> Any:
    """What ``torch.autograd.grad`` is to be given: an alias that requires a gradient is a leaf of its own."""
    if type(value) in (list, tuple):
        return type(value)(map(_leaf, value))
    leaf = getattr(type(value), "_tfstyle_leaf", None)
    return value if leaf is None else leaf(value)


def _plain(value: Any, in_graph: bool = False) -> Any:
    """An alias, or those in a list or tuple, as plain tensors in the memory that the calling thread means.

    Args:
        value: any argument.
        in_graph: what is done to the tensor is part of the alias' graph, as where it is written to.
    """
    if type(value) in (list, tuple):
        return type(value)(_plain(part, in_graph) for part in value)
    if not isinstance(value, Alias):
        return value
    base = value._tfstyle_base
    home = value._tfstyle_of.home_of_alias(base)
    with raw():
        if home is base:
            return value.as_subclass(torch.Tensor) if in_graph or value.requires_grad else value.detach()
        made = torch.empty(0, dtype=value.dtype, device=home.device)
        offset = value.storage_offset() - base.storage_offset() + home.storage_offset()
        return made.set_(home.untyped_storage(), offset, value.shape, value.stride())


def aliased(record: Record, base: torch.Tensor, result: Any) -> Any:
    """What an operation on a variable gave; tensors in the variable's memory become aliases.

    Args:
        record: of the variable.
        base: its copy that the operation got.
        result: a tensor, or a list or tuple of tensors; anything else stays what it is.
    """
    if type(result) is torch.Tensor:
        return _aliased(record, base, result) if _has_others(record) else result
    if type(result) in (list, tuple) and _has_others(record):
        return type(result)(_aliased(record, base, r) if type(r) is torch.Tensor else r for r in result)
    return result


def _has_others(record: Record) -> bool:
    """Whether a write of the calling thread to one copy is to reach others."""
    if record.placement is Placement.REMOTE:
        return True
    if len(record.components) == 1:
        return False
    on_read = record.kind == "variable" and record.synchronization is VariableSynchronization.ON_READ
    return not on_read and record.index() is None and record.updating() is None


def _aliased(record: Record, base: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    has_graph = value.requires_grad and torch.is_grad_enabled()  # a view of a leaf: torch refuses writes to it
    if has_graph or value.layout is not torch.strided or not value.numel():
        return value
    with raw():
        try:
            is_other = value.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        except NotImplementedError:  # a tensor of torch.func has no memory of its own
            is_other = True
        if is_other:
            return value
        alias: Any = torch_internals.make_subclass(Alias, value, False)
    alias._tfstyle_of, alias._tfstyle_base = record, base
    return alias  # type: ignore[no-any-return]
