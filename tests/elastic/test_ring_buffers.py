"""What workers of one host send through shared memory, and that others do not."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from until import wait_until

from tfstyle_dist.core import network
from tfstyle_dist.elastic.connections.connection import Connection
from tfstyle_dist.elastic.connections.doorbell import Doorbell
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.connections.ring_buffers import RING_BYTES, RingPair
from tfstyle_dist.elastic.membership.membership import Membership
from tfstyle_dist.elastic.options import Elastic

pytestmark = pytest.mark.timeout(120)
LIMIT = timedelta(seconds=300)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection with shared memory."""
    sockets = socket.socketpair()
    one, other = Connection(sockets[0], 1), Connection(sockets[1], None)
    rings = RingPair.make()
    assert rings is not None
    assert rings.announced is not None
    other.share(RingPair.find(rings.announced), None)
    rings.settle()
    one.share(rings, None)
    yield one, other
    one.close()
    other.close()


def test_packets_come_whole_and_in_order(ends: tuple[Connection, Connection]) -> None:
    """Also those that are larger than the memory, when what does not fit is written later."""
    one, other = ends
    chance, came = random.Random(1), []
    sizes = [chance.choice([0, 1, 100, 70_000, RING_BYTES // 4, RING_BYTES]) for _ in range(60)]
    for number, size in enumerate(sizes):
        one.send(Packet({"is": "beat", "number": number}, [torch.full((size,), number, dtype=torch.int32)]))
        if number % 3 == 0:
            came += list(other.receive(1 << 20))
            one.flush()
    while len(came) < len(sizes):
        came += list(other.receive(1 << 20))
        one.flush()
    assert [packet.header["number"] for packet in came] == list(range(len(sizes)))
    for number, (packet, size) in enumerate(zip(came, sizes, strict=True)):
        assert torch.equal(packet.tensors[0], torch.full((size,), number, dtype=torch.int32))


def test_what_a_killed_worker_was_writing_is_not_taken(ends: tuple[Connection, Connection]) -> None:
    """A whole packet came before it; the bytes of the next one were written, and never said to be there."""
    one, other = ends
    one.send(Packet({"is": "beat"}, [torch.ones(4)]))
    assert one.rings is not None
    ring = one.rings.there
    written = ring._words[0]
    one.send(Packet({"is": "beat"}, [torch.ones(1000)]))
    ring._words[0] = written
    assert [packet.tensors[0].tolist() for packet in other.receive(1 << 20)] == [[1.0] * 4]
    ring._words[0] = written + 2000  # said in parts, as of a packet that is larger than the memory
    assert list(other.receive(1 << 20)) == []


def test_who_is_rung_between_a_look_and_falling_asleep_does_not_sleep() -> None:
    bell = Doorbell(0)
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        with bell:
            bell.notify_all()
        return False

    bell.look = look
    slept = threading.Event()
    assert bell._bell is not None
    bell._bell._futex = _Futex(slept)  # type: ignore[assignment]
    with bell:
        bell.wait(60)
    assert not slept.is_set()
    assert len(looks) == 2
    bell.close()


class _Futex:
    def __init__(self, slept: threading.Event) -> None:
        self._slept = slept

    def wait(self, word: int, value: int) -> None:
        self._slept.set()

    def wake(self, word: int) -> None:
        pass


def _job(hosts: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Membership]:
    addresses = [("127.0.0.1", port) for port in network.free_ports(len(hosts))]
    made = []
    for number, host in enumerate(hosts):
        monkeypatch.setenv("TFSTYLE_HOST", host)
        made.append(Membership(number, addresses, Elastic(replicas=len(hosts), **options), LIMIT))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda each: each.start(LIMIT), made))
    return made


def _step(membership: Membership, size: int) -> dict[int, float]:
    membership.view()
    came = membership.gather("all_reduce", Packet({}, [torch.full((size,), float(membership.me))]))
    assert all(packet.tensors[0].numel() == size for packet in came.values())
    assert all(len(packet.tensors[0].unique()) == 1 for packet in came.values())
    votes = membership.commit(Packet({"replicas": {}}, [torch.tensor(float(membership.me))]))
    assert {member: float(vote.tensors[0]) for member, vote in votes.items()} == {m: float(m) for m in came}
    return {member: float(packet.tensors[0][0]) for member, packet in came.items()}


@pytest.mark.parametrize("size", [5, 3 * RING_BYTES])
@pytest.mark.parametrize("hosts", ["aaa", "aab", "abc"])
def test_steps_of_workers_on_the_same_and_on_other_hosts(
    hosts: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _job(list(hosts), monkeypatch)
    try:
        for one in made:
            wait_until(lambda one=one: len(one._connections.known()) == len(hosts) - 1)
            for other in one._connections.known():
                connection = one._connections._open.get(other)
                assert connection is not None
                assert (connection.rings is not None) == (hosts[one.me] == hosts[other])
                assert (connection.bell is not None) == (hosts[one.me] == hosts[other])
        for _ in range(3):
            with ThreadPoolExecutor() as pool:
                for came in pool.map(lambda one: _step(one, size), made):
                    assert came == {member: float(member) for member in range(len(hosts))}
    finally:
        for each in made:
            each.close()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_worker_that_computes_for_longer_than_it_may_be_silent_is_not_given_up(
    hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends nothing of its own meanwhile: its signs of life alone say that it is there."""
    made = _job(list(hosts), monkeypatch, suspect_after=1.0)
    try:
        with ThreadPoolExecutor() as pool:
            late = pool.submit(lambda: time.sleep(2.5) or _step(made[1], 5))
            assert _step(made[0], 5) == late.result() == {0: 0.0, 1: 1.0}
        assert [each.members for each in made] == [(0, 1), (0, 1)]
    finally:
        for each in made:
            each.close()


def test_without_shared_memory_everything_goes_through_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfstyle_dist.shm.ordering.possible", lambda: False)
    made: list[Any] = _job(["a", "a"], monkeypatch)
    try:
        assert all(one._connections._open.get(1 - one.me).rings is None for one in made)
        with ThreadPoolExecutor() as pool:
            assert list(pool.map(lambda one: _step(one, 7), made)) == [{0: 0.0, 1: 1.0}] * 2
    finally:
        for each in made:
            each.close()
