"""The commit protocol, in every order of events: three workers, kills at any point, and newcomers in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tfstyle_dist.elastic.messages import Epoch, Sends
from tfstyle_dist.elastic.protocol import FROZEN, JOINING, WORKING, Member

_END = "end of the connection"


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
    """

    def __init__(self, workers: int, steps: int, kills: int, restarts: int = 0) -> None:
        epoch = Epoch(1, 0, tuple(range(workers)))
        self.members: dict[int, Member] = {me: Member(me, epoch) for me in range(workers)}
        self.channels: dict[tuple[int, int], list[Any]] = {}
        self.links = {(a, b) for a in range(workers) for b in range(workers) if a != b}
        self.given: dict[int, tuple[int, int]] = {}  # the epoch that a member has sent its state for
        self.got: dict[int, tuple[tuple[int, int], frozenset[int]]] = {}
        self.lives: dict[int, str] = {}
        self.joined = 0
        self.workers, self.steps, self.kills, self.restarts = workers, steps, kills, restarts

    def copy(self) -> World:
        world = World.__new__(World)
        world.__dict__.update(self.__dict__)
        world.members = {me: _copied(member) for me, member in self.members.items()}
        world.channels = {pair: list(queue) for pair, queue in self.channels.items() if queue}
        world.links, world.given, world.got = set(self.links), dict(self.given), dict(self.got)
        world.lives = dict(self.lives)
        return world

    def key(self) -> str:
        parts: list[object] = [
            self.kills,
            self.restarts,
            sorted(self.links),
            sorted(self.given.items()),
            sorted(self.lives.items()),
        ]
        parts.append(sorted((me, key, sorted(by)) for me, (key, by) in self.got.items()))
        for me, m in sorted(self.members.items()):
            reports = sorted(m.reports.items())
            votes = sorted((step, tuple(sorted(of))) for step, of in m.votes.items())
            sets = tuple(sorted(m.lost)), tuple(sorted(m.dead)), m.told and (m.told[0], tuple(sorted(m.told[1])))
            met = sorted((guest, tuple(sorted(by))) for guest, by in m.met.items())
            parts.append((me, m.epoch, m.step, m.phase, sets, votes, _flat(reports), _flat(m.early)))
            parts.append((m.blank, m.joined, m.committed is None, sorted(m.guests.items()), met))
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

    def without_kills(self) -> Iterator[World]:
        for me, member in self.members.items():
            if member.phase == WORKING and not member.blank and member.step < self.steps:
                yield self._voted(me)
                after = self.copy()
                sends = after.members[me].admit()
                if after.members[me].phase != WORKING or sends:
                    after.send(me, sends)
                    yield after
        for sender, to in [pair for pair, queue in self.channels.items() if queue]:
            # A process has a connection only after the end of the one to the process before was seen at both ends.
            if not (isinstance(self.channels[sender, to][0], Up) and _END in self.channels.get((to, sender), [])):
                yield self._received(sender, to)

    def _voted(self, me: int) -> World:
        after = self.copy()
        member = after.members[me]
        if member.joined and me not in member.joined and after.given.get(me) != member.epoch.key:
            after.given[me] = member.epoch.key
            for newcomer in member.joined:
                after.put(me, newcomer, State(member.epoch.key))
        after.send(me, member.vote(f"worker {me}, step {member.step}"))
        return after

    def _received(self, sender: int, to: int) -> World:
        after = self.copy()
        message, receiver = after.channels[sender, to].pop(0), after.members[to]
        if message == _END:
            after.links.discard((to, sender))
            after.send(to, receiver.lose(sender, dead=True))
        elif isinstance(message, Up):
            if self.lives.get(sender) == message.life:  # else it has been killed already
                after.links |= {(to, sender), (sender, to)}
                after.members[sender].connect(to)
                if receiver.phase == JOINING:
                    after.send(sender, after.members[sender].reach(to, after.lives[to]))
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
            member.fill()
            self.joined += 1

    def _killed(self, me: int) -> Iterator[World]:
        """A killed worker: of what it had sent to each other one any first part arrives, then the connection ends."""
        others = [m for m in self.members if m != me]
        dead = self.copy()
        dead.kills -= 1
        del dead.members[me]
        for about in (dead.given, dead.got, dead.lives):
            about.pop(me, None)  # type: ignore[attr-defined]
        dead.channels = {pair: queue for pair, queue in dead.channels.items() if pair[1] != me}
        dead.links = {pair for pair in dead.links if pair[0] != me}
        worlds = [dead]
        for other in others:
            queue = dead.channels.get((me, other), [])
            worlds = [w.cut(me, other, length) for w in worlds for length in range(len(queue) + 1)]
        for world in worlds:
            world.links = {pair for pair in world.links if me not in pair}
        yield from worlds

    def _started(self, me: int) -> World:
        after = self.copy()
        after.restarts -= 1
        after.members[me] = Member(me, phase=JOINING)
        after.lives[me] = f"{me}.{after.restarts}"
        for other in after.members:
            if other != me:
                after.channels.setdefault((me, other), []).append(Up(after.lives[me]))
        return after

    def cut(self, sender: int, to: int, length: int) -> World:
        after = self.copy()
        queue = after.channels.get((sender, to), [])
        after.channels[sender, to] = [*queue[:length], _END]
        return after


def _copied(value: Any) -> Any:
    if isinstance(value, Member):
        return Member(**{f.name: _copied(getattr(value, f.name)) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return type(value)(value) if isinstance(value, set | list) else value


def _flat(value: object) -> str:
    return repr(value).replace("frozenset()", "{}")


def _check(world: World) -> None:
    alive = [m for m in world.members.values() if m.phase not in (FROZEN, JOINING)]
    for member in alive:
        same = [m for m in alive if m.epoch.key == member.epoch.key]
        assert all(m.epoch == member.epoch for m in same), "one epoch with two memberships"
        assert max(m.step for m in same) - min(m.step for m in same) <= 1, "a member is two steps ahead"
    working = sorted((m for m in alive if m.step < world.steps), key=lambda m: m.epoch.key)
    for one, other in pairwise(working):
        if one.epoch.key == other.epoch.key:
            continue
        assert other.step >= one.step or one.me not in other.epoch.members, "a committed step is done again"


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
            key = after.key()
            if key not in seen:
                seen.add(key)
                open_worlds.append(after)
    return len(seen), ends, joined


def _check_end(world: World) -> None:
    """All that can go on have done all steps; a newcomer waits only where nothing is left to be done."""
    members = [m for m in world.members.values() if m.phase != JOINING]
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
