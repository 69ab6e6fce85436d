"""The replicas of this worker take turns as those of one process do; the others' part of joint work comes by wire.

Every worker does all joint work, with what all R replicas gave, in replica order. So it computes what one process with
R replicas computes, bit for bit, whoever holds which replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from tfstyle_dist.runtime.clocks import WAIT
from tfstyle_dist.runtime.replica_run import Action, Content
from tfstyle_dist.runtime.turns import TurnRun


class Exchanger(Protocol):
    """Sends what this worker's replicas gave, and gets what the others did."""

    def exchange(self, kind: str, own: dict[int, Any]) -> list[Any]:
        """What all replicas gave, in replica order.

        Args:
            kind: what the call is.
            own: what this worker's replicas gave, by replica.
        """

    def settled(self, kind: str) -> None:
        """The joint work is done."""

    def same_numbers(self) -> AbstractContextManager[None]:
        """Inside, all workers draw the same random numbers."""


class HeldContent(Content):
    """The content of the replicas of one worker, by their place among them; a step that fails is put back as a whole.

    Args:
        contents: by replica.
        held: the replicas of this worker.
    """

    def __init__(self, contents: Content, held: Sequence[int]) -> None:
        self._contents, self._held = contents, held

    def switch(self, replica: int | None) -> None:
        """See ``Content``."""
        self._contents.switch(None if replica is None else self._held[replica])

    def enter(self, begins: bool = False) -> None:
        """See ``Content``."""
        self._contents.enter(begins)

    def leave(self) -> None:
        """See ``Content``."""
        self._contents.leave()

    def pause(self, replica: int) -> None:
        """See ``Content``."""
        self._contents.pause(self._held[replica])


class ElasticRun:
    """One run, as the replicas of this worker see it.

    Args:
        run: of this worker's replicas, by their place.
        held: the replicas of this worker.
        exchanger: brings the others' part.
    """

    def __init__(self, run: TurnRun, held: Sequence[int], exchanger: Exchanger) -> None:
        self._run, self._held, self._exchanger = run, held, exchanger

    def barrier(
        self, replica: int, kind: str, payload: Any, action: Action, phase: int = WAIT, anywhere: bool = False
    ) -> Any:
        """See ``ReplicaRun``."""

        def joint(payloads: list[Any]) -> list[Any]:
            everyone = self._exchanger.exchange(kind, dict(zip(self._held, payloads, strict=True)))
            with nullcontext() if anywhere else self._exchanger.same_numbers():
                results = action(everyone)
            self._exchanger.settled(kind)
            return [results[r] for r in self._held]

        return self._run.barrier(self._held.index(replica), kind, payload, joint, phase, anywhere)

    def begin_update(self, replica: int) -> None:
        """See ``ReplicaRun``."""
        self._run.begin_update(self._held.index(replica))
