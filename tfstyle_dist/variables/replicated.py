"""Tensors that stand for one copy on each local replica: PyTorch code uses them as if there were one.

``__torch_function__`` hands every operation the copy of the calling replica. The class of an existing parameter is
changed in place (as ``torch.nn.LazyModule`` does), so ties, aliases and a framework's own references survive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tfstyle_dist.core.errors import WrongContextError
from tfstyle_dist.variables.record import Record, raw

_Tensor = torch.Tensor
# Descriptors of torch.Tensor: their accessors are the functions that __torch_function__ is called with.
_GRAD: Any = _Tensor.grad
_DATA: Any = _Tensor.data
_DEVICE: Any = _Tensor.device
_IS_CUDA: Any = _Tensor.is_cuda
_REQUIRES_GRAD: Any = _Tensor.requires_grad
_IN_PLACE_DUNDERS = frozenset(
    f"__i{name}__"
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
        "matmul",
    )
) | {"__setitem__"}
_MODULE_APPLY = torch.nn.Module._apply.__code__
_CONVERSIONS = frozenset(
    getattr(_Tensor, name) for name in ("to", "type", "double", "float", "half", "bfloat16", "cpu", "cuda", "xpu")
)
_NEW_PARAMETER = torch.nn.Parameter.__new__.__code__
_NOT_WRITES = frozenset({"requires_grad_", "retain_grad_", "share_memory_", "rename_"})
_mutating: dict[Any, bool] = {}


def _writes(func: Any) -> bool:
    """Whether ``func`` changes its first argument in place, by torch's naming rule."""
    known = _mutating.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        known = name in _IN_PLACE_DUNDERS or (
            name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES
        )
        _mutating[func] = known
    return known


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Runs ``func`` on the copies of the calling replica."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(*args, **(kwargs or {}))
    if func in _METADATA and isinstance(args[0], Replicated):
        return func(args[0]._tfstyle_record.component(), *args[1:], **(kwargs or {}))
    if func in _CONVERSIONS and type(args[0]) is MirroredBuffer and _in_module_conversion():
        return _convert_buffer(func, args, kwargs or {})
    written: list[Record] = []
    if (args and _writes(func)) or (kwargs and kwargs.get("out") is not None):
        target = kwargs["out"] if kwargs and kwargs.get("out") is not None else args[0]
        for tensor in target if isinstance(target, list | tuple) else (target,):
            record = getattr(tensor, "_tfstyle_record", None)
            if record is not None:
                written.append(record)
                _before_write(record)
    resolve = _resolve if not written else _resolve_stored
    new_args = [resolve(a) for a in args]
    new_kwargs = {k: resolve(v) for k, v in kwargs.items()} if kwargs else {}
    with raw():
        result = func(*new_args, **new_kwargs)
    for record in written:
        record.changes += 1
        if record.index() is None:
            record.fan_out()
    if len(written) == 1 and args and result is new_args[0]:
        return args[0]  # p += 1 must leave p what it is
    if kwargs and result is not None and result is new_kwargs.get("out"):
        return kwargs["out"]  # likewise self.buffer = torch.mv(a, b, out=self.buffer)
    return result


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
        value._tfstyle_record.store.ensure_equal()
        return value._tfstyle_stored()
    if type(value) is list or type(value) is tuple:
        return type(value)(_resolve_stored(v) for v in value)
    return value


def _before_write(record: Record) -> None:
    """A replica that writes outside an update gets a storage of its own first, or the write would count L times."""
    if not record.separated and record.index() is not None and record.updating() is None:
        record.separate()


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
        record = self._tfstyle_record
        return self._tfstyle_value() if record.store.puller is None else record.component()

    def _tfstyle_leaf(self) -> torch.Tensor:
        """The leaf of the graph on which the calling thread's gradients are."""
        return self._tfstyle_value()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch operation comes through here."""
        return dispatch(func, args, kwargs)

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


class MirroredParameter(Replicated, torch.nn.Parameter):  # type: ignore[misc]  # __repr__ differs from the stub
    """A parameter of a module built in the scope of a strategy with several local replicas."""


class MirroredBuffer(Replicated, torch.Tensor):  # type: ignore[misc]  # likewise
    """A buffer of such a module: each replica has its own values."""


# ---- operations that are about the object, not about its values ---------------------------------------------------


def _get_grad(tensor: Any) -> torch.Tensor | None:
    return tensor._tfstyle_record.get_grad()  # type: ignore[no-any-return]


def _set_grad(tensor: Any, value: torch.Tensor | None) -> None:
    tensor._tfstyle_record.set_grad(value)


def _del_grad(tensor: Any) -> None:
    tensor._tfstyle_record.set_grad(None)


def _get_data(tensor: Any) -> torch.Tensor:
    """The alias may be written to, and nobody would see it: a replica gets its own storage first."""
    tensor._tfstyle_record.store.ensure_equal()
    _before_write(tensor._tfstyle_record)
    return tensor._tfstyle_stored().data  # type: ignore[no-any-return]


def _detach(tensor: Any) -> torch.Tensor:
    record: Record = tensor._tfstyle_record
    if record.index() is None and sys._getframe(3).f_code is _NEW_PARAMETER:
        # Parameter(parameter), as parametrizations.weight_norm makes it, wants the class kept.
        fresh = torch.nn.Parameter(tensor._tfstyle_value().detach(), requires_grad=False)
        record.store.adopt_parameter(fresh, None, record.local_name)
        return fresh
    record.store.ensure_equal()
    _before_write(record)
    return tensor._tfstyle_stored().detach()  # type: ignore[no-any-return]


def _set_data(tensor: Any, value: torch.Tensor) -> None:
    record: Record = tensor._tfstyle_record
    value = value._tfstyle_value() if isinstance(value, Replicated) else value
    if record.index() is not None and record.updating() is None:
        record.separate()
        record.components[record.index() or 0].data = value
        return
    record.set_data(value.detach())


def _set_requires_grad(tensor: Any, value: bool) -> None:
    _requires_grad_(tensor, value)


def _requires_grad_(tensor: Any, requires_grad: bool = True) -> Any:
    with raw():
        tensor.requires_grad = requires_grad
    for component in tensor._tfstyle_record.components:
        component.requires_grad_(requires_grad)
    return tensor


def _share_memory_(tensor: Any) -> Any:
    raise WrongContextError(
        "share_memory_() on a parameter of a strategy: its copies already share memory inside the process. Move the "
        "module to shared memory before building the strategy's scope."
    )


def _shallow_type(tensor: Any, other: Any) -> bool:
    with raw():
        return bool(torch._has_compatible_shallow_copy_type(tensor, _resolve(other)))


def _device(tensor: Any) -> torch.device:
    """Where the calling thread computes with the tensor."""
    record: Record = tensor._tfstyle_record
    puller, index = record.store.puller, record.index()
    if puller is not None and index is not None and record.updating() is None:
        return puller.devices[index]
    device: torch.device = _DEVICE.__get__(record.component())  # a variable's own one is the logical device
    return device


def _is_cuda(tensor: Any) -> bool:
    return _device(tensor).type == "cuda"


def _data_ptr(tensor: Any) -> int:
    return int(tensor._tfstyle_record.component().data_ptr())


def _autograd_grad(
    outputs: tuple[Any, ...],
    inputs: tuple[Any, ...],
    *rest: Any,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad``: where a custom autograd Function took the object itself, that part counts too."""
    grad: Any = torch.autograd.grad
    groups = [[_resolve_stored(x), *([x] if isinstance(x, MirroredParameter) else [])] for x in inputs]
    with raw():
        flat = [t for group in groups for t in group]
        found = iter(grad(_resolve(outputs), flat, *_resolve(rest), allow_unused=True, **kwargs))
    result: list[torch.Tensor | None] = []
    for group in groups:
        parts = [part for part in (next(found) for _ in group) if part is not None]
        if parts:
            result.append(sum(parts[1:], parts[0]))
        elif materialize_grads:
            result.append(torch.zeros_like(group[0]))
        elif allow_unused:
            result.append(None)
        else:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
    return tuple(result)


def _in_module_conversion() -> bool:
    """Whether ``module.to()`` or one of its relatives asks, which puts the result in the buffer's place."""
    frame = sys._getframe(2)
    for _ in range(6):
        if frame.f_code is _MODULE_APPLY:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _convert_buffer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Converts every copy and gives the same object back, so that the buffer stays the strategy's."""
    buffer, record = args[0], args[0]._tfstyle_record
    if record.index() is not None:
        raise WrongContextError(
            f"A module with the buffer {record.describe()!r} was converted (to(), double(), cuda(), ...) inside "
            "strategy.run. Convert it outside."
        )
    record.store.ensure_equal()
    with raw(), torch.no_grad():
        for replica, component in enumerate(record.components):
            data = func(component, *args[1:], **kwargs)
            component.data = data.to(record.store.device(replica, data.device))
        buffer.data = record.components[0].detach()
    return buffer


# Asking for a shape must not aggregate an ON_READ variable over the replicas.
_METADATA = frozenset(
    [
        getattr(_Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "ndim",
            "requires_grad",
            "is_leaf",
            "layout",
            "is_sparse",
            "is_meta",
        )
    ]
    + [
        getattr(_Tensor, name)
        for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous")
    ]
)

_SPECIAL: dict[Any, Callable[..., Any]] = {
    _GRAD.__get__: _get_grad,
    _GRAD.__set__: _set_grad,
    _GRAD.__delete__: _del_grad,
    _DATA.__get__: _get_data,
    _DATA.__set__: _set_data,
    _Tensor.detach: _detach,
    torch.autograd.grad: _autograd_grad,
    _REQUIRES_GRAD.__set__: _set_requires_grad,
    _Tensor.requires_grad_: _requires_grad_,
    _Tensor.share_memory_: _share_memory_,
    torch._has_compatible_shallow_copy_type: _shallow_type,
    _Tensor.data_ptr: _data_ptr,
    _DEVICE.__get__: _device,
    _IS_CUDA.__get__: _is_cuda,
}
