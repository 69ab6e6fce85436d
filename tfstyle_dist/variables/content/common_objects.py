"""Objects that all replicas of a process have in common although a step writes to them: in joint work, once for all."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class HeldInCommon:
    """Base of objects whose attributes change in joint work alone, such as TF-style optimizers."""

    def parts(self) -> Iterable[Any]:
        """Objects of the program whose attributes are content, and which belong to this one."""
        return ()

    def kept(self) -> dict[str, Any]:
        """The attributes but for what is kept for single tensors."""
        return dict(self.__dict__)

    def kept_by_tensor(self) -> Sequence[tuple[torch.Tensor, dict[str, Any]]]:
        """What is kept for each tensor of the program, by name."""
        return ()

    def keep_by_tensor(self, entries: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Keeps this for each tensor, and nothing for others."""

    def settings(self) -> dict[str, Any]:
        """Numbers that must be the same on all workers."""
        return {}


class CommonObjects:
    """Those that the steps of a strategy use; none is kept alive.

    Attributes:
        on_add: called with each that is new.
    """

    def __init__(self) -> None:
        self._all: list[weakref.ref[HeldInCommon]] = []
        self.on_add: Callable[[HeldInCommon], None] | None = None

    def add(self, value: Any) -> Iterable[Any]:
        """Notes what a step uses; returns what belongs to it."""
        if not isinstance(value, HeldInCommon):
            return ()
        if all(known() is not value for known in self._all):
            self._all.append(weakref.ref(value))
            if self.on_add is not None:
                self.on_add(value)
        return value.parts()

    def living(self) -> list[tuple[int, HeldInCommon]]:
        """The living ones with their numbers, in the order in which they were found."""
        return [(number, thing) for number, known in enumerate(self._all) if (thing := known()) is not None]


def in_elastic_job(store: Any) -> bool:
    """Whether a parameter store is of an elastic job: other workers may train with it, though its group is alone."""
    contents = store.contents
    return contents is not None and contents.common is not None
