"""Which workers are missing, and in what state: what ``Operations.fail`` decides by, and what its error says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tfstyle_dist.comm.peers.peer import Peer
from tfstyle_dist.core import json_text

_GRACE_SECONDS, _LONGEST_GRACE = 1.5, 3.0
_MOST_STACKS = 4
Result = TypeVar("Result")


class KeyValueStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str) -> None:
        """Stores a value."""

    def get(self, key: str) -> bytes:
        """Reads a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class SideChannel:
    """A store that is not asked any more once it failed, or once the worker that holds it is seen to be dead.

    torch prints a C++ stack for every call to a store that is gone.

    Args:
        store: the store.
        holder: the worker whose end is the store's end, if any.
    """

    def __init__(self, store: KeyValueStore, holder: Peer | None = None) -> None:
        self._store, self._holder = store, holder
        self._gone = False

    def _ask(self) -> KeyValueStore:
        self._gone = self._gone or (self._holder is not None and self._holder.state() == "dead")
        if self._gone:
            raise ConnectionError("the store is gone")
        return self._store

    def set(self, key: str, value: str) -> None:
        """See ``KeyValueStore``."""
        self._call(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """See ``KeyValueStore``."""
        return self._call(lambda store: store.get(key))

    def check(self, keys: list[str]) -> bool:
        """See ``KeyValueStore``."""
        return self._call(lambda store: store.check(keys))

    def _call(self, use: Callable[[KeyValueStore], Result]) -> Result:
        store = self._ask()
        try:
            return use(store)
        except Exception:
            self._gone = True
            raise


def report_failure(store: KeyValueStore | None, prefix: str, rank: int, reason: str) -> None:
    """Leaves word why a worker leaves, for ``describe_missing`` of the others."""
    _post(store, f"{prefix}/failed/{rank}", json.dumps(reason))


def _post(store: KeyValueStore | None, key: str, value: str) -> None:
    """Writes to the side channel if it still answers."""
    if store is None:
        return
    try:
        store.set(key, value)
    except Exception:  # the store's host may be the worker that died
        return


def _read(store: KeyValueStore | None, key: str) -> str | None:
    if store is None:
        return None
    try:
        return store.get(key).decode(errors="replace") if store.check([key]) else None
    except Exception:  # as in _post
        return None


def _reason(text: str) -> str:
    try:
        return str(json_text.parse(text))
    except ValueError:
        return text


def describe_missing(
    store: KeyValueStore | None, prefix: str, rank: int, peers: Sequence[Peer], waiting_in: str
) -> tuple[list[int], str]:
    """Finds out which workers do not take part and why.

    Every live worker posts what it waits for; whoever has not posted after a short grace is missing. Where a worker is
    known to be gone, those that run will find that out and post it: they get longer.

    Args:
        store: the side channel, or ``None``.
        prefix: key prefix of the group.
        rank: this worker.
        peers: all workers by rank.
        waiting_in: the operation this worker waits in.

    Returns:
        The missing ranks, and text about every other worker.
    """
    _post(store, f"{prefix}/waiting/{rank}", waiting_in)
    others = [p for p in peers if p.rank != rank]
    begin = time.monotonic()
    waiting: dict[int, str] = {}
    failed: dict[int, str] = {}
    while True:
        for peer in others:
            if (reason := _read(store, f"{prefix}/failed/{peer.rank}")) is not None:
                failed[peer.rank] = _reason(reason)
            elif (where := _read(store, f"{prefix}/waiting/{peer.rank}")) is not None:
                waiting[peer.rank] = where
        silent = [peer for peer in others if peer.rank not in waiting.keys() | failed.keys()]
        seconds = time.monotonic() - begin
        if not silent or seconds > _LONGEST_GRACE:
            break
        if seconds > _GRACE_SECONDS:
            states = [peer.state() for peer in silent]
            gone = failed or any(state.startswith(("dead", "stopped")) for state in states)
            if not (gone and "running" in states and _read(store, f"{prefix}/waiting/{rank}")):
                break
        time.sleep(0.05)
    lines, missing = [], []
    for peer in others:
        state = peer.state()
        head = f"  worker {peer.rank} (pid {peer.pid} on {peer.host}): "
        if peer.rank in failed:
            missing.append(peer.rank)
            lines.append(head + "failed: " + failed[peer.rank])
        elif peer.rank in waiting and state != "dead":
            lines.append(head + "waits in " + waiting[peer.rank])
        else:
            missing.append(peer.rank)
            lines.append(head + "MISSING, " + state)
            if len(missing) <= _MOST_STACKS and (state == "running" or not peer.visible()):
                answer = peer.stack()
                shown = answer.replace("\n", "\n      ") if answer else "none: it does not answer"
                if answer or state == "running":
                    lines.append(f"    its Python stack: {shown}")
    return missing, "\n".join(lines)
