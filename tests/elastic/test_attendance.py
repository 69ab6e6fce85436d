"""Connections and members: what is known of other workers, and who waits for whom."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from until import wait_until

from tfstyle_dist.core import network
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import PeerLostError
from tfstyle_dist.elastic.connections import peer_handshake
from tfstyle_dist.elastic.connections.connection_loop import ConnectionLoop
from tfstyle_dist.elastic.connections.packets import Packet
from tfstyle_dist.elastic.membership import error_texts
from tfstyle_dist.elastic.membership.membership import Membership, MembershipChanged
from tfstyle_dist.elastic.membership.protocol import Member
from tfstyle_dist.elastic.membership.protocol_messages import Epoch
from tfstyle_dist.elastic.membership.startup import Startup
from tfstyle_dist.elastic.options import Elastic

pytestmark = pytest.mark.timeout(120)
LIMIT = timedelta(seconds=300)


def _started(addresses: list[Any], *numbers: int, min_workers: int = 1, limit: timedelta = LIMIT) -> list[Membership]:
    options = Elastic(replicas=4, min_workers=min_workers)
    made = [Membership(number, addresses, options, limit) for number in numbers]
    threads = [threading.Thread(target=each.start, args=(limit,)) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


@pytest.fixture
def addresses() -> list[tuple[str, int]]:
    return [("127.0.0.1", port) for port in network.free_ports(2)]


def test_who_waits_to_be_let_in_is_told_when_the_last_member_is_gone(addresses: list[Any]) -> None:
    """Worker 0 comes back, then worker 1, its only host, dies and comes back: neither is a member."""
    zero, one = _started(addresses, 0, 1)
    zero.close()
    (zero,) = _started(addresses, 0)
    assert zero.came_back
    one.close()
    one = Membership(1, addresses, Elastic(replicas=4), LIMIT)
    try:
        with pytest.raises(PeerLostError, match="have ended before it became a member"):
            zero.join(LIMIT)
    finally:
        zero.close()
        one.close()


def test_a_worker_that_comes_back_is_not_taken_for_the_one_that_was_lost(addresses: list[Any]) -> None:
    """Its connection is there already when a vote is sent, and the thread of the connections waits to say so."""
    zero, one = _started(addresses, 0, 1)
    one.close()
    wait_until(lambda: _has_lost(zero, 1))
    with zero._changed:
        one = Membership(1, addresses, Elastic(replicas=4), LIMIT)
        wait_until(lambda: 1 in zero._connections.known())
        zero._send([])
    try:
        looked = threading.Event()
        zero._connections._order(looked.set)
        assert looked.wait(60)
        assert zero._connections.known() == [1]
        one.start(LIMIT)
        assert one.came_back
    finally:
        zero.close()
        one.close()


def _has_lost(membership: Membership, other: int) -> bool:
    with membership._changed:
        return other in membership._running().lost


def test_an_order_to_close_a_connection_is_for_that_one(addresses: list[Any]) -> None:
    """Another process has the number by the time when it is carried out."""
    zero, one = _started(addresses, 0, 1)
    hold, held = threading.Event(), threading.Event()
    zero._connections._order(lambda: (held.set(), hold.wait(60)))  # type: ignore[func-returns-value]
    assert held.wait(60)
    zero._connections.drop(1)
    orders, zero._connections._orders = zero._connections._orders, []
    hold.set()
    one.close()
    one = Membership(1, addresses, Elastic(replicas=4), LIMIT)
    try:
        one.start(LIMIT)
        for order in orders:
            zero._connections._order(order)
        looked = threading.Event()
        zero._connections._order(looked.set)
        assert looked.wait(60)
        assert zero._connections.known() == [1]
    finally:
        zero.close()
        one.close()


def test_a_successor_says_that_the_process_before_it_is_gone(
    addresses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host that did not say so itself, long after the connection was lost."""
    places = iter(["one host", "another host", "another host"])
    monkeypatch.setattr(peer_handshake, "place", lambda: next(places))
    zero, one = (Membership(number, addresses, Elastic(replicas=4), LIMIT) for number in (0, 1))
    starts = threading.Thread(target=zero.start, args=(LIMIT,))
    starts.start()
    one.start(LIMIT)
    starts.join()
    zero._connections.drop(1)
    wait_until(lambda: _has_lost(zero, 1))
    one.close()
    zero._connections._unsure[1].heard -= 10_000
    for _ in range(2):  # the thread has looked again between the two
        looked = threading.Event()
        zero._connections._order(looked.set)
        assert looked.wait(60)
    assert zero.members == (0, 1)
    one = Membership(1, addresses, Elastic(replicas=4), LIMIT)
    try:
        wait_until(lambda: zero.members == (0,))
    finally:
        zero.close()
        one.close()


def _waits(number: int, others: int) -> Startup:
    """Of a worker that has a connection to some of four."""
    startup = Startup(number, [(f"host-{each}", 80) for each in range(4)])
    startup.up |= set(range(others + 1))
    return startup


def test_the_error_of_a_start_names_who_is_missing() -> None:
    limit = Deadline(timedelta(seconds=1))
    text = error_texts.did_not_start(0, _waits(0, 2), limit)
    assert "1 of 4 absent, waited for by worker 0.\n  worker 3 at host-3:80\n" in text


def test_the_error_of_a_start_names_who_has_no_connection_to_another() -> None:
    limit, startup = Deadline(timedelta(seconds=1)), _waits(0, 3)
    startup.take(2, Packet({"is": "ready"}))
    text = error_texts.did_not_start(0, startup, limit)
    assert "2 of 4 have not said that they have a connection to all others" in text
    assert "\n  worker 1 at host-1:80\n  worker 3 at host-3:80\n" in text
    text = error_texts.did_not_start(2, _waits(2, 3), limit)
    assert "worker 0 has not said that the job begins, waited for by worker 2.\n  worker 0 at host-0:80\n" in text


def test_too_few_workers_do_not_wait_for_a_lost_one(addresses: list[Any]) -> None:
    """The limit of this test is shorter than that of the wait."""
    zero, one = _started(addresses, 0, 1, min_workers=2)
    one.close()
    try:
        with pytest.raises(PeerLostError, match=r"cannot go on.*min_workers"):
            _look_for_ever(zero)
    finally:
        zero.close()


@pytest.mark.parametrize("alone", [0, 2])
def test_a_worker_that_was_cut_off_is_told_that_the_others_go_on(alone: int) -> None:
    """The network between it and the others is there again; it dials them, or they dial it."""
    members = _started([("127.0.0.1", port) for port in network.free_ports(3)], 0, 1, 2)
    others = [member for member in members if member.me != alone]
    silent = threading.Barrier(3)
    try:
        for member in members:
            far = [alone] if member.me != alone else [other.me for other in others]
            member._connections._order(lambda loop=member._connections, far=far: _cut_off(loop, far, silent))
        for member in others:
            wait_until(lambda member=member: member.view().epoch.members == tuple(other.me for other in others))
        with pytest.raises(PeerLostError, match=rf"Worker {alone} was given up by worker .*went on without it"):
            _look_for_ever(members[alone])
    finally:
        for member in members:
            member.close()


def _cut_off(loop: ConnectionLoop, far: list[int], silent: threading.Barrier) -> None:
    """Gives connections up, without that the other ends could hear of it."""
    silent.wait(60)
    for rank in far:
        loop._gone(loop._open.get(rank))
    silent.wait(60)  # now all are gone, and they are dialled again


def _voted(membership: Membership) -> int:
    """Does a step; returns how many steps are committed then."""
    before = membership.view()
    try:
        membership.commit(Packet({}))
    except MembershipChanged:
        membership.view()
    assert before.step == 0
    return membership._running().step


def test_the_last_step_of_one_that_has_ended_is_done_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 alone gets all votes, and leaves; fewer than ``min_workers`` are enough for the end."""
    addresses = [("127.0.0.1", port) for port in network.free_ports(3)]
    zero, *others = made = _started(addresses, 0, 1, 2, min_workers=3)
    for one in others:
        send = one._connections.send
        monkeypatch.setattr(
            one._connections,
            "send",
            lambda other, packet, send=send: None if other and packet.header["is"] == "vote" else send(other, packet),
        )
    with ThreadPoolExecutor() as pool:
        steps = [pool.submit(_voted, each) for each in made]
        try:
            assert steps[0].result() == 1
            zero.close(finished=True)
            assert [step.result() for step in steps] == [1, 1, 1]
            assert [one.view().epoch.members for one in others] == [(1, 2), (1, 2)]
        finally:
            for each in made:
                each.close()


def _look_for_ever(membership: Membership) -> None:
    while True:
        membership.view()


def _with_a_newcomer() -> Member:
    member = Member(0, Epoch(1, 0, (0, 1)))
    member.receive(1, member_vote := member.vote()[0][1])
    assert member_vote.step == 0
    assert member.step == 1
    member.reach(2, "life")
    return member


def test_a_loss_alone_lets_nobody_in() -> None:
    """Only a step that begins can give a newcomer the state."""
    member = _with_a_newcomer()
    member.lose(1, dead=True)
    assert member.epoch.members == (0,)
    assert member.joined == ()
    member.admit()
    assert member.epoch.members == (0, 2)
    assert member.joined == (2,)


def test_a_newcomer_is_new_for_one_step() -> None:
    member = _with_a_newcomer()
    member.lose(1, dead=True)
    member.admit()
    vote = member.vote()[0][1]
    member.receive(2, vote)
    assert member.step == 2
    assert member.joined == ()


def test_who_comes_in_interrupts_no_step_that_has_begun() -> None:
    """It is known in one step that somebody comes in before the next one, which the other worker would begin first."""
    addresses = [("127.0.0.1", port) for port in network.free_ports(3)]
    zero, one, two = _started(addresses, 0, 1, 2)
    two.close()
    wait_until(lambda: zero.view().epoch.members == one.view().epoch.members == (0, 1))
    began: list[int] = []

    def work(membership: Membership) -> tuple[int, ...]:
        while True:
            view = membership.view(admits=True)
            began.append(membership.me)
            if view.joined and membership.me not in view.joined:
                membership.give_state(view, Packet({}))
            with suppress(MembershipChanged):
                membership.gather("numbers", Packet({}))
                membership.commit(Packet({}))
                return view.epoch.members

    def came_in() -> bool:
        with zero._changed:
            return zero._running().has_newcomer

    with ThreadPoolExecutor(3) as pool:
        try:
            zero.view()
            first = pool.submit(work, one)
            two = Membership(2, addresses, Elastic(replicas=4), LIMIT)
            two.start(LIMIT)
            third = pool.submit(lambda: (two.join(LIMIT), work(two))[1])
            wait_until(came_in)
            zero.gather("numbers", Packet({}))
            zero.commit(Packet({}))
            assert first.result(60) == (0, 1)
            second = pool.submit(work, one)
            time.sleep(0.2)  # it has begun by now, if it does not wait
            assert work(zero) == second.result(60) == third.result(60) == (0, 1, 2)
            assert began.count(1) == 2
        finally:
            for membership in (zero, one, two):
                membership.close()


def test_a_newcomer_with_the_lowest_number_lets_nobody_wait_before_it_has_the_state() -> None:
    """Worker 0 comes in, and leads from then on; worker 2 is at the door too, and worker 3 has the state to give."""
    addresses = [("127.0.0.1", port) for port in network.free_ports(4)]
    limit = timedelta(seconds=20)
    zero, one, two, three = _started(addresses, 0, 1, 2, 3, limit=limit)
    zero.close()
    two.close()
    wait_until(lambda: one.view().epoch.members == three.view().epoch.members == (1, 3))

    def work(membership: Membership) -> tuple[int, ...]:
        while True:
            view = membership.view(admits=True)
            if view.joined and membership.me not in view.joined:
                membership.give_state(view, Packet({}))
            with suppress(MembershipChanged):
                membership.gather("numbers", Packet({}))
                membership.commit(Packet({}))
                return view.epoch.members

    def is_admissible(newcomer: int, leader: Membership) -> bool:
        with leader._changed:
            return leader._running().admissible() == [newcomer]

    with ThreadPoolExecutor(4) as pool:
        try:
            zero, two = (Membership(number, addresses, Elastic(replicas=4), limit) for number in (0, 2))
            zero.start(limit)
            two.start(limit)
            works = [pool.submit(lambda own=own: (own.join(limit), work(own))[1]) for own in (zero, two)]
            wait_until(lambda: is_admissible(0, one))
            works.append(pool.submit(work, one))
            wait_until(lambda: is_admissible(2, zero))
            time.sleep(0.2)  # if worker 0 said now that worker 2 comes in before this step, worker 3 would wait for it
            works.append(pool.submit(work, three))
            assert {members[0] for members in (each.result(10) for each in works)} == {0}
        finally:
            for membership in (zero, one, two, three):
                membership.close()
