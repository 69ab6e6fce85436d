"""Checkpoints of elastic jobs: one worker writes, the next one does if it dies, and other numbers of workers go on."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tfstyle_dist as tfd
from tfstyle_dist.checkpoint.restoring import restore
from tfstyle_dist.checkpoint.tracking import find_leaves
from tfstyle_dist.strategies.elastic import ElasticGroup
from tfstyle_dist.train import Checkpoint, RandomState


@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", ["Adam", "tf-adam"])
def test_a_checkpoint_is_whole_although_its_writer_dies_and_three_workers_go_on(
    run_job: Any, tmp_path: Path, optimizer: str
) -> None:
    (alone,) = run_job(1, "cnn", 8, OPTIMIZER=optimizer)
    assert alone["code"] == 0, alone["output"]
    folder = str(tmp_path / "saved")
    # Worker 0 dies while it writes the second checkpoint, and comes back: its manager has not seen that one.
    first = run_job(4, "cnn", 7, "0:6:save", restarts={0: 1}, CHECKPOINTS=folder, REJOIN="6", OPTIMIZER=optimizer)
    assert [worker["code"] for worker in first] == [0, 0, 0, 0], first
    assert [worker["result"]["saved"] for worker in first[1:]] == [["ckpt-1", "ckpt-2"]] * 3
    assert first[0]["result"]["joined"]
    second = run_job(3, "cnn", 8, CHECKPOINTS=folder, OPTIMIZER=optimizer)
    for worker in second:
        assert worker["code"] == 0, worker["output"]
        assert worker["result"]["first"] == 6
        assert worker["result"]["weights"] == alone["result"]["weights"]
        assert worker["result"]["losses"] == alone["result"]["losses"][6:]
        assert worker["result"]["seen"][:-1] == alone["result"]["seen"][:-1]


@pytest.mark.timeout(600)
def test_the_number_of_a_checkpoint_goes_on_on_a_worker_that_came_back(run_job: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    job = run_job(2, "mlp", 9, "0:4:forward", restarts={0: 1}, CHECKPOINTS=folder, REJOIN="5", WORKERS="2")
    assert [worker["code"] for worker in job] == [0, 0], job
    assert job[0]["result"]["joined"]
    assert [worker["result"]["saved"] for worker in job] == [["ckpt-2", "ckpt-3"]] * 2
    assert sorted(path.name for path in Path(folder).glob("ckpt-*.index*")) == ["ckpt-2.index", "ckpt-3.index"]


@pytest.mark.timeout(600)
def test_a_worker_that_came_back_saves_when_the_others_do(run_job: Any, tmp_path: Path) -> None:
    """It has seen none of the saves: all go by the last one that some worker knows, here of step 3; 6 is too early."""
    folder = str(tmp_path / "saved")
    job = run_job(2, "mlp", 12, "0:4:forward", restarts={0: 1}, CHECKPOINTS=folder, EVERY="5", REJOIN="5", WORKERS="2")
    assert [worker["code"] for worker in job] == [0, 0], job
    assert job[0]["result"]["joined"]
    assert [worker["result"]["saved"] for worker in job] == [["ckpt-1", "ckpt-2"]] * 2


@pytest.mark.timeout(60)
def test_a_manager_that_missed_a_save_knows_of_it(tmp_path: Path) -> None:
    """As on a worker that came back; with its own list it would restore another checkpoint than the others."""
    with tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=2)) as strategy:
        with strategy.scope():
            checkpoint = Checkpoint(count=tfd.Variable(0))
        others, late = (tfd.train.CheckpointManager(checkpoint, tmp_path, 2) for _ in range(2))
        path = others.save()
        assert (late.latest_checkpoint, late.checkpoints) == (path, [path])
        path = others.save()
        assert strategy.run(lambda: late.latest_checkpoint) != path  # a replica sees what was known
        assert late.restore_or_initialize() == path
        (tmp_path / "checkpoint").write_text("damaged")
        assert (others.latest_checkpoint, late.latest_checkpoint) == (path, path)


@pytest.mark.timeout(60)
def test_every_worker_gets_random_numbers_of_its_own(tmp_path: Path) -> None:
    """What one worker wrote for all, the job's workers restore."""
    torch.manual_seed(1)
    path = Checkpoint(random=RandomState()).save(tmp_path / "ckpt")
    expected = float(torch.rand(()))
    leaves = find_leaves({"random": RandomState()}, {}, lambda name, value: None)
    drawn = []
    for number in range(3):
        group = ElasticGroup()
        group.job = SimpleNamespace(membership=SimpleNamespace(me=number, is_member=False))  # type: ignore[assignment]
        restore(group, path, leaves, ("save_counter",), "Checkpoint.restore").expect_partial()
        drawn.append((float(torch.rand(())), random.random()))
    assert drawn[0][0] == expected
    assert len(set(drawn)) == 3


class _Drawing:
    """A job of four replicas whose steps draw, and its checkpoint."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.strategy = tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=4))
        with self.strategy.scope():
            self.checkpoint = Checkpoint(count=tfd.Variable(0), random=RandomState())

    def draw(self, steps: int) -> list[list[float]]:
        return [[float(own) for own in self.strategy.run(lambda: torch.rand(())).values] for _ in range(steps)]


@pytest.mark.timeout(60)
def test_the_numbers_of_the_steps_go_on_after_a_restore(tmp_path: Path) -> None:
    job = _Drawing(1)
    with job.strategy:
        job.draw(2)
        path = job.checkpoint.save(tmp_path / "ckpt")
        expected = job.draw(3)
        job.checkpoint.restore(path)
        assert job.draw(1) == expected[:1]
        again = job.checkpoint.save(tmp_path / "ckpt")
    job = _Drawing(9)
    with job.strategy:
        job.checkpoint.restore(path).assert_consumed()
        assert job.draw(3) == expected
        job.checkpoint.restore(again).assert_consumed()
        assert job.draw(2) == expected[1:]
