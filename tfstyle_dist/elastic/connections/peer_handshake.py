"""What two workers say to each other first, and whether they share memory from then on."""

from __future__ import annotations

import os
import reprlib
from contextlib import suppress
from typing import Any

from tfstyle_dist.elastic.connections.connection import Connection
from tfstyle_dist.elastic.connections.doorbell import Bell, Doorbell
from tfstyle_dist.elastic.connections.liveness import place
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.connections.ring_buffers import RingPair

Handshake = dict[str, Any]
_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


def introduction(me: int, job: str, life: str, doorbell: Doorbell) -> Handshake:
    """What a worker says of itself.

    Args:
        me: its number.
        job: what tells the job from others.
        life: tells this process from others that have had its number.
        doorbell: where it waits.
    """
    return {
        "is": "hello", "job": job, "rank": me, "pid": os.getpid(), "place": place(), "life": life,
        "host": doorbell.host, "bell": doorbell.announced,
    }  # fmt: skip


def refusal(hello: Handshake, job: str, me: int, count: int) -> str | None:
    """Why the one that has said hello is none of the other workers of the job; ``None`` if it is.

    Args:
        hello: what it said; anything may be in it.
        job: the job of this worker.
        me: its number.
        count: the number of workers.
    """
    theirs, rank = hello.get("job"), hello.get("rank")
    if theirs == job and type(rank) is int and rank != me and 0 <= rank < count:
        return None
    who = f"Worker {_SHORT.repr(rank)} of job {_SHORT.repr(theirs)}"
    return f"{who} was refused; this is worker {me} of {count} of job {job!r}. This is said once, also if more come."


def answer(connection: Connection, hello: Handshake, mine: Handshake) -> None:
    """The other end has said hello; the one that was dialled says so too, and whether it has the other's memory.

    All that is sent after that goes through the memory, if both have it: nothing overtakes what was sent before.

    Args:
        connection: to the other worker.
        hello: what it said.
        mine: what this worker says of itself.
    """
    if not connection.accepted:
        shares = hello.get("shares")
        connection.share(connection.offered if shares else None, _bell_of(hello, mine["rank"]) if shares else None)
        return
    rings = bell = None
    if mine["host"] and hello.get("host") == mine["host"] and hello.get("lines"):
        bell = _bell_of(hello, mine["rank"])
        rings = None if bell is None else RingPair.find(hello["lines"])
    connection.send(Packet({**mine, "shares": rings is not None}))
    connection.share(rings, bell)


def _bell_of(hello: Handshake, number: int) -> Bell | None:
    """That of the other worker; ``None`` if it cannot be had: its socket wakes it then."""
    with suppress(OSError, ValueError, TypeError):
        return Bell.of(hello["bell"], number)
    return None
