"""Central storage: notices what several replicas write to the state of the one optimizer outside of its ``step()``.

What each replica makes of the value that it finds, as an average that hooks keep in ``optimizer.state`` does, is done
once for each of them. The state is looked at in runs 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.shared_writes import same_values

_Place = tuple[int, int, Any]
"""An optimizer and a parameter by their ``id``, and the name of an entry."""
_NUMBERS = frozenset({bool, int, float, complex})


class StateWrites:
    """The state of some optimizers during a run."""

    def __init__(self) -> None:
        self._runs = 0
        self._found: dict[_Place, tuple[Any, int]] = {}
        self._written: dict[int, dict[_Place, tuple[int, Any]]] = {}  # by call and place: by whom, what

    def begin(self) -> None:
        """A run begins: nobody has written anything in it."""
        self._runs += 1
        self._written.clear()

    def forget(self, number: int) -> None:
        """The optimizer with this ``id`` is gone."""
        self._found = {place: mark for place, mark in self._found.items() if place[0] != number}
        self._written = {
            call: {place: write for place, write in writes.items() if place[0] != number}
            for call, writes in self._written.items()
        }

    @property
    def _looks(self) -> bool:
        return not self._runs & (self._runs - 1)

    def note(self, optimizers: Iterable[Any]) -> None:
        """What is there now is not what the replica whose turn begins has written."""
        if self._looks:
            self._found = {place: _mark(value) for place, value in _entries(optimizers)}

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
            mark = self._found[place] = _mark(value)
            if mark == before.get(place):
                continue
            writer, written = first.setdefault(place, (replica, _copied(value)))
            if writer != replica and not _is_same(value, written):
                raise RuntimeError(_said(place[2], writer, replica))


def _entries(optimizers: Iterable[Any]) -> Iterator[tuple[_Place, Any]]:
    """The tensors and numbers in the state of optimizers, each with its place."""
    for optimizer in optimizers:
        for key, state in getattr(optimizer, "state", {}).items():
            if isinstance(state, dict):
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
                        yield (id(optimizer), id(key), name), value


def _mark(value: Any) -> tuple[Any, int]:
    return (id(value), torch_internals.version_of(value)) if isinstance(value, torch.Tensor) else (repr(value), -1)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_same(value: Any, written: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(written, torch.Tensor) and same_values(value.detach(), written)
    return repr(value) == repr(written)


def _said(name: Any, first: int, then: int) -> str:
    return (
        f"optimizer.state[...][{name!r}] was written to by replica {first} and then by replica {then} in one call of "
        "strategy.run, outside of optimizer.step(), and the second write changed it again. Under central storage there "
        "is one optimizer for all replicas, so what each of them makes of the value that it finds is made once per "
        "replica. Write to it in step() itself, in merge_call or after strategy.run(...), or use MirroredStrategy, "
        "where each replica has its own optimizer."
    )
