"""Ctrl-C at any moment of a run: never between two halves of an exchange, never a run that does not end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.runtime import interrupts
from tfstyle_dist.runtime.executor import ReplicaExecutor

pytestmark = pytest.mark.timeout(60)


class SignalInside:
    """Content that gets a Ctrl-C inside of its n-th method call.

    Attributes:
        calls: how many calls there were.
        broken: methods that did not come to their end.
        shown: the replica whose content is there.
    """

    def __init__(self, when: int) -> None:
        self.when, self.calls = when, 0
        self.broken: list[str] = []
        self.shown: int | None = None

    def _work(self, name: str) -> None:
        self.calls += 1
        self.broken.append(name)
        if self.calls == self.when:
            signal.raise_signal(signal.SIGINT)
        for _ in range(3):
            time.sleep(0)
        self.broken.remove(name)

    def switch(self, replica: int | None) -> None:
        self._work("switch")
        self.shown = replica

    def enter(self, begins: bool = False) -> None:
        self._work("enter")

    def fail(self) -> None:
        self._work("fail")

    def pause(self, replica: int) -> None:
        self._work("pause")

    def leave(self) -> None:
        self._work("leave")

    def release(self) -> None:
        """Nothing is held."""


@pytest.fixture
def executor() -> Iterator[ReplicaExecutor]:
    made = ReplicaExecutor([ReplicaDevice("cpu", 0), ReplicaDevice("cpu", 1)], timedelta(seconds=20))
    yield made
    made.close()


def run_once(executor: ReplicaExecutor) -> list[Any]:
    def replica(number: int) -> Any:
        def function(run: Any) -> Any:
            run.barrier(number, "first", number, lambda numbers: [sum(numbers)] * 2)
            return run.barrier(number, "second", number, lambda numbers: [sum(numbers)] * 2, anywhere=True)

        return function

    return executor.run([replica(0), replica(1)])


def test_ctrl_c_while_objects_are_exchanged_waits_until_they_are(executor: ReplicaExecutor) -> None:
    counting = executor.content = SignalInside(0)
    assert run_once(executor) == [1, 1]
    assert counting.calls > 8
    for when in range(1, counting.calls + 1):
        content = executor.content = SignalInside(when)
        with pytest.raises(KeyboardInterrupt):
            run_once(executor)
        assert content.broken == []
        assert content.shown is None
        assert run_once(executor) == [1, 1]


def test_ctrl_c_at_any_moment_leaves_replicas_that_can_go_on(executor: ReplicaExecutor) -> None:
    before = signal.getsignal(signal.SIGINT)
    main = threading.main_thread().ident
    for attempt in range(60):
        timer = threading.Timer(attempt * 3e-5, lambda: signal.pthread_kill(main or 0, signal.SIGINT))
        try:
            timer.start()
            for _ in range(2000):
                run_once(executor)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        timer.join()
        assert run_once(executor) == [1, 1]
        assert signal.getsignal(signal.SIGINT) is before


def test_a_replica_that_never_stops_is_left_after_ctrl_c_also_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfstyle_dist.runtime.turn._INTERRUPT_GRACE", 0.2)
    executor = ReplicaExecutor([ReplicaDevice("cpu", 0), ReplicaDevice("cpu", 1)], None)
    over = threading.Event()

    def interrupted(run: Any) -> None:
        run.barrier(0, "call", None, lambda payloads: payloads)
        raise KeyboardInterrupt  # in its own code, with the turn: nobody waits for the other yet

    def goes_on(run: Any) -> None:
        try:
            run.barrier(1, "call", None, lambda payloads: payloads)
        finally:
            over.wait()

    def endless(run: Any) -> None:
        over.wait()

    def starts_the_other(run: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        run.barrier(0, "call", None, list)

    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.run([starts_the_other, endless])
        with pytest.raises(KeyboardInterrupt):
            executor.run([interrupted, goes_on])
    finally:
        signal.signal(signal.SIGALRM, usual)
        over.set()
    assert run_once(executor) == [1, 1]
    executor.close()


def test_a_replica_that_is_left_after_ctrl_c_writes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects hold another replica's content by then."""
    monkeypatch.setattr("tfstyle_dist.runtime.turn._INTERRUPT_GRACE", 0.2)
    executor = ReplicaExecutor([ReplicaDevice("cpu", 0), ReplicaDevice("cpu", 1)], None)
    over, given_up = threading.Event(), threading.Event()

    def starts_the_other(run: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        run.barrier(0, "call", None, list)

    def writes(run: Any) -> None:
        try:
            while not given_up.is_set():
                time.sleep(0.001)
        finally:
            over.set()

    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            executor.run([starts_the_other, writes])
        assert over.wait(5)
    finally:
        signal.signal(signal.SIGALRM, usual)
        given_up.set()
    assert run_once(executor) == [1, 1]
    executor.close()


def test_a_handler_that_the_step_sets_stays(executor: ReplicaExecutor) -> None:
    usual = signal.getsignal(signal.SIGINT)
    seen: list[int] = []

    def sets(run: Any) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))

    try:
        executor.run([sets, lambda run: None])
        signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, usual)


def test_signals_that_do_not_raise_arrive_once(executor: ReplicaExecutor) -> None:
    seen: list[str] = []
    usual = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(threading.current_thread().name))
    try:

        def sends(run: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)
            run.barrier(0, "call", None, lambda p: [signal.raise_signal(signal.SIGUSR1)] * 2)

        executor.run([sends, lambda run: run.barrier(1, "call", None, list)])
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert seen == [threading.main_thread().name] * 2


@pytest.mark.parametrize(("times", "expected"), [(1, [None]), (2, [1, None])])
def test_a_handler_that_notes_something_waits_for_the_first_replicas_turn(
    executor: ReplicaExecutor, times: int, expected: list[int | None]
) -> None:
    """What it writes while another replica has the turn would be that one's alone; ``None``: in the joint work."""
    content = executor.content = SignalInside(0)
    seen: list[int | None] = []
    usual = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(content.shown))

    def sends(run: Any) -> None:
        for _ in range(times):
            before = len(seen), list(interrupts._main._waiting)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            while (len(seen), interrupts._main._waiting) == before:
                time.sleep(0.001)
        run.barrier(1, "call", None, list)

    try:
        executor.run([lambda run: run.barrier(0, "call", None, list), sends])
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert seen == expected


def test_other_threads_get_no_signals() -> None:
    found: list[interrupts.Interrupts] = []
    thread = threading.Thread(target=lambda: found.append(interrupts.of_this_thread()))
    thread.start()
    thread.join()
    assert found == [interrupts.NONE]
    assert interrupts.of_this_thread() is not interrupts.NONE
