"""PerReplica: one object that stands for one value on each local replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core import nest
from tfstyle_dist.core.untraced import untraced


class DistributedValues:
    """Base of everything that holds one value for each local replica (``tf.distribute.DistributedValues``).

    ``strategy.run`` returns one when several replicas run in this process, and unpacks one given as an argument.

    Example:
        >>> value = PerReplica((1, 2))
        >>> value.values
        (1, 2)
    """

    _values: tuple[Any, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this worker's replicas, in replica order."""
        return self._values


class PerReplica(DistributedValues):
    """Values that may differ from replica to replica.

    Args:
        values: one value for each local replica.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def __repr__(self) -> str:
        inner = ",\n".join(f"  {i}: {v!r}" for i, v in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{inner}\n}}"

    def __len__(self) -> int:
        raise TypeError(
            f"A {type(self).__name__} has no length: it holds one value for each of {len(self._values)} "
            "local replicas. Write len(strategy.experimental_local_results(value)), or take the length in strategy.run."
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            f"A {type(self).__name__} is not iterable: it holds one value for each of {len(self._values)} local "
            "replicas. Use strategy.experimental_local_results(value)."
        )

    def __bool__(self) -> bool:
        raise TypeError(
            f"A {type(self).__name__} has no truth value: it holds one value for each replica. Use "
            "strategy.experimental_local_results(value) or strategy.reduce(...)."
        )

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else self._is_no_number()

    def _is_no_number(self, *_: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} is no number: it holds one value for each of {len(self._values)} local replicas. "
            "Make one of them first, e.g. strategy.reduce('MEAN', value, axis=None), or take them with "
            "strategy.experimental_local_results(value)."
        )

    __float__ = __int__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _is_no_number
    __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __round__ = item = _is_no_number
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _is_no_number
    __abs__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __complex__ = _is_no_number

    @classmethod
    @untraced
    def __torch_function__(cls, func: Callable[..., Any], *_: Any) -> Any:
        raise TypeError(
            f"{getattr(func, '__name__', func)} was given a PerReplica, which is no tensor: it holds one value for "
            "each local replica. Call what computes with it by strategy.run(fn, args=(value,)), which gives each "
            "replica its own, or make one tensor of it with strategy.reduce or strategy.gather."
        )

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} has no entries: it holds one value for each of {len(self._values)} local "
            f"replicas. Write strategy.experimental_local_results(value)[replica], or value[{key!r}] in strategy.run."
        )

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("_") and self._values and hasattr(self._values[0], name):
            text += (
                f": it holds one value for each of {len(self._values)} local replicas. Give it to the step, "
                "strategy.run(fn, args=(value,)), where each replica has its own; or take one of them, "
                f"strategy.experimental_local_results(value)[0].{name}; or combine them with strategy.reduce or gather"
            )
        raise AttributeError(text)


class ValueContext:
    """Where a value is made (``tf.distribute.experimental.ValueContext``).

    Args:
        replica_id_in_sync_group: number of the replica the value is for.
        num_replicas_in_sync: number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self._replica_id_in_sync_group = replica_id_in_sync_group
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of the replica the value is for."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in sync."""
        return self._num_replicas_in_sync

    def __repr__(self) -> str:
        return f"ValueContext(replica {self._replica_id_in_sync_group} of {self._num_replicas_in_sync})"


def component_values(value: Any) -> tuple[Any, ...] | None:
    """The per-replica components of a distributed value or variable; ``None`` for anything else."""
    if isinstance(value, DistributedValues):
        return value.values
    return None


def regroup(per_replica: Sequence[Any], what: str = "return values", wrap: type[PerReplica] = PerReplica) -> Any:
    """One nest whose leaves hold the leaves of all replicas.

    Leaves that are the same object on all replicas stay that object; all others become ``PerReplica``. One replica
    gives its nest back untouched.

    Args:
        per_replica: one nest for each local replica.
        what: names the nests in an error.
        wrap: ``PerReplica``, or ``Mirrored`` for values that are equal by construction.

    Raises:
        AssertionError: the nests have different structures.
    """
    if len(per_replica) == 1:
        return per_replica[0]
    if all(type(value) is torch.Tensor for value in per_replica):  # a loss, mostly: no nest to walk
        first = per_replica[0]
        return first if all(value is first for value in per_replica) else wrap(per_replica)
    leaves, spec = nest.assert_same_structure(per_replica, what)
    grouped = []
    for entries in zip(*leaves, strict=True):
        first = entries[0]
        grouped.append(first if all(e is first for e in entries[1:]) else wrap(entries))
    return nest.unflatten(grouped, spec)


_PLAIN = frozenset({torch.Tensor, int, float, bool, str, type(None)})


def select_replica(local_replica_id: int, structure: Any) -> Any:
    """``structure`` as one replica sees it: ``PerReplica`` leaves unpacked, all else (variables too) as it is."""

    def pick(leaf: Any) -> Any:
        return leaf.values[local_replica_id] if isinstance(leaf, PerReplica) else leaf

    def select(part: Any) -> Any:
        # Lists, tuples and dicts by hand: texts and tokens may be lists of many thousands.
        kind = type(part)
        if kind is list or kind is tuple:
            return kind([one if type(one) in _PLAIN else select(one) for one in part])
        if kind is dict:
            return {key: one if type(one) in _PLAIN else select(one) for key, one in part.items()}
        return nest.map_structure(pick, part)

    return select(structure)


def select_arguments(local_replica_id: int, args: Sequence[Any]) -> list[Any]:
    """``select_replica`` for a list of arguments; plain tensors and numbers cost no tree walk."""
    return [a if type(a) in _PLAIN else select_replica(local_replica_id, a) for a in args]


def local_results(value: Any, num_local_replicas: int) -> tuple[Any, ...]:
    """The values of this worker's replicas (``Strategy.experimental_local_results``).

    Args:
        value: a distributed value, a variable, a nest of such, or anything else.
        num_local_replicas: how many replicas this worker has.

    Returns:
        One entry for each local replica; a 1-tuple for a plain value.
    """
    components = component_values(value)
    if components is not None:
        return components
    if not isinstance(value, tuple | list | dict):
        return (value,)

    def part(leaf: Any, index: int) -> Any:
        entries = component_values(leaf)
        return leaf if entries is None else entries[index]

    return tuple(nest.map_structure(partial(part, index=i), value) for i in range(num_local_replicas))
