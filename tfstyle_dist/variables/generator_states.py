"""The states of the ``torch.Generator`` objects of a program, for each replica.

All replicas begin with the same state, and each goes on from there with what it draws itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class _Kept:
    """One generator: its state for each replica, and what cross-replica context had when a run ended."""

    __slots__ = ("mark", "reference", "states")

    def __init__(self, reference: Callable[[], torch.Generator | None], states: list[torch.Tensor]) -> None:
        self.reference, self.states, self.mark = reference, states, states[0]


class GeneratorStates:
    """The generators that are content; kept alive only before torch 2.13, where nothing can refer to one weakly."""

    def __init__(self) -> None:
        self._all: list[_Kept] = []

    def add(self, generator: torch.Generator, count: int, gone: Callable[[Any], None]) -> None:
        """Gives each of ``count`` replicas the state that a generator has; ``gone``: called when it is gone."""
        self._all.append(_Kept(_reference(generator, gone), [generator.get_state()] * count))

    def switch(self, before: int, after: int) -> None:
        """The generators have the state of replica ``before``; they get that of ``after``."""
        for generator, kept in self._living():
            kept.states[before] = generator.get_state()
            generator.set_state(kept.states[after])

    def renew(self, everything: bool) -> None:
        """Generators that cross-replica context has seeded, or drawn from, are as it left them for all replicas.

        Args:
            everything: all generators are.
        """
        for generator, kept in self._living():
            now = generator.get_state()
            if everything or not torch.equal(now, kept.mark):
                kept.states[:] = [now] * len(kept.states)

    def mark(self) -> None:
        """Remembers the states as they are."""
        for generator, kept in self._living():
            kept.mark = generator.get_state()

    def living(self) -> list[tuple[torch.Generator, list[torch.Tensor]]]:
        """The living generators, with the state of each for every replica."""
        return [(generator, kept.states) for generator, kept in self._living()]

    def _living(self) -> list[tuple[torch.Generator, _Kept]]:
        return [(generator, kept) for kept in self._all if (generator := kept.reference()) is not None]

    def drop_dead(self) -> None:
        """Forgets those that are gone."""
        self._all = [kept for kept in self._all if kept.reference() is not None]


def _reference(generator: torch.Generator, gone: Callable[[Any], None]) -> Callable[[], torch.Generator | None]:
    try:
        return weakref.ref(generator, gone)
    except TypeError:  # before torch 2.13
        return lambda: generator
