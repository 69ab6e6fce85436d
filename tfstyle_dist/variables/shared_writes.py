"""Central storage: notices when several replicas write to the one copy of a parameter in their steps.

A step that writes to parameters itself, as sharpness-aware optimizers and running averages of weights do, would do it
once for each replica. A write that leaves the parameter as the first replica's did, such as a limit to its values, is
good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.parameter_marks import address_of, memory_of, overlap


class SharedWrites:
    """The parameters of which there is one copy."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Any]] = []  # by place: as the replica whose turn it is found it
        self._read: dict[int, torch.Tensor | None] = {}  # by place, those whose data it asked for: the values before
        self._places: dict[int, list[int]] | None = None  # by memory; looked up when it is asked for
        self._calls: dict[int, int] = {}  # of each replica: how many calls it has made that all make
        self._first: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}  # by call and place: who wrote it, and what

    def begin(self) -> None:
        """A run begins: nobody has written anything in it."""
        self._calls.clear()
        self._first.clear()

    def note(self, parameters: Sequence[torch.Tensor]) -> None:
        """What was written until now is not what the replica whose turn begins has done."""
        self._marks = list(map(_mark, parameters))
        self._read.clear()
        self._places = None

    def data_is_read(self, place: int, data: torch.Tensor | None, parameters: Sequence[torch.Tensor]) -> None:
        """The replica whose turn it is has a tensor's ``data``: what it writes there leaves no mark.

        Args:
            place: of the parameter; below zero: the tensor is none, but may lie in the memory of some.
            data: what it has; ``None``: it has set it.
            parameters: as ``note`` got them, and those that came since.
        """
        others = [] if data is None or place >= 0 else self._at(data, parameters)
        for where in (place, *others):
            if 0 <= where < len(self._marks) and where not in self._read:
                same = _mark(parameters[where]) == self._marks[where]
                self._read[where] = parameters[where].detach().clone() if same else None

    def _at(self, data: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The places of the parameters that a tensor lies in, as an entry of a state dict lies in one."""
        if self._places is None:
            self._places = {}
            for place, parameter in enumerate(parameters):
                self._places.setdefault(memory_of(parameter), []).append(place)
            self._places.pop(0, None)
        return [place for place in self._places.get(memory_of(data), ()) if overlap(data, parameters[place])]

    def is_counted(self, place: int, parameter: torch.Tensor) -> bool:
        """Whether the version of a parameter says that it was written to since ``note``."""
        return place >= len(self._marks) or _mark(parameter) != self._marks[place]

    def compare(self, replica: int, parameters: Sequence[torch.Tensor]) -> list[int]:
        """A replica comes to a call that all make, or to its end.

        Args:
            replica: local number.
            parameters: as ``note`` got them, and those that came since.

        Returns:
            The places of the parameters that it has written to.

        Raises:
            RuntimeError: it has changed what another replica had written between the same two calls.
        """
        call = self._calls[replica] = self._calls.get(replica, 0) + 1
        written = self.written(parameters)
        for place in written:
            value = parameters[place].detach()
            if (call, place) not in self._first:
                self._first[call, place] = replica, value.clone()
            elif not same_values(value, self._first[call, place][1]):
                raise RuntimeError(_said(value, self._first[call, place][0], replica))
        if written or self._read or len(parameters) != len(self._marks):
            self.note(parameters)
        return written

    def written(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The places of the parameters that were written to since ``note``, in the order of ``parameters``."""
        marks, read = list(map(_mark, parameters)), self._read
        if marks == self._marks and not read:
            return []
        return [
            place
            for place, (before, now) in enumerate(zip(self._marks, marks, strict=False))
            if before != now or (place in read and not same_values(parameters[place].detach(), read[place]))
        ]


def _mark(parameter: torch.Tensor) -> tuple[int, Any]:
    return torch_internals.version_of(parameter), address_of(parameter)


def _said(parameter: torch.Tensor, first: int, then: int) -> str:
    return (
        f"A parameter of shape {tuple(parameter.shape)} was written to by replica {first} and then by replica {then} "
        "in one call of strategy.run, and the second write changed it again. Under central storage there is one copy "
        "of the parameters for all replicas, so what each of them writes is written once per replica. Write to it in "
        "merge_call or after strategy.run(...), or use MirroredStrategy, where each replica has its own parameters."
    )


def same_values(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same values, NaN included; what is not strided is never said to."""
    if other is None or one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return False
    other = other.to(one.device)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
