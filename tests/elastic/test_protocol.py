"""The commit protocol, in every order of events: three workers, kills at any point, and newcomers in their place.

Also workers that come to their end while the others do the last step, and links that break while both ends live.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest

from tfstyle_dist.elastic.membership.member_state import FROZEN, JOINING, WORKING
from tfstyle_dist.elastic.membership.protocol import Member
from tfstyle_dist.elastic.membership.protocol_messages import Epoch, Sends

_END = "end of the connection"
_BROKEN = "end of the connection, and the other process may live"
_DROPPED = "end of the connection, because the other process goes on without this one"


@dataclasses.dataclass(frozen=True)
class Up:
    """A new process has a connection, and wants to join."""

    life: str


@dataclasses.dataclass(frozen=True)
class State:
    """What a member that has the state sends to those that have joined."""

    epoch: tuple[int, int]


class World:
    """Members, and what is on its way between each two of them, in order.

    Args:
        workers: how many.
        steps: how many each wants to commit.
        kills: how many may be killed.
        restarts: how many of those that were killed may be started again.
        leaves: how many may leave when they have committed all steps; the others must go on all the same.
        breaks: how many links may break.
    """

    def __init__(
        self, workers: int, steps: int, kills: int, restarts: int = 0, leaves: int = 0, breaks: int = 0
    ) -> None:
        epoch = Epoch(1, 0, tuple(range(workers)))
        least = workers - kills - breaks if leaves else 1
        self.members: dict[int, Member] = {me: Member(me, epoch, least) for me in range(workers)}
        self.channels: dict[tuple[int, int], list[Any]] = {}
        self.links = {(a, b) for a in range(workers) for b in range(workers) if a != b}
        self.given: dict[int, tuple[int, int]] = {}  # the epoch that a member has sent its state for
        self.got: dict[int, tuple[tuple[int, int], frozenset[int]]] = {}
        self.lives: dict[int, str] = {}
        self.parts: dict[int, str] = {}  # of ``key``, by member
        self.joined = 0
        self.workers, self.steps, self.kills, self.restarts = workers, steps, kills, restarts
        self.leaves, self.breaks, self.broken = leaves, breaks, 0
        self.reasons = kills + restarts + leaves + breaks  # for another membership
        self.dropped: set[tuple[int, int]] = set()  # who was dropped, and by whom
        self.done: dict[tuple[int, int], tuple[Any, ...]] = {}  # by step and member: the votes that it committed

    def copy(self) -> World:
        world = World.__new__(World)
        world.__dict__.update(self.__dict__)
        world.members, world.parts = dict(self.members), dict(self.parts)  # ``own`` copies what an event changes
        world.channels = {pair: list(queue) for pair, queue in self.channels.items() if queue}
        world.links, world.given, world.got = set(self.links), dict(self.given), dict(self.got)
        world.lives, world.dropped, world.done = dict(self.lives), set(self.dropped), dict(self.done)
        return world

    def own(self, me: int) -> Member:
        """A member of this world alone, which may change."""
        self.parts.pop(me, None)
        member = self.members[me] = _copied(self.members[me])
        return member

    def key(self) -> str:
        parts: list[object] = [
            self.kills,
            self.restarts,
            self.leaves,
            self.breaks,
            sorted(self.dropped),
            sorted(self.done.items()),
            sorted(self.links),
            sorted(self.given.items()),
            sorted(self.lives.items()),
        ]
        parts.append(sorted((me, key, sorted(by)) for me, (key, by) in self.got.items()))
        for me, member in sorted(self.members.items()):
            if me not in self.parts:
                self.parts[me] = _part(member)
            parts.append(self.parts[me])
        parts.append(sorted((pair, _flat(queue)) for pair, queue in self.channels.items() if queue))
        return repr(parts)

    def send(self, sender: int, sends: Sends) -> None:
        for to, message in sends:
            self.put(sender, to, message)

    def put(self, sender: int, to: int, message: Any) -> None:
        if (sender, to) in self.links:
            self.channels.setdefault((sender, to), []).append(message)

    def following(self) -> Iterator[World]:
        """Every world that one event makes of this one."""
        yield from self.without_kills()
        for me in self.members if self.kills else ():
            yield from self._killed(me)
        for me in set(range(self.workers)) - set(self.members) if self.restarts else ():
            yield self._started(me)
        for a, b in combinations(sorted(self.members), 2) if self.breaks else ():
            if (a, b) in self.links:
                yield from self._parted(a, b)

    def without_kills(self) -> Iterator[World]:
        for me, member in self.members.items():
            if member.phase == WORKING and not member.blank and member.step < self.steps:
                yield self._voted(me)
                after = self.copy()
                sends = after.own(me).admit()
                if after.members[me].phase != WORKING or sends:
                    after.send(me, sends)
                    yield after
            if self.leaves and not member.blank and member.phase != JOINING and member.step == self.steps:
                yield self._left(me)
        for sender, to in [pair for pair, queue in self.channels.items() if queue]:
            # A process has a connection only after the end of the one to the process before was seen at both ends.
            if not (isinstance(self.channels[sender, to][0], Up) and _END in self.channels.get((to, sender), [])):
                yield self._received(sender, to)

    def _voted(self, me: int) -> World:
        after = self.copy()
        member = after.own(me)
        if member.joined and me not in member.joined and after.given.get(me) != member.epoch.key:
            after.given[me] = member.epoch.key
            for newcomer in member.joined:
                after.put(me, newcomer, State(member.epoch.key))
        after.send(me, member.vote(f"worker {me}, step {member.step}, epoch {member.epoch.key}"))
        return after

    def _received(self, sender: int, to: int) -> World:
        after = self.copy()
        message, receiver = after.channels[sender, to].pop(0), after.own(to)
        if message in (_END, _BROKEN, _DROPPED):
            after.links.discard((to, sender))
            after.dropped |= {(to, sender)} if message == _DROPPED else set()
            after.send(to, receiver.lose(sender, dead=message == _END and (to, sender) not in after.dropped))
        elif isinstance(message, Up):
            if self.lives.get(sender) == message.life:  # else it has been killed already
                after.links |= {(to, sender), (sender, to)}
                newcomer = after.own(sender)
                newcomer.connect(to)
                if receiver.phase == JOINING:
                    after.send(sender, newcomer.reach(to, after.lives[to]))
            receiver.connect(sender)
            after.send(to, receiver.reach(sender, message.life))
        elif isinstance(message, State):
            after.take_state(sender, to, message.epoch)
        else:
            after.send(to, receiver.receive(sender, message))
        return after

    def take_state(self, sender: int, to: int, epoch: tuple[int, int]) -> None:
        known, by = self.got.get(to, (epoch, frozenset()))
        self.got[to] = (epoch, (by if known == epoch else frozenset()) | {sender})
        self.fill(to)

    def fill(self, me: int) -> None:
        member = self.members[me]
        epoch, by = self.got.get(me, ((0, 0), frozenset()))
        donors = set(member.epoch.members) - set(member.joined)
        if member.blank and member.phase == WORKING and epoch == member.epoch.key and donors <= by:
            self.own(me).fill()
            self.joined += 1

    def _killed(self, me: int) -> Iterator[World]:
        """A killed worker: of what it had sent to each other one any first part arrives, then the connection ends."""
        others = [m for m in self.members if m != me]
        dead = self._without(me)
        dead.kills -= 1
        # What only those know that are gone is done again.
        dead.done = {key: votes for key, votes in dead.done.items() if key[1] in dead.members}
        worlds = [dead]
        for other in others:
            queue = dead.channels.get((me, other), [])
            worlds = [w.cut(me, other, length) for w in worlds for length in range(len(queue) + 1)]
        for world in worlds:
            world.links = {pair for pair in world.links if me not in pair}
        yield from worlds

    def _without(self, me: int) -> World:
        after = self.copy()
        del after.members[me]
        for about in (after.given, after.got, after.lives, after.parts):
            about.pop(me, None)
        after.channels = {pair: queue for pair, queue in after.channels.items() if pair[1] != me}
        after.links = {pair for pair in after.links if pair[0] != me}
        return after

    def _left(self, me: int) -> World:
        """A worker that has done all steps: all that it has sent arrives."""
        after = self.copy()
        after.leaves -= 1
        after.send(me, after.own(me).leave())
        for other in after.members:
            after.put(me, other, _END)
        after = after._without(me)
        after.links = {pair for pair in after.links if me not in pair}
        return after

    def _parted(self, a: int, b: int) -> Iterator[World]:
        """A link that breaks: of what was on its way any first part arrives, and both processes live on."""
        after = self.copy()
        after.breaks, after.broken = after.breaks - 1, after.broken + 1
        after.links -= {(a, b), (b, a)}
        for there in range(len(after.channels.get((a, b), [])) + 1):
            for back in range(len(after.channels.get((b, a), [])) + 1):
                yield after.cut(a, b, there, _BROKEN).cut(b, a, back, _BROKEN)

    def settle(self) -> None:
        """Notes what is committed; who goes on drops those that it has lost, as ``Attendance`` does."""
        for me, member in self.members.items():
            if member.committed is not None:
                self.done[member.step - 1, me] = tuple(sorted(member.committed.items()))
            for other in member.lost & set(self.members) if self.broken and member.phase == WORKING else ():
                if (me, other) in self.links:
                    self.put(me, other, _DROPPED)
                    self.links -= {(me, other), (other, me)}
                    self.channels.pop((other, me), None)

    def _started(self, me: int) -> World:
        after = self.copy()
        after.restarts -= 1
        after.members[me] = Member(me, phase=JOINING)
        after.lives[me] = f"{me}.{after.restarts}"
        for other in after.members:
            if other != me:
                after.channels.setdefault((me, other), []).append(Up(after.lives[me]))
        return after

    def cut(self, sender: int, to: int, length: int, end: str = _END) -> World:
        after = self.copy()
        queue = after.channels.get((sender, to), [])
        after.channels[sender, to] = [*queue[:length], end]
        return after


def _copied(value: Any) -> Any:
    if type(value) is Member:
        return Member(**{name: _copied(held) for name, held in vars(value).items()})
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    return value.copy() if type(value) in (set, list) else value


def _part(m: Member) -> str:
    reports = sorted(m.reports.items())
    votes = sorted((step, tuple(sorted(of))) for step, of in m.votes.items())
    sets = (
        *(tuple(sorted(those)) for those in (m.lost, m.dead, m.left)),
        m.told and (m.told[0], tuple(sorted(m.told[1]))),
    )
    met = sorted((newcomer, tuple(sorted(by))) for newcomer, by in m.met.items())
    first = (m.me, m.epoch, m.step, m.phase, sets, votes, _flat(reports), _flat(m.early))
    return repr((first, m.blank, m.joined, m.committed is None, sorted(m.newcomers.items()), met))


def _flat(value: object) -> str:
    return repr(value).replace("frozenset()", "{}")


def _check(world: World) -> None:
    alive = [m for m in world.members.values() if m.phase not in (FROZEN, JOINING)]
    for member in alive:
        came = world.reasons - world.kills - world.restarts - world.leaves - world.breaks
        assert member.epoch.number <= 1 + came, "the members change without a reason"
        same = [m for m in alive if m.epoch.key == member.epoch.key]
        assert all(m.epoch == member.epoch for m in same), "one epoch with two memberships"
        assert max(m.step for m in same) - min(m.step for m in same) <= 1, "a member is two steps ahead"
    working = sorted((m for m in alive if m.step < world.steps), key=lambda m: m.epoch.key)
    for one, other in pairwise(working):
        if one.epoch.key == other.epoch.key:
            continue
        assert other.step >= one.step or one.me not in other.epoch.members, "a committed step is done again"
    for one, other in combinations(alive, 2):
        assert set(one.epoch.members) & set(other.epoch.members), "two groups go on, each without the other"
    for ((step, one_), votes), ((same_step, other_), others) in combinations(sorted(world.done.items()), 2):
        if step != same_step or votes == others:
            continue
        # Where links break, one that is shut out may have committed a last step that the others do again.
        assert world.broken, "a step is done again that one of the others has committed"
        assert set(dict(votes)) & set(dict(others)), "a step is committed by two groups"
        assert not {(step + 1, one_), (step + 1, other_)} <= set(world.done), "two have gone on with other steps"


def _explore(first: World) -> tuple[int, int, int]:
    """Visits every world; returns how many, how many of them are ends, and in how many ends newcomers are members."""
    seen, open_worlds, ends, joined = {first.key()}, [first], 0, 0
    while open_worlds:
        world = open_worlds.pop()
        for me in world.members:
            world.fill(me)
        _check(world)
        if not any(True for _ in world.without_kills()):
            ends += 1
            _check_end(world)
            joined += bool(world.joined and any(m.step == world.steps for m in world.members.values()))
        for after in world.following():
            after.settle()
            key = after.key()
            if key not in seen:
                seen.add(key)
                open_worlds.append(after)
    return len(seen), ends, joined


def _check_end(world: World) -> None:
    """All that can go on have done all steps; a newcomer waits only where nothing is left to be done."""
    members = [m for m in world.members.values() if m.phase != JOINING]
    if world.broken:  # the later of two that have lost each other is shut out, and nobody goes on without a majority
        members = [m for m in members if m.phase != FROZEN]
        assert members or 2 * (len(world.members) - world.broken) <= world.workers, "nobody goes on"
    if all(m.blank for m in members):
        return  # all that had the state were killed
    assert all(m.step == world.steps and m.phase == WORKING for m in members), [vars(m) for m in members]
    assert all(set(m.epoch.members) == {m.me for m in members} for m in members), [vars(m) for m in members]
    assert len({m.epoch.key for m in members}) <= 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "steps", "kills"), [(2, 2, 1), (3, 1, 1), (3, 1, 2), (3, 2, 1)])
def test_a_step_is_committed_by_all_or_by_none(workers: int, steps: int, kills: int) -> None:
    worlds, ends, _ = _explore(World(workers, steps, kills))
    print(f"{workers} workers, {steps} steps, {kills} kills: {worlds} worlds, {ends} ends")
    assert worlds > 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "steps", "kills", "restarts"), [(2, 2, 1, 1), (2, 2, 2, 1), (2, 2, 2, 2), (3, 1, 1, 1)]
)
def test_newcomers_come_in_at_any_point(workers: int, steps: int, kills: int, restarts: int) -> None:
    worlds, ends, joined = _explore(World(workers, steps, kills, restarts))
    print(f"{workers} workers, {steps} steps, {kills} kills, {restarts} restarts: {worlds} worlds, {ends} ends")
    assert joined


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "steps", "kills", "leaves"), [(2, 2, 0, 2), (3, 1, 0, 3), (3, 2, 0, 3), (3, 1, 1, 1)]
)
def test_who_comes_to_its_end_is_not_missed(workers: int, steps: int, kills: int, leaves: int) -> None:
    """Nobody does a step again that one which has left has committed, and fewer than ``min_workers`` go on."""
    worlds, ends, _ = _explore(World(workers, steps, kills, leaves=leaves))
    print(f"{workers} workers, {steps} steps, {kills} kills, {leaves} leave: {worlds} worlds, {ends} ends")
    assert worlds > 20


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "steps", "kills", "breaks"),
    [
        (2, 2, 0, 1),
        (2, 2, 1, 1),
        (3, 1, 0, 1),
        pytest.param(3, 2, 0, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_two_that_have_lost_each_other_do_not_both_go_on(workers: int, steps: int, kills: int, breaks: int) -> None:
    worlds, ends, _ = _explore(World(workers, steps, kills, breaks=breaks))
    print(f"{workers} workers, {steps} steps, {kills} kills, {breaks} breaks: {worlds} worlds, {ends} ends")
    assert worlds > 20
