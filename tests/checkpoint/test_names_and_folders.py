"""Which files a save writes and deletes: its own, wherever the program goes meanwhile and whoever else writes there."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.checkpoint import files, reader as readers, saving
from tfstyle_dist.core.errors import NotFoundError
from tfstyle_dist.train import (
    Checkpoint,
    CheckpointManager,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    load_checkpoint,
)


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


# ---- folders that others wrote to, too ----------------------------------------------------------------------------


def test_a_manager_leaves_what_was_saved_without_one(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=0)
    unmanaged = [checkpoint.save(tmp_path / "unusual") for _ in range(2)]
    again = Checkpoint(step=0)
    manager = CheckpointManager(again, tmp_path, max_to_keep=2)
    assert (manager.latest_checkpoint, manager.checkpoints) == (unmanaged[1], [])
    assert manager.restore_or_initialize() == unmanaged[1]
    managed = [manager.save() for _ in range(3)]
    assert manager.checkpoints == managed[1:]
    there = [files.index_file(path).exists() for path in (*unmanaged, *managed)]
    assert there == [True, True, False, True, True]


def test_a_clock_that_was_set_back_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [10000.0]
    clock = type("Clock", (), {"time": staticmethod(lambda: now[0]), "sleep": staticmethod(lambda s: None)})
    monkeypatch.setattr("tfstyle_dist.checkpoint.manager.time", clock)
    monkeypatch.setattr("tfstyle_dist.checkpoint.saving.time", clock)
    checkpoint = Checkpoint(step=0)
    manager = CheckpointManager(checkpoint, tmp_path, 1, keep_checkpoint_every_n_hours=1.0)
    saved = []
    for _ in range(3):
        saved.append(manager.save())
        now[0] += 3600.0
    now[0] = 5000.0
    manager = CheckpointManager(checkpoint, tmp_path, 1)
    assert "behind the last preserved checkpoint timestamp" in caplog.text
    assert (manager.latest_checkpoint, manager.checkpoints) == (saved[2], [])
    for _ in range(2):
        now[0] += 10.0
        saved.append(manager.save())
    assert manager.checkpoints == [saved[4]]
    assert [files.index_file(path).exists() for path in saved] == [False, True, True, False, True]
    state = get_checkpoint_state(tmp_path)
    assert state is not None
    assert (state.last_preserved_timestamp, state.all_model_checkpoint_timestamps) == (5000.0, [5020.0])


def test_a_save_with_a_number_of_its_own_counts(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=0)
    manager = CheckpointManager(checkpoint, tmp_path, max_to_keep=3)
    paths = [manager.save(checkpoint_number=5), manager.save(checkpoint_number=td.Variable(9)), manager.save()]
    assert [os.path.basename(path) for path in paths] == ["ckpt-5", "ckpt-9", "ckpt-3"]
    assert checkpoint.save_counter == 3


def test_the_step_from_which_an_interval_counts(tmp_path: Path) -> None:
    step = td.Variable(1)
    manager = CheckpointManager(
        Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=2, last_checkpoint_step=1
    )
    saved = []
    for _ in range(3):
        saved.append(manager.save() is not None)
        step.assign_add(1)
    assert saved == [False, False, True]


def test_the_file_that_names_the_latest_may_be_indented(tmp_path: Path) -> None:
    lines = ["", ' model_checkpoint_path: "./a-2"', '\tall_model_checkpoint_paths:"./a-1"']
    (tmp_path / "checkpoint").write_text("\n".join([*lines, '  all_model_checkpoint_paths: "./a-2"', "  "]))
    state = get_checkpoint_state(tmp_path)
    assert state is not None
    assert state.model_checkpoint_path == f"{tmp_path}/./a-2"
    assert state.all_model_checkpoint_paths == [f"{tmp_path}/./a-1", f"{tmp_path}/./a-2"]


def test_what_tensorflow_s_programs_ask_of_a_restore(tmp_path: Path) -> None:
    checkpoint = Checkpoint(step=1)
    for path in (checkpoint.save(tmp_path / "ckpt"), None):
        status = checkpoint.restore(path)
        status.initialize_or_restore()
        status.run_restore_ops()
    for name in ("assert_consumed", "assert_existing_objects_matched", "assert_nontrivial_match"):
        with pytest.raises(AssertionError, match=r"path is None.*latest_checkpoint"):
            getattr(checkpoint.restore(None), name)()
    checkpoint.restore(None).expect_partial()


@pytest.mark.parametrize("block", [True, False])
def test_nothing_is_left_of_a_checkpoint_whose_index_does_not_fit(tmp_path: Path, block: bool) -> None:
    kept = checkpoint()
    path = kept.write(tmp_path / "kept")
    long = Checkpoint(model=torch.nn.Linear(3, 2), text="x" * 50_000)
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
    try:
        with pytest.raises(OSError, match="File too large"):  # noqa: PT012
            long.write(tmp_path / "long", block=block)
            long.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
    assert sorted(os.listdir(tmp_path)) == sorted(["kept.index", data_of(path).name])


def test_a_url_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be one on this machine, and the checkpoints be gone with it."""
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: CheckpointManager(checkpoint(), "gs://bucket/job", 3),
        lambda: checkpoint().save("s3://bucket/job/ckpt"),
        lambda: checkpoint().restore("file:///data/ckpt-1"),
        lambda: latest_checkpoint("hdfs://job"),
        lambda: load_checkpoint("gs://bucket/job"),
        lambda: next(checkpoints_iterator("gs://bucket/job", timeout=0)),
    ):
        with pytest.raises(ValueError, match="is a URL, and checkpoints are written to folders"):
            use()
    assert not os.listdir(tmp_path)
