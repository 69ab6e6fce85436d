"""How worker processes find each other at start-up: bounded, and with the name of whoever does not come.

Every worker puts a handshake with a number that it draws into a key-value store. Worker 0 publishes the list of these
numbers, all confirm it, and worker 0 says go. What processes of an earlier life have left in a store that outlives them
(torchrun's, a file) therefore counts for nothing. Worker 0 watches the others, and the others watch worker 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from typing import Any, NoReturn

from tfstyle_dist.comm.peers.peer import this_peer
from tfstyle_dist.comm.rendezvous.members import KINDS, Handshake, Members, read_text, read_word, strange
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError

_SHORTEST, _LONGEST = 0.002, 0.1  # seconds between two looks
_BEAT_SECONDS, _SILENCE_SECONDS = 1.0, 30.0
_LAST_WORDS_SECONDS = 5.0  # at most


class Rendezvous:
    """One start-up in a store.

    Args:
        store: the store, with a prefix that is this rendezvous' own among those of one process.
        members: who is to come.
        deadline: until when.
        lasting: whether the store may hold what an earlier life of these workers has left.

    Attributes:
        lasting: as given.
        leader: where worker 0 runs, once all have come.
    """

    def __init__(self, store: Any, members: Members, deadline: Deadline, lasting: bool) -> None:
        self._store, self._members, self._deadline, self.lasting = store, members, deadline, lasting
        cluster = members.signature or f"{members.size} workers"
        self._handshake = Handshake(uuid.uuid4().hex, this_peer(members.rank), cluster)
        self.leader = self._handshake.peer
        self._beats, self._next_beat = 0, 0.0
        # Of each number: its last beat, when it came, and whether one came while we looked.
        self._heard: dict[str, tuple[bytes, float, bool]] = {}
        self._alive: set[str] = set()

    def wait(self) -> str:
        """Waits until all workers are there.

        Returns:
            A name for this rendezvous that no other has; the same on all workers.

        Raises:
            DeadlineExceededError: some did not come; the message lists them.
            PeerLostError: one came and died, or gave up.
            ValueError: two processes claim one rank, or the workers were told different clusters.
        """
        try:
            self._store.set(f"handshake/{self._members.rank}", self._handshake.text())
            return self._lead() if self._members.rank == 0 else self._follow()
        except (DeadlineExceededError, PeerLostError, ValueError) as error:
            self._leave_word(error)
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise PeerLostError(
                f"{self._members.names[0]}, where the workers meet, is gone while {self._members.own_name} waited for "
                f"the others to start ({_first_line(error)}). Look at its own output first."
            ) from error

    def _lead(self) -> str:
        published, pause, others = "", _SHORTEST, range(1, self._members.size)
        while True:
            handshakes = [self._read_handshake(rank) for rank in range(self._members.size)]
            if all(handshakes):
                everyone = json.dumps([handshake.number for handshake in handshakes if handshake])
                if everyone != published:
                    self._store.set("everyone", everyone)
                    published = everyone
                if all(self._read(f"confirmed/{rank}") == published.encode() for rank in others):
                    self._store.set(f"go/{_digest(published)}", "1")
                    return _digest(published)
            self._beat()
            for handshake in handshakes:
                self._look_after(handshake)
            self._check_deadline()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)

    def _follow(self) -> str:
        rank, confirmed, pause = self._members.rank, "", _SHORTEST
        while True:
            listed = (self._read("everyone") or b"[]").decode(errors="replace")
            numbers = read_text(listed, "the list of workers")
            if not isinstance(numbers, list):
                raise ValueError(strange("the list of workers", listed))
            if listed != confirmed and len(numbers) == self._members.size and numbers[rank] == self._handshake.number:
                confirmed = listed
                self._store.set(f"confirmed/{rank}", confirmed)
            if confirmed and self._store.check([f"go/{_digest(confirmed)}"]):
                self.leader = (self._read_handshake(0) or self._handshake).peer
                return _digest(confirmed)
            self._beat()
            self._look_after(self._read_handshake(rank))
            leader = self._read_handshake(0)
            self._look_after(leader)
            if leader and leader.number in self._alive and (verdict := self._read(f"verdict/{leader.number}")):
                kind, message = read_word(verdict, "worker 0's verdict")
                raise KINDS[kind](message)
            self._check_deadline()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)

    def _read(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def _read_handshake(self, rank: int) -> Handshake | None:
        text = self._read(f"handshake/{rank}")
        return Handshake.parse(rank, text) if text else None

    # ---- who is missing ---------------------------------------------------------------------------------------

    def _look_after(self, handshake: Handshake | None) -> None:
        """Raises if a worker that came is lost or does not belong here."""
        if handshake is None:
            return
        peer, name = handshake.peer, self._members.names[handshake.peer.rank]
        where = f"{name} (pid {peer.pid} on {peer.host})"
        if peer.rank == self._members.rank:
            if handshake.number != self._handshake.number:
                raise ValueError(
                    f"Two processes say that they are {name}: this one (pid {self._handshake.peer.pid} on "
                    f"{self._handshake.peer.host}) and pid {peer.pid} on {peer.host}. Give each process its own task."
                )
            return
        state, was_alive = peer.state(), handshake.number in self._alive
        silent = self._listen(handshake)
        if state == "dead" and (was_alive or not self.lasting):
            raise PeerLostError(f"{where} died while the workers started. Look at its own output first.")
        if state == "dead" or (self.lasting and not peer.visible() and not self._heard[handshake.number][2]):
            return  # perhaps of an earlier life
        self._alive.add(handshake.number)
        if handshake.cluster != self._handshake.cluster:
            raise ValueError(
                f"The workers were told different clusters: {self._members.own_name} has {self._handshake.cluster}, "
                f"{where} has {handshake.cluster}. Give all workers the same cluster; only the task differs."
            )
        if reason := self._read(f"gave up/{handshake.number}"):
            kind, message = read_word(reason, f"worker {peer.rank}'s last word")
            if kind == DeadlineExceededError.__name__:
                self._list_absent()  # its time was up a moment before ours
            raise PeerLostError(f"{where} gave up: {message}")
        if silent > _SILENCE_SECONDS:
            raise PeerLostError(
                f"{where} has given no sign of life for {_SILENCE_SECONDS:g} s while the workers started: {state}."
            )

    def _is_there(self, handshake: Handshake) -> bool:
        """Whether it is neither dead nor, as far as we know, of an earlier life."""
        known = handshake.number in self._alive or not self.lasting or handshake.peer.visible()
        return known and handshake.peer.state() != "dead"

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_SECONDS
            self._beats += 1
            self._store.set(f"beat/{self._handshake.number}", str(self._beats))

    def _listen(self, handshake: Handshake) -> float:
        """Seconds since the last sign of life."""
        now, beat = time.monotonic(), self._read(f"beat/{handshake.number}") or b""
        known, since, moved = self._heard.get(handshake.number, (beat, now, False))
        if beat != known:
            since, moved = now, True
        self._heard[handshake.number] = (beat, since, moved)
        return now - since

    def _check_deadline(self) -> None:
        if self._deadline.passed():
            self._list_absent()

    def _list_absent(self) -> NoReturn:
        absent, lines = [], []
        for rank, name in enumerate(self._members.names):
            handshake = self._read_handshake(rank)
            if rank == self._members.rank:
                continue
            if handshake and self._is_there(handshake):
                where = f"pid {handshake.peer.pid} on {handshake.peer.host}"
                lines.append(f"  {name}: has started, {where}, {handshake.peer.state()}")
            else:
                absent.append(name)
                lines.append(f"  {name}: ABSENT")
        what = f"{', '.join(absent)} did not start" if absent else "The workers started but did not agree"
        raise DeadlineExceededError(
            f"{what} within {self._deadline}: {len(absent)} of {self._members.size} absent, waited for by "
            f"{self._members.own_name}.\n" + "\n".join(lines) + "\nStart one process for each task, look at the absent "
            "ones' own output, or allow more time with TFSTYLE_START_TIMEOUT_SECONDS."
        )

    def _leave_word(self, error: Exception) -> None:
        """Tells the others; worker 0 stays until they have read it, or the store would be gone before they can."""
        with contextlib.suppress(Exception):
            kind = next(name for name, kind in KINDS.items() if isinstance(error, kind))
            if self._members.rank > 0:
                self._store.set(f"gave up/{self._handshake.number}", json.dumps([kind, _first_line(error)]))
            else:
                self._store.set(f"verdict/{self._handshake.number}", json.dumps([kind, str(error)]))
                self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Until all who are there have given up too, as they do when they read the verdict; bounded."""
        end, pause = time.monotonic() + _LAST_WORDS_SECONDS, _SHORTEST
        while time.monotonic() < end:
            leader, *others = [self._read_handshake(rank) for rank in range(self._members.size)]
            if leader is None or leader.number != self._handshake.number:
                return  # they look at another worker 0
            if all(handshake is None or self._has_left(handshake) for handshake in others):
                return
            self._beat()
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)

    def _has_left(self, handshake: Handshake) -> bool:
        return self._store.check([f"gave up/{handshake.number}"]) or not self._is_there(handshake)


def _digest(numbers: str) -> str:
    return hashlib.sha256(numbers.encode()).hexdigest()[:16]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).partition("\n")[0]
