"""Who has the turn, and what ends a run: ``TurnRun`` driven by bare threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, ReplicaAborted
from tfstyle_dist.runtime import turn as turn_module
from tfstyle_dist.runtime.replica_run import Content, InlineRun
from tfstyle_dist.runtime.turn import Turn
from tfstyle_dist.runtime.turns import TurnRun

pytestmark = pytest.mark.timeout(60)


def play(timeout: timedelta | None, *functions: Callable[[TurnRun, int], Any]) -> tuple[TurnRun, list[Any]]:
    """Each function in a thread, as a replica; returns the run, and results or the class of what was raised."""
    results: list[Any] = [None] * len(functions)
    threads: list[threading.Thread] = []

    def one(replica: int) -> None:
        run.threads[replica] = threading.get_ident()
        try:
            results[replica] = functions[replica](run, replica)
        except BaseException as error:
            results[replica] = type(error)
        finally:
            run.finish(replica)

    def start(replica: int) -> None:
        threads.append(threading.Thread(target=one, args=(replica,)))
        threads[-1].start()

    run = TurnRun(len(functions), timeout, start)
    start(0)
    threads[0].join(30)
    assert not threads[0].is_alive()
    return run, results


SOON = timedelta(seconds=20)


def test_one_replica_meets_nobody() -> None:
    assert InlineRun().barrier(0, "call", 5, lambda payloads: [payloads[0] + 1]) == 6


@pytest.mark.parametrize("anywhere", [False, True])
def test_payloads_and_results_are_in_replica_order(anywhere: bool) -> None:
    calls: list[list[int]] = []

    def action(payloads: list[int]) -> list[int]:
        calls.append(payloads)
        return [p * 10 for p in payloads]

    def replica(run: TurnRun, r: int) -> list[int]:
        return [run.barrier(r, "call", r + 3 * turn, action, anywhere=anywhere) for turn in range(50)]

    run, results = play(SOON, replica, replica, replica)
    assert results == [[10 * (r + 3 * t) for t in range(50)] for r in range(3)]
    assert calls == [[3 * t, 3 * t + 1, 3 * t + 2] for t in range(50)]
    assert run.error is None


@pytest.mark.parametrize("anywhere", [False, True])
def test_one_replica_runs_at_a_time_in_the_same_order_every_time(anywhere: bool) -> None:
    def journal() -> list[tuple[str, int]]:
        steps: list[tuple[str, int]] = []
        inside: list[int] = []

        def replica(run: TurnRun, r: int) -> None:
            for part in "abc":
                inside.append(r)
                steps.append((part, r))
                assert inside == [r]
                inside.clear()
                run.barrier(r, "call", None, list, anywhere=anywhere)

        play(SOON, replica, replica, replica)
        return steps

    first = journal()
    assert first[:3] == [("a", 0), ("a", 1), ("a", 2)]
    assert [part for part, _ in first] == list("aaabbbccc")
    assert first == journal()


def test_joint_work_is_done_by_the_first_replicas_thread_unless_it_may_be_done_anywhere() -> None:
    seen: dict[str, int] = {}

    def replica(run: TurnRun, r: int) -> int:
        def note(name: str) -> Any:
            return lambda _: [seen.setdefault(name, threading.get_ident())] * 2

        run.barrier(r, "call", None, note("first"))
        run.barrier(r, "call", None, note("last"), anywhere=True)
        return threading.get_ident()

    _, threads = play(None, replica, replica)
    assert seen == {"first": threads[0], "last": threads[1]}  # replica 1 came last to the second one


def test_other_kind() -> None:
    kinds = ["merge_call", "all_reduce"]
    run, results = play(SOON, *[lambda run, r: run.barrier(r, kinds[r], None, list)] * 2)
    assert results == [ReplicaAborted] * 2
    assert isinstance(run.error, CollectiveMismatchError)
    assert f"replica 0: merge_call at {__file__}:" in str(run.error)
    assert f"replica 1: all_reduce at {__file__}:" in str(run.error)


def test_one_finishes_while_the_other_waits() -> None:
    run, results = play(SOON, lambda run, r: run.barrier(r, "call", None, list), lambda run, r: "done")
    assert results == [ReplicaAborted, "done"]
    assert "replica 1: finished without another call" in str(run.error)


def test_error_of_the_joint_work() -> None:
    error = ValueError("no")

    def action(payloads: list[Any]) -> list[Any]:
        raise error

    run, results = play(SOON, *[lambda run, r: run.barrier(r, "call", None, action)] * 2)
    assert results == [ReplicaAborted] * 2
    assert run.error is error


def test_whoever_waits_unwinds_in_its_own_turn() -> None:
    order: list[int] = []

    def waiting(run: TurnRun, r: int) -> None:
        try:
            run.barrier(r, "call", None, list)
        finally:
            order.append(r)

    def failing(run: TurnRun, r: int) -> None:
        order.append(r)
        run.abort(ValueError("first"))
        run.abort(ValueError("second"))

    run, results = play(None, waiting, waiting, failing)
    assert results == [ReplicaAborted, ReplicaAborted, None]
    assert order == [2, 1, 0]
    assert str(run.error) == "first"


def test_the_run_is_over_when_the_first_replica_has_the_turn_again() -> None:
    """Not as soon as the last function has returned: its thread still has to give the objects back."""
    events: list[str] = []

    class Slow(Content):
        def switch(self, replica: int | None) -> None:
            if replica == 0:
                threading.Event().wait(0.3)
                events.append("the first replica's objects")

    def start(replica: int) -> None:
        threading.Thread(target=lambda: run.finish(replica)).start()
        while not run._done[replica]:
            threading.Event().wait(0.005)

    run = TurnRun(2, SOON, start, Slow())
    run.finish(0)
    events.append("the run is over")
    assert events == ["the first replica's objects", "the run is over"]


def test_deadline() -> None:
    release = threading.Event()

    def absent(run: TurnRun, r: int) -> None:
        release.wait(30)

    def waiting(run: TurnRun, r: int) -> None:
        try:
            run.barrier(r, "call", None, list)
        finally:
            release.set()

    run, results = play(timedelta(seconds=0.3), waiting, absent)
    assert results[0] is ReplicaAborted
    assert isinstance(run.error, DeadlineExceededError)
    assert "Replica(s) [1] of 2 did not come to call at" in str(run.error)
    assert "in absent" in str(run.error)
    assert run.lost == [1]


def test_a_replica_may_take_as_long_as_the_one_before_it_and_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for each turn, so a turn that all need takes a multiple of what a rank would wait."""
    now = [100.0]
    monkeypatch.setattr(turn_module.time, "monotonic", lambda: now[0])
    turn, limit = Turn(), timedelta(seconds=3)
    for length, longest in [(5.0, 5.0), (60.0, 60.0), (2.0, 60.0)]:
        now[0] += length
        turn.pass_to((turn.holder + 1) % 2)
        assert turn.deadline(limit, interrupted=False).remaining() == 3 + longest
    now[0] += 500
    turn.take(0)  # from one that is lost: how long that took does not count
    assert turn.deadline(limit, interrupted=False).remaining() == 63
    assert turn.deadline(None, interrupted=False).remaining() is None


def test_those_that_wait_ask_how_long_the_longest_turn_was() -> None:
    pause = threading.Event()

    def slow(run: TurnRun, r: int) -> int:
        run.turn._longest = 60.0
        pause.wait(0.6)
        return int(run.barrier(r, "call", r, list))

    run, results = play(timedelta(seconds=0.3), slow, slow, slow)
    assert results == [0, 1, 2]
    assert run.error is None
