"""The operations of a group: their numbers, and what it means when one does not come about.

``Operations.fail`` decides whether a worker is lost (``PeerLostError``) or only late (``DeadlineExceededError``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch

from tfstyle_dist.comm.peers import diagnosis
from tfstyle_dist.comm.peers.peer import Peer
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError, UnavailableError
from tfstyle_dist.core.program_line import program_line

_TIMED_OUT = ("timed out", "timeout", "Timed out", "Timeout")


@dataclass(frozen=True)
class Operation:
    """What a worker is about to do together with the others.

    Attributes:
        name: what it is for, e.g. ``"gradients[0]"``.
        sequence: how many operations this group did before.
        dtype: element type of the buffer.
        numel: number of elements of the buffer.
        site: ``file:line`` of the user's call; found when the operation fails, for it costs a walk up the stack.
    """

    name: str
    sequence: int
    dtype: str
    numel: int
    site: str = ""

    def __str__(self) -> str:
        return f"operation {self.sequence} '{self.name}' ({self.numel} x {self.dtype}) called at {self.site}"


def call_site() -> str:
    """``file:line`` of the user's call that led here."""
    return program_line(sys._getframe(1)) or "unknown"


def name_of(dtype: torch.dtype) -> str:
    """An element type as messages show it."""
    return str(dtype).removeprefix("torch.")


class Operations:
    """Numbers the operations of a group; one that fails breaks the group, and its error tells who is missing.

    Args:
        rank: this worker's number.
        size: number of workers.
        timeout: limit of each wait, for messages.
        store: side channel for "why I left"; ``None`` where there is none.

    Attributes:
        sequence: how many operations were begun.
        error: what broke the group, if anything did.
        peers: where the workers run, by rank; empty until ``introduce``.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta | None, store: Any) -> None:
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.sequence = 0
        self.error: Exception | None = None
        self.peers: Sequence[Peer] = []
        self._prefix = "tfstyle/?"

    def introduce(self, peers: Sequence[Peer], group: str) -> None:
        """Says who takes part.

        Args:
            peers: the workers by rank.
            group: tells this group from others with the same store.
        """
        self.peers, self._prefix = peers, f"tfstyle/{group}"

    def begin(self) -> int:
        """The number of the next operation; raises what broke the group, if anything did."""
        if self.error is not None:
            raise self.error
        self.sequence += 1
        return self.sequence - 1

    def abort(self) -> None:
        """All later operations fail."""
        if self.error is None:
            self.error = UnavailableError("This worker group was aborted; build a new strategy.")

    def report_failure(self, reason: str) -> None:
        """Leaves word for the others why this worker is about to leave."""
        diagnosis.report_failure(self.store, self._prefix, self.rank, reason)

    def fail(self, operation: Operation, error: Exception) -> NoReturn:
        """Turns the error of what moves the values into the package's, with all that can be found out about the others.

        To be called while the caller of the operation is still on the stack.

        Raises:
            DeadlineExceededError: the deadline passed, and all others are there.
            PeerLostError: a worker is missing, or the connection to it.
        """
        operation = replace(operation, site=call_site())
        missing, text = diagnosis.describe_missing(self.store, self._prefix, self.rank, self.peers, str(operation))
        late = any(word in str(error) for word in _TIMED_OUT)
        kind = DeadlineExceededError if late and not missing else PeerLostError
        names = ", ".join(str(r) for r in missing)
        what = f"Worker {names} is missing" if missing else "The workers do not meet"
        limit = "" if self.timeout is None else f" (limit of a wait: {self.timeout.total_seconds():g} s)"
        self.error = kind(
            f"{what}: worker {self.rank} of {self.size} waited in {operation}{limit}.\n{text}\n"
            f"  torch.distributed said: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}\n"
            "Look at the missing worker's own output first. All workers must make the same calls; set "
            "TFSTYLE_DEBUG=collectives to compare them."
        )
        raise self.error from error
