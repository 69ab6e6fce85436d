"""What the workers of an elastic job tell each other about who is a member and which step is committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Epoch:
    """One membership.

    Attributes:
        number: larger than that of every epoch before.
        leader: who decided it; two leaders may draw one number, but nobody follows both.
        members: the workers, in order.
        lives: of members that came later: which process of that number is meant.
    """

    number: int
    leader: int
    members: tuple[int, ...]
    lives: tuple[tuple[int, str], ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """What messages name the epoch by."""
        return self.number, self.leader


NO_EPOCH = Epoch(0, -1, ())
"""That of a process that is no member."""


@dataclass(frozen=True)
class Vote:
    """The sender has done its part of a step; ``content`` is what the others need of it."""

    epoch: tuple[int, int]
    step: int
    content: Any = None


@dataclass(frozen=True)
class Freeze:
    """Somebody is lost or wants to join: report.

    Attributes:
        epoch: the sender's; who has missed its decision learns it from here.
        step: how many steps are committed in it.
        votes: those of the last committed step.
    """

    epoch: Epoch
    step: int
    votes: Any = None


@dataclass(frozen=True)
class Report:
    """What the sender has committed; after it the sender commits nothing in this epoch.

    Attributes:
        epoch: the sender's.
        step: how many steps it has committed.
        lost: the members that it has lost; itself among them if it has come to its end and leaves.
        votes: those of its last committed step.
        blank: whether it has joined and has not got the state yet.
    """

    epoch: Epoch
    step: int
    lost: frozenset[int]
    votes: Any = None
    blank: bool = False


@dataclass(frozen=True)
class Decision:
    """The next epoch.

    Attributes:
        epoch: the next one.
        step: how many steps are committed.
        votes: those of the last committed step; ``None`` when all members have them.
        joined: members that need the state from the others.
    """

    epoch: Epoch
    step: int
    votes: Any = None
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class Met:
    """To the leader: a process that wants to join has a connection to the sender.

    Attributes:
        newcomer: its number.
        life: tells this process from others that have had the number.
    """

    newcomer: int
    life: str


@dataclass(frozen=True)
class Outside:
    """The receiver joined an epoch that the sender has left behind without it: it may ask again."""

    epoch: Epoch


Message = Vote | Freeze | Report | Decision | Met | Outside
Sends = list[tuple[int, Message]]
