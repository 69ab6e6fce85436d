"""The threads of the replicas: kept from run to run, replaced when stuck, gone after close."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.core.errors import DeadlineExceededError, ReplicaAborted
from tfstyle_dist.runtime import ambient, team
from tfstyle_dist.runtime.executor import ReplicaExecutor

pytestmark = pytest.mark.timeout(60)
DEVICES = [ReplicaDevice("cpu", 0), ReplicaDevice("cpu", 1)]


@pytest.fixture
def executor() -> Iterator[ReplicaExecutor]:
    made = ReplicaExecutor(DEVICES, timedelta(seconds=20))
    yield made
    made.close()


def thread_ids(executor: ReplicaExecutor) -> list[int]:
    return executor.run([lambda run: threading.get_ident()] * 2)


def test_results_in_replica_order(executor: ReplicaExecutor) -> None:
    assert executor.run([lambda run: "first", lambda run: "second"]) == ["first", "second"]


def test_first_replica_in_the_callers_thread_the_others_kept(executor: ReplicaExecutor) -> None:
    first, second = thread_ids(executor)
    assert first == threading.get_ident()
    assert second != first
    assert thread_ids(executor) == [first, second]


def test_a_run_inside_a_run_has_threads_of_its_own(executor: ReplicaExecutor) -> None:
    outer_and_inner: list[Any] = []

    def first(run: Any) -> None:
        outer_and_inner.append(executor.run([lambda inner: inner is not run] * 2))

    executor.run([first, lambda run: None])
    assert outer_and_inner == [[True, True]]


def test_the_same_error_object_with_a_note(executor: ReplicaExecutor) -> None:
    error = KeyError("x")

    def fail(run: Any) -> None:
        raise error

    with pytest.raises(KeyError) as caught:
        executor.run([lambda run: None, fail])
    assert caught.value is error
    assert error.__notes__ == ["[tfstyle_dist] raised in replica 1 of 2 on this worker"]
    assert executor.run([lambda run: 1] * 2) == [1, 1]


def test_a_generator_in_which_another_replica_waits_is_explained(executor: ReplicaExecutor) -> None:
    def goes_on() -> Iterator[Any]:
        while True:
            run, replica = yield
            run.barrier(replica, "call", None, lambda payloads: payloads)

    shared: Any = goes_on()
    next(shared)
    with pytest.raises(ValueError, match="generator already executing") as caught:
        executor.run([lambda run, replica=replica: shared.send((run, replica)) for replica in range(2)])
    where, why = caught.value.__notes__
    assert where == "[tfstyle_dist] raised in replica 1 of 2 on this worker"
    assert "The replicas of one process share a generator" in why
    assert "Write the step as a function" in why


def test_what_belongs_to_the_thread_of_another_replica_is_explained(executor: ReplicaExecutor) -> None:
    kept = threading.local()
    kept.calls = 0
    with pytest.raises(AttributeError, match="calls") as caught:
        executor.run([lambda run: kept.calls] * 2)
    assert "A threading.local is empty in the threads of all replicas but the first one" in caught.value.__notes__[1]


def test_an_abort_raised_by_hand_is_no_silent_success(executor: ReplicaExecutor) -> None:
    def fail(run: Any) -> None:
        raise ReplicaAborted("by hand")

    with pytest.raises(RuntimeError, match="replica 1 was aborted: by hand"):
        executor.run([lambda run: None, fail])


def test_stuck_threads_are_replaced() -> None:
    executor = ReplicaExecutor(DEVICES, timedelta(seconds=0.3))
    release = threading.Event()
    stuck: list[int] = []

    def wait(run: Any) -> None:
        stuck.append(threading.get_ident())
        release.wait(30)

    try:
        with pytest.raises(DeadlineExceededError, match=r"Replica\(s\) \[1\] did not finish within the limit of 0.3 s"):
            executor.run([lambda run: None, wait])
        executor._timeout = timedelta(seconds=20)  # a slow thread is no stuck one
        assert thread_ids(executor)[1] != stuck[0]
    finally:
        release.set()
        executor.close()


def test_close(executor: ReplicaExecutor) -> None:
    before = set(threading.enumerate())
    other = ReplicaExecutor(DEVICES, None)
    other.run([lambda run: None] * 2)
    (thread,) = set(threading.enumerate()) - before
    other.close()
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        other.run([lambda run: None] * 2)


def test_a_replica_may_run_on_any_core(executor: ReplicaExecutor) -> None:
    """Whoever passes the turn says where the next one wakes up; what it starts must not inherit that."""

    def cores(run: Any, r: int) -> list[set[int]]:
        found = [os.sched_getaffinity(0)]
        for _ in range(3):
            run.barrier(r, "call", None, list, anywhere=True)
            found.append(os.sched_getaffinity(0))
        return found

    allowed = os.sched_getaffinity(0)
    for _ in range(3):
        assert executor.run([lambda run, r=r: cores(run, r) for r in range(2)]) == [[allowed] * 4] * 2
    assert os.sched_getaffinity(0) == allowed


class Journal:
    """A content that writes down what happens to it."""

    def __init__(self) -> None:
        self.entries: list[Any] = []

    def switch(self, replica: int | None) -> None:
        self.entries.append(replica)

    def enter(self, begins: bool = False) -> None:
        self.entries.append("run" if begins else "enter")

    def leave(self) -> None:
        self.entries.append("leave")

    def pause(self, replica: int) -> None:
        """Nothing that only one may do was done."""

    def release(self) -> None:
        self.entries.append("release")


def test_the_content_is_that_of_whoever_has_the_turn(executor: ReplicaExecutor) -> None:
    journal = executor.content = Journal()
    executor.run([lambda run, r=r: run.barrier(r, "sum", None, list, anywhere=True) for r in range(2)])
    assert journal.entries == ["run", 0, 1, 0, None, "leave"]
    journal.entries.clear()
    executor.run([lambda run, r=r: run.barrier(r, "merge_call", None, list) for r in range(2)])
    # The work is done in cross-replica context; what it writes there reaches the replicas.
    assert journal.entries == ["run", 0, 1, 0, None, "leave", "enter", 0, 1, 0, None, "leave"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_device_that_cannot_be_made_current_is_no_hang(
    executor: ReplicaExecutor, monkeypatch: pytest.MonkeyPatch, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the step begins its error is the run's; where it ends it is logged. The thread lives on."""
    made_current, broken = ambient.made_current, True

    @contextlib.contextmanager
    def breaking(device: ReplicaDevice) -> Iterator[None]:
        with made_current(device):
            if broken and device.index == 1 and not ends:
                raise OSError("no such device")
            yield
            if broken and device.index == 1 and ends:
                raise OSError("no such device")

    monkeypatch.setattr(ambient, "made_current", breaking)
    before = executor.run([lambda run: "first", lambda run: "second"]) if ends else None
    if not ends:
        with pytest.raises(OSError, match="no such device") as caught:
            executor.run([lambda run: "first", lambda run: "second"])
        assert any("replica 1 of 2" in note for note in caught.value.__notes__)
    broken = False
    assert executor.run([lambda run: "first", lambda run: "second"]) == ["first", "second"]
    assert before in (None, ["first", "second"])
    assert ("could not be put back" in caplog.text) is ends


def test_threads_have_freed_what_torch_keeps_for_them_when_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that was through before they had would abort the process."""
    monkeypatch.setattr(team, "_TO_END", 20.0)  # of a busy machine
    libc = ctypes.PyDLL(None)  # keeps the interpreter's lock: a thread that needs it to end does not end meanwhile

    def step(run: Any) -> int:
        torch.ones(1, requires_grad=True).sum().backward()
        return threading.get_native_id()

    for _ in range(300):
        executor = ReplicaExecutor(DEVICES, timedelta(seconds=20))
        _, task = executor.run([step] * 2)
        path = f"/proc/self/task/{task}".encode()
        assert libc.access(path, 0) == 0
        executor.close()
        assert libc.access(path, 0) != 0


def test_content_is_let_go_when_closed_and_no_run_is_under_way() -> None:
    executor = ReplicaExecutor([ReplicaDevice("cpu", 0), ReplicaDevice("cpu", 1)], timedelta(seconds=20))
    journal = executor.content = Journal()

    def closing(run: Any) -> None:
        if run.barrier(0, "close", None, lambda _: [executor.close()] * 2) is None:
            journal.entries.append("goes on")

    executor.run([closing, lambda run: run.barrier(1, "close", None, list)])
    assert journal.entries.count("release") == 1
    assert journal.entries[-1] == "release"
    assert "goes on" in journal.entries
    executor.close()
    with pytest.raises(RuntimeError, match="was closed"):
        executor.run([lambda run: None, lambda run: None])


def test_content_is_let_go_though_an_interrupt_comes_at_the_end_of_the_run() -> None:
    executor = ReplicaExecutor(DEVICES, timedelta(seconds=20))

    class Interrupted(Journal):
        def leave(self) -> None:
            super().leave()
            signal.raise_signal(signal.SIGINT)  # held back until the run is over

    journal = executor.content = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        executor.run([lambda run: None, lambda run: None])
    executor.close()
    assert journal.entries[-1] == "release"


def test_a_replica_that_was_given_up_before_it_began_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    own, given_up, ran = ambient.made_current, threading.Event(), []

    @contextlib.contextmanager
    def late(device: ReplicaDevice) -> Iterator[None]:
        if device.index == 1:
            given_up.wait(20)
        with own(device):
            yield

    monkeypatch.setattr(ambient, "made_current", late)
    executor = ReplicaExecutor(DEVICES, timedelta(seconds=0.3))
    before = set(threading.enumerate())
    with pytest.raises(DeadlineExceededError, match=r"Replica\(s\) \[1\] did not finish"):
        executor.run([lambda run: None, ran.append])
    (abandoned,) = set(threading.enumerate()) - before
    given_up.set()
    abandoned.join(20)
    assert not abandoned.is_alive()
    assert not ran


def test_a_thread_that_a_step_waits_for_does_not_wait_for_the_step() -> None:
    short = ReplicaExecutor(DEVICES, timedelta(seconds=1))
    raised: list[BaseException] = []

    def other() -> None:
        try:
            thread_ids(short)
        except DeadlineExceededError as error:
            raised.append(error)

    def step(_: Any) -> str:
        thread = threading.Thread(target=other, name="evaluation")
        thread.start()
        thread.join(50)
        return "done" if not thread.is_alive() else "stuck"

    try:
        assert short.run([step, lambda run: ""]) == ["done", ""]
        assert "'evaluation' for the run of another thread" in str(raised[0])
        assert "thread.join(50)" in str(raised[0])
        assert len(thread_ids(short)) == 2
    finally:
        short.close()


def test_another_thread_waits_for_a_long_run_whose_turns_pass() -> None:
    short = ReplicaExecutor(DEVICES, timedelta(seconds=3))
    begun, found = threading.Event(), list[Any]()

    def step(run: Any, replica: int) -> None:
        begun.set()
        for _ in range(3):
            threading.Event().wait(0.6)
            run.barrier(replica, "sum", None, lambda payloads: payloads)

    def other() -> None:
        begun.wait()
        with contextlib.suppress(DeadlineExceededError):
            found.extend(thread_ids(short))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        short.run([lambda run: step(run, 0), lambda run: step(run, 1)])
        thread.join(20)
        assert len(found) == 2
    finally:
        short.close()


def test_another_thread_waits_for_long_joint_work() -> None:
    """As replicas do: what it waits for has limits of its own."""
    short = ReplicaExecutor(DEVICES, timedelta(seconds=1))
    begun, found = threading.Event(), list[Any]()

    def save(payloads: list[Any]) -> list[Any]:
        begun.set()
        threading.Event().wait(2.5)
        return payloads

    def other() -> None:
        begun.wait()
        with contextlib.suppress(DeadlineExceededError):
            found.extend(thread_ids(short))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        short.run([lambda run: run.barrier(0, "save", 0, save), lambda run: run.barrier(1, "save", 1, save)])
        thread.join(20)
        assert len(found) == 2
    finally:
        short.close()
