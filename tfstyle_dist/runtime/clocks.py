"""Stopwatches: what each local replica does at every moment, one thing at a time.

The phases exclude each other, so their times add up to the time that passed. A clock costs two readings of the system's
clock for each phase that begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from time import perf_counter
from typing import Final

INPUT, COMPUTE, COMMUNICATION, WAIT, UPDATE, OTHER = range(6)
PHASES: Final = ("input", "compute", "communication", "wait", "update", "other")
"""Names of the phases: reading a batch; the replica's own function; moving and adding values of several replicas while
the replica stands still; standing still until the others have come; the optimizer; everything outside of ``run``."""


_OVERLAPPED = len(PHASES)  # the place of the overlapped seconds after those of the phases


class Clock:
    """What one replica does.

    Calls come from the replica's thread, or from a thread that works for it while it waits (autograd's).

    Attributes:
        on: whether it counts.
    """

    __slots__ = ("_blocks", "_phase", "_since", "_stack", "_times")
    on = True

    def __init__(self) -> None:
        self._times = [0.0] * (_OVERLAPPED + 1)
        self._phase, self._since = OTHER, perf_counter()
        self._stack: list[int] = []
        self._blocks = tuple(Phase(self, phase) for phase in range(len(PHASES)))

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
        # Empty after an exception that skipped the phases above, see cut.
        self._phase = self._stack.pop() if self._stack else OTHER
        self._since = now

    def counting(self, phase: int) -> Phase:
        """A context manager around a phase; it may be entered again and again."""
        return self._blocks[phase]

    def cut(self, phase: int) -> list[float]:
        """Goes over to a phase, forgets those that exceptions left open, and starts counting anew.

        Returns:
            The seconds of each phase since the last cut, then those that ``overlapped`` was given.
        """
        now, times = perf_counter(), self._times
        times[self._phase] += now - self._since
        if self._stack:
            self._stack.clear()
        self._phase, self._since = phase, now
        self._times = [0.0] * (_OVERLAPPED + 1)
        return times

    def overlapped(self, seconds: float) -> None:
        """Counts time in which a transfer was under way while the replica did something else."""
        self._times[_OVERLAPPED] += seconds

    def recount(self, seconds: float, counted: int, right: int) -> None:
        """Counts some of the seconds of the phase under way, or of one that is over, as another phase.

        Args:
            seconds: how many.
            counted: the phase that they are counted as.
            right: the phase that they belong to.
        """
        self._times[counted] -= seconds
        self._times[right] += seconds

    def seconds(self) -> Sequence[float]:
        """The seconds of each phase, up to when something was last counted."""
        return tuple(self._times)

    def since(self, before: Sequence[float]) -> Sequence[float]:
        """The seconds of each phase up to now, since ``seconds`` gave ``before``."""
        now = perf_counter()
        self._times[self._phase] += now - self._since
        self._since = now
        return list(map(sub, self._times, before))

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

    def __exit__(self, *error: object) -> None:
        self._clock.leave()


class StoppedClock(Clock):
    """A clock that counts nothing."""

    __slots__ = ()
    on = False

    def enter(self, phase: int) -> None:
        """See ``Clock``."""

    def leave(self, at: float | None = None) -> None:
        """See ``Clock``."""

    def overlapped(self, seconds: float) -> None:
        """See ``Clock``."""

    def recount(self, seconds: float, counted: int, right: int) -> None:
        """See ``Clock``."""

    def seconds(self) -> Sequence[float]:
        return ()

    def since(self, before: Sequence[float]) -> Sequence[float]:
        return ()

    def share(self, joint: Sequence[float], waited_in: int) -> None:
        """See ``Clock``."""


STOPPED: Final = StoppedClock()
