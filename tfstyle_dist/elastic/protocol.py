"""Who is a member, and which step is committed: the rules alone, without sockets, threads or time.

A step happens on all members or on none. Each member votes when it has done its part of a step; who has the votes of
all members commits the step. When a member is lost, the others freeze (they commit nothing any more), and each reports
to the lowest member that it has not lost what it has committed. That one decides: the next epoch's members are those
who reported, and a step that one of them has committed is committed by all of them, for then all had voted; else all do
it again. Who decides may be lost too: then the survivors report to the next one.

A loss is final. A member that loses another one closes the connection, so the other loses it too. A group goes on if it
has more than half of the last members, or if all others are known to be dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKING, VOTED, FROZEN = "working", "voted", "frozen"


@dataclass(frozen=True)
class Epoch:
    """One membership.

    Attributes:
        number: larger than that of every epoch before.
        leader: who decided it; two leaders may draw one number, but nobody follows both.
        members: the workers, in order.
    """

    number: int
    leader: int
    members: tuple[int, ...]

    @property
    def key(self) -> tuple[int, int]:
        """What messages name the epoch by."""
        return self.number, self.leader


@dataclass(frozen=True)
class Vote:
    """The sender has done its part of a step; ``content`` is what the others need of it."""

    epoch: tuple[int, int]
    step: int
    content: Any = None


@dataclass(frozen=True)
class Freeze:
    """Somebody is lost or wants to join: report."""

    epoch: tuple[int, int]


@dataclass(frozen=True)
class Report:
    """What the sender has committed; after it the sender commits nothing in this epoch.

    Attributes:
        epoch: the sender's.
        step: how many steps it has committed.
        lost: the members that it has lost.
        votes: those of its last committed step.
    """

    epoch: Epoch
    step: int
    lost: frozenset[int]
    votes: Any = None


@dataclass(frozen=True)
class Decision:
    """The next epoch.

    Attributes:
        epoch: the next one.
        step: how many steps are committed.
        votes: those of the last committed step; ``None`` when all members have them.
        joined: members that were not there before.
    """

    epoch: Epoch
    step: int
    votes: Any = None
    joined: tuple[int, ...] = ()


Message = Vote | Freeze | Report | Decision
Sends = list[tuple[int, Message]]


@dataclass
class Member:
    """One worker's part of the protocol. Every method returns the messages to send.

    Attributes:
        me: this worker's number.
        epoch: the membership that it knows.
        step: how many steps it has committed.
        phase: ``WORKING``, ``VOTED`` or ``FROZEN``.
        lost: those it has no connection to any more.
        dead: those of them whose process is known to be gone.
        votes: those that came, by step and member.
        committed: the votes of the last committed step.
        reports: those that came since this worker froze.
        early: votes of epochs whose decision has not come yet.
        joiners: those that want to become members.
        joined: those that became members with this epoch.
        told: who was reported to, and which losses.
        waiting: what keeps a frozen leader from deciding, for messages.
    """

    me: int
    epoch: Epoch
    min_workers: int = 1
    step: int = 0
    phase: str = WORKING
    lost: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    votes: dict[int, dict[int, Any]] = field(default_factory=dict)
    committed: dict[int, Any] | None = None
    reports: dict[int, Report] = field(default_factory=dict)
    early: list[tuple[int, Vote]] = field(default_factory=list)
    joiners: set[int] = field(default_factory=set)
    joined: tuple[int, ...] = ()
    told: tuple[int, frozenset[int]] | None = None
    waiting: str = ""

    # ---- what this worker does --------------------------------------------------------------------------------

    def vote(self, content: Any = None) -> Sends:
        """This worker has done its part of the step."""
        assert self.phase == WORKING, self.phase
        self.phase = VOTED
        message = Vote(self.epoch.key, self.step, content)
        self.votes.setdefault(self.step, {})[self.me] = content
        others = [m for m in self.epoch.members if m != self.me]
        self._commit_if_all_voted()
        return [(m, message) for m in others]

    def lose(self, other: int, dead: bool = False) -> Sends:
        """The connection to another worker is gone.

        Args:
            other: the worker.
            dead: whether its process is known to be gone.
        """
        self.joiners.discard(other)
        if dead:
            self.dead.add(other)
        self.lost.add(other)
        self.reports.pop(other, None)
        if other not in self.epoch.members and self.phase != FROZEN:
            return []
        return self._freeze()

    def admit(self, other: int) -> Sends:
        """A worker that is no member wants to become one; only the leader does something about it."""
        if other in self.epoch.members:
            return []
        self.lost.discard(other)
        self.dead.discard(other)
        self.joiners.add(other)
        return self._freeze() if self._leader() == self.me else []

    def receive(self, sender: int, message: Message) -> Sends:
        """A message came; what an old epoch or a lost worker sends is refused."""
        if sender in self.lost:
            return []
        if isinstance(message, Vote):
            return self._on_vote(sender, message)
        if isinstance(message, Freeze):
            return self._freeze() if message.epoch == self.epoch.key else []
        if isinstance(message, Report):
            return self._on_report(sender, message)
        return self._install(message) if message.epoch.leader == sender else []

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
            self._commit(votes)

    def _commit(self, votes: Mapping[int, Any]) -> None:
        self.committed = dict(votes)
        self.votes.pop(self.step, None)
        self.step += 1
        self.phase = WORKING

    def _on_report(self, sender: int, report: Report) -> Sends:
        if sender not in self.epoch.members:
            return []
        if report.epoch.key < self.epoch.key and self.epoch.leader not in report.lost:
            return []  # this epoch's decision is on its way to the sender, who will report anew if it must
        self.reports[sender] = report
        return self._freeze()

    # ---- the next epoch ---------------------------------------------------------------------------------------

    def _leader(self) -> int:
        return min(m for m in self.epoch.members if m not in self.lost)

    def _freeze(self) -> Sends:
        """Commits nothing more, and reports to whoever decides."""
        first = self.phase != FROZEN
        self.phase = FROZEN
        report = Report(self.epoch, self.step, frozenset(self.lost & set(self.epoch.members)), self.committed)
        leader = self._leader()
        if leader != self.me:
            told, self.told = self.told, (leader, report.lost)
            return [] if told == self.told else [(leader, report)]
        self.reports[self.me] = report
        asked = self._alive() if first or self.told is None or self.told[0] != self.me else []
        self.told = self.me, report.lost
        return [(m, Freeze(self.epoch.key)) for m in asked if m != self.me] + self._decide()

    def _alive(self) -> list[int]:
        return [m for m in self.epoch.members if m not in self.lost]

    def _decide(self) -> Sends:
        """The leader decides as soon as all that it has not lost have reported, and they are enough."""
        alive = self._alive()
        if missing := [m for m in alive if m not in self.reports]:
            self.waiting = f"no report from worker {missing} yet"
            return []
        kept = _without_broken_links(alive, self.reports)
        reports = [self.reports[m] for m in kept]
        newest = max((r.epoch for r in reports), key=lambda e: e.key)
        if self._too_few(kept, newest):
            return []
        step = max(r.step for r in reports)
        votes = next((r.votes for r in reports if r.step == step), None)
        told = votes if any(r.step < step for r in reports) else None
        joined = tuple(sorted(j for j in self.joiners if j not in self.lost))
        members = tuple(sorted({*kept, *joined}))
        decision = Decision(Epoch(newest.number + 1, self.me, members), step, told, joined)
        return [(m, decision) for m in members if m != self.me] + self._install(decision)

    def _too_few(self, kept: list[int], newest: Epoch) -> bool:
        gone = [m for m in newest.members if m not in kept]
        unsure = [m for m in gone if m not in self.dead]
        self.waiting = ""
        if 2 * len(kept) <= len(newest.members) and unsure:
            self.waiting = (
                f"{len(kept)} of the last {len(newest.members)} workers are no majority, and worker {unsure} may be "
                "alive and going on without this one"
            )
        elif len(kept) < self.min_workers:
            self.waiting = f"{len(kept)} worker(s) are left, fewer than min_workers={self.min_workers}"
        return bool(self.waiting)

    def _install(self, decision: Decision) -> Sends:
        epoch = decision.epoch
        if epoch.key <= self.epoch.key or self.me not in epoch.members:
            return []
        if self.me not in decision.joined:
            assert self.step <= decision.step <= self.step + 1, "a step was committed without this one"
        if decision.step > self.step:
            self.committed = decision.votes
            self.step = decision.step
        gone = set(self.epoch.members) - set(epoch.members)
        self.lost |= gone
        self.epoch, self.phase, self.joined = epoch, WORKING, decision.joined
        self.votes, self.reports, self.told, self.waiting = {}, {}, None, ""
        self.joiners -= set(epoch.members)
        early, self.early = self.early, []
        sends: Sends = []
        for sender, vote in early:
            if vote.epoch >= epoch.key:
                sends += self._on_vote(sender, vote)
        if self.lost & set(epoch.members):
            sends += self._freeze()
        return sends


def _without_broken_links(alive: list[int], reports: Mapping[int, Report]) -> list[int]:
    """Of two that have lost each other the later one goes."""
    kept: list[int] = []
    for member in alive:
        if not any(member in reports[k].lost or k in reports[member].lost for k in kept):
            kept.append(member)
    return kept
