"""The commit protocol, in every order of events: three workers, and kills at any point."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tfstyle_dist.elastic import protocol
from tfstyle_dist.elastic.protocol import FROZEN, WORKING, Epoch, Member, Message

_END = "end of the connection"


class World:
    """Members, and what is on its way between each two of them, in order.

    Args:
        workers: how many.
        steps: how many each wants to commit.
        kills: how many may be killed.
    """

    def __init__(self, workers: int, steps: int, kills: int) -> None:
        epoch = Epoch(1, 0, tuple(range(workers)))
        self.members: dict[int, Member] = {me: Member(me, epoch) for me in range(workers)}
        self.channels: dict[tuple[int, int], list[Message | str]] = {}
        self.steps, self.kills = steps, kills

    def copy(self) -> World:
        world = World.__new__(World)
        world.steps, world.kills = self.steps, self.kills
        world.members = {me: _copied(member) for me, member in self.members.items()}
        world.channels = {pair: list(queue) for pair, queue in self.channels.items() if queue}
        return world

    def key(self) -> str:
        parts: list[object] = [self.kills]
        for me, m in sorted(self.members.items()):
            reports = sorted(m.reports.items())
            votes = sorted((step, tuple(sorted(of))) for step, of in m.votes.items())
            sets = tuple(sorted(m.lost)), tuple(sorted(m.dead)), m.told and (m.told[0], tuple(sorted(m.told[1])))
            parts.append((me, m.epoch, m.step, m.phase, sets, votes, _flat(reports), _flat(m.early)))
        parts.append(sorted((pair, _flat(queue)) for pair, queue in self.channels.items() if queue))
        return repr(parts)

    def send(self, sender: int, sends: protocol.Sends) -> None:
        for to, message in sends:
            if to in self.members and to not in self.members[sender].lost:
                self.channels.setdefault((sender, to), []).append(message)

    def following(self) -> Iterator[World]:
        """Every world that one event makes of this one."""
        yield from self._without_kills()
        for me in self.members if self.kills else ():
            yield from self._killed(me)

    def _without_kills(self) -> Iterator[World]:
        for me, member in self.members.items():
            if member.phase == WORKING and member.step < self.steps:
                after = self.copy()
                after.send(me, after.members[me].vote(f"worker {me}, step {member.step}"))
                yield after
        for sender, to in [pair for pair, queue in self.channels.items() if queue]:
            after = self.copy()
            message, receiver = after.channels[sender, to].pop(0), after.members[to]
            if isinstance(message, str):
                after.send(to, receiver.lose(sender, dead=True))
            else:
                after.send(to, receiver.receive(sender, message))
            yield after

    def _killed(self, me: int) -> Iterator[World]:
        """A killed worker: of what it had sent to each other one any first part arrives, then the connection ends."""
        others = [m for m in self.members if m != me]
        dead = self.copy()
        dead.kills -= 1
        del dead.members[me]
        dead.channels = {pair: queue for pair, queue in dead.channels.items() if pair[1] != me}
        worlds = [dead]
        for other in others:
            queue = dead.channels.get((me, other), [])
            worlds = [w.cut(me, other, length) for w in worlds for length in range(len(queue) + 1)]
        yield from worlds

    def cut(self, sender: int, to: int, length: int) -> World:
        after = self.copy()
        after.channels[sender, to] = [*after.channels.get((sender, to), [])[:length], _END]
        return after


def _copied(member: Member) -> Member:
    own = {f.name: getattr(member, f.name) for f in dataclasses.fields(member)}
    own["votes"] = {step: dict(votes) for step, votes in member.votes.items()}
    return Member(
        **{n: type(v)(v) if isinstance(v, set | list) else dict(v) if n == "reports" else v for n, v in own.items()}
    )


def _flat(value: object) -> str:
    return repr(value).replace("frozenset()", "{}")


def _check(world: World) -> None:
    alive = [m for m in world.members.values() if m.phase != FROZEN]
    for member in alive:
        same = [m for m in alive if m.epoch.key == member.epoch.key]
        assert all(m.epoch == member.epoch for m in same), "one epoch with two memberships"
        assert max(m.step for m in same) - min(m.step for m in same) <= 1, "a member is two steps ahead"
    working = sorted((m for m in alive if m.step < world.steps), key=lambda m: m.epoch.key)
    for one, other in pairwise(working):
        if one.epoch.key == other.epoch.key:
            continue
        assert other.step >= one.step or one.me not in other.epoch.members, "a committed step is done again"


def _explore(first: World) -> tuple[int, int]:
    """Visits every world; returns how many, and how many of them are ends."""
    seen, open_worlds, ends = {first.key()}, [first], 0
    while open_worlds:
        world = open_worlds.pop()
        _check(world)
        if not any(True for _ in world._without_kills()):
            ends += 1
            members = world.members.values()
            assert all(m.step == world.steps and m.phase == WORKING for m in members), [vars(m) for m in members]
            assert all(set(m.epoch.members) == set(world.members) for m in members)
            assert len({m.epoch.key for m in members}) <= 1
        for after in world.following():
            key = after.key()
            if key not in seen:
                seen.add(key)
                open_worlds.append(after)
    return len(seen), ends


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "steps", "kills"), [(2, 2, 1), (3, 1, 1), (3, 1, 2), (3, 2, 1)])
def test_a_step_is_committed_by_all_or_by_none(workers: int, steps: int, kills: int) -> None:
    worlds, ends = _explore(World(workers, steps, kills))
    print(f"{workers} workers, {steps} steps, {kills} kills: {worlds} worlds, {ends} ends")
    assert worlds > 20
