"""Which files a save writes and deletes: its own, wherever the program goes meanwhile and whoever else writes there."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tfstyle_dist.checkpoint import files, reader as readers, saving
from tfstyle_dist.core.errors import NotFoundError
from tfstyle_dist.train import Checkpoint, CheckpointManager, latest_checkpoint, load_checkpoint


def checkpoint() -> Checkpoint:
    return Checkpoint(model=torch.nn.Linear(3, 2))


def data_of(path: str) -> Path:
    return files.data_folder(path, files.read_index(path))


def other_save(folder: Path, name: str) -> list[Path]:
    """What a save of another program looks like: unfinished, and complete before its index file has a name."""
    made = [folder / f"{name}{files.DATA}0a1b{files.UNFINISHED}", folder / f"{name}{files.DATA}0a1c"]
    for entry in made:
        entry.mkdir()
    return made


def test_write_leaves_what_is_being_written_under_another_number(tmp_path: Path) -> None:
    others = other_save(tmp_path, "trial-1") + other_save(tmp_path, "trial")
    own = other_save(tmp_path, "trial-2")
    checkpoint().write(tmp_path / "trial-2")
    assert all(entry.exists() for entry in others)
    assert not any(entry.exists() for entry in own)


def test_a_damaged_checkpoint_is_deleted_without_its_neighbours(tmp_path: Path) -> None:
    others = other_save(tmp_path, "trial-1")
    path = checkpoint().write(tmp_path / "trial-2")
    folder = data_of(path)
    files.index_file(path).write_text("damaged", encoding="utf-8")
    files.remove_checkpoint(path)
    assert all(entry.exists() for entry in others)
    assert not folder.exists()


def test_save_cleans_all_its_numbers(tmp_path: Path) -> None:
    left, others = other_save(tmp_path, "ckpt-7"), other_save(tmp_path, "ckpt-of-another-7")
    checkpoint().save(tmp_path / "ckpt")
    assert not any(entry.exists() for entry in left)
    assert all(entry.exists() for entry in others)


def test_two_saves_in_the_background_under_neighbouring_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = saving.files.publish
    first, second = checkpoint(), checkpoint()
    second.save(tmp_path / "other")

    def wait_and_publish(*args: Any) -> None:
        assert go_on.wait(60)
        original(*args)

    monkeypatch.setattr(saving.files, "publish", wait_and_publish)
    paths = [save.save(tmp_path / "ckpt", block=False) for save in (first, second)]
    go_on.set()
    first.sync()
    second.sync()
    assert [os.path.basename(path) for path in paths] == ["ckpt-1", "ckpt-2"]
    for path in paths:
        checkpoint().restore(path).expect_partial()


@pytest.mark.parametrize("by_manager", [False, True])
def test_a_program_that_goes_to_another_folder_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_manager: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    go_on = threading.Event()
    original = saving.dcp.write_part

    def wait_and_write(*args: Any) -> None:
        assert go_on.wait(60)
        original(*args)

    saved = checkpoint()
    save: Any = CheckpointManager(saved, "job", max_to_keep=1).save if by_manager else saved.save
    arguments: tuple[Any, ...] = () if by_manager else ("job/ckpt",)
    save(*arguments)
    monkeypatch.setattr(saving.dcp, "write_part", wait_and_write)
    path = save(*arguments, block=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    go_on.set()
    saved.sync()
    assert path == os.path.join("job", "ckpt-2")
    assert not list(Path().iterdir())
    monkeypatch.chdir(tmp_path)
    assert latest_checkpoint("job") == path
    assert files.index_file("job/ckpt-1").exists() is not by_manager
    checkpoint().restore(path).expect_partial()


def delete_when_called(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, paths: list[str]) -> None:
    original = getattr(owner, name)

    def delete_first(*args: Any, **kwargs: Any) -> Any:
        while paths:
            files.remove_checkpoint(paths.pop())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, delete_first)


@pytest.mark.parametrize(("owner", "name"), [(files, "verify"), (files, "fingerprint"), (readers, "TensorReader")])
def test_a_checkpoint_that_is_deleted_while_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    path = checkpoint().write(tmp_path / "ckpt")
    delete_when_called(monkeypatch, owner, name, [path])
    with pytest.raises(NotFoundError, match=r"ckpt' was deleted while it was read.*max_to_keep"):
        checkpoint().restore(path)


def test_a_checkpoint_that_is_deleted_while_a_tensor_is_read(tmp_path: Path) -> None:
    path = checkpoint().write(tmp_path / "ckpt")
    reader = load_checkpoint(path)
    reader.get_tensor("model/bias")
    files.remove_checkpoint(path)
    with pytest.raises(NotFoundError, match="was deleted while it was read"):
        reader.get_tensor("model/weight")


def test_the_manager_goes_back_to_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Checkpoint(n=1)
    manager = CheckpointManager(saved, tmp_path, max_to_keep=3)
    older = manager.save()
    saved.n = 2
    newer = manager.save()
    assert older is not None
    assert newer is not None
    delete_when_called(monkeypatch, files, "fingerprint", [newer])
    assert manager.restore_or_initialize() == older
    assert saved.n == 1


def test_a_folder_that_lost_its_files_is_damaged_not_deleted(tmp_path: Path) -> None:
    path = checkpoint().write(tmp_path / "ckpt")
    shutil.rmtree(data_of(path))
    with pytest.raises(OSError, match=r"ckpt' is damaged: .* cannot be read"):
        checkpoint().restore(path)


def test_what_killed_writers_of_the_list_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / "checkpoint-0123abcd.tmp", tmp_path / "checkpoint-89ef0123.tmp"
    for file in (old, new):
        file.touch()
    hours_ago = time.time() - 2 * 3600
    os.utime(old, (hours_ago, hours_ago))
    checkpoint().save(tmp_path / "ckpt")
    assert not old.exists()
    assert new.exists()  # another program may be at it
