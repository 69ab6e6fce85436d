"""What the members of a job do together in a step: see who is there, exchange, vote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, PeerLostError, UnavailableError
from tfstyle_dist.elastic.connections.address_lookup import Address
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership import error_texts
from tfstyle_dist.elastic.membership.attendance import Attendance, View, pause, view_of
from tfstyle_dist.elastic.membership.member_state import FROZEN, JOINING
from tfstyle_dist.elastic.membership.protocol import Member
from tfstyle_dist.elastic.options import Elastic

_JOIN_WITHIN = 30.0  # seconds from a newcomer's state to its first call


class MembershipChanged(BaseException):
    """Unwinds a step because the workers changed; the step is done again.

    A ``BaseException``, so that a program's own ``except Exception`` does not swallow it.
    """


class Membership(Attendance):
    """One worker's place in an elastic job; arguments and attributes are those of ``Attendance``."""

    def __init__(self, me: int, addresses: Sequence[Address], options: Elastic, timeout: timedelta | None) -> None:
        self._view: View | None = None
        self._sequence = 0
        super().__init__(me, addresses, options, timeout)

    def join(self, limit: timedelta | None) -> tuple[View, list[Packet]]:
        view, parts = super().join(limit)
        self._view, self._sequence = view, 0
        return view, parts

    # ---- one step ---------------------------------------------------------------------------------------------

    def view(self, admits: bool = False) -> View:
        """The membership now; waits while the workers are finding out who is there.

        Args:
            admits: whether a worker that wants to join may come in here.

        Raises:
            PeerLostError: this worker cannot go on, because too few are left or the others went on without it.
            RuntimeError: this worker has come back and has not joined.
        """
        deadline = Deadline(self._timeout)
        if self._closed:
            raise UnavailableError(
                f"Worker {self.me} has left the elastic job, because its strategy was closed or a step raised here. "
                "The other workers go on without it. End this process and start it again, alone: it joins them "
                "(launch --elastic does that)."
            )
        with self._changed:
            member = self._running()
            if member.phase == JOINING or member.blank:
                raise RuntimeError(error_texts.not_joined(self.me, "strategy.run"))
            if admits:
                self._send(member.admit())
                while self._waits_for_newcomer(member) and not deadline.passed():
                    self._changed.wait(pause(deadline))
            while member.phase == FROZEN:
                if deadline.passed() or self._hopeless(member):
                    limit = self._options.suspect_after
                    raise PeerLostError(error_texts.cannot_go_on(member, self._dropped_by, limit, deadline))
                self._changed.wait(pause(deadline))
            self._view, self._sequence = view_of(member), 0
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
        others = self._others(view)
        head = {"is": "data", "e": key[0], "s": key[1], "q": key[2], "kind": kind, "c": packet.header}
        for other in others:
            self._connections.send(other, Packet(head, packet.tensors))

        def found() -> dict[int, Packet]:  # what is still to be sent would be copied, and come late
            return {} if self._connections.has_more(others) else self._came.get(key, {})

        came = self._await(view, found, f"{kind} of step {view.step}")
        with self._changed:
            self._came.pop(key, None)
        calls = {other: packet.header["kind"] for other, packet in came.items()}
        if any(call != kind for call in calls.values()):
            raise CollectiveMismatchError(error_texts.made_different_calls({**calls, self.me: kind}, view.step))
        parts = {other: Packet(each.header["c"], each.tensors) for other, each in came.items()}
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
            self._announce_newcomer(member)  # before the vote, so that nobody has begun the next step
            self._send(member.vote(packet))
            self._changed.notify_all()
        self._await(view, lambda: member.committed if member.step > view.step else {}, f"end of step {view.step}")
        with self._changed:
            assert member.committed is not None
            return member.committed

    def expel(self, workers: Iterable[int]) -> None:
        """Goes on without these; they are told."""
        with self._changed:
            for worker in workers:
                self._connections.drop(worker)
                self._send(self._running().lose(worker))

    def _await(self, view: View, found: Callable[[], Any], what: str) -> dict[int, Packet]:
        deadline, others, began = Deadline(self._timeout), set(self._others(view)), time.monotonic()
        with self._changed:
            while True:
                came = found() or {}
                if others <= set(came):
                    return dict(came)
                self._raise_if_changed(view)
                late = sorted(others - set(came))
                if set(late) <= set(view.joined) and time.monotonic() - began > _JOIN_WITHIN:
                    self.expel(late)
                    continue
                if deadline.passed():
                    raise DeadlineExceededError(error_texts.is_late(self.me, late, what, deadline))
                self._changed.wait(pause(deadline))

    # ---- who comes in -----------------------------------------------------------------------------------------

    def _take(self, sender: int, packet: Packet) -> None:
        super()._take(sender, packet)
        if packet.header.get("is") in ("join", "met"):
            self._announce_newcomer(self._running())

    def _announce_newcomer(self, member: Member) -> None:
        """The leader says before which step it lets somebody in: who has not begun it need not begin it twice."""
        if not member.has_newcomer:
            return
        begun = self._view is not None and (self._view.epoch, self._view.step) == (member.epoch, member.step)
        opens = member.epoch.key, member.step + begun
        if self._opens != opens:
            self._opens = opens
            for other in member.epoch.members:
                if other != self.me:
                    self._connections.send(other, Packet({"is": "opens", "e": opens[0], "s": opens[1]}))

    def _waits_for_newcomer(self, member: Member) -> bool:
        """Whether the leader lets somebody in before this step; not any more when it has begun the step itself."""
        step = member.epoch.key, member.step
        if self._opens != step or member.phase == FROZEN or member.leader == self.me:
            return False
        return member.leader not in {*self._came.get((*step, 0), ()), *member.votes.get(member.step, ())}

    # ---- waiting ----------------------------------------------------------------------------------------------

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

    def _hopeless(self, member: Member) -> bool:
        """Whether nobody is left to wait for, and nothing that could become known would change that."""
        alone = all(m == self.me or m in member.lost for m in member.epoch.members)
        unsure = [m for m in member.lost if m in member.epoch.members and m not in member.dead]
        left = len(set(member.epoch.members) - member.lost | member.left)
        too_few = left < self._options.min_workers or (alone and self._dropped_by.issuperset(unsure))
        return self._connections.left_behind or (bool(member.waiting) and too_few)
