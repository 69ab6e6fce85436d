"""Variables, and tensors on parameter servers: PyTorch code uses them as if they were the value they stand for.

``__torch_function__`` hands every operation the copy that the calling thread means, or pulls it. The parameters of
modules are no such tensors: see ``contents``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.enums import VariableSynchronization
from tfstyle_dist.core.errors import WrongContextError
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.variables.alias import aliased
from tfstyle_dist.variables.record import Placement, Record, raw
from tfstyle_dist.variables.torch_functions import METADATA, written_by

_Tensor = torch.Tensor
# Descriptors of torch.Tensor: their accessors are the functions that __torch_function__ is called with.
_GRAD: Any = _Tensor.grad
_DATA: Any = _Tensor.data
_DEVICE: Any = _Tensor.device
_IS_CUDA: Any = _Tensor.is_cuda
_REQUIRES_GRAD: Any = _Tensor.requires_grad


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Runs ``func`` on the copies of the calling replica."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **(kwargs or {}))
    if func in METADATA and isinstance(args[0], Replicated):
        return func(args[0]._tfstyle_record.component(), *args[1:], **(kwargs or {}))
    target = written_by(func, args, kwargs or {})
    targets = target if isinstance(target, list | tuple) else (target,)
    written = [t for t in targets if getattr(t, "_tfstyle_record", None) is not None]
    resolve = _resolve if not written else _resolve_stored
    new_args = [resolve(a) for a in args]
    new_kwargs = {k: resolve(v) for k, v in kwargs.items()} if kwargs else {}
    with raw():
        result = func(*new_args, **new_kwargs)
    if written:
        stored = written_by(func, new_args, new_kwargs)
        _spread(targets, stored if isinstance(stored, list | tuple) else (stored,))
        if len(written) == 1 and result is stored:
            return target  # p += 1 must leave p what it is; likewise self.buffer = torch.mv(a, b, out=self.buffer)
    if args and isinstance(args[0], Replicated):
        record = args[0]._tfstyle_record
        if result is new_args[0] and record.kind == "buffer":
            return args[0]  # module.float() puts what buffer.float() gives in the buffer's place: itself, if it is one
        return aliased(record, new_args[0], result)
    return result


def _spread(targets: Sequence[Any], stored: Sequence[torch.Tensor]) -> None:
    """After ``func`` wrote into what the targets have stored: in cross-replica context every copy gets it.

    What is on parameter servers gets it in every context.

    Of a variable that is read by combining its copies, ``stored`` is what they combine to: it is assigned.
    """
    for tensor, value in zip(targets, stored, strict=True):
        record: Record | None = getattr(tensor, "_tfstyle_record", None)
        if record is None:
            continue
        record.changes += 1
        if getattr(tensor, "_tfstyle_constraint", None) is not None and record.component().grad is not None:
            _say_unconstrained(record)
        on_read = record.kind == "variable" and record.synchronization is VariableSynchronization.ON_READ
        if record.index() is None or record.placement is Placement.REMOTE:
            tensor.assign(value) if on_read else record.fan_out()


def _say_unconstrained(record: Record) -> None:
    warn_once(
        f"constraint {id(record)}",
        f"Variable {record.local_name!r} has a constraint, but was written by an operation of torch, as optimizers of "
        "torch.optim write: only optimizers of train call constraints, so the value need not satisfy it. Use one of "
        "those, e.g. train.GradientDescentOptimizer, or write variable.assign(variable.constraint(variable.value())) "
        "after each step.",
    )


def _resolve(value: Any) -> Any:
    kind = type(value)
    if kind is _Tensor or kind is int or kind is float:
        return value
    if isinstance(value, Replicated):
        return value._tfstyle_value()
    if kind is list or kind is tuple:
        return kind(_resolve(v) for v in value)
    return value


def _resolve_stored(value: Any) -> Any:
    """Like ``_resolve``, but never a copy on a compute device: a write to that would be lost."""
    if isinstance(value, Replicated):
        record = value._tfstyle_record
        if record.placement is not Placement.REMOTE:  # servers get what is there when they are told of it
            record.store.ensure_equal()
        return value._tfstyle_stored()
    if type(value) is list or type(value) is tuple:
        return type(value)(_resolve_stored(v) for v in value)
    return value


class Replicated:
    """Mixin of tensors with one copy for each local replica."""

    _tfstyle_record: Record

    def _tfstyle_value(self) -> torch.Tensor:
        """The copy that the calling thread means."""
        record = self._tfstyle_record
        record.store.ensure_equal_to_read()
        return record.value()

    def _tfstyle_stored(self) -> torch.Tensor:
        """The copy that the calling thread writes to, on the device where values are kept."""
        if self._tfstyle_record.placement is not Placement.CENTRAL:
            return self._tfstyle_value()
        self._tfstyle_record.store.ensure_equal_to_read()
        return self._tfstyle_record.component()

    def _tfstyle_leaf(self) -> torch.Tensor:
        """The leaf of the graph on which the calling thread's gradients are."""
        return self._tfstyle_stored()

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch operation comes through here."""
        return dispatch(func, args, kwargs)

    def set_(self, *source: Any) -> Any:
        """As ``data = ``: torch calls no ``__torch_function__`` for it."""
        with raw():
            value = torch.empty_like(self._tfstyle_record.component()).set_(*map(_resolve, source))
        self.data = value
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain parameter or tensor with the same values: a copy belongs to no strategy."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        memo[id(self)] = copy = _plain(self, clone=True)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the plain parameter or tensor."""
        return _plain(self, clone=False).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        record = self._tfstyle_record
        return f"{type(self).__name__} with {len(record.components)} copies, here: {self._tfstyle_value()!r}"


def _plain(tensor: Any, clone: bool) -> torch.Tensor:
    value: torch.Tensor = tensor._tfstyle_value().detach()
    value = value.clone() if clone else value
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


# ---- operations that are about the object, not about its values ---------------------------------------------------


def _get_grad(tensor: Any) -> torch.Tensor | None:
    return tensor._tfstyle_record.component().grad  # type: ignore[no-any-return]


def _set_grad(tensor: Any, value: torch.Tensor | None = None) -> None:
    tensor._tfstyle_record.set_grad(value)


def _get_data(tensor: Any) -> torch.Tensor:
    return _without_graph(tensor, _DATA.__get__)


def _detach(tensor: Any) -> torch.Tensor:
    return _without_graph(tensor, _Tensor.detach)


def _without_graph(tensor: Any, get: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    tensor._tfstyle_record.store.ensure_equal()
    stored = tensor._tfstyle_stored()
    with raw():
        value = get(stored)
    return aliased(tensor._tfstyle_record, stored, value)  # type: ignore[no-any-return]


def _set_data(tensor: Any, value: torch.Tensor) -> None:
    record: Record = tensor._tfstyle_record
    value = value._tfstyle_value() if isinstance(value, Replicated) else value
    if record.index() is not None and record.updating() is None and record.placement is not Placement.REMOTE:
        record.components[record.index() or 0].data = value
        return
    record.set_data(value.detach())


def _requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
    with raw():
        tensor.requires_grad = requires_grad
    tensor._tfstyle_record.set_trainable(requires_grad)
    return tensor


def _share_memory_(tensor: Any) -> Any:
    raise WrongContextError(
        "share_memory_() on a parameter of a strategy: its copies already share memory inside the process. Move the "
        "module to shared memory before building the strategy's scope."
    )


def _shallow_type(tensor: Any, other: Any) -> bool:
    with raw():
        return bool(torch_internals.has_compatible_shallow_copy_type(tensor, _resolve(other)))


def _device(tensor: Any) -> torch.device:
    """Where the calling thread computes with the tensor."""
    record: Record = tensor._tfstyle_record
    index = record.index()
    if record.placement is Placement.CENTRAL and index is not None and record.updating() is None:
        return record.store.worker.torch_device(index)
    device: torch.device = _DEVICE.__get__(record.component())  # a variable's own one is the logical device
    return device


def _is_cuda(tensor: Any) -> bool:
    return _device(tensor).type == "cuda"


def _data_ptr(tensor: Any) -> int:
    return int(tensor._tfstyle_record.component().data_ptr())


def _autograd_grad(outputs: Any, inputs: Any, *rest: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` with respect to the copies that the graph was made with."""
    grad: Any = torch.autograd.grad
    with raw():
        found: tuple[torch.Tensor | None, ...] = grad(
            _resolve(outputs), _resolve_stored(inputs), *_resolve(rest), **{k: _resolve(v) for k, v in kwargs.items()}
        )
    return found


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _GRAD.__get__: _get_grad,
    _GRAD.__set__: _set_grad,
    _GRAD.__delete__: _set_grad,
    _DATA.__get__: _get_data,
    _DATA.__set__: _set_data,
    _Tensor.detach: _detach,
    torch.autograd.grad: _autograd_grad,
    _REQUIRES_GRAD.__set__: _requires_grad_,
    _Tensor.requires_grad_: _requires_grad_,
    _Tensor.share_memory_: _share_memory_,
    torch_internals.has_compatible_shallow_copy_type: _shallow_type,
    _Tensor.data_ptr: _data_ptr,
    _DEVICE.__get__: _device,
    _IS_CUDA.__get__: _is_cuda,
}
