"""Central storage: notices what several replicas write to the state of the one optimizer outside of its ``step()``.

What each replica makes of the value that it finds, as an average that hooks keep in ``optimizer.state`` does, is done
once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.central.shared_writes import same_values

_Place = tuple[int, int, Any]
"""An optimizer and a parameter by their ``id``, and the name of an entry."""
_NUMBERS = frozenset({bool, int, float, complex})


GONE: Any = object()
"""The value of what is not there."""
PLAIN = (int, float, complex, str, type(None), np.generic)
"""Types of values that nobody writes to in place."""


@dataclass(slots=True)
class Value:
    """A setting, and what was in it if it is a tensor, which is written to in place."""

    value: Any
    inside: torch.Tensor | None = None

    @classmethod
    def of(cls, value: Any) -> Value:
        """That of now."""
        return cls(value, value.detach().clone() if isinstance(value, torch.Tensor) else None)

    @property
    def may_be_put_back(self) -> bool:
        """Whether nothing but its owner refers to what is in it."""
        return self.inside is not None or self.value is GONE or _is_plain(self.value)

    def is_as(self, other: Value) -> bool:
        """Whether both have one value."""
        if self.inside is not None:
            return same_values(self.inside, other.inside)
        return bool(mark_of(self.value) == mark_of(other.value))

    def __str__(self) -> str:
        return "none" if self.value is GONE else repr(self.value if self.inside is None else self.inside)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def mark_of(value: Any) -> Any:
    """Something that changes when the value does; equal to itself, as NaN is not."""
    if isinstance(value, torch.Tensor):
        return id(value), torch_internals.version_of(value)
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return tuple(map(mark_of, value))
    return id(value)


class StateWrites:
    """The state of some optimizers during a run."""

    def __init__(self) -> None:
        self._looks = False
        self._found: dict[_Place, Any] = {}
        self._written: dict[int, dict[_Place, tuple[int, Value]]] = {}  # by call and place: by whom, what

    def begin(self, looks: bool) -> None:
        """A run begins: nobody has written anything in it; ``looks``: what replicas write in it is looked at."""
        self._looks = looks
        self._written.clear()

    def forget(self, number: int) -> None:
        """The optimizer with this ``id`` is gone."""
        self._found = {place: mark for place, mark in self._found.items() if place[0] != number}
        self._written = {
            call: {place: write for place, write in writes.items() if place[0] != number}
            for call, writes in self._written.items()
        }

    def note(self, optimizers: Iterable[Any]) -> None:
        """What is there now is not what the replica whose turn begins has written."""
        if self._looks:
            self._found = {place: mark_of(value) for place, value in _entries(optimizers)}

    def compare(self, replica: int, call: int, optimizers: Iterable[Any]) -> None:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.
            call: how many such calls it has made now.
            optimizers: all.

        Raises:
            RuntimeError: it has changed what a replica before it had written.
        """
        if not self._looks:
            return
        before, self._found, first = self._found, {}, self._written.setdefault(call, {})
        for place, value in _entries(optimizers):
            mark = self._found[place] = mark_of(value)
            if mark == before.get(place):
                continue
            now = Value.of(value)
            writer, written = first.setdefault(place, (replica, now))
            if writer != replica and not now.is_as(written):
                raise RuntimeError(_said(place[2], writer, replica))


def _entries(optimizers: Iterable[Any]) -> Iterator[tuple[_Place, Any]]:
    """The tensors and numbers in the state of optimizers, each with its place."""
    for optimizer in optimizers:
        for key, state in getattr(optimizer, "state", {}).items():
            if isinstance(state, dict):
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
                        yield (id(optimizer), id(key), name), value


def _said(name: Any, first: int, then: int) -> str:
    return (
        f"optimizer.state[...][{name!r}] was written to by replica {first} and then by replica {then} in one call of "
        "strategy.run, outside of optimizer.step(), and the second write changed it again. Under central storage there "
        "is one optimizer for all replicas, so what each of them makes of the value that it finds is made once per "
        "replica. Write to it in step() itself, in merge_call or after strategy.run(...), or use MirroredStrategy, "
        "where each replica has its own optimizer."
    )
