"""Random numbers after a restore: the streams of all replicas of a process go on where they were."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.train import Checkpoint, RandomState


class Job:
    """A strategy whose replicas draw; a checkpoint of its random numbers."""

    def __init__(self, replicas: int = 2, seed: int | None = 7, python: bool = False) -> None:
        self.strategy = td.MirroredStrategy([f"cpu:{r}" for r in range(replicas)])
        if seed is not None:
            self.strategy.seed_replicas(seed, python=python)
        with self.strategy.scope():
            model = torch.nn.Linear(1, 1)
        self.checkpoint = Checkpoint(model=model, random=RandomState())

    def draw(self) -> list[Any]:
        def numbers() -> tuple[float, float, float]:
            return float(torch.rand(())), random.random(), float(np.random.random())

        return list(self.strategy.experimental_local_results(self.strategy.run(numbers)))


@pytest.mark.parametrize("in_scope", [True, False])
@pytest.mark.parametrize("seed", [7, 8, None])
def test_seeded_streams_go_on(tmp_path: Path, seed: int | None, in_scope: bool) -> None:
    job = Job()
    for _ in range(3):
        job.draw()
    with job.strategy.scope():
        path = job.checkpoint.write(tmp_path / "ckpt")
    expected = [job.draw() for _ in range(2)]
    assert expected[0][0][0] != expected[0][1][0]
    job = Job(seed=seed)
    if in_scope:
        with job.strategy.scope():
            job.checkpoint.restore(path).assert_consumed()
    else:
        job.checkpoint.restore(path).assert_consumed()
    for numbers in expected:
        assert [own[0] for own in job.draw()] == [own[0] for own in numbers]


def test_streams_of_python_and_numpy(tmp_path: Path) -> None:
    job = Job(python=True)
    job.draw()
    path = job.checkpoint.write(tmp_path / "ckpt")
    expected = job.draw()
    job = Job(seed=1, python=True)
    job.checkpoint.restore(path).assert_consumed()
    assert job.draw() == expected


def test_another_number_of_replicas_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Job().checkpoint.write(tmp_path / "ckpt")
    expected = Job().draw()
    job = Job(replicas=3)
    job.checkpoint.restore(path).assert_consumed()
    assert "seeded random streams of 2 replicas for this worker, which has 3 now" in caplog.text
    assert job.draw()[0][0] == expected[0][0]


def test_streams_that_were_not_seeded_are_not_saved(tmp_path: Path) -> None:
    job = Job(seed=None)
    job.draw()
    path = job.checkpoint.write(tmp_path / "ckpt")
    expected = [own[0] for own in job.draw()]
    job = Job(seed=None)
    job.checkpoint.restore(path).assert_consumed()
    assert [own[0] for own in job.draw()] == expected
