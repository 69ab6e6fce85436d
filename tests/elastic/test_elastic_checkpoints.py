"""Checkpoints of elastic jobs: one worker writes, the next one does if it dies, and other numbers of workers go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.timeout(600)
def test_a_checkpoint_is_whole_although_its_writer_dies_and_three_workers_go_on(run_job: Any, tmp_path: Path) -> None:
    (alone,) = run_job(1, "cnn", 8)
    assert alone["code"] == 0, alone["output"]
    folder = str(tmp_path / "saved")
    # Worker 0 dies while it writes the second checkpoint, and comes back: its manager has not seen that one.
    first = run_job(4, "cnn", 7, "0:6:save", restarts={0: 1}, CHECKPOINTS=folder, REJOIN="6")
    assert [worker["code"] for worker in first] == [0, 0, 0, 0], first
    assert [worker["result"]["saved"] for worker in first[1:]] == [["ckpt-1", "ckpt-2"]] * 3
    assert first[0]["result"]["joined"]
    second = run_job(3, "cnn", 8, CHECKPOINTS=folder)
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
