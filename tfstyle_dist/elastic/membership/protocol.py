"""Who is a member, and which step is committed: the rules alone, without sockets, threads or time.

A step happens on all members or on none. Each member votes when it has done its part of a step; who has the votes of
all members commits the step. When a member is lost, the others freeze (they commit nothing any more), and each reports
to the lowest member that it has not lost what it has committed. That one decides: the next epoch's members are those
who reported, and a step that one of them has committed is committed by all of them, for then all had voted; else all do
it again. Who decides may be lost too: then the survivors report to the next one.

A process that wants to join has a connection to every member first. The leader freezes the members at the beginning of
a step and decides an epoch with the newcomer, which is blank until it has the state from the others, and votes then.

A loss is final: a member that loses another one closes the connection, so the other loses it too, and only a new
process comes back. A group goes on if it has more than half of the last members, or if all others are known to be dead.

Who comes to its end reports to all before it leaves, so that the others need not do again what it has committed.
"""

from __future__ import annotations

from typing import Any

from tfstyle_dist.elastic.membership.member_state import FROZEN, JOINING, VOTED, WORKING, MemberState
from tfstyle_dist.elastic.membership.protocol_messages import (
    NO_EPOCH,
    Decision,
    Epoch,
    Freeze,
    Message,
    Met,
    Outside,
    Report,
    Sends,
    Vote,
)
from tfstyle_dist.elastic.membership.quorum import decided, why_not, without_broken_links


class Member(MemberState):
    """One worker's part of the protocol; the arguments are those of ``MemberState``.

    Every method returns the messages to send.
    """

    # ---- what this worker does --------------------------------------------------------------------------------

    def vote(self, content: Any = None) -> Sends:
        """This worker has done its part of the step."""
        assert self.phase == WORKING, self.phase
        assert not self.blank, "a vote without the state"
        self.phase = VOTED
        message = Vote(self.epoch.key, self.step, content)
        self.votes.setdefault(self.step, {})[self.me] = content
        self._commit_if_all_voted()
        return [(m, message) for m in self.epoch.members if m != self.me]

    def lose(self, other: int, dead: bool = False) -> Sends:
        """The connection to another worker is gone.

        Args:
            other: the worker.
            dead: whether its process is known to be gone.
        """
        self.newcomers.pop(other, None)
        self.met = {newcomer: by - {other} for newcomer, by in self.met.items() if newcomer[0] != other}
        if dead:
            self.dead.add(other)
        self.lost.add(other)
        if other not in self.left:
            self.reports.pop(other, None)
        if self.phase == JOINING or (other not in self.epoch.members and self.phase != FROZEN):
            return []
        return self._freeze()

    def leave(self) -> Sends:
        """This worker has come to its end; it commits nothing more."""
        self.phase = FROZEN if self.phase != JOINING else JOINING
        report = Report(self.epoch, self.step, frozenset({*self.lost, self.me}), self.committed, self.blank)
        return [(m, report) for m in self.alive() if m != self.me]

    def connect(self, other: int) -> None:
        """There is a connection; while this worker is no member, what it has lost before does not count."""
        if self.phase == JOINING:
            for those in (self.lost, self.dead, self.left):
                those.discard(other)

    def reach(self, newcomer: int, life: str) -> Sends:
        """There is a connection to a process that wants to join."""
        self.newcomers[newcomer] = life
        return self._tell_met(newcomer) if self.phase != JOINING else []

    def admit(self) -> Sends:
        """A step begins: the leader lets those in that all members have met."""
        self.admits = self.phase == WORKING and self.has_newcomer
        return self._freeze() if self.admits else []

    def fill(self) -> None:
        """This worker has got the state of its epoch."""
        self.blank = False

    def receive(self, sender: int, message: Message) -> Sends:
        """A message came; what an old epoch or a lost worker sends is refused, unless it says that it leaves."""
        leaves = isinstance(message, Report) and sender in message.lost
        if sender in self.lost and sender not in self.newcomers and self.phase != JOINING and not leaves:
            return []
        if isinstance(message, Vote):
            return self._on_vote(sender, message)
        if isinstance(message, Met):
            self.met.setdefault((message.newcomer, message.life), set()).add(sender)
            return []
        if isinstance(message, Outside):
            return self._on_outside(message)
        if isinstance(message, Decision):
            return self._install(message) if message.epoch.leader == sender else []
        sends = self._catch_up(sender, message)
        if isinstance(message, Report):
            return sends + (self._on_leave if leaves else self._on_report)(sender, message)
        if message.epoch != self.epoch:
            return sends
        self.told = None if sender == self.leader else self.told  # an earlier report came too early for it
        return sends + self._freeze()

    # ---- votes ------------------------------------------------------------------------------------------------

    def _on_vote(self, sender: int, vote: Vote) -> Sends:
        if vote.epoch > self.epoch.key:
            self.early.append((sender, vote))  # of an epoch whose decision is still on its way
        elif vote.epoch == self.epoch.key and sender in self.epoch.members and self.phase != FROZEN:
            self.votes.setdefault(vote.step, {})[sender] = vote.content
            self._commit_if_all_voted()
        return []

    def _commit_if_all_voted(self) -> None:
        votes = self.votes.get(self.step, {})
        if self.phase == VOTED and len(votes) == len(self.epoch.members):
            self.committed, self.joined, self.phase = dict(votes), (), WORKING
            self.votes.pop(self.step, None)
            self.step += 1

    def _on_report(self, sender: int, report: Report) -> Sends:
        if self.phase == JOINING:
            return []
        if sender not in self.epoch.members:
            return [(sender, Outside(self.epoch))] if report.epoch.key < self.epoch.key else []
        if report.epoch.key < self.epoch.key and self.epoch.leader not in report.lost:
            return []  # this epoch's decision is on its way to the sender, who will report anew if it must
        self.reports[sender] = report
        return self._freeze()

    def _on_leave(self, sender: int, report: Report) -> Sends:
        self.left.add(sender)
        self.reports[sender] = report
        return self.lose(sender, dead=True)

    # ---- who comes in -----------------------------------------------------------------------------------------

    def _tell_met(self, newcomer: int) -> Sends:
        leader = self.leader
        return [] if leader == self.me else [(leader, Met(newcomer, self.newcomers[newcomer]))]

    def _on_outside(self, message: Outside) -> Sends:
        """The epoch that this worker has joined did not come about."""
        if self.blank and message.epoch.key > self.epoch.key:
            self.epoch, self.phase, self.blank, self.step = NO_EPOCH, JOINING, False, 0
            self.votes, self.reports, self.told, self.waiting, self.joined, self.admits = {}, {}, None, "", (), False
        return []

    def _catch_up(self, sender: int, message: Freeze | Report) -> Sends:
        """Somebody is a member of an epoch whose decision was lost with its leader on the way to this worker.

        Who has reported to a leader may only follow that one.
        """
        epoch = message.epoch
        if epoch.key <= self.epoch.key or self.me not in epoch.members:
            return []
        leads = self.phase == FROZEN and self.leader == self.me
        if self.phase == FROZEN and not leads and sender != self.leader:
            return []
        asked = [m for m in self.alive() if m != self.me] if leads else []
        joined = (self.me,) if self.phase == JOINING or self.blank else ()
        sends = self._install(Decision(epoch, message.step, message.votes, joined))
        return [(m, Freeze(epoch, self.step, self.committed)) for m in asked if m in epoch.members] + sends

    # ---- the next epoch ---------------------------------------------------------------------------------------

    def _freeze(self) -> Sends:
        """Commits nothing more, and reports to whoever decides."""
        if self.phase == JOINING:
            return []
        first = self.phase != FROZEN
        self.phase = FROZEN
        lost = frozenset(self.lost & set(self.epoch.members))
        report = Report(self.epoch, self.step, lost, self.committed, self.blank)
        leader = self.leader
        if leader != self.me:
            told, self.told = self.told, (leader, report.lost)
            return [] if told == self.told else [(leader, report)]
        self.reports[self.me] = report
        asked = self.alive() if first or self.told is None or self.told[0] != self.me else []
        self.told = self.me, report.lost
        freeze = Freeze(self.epoch, self.step, self.committed)
        return [(m, freeze) for m in asked if m != self.me] + self._decide()

    def _decide(self) -> Sends:
        """The leader decides as soon as all that it has not lost have reported, and they are enough."""
        alive = self.alive()
        if missing := [m for m in alive if m not in self.reports]:
            self.waiting = f"no report from worker {missing} yet"
            return []
        kept = without_broken_links(alive, self.reports)
        newest = max((self.reports[m].epoch for m in kept), key=lambda e: e.key)
        self.waiting = why_not(kept, self.reports, newest, self.dead, self.left, self.min_workers)
        if self.waiting:
            return []
        admitted = {newcomer: self.newcomers[newcomer] for newcomer in self.admissible()} if self.admits else {}
        decision = decided(self.me, kept, self.reports, newest, self.left, admitted)
        return [(m, decision) for m in decision.epoch.members if m != self.me] + self._install(decision)

    def _install(self, decision: Decision) -> Sends:
        epoch = decision.epoch
        if epoch.key <= self.epoch.key or self.me not in epoch.members:
            return []
        if self.me in decision.joined:
            self.blank = True
        elif not self.blank:
            assert self.step <= decision.step <= self.step + 1, "a step was committed without this one"
        if decision.step > self.step or self.blank:
            self.committed, self.step = decision.votes, decision.step
        self.lost |= set(self.epoch.members) - set(epoch.members)
        self._let_in(epoch)
        self.epoch, self.phase, self.joined = epoch, WORKING, decision.joined
        self.votes, self.reports, self.told, self.waiting, self.admits = {}, {}, None, "", False
        early, self.early = self.early, []
        sends: Sends = []
        for sender, vote in (e for e in early if e[1].epoch >= epoch.key):
            sends += self._on_vote(sender, vote)
        if self.lost & set(epoch.members):
            return sends + self._freeze()
        return sends + [send for newcomer in self.newcomers for send in self._tell_met(newcomer)]

    def _let_in(self, epoch: Epoch) -> None:
        """Newcomers become members; one in the place of a member that is meant waits for the next epoch."""
        lives = dict(epoch.lives)
        for member in set(epoch.members) & set(self.newcomers):
            if self.newcomers[member] == lives.get(member):
                self.newcomers.pop(member)
                for those in (self.lost, self.dead, self.left):
                    those.discard(member)
            else:
                self.lost.add(member)
