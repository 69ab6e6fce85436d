"""Which checkpoints a manager keeps, and what an interruption or a damaged file does to a folder."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.checkpoint import dcp, files, manager, saving
from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.train import Checkpoint, CheckpointManager, CheckpointOptions, latest_checkpoint


def names(paths: list[str]) -> list[str]:
    return [os.path.basename(path) for path in paths]


def in_folder(folder: Path) -> list[str]:
    """Index files and data folders, without the tokens."""
    return sorted(entry.name.partition(".data")[0] + ".data" * (".data" in entry.name) for entry in folder.iterdir())


# ---- what is kept -------------------------------------------------------------------------------------------------


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=0)
    keeper = CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    assert keeper.latest_checkpoint is None
    assert keeper.checkpoints == []
    for checkpoint.step in range(3):
        keeper.save()
    assert names(keeper.checkpoints) == ["ckpt-2", "ckpt-3"]
    assert in_folder(tmp_path) == ["checkpoint", "ckpt-2.data", "ckpt-2.index", "ckpt-3.data", "ckpt-3.index"]
    assert latest_checkpoint(tmp_path) == keeper.latest_checkpoint == str(tmp_path / "ckpt-3")
    assert keeper.directory == str(tmp_path)
    assert keeper.checkpoint is checkpoint
    again = Checkpoint(step=0)
    keeper = CheckpointManager(again, tmp_path, max_to_keep=2)
    assert names(keeper.checkpoints) == ["ckpt-2", "ckpt-3"]
    assert keeper.restore_or_initialize() == str(tmp_path / "ckpt-3")
    assert (again.step, again.save_counter) == (2, 3)
    keeper.save()
    assert names(keeper.checkpoints) == ["ckpt-3", "ckpt-4"]


def test_a_name_and_a_number_of_ones_own(tmp_path: Path) -> None:
    keeper = CheckpointManager(Checkpoint(step=0), tmp_path, None, checkpoint_name="model")
    for number in (30, 10, 30):
        keeper.save(checkpoint_number=number)
    assert names(keeper.checkpoints) == ["model-10", "model-30"]
    assert in_folder(tmp_path) == ["checkpoint", "model-10.data", "model-10.index", "model-30.data", "model-30.index"]


def test_some_are_kept_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(1000, 3600)
    clock = type("Clock", (), {"time": staticmethod(lambda: float(next(hours))), "sleep": staticmethod(lambda s: None)})
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(manager, "time", type("Clock", (), {"time": staticmethod(lambda: 1.0)}))
    keeper = CheckpointManager(Checkpoint(step=0), tmp_path, 1, keep_checkpoint_every_n_hours=2)
    for _ in range(6):
        keeper.save()
    assert names(keeper.checkpoints) == ["ckpt-6"]
    kept = [name for name in in_folder(tmp_path) if name.endswith(".index")]
    assert kept == ["ckpt-3.index", "ckpt-5.index", "ckpt-6.index"]


def test_an_interval_of_steps(tmp_path: Path) -> None:
    step = td.Variable(0, dtype=torch.int64)
    keeper = CheckpointManager(Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=3)
    assert keeper.checkpoint_interval == 3
    saved = []
    for _ in range(8):
        step.assign_add(1)
        saved.append(keeper.save())
    assert [path is not None for path in saved] == [True, False, False, True, False, False, True, False]
    assert keeper.save(check_interval=False) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_to_keep": 0}, "max_to_keep is 0"),
        ({"max_to_keep": 1, "checkpoint_interval": 5}, "needs a step_counter"),
        ({"max_to_keep": 1, "checkpoint_interval": 5, "step_counter": 3}, "never changes"),
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointManager(Checkpoint(), tmp_path, **arguments)


def test_initialize_when_there_is_nothing(tmp_path: Path) -> None:
    called = []
    keeper = CheckpointManager(Checkpoint(step=0), tmp_path, 1, init_fn=lambda: called.append(1))
    assert keeper.restore_or_initialize() is None
    assert called == [1]


def test_without_a_manager(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=0)
    first, second = checkpoint.save(tmp_path / "ckpt"), checkpoint.save(str(tmp_path / "ckpt"))
    assert names([first, second]) == ["ckpt-1", "ckpt-2"]
    checkpoint.step = 5
    assert checkpoint.write(tmp_path / "export") == str(tmp_path / "export")
    checkpoint.step = 6
    assert checkpoint.write(tmp_path / "export") == str(tmp_path / "export")
    assert latest_checkpoint(tmp_path) == second
    again = Checkpoint(step=0)
    again.read(tmp_path / "export").assert_consumed()
    assert (again.step, again.save_counter) == (6, 0)
    assert [n for n in in_folder(tmp_path) if n.startswith("export")] == ["export.data", "export.index"]


def test_new_checkpoints_as_they_come(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=0)
    seen = []
    checkpoint.save(tmp_path / "ckpt")
    for path in td.train.checkpoints_iterator(tmp_path, timeout=0):
        seen.append(os.path.basename(path))
        if len(seen) < 3:
            checkpoint.save(tmp_path / "ckpt")
    assert seen == ["ckpt-1", "ckpt-2", "ckpt-3"]


# ---- in the background --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"block": False}, {"options": CheckpointOptions(enable_async=True)}])
def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path: Path, how: Any) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoint = Checkpoint(model=model)
    keeper = CheckpointManager(checkpoint, tmp_path, 2)
    before = model.weight.detach().clone()
    keeper.save(**how)
    torch.nn.init.zeros_(model.weight)
    keeper.save(**how)
    keeper.sync()
    assert names(keeper.checkpoints) == ["ckpt-1", "ckpt-2"]
    checkpoint.restore(keeper.checkpoints[0])
    assert torch.equal(model.weight.detach(), before)


def test_an_error_in_the_background_is_raised_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(step=0)
    path = checkpoint.save(tmp_path / "ckpt")
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "write_part", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoint.save(tmp_path / "ckpt", block=False)
        with pytest.raises(OSError, match=r"ckpt-2' was not written .*No space left on device") as caught:
            checkpoint.sync()
    assert caught.value.errno == 28
    checkpoint.sync()  # said once
    assert in_folder(tmp_path) == ["checkpoint", "ckpt-1.data", "ckpt-1.index"]
    assert latest_checkpoint(tmp_path) == path
    assert checkpoint.save(tmp_path / "ckpt").endswith("ckpt-3")


def test_a_save_in_the_background_that_cannot_begin_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(model=torch.nn.Linear(2, 2))
    to = torch.Tensor.to

    def no_memory(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if "copy" in keywords:
            raise torch.OutOfMemoryError("no memory left")
        return to(tensor, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", no_memory)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            checkpoint.save(tmp_path / "ckpt", block=False)
    assert in_folder(tmp_path) == []
    checkpoint.sync()
    path = checkpoint.save(tmp_path / "ckpt", block=False)
    assert os.path.basename(path) == "ckpt-1"
    checkpoint.restore(path)


# ---- interruptions and damage -------------------------------------------------------------------------------------

INTERRUPTED = {
    "while tensors are written": (dcp, "write_part"),
    "before the parts are joined": (dcp, "join_parts"),
    "before the folder gets its name": (files, "publish"),
    "before the index is written": (files, "write_index"),
}


class Interrupted(BaseException):
    """Not an error that anybody handles: what follows is left undone, as after a crash."""


@pytest.mark.parametrize("where", list(INTERRUPTED))
def test_an_interruption_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    checkpoint = Checkpoint(model=torch.nn.Linear(2, 2), step=1)
    keeper = CheckpointManager(checkpoint, tmp_path, 1)
    path = keeper.save()
    checkpoint.step = 2
    owner, name = INTERRUPTED[where]

    def stop(*arguments: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        with pytest.raises(Interrupted):
            keeper.save()
    assert len(in_folder(tmp_path)) > 3  # something was left behind
    again = Checkpoint(model=torch.nn.Linear(2, 2), step=0)
    keeper = CheckpointManager(again, tmp_path, 1)
    assert keeper.restore_or_initialize() == path
    assert again.step == 1
    keeper.save()
    assert in_folder(tmp_path) == ["checkpoint", "ckpt-2.data", "ckpt-2.index"]


def test_an_interruption_before_the_latest_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(step=1)
    keeper = CheckpointManager(checkpoint, tmp_path, 1)
    path = keeper.save()

    def stop(*arguments: Any) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_state", stop)
        with pytest.raises(Interrupted):
            keeper.save()
    assert latest_checkpoint(tmp_path) == path
    keeper = CheckpointManager(checkpoint, tmp_path, 1)
    assert keeper.restore_or_initialize() == path
    keeper.save()  # takes the place of the one that nobody knew
    assert in_folder(tmp_path) == ["checkpoint", "ckpt-2.data", "ckpt-2.index"]


def test_an_interrupted_overwrite_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(step=1)
    checkpoint.write(tmp_path / "export")

    def stop(*arguments: Any) -> None:
        raise Interrupted

    checkpoint.step = 2
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_index", stop)
        with pytest.raises(Interrupted):
            checkpoint.write(tmp_path / "export")
    checkpoint.read(tmp_path / "export").assert_consumed()
    assert checkpoint.step == 1


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE = {"truncated": truncate, "flipped": flip, "removed": lambda file: file.unlink()}


@pytest.mark.parametrize("damage", list(DAMAGE))
@pytest.mark.parametrize("which", ["part-0/__0_0.distcp", ".metadata", "index"])
def test_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, which: str) -> None:
    checkpoint = Checkpoint(model=torch.nn.Linear(2, 2), step=1)
    keeper = CheckpointManager(checkpoint, tmp_path, None)
    keeper.save()
    checkpoint.step = 2
    latest = keeper.save()
    assert latest is not None
    index = files.index_file(latest)
    file = index if which == "index" else files.data_folder(latest, files.read_index(latest)) / which
    DAMAGE[damage](file)
    if (which, damage) != ("index", "removed"):
        with pytest.raises(DataLossError, match=rf"(?s){file}.*Other checkpoints in that folder: {tmp_path}/ckpt-1"):
            checkpoint.restore(latest)
        assert checkpoint.step == 2
        assert keeper.restore_or_initialize() == str(tmp_path / "ckpt-1")
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert "GOING BACK TO THE CHECKPOINT BEFORE IT" in record.getMessage()
    else:
        assert latest_checkpoint(tmp_path) is None
        assert "which is not there" in caplog.text
        again = CheckpointManager(checkpoint, tmp_path, None)
        assert again.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert checkpoint.step == 1


@pytest.mark.parametrize("name", ["{elsewhere}", "../elsewhere", ".", "..", "", None, "ckpt-1"])
def test_a_folder_elsewhere_is_neither_read_nor_deleted(tmp_path: Path, name: str | None) -> None:
    """Whoever can write an index must not choose what the next save deletes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").write_text("x")
    checkpoint = Checkpoint(step=0)
    first = CheckpointManager(checkpoint, tmp_path / "c", max_to_keep=1).save()
    assert first is not None
    content = files.read_index(first) | {"data": name and name.format(elsewhere=elsewhere)}
    files.write_index(first, content)
    with pytest.raises(DataLossError, match="beside its index"):
        checkpoint.restore(first)
    second = CheckpointManager(checkpoint, tmp_path / "c", max_to_keep=1).save(2)
    assert (elsewhere / "thesis").exists()
    assert not files.index_file(first).exists()
    assert second is not None
    checkpoint.restore(second)


def test_checkpoints_of_another_folder_are_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint(step=0)
    other = CheckpointManager(checkpoint, tmp_path / "other", max_to_keep=1).save()
    assert other is not None
    (tmp_path / "c").mkdir()
    manager.write_state(str(tmp_path / "c"), td.train.get_checkpoint_state(tmp_path / "other"))
    keeper = CheckpointManager(checkpoint, tmp_path / "c", max_to_keep=1)
    other = str(tmp_path / "c" / ".." / "other" / "ckpt-1")
    assert keeper.restore_or_initialize() == other
    keeper.save()
    assert files.index_file(other).exists()
    assert f"{other} is not in the folder of its manager" in caplog.text


def test_a_damaged_list(tmp_path: Path) -> None:
    Checkpoint(step=1).save(tmp_path / "ckpt")
    (tmp_path / "checkpoint").write_text("model_checkpoint_pa")
    with pytest.raises(DataLossError, match=r"checkpoint is damaged.*These checkpoints are there: .*ckpt-1"):
        latest_checkpoint(tmp_path)
    with pytest.raises(DataLossError, match=r"These checkpoints are there: .*ckpt-1.*restore one of them by its path"):
        CheckpointManager(Checkpoint(step=1), tmp_path, None)
    for file in tmp_path.glob("*.index"):
        file.unlink()
    with pytest.raises(DataLossError, match=r"These checkpoints are there: none\.$"):
        latest_checkpoint(tmp_path)


def test_checkpoints_without_a_list_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a job that ended before it wrote the list, or of a folder that was copied without it."""
    path = CheckpointManager(Checkpoint(step=1), tmp_path, None).save()
    Checkpoint(step=1).write(tmp_path / "by-hand")
    CheckpointManager(Checkpoint(step=1), tmp_path, None)
    assert not caplog.text
    (tmp_path / "checkpoint").unlink()
    CheckpointManager(Checkpoint(step=1), tmp_path, None, checkpoint_name="by")
    assert not caplog.text
    assert CheckpointManager(Checkpoint(step=1), tmp_path, None).restore_or_initialize() is None
    assert f"The list of the folder's checkpoints, {tmp_path / 'checkpoint'}, does not exist. " in caplog.text
    assert f"saves over those of the same numbers. These are there: [{path!r}]. Restore one" in caplog.text


def test_all_checkpoints_damaged(tmp_path: Path) -> None:
    keeper = CheckpointManager(Checkpoint(step=1), tmp_path, None)
    path = keeper.save()
    truncate(files.index_file(str(path)))
    with pytest.raises(DataLossError, match=r"index file .* is damaged"):
        keeper.restore_or_initialize()


def test_removing_takes_the_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Checkpoint(step=1).save(tmp_path / "ckpt")
    seen = []
    remove = shutil.rmtree
    monkeypatch.setattr(files.shutil, "rmtree", lambda *a, **k: (seen.append(in_folder(tmp_path)), remove(*a, **k)))
    files.remove_checkpoint(path)
    assert seen == [["checkpoint", "ckpt-1.data"]]
    assert in_folder(tmp_path) == ["checkpoint"]
