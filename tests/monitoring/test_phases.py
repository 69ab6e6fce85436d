"""Phases exclude each other and add up to the step, on every strategy and kind of optimizer; counted by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.monitoring import Report
from tfstyle_dist.runtime.clocks import COMPUTE, INPUT, PHASES, STOPPED, WAIT, Clock

STEPS = 4


class Batches:
    """A dataset whose every batch takes a second."""

    def __init__(self, advance: Callable[[float], None], count: int) -> None:
        self._advance, self._count = advance, count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._count):
            self._advance(1.0)
            yield torch.ones(4, 2)


class SlowSGD(torch.optim.SGD):
    """An optimizer whose step takes half a second where it is made: in threads only the first replica makes it."""

    advance: Callable[[float], None]

    def step(self, closure: Any = None) -> Any:
        """See ``SGD``."""
        loss = super().step(closure)
        context = tfd.get_replica_context()
        assert context is not None
        if context.local_replica_id == 0:
            self.advance(0.5)
        return loss


class SlowTFStyle(tfd.train.GradientDescentOptimizer):
    """The same for a TF-style optimizer."""

    advance: Callable[[float], None]

    def begin_step(self) -> None:
        """See ``TFOptimizer``."""
        self.advance(0.5)


def train(strategy: tfd.Strategy, time: Any, tf_style: bool, closure: bool = False) -> Report:
    """A few steps in which each phase takes a known time; on replica 0, or on all ranks alike."""
    with strategy.scope():
        model = nn.Linear(2, 1)
    optimizer: Any = SlowTFStyle(0.1) if tf_style else SlowSGD(model.parameters(), lr=0.1)
    optimizer.advance = time.advance
    in_threads = strategy.extended.worker.num_local_replicas > 1

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        context = tfd.get_replica_context()
        assert context is not None

        def loss_of_batch() -> torch.Tensor:
            if not in_threads or context.replica_id_in_sync_group == 1:
                time.advance(2.0)
            loss = model(batch).square().mean()
            if not tf_style:
                optimizer.zero_grad()
                loss.backward()
            return loss

        if tf_style:
            loss = loss_of_batch()
            optimizer.minimize(loss, var_list=list(model.parameters()))
        elif closure:
            loss = optimizer.step(loss_of_batch)
        else:
            loss = loss_of_batch()
            optimizer.step()
        return loss.detach()

    for batch in strategy.experimental_distribute_dataset(Batches(time.advance, STEPS + 1)):
        losses = strategy.run(train_step, args=(batch,))
        strategy.reduce("MEAN", losses, axis=None)
        time.advance(0.25)
    return strategy.report(quiet=True)


@pytest.mark.parametrize("form", ["closure", "plain", "tf"])
def test_one_replica(time_by_hand: Any, form: str) -> None:
    with tfd.OneDeviceStrategy("cpu:0") as strategy:
        report = train(strategy, time_by_hand, form == "tf", form == "closure")
    assert (report.function, report.steps, report.step_seconds) == ("train_step", STEPS, 3.75)
    assert (report.mean("input"), report.mean("other")) == (1.0, 0.25)
    # Nothing of a plain optimizer is hooked when there is one replica.
    split = (report.mean("compute"), report.mean("update"))
    assert split == ((2.0, 0.5) if form == "tf" else (2.5, 0.0))


def check_two_replicas(report: Report, ranks: bool, closure: bool = False) -> None:
    assert (report.steps, len(report.replicas)) == (STEPS, 2)
    assert report.step_seconds == 3.75
    for replica in report.replicas:
        assert sum(replica.seconds) == report.step_seconds
        times = dict(zip(PHASES, replica.seconds, strict=True))
        assert (times["input"], times["other"]) == (1.0, 0.25)
        if ranks:
            assert (times["compute"], times["update"]) == (2.0, 0.5)
            assert times["wait"] == times["communication"] == 0
        elif replica.replica == 0:
            assert times["compute"] + times["wait"] + times["communication"] + times["update"] == 2.5
            # A step with a closure has begun its update when the other thread moves the time, or not yet.
            assert times["update"] >= 0.5 if closure else times["update"] == 0.5
        else:
            # Its thread may be anywhere when the first one moves the time.
            assert times["compute"] >= 2.0


@pytest.mark.parametrize("form", ["closure", "plain", "tf"])
def test_two_replicas_in_threads(time_by_hand: Any, form: str) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        report = train(strategy, time_by_hand, form == "tf", form == "closure")
    check_two_replicas(report, ranks=False, closure=form == "closure")


@pytest.mark.parametrize("kind", ["memory", "sockets", "central"])
@pytest.mark.parametrize("form", ["closure", "plain", "tf"])
@pytest.mark.distributed(workers=2)
def test_two_ranks(time_by_hand: Any, kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "sockets":
        monkeypatch.setenv("TFSTYLE_SHARED_MEMORY", "0")
    made = tfd.experimental.CentralStorageStrategy if kind == "central" else tfd.MirroredStrategy
    with made() as strategy:
        report = train(strategy, time_by_hand, form == "tf", form == "closure")
        check_two_replicas(report, ranks=True)
        assert [r.worker for r in report.replicas] == [0, 1]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.distributed(workers=2)
def test_who_stands_still_for_a_late_worker_waits(late: int) -> None:
    """Where gradients are summed in shared memory; what it waited there is not counted as communication."""
    with tfd.MirroredStrategy() as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)

        def step() -> None:
            if strategy.worker.group.rank == late:
                time.sleep(0.05)
            model(torch.ones(1, 2)).sum().backward()

        for _ in range(STEPS + 1):
            strategy.run(step)
        report = strategy.report(quiet=True)
    times = [dict(zip(PHASES, replica.seconds, strict=True)) for replica in report.replicas]
    assert times[1 - late]["wait"] > 0.03
    assert times[late]["compute"] > 0.045
    assert all(seconds >= 0 for phases in times for seconds in phases.values())


def test_a_step_that_raises_does_not_count(time_by_hand: Any) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:

        def work(fail: bool) -> None:
            context = tfd.get_replica_context()
            assert context is not None
            if context.replica_id_in_sync_group == 1:
                time_by_hand.advance(1.0)
                if fail:
                    raise ValueError("on purpose")
            context.all_reduce("SUM", torch.ones(1))

        for fail in (False, False, True, False):
            if fail:
                with pytest.raises(ValueError, match="on purpose"):
                    strategy.run(work, args=(fail,))
            else:
                strategy.run(work, args=(fail,))
        report = strategy.report(quiet=True)
    assert (report.steps, report.step_seconds) == (2, 1.0)
    assert [sum(r.seconds) for r in report.replicas] == [1.0, 1.0]


def test_blocks_without_run(time_by_hand: Any) -> None:
    with tfd.OneDeviceStrategy("cpu:0") as strategy:
        monitor = strategy.monitor
        for _ in range(3):
            with monitor.phase("input"):
                time_by_hand.advance(1.0)
            with monitor.step("mine"):
                time_by_hand.advance(2.0)
                with monitor.step("inside"), monitor.phase("update"):
                    time_by_hand.advance(0.5)
        report = strategy.report("mine", quiet=True)
        assert [report.mean(p) for p in ("input", "compute", "update")] == [1.0, 2.0, 0.5]
        with pytest.raises(ValueError, match="There is no phase 'lunch'; the phases are input, compute"):
            monitor.phase("lunch").__enter__()


def test_off_and_on(time_by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_MONITOR", "0")
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        work = lambda: time_by_hand.advance(1.0)  # noqa: E731
        for _ in range(3):
            strategy.run(work)
        assert strategy.worker.clocks == [STOPPED, STOPPED]
        assert "monitor is off" in str(strategy.report(quiet=True))
        strategy.monitor.enabled = True
        for _ in range(3):
            strategy.run(work)
        assert strategy.report(quiet=True).steps == 2
        strategy.monitor.reset()
        time_by_hand.advance(100.0)
        strategy.monitor.reset()
        strategy.run(work)
        report = strategy.report(quiet=True)
        assert (report.steps, report.step_seconds) == (1, 2.0), "the function is known: its next call counts"


def test_after_the_first_steps_every_seventh_is_measured(time_by_hand: Any) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        context = lambda: tfd.get_replica_context().local_replica_id  # type: ignore[union-attr]  # noqa: E731

        def train_step(seconds: float) -> None:
            if context() == 0:
                time_by_hand.advance(seconds)

        for number in range(66 + 70):
            time_by_hand.advance(0.5)
            strategy.run(train_step, args=(1.0,))
            if number > 64:
                assert (strategy.worker.clocks[0] is STOPPED) == ((number - 64) % 7 != 6), number
        report = strategy.report(quiet=True)
        assert (report.calls, report.steps, report.step_seconds) == (136, 64 + 10, 1.5)
        assert [sum(r.seconds) for r in report.replicas] == [1.5, 1.5]
        for _ in range(3):  # a function that is new meanwhile
            strategy.run(lambda: time_by_hand.advance(4.0) if context() == 0 else None)
        assert strategy.report(quiet=True).others[0][1:] == (3, 4.0)
        with pytest.raises(TypeError, match="seconds"):
            strategy.run(train_step)
        assert strategy.report("train_step", quiet=True).calls == 136, "a step that raises does not count"
        strategy.monitor.every = 1
        for _ in range(20):
            strategy.run(train_step, args=(1.0,))
        assert strategy.report(quiet=True).steps >= 74 + 13


def test_an_unbalanced_clock_heals(time_by_hand: Any) -> None:
    clock = Clock()
    clock.enter(COMPUTE)
    clock.enter(WAIT)  # and the exception that skips leave()
    time_by_hand.advance(1.0)
    first = clock.cut(INPUT)
    clock.leave()
    clock.leave()
    time_by_hand.advance(2.0)
    assert (first[WAIT], sum(first)) == (1.0, 1.0)
    assert sum(clock.since([0.0] * 7)) == 2.0
