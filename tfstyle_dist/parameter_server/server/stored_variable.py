"""One variable on a server, and the writes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tfstyle_dist.ops import streamed
from tfstyle_dist.parameter_server.protocol.operations import Op
from tfstyle_dist.parameter_server.server.owner_segments import SMALLEST, OwnerSegment, PrivateSegment, SegmentLease


class GradientRule(Protocol):
    """What turns gradients into new values: the server's side of an optimizer.

    Attributes:
        dtype: the default one of the program that has made it.
    """

    dtype: torch.dtype

    def apply(self, pairs: Sequence[tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
        """Updates the parameters of ``(gradient, parameter)`` pairs in one step."""

    def plain_rate(self, parameter: torch.nn.Parameter) -> float | None:
        """The rate, if a step of it only subtracts rate x gradient from this parameter; ``None``: call ``apply``."""

    def slots(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """What it keeps for a parameter."""

    def put_slots(self, parameter: torch.nn.Parameter, slots: Mapping[str, Any]) -> None:
        """Takes over what ``slots`` gave, or part of it."""

    def take_slots(self, parameter: torch.nn.Parameter, slots: Mapping[str, Any]) -> None:
        """Takes over all that there is for a parameter."""

    def settings(self) -> Any:
        """What belongs to no parameter."""

    def common(self) -> dict[str, Any]:
        """What a checkpoint has of that."""

    def set_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over learning rates and the like."""

    def put_settings(self, settings: Any) -> None:
        """Takes over ``settings``."""

    parts: list[bytes]


class StoredVariable:
    """One variable or shard.

    Args:
        number: its number in the cluster.
        name: for messages.
        parameter: the value; optimizers update it in place.
        version: counts its changes.
        rows_only: a table that is never pulled as a whole.

    Attributes:
        segment: what is to be asked before it is written, once others use its memory.
    """

    __slots__ = ("_version", "_writing", "name", "number", "parameter", "rows_only", "segment")

    def __init__(
        self, number: int, name: str, parameter: torch.nn.Parameter, version: int = 1, rows_only: bool = False
    ) -> None:
        self.number, self.name, self.parameter, self.rows_only = number, name, parameter, rows_only
        self.segment: OwnerSegment | None = None
        self._version, self._writing = version, False

    @property
    def version(self) -> int:
        """Counts its changes."""
        return self._version

    @version.setter
    def version(self, value: int) -> None:
        self._version = value
        if self.segment is not None:
            self.segment.publish(value)

    def begin_write(self, keep: bool = True) -> torch.Tensor | None:
        """Counts a change; what others use in place is left alone until ``end_write``.

        Args:
            keep: the write needs the old value in ``parameter``; otherwise it makes every element anew.

        Returns:
            The old value, if ``parameter`` does not hold it now.
        """
        self._version += 1
        if self.segment is None or self._writing:
            return None
        old = self.segment.begin(self, keep)  # may find no memory
        self._writing = True
        return old

    def end_write(self) -> None:
        """The change is made, and can be seen."""
        self._writing = False
        self.version = self._version

    def lease(self) -> SegmentLease | None:
        """The value as it is now, which later writes leave alone until it is released; ``None``: copy it."""
        if self.segment is None:
            if self.parameter.nbytes < SMALLEST:
                return None
            self.segment = PrivateSegment()
        return self.segment.lease(self)

    @property
    def is_shared(self) -> bool:
        """Whether other processes can read it where it is."""
        return self.segment is not None and not isinstance(self.segment, PrivateSegment)


def _change(
    stored: StoredVariable, rows: torch.Tensor | None, change: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    """Changes a value in the buffer that is published next.

    Args:
        stored: whose value.
        rows: which rows change; ``None``: the whole.
        change: called with the value as it is and with where the new one goes; for some rows both are the same.
    """
    old = stored.begin_write(keep=rows is not None)
    target = stored.parameter.detach()
    try:
        change(target if old is None else old, target)
    except BaseException:
        if old is not None:
            target.copy_(old)
        raise
    finally:
        stored.end_write()


def descend(stored: StoredVariable, grad: torch.Tensor, rows: torch.Tensor | None, rate: float) -> None:
    """``value -= rate * gradient``: what plain SGD does."""
    if rows is None:
        _change(stored, rows, lambda old, target: streamed.add(old, grad, -rate, target))
    else:
        _change(stored, rows, lambda _, target: target.index_add_(0, rows, grad * -rate))


def write(stored: StoredVariable, op: int, value: torch.Tensor, rows: torch.Tensor | None) -> None:
    """Assigns, adds or subtracts the whole, adds to rows, or assigns single elements."""
    if op == Op.ASSIGN:
        _change(stored, rows, lambda _, target: target.copy_(value))
    elif op in (Op.ADD, Op.SUB):
        _change(stored, rows, lambda old, target: streamed.add(old, value, 1 if op == Op.ADD else -1, target))
    else:
        assert rows is not None
        if op == Op.ASSIGN_ELEMENTS:
            _change(stored, rows, lambda _, target: target.view(-1).index_copy_(0, rows, value))
        else:
            _change(stored, rows, lambda _, target: target.index_add_(0, rows, value))
