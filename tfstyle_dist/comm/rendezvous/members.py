"""Who is to find each other, and what they say of themselves and of their errors in the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tfstyle_dist.comm.peers.peer import Peer
from tfstyle_dist.core import json_text
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError

KINDS = {kind.__name__: kind for kind in (DeadlineExceededError, PeerLostError, ValueError)}
"""The errors for which a worker gives up at start-up, by name."""


@dataclass(frozen=True)
class Members:
    """Who is to find each other.

    Attributes:
        rank: this worker.
        size: number of workers.
        names: what to call each of them, e.g. ``"worker 1 (host1:2222)"``.
        address: where worker 0 opens the store, or ``None`` if another rendezvous was said.
        signature: what must be the same on all workers, e.g. the list of their addresses.
    """

    rank: int
    size: int
    names: tuple[str, ...]
    address: tuple[str, int] | None
    signature: str = ""

    @property
    def own_name(self) -> str:
        """What this worker is called."""
        return self.names[self.rank]


@dataclass(frozen=True)
class Handshake:
    """What a worker says when it comes.

    Attributes:
        number: drawn for this start-up.
        peer: where it runs.
        cluster: what it was told of the cluster.
    """

    number: str
    peer: Peer
    cluster: str

    @staticmethod
    def parse(rank: int, text: bytes) -> Handshake:
        """From what stands in the store."""
        said = read_text(text, f"worker {rank}'s handshake")
        kinds = (str, str, int, *[str] * 4)
        if not isinstance(said, list) or [*map(type, said)] != [*kinds]:
            raise ValueError(strange(f"worker {rank}'s handshake", text))
        number, cluster, *facts = said
        return Handshake(number, Peer.of(rank, facts), cluster)

    def text(self) -> str:
        """For the store."""
        return json.dumps([self.number, self.cluster, *self.peer.facts])


def read_text(text: str | bytes, what: str) -> Any:
    """What stands in the store; ValueError, with ``what`` it should be, if no worker can have written it."""
    try:
        return json_text.parse(text)
    except ValueError:
        raise ValueError(strange(what, text)) from None


def read_word(text: bytes, what: str) -> tuple[str, str]:
    """The kind and the message of the error for which a worker gave up; ValueError as ``read_text``."""
    said = read_text(text, what)
    if not isinstance(said, list) or len(said) != 2 or said[0] not in [*KINDS] or not isinstance(said[1], str):
        raise ValueError(strange(what, text))
    return said[0], said[1]


def strange(what: str, text: str | bytes) -> str:
    """The message of an error about something in the store that no worker can have written."""
    return (
        f"{what} in the store where the workers meet is {text[:80]!r}: nothing that a worker of this package says. "
        "Does another program, or another version, use the same address? Give this job an address of its own."
    )
