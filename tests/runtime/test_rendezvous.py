"""Where replicas meet: ``ThreadedRun`` driven by bare threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, ReplicaAborted
from tfstyle_dist.runtime.rendezvous import InlineRun, ThreadedRun

pytestmark = pytest.mark.timeout(60)


def play(run: ThreadedRun, *functions: Callable[[int], Any]) -> list[Any]:
    """Each function in a thread, as a replica; returns results, or the class of what was raised."""
    results: list[Any] = [None] * len(functions)

    def one(replica: int) -> None:
        try:
            run.begin(replica)
            results[replica] = functions[replica](replica)
        except BaseException as error:
            results[replica] = type(error)
        finally:
            run.finish(replica)

    threads = [threading.Thread(target=one, args=(r,)) for r in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_one_replica_meets_nobody() -> None:
    assert InlineRun().meet(0, "call", 5, lambda payloads: [payloads[0] + 1]) == 6


def test_payloads_and_results_are_in_replica_order() -> None:
    run = ThreadedRun(3, timedelta(seconds=20))
    calls: list[list[int]] = []

    def action(payloads: list[int]) -> list[int]:
        calls.append(payloads)
        return [p * 10 for p in payloads]

    def replica(r: int) -> list[int]:
        return [run.meet(r, "call", r + 3 * turn, action) for turn in range(50)]

    assert play(run, replica, replica, replica) == [[10 * (r + 3 * t) for t in range(50)] for r in range(3)]
    assert calls == [[3 * t, 3 * t + 1, 3 * t + 2] for t in range(50)]
    assert run.error is None


def test_joint_work_is_done_by_the_first_replicas_thread() -> None:
    run = ThreadedRun(2, None)
    first: list[int] = []

    def replica(r: int) -> bool:
        if r == 0:
            first.append(threading.get_ident())
        result: bool = run.meet(r, "call", None, lambda _: [threading.get_ident() == first[0]] * 2)
        return result

    assert play(run, replica, replica) == [True, True]


def test_other_kind() -> None:
    run = ThreadedRun(2, timedelta(seconds=20))
    kinds = ["merge_call", "all_reduce"]
    assert play(run, *[lambda r: run.meet(r, kinds[r], None, list)] * 2) == [ReplicaAborted] * 2
    assert isinstance(run.error, CollectiveMismatchError)
    assert f"replica 0: merge_call at {__file__}:" in str(run.error)
    assert f"replica 1: all_reduce at {__file__}:" in str(run.error)


def test_one_finishes_while_the_other_waits() -> None:
    run = ThreadedRun(2, timedelta(seconds=20))
    assert play(run, lambda r: run.meet(r, "call", None, list), lambda r: "done") == [ReplicaAborted, "done"]
    assert "replica 1: finished without another call" in str(run.error)


def test_error_of_the_joint_work() -> None:
    run = ThreadedRun(2, timedelta(seconds=20))
    error = ValueError("no")

    def action(payloads: list[Any]) -> list[Any]:
        raise error

    assert play(run, *[lambda r: run.meet(r, "call", None, action)] * 2) == [ReplicaAborted] * 2
    assert run.error is error


def test_the_first_error_counts() -> None:
    run = ThreadedRun(2, None)
    first = ValueError("first")
    run.abort(first)
    run.abort(ValueError("second"))
    assert run.error is first
    with pytest.raises(ReplicaAborted):
        run.meet(0, "call", None, list)
    with pytest.raises(ReplicaAborted):
        run.begin(1)


def test_deadline() -> None:
    run = ThreadedRun(2, timedelta(seconds=0.3))
    inside, release = threading.Event(), threading.Event()

    def absent(r: int) -> None:
        inside.set()
        release.wait(30)

    def waiting(r: int) -> None:
        inside.wait(30)
        try:
            run.meet(r, "call", None, list)
        finally:
            release.set()

    assert play(run, waiting, absent)[0] is ReplicaAborted
    assert isinstance(run.error, DeadlineExceededError)
    assert "Replica(s) [1] of 2 did not come to call at" in str(run.error)
    assert "in absent" in str(run.error)


def test_wait_finished_names_the_late() -> None:
    run = ThreadedRun(3, None)
    run.finish(1)
    assert run.wait_finished(Deadline(timedelta(seconds=0.05))) == [0, 2]
    run.finish(0)
    run.finish(2)
    assert run.wait_finished(Deadline(None)) == []


def test_serial_replicas_take_turns() -> None:
    run = ThreadedRun(3, timedelta(seconds=20), serial=True)
    steps: list[tuple[str, int]] = []

    def replica(r: int) -> None:
        for part in "ab":
            steps.append((part, r))
            run.meet(r, "call", None, list)
        steps.append(("c", r))

    play(run, replica, replica, replica)
    assert run.error is None
    assert steps == [(part, r) for part in "abc" for r in range(3)]
