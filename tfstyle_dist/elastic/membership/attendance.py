"""Who is there: the connections to the other workers, the member of the protocol behind them, and getting in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from tfstyle_dist.core import launch_env
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError
from tfstyle_dist.elastic.connections.address_lookup import Address
from tfstyle_dist.elastic.connections.connection_loop import ConnectionLoop
from tfstyle_dist.elastic.connections.doorbell import Doorbell
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership import error_texts
from tfstyle_dist.elastic.membership.member_state import JOINING, VOTED, WORKING
from tfstyle_dist.elastic.membership.protocol import Member
from tfstyle_dist.elastic.membership.protocol_messages import Epoch, Sends
from tfstyle_dist.elastic.membership.protocol_packets import of_message, to_message
from tfstyle_dist.elastic.membership.startup import Startup
from tfstyle_dist.elastic.options import Elastic

_LOOK = 0.2  # seconds between two looks at the clock


@dataclass(frozen=True)
class View:
    """The membership that a step is done with.

    Attributes:
        epoch: the workers.
        step: how many steps are committed.
        votes: those of the last committed step, by worker; ``None`` before the first.
        joined: members that need the state from the others.
    """

    epoch: Epoch
    step: int
    votes: dict[int, Packet] | None
    joined: tuple[int, ...] = ()

    @property
    def donors(self) -> list[int]:
        """The members that have the state."""
        return [m for m in self.epoch.members if m not in self.joined]


class Attendance:
    """One worker's connections and its member of the protocol.

    Args:
        me: this worker's number.
        addresses: of all workers that may take part.
        options: of the job.
        timeout: limit of each wait for another worker; ``None`` waits for ever.

    Attributes:
        came_back: whether the job ran already when this process started.
    """

    def __init__(self, me: int, addresses: Sequence[Address], options: Elastic, timeout: timedelta | None) -> None:
        self.me, self._timeout, self._options = me, timeout, options
        self.came_back = False
        self._changed = Doorbell(me)
        self._member: Member | None = None
        self._came: dict[tuple[tuple[int, int], int, int], dict[int, Packet]] = {}
        self._states: dict[tuple[int, int], dict[int, Packet]] = {}
        self._startup = Startup(me, addresses)
        self._connected: set[int] = set()  # as far as this object was told; the thread of the connections is ahead
        self._fresh: set[int] = set()  # processes that came while the job ran, and are no members
        self._dropped_by: set[int] = set()
        self._members_seen: set[int] = set()  # those that have said that the job runs, and are there
        self._opens: tuple[tuple[int, int], int] | None = None  # before which step of which epoch somebody comes in
        self._closed = False
        described = json.dumps([list(addresses), options.replicas, options.min_workers])
        job = hashlib.sha256(described.encode()).hexdigest()[:16]
        self._connections = ConnectionLoop(
            me, addresses, job, options, self._changed, self._on_up, self._on_packet, self._on_down
        )
        self._changed.look = self._connections.look
        self._connections.start()  # what it calls uses it

    # ---- beginning --------------------------------------------------------------------------------------------

    def start(self, limit: timedelta | None) -> None:
        """Waits until all workers are there and the lowest one says go, or until it is seen that the job runs already.

        Raises:
            PeerLostError: the others have come to the end already.
            DeadlineExceededError: some did not come in time; they are named.
        """
        deadline, startup = Deadline(limit), self._startup
        with self._changed:
            while self._member is None:
                if self.me == 0 and startup.is_complete:
                    self._begin()
                    for other in startup.others:
                        self._connections.send(other, Packet({"is": "go"}))
                    break
                if launch_env.job_has_ended():
                    raise PeerLostError(error_texts.came_too_late(self.me))
                if deadline.passed():
                    raise DeadlineExceededError(error_texts.did_not_start(self.me, startup, deadline))
                self._changed.wait(pause(deadline))

    def _begin(self) -> None:
        self._member = Member(self.me, Epoch(1, 0, self._startup.everyone), self._options.min_workers)
        for other in self._startup.absent:  # was there, and is gone already
            self._send(self._member.lose(other, self._startup.gone.get(other, False)))
        self._take_early()

    def _come_back(self) -> None:
        """The job runs already; ``join`` asks to be let in."""
        self._member = Member(self.me, min_workers=self._options.min_workers, phase=JOINING)
        self.came_back = True
        self._take_early()

    def _take_early(self) -> None:
        for sender, packet in self._startup.early():
            self._take(sender, packet)
        self._changed.notify_all()

    def join(self, limit: timedelta | None) -> tuple[View, list[Packet]]:
        """Asks to be let in, and waits for the state.

        Returns:
            The membership, and what each member that has the state sent of it, by number.

        Raises:
            PeerLostError: the job has ended.
            DeadlineExceededError: it was not let in in time.
        """
        deadline = Deadline(limit)
        with self._changed:
            while True:
                member = self._running()
                if member.phase == JOINING:
                    for other in self._connected:
                        self._connections.send(other, Packet({"is": "join", "life": self._connections.life}))
                view = view_of(member)
                came = self._states.get(view.epoch.key, {})
                if member.blank and member.phase == WORKING and set(view.donors) <= set(came):
                    member.fill()
                    self._states = {}
                    for other in self._connected:  # those that wait to be let in have one more to wait for
                        self._connections.send(other, Packet({"is": "running"}))
                    return view, [came[donor] for donor in view.donors]
                if self._dropped_by or not self._members_seen:
                    raise PeerLostError(error_texts.cannot_join(self.me, self._dropped_by))
                if deadline.passed():
                    raise DeadlineExceededError(f"Worker {self.me} was not let into the job within {deadline}.")
                self._changed.wait(pause(deadline))

    @property
    def is_member(self) -> bool:
        """Whether this worker is a member and has the state."""
        with self._changed:
            return self._member is not None and self._member.phase != JOINING and not self._member.blank

    @property
    def members(self) -> tuple[int, ...]:
        """The members as this worker knows them now."""
        with self._changed:
            return () if self._member is None else self._member.epoch.members

    def give_state(self, view: View, packet: Packet) -> None:
        """Sends a part of the state to those that have joined."""
        head = {"is": "state", "e": view.epoch.key, "c": packet.header}
        for other in view.joined:
            self._connections.send(other, Packet(head, packet.tensors))

    def _running(self) -> Member:
        assert self._member is not None, "start() comes first"
        return self._member

    # ---- called by the thread of the connections --------------------------------------------------------------

    def _on_up(self, other: int) -> None:
        with self._changed:
            self._connected.add(other)
            member = self._member
            if member is None:
                self._startup.up.add(other)
                if self.me and not self._startup.absent:
                    self._connections.send(0, Packet({"is": "ready"}))
            else:
                self._fresh.add(other)
                member.connect(other)
                if member.phase != JOINING and not self._closed:
                    self._connections.send(other, Packet({"is": "running"}))
            self._changed.notify_all()

    def _on_down(self, other: int, dead: bool, dropped: bool) -> None:
        with self._changed:
            self._connected.discard(other)
            self._fresh.discard(other)
            self._members_seen.discard(other)
            if dropped:
                self._dropped_by.add(other)
            # Who gave this worker up has gone on without it, and may have come to the end: being gone then is no reason
            # to go on here.
            dead = dead and other not in self._dropped_by
            self._startup.lose(other, dead)
            if self._member is not None:
                self._send(self._member.lose(other, dead))
            self._changed.notify_all()

    def _on_packet(self, sender: int, packet: Packet) -> None:
        with self._changed:
            kind = packet.header.get("is")
            if kind == "running":
                self._members_seen.add(sender)
            if self._member is not None:
                self._take(sender, packet)
            elif kind == "go" and sender == 0:
                self._begin()
            elif kind == "running":
                self._come_back()
            else:
                self._startup.take(sender, packet)
            self._changed.notify_all()

    def _take(self, sender: int, packet: Packet) -> None:
        member, head = self._running(), packet.header
        kind = head.get("is")
        if kind == "data":
            if sender not in member.lost or member.phase == JOINING:
                key = (tuple(head["e"]), head["s"], head["q"])
                self._came.setdefault(key, {})[sender] = packet
        elif kind == "state":
            self._states.setdefault(tuple(head["e"]), {})[sender] = Packet(head["c"], packet.tensors)
        elif kind == "opens":
            self._opens = tuple(head["e"]), head["s"]
        elif kind == "join":
            self._send(member.reach(sender, head["life"]))
        else:
            message = to_message(packet)
            if message is not None:
                self._send(member.receive(sender, message))

    def _send(self, sends: Sends) -> None:
        member = self._running()
        for other, message in sends:
            self._connections.send(other, of_message(message))
        self._connections.goes_on = member.phase in (WORKING, VOTED) and not member.blank
        self._fresh -= {m for m in member.epoch.members if m not in member.lost}
        if member.phase == WORKING:
            # Not who has a connection by now: a process that came just now is not known to be another one yet.
            for other in self._connected:
                if other in member.lost and other not in self._fresh:
                    self._connections.drop(other)

    def close(self, finished: bool = False) -> None:
        """Leaves: the others go on without this worker.

        Args:
            finished: whether it has come to its end. The others need not do its last step again then, and
                ``min_workers`` counts it still.
        """
        with self._changed:
            if finished and not self._closed and self._member is not None:
                self._send(self._member.leave())
            self._closed = True
        self._connections.close()


def view_of(member: Member) -> View:
    """The membership as a member sees it."""
    return View(member.epoch, member.step, member.committed, member.joined)


def pause(deadline: Deadline) -> float:
    """How long to wait until the clock is looked at again."""
    seconds = deadline.pause()
    return _LOOK if seconds is None else min(seconds, _LOOK)
