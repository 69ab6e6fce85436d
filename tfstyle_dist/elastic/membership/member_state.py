"""What one worker knows of the members of its job, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tfstyle_dist.elastic.membership.protocol_messages import NO_EPOCH, Epoch, Report, Vote

JOINING, WORKING, VOTED, FROZEN = "joining", "working", "voted", "frozen"


@dataclass
class MemberState:
    """The state of one worker in the protocol.

    Attributes:
        me: this worker's number.
        epoch: the membership that it knows; ``NO_EPOCH``: it wants to join.
        min_workers: fewer members do not go on.
        step: how many steps it has committed.
        phase: ``JOINING``, ``WORKING``, ``VOTED`` or ``FROZEN``.
        blank: whether it has joined and has not got the state yet.
        lost: those it has no connection to any more.
        dead: those of them whose process is known to be gone.
        left: those of them that have come to their end.
        votes: those that came, by step and member.
        committed: the votes of the last committed step.
        reports: those that came since this worker froze.
        early: votes of epochs whose decision has not come yet.
        newcomers: processes that want to join and have a connection to this one: their lives by number.
        met: who else has a connection to them, by number and life.
        joined: those that became members with this epoch and need the state.
        told: who was reported to, and which losses.
        waiting: what keeps a frozen leader from deciding, for messages.
        admits: whether this leader lets workers in: a step begins that can give them the state.
    """

    me: int
    epoch: Epoch = NO_EPOCH
    min_workers: int = 1
    step: int = 0
    phase: str = WORKING
    blank: bool = False
    lost: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    votes: dict[int, dict[int, Any]] = field(default_factory=dict)
    committed: dict[int, Any] | None = None
    reports: dict[int, Report] = field(default_factory=dict)
    early: list[tuple[int, Vote]] = field(default_factory=list)
    newcomers: dict[int, str] = field(default_factory=dict)
    met: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    joined: tuple[int, ...] = ()
    told: tuple[int, frozenset[int]] | None = None
    waiting: str = ""
    admits: bool = False

    @property
    def leader(self) -> int:
        """Who decides the next epoch, as far as this worker knows."""
        return min(self.alive())

    @property
    def has_newcomer(self) -> bool:
        """Whether this worker is the leader, has the state, and may let somebody in."""
        leads = self.phase in (WORKING, VOTED) and not self.blank and self.leader == self.me
        return leads and bool(self.newcomers) and bool(self.admissible())

    def admissible(self) -> list[int]:
        """The first newcomer that all other members have met.

        One at a time, so that newcomers have met each other too.
        """
        others = {m for m in self.alive() if m != self.me}
        free = [g for g in sorted(self.newcomers) if g not in self.epoch.members]
        return [g for g in free if others <= self.met.get((g, self.newcomers[g]), set())][:1]

    def alive(self) -> list[int]:
        """The members that this worker has not lost."""
        return [m for m in self.epoch.members if m not in self.lost]
