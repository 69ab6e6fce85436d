"""Checkpoints of several workers: saved together, restored by another number of them, misuse named."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.checkpoint import dcp, files
from tfstyle_dist.core.errors import CollectiveMismatchError, DataLossError, PeerLostError
from tfstyle_dist.train import Checkpoint, CheckpointManager, RandomState, latest_checkpoint

two = pytest.mark.distributed(workers=2, timeout=60, deadline=20)
READ, SUM = td.VariableSynchronization.ON_READ, td.VariableAggregation.SUM


def build(strategy: Any) -> tuple[Checkpoint, Any]:
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        seen = td.Variable(0.0, synchronization=READ, aggregation=SUM)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        seen.assign_add(torch.tensor(float(len(x))))

    loader = torch.utils.data.DataLoader(torch.randn(48, 3), batch_size=12, shuffle=True)
    batches = iter(strategy.experimental_distribute_dataset(loader))
    checkpoint = Checkpoint(model=model, optimizer=optimizer, seen=seen, batches=batches, step=0)

    def train(steps: int = 1) -> None:
        for _ in range(steps):
            strategy.run(step, args=(next(batches),))
            checkpoint.step += 1

    return checkpoint, train


def parameters(checkpoint: Checkpoint) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(checkpoint.model.parameters()).detach()


@pytest.mark.distributed(workers=3, timeout=90, deadline=30)
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_three_workers_save_one_restores(
    rank: int, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    with td.MirroredStrategy([f"cpu:{r}" for r in range(replicas)]) as strategy:
        checkpoint, train = build(strategy)
        train(2)
        path = checkpoint.save(shared_tmp_path / "ckpt")
        weights = parameters(checkpoint)
        train(2)
        last = parameters(checkpoint)
        assert not torch.equal(weights, last)
        checkpoint.restore(path).assert_consumed()
        assert checkpoint.step == 2
        assert torch.equal(parameters(checkpoint), weights)
        assert float(checkpoint.seen.value()) == pytest.approx(24.0)
        train(2)  # with the means of the statistics in place of each replica's own: not bit for bit the same
        torch.testing.assert_close(parameters(checkpoint), last, rtol=0.05, atol=0.01)
    content = files.read_index(path)
    written = {name.partition("/")[0] for name in content["files"]}
    assert written == {".metadata", "part-0", "part-1", "part-2"}
    assert content["saved"]["workers"] == 3
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        checkpoint, train = build(strategy)
        checkpoint.restore(path).assert_consumed()
        assert torch.equal(parameters(checkpoint), weights)
        assert [float(v) for v in strategy.experimental_local_results(checkpoint.seen)] == pytest.approx([12.0, 12.0])
        train(2)
        assert float(checkpoint.seen.value()) == pytest.approx(48.0)
        assert not list(checkpoint.batches)  # the epoch is over


@two
def test_every_worker_has_random_numbers_of_its_own(rank: int, shared_tmp_path: Path) -> None:
    torch.manual_seed(rank)
    random.seed(rank)
    with td.MirroredStrategy() as strategy, strategy.scope():
        checkpoint = Checkpoint(random=RandomState())
        path = checkpoint.save(shared_tmp_path / "ckpt")
        drawn = [float(torch.rand(())), random.random()]
        everyone = strategy.worker.group.gather_objects(drawn, "drawn")
        assert everyone[0] != everyone[1]
        checkpoint.restore(path).assert_consumed()
        assert [float(torch.rand(())), random.random()] == drawn


@two
def test_a_new_worker_gets_random_numbers_of_its_own(rank: int, shared_tmp_path: Path) -> None:
    if rank == 0:
        checkpoint = Checkpoint(random=RandomState())
        with td.OneDeviceStrategy("cpu").scope():
            checkpoint.save(shared_tmp_path / "ckpt")
    with td.MirroredStrategy() as strategy, strategy.scope():
        strategy.worker.group.gather_objects(None, "saved")
        Checkpoint(random=RandomState()).restore(shared_tmp_path / "ckpt-1")
        first, second = strategy.worker.group.gather_objects(float(torch.rand(())), "drawn")
        assert first != second


@two
def test_in_the_background(rank: int, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        checkpoint, train = build(strategy)
        manager = CheckpointManager(checkpoint, shared_tmp_path, 1)
        train()
        weights = parameters(checkpoint)
        manager.save(block=False)
        train()
        manager.sync()
        assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1"]
        path = manager.save(block=False)
        assert Path(str(manager.latest_checkpoint)).name == "ckpt-1"  # the same on all, whoever is faster
        later = parameters(checkpoint)
        train()
        checkpoint.restore(path).assert_consumed()  # waits for the one under way
        assert manager.latest_checkpoint == path
        assert torch.equal(parameters(checkpoint), later)
        assert not torch.equal(weights, later)
    assert len(list(shared_tmp_path.glob("*.index"))) == 1


# ---- a worker that cannot write -----------------------------------------------------------------------------------


@two
def test_one_worker_cannot_copy_what_is_written_in_the_background(
    rank: int, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = torch.Tensor.to

    def no_memory(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if rank == 1 and "copy" in keywords:
            raise torch.OutOfMemoryError("no memory left")
        return to(tensor, *arguments, **keywords)

    with td.MirroredStrategy() as strategy:
        with strategy.scope():
            checkpoint = Checkpoint(model=torch.nn.Linear(2, 2))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", no_memory)
            with pytest.raises(RuntimeError, match="no memory left"):
                checkpoint.save(shared_tmp_path / "ckpt", block=False)
        assert rank or list(shared_tmp_path.glob("ckpt*")) == []  # worker 0 makes and removes the folder
        path = checkpoint.save(shared_tmp_path / "ckpt", block=False)
        checkpoint.sync()
        checkpoint.restore(path).assert_consumed()


def no_space(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/data/part")


@two
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("block", [True, False])
def test_one_worker_cannot_write(
    rank: int, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int, block: bool
) -> None:
    with td.MirroredStrategy() as strategy:
        checkpoint, train = build(strategy)
        manager = CheckpointManager(checkpoint, shared_tmp_path, 2)
        path = manager.save()
        with monkeypatch.context() as patch:
            if rank == broken:
                patch.setattr(dcp, "write_part", no_space)
            save = manager.save if block else lambda: (manager.save(block=False), manager.sync())
            with pytest.raises(OSError, match=rf"ckpt-2' was not written .*on worker {broken}: No space") as caught:
                save()
            assert caught.value.errno == errno.ENOSPC
        assert manager.latest_checkpoint == path
        assert latest_checkpoint(shared_tmp_path) == path
        train()  # all know of it, so all can go on
        assert manager.save() is not None
    assert not [entry for entry in shared_tmp_path.iterdir() if entry.name.endswith(files.UNFINISHED)]


@two
def test_the_folder_cannot_be_made(rank: int, shared_tmp_path: Path) -> None:
    (shared_tmp_path / "file").write_text("")
    with td.MirroredStrategy() as strategy:
        checkpoint, _ = build(strategy)
        with pytest.raises(OSError, match=r"on worker 0: (File exists|Not a directory)"):
            checkpoint.save(shared_tmp_path / "file" / "ckpt")


@two
def test_a_state_that_cannot_be_saved(rank: int, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        checkpoint, train = build(strategy)
        checkpoint.step = (lambda: 0) if rank == 1 else 0
        with pytest.raises(TypeError, match=r"on worker 1: step is a builtins\.function"):
            checkpoint.save(shared_tmp_path / "ckpt")
        checkpoint.step = 0
        train()
    assert list(shared_tmp_path.iterdir()) == []


# ---- workers that do not do the same ------------------------------------------------------------------------------


@two
def test_a_worker_saves_something_else(rank: int, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        checkpoint, _ = build(strategy)
        checkpoint.extra = torch.zeros(2 + rank)
        with pytest.raises(CollectiveMismatchError, match=r"(?s)worker 0: .*tensors of model.*worker 1: "):
            checkpoint.save(shared_tmp_path / "ckpt")
        del checkpoint.extra
        with pytest.raises(
            CollectiveMismatchError, match=r"(?s)worker 0: .*name0-1.*worker 1: .*name1-1.*All give one path"
        ):
            checkpoint.save(shared_tmp_path / f"name{rank}")
        with pytest.raises(CollectiveMismatchError, match=r"(?s)same call, Checkpoint\.write:.*name0.*name1"):
            checkpoint.write(shared_tmp_path / f"name{rank}")
        checkpoint.save(shared_tmp_path / "ckpt")


@two
def test_the_chief_alone_saves(rank: int, shared_tmp_path: Path) -> None:
    strategy = td.MirroredStrategy()
    checkpoint, train = build(strategy)
    with pytest.raises((CollectiveMismatchError, PeerLostError)) as caught:
        checkpoint.save(shared_tmp_path / "ckpt") if strategy.is_chief else train()
    assert "Checkpoint.save" in str(caught.value)
    assert __file__ in str(caught.value)
    strategy.close()


@two
def test_a_worker_does_not_find_the_checkpoint(rank: int, shared_tmp_path: Path) -> None:
    with td.MirroredStrategy() as strategy:
        checkpoint, train = build(strategy)
        path = checkpoint.save(shared_tmp_path / "ckpt")
        mine = path if rank == 0 else str(shared_tmp_path / "elsewhere" / "ckpt-1")
        with pytest.raises(LookupError, match=r"was not restored .* on worker 1: There is no checkpoint .*elsewhere"):
            checkpoint.restore(mine)
        train()


@two
def test_a_worker_finds_a_damaged_file(rank: int, shared_tmp_path: Path) -> None:
    """Each file's checksum is read by one worker; all hear of it."""
    with td.MirroredStrategy() as strategy:
        checkpoint, _ = build(strategy)
        path = checkpoint.save(shared_tmp_path / "ckpt")
        content = files.read_index(path)
        strategy.worker.group.gather_objects(None, "read")
        for number, name in enumerate(sorted(content["files"])):
            file = files.data_folder(path, content) / name
            whole = file.read_bytes()
            strategy.worker.group.gather_objects(None, "read")
            if rank == 0:
                file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            strategy.worker.group.gather_objects(None, "damaged")
            with pytest.raises(DataLossError, match=rf"on worker {number % 2}: .*checksum of .*{name} is wrong"):
                checkpoint.restore(path)
            if rank == 0:
                file.write_bytes(whole)
            strategy.worker.group.gather_objects(None, "repaired")
        checkpoint.restore(path).assert_consumed()


@two
def test_objects_without_a_strategy(rank: int, shared_tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    with pytest.raises(RuntimeError, match=rf"worker {rank} of 2: no object in the checkpoint belongs to a strategy"):
        checkpoint.save(shared_tmp_path / "ckpt")
    with td.MirroredStrategy() as strategy, strategy.scope():
        path = checkpoint.save(shared_tmp_path / "ckpt")
        assert json.loads(Path(f"{path}.index").read_text())["content"]["saved"]["workers"] == 2


@two
def test_the_first_worker_alone_names_checkpoints_without_a_list(
    rank: int, shared_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with td.MirroredStrategy(["cpu:0"]) as strategy:
        checkpoint, _ = build(strategy)
        checkpoint.write(shared_tmp_path / "ckpt-1")
    CheckpointManager(checkpoint, shared_tmp_path, None)
    assert ("The list of the folder's checkpoints" in caplog.text) == (rank == 0)
