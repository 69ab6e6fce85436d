"""Rendezvous at start-up, in threads of one process around one store."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tfstyle_dist.comm.peers.peer import this_peer
from tfstyle_dist.comm.rendezvous.members import Members
from tfstyle_dist.comm.rendezvous.rendezvous import Rendezvous
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DeadlineExceededError, PeerLostError

pytestmark = pytest.mark.timeout(60)


def members(rank: int, size: int = 2, signature: str = "") -> Members:
    return Members(rank, size, tuple(f"worker {index} (host{index}:1)" for index in range(size)), None, signature)


def hold(store: Any, *who: Members, lasting: bool = False, seconds: float = 30) -> list[Any]:
    """What each of them gets from a rendezvous: its name, or the error."""
    found: list[Any] = [None] * len(who)

    def go(place: int) -> None:
        try:
            found[place] = Rendezvous(store, who[place], Deadline(timedelta(seconds=seconds)), lasting).wait()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=go, args=(place,)) for place in range(len(who))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_get_the_same_name_and_each_rendezvous_another() -> None:
    names = [hold(dist.HashStore(), members(0, 3), members(1, 3), members(2, 3)) for _ in range(2)]
    assert all(len(set(one)) == 1 and isinstance(one[0], str) for one in names)
    assert names[0][0] != names[1][0]


def leftovers(store: Any) -> None:
    """What two workers that have ended since left in a store: a finished rendezvous."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    me = this_peer(0)
    for rank in range(2):
        old = dataclasses.replace(me, pid=gone.pid)
        store.set(f"handshake/{rank}", json.dumps([f"old{rank}", "3 workers", *old.facts]))
        store.set(f"confirmed/{rank}", '["old0", "old1"]')
        store.set(f"gave up/old{rank}", '["ValueError", "an old reason"]')
    store.set("everyone", '["old0", "old1"]')
    store.set("verdict/old0", '["ValueError", "an old verdict"]')


def test_leftovers_of_an_earlier_life_count_for_nothing() -> None:
    store = dist.HashStore()
    leftovers(store)
    first, second = hold(store, members(0), members(1), lasting=True)
    assert isinstance(first, str), first
    assert first == second


def test_in_a_new_store_a_dead_worker_is_an_error_at_once() -> None:
    store = dist.HashStore()
    leftovers(store)
    (error,) = hold(store, members(0))
    assert isinstance(error, PeerLostError)
    assert "worker 1 (host1:1)" in str(error)
    assert "died while the workers started" in str(error)


def test_the_absent_are_listed_by_all() -> None:
    errors = hold(dist.HashStore(), members(0, 3), members(2, 3), seconds=1)
    assert all(isinstance(error, DeadlineExceededError) for error in errors), errors
    assert all(str(error).startswith("worker 1 (host1:1) did not start within 1 s: 1 of 3 absent") for error in errors)


def test_different_clusters_are_refused_by_all() -> None:
    errors = hold(dist.HashStore(), members(0, signature="a, b"), members(1, signature="a, c"))
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert all("a, b" in str(error) and "a, c" in str(error) for error in errors)
