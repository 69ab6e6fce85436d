"""Central storage whose replicas compute on other devices: the first one's buffers are there while a step runs.

Outside of steps the buffers of modules are beside the parameters; the tensors themselves stay the same objects. What
the other replicas have in their place is on their devices anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.content.copies import PLAIN_TENSORS, copied, move_in_place
from tfstyle_dist.variables.content.marks import SILENT_STATISTICS, tensor_state
from tfstyle_dist.variables.content.object_content import ObjectContent
from tfstyle_dist.variables.content.parameter_marks import are_alike


@dataclass(frozen=True)
class _Lent:
    """A buffer, with what holds its other inside and how that one was."""

    buffer: torch.Tensor
    other: torch.Tensor
    state: tuple[Any, ...] | None  # ``None``: kernels write to it without counting it


class HomeBuffers:
    """Exchanges the insides of buffers when a run begins and when it ends.

    Args:
        home: where the parameters are, under central storage; ``None`` otherwise.
        device: where the first replica computes.
    """

    def __init__(self, home: torch.device | None, device: torch.device) -> None:
        self._home, self._device = home, device
        self._lent: dict[int, _Lent] = {}  # by id, during a run
        self._kept: dict[int, _Lent] = {}  # between runs: the copies on the device
        self._slots: list[tuple[dict[str, torch.Tensor | None], str]] = []  # where they were found

    def lend(self, things: Iterable[tuple[Any, ObjectContent]]) -> None:
        """The buffers of these objects that are modules go to the device."""
        if self._home is None or self._home == self._device:
            return
        for module in (thing for thing, _ in things if isinstance(thing, torch.nn.Module)):
            buffers = torch_internals.buffers_of(module)
            for name, buffer in buffers.items():
                if buffer is None or type(buffer) not in PLAIN_TENSORS:
                    continue
                if buffer.device == self._home:
                    self._lent[id(buffer)] = self._on_device(buffer, name)
                if id(buffer) in self._lent:  # also where it was found in another module
                    self._slots.append((buffers, name))
        self._kept = {}

    def _on_device(self, buffer: torch.Tensor, name: str) -> _Lent:
        known = self._kept.get(id(buffer))
        # What shares its memory, such as a parameter, may have been written to without its version telling.
        alone = buffer.layout is torch.strided and torch_internals.lie_alone(buffer)
        if known is not None and known.buffer is buffer and alone and known.state == tensor_state(buffer):
            other = known.other
        else:
            other = copied(buffer, self._device)
        torch_internals.swap_insides(buffer, other)
        return _Lent(buffer, other, None if name in SILENT_STATISTICS else tensor_state(buffer))

    def take_back(self) -> None:
        """They are beside the parameters again, with the values that the step has left in them."""
        for number, lent in self._lent.items():
            buffer, other = lent.buffer, lent.other
            torch_internals.swap_insides(buffer, other)
            if lent.state is None or tensor_state(other) != lent.state:
                if are_alike(buffer, other):
                    with torch.no_grad():
                        buffer.copy_(other)
                else:
                    buffer.data = copied(other, buffer.device)
            if lent.state is not None:  # else it is copied each time
                self._kept[number] = _Lent(buffer, other, tensor_state(buffer))
        for buffers, name in self._slots:  # what the step has put in their places
            put = buffers.get(name)
            if put is not None and type(put) in PLAIN_TENSORS and id(put) not in self._lent:
                move_in_place(put, self._home or put.device)
        self._lent, self._slots = {}, []
