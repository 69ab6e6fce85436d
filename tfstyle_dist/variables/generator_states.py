"""The states of the ``torch.Generator`` objects of a program, for each replica."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class GeneratorStates:
    """The generators that are content; kept alive only before torch 2.13, where nothing can refer to one weakly."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Callable[[], torch.Generator | None], list[torch.Tensor]]] = []

    def add(self, generator: torch.Generator, count: int, gone: Callable[[Any], None]) -> None:
        """Gives each of ``count`` replicas the state that a generator has; ``gone``: called when it is gone."""
        self._pairs.append((_reference(generator, gone), [generator.get_state()] * count))

    def switch(self, before: int, after: int) -> None:
        """The generators have the state of replica ``before``; they get that of ``after``."""
        for reference, states in self._pairs:
            generator = reference()
            if generator is not None:
                states[before] = generator.get_state()
                generator.set_state(states[after])

    def living(self) -> list[tuple[torch.Generator, list[torch.Tensor]]]:
        """The living generators, with the state of each for every replica."""
        return [(generator, states) for reference, states in self._pairs if (generator := reference()) is not None]

    def drop_dead(self) -> None:
        """Forgets those that are gone."""
        self._pairs = [pair for pair in self._pairs if pair[0]() is not None]


def _reference(generator: torch.Generator, gone: Callable[[Any], None]) -> Callable[[], torch.Generator | None]:
    try:
        return weakref.ref(generator, gone)
    except TypeError:  # before torch 2.13
        return lambda: generator
