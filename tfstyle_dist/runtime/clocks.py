"""Stopwatches: what each local replica does at every moment, one thing at a time.

The phases exclude each other, so their times add up to the time that passed. A clock costs two readings of the system's
clock for each phase that begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import Final

INPUT, COMPUTE, COMMUNICATION, WAIT, UPDATE, OTHER = range(6)
PHASES: Final = ("input", "compute", "communication", "wait", "update", "other")
"""Names of the phases: reading a batch; the replica's own function; moving and adding values of several replicas while
the replica stands still; standing still until the others have come; the optimizer; everything outside of ``run``."""


class Clock:
    """What one replica does.

    Calls come from the replica's thread, or from a thread that works for it while it waits (autograd's).

    Attributes:
        on: whether it counts.
        overlapped: seconds in which a transfer was under way while the replica did something else.
    """

    __slots__ = ("_phase", "_since", "_stack", "_times", "overlapped")
    on = True

    def __init__(self) -> None:
        self._times = [0.0] * len(PHASES)
        self.overlapped = 0.0
        self._phase, self._since = OTHER, perf_counter()
        self._stack: list[int] = []

    def enter(self, phase: int) -> None:
        """A phase begins; ``leave`` ends it, and the one before goes on."""
        now = perf_counter()
        self._times[self._phase] += now - self._since
        self._stack.append(self._phase)
        self._phase, self._since = phase, now

    def leave(self, at: float | None = None) -> None:
        """The innermost phase ends.

        Args:
            at: when it ended; default: now.
        """
        now = perf_counter() if at is None else max(at, self._since)
        self._times[self._phase] += now - self._since
        # Empty after an exception that skipped the phases above, see restart.
        self._phase = self._stack.pop() if self._stack else OTHER
        self._since = now

    def counting(self, phase: int) -> Phase:
        """A context manager around a phase."""
        return Phase(self, phase)

    def restart(self, phase: int) -> float:
        """Goes over to a phase and forgets those that exceptions left open; returns the time in seconds."""
        now = perf_counter()
        self._times[self._phase] += now - self._since
        self._stack.clear()
        self._phase, self._since = phase, now
        return now

    def take(self) -> list[float]:
        """The seconds of each phase since the last call, not counting the phase under way since its begin."""
        times, self._times = self._times, [0.0] * len(PHASES)
        return times

    def take_overlapped(self) -> float:
        """The overlapped seconds since the last call."""
        seconds, self.overlapped = self.overlapped, 0.0
        return seconds

    @property
    def last(self) -> float:
        """When something was last counted."""
        return self._since

    def mark(self) -> Sequence[float]:
        """The seconds of each phase up to now, for ``since``."""
        now = perf_counter()
        self._times[self._phase] += now - self._since
        self._since = now
        return tuple(self._times)

    def since(self, mark: Sequence[float]) -> Sequence[float]:
        """The seconds of each phase since ``mark``."""
        return [now - then for now, then in zip(self.mark(), mark, strict=True)]

    def share(self, joint: Sequence[float], waited_in: int) -> None:
        """Counts what another replica did for all of them while this one waited.

        Args:
            joint: the other's seconds in each phase.
            waited_in: the phase to which this clock counted them.
        """
        total = sum(joint)
        if self._times[waited_in] < total:
            return  # something else was counted meanwhile, e.g. a run inside merge_call
        self._times[waited_in] -= total
        for phase, seconds in enumerate(joint):
            self._times[phase] += seconds


class Phase:
    """A block that a clock counts as one phase."""

    __slots__ = ("_clock", "_phase")

    def __init__(self, clock: Clock, phase: int) -> None:
        self._clock, self._phase = clock, phase

    def __enter__(self) -> None:
        self._clock.enter(self._phase)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()


class StoppedClock(Clock):
    """A clock that counts nothing."""

    __slots__ = ()
    on = False

    def enter(self, phase: int) -> None:
        """See ``Clock``."""

    def leave(self, at: float | None = None) -> None:
        """See ``Clock``."""

    def mark(self) -> Sequence[float]:
        """See ``Clock``."""
        return ()

    def since(self, mark: Sequence[float]) -> Sequence[float]:
        """See ``Clock``."""
        return ()

    def share(self, joint: Sequence[float], waited_in: int) -> None:
        """See ``Clock``."""


STOPPED: Final = StoppedClock()
