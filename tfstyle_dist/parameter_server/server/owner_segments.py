"""A variable's memory while it is on its way to a client: a write meanwhile goes into other memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch

SMALLEST = 1 << 18
"""Bytes; smaller variables are copied before they are sent."""
_SPARES = 2


class Home(Protocol):
    """Where a variable lives."""

    def publish(self, version: int) -> None:
        """The value is whole, and is of this version."""

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written.

        Args:
            stored: the variable.
            keep: the write needs the old value where it writes; otherwise it makes every element anew.

        Returns:
            The old value, if the variable has moved to memory that does not hold it.
        """

    def lend(self, stored: Any) -> Loan | None:
        """Keeps the memory of the present value as it is until ``take_back``; ``None``: that is not possible."""

    def take_back(self, loan: Loan) -> None:
        """A loan is not used any more."""


class Loan:
    """The present value of a variable, which stays as it is.

    Args:
        home: of the variable.
        data: the value.
        buffer: the home's own number of that memory.
    """

    __slots__ = ("_home", "buffer", "data")

    def __init__(self, home: Home, data: torch.Tensor, buffer: int) -> None:
        self._home, self.data, self.buffer = home, data, buffer

    def give_back(self) -> None:
        """It is not used any more."""
        self._home.take_back(self)


class OwnMemory:
    """The home of a variable that no other process reads: memory of this process."""

    def __init__(self) -> None:
        self._lent: dict[int, int] = {}
        self._current = 0
        self._spares: list[torch.Tensor] = []

    def publish(self, version: int) -> None:
        """Nobody looks."""

    def begin(self, stored: Any, keep: bool) -> torch.Tensor | None:
        """Before the value is written: if it is lent, other memory takes its place."""
        old: torch.Tensor = stored.parameter.data
        if old.data_ptr() not in self._lent:
            return None
        fresh = self._spares.pop() if self._spares else torch.empty_like(old)
        stored.parameter.data = fresh
        self._current = fresh.data_ptr()
        if not keep:
            return old
        fresh.copy_(old)
        return None

    def lend(self, stored: Any) -> Loan | None:
        """Keeps the present value as it is."""
        data: torch.Tensor = stored.parameter.data
        self._current = data.data_ptr()
        self._lent[self._current] = self._lent.get(self._current, 0) + 1
        return Loan(self, data, self._current)

    def take_back(self, loan: Loan) -> None:
        """The last one gives the memory free for a later write, unless it holds the value still."""
        self._lent[loan.buffer] -= 1
        if self._lent[loan.buffer] == 0:
            del self._lent[loan.buffer]
            if loan.buffer != self._current and len(self._spares) < _SPARES:
                self._spares.append(loan.data)
