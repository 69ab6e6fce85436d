"""Two or three replicas in one process: whatever goes wrong in one, the caller hears of it and can go on."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from fault_steps import (
    THREE,
    TWO,
    ReplicaFault,
    all_reduce,
    assert_usable,
    build,
    merge,
    replica_id,
    train_step,
)

import tfstyle_dist as td
from tfstyle_dist.core.errors import DeadlineExceededError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "1")


def assert_usable_in_time(strategy: Any) -> None:
    """The same strategy, with a limit that good work keeps on a busy machine too."""
    strategy.worker.executor._timeout = timedelta(seconds=50)
    assert_usable(strategy)


# ---- a replica raises --------------------------------------------------------------------------------------


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        raise ctx.error


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("meets", [False, True], ids=["others-return", "others-wait"])
def test_raising_in_run(two: Any, failing: int, meets: bool) -> None:
    error = ReplicaFault("no more data")

    def step() -> None:
        if replica_id() == failing:
            raise error
        if meets:
            all_reduce()

    with pytest.raises(ReplicaFault) as caught:
        two.run(step)
    assert caught.value is error
    assert any(f"raised in replica {failing} of 2" in note for note in error.__notes__), error.__notes__


def test_the_first_error_counts_when_all_raise(two: Any) -> None:
    errors = [ReplicaFault("replica 0"), ReplicaFault("replica 1")]

    def step() -> None:
        raise errors[replica_id()]

    with pytest.raises(ReplicaFault) as caught:
        two.run(step)
    assert caught.value in errors
    assert len(caught.value.__notes__) == 1


def test_raising_in_merge_call(two: Any) -> None:
    error = ReplicaFault("in merge_call")

    def fail(strategy: Any) -> None:
        raise error

    def step() -> str:
        with contextlib.suppress(Exception):  # a replica cannot swallow it: the run is over
            merge(fail)
        return "went on"

    with pytest.raises(ReplicaFault) as caught:
        two.run(step)
    assert caught.value is error
    (note,) = error.__notes__
    assert "merge_call" in note
    assert merge.__code__.co_filename in note


@pytest.mark.parametrize("failing", [0, 1])
def test_raising_in_backward(two: Any, failing: int) -> None:
    model, optimizer = build(two)
    error = ReplicaFault("in backward")
    before = model.weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        x = torch.ones(1, 1, requires_grad=True)
        y = model(RaisesInBackward.apply(x, error) if replica_id() == failing else x)
        y.sum().backward()
        optimizer.step()

    with pytest.raises(ReplicaFault) as caught:
        two.run(step)
    assert caught.value is error
    assert any(f"replica {failing} of 2" in note for note in error.__notes__)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    two.run(lambda: train_step(model, optimizer))
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_raising_in_a_gradient_hook(two: Any) -> None:
    model, optimizer = build(two)
    before = model.weight.detach().clone()

    def fail(grad: torch.Tensor) -> None:
        raise ReplicaFault("in a hook")

    def step(broken: bool) -> None:
        optimizer.zero_grad()
        y = model(torch.ones(1, 1))
        if broken and replica_id() == 1:
            y.register_hook(fail)
        y.sum().backward()
        optimizer.step()

    with pytest.raises(ReplicaFault, match="in a hook"):
        two.run(step, args=(True,))
    two.run(step, args=(False,))
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_backward_again_after_it_failed_in_the_same_run(two: Any) -> None:
    """Out of memory, a smaller batch, again: the second backward is reduced like any other."""
    model, _ = build(two)

    def step() -> torch.Tensor:
        x = torch.ones(1, 1, requires_grad=True)
        with contextlib.suppress(ReplicaFault):
            (model(x).sum() + RaisesInBackward.apply(x, ReplicaFault()).sum()).backward()
        model.zero_grad()
        (model(torch.ones(1, 1)).sum() * (1 + replica_id())).backward()
        grad = model.weight.grad
        assert grad is not None
        return grad.clone()

    assert [g.item() for g in two.run(step).values] == [1.5, 1.5]


@pytest.mark.parametrize("failing", [0, 1])
def test_raising_between_backward_and_step(two: Any, failing: int) -> None:
    model, optimizer = build(two)
    before = model.weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        if replica_id() == failing:
            raise ReplicaFault("before step")
        optimizer.step()

    with pytest.raises(ReplicaFault, match="before step"):
        two.run(step)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)


def test_raising_in_the_optimizer(two: Any) -> None:
    """One fails in its step, the other has not begun its own."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if replica_id() == 0:
                raise ReplicaFault("in step")
            return super().step(closure)

    with two.scope():
        model = torch.nn.Linear(1, 1)
    optimizer = Broken(model.parameters(), lr=0.1)
    with pytest.raises(ReplicaFault, match="in step"):
        two.run(lambda: train_step(model, optimizer))


def test_one_of_three_raises() -> None:
    with td.MirroredStrategy(THREE) as strategy:
        error = ReplicaFault()

        def step() -> None:
            all_reduce()
            if replica_id() == 2:
                raise error
            all_reduce()

        with pytest.raises(ReplicaFault) as caught:
            strategy.run(step)
        assert caught.value is error
        assert "replica 2 of 3" in error.__notes__[0]
        assert_usable(strategy)


def test_replicas_after_a_failed_one_do_not_start() -> None:
    started = []
    with td.MirroredStrategy(THREE) as strategy:

        def step() -> None:
            started.append(replica_id())
            if replica_id() == 1:
                raise ReplicaFault

        with pytest.raises(ReplicaFault):
            strategy.run(step)
        assert started == [0, 1]
        assert_usable(strategy)


def test_system_exit_of_a_replica_ends_the_run(two: Any) -> None:
    def step() -> None:
        if replica_id() == 1:
            raise SystemExit(3)
        all_reduce()

    with pytest.raises(SystemExit) as caught:
        two.run(step)
    assert caught.value.code == 3


# ---- a replica is stuck ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("meets", [False, True], ids=["others-return", "others-wait"])
def test_a_stuck_replica_is_abandoned(meets: bool, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def stuck_here() -> None:
        release.wait()

    def step() -> None:
        if replica_id() == 1:
            stuck_here()
        if meets:
            all_reduce()

    with td.MirroredStrategy(TWO) as strategy:
        try:
            with pytest.raises(DeadlineExceededError) as caught:
                strategy.run(step)
            assert "[1]" in str(caught.value)
            assert "in stuck_here" in str(caught.value)
            assert "abandoned" in caplog.text
            assert_usable_in_time(strategy)
        finally:
            release.set()


@pytest.mark.usefixtures("impatient")
def test_an_abandoned_replica_changes_nothing_when_it_wakes_up() -> None:
    release, awake, outcome = threading.Event(), threading.Event(), []
    with td.MirroredStrategy(TWO) as strategy:

        def step() -> None:
            if replica_id() == 1:
                try:
                    release.wait()
                    outcome.append("went on")
                    outcome.append(all_reduce())
                except BaseException as error:
                    outcome.append(type(error).__name__)
                    raise
                finally:
                    awake.set()

        with pytest.raises(DeadlineExceededError):
            strategy.run(step)
        release.set()
        assert awake.wait(20)
        assert outcome == ["ReplicaAborted"]
        assert_usable_in_time(strategy)


@pytest.mark.usefixtures("impatient")
def test_a_late_first_replica_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It runs in the caller's thread, so the error comes when its function returns."""
    with td.MirroredStrategy(TWO) as strategy:

        def step() -> None:
            all_reduce()  # after it replica 1 goes on first, and waits in the next one
            if replica_id() == 0:
                while "replica 0 did not come" not in caplog.text:
                    time.sleep(0.05)
            all_reduce()

        with pytest.raises(DeadlineExceededError, match=r"Replica\(s\) \[0\] of 2 did not come to all_reduce at"):
            strategy.run(step)
        assert_usable_in_time(strategy)


@pytest.mark.usefixtures("impatient")
def test_a_long_merge_call_is_no_missed_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """The joint work may take longer than a wait: all replicas are there."""
    with td.MirroredStrategy(TWO) as strategy:

        def save(strategy: Any) -> str:
            while "replica 0 is still busy with merge_call" not in caplog.text:
                time.sleep(0.05)
            return "saved"

        def step() -> Any:
            return merge(save)

        assert strategy.run(step) == "saved"


# ---- nesting, threads, processes ---------------------------------------------------------------------------


def test_run_inside_merge_call(two: Any) -> None:
    def outer() -> Any:
        return merge(lambda strategy: strategy.run(all_reduce, ()))

    assert two.run(outer).values == (2.0, 2.0)


def test_a_failure_in_a_run_inside_merge_call(two: Any) -> None:
    error = ReplicaFault("inside")

    def inner() -> None:
        if replica_id() == 1:
            raise error
        all_reduce()

    with pytest.raises(ReplicaFault) as caught:
        two.run(lambda: merge(lambda strategy: strategy.run(inner)))
    assert caught.value is error


def test_run_from_another_thread(two: Any) -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(two.run(all_reduce).values))
    thread.start()
    thread.join(30)
    assert results == [(2.0, 2.0)]


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    strategy = td.MirroredStrategy(THREE)
    strategy.run(all_reduce)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    strategy.close()
    for thread in own:
        thread.join(20)
        assert not thread.is_alive()


def test_fork_after_use(two: Any) -> None:
    two.run(all_reduce)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if two.run(all_reduce).values == (2.0, 2.0) else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + 30
    status: tuple[int, int] = (0, 0)
    while status[0] == 0 and time.monotonic() < end:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if status[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status[0] == child, "the child process hangs"
    assert os.waitstatus_to_exitcode(status[1]) == 0
