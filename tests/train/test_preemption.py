"""A worker that is told to end: all save at the same step, exit or go on, and restart from there."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.experimental import PreemptionCheckpointHandler, PreemptionWatcher, TerminationConfig
from tfstyle_dist.testing.runner import run_script
from tfstyle_dist.train import Checkpoint, CheckpointManager, preemption, preemption_watch

two = pytest.mark.distributed(workers=2, timeout=60, deadline=20)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)  # Python runs the handler between two instructions


@pytest.fixture(autouse=True)
def _signal_handler() -> Any:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a watcher of a test before may still be installed
    yield
    signal.signal(signal.SIGTERM, before)


class Job:
    """A counter, a handler that saves it, and what happened."""

    def __init__(self, folder: Path, manager: bool = True, **config: Any) -> None:
        self.checkpoint = Checkpoint(steps=0)
        self.exits: list[int] = []
        config = {"exit_fn": lambda: self.exits.append(self.checkpoint.steps), **config}
        target: Any = CheckpointManager(self.checkpoint, folder, 3) if manager else self.checkpoint
        self.handler = PreemptionCheckpointHandler(
            None, target, None if manager else folder, TerminationConfig(**config)
        )

    def run(self, calls: int = 1) -> None:
        for _ in range(calls):
            self.handler.run(self.step)

    def step(self) -> None:
        self.checkpoint.steps += 1


@pytest.mark.parametrize("manager", [True, False])
def test_sigterm(tmp_path: Path, manager: bool) -> None:
    job = Job(tmp_path, manager)
    job.run(2)
    terminate()
    job.run()
    assert job.exits == []
    job.run(2)
    assert job.exits == [3]  # once, and then it went on
    assert (job.checkpoint.steps, job.handler.total_run_calls) == (5, 5)
    terminate()
    job.run(2)
    assert job.exits == [3, 6]
    again = Job(tmp_path, manager)
    assert (again.checkpoint.steps, again.handler.total_run_calls) == (6, 6)
    assert len(list(tmp_path.glob("*.index"))) == (2 if manager else 1)


def test_a_function_that_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption_watch, "_POLL_SECONDS", 0.01)
    told = threading.Event()
    answers: list[bool] = []

    def watch() -> bool:
        answers.append(told.is_set())
        return answers[-1]

    def wait_for_two(answer: bool) -> None:
        """The first of them has been dealt with when the second is given."""
        answers.clear()
        while answers.count(answer) < 2:
            time.sleep(0.01)

    job = Job(tmp_path, termination_watcher_fn=watch)
    job.run()
    told.set()
    while not job.exits:
        job.run()
        time.sleep(0.01)
    wait_for_two(True)
    job.run(5)
    assert len(job.exits) == 1  # it stays true: no second time
    told.clear()
    wait_for_two(False)
    told.set()
    while len(job.exits) < 2:
        job.run()
        time.sleep(0.01)


def test_a_function_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, termination_watcher_fn=lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="termination_watcher_fn raised ZeroDivisionError"):
        job.run(10**6)


def test_a_save_function_and_its_arguments(tmp_path: Path) -> None:
    calls: list[Any] = []
    job = Job(tmp_path, save_fn=lambda *args, **kwargs: calls.append((args, kwargs)))
    with job.handler.watch_preemption_scope():
        for step in range(4):
            if step == 1:
                terminate()
            job.handler.save_checkpoint_if_preempted(step, name="x")
    assert calls == [((2,), {"name": "x"})]
    assert len(job.exits) == 1


def test_a_notice_in_the_last_step(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.handler.watch_preemption_scope():
        job.handler.save_checkpoint_if_preempted()
        terminate()
    assert len(job.exits) == 1
    assert len(list(tmp_path.glob("*.index"))) == 1
    terminate()
    with pytest.raises(ZeroDivisionError) as caught, job.handler.watch_preemption_scope():
        1 / 0  # noqa: B018
    assert "had been told to end" in caught.value.__notes__[0]


class Clock:
    """Stands for the module ``time`` and goes by hand; a step takes 1 s by it, and a save 3 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.sleep = time.sleep
        for module in (preemption, preemption_watch):
            monkeypatch.setattr(module, "time", self)
        for owner, name, seconds in ((Job, "step", 1.0), (CheckpointManager, "save", 3.0)):
            monkeypatch.setattr(owner, name, self.taking(seconds, getattr(owner, name)))

    def monotonic(self) -> float:
        return self.now

    def taking(self, seconds: float, function: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return function(*args, **kwargs)

        return slow


def test_a_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    job = Job(tmp_path, grace_period=60.0)
    job.run()
    terminate()
    told = clock.now
    job.run(2)
    assert len(list(tmp_path.glob("*.index"))) == 1  # at once
    assert job.exits == []
    while not job.exits:
        job.run()
        assert clock.now < told + 100
    assert len(list(tmp_path.glob("*.index"))) == 2  # and shortly before the end
    # Twice two steps and a save were held back, of which one step and the save were needed.
    assert told + 60 - 10 <= clock.now <= told + 60
    assert job.exits[0] > 40


def test_exceptions_pass_and_do_not_count(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(KeyError):
        job.handler.run({}.__getitem__, "missing")
    assert job.handler.total_run_calls == 0
    assert job.handler.run(lambda a, b: a + b, 1, b=2) == 3


def test_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs a checkpoint_dir"):
        PreemptionCheckpointHandler(None, Checkpoint())
    with pytest.raises(TypeError, match="takes a Checkpoint or a CheckpointManager"):
        PreemptionCheckpointHandler(None, torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    errors: list[ValueError] = []

    def elsewhere() -> None:
        try:
            PreemptionWatcher()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread only" in str(errors[0])


def test_a_watcher() -> None:
    watcher = PreemptionWatcher()
    assert watcher.preemption_message is None
    terminate()
    assert f"SIGTERM for process {os.getpid()}" in str(watcher.preemption_message)
    watcher.block_until_worker_exit()


def test_afterwards_a_signal_does_what_it_did_before() -> None:
    gc.collect()  # the jobs of the tests before
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    watcher: Any = PreemptionWatcher()
    terminate()
    assert got == []
    del watcher
    terminate()
    assert got == [signal.SIGTERM]


@two
@pytest.mark.parametrize("preempted", [0, 1])
def test_all_workers_stop_at_the_same_step(rank: int, shared_tmp_path: Path, preempted: int) -> None:
    def job() -> tuple[Any, Any, list[int]]:
        exits: list[int] = []
        strategy = td.MirroredStrategy()
        with strategy.scope():
            steps = td.Variable(0.0, aggregation=td.VariableAggregation.MEAN)
        manager = CheckpointManager(Checkpoint(steps=steps), shared_tmp_path, 1)
        config = TerminationConfig(exit_fn=lambda: exits.append(int(steps.value())))
        handler = PreemptionCheckpointHandler(None, manager, termination_config=config)

        def step() -> None:
            if rank == preempted and int(steps.value()) == 2:
                terminate()
            strategy.run(lambda: steps.assign_add(torch.tensor(1.0)))

        return strategy, lambda: handler.run(step), exits

    strategy, step, exits = job()
    with strategy:
        while not exits:
            step()
        assert strategy.worker.group.gather_objects(exits, "exits") == [[4], [4]]
    strategy, step, exits = job()
    with strategy:
        step()
        assert exits == []
        assert (shared_tmp_path / "ckpt-1.index").exists()


SCRIPT = """
import os, signal, sys
import torch
import tfstyle_dist as td
from tfstyle_dist.experimental import PreemptionCheckpointHandler

with td.MirroredStrategy() as strategy:
    with strategy.scope():
        done = td.Variable(0.0, aggregation=td.VariableAggregation.MEAN)
    handler = PreemptionCheckpointHandler(None, td.train.Checkpoint(done=done), sys.argv[1])
    print("start at", handler.total_run_calls, flush=True)
    while handler.total_run_calls < 6:
        if handler.total_run_calls == 3 and strategy.is_chief and len(sys.argv) > 2:
            os.kill(os.getpid(), signal.SIGTERM)
        handler.run(strategy.run, lambda: done.assign_add(torch.tensor(1.0)))
    print("end at", handler.total_run_calls, float(done.value()), flush=True)
"""


@pytest.mark.slow
def test_exit_code_and_restart(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    first = run_script([script, tmp_path / "saved", "terminate"])
    assert first.returncode == 143, first.stderr
    assert first.stdout == "start at 0\n"
    second = run_script([script, tmp_path / "saved"])
    assert second.returncode == 0, second.stderr
    assert second.stdout == "start at 4\nend at 6 6.0\n"
