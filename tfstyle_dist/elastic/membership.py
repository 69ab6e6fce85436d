"""Who is there, what they send each other in a step, and whether a step is committed: the protocol over connections."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, PeerLostError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.elastic.links import Address, Links
from tfstyle_dist.elastic.options import Elastic
from tfstyle_dist.elastic.packets import Packet, of_message, to_message
from tfstyle_dist.elastic.protocol import FROZEN, WORKING, Epoch, Member, Sends

_LOOK = 0.2  # seconds between two looks at the clock


class MembershipChanged(BaseException):
    """Unwinds a step because the workers changed; the step is done again.

    A ``BaseException``, so that a program's own ``except Exception`` does not swallow it.
    """


@dataclass(frozen=True)
class View:
    """The membership that a step is done with.

    Attributes:
        epoch: the workers.
        step: how many steps are committed.
        votes: those of the last committed step, by worker; ``None`` before the first.
    """

    epoch: Epoch
    step: int
    votes: dict[int, Packet] | None


class Membership:
    """One worker's place in an elastic job.

    Args:
        me: this worker's number.
        addresses: of all workers that may take part.
        options: of the job.
        timeout: limit of each wait for another worker; ``None`` waits for ever.
        seed: what this worker would begin random numbers with; that of the lowest worker counts.

    Attributes:
        seed: what the job's random numbers begin with.
    """

    def __init__(
        self, me: int, addresses: Sequence[Address], options: Elastic, timeout: timedelta | None, seed: int
    ) -> None:
        self.me, self._addresses, self._timeout = me, list(addresses), timeout
        self._options, self.seed = options, seed
        self._changed = threading.Condition()
        self._member: Member | None = None
        self._came: dict[tuple[tuple[int, int], int, int], dict[int, Packet]] = {}
        self._before: list[tuple[int, Packet]] = []  # came before the job has begun here
        self._view: View | None = None
        self._sequence = 0
        self._up: set[int] = {me}
        self._gone: dict[int, bool] = {}  # before the job has begun here: and whether the process is gone
        self._dropped_by: set[int] = set()
        self._ready: set[int] = set()
        self._refused = ""
        self._closed = False
        described = json.dumps([self._addresses, options.replicas, options.min_workers])
        job = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._links = Links(
            me, addresses, job, options.beat_every, options.suspect_after, self._on_up, self._on_packet, self._on_down
        )
        self._links.start()  # what it calls uses it

    # ---- beginning --------------------------------------------------------------------------------------------

    def start(self, limit: timedelta | None) -> None:
        """Waits until all workers are there; the lowest one says go.

        Raises:
            DeadlineExceededError: some did not come in time; they are named.
            PeerLostError: the job runs already without this worker.
        """
        deadline, everyone = Deadline(limit), set(range(len(self._addresses)))
        with self._changed:
            while self._member is None:
                if self._refused:
                    raise PeerLostError(self._refused)
                if self.me == 0 and self._ready == everyone - {0} and self._up == everyone:
                    self._begin()
                    for other in everyone - {0}:
                        self._links.send(other, Packet({"is": "go", "seed": self.seed}))
                    break
                if deadline.passed():
                    absent = sorted(everyone - self._up)
                    lines = "\n".join(f"  worker {a} at {':'.join(map(str, self._addresses[a]))}" for a in absent)
                    raise DeadlineExceededError(
                        f"The workers of the elastic job did not all start within {deadline}: {len(absent)} of "
                        f"{len(everyone)} absent, waited for by worker {self.me}.\n{lines}\nStart one process for each "
                        "task, or allow more time with TFSTYLE_START_TIMEOUT_SECONDS."
                    )
                self._changed.wait(_pause(deadline))

    def _begin(self) -> None:
        self._links.dials = False
        members = tuple(range(len(self._addresses)))
        self._member = Member(self.me, Epoch(1, 0, members), self._options.min_workers)
        for other in set(members) - self._up:  # was there, and is gone already
            self._send(self._member.lose(other, self._gone.get(other, False)))
        before, self._before = self._before, []
        for sender, packet in before:
            self._take(sender, packet)
        self._changed.notify_all()

    # ---- one step ---------------------------------------------------------------------------------------------

    def view(self) -> View:
        """The membership now; waits while the workers are finding out who is there.

        Raises:
            PeerLostError: this worker cannot go on, because too few are left or the others went on without it.
        """
        deadline = Deadline(self._timeout)
        if self._closed:
            raise UnavailableError(
                f"Worker {self.me} has left the elastic job, because its strategy was closed or a step raised here. "
                "Start it anew together with all others."
            )
        with self._changed:
            member = self._running()
            while member.phase == FROZEN:
                if deadline.passed() or self._hopeless(member):
                    raise PeerLostError(self._cannot_go_on(member, deadline))
                self._changed.wait(_pause(deadline))
            self._view, self._sequence = View(member.epoch, member.step, member.committed), 0
            self._forget_old(member)
            return self._view

    def gather(self, kind: str, packet: Packet) -> dict[int, Packet]:
        """What all members give at this place of the step, by worker; this worker's own is among it.

        Args:
            kind: what the call is; must be the same on all.
            packet: this worker's.

        Raises:
            MembershipChanged: a worker was lost, or one wants to join.
            CollectiveMismatchError: the workers make different calls.
            DeadlineExceededError: a worker is alive and does not come.
        """
        view = self._current_view()
        key = (view.epoch.key, view.step, self._sequence)
        self._sequence += 1
        head = {"is": "data", "e": key[0], "s": key[1], "q": key[2], "kind": kind, "c": packet.header}
        for other in self._others(view):
            self._links.send(other, Packet(head, packet.tensors))
        found = self._await(view, lambda: self._came.get(key, {}), f"{kind} of step {view.step}")
        with self._changed:
            self._came.pop(key, None)
        calls = {other: came.header["kind"] for other, came in found.items()}
        if any(call != kind for call in calls.values()):
            lines = "\n".join(f"  worker {w}: {call}" for w, call in sorted({**calls, self.me: kind}.items()))
            raise CollectiveMismatchError(f"The workers made different calls in step {view.step}:\n{lines}")
        parts = {other: Packet(came.header["c"], came.tensors) for other, came in found.items()}
        return {member: packet if member == self.me else parts[member] for member in view.epoch.members}

    def commit(self, packet: Packet) -> dict[int, Packet]:
        """Votes for the step, and waits until it is committed.

        Returns:
            The votes of all members, by worker.

        Raises:
            MembershipChanged: a worker was lost before this one had all votes; ``view`` tells what became of the step.
        """
        view = self._current_view()
        with self._changed:
            member = self._running()
            self._raise_if_changed(view)
            self._send(member.vote(packet))
            self._changed.notify_all()
        self._await(view, lambda: member.committed if member.step > view.step else {}, f"end of step {view.step}")
        with self._changed:
            assert member.committed is not None
            return member.committed

    def _await(self, view: View, found: Callable[[], Any], what: str) -> dict[int, Packet]:
        deadline, others = Deadline(self._timeout), set(self._others(view))
        with self._changed:
            while True:
                came = found() or {}
                if others <= set(came):
                    return dict(came)
                self._raise_if_changed(view)
                if deadline.passed():
                    late = sorted(others - set(came))
                    raise DeadlineExceededError(
                        f"Worker {late} is alive and did not come to {what} within {deadline}; worker {self.me} "
                        "waited. All workers must make the same calls. Look at its output."
                    )
                self._changed.wait(_pause(deadline))

    def _raise_if_changed(self, view: View) -> None:
        member = self._running()
        if member.phase == FROZEN or member.epoch != view.epoch:
            raise MembershipChanged(f"the workers of epoch {view.epoch.number} changed in step {view.step}")

    def _current_view(self) -> View:
        assert self._view is not None, "view() comes first"
        return self._view

    def _others(self, view: View) -> list[int]:
        return [m for m in view.epoch.members if m != self.me]

    def _forget_old(self, member: Member) -> None:
        now = (member.epoch.key, member.step)
        self._came = {key: came for key, came in self._came.items() if (key[0], key[1]) >= now}

    # ---- what cannot go on ------------------------------------------------------------------------------------

    def _running(self) -> Member:
        assert self._member is not None, "start() comes first"
        return self._member

    def _hopeless(self, member: Member) -> bool:
        """Whether nobody is left to wait for, and nothing that could become known would change that."""
        alone = all(m == self.me or m in member.lost for m in member.epoch.members)
        unsure = [m for m in member.lost if m in member.epoch.members and m not in member.dead]
        return bool(member.waiting) and alone and self._dropped_by.issuperset(unsure)

    def _cannot_go_on(self, member: Member, deadline: Deadline) -> str:
        others = [m for m in member.epoch.members if m != self.me]
        lost = [m for m in others if m in member.lost]
        if self._dropped_by & set(lost):
            return (
                f"Worker {self.me} was given up by worker {sorted(self._dropped_by)} after step {member.step}: it gave "
                f"no sign of life for {self._options.suspect_after:g} s (Elastic(suspect_after=)), and they went on "
                "without it. It cannot take part any more."
            )
        return (
            f"Worker {self.me} cannot go on after step {member.step}: worker {lost} is lost, of the members "
            f"{list(member.epoch.members)}, and {member.waiting or 'the others did not agree on who is left'} "
            f"(waited up to {deadline}). Start the job again from a checkpoint."
        )

    # ---- called by the thread of the connections --------------------------------------------------------------

    def _on_up(self, other: int) -> None:
        with self._changed:
            self._up.add(other)
            if self._member is None and self.me and len(self._up) == len(self._addresses):
                self._links.send(0, Packet({"is": "ready"}))
            if self._member is not None:
                self._links.send(other, Packet({"is": "running", "epoch": self._member.epoch.number}))
                get_logger().warning("worker %d wants to join; it is told that it cannot come back", other)
            self._changed.notify_all()

    def _on_down(self, other: int, dead: bool, dropped: bool) -> None:
        with self._changed:
            self._up.discard(other)
            self._ready.discard(other)
            if dropped:
                self._dropped_by.add(other)
            # Who gave this worker up has gone on without it, and may have come to the end: being gone then is no reason
            # to go on here.
            dead = dead and other not in self._dropped_by
            self._gone[other] = dead
            if self._member is not None:
                self._send(self._member.lose(other, dead))
            self._changed.notify_all()

    def _on_packet(self, sender: int, packet: Packet) -> None:
        with self._changed:
            kind = packet.header.get("is")
            if self._member is not None:
                self._take(sender, packet)
            elif kind == "go" and sender == 0:
                self.seed = int(packet.header["seed"])
                self._begin()
            elif kind == "ready":
                self._ready.add(sender)
            elif kind == "running":
                self._refused = (
                    f"The elastic job runs already (epoch {packet.header['epoch']}) and has lost this worker "
                    f"{self.me} before. A worker that comes back is not taken in again yet: it can take part after the "
                    "whole job was started again from a checkpoint."
                )
            else:
                self._before.append((sender, packet))
            self._changed.notify_all()

    def _take(self, sender: int, packet: Packet) -> None:
        member, head = self._running(), packet.header
        if head.get("is") == "data":
            if sender not in member.lost:
                key = (tuple(head["e"]), head["s"], head["q"])
                self._came.setdefault(key, {})[sender] = packet
            return
        message = to_message(packet)
        if message is not None:
            self._send(member.receive(sender, message))

    def _send(self, sends: Sends) -> None:
        member = self._running()
        for other, message in sends:
            self._links.send(other, of_message(message))
        if member.phase == WORKING:
            for other in self._links.known():
                if other in member.lost:
                    self._links.drop(other)

    def close(self) -> None:
        """Leaves: the others go on without this worker."""
        self._closed = True
        self._links.close()


def _pause(deadline: Deadline) -> float:
    pause = deadline.pause()
    return _LOOK if pause is None else min(pause, _LOOK)
