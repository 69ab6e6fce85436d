"""Mirrored: equal values, one on each replica's device, that are used as one tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from tfstyle_dist.core import nest
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.values.distributed_values import PerReplica


def _first() -> int:
    return 0


class Mirrored(PerReplica):
    """Equal values, one on each replica's device: what ``extended.reduce_to`` gives for a variable.

    It is used as the tensor that it is on every replica: in expressions, torch's functions, with a tensor's methods. In
    replica context that is the replica's own one, elsewhere the first.

    Args:
        values: one value for each local replica.
        local_replica: tells the number of the calling replica among them.
    """

    def __init__(self, values: Sequence[Any], local_replica: Callable[[], int] = _first) -> None:
        super().__init__(values)
        self._local_replica = local_replica

    def _tfstyle_value(self) -> Any:
        return self._values[self._local_replica()]

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Torch's functions are given the tensor."""
        args, kwargs = nest.map_structure(_value_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            raise AttributeError(
                f"{type(self).__name__}.{name} would change the value of one replica alone. Write "
                "strategy.experimental_local_results(value) and change each of them, or use a Variable."
            )
        return getattr(self._tfstyle_value(), name)

    def item(self) -> Any:
        """The number, of a value of one element."""
        return self._tfstyle_value().item()

    def __getitem__(self, key: Any) -> Any:
        return self._tfstyle_value()[key]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tfstyle_value().__array__(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tfstyle_value())

    def __format__(self, spec: str) -> str:
        return format(self._tfstyle_value(), spec) if spec else str(self)


def _value_of(entry: Any) -> Any:
    return entry._tfstyle_value() if isinstance(entry, Mirrored) else entry


def _delegate(name: str, apply: Callable[..., Any]) -> None:
    def method(self: Mirrored, *others: Any) -> Any:
        return apply(self._tfstyle_value(), *map(_value_of, others))

    def reflected(self: Mirrored, other: Any) -> Any:
        return apply(other, self._tfstyle_value())

    setattr(Mirrored, f"__{name}__", method)
    if name in _REFLECTED:
        setattr(Mirrored, f"__r{name}__", reflected)


_REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHERS = ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "lshift", "rshift")
for _name in (*_REFLECTED, *_OTHERS):
    _delegate(_name, getattr(operator, f"__{_name}__"))
_NUMBERS: dict[str, Callable[..., Any]] = {"float": float, "int": int, "bool": bool, "complex": complex, "round": round}
for _name, _apply in _NUMBERS.items():
    _delegate(_name, _apply)
