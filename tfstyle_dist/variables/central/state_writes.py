"""Central storage: notices what several replicas write to the state of the one optimizer outside of its ``step()``.

What each replica makes of the value that it finds, as an average that hooks keep in ``optimizer.state`` does, is done
once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tfstyle_dist.variables.central.known_values import Value, mark_of

_Place = tuple[int, int, Any]
"""An optimizer and a parameter by their ``id``, and the name of an entry."""
_NUMBERS = frozenset({bool, int, float, complex})


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
