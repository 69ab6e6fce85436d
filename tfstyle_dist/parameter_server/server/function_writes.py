"""Which writes scheduled functions have made: the ones of an earlier attempt are not made twice."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfstyle_dist.core.errors import CancelledError
from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import Operation


@dataclass(slots=True)
class ClosureWrites:
    """What a scheduled function has written so far."""

    attempt: int = 0
    writes: dict[int, int] = field(default_factory=dict)


class FunctionWrites:
    """The functions that may still be started again, and what each has written.

    Attributes:
        low_water: all functions with smaller numbers are finished.
        by_function: what those have written that are not.
        duplicates: how many writes were not made because an earlier attempt had made them.
    """

    def __init__(self) -> None:
        self.low_water = 0
        self.by_function: dict[int, ClosureWrites] = {}
        self.duplicates = 0
        self._below = 0  # see settle
        self._starts: list[int] = []
        self._ends: list[int] = []

    def admit(self, header: Header, writes: bool) -> None:
        """Notes that an attempt of a function is at work.

        Args:
            header: of its message.
            writes: whether it writes.

        Raises:
            CancelledError: the function was started anew elsewhere, or is finished.
        """
        if header.low_water > self.low_water:
            self.low_water = header.low_water
            self._drop_finished()
        if header.closure == 0:
            return
        if self._is_finished(header.closure):
            raise CancelledError(f"Closure {header.closure} is finished; a late attempt changes nothing.")
        closure = self.by_function.get(header.closure)
        if closure is None:
            if not writes:
                return
            closure = self.by_function[header.closure] = ClosureWrites()
        if header.attempt < closure.attempt:
            raise CancelledError(
                f"Attempt {header.attempt} of closure {header.closure} was replaced by attempt {closure.attempt}."
            )
        closure.attempt = header.attempt

    def settle(self, low_water: int, below: int, unfinished: Sequence[int]) -> None:
        """Which functions are finished: their writes need not be known any more.

        Args:
            low_water: all with smaller numbers.
            below: all with smaller numbers but ``unfinished``.
            unfinished: ranges in order, as first, end, first, end, ...
        """
        self.low_water = max(self.low_water, low_water)
        self._below, self._starts, self._ends = below, list(unfinished[::2]), list(unfinished[1::2])
        self._drop_finished()

    def _is_finished(self, closure: int) -> bool:
        if closure < self.low_water or closure >= self._below:
            return closure < self.low_water
        index = bisect.bisect_right(self._starts, closure) - 1
        return index < 0 or closure >= self._ends[index]

    def _drop_finished(self) -> None:
        if len(self.by_function) > 64:
            self.by_function = {k: c for k, c in self.by_function.items() if not self._is_finished(k)}

    def fence(self, closure: int, attempt: int) -> None:
        """Refuses every attempt of a closure before this one from now on."""
        if not self._is_finished(closure):
            entry = self.by_function.setdefault(closure, ClosureWrites())
            entry.attempt = max(entry.attempt, attempt)

    def is_duplicate(self, header: Header, operation: Operation) -> bool:
        """Whether an earlier attempt of this closure has made this write; if not, notes that it is made now."""
        if header.closure == 0:
            return False
        writes = self.by_function[header.closure].writes
        if operation.argument < writes.get(operation.variable, 0):
            self.duplicates += 1
            return True
        writes[operation.variable] = operation.argument + 1
        return False
