"""A worker that dies or stops during a checkpoint, a full disk, a read-only folder: the one before stays good."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.checkpoint import dcp
from tfstyle_dist.core.errors import PeerLostError
from tfstyle_dist.testing.runner import run_script
from tfstyle_dist.train import Checkpoint, CheckpointManager, latest_checkpoint

PROGRAM = Path(__file__).parent / "checkpoint_crashes.py"


def keeper_of(strategy: Any, folder: Path) -> CheckpointManager:
    with strategy.scope():
        model = torch.nn.Linear(3, 3)
    return CheckpointManager(Checkpoint(model=model, step=0), folder, 2)


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    """Killed at eight points, out of room (a limit on the size of files), in a folder that is read-only."""
    done = run_script([PROGRAM, tmp_path], env={"RANK": None, "WORLD_SIZE": None})
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    for point in ("full, block=True", "full, block=False"):
        told = results.pop(point)
        assert told["errno"] == errno.EFBIG
        assert "ckpt-2' was not written (those before it are untouched): File too large" in told["text"]
        assert (told["restored"], told["after"]) == (1, ["checkp", "ckpt-1", "ckpt-1"])
    told = results.pop("read-only")
    assert told["errno"] in (errno.EACCES, errno.EPERM)
    assert "ckpt-2' was not written (those before it are untouched): Permission denied" in told["text"]
    assert (told["restored"], told["after"]) == (1, ["checkp", "ckpt-1", "ckpt-1"])
    last = results.pop("before the old one is deleted")
    assert (last["code"], last["restored"], last["after"]) == (-9, 2, ["checkp", "ckpt-3", "ckpt-3"])
    assert len(results) == 7
    for point, told in results.items():
        assert told["code"] == -9, point
        assert told["left"] > 3, point  # something was left behind
        assert (told["restored"], told["after"]) == (1, ["checkp", "ckpt-2", "ckpt-2"]), point


@pytest.mark.slow
@pytest.mark.distributed(workers=3, timeout=90, deadline=20, may_die=(0, 2))
@pytest.mark.parametrize(("victim", "name"), [(2, "write_part"), (0, "join_parts")])
def test_a_worker_is_killed_while_it_saves(
    rank: int, ranks: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, name: str
) -> None:
    strategy = td.MirroredStrategy()
    keeper = keeper_of(strategy, shared_tmp_path)
    path = keeper.save()
    weight = keeper.checkpoint.model.weight.detach().clone()
    torch.nn.init.zeros_(keeper.checkpoint.model.weight)
    if rank == victim:
        monkeypatch.setattr(dcp, name, lambda *arguments: ranks.kill(victim))
    with pytest.raises(PeerLostError, match=rf"Worker {victim} is missing(.|\n)*Checkpoint\.save(.|\n)*MISSING, dead"):
        keeper.save()
    strategy.close()
    assert latest_checkpoint(shared_tmp_path) == path
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    alone = Checkpoint(model=torch.nn.Linear(3, 3), step=0)
    alone.restore(path).assert_consumed()
    assert torch.equal(alone.model.weight.detach(), weight)


@pytest.mark.slow
@pytest.mark.distributed(workers=2, timeout=90, deadline=8)
def test_a_worker_is_stopped_while_it_saves(
    rank: int, ranks: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with td.MirroredStrategy() as first:
        keeper_of(first, shared_tmp_path).save()  # loads torch.distributed.checkpoint
    strategy = td.MirroredStrategy()
    keeper = keeper_of(strategy, shared_tmp_path)
    path = keeper.latest_checkpoint
    write_part = dcp.write_part

    def stop(*arguments: Any) -> None:
        ranks.stop(1)
        write_part(*arguments)

    if rank == 1:
        monkeypatch.setattr(dcp, "write_part", stop)
        with pytest.raises((PeerLostError, TimeoutError, OSError)):  # resumed: the others have given up
            keeper.save()
        strategy.close()
        return
    try:
        with pytest.raises((PeerLostError, TimeoutError), match=r"Worker 1 is missing(.|\n)*stopped \(SIGSTOP\)"):
            keeper.save()
    finally:
        strategy.worker.group.abort()
        strategy.close()
        ranks.resume(1)
    # What the resumed worker still writes is removed by the next save of this name.
    assert latest_checkpoint(shared_tmp_path) == path


@pytest.mark.slow
@pytest.mark.distributed(workers=2, timeout=90, deadline=8, may_die=(0,))
def test_the_first_worker_dies_while_files_are_written_in_the_background(
    rank: int, ranks: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = td.MirroredStrategy()
    keeper = keeper_of(strategy, shared_tmp_path)
    path = keeper.save()
    if rank == 0:
        monkeypatch.setattr(dcp, "join_parts", lambda *arguments: ranks.kill(0))
    keeper.save(block=False)
    with pytest.raises(PeerLostError, match=r"Worker 0 is missing(.|\n)*Checkpoint\.sync"):
        keeper.sync()
    strategy.close()
    assert latest_checkpoint(shared_tmp_path) == path
