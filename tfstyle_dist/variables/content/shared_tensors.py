"""Tensors that all replicas of a process share: a step that writes to one writes to it once for each replica."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.variables.content.carried_names import CarriedNames, Carrying
from tfstyle_dist.variables.content.held_data import HeldData


class SharedTensors:
    """Says it, once, if a step writes to tensors that all replicas share."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[torch.Tensor, int]] = {}  # by id
        self._data = HeldData()  # likewise
        self._carried = CarriedNames(())

    def watch(self, tensors: Iterable[torch.Tensor], carrying: Iterable[Carrying], own: Container[int] = ()) -> None:
        """Remembers how often each tensor was written to so far, and which ones variables hold; forgets all others.

        Args:
            tensors: all of them.
            carrying: functions with the names of the variables.
            own: by ``id`` what each replica has its own content of.
        """
        self._data.clear()
        self._carried = CarriedNames(carrying, own)
        self._watched = {id(t): (t, torch_internals.version_of(t)) for t in tensors if not t.is_inference()}

    def data_is_read(self, tensor: torch.Tensor, data: torch.Tensor | None) -> None:
        """A replica has a tensor's ``data``, which counts the writes to it alone; ``None``: has set it."""
        if id(tensor) in self._watched:
            if data is None:
                self._data.note_write(id(tensor))
            else:
                self._data.add(id(tensor), data)

    def note(self, replica: int) -> None:
        """A replica's turn ends."""
        self._carried.note(replica)

    def pass_over(self) -> None:
        """What was written until now was written in cross-replica context, once for all."""
        self._carried.pass_over()
        if self._watched:
            self._watched = {n: (t, torch_internals.version_of(t)) for n, (t, _) in self._watched.items()}
        self._data.clear()

    def say_written(self) -> None:
        """Says which of them a step has written to, and which variables hold others."""
        self._carried.say_carried()
        for number, (tensor, version) in self._watched.items():
            if torch_internals.version_of(tensor) != version or self._data.was_written(number):
                warn_once(
                    f"shared tensor {id(self)} {tuple(tensor.shape)}",
                    f"A step function wrote to a tensor of shape {tuple(tensor.shape)} that it names (in its closure, "
                    "a global or a container) and that no module or optimizer holds. The replicas of one process share "
                    "it, so each of them wrote to the same values. If each should have its own, as processes would, "
                    "call strategy.experimental_adopt(tensor), or make it a buffer of a module (docs/replicas.md).",
                )
