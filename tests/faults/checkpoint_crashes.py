"""A program for test_checkpoint_faults.py: saves in child processes that die, or cannot write, and tells what is left.

Children are forked, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.checkpoint import dcp, files, manager
from tfstyle_dist.train import Checkpoint, CheckpointManager

NOBODY = 65534


def die(*arguments: Any, **keywords: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(action: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **keywords: Any) -> None:
        action(*arguments, **keywords)
        die()

    return wrapped


WRITE = files.write_atomically


def halfway(path: Path, text: str) -> None:
    """The index file, half of it."""
    if path.suffix != files.INDEX:
        WRITE(path, text)
        return
    temporary = path.with_name(f"{path.name}{files.UNFINISHED}")
    temporary.write_text(text[: len(text) // 2])
    die()


POINTS: dict[str, Callable[[], None]] = {
    "before a tensor is written": lambda: setattr(dcp, "write_part", die),
    "after the tensors are written": lambda: setattr(dcp, "write_part", after(dcp.write_part)),
    "after the parts are joined": lambda: setattr(dcp, "join_parts", after(dcp.join_parts)),
    "before the index is written": lambda: setattr(files, "write_index", die),
    "amid the index": lambda: setattr(files, "write_atomically", halfway),
    "after the index is written": lambda: setattr(files, "write_index", after(files.write_index)),
    "before the latest is noted": lambda: setattr(manager, "write_state", die),
    "before the old one is deleted": lambda: setattr(manager.CheckpointManager, "_delete", die),
}


def build(folder: Path) -> tuple[Checkpoint, CheckpointManager]:
    checkpoint = Checkpoint(model=torch.nn.Linear(300, 300), step=0)
    return checkpoint, CheckpointManager(checkpoint, folder, 1)


def in_child(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash(folder: Path, point: str) -> dict[str, Any]:
    """Saves step 1, dies while saving step 2; then a new process restores and saves."""
    checkpoint, keeper = build(folder)
    checkpoint.step = 1
    keeper.save()

    def save() -> None:
        POINTS[point]()
        checkpoint.step = 2
        keeper.save()

    code = in_child(save)
    left = len(list(folder.iterdir()))
    checkpoint, keeper = build(folder)
    keeper.restore_or_initialize()
    restored = checkpoint.step
    keeper.save()
    return {"code": code, "left": left, "restored": restored, "after": sorted(e.name[:6] for e in folder.iterdir())}


def refused(folder: Path, limit: Callable[[], None], block: bool = True, mode: int = 0o755) -> dict[str, Any]:
    """Saves step 1; then a process that cannot write tries step 2."""
    checkpoint, keeper = build(folder)
    checkpoint.step = 1
    path = keeper.save()
    folder.chmod(mode)
    told = folder.parent / f"{folder.name}.json"
    told.touch()
    told.chmod(0o666)

    def save() -> None:
        limit()
        checkpoint.step = 2
        try:
            keeper.save(block=block)
            keeper.sync()
        except OSError as error:
            told.write_text(json.dumps({"errno": error.errno, "text": str(error)}))

    in_child(save)
    folder.chmod(0o755)
    checkpoint, keeper = build(folder)
    assert keeper.restore_or_initialize() == path
    entries = sorted(entry.name[:6] for entry in folder.iterdir())
    return {**json.loads(told.read_text()), "restored": checkpoint.step, "after": entries}


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def main() -> None:
    base = Path(sys.argv[1])
    results: dict[str, Any] = {}
    for number, point in enumerate(POINTS):
        folder = base / f"crash{number}"
        results[point] = crash(folder, point)
    for block in (True, False):
        results[f"full, block={block}"] = refused(base / f"full{block}", small_files, block)
    give_up_root = (lambda: os.setuid(NOBODY)) if os.getuid() == 0 else (lambda: None)
    with tempfile.TemporaryDirectory() as directory:  # other users cannot look into pytest's folders
        Path(directory).chmod(0o755)
        results["read-only"] = refused(Path(directory, "read-only"), give_up_root, mode=0o555)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
