"""What a run of replicas is to the replicas, and what it asks of the objects that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tfstyle_dist.runtime.clocks import WAIT

Action = Callable[[list[Any]], Sequence[Any]]


class ReplicaRun(Protocol):
    """One call of ``strategy.run`` as its replicas see it."""

    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """Waits for all local replicas, then gives each its part of what ``action`` returns.

        Args:
            replica: local number of the caller.
            kind: what the call is, e.g. ``"merge_call"``; must be the same on all replicas.
            payload: the caller's contribution.
            action: called once, with all payloads in replica order; returns one result for each replica.
            phase: what waiting for the others counts as, see ``clocks``.
            anywhere: the action works with the payloads alone, so any replica's thread may do it, whatever the objects
                hold. Else the first replica's thread does it, in cross-replica context, and what it writes reaches all
                replicas.

        Raises:
            ReplicaAborted: another replica failed, or the replicas made different calls.
        """

    def begin_update(self, replica: int) -> None:
        """An optimizer of a replica begins a step.

        Args:
            replica: local number of the caller.

        Raises:
            ReplicaAborted: another replica failed before it came to this step, so none makes it.
        """


class InlineRun:
    """The run of one replica: it meets nobody."""

    __slots__ = ()

    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """Does the joint work at once."""
        return action([payload])[0]

    def begin_update(self, replica: int) -> None:
        """Nobody else can have failed."""


class Content:
    """What objects hold for each replica; of this class itself: nothing, so that nothing is exchanged."""

    def switch(self, replica: int | None) -> None:
        """Gives the objects one replica's content; ``None``: that of cross-replica context."""

    def enter(self, begins: bool = False) -> None:
        """Cross-replica context ends: what was written there reaches all replicas.

        Args:
            begins: with this call a run begins.
        """

    def leave(self) -> None:
        """Cross-replica context begins: what is written from now on is noticed by ``enter``."""

    def pause(self, replica: int) -> None:
        """The replica that has the turn comes to a call that all make, or to its end.

        Raises:
            RuntimeError: it has done what only one of the replicas may do.
        """

    def fail(self) -> None:
        """The run that ends has failed; cross-replica context has begun."""

    def release(self) -> None:
        """There will be no run any more, and none is under way."""
