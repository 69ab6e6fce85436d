"""Functions and values on their way between coordinator, workers and servers; the only user of cloudpickle.

Only links whose peers have the cluster's key (or loopback links without keys) carry these bytes. Tensors travel beside
the pickle as raw buffers.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.raw_bytes import bytes_of

_SMALL = 1 << 12


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as missing:  # pragma: no cover
        raise ImportError(
            "To schedule functions cloudpickle is needed, which is not installed: pip install cloudpickle (the extra "
            "'ps' of tfstyle_dist)."
        ) from missing
    return cloudpickle


def _tensor_from(data: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.requires_grad_(requires_grad)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    data: Any = bytes_of(tensor.detach().to("cpu")).numpy()
    raw: Any = data.tobytes() if data.nbytes <= _SMALL else pickle.PickleBuffer(data)
    return _tensor_from, (raw, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether shape, dtype and bytes say all; a quantized tensor has scales beside, a nested one several shapes."""
    odd = tensor.is_quantized or tensor.is_nested or tensor.is_meta
    return tensor.layout is torch.strided and not odd


_pickler_class: Any = None


def _pickler() -> Any:
    """The pickler class; made at the first use, because cloudpickle is optional."""
    global _pickler_class
    if _pickler_class is not None:
        return _pickler_class
    base = _cloudpickle().Pickler

    class Pickler(base):  # type: ignore[misc,valid-type]
        """cloudpickle with references for what lives elsewhere, and tensors as raw buffers."""

        def __init__(self, file: Any, buffers: list[Any], reference: Callable[[Any], Any] | None) -> None:
            super().__init__(file, protocol=5, buffer_callback=buffers.append)
            self._reference = reference

        def persistent_id(self, value: Any) -> Any:
            """A reference that stands for ``value``, or ``None``."""
            return None if self._reference is None else self._reference(value)

        def reducer_override(self, value: Any) -> Any:
            """Plain tensors travel as raw buffers, modules by name, also those that are of a class of their own.

            ``torch.ops``, ``torch.classes`` and ``torch.backends`` are such; a function that says ``torch`` and, for a
            module of Keras or an attribute of its own, ``ops`` or ``classes`` refers to them for cloudpickle.
            """
            if type(value) is torch.Tensor and value.is_leaf and _has_plain_bytes(value):
                return _reduce_tensor(value)
            if isinstance(value, ModuleType) and type(value) is not ModuleType:
                name = value.__name__
                if sys.modules.get(name) is value:
                    return importlib.import_module, (name,)
            return super().reducer_override(value)

    _pickler_class = Pickler
    return Pickler


def dumps(value: Any, reference: Callable[[Any], Any] | None = None) -> list[Any]:
    """Pickles ``value``.

    Args:
        value: anything cloudpickle can take.
        reference: gives a small picklable object for what must not travel, or ``None``.

    Returns:
        The pickle, followed by the raw buffers it refers to.

    Raises:
        TypeError: something in ``value`` cannot be pickled; the message says what to do.
    """
    file, buffers = io.BytesIO(), []  # type: tuple[io.BytesIO, list[Any]]
    try:
        _pickler()(file, buffers, reference).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:  # also a __getstate__ that refuses
        raise TypeError(
            f"{describe(value)} cannot be sent to another process: {str(error).rstrip('.')}. Make what it needs "
            "inside the function, in coordinator.create_per_worker_resource, or in a module that every task can import."
        ) from error
    return [file.getbuffer(), *(b.raw() for b in buffers)]


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: Any, buffers: Sequence[Any], resolve: Callable[[Any], Any] | None, made: list[torch.Tensor] | None
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._resolve, self._made = resolve, made

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names; tensors are noted as they are made."""
        found = super().find_class(module, name)
        return self._noted if found is _tensor_from and self._made is not None else found

    def _noted(self, *args: Any) -> torch.Tensor:
        tensor = _tensor_from(*args)
        assert self._made is not None
        self._made.append(tensor)
        return tensor

    def persistent_load(self, reference: Any) -> Any:
        if self._resolve is None:
            raise pickle.UnpicklingError(f"nothing here can stand for {reference!r}")
        return self._resolve(reference)


def loads(
    parts: Sequence[Any], resolve: Callable[[Any], Any] | None = None, made: list[torch.Tensor] | None = None
) -> Any:
    """Unpickles what ``dumps`` gave.

    Args:
        parts: the pickle and its buffers.
        resolve: the object for a reference.
        made: gets the tensors that came along.

    Raises:
        DataLossError: the pickle is cut off or damaged; what unpickling runs may raise anything else.
    """
    if not parts:
        raise DataLossError("a value from another process cannot be read: nothing came")
    try:
        return _Unpickler(io.BytesIO(parts[0]), parts[1:], resolve, made).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise DataLossError(f"a value from another process cannot be read: {error}") from error


def describe(value: Any) -> str:
    """A short name of a value for messages."""
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name!r}" if name else f"A {type(value).__name__}"
