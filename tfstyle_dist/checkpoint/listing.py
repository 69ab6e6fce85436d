"""What is in a folder of checkpoints: the file ``checkpoint``, which names the latest one."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tfstyle_dist.checkpoint import files
from tfstyle_dist.core import json_text
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger

STATE_FILE = "checkpoint"
_POLL_SECONDS = 0.5


@dataclass
class CheckpointState:
    """The content of the file ``checkpoint`` of a folder.

    Attributes:
        model_checkpoint_path: the latest checkpoint.
        all_model_checkpoint_paths: those that are kept, oldest first.
        all_model_checkpoint_timestamps: when each of them was saved, in seconds since 1970.
        last_preserved_timestamp: when the last one was saved that is kept for good.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: Sequence[str] = ()
    all_model_checkpoint_timestamps: Sequence[float] = ()
    last_preserved_timestamp: float | None = None


def write_state(directory: str, state: CheckpointState) -> None:
    """Writes the file ``checkpoint``, in TensorFlow's text format, with paths relative to the folder."""

    def short(path: str) -> str:
        return json.dumps(os.path.relpath(path, directory))

    lines = [f"model_checkpoint_path: {short(state.model_checkpoint_path)}"]
    lines += [f"all_model_checkpoint_paths: {short(path)}" for path in state.all_model_checkpoint_paths]
    lines += [f"all_model_checkpoint_timestamps: {stamp!r}" for stamp in state.all_model_checkpoint_timestamps]
    if state.last_preserved_timestamp is not None:
        lines.append(f"last_preserved_timestamp: {state.last_preserved_timestamp!r}")
    files.write_atomically(Path(directory, STATE_FILE), "\n".join(lines) + "\n", shared=True)


def make_latest(place: str, path: str, time: float) -> None:
    """As TF's ``save`` without a manager: the new one is the only one that the file lists; no manager deletes it."""
    write_state(os.path.dirname(place), CheckpointState(place, [place]))


def get_checkpoint_state(
    checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None
) -> CheckpointState | None:
    """The content of the file ``checkpoint``; ``None`` when there is none.

    Args:
        checkpoint_dir: the folder.
        latest_filename: another name of the file.

    Raises:
        DataLossError: the file is damaged; the message names the checkpoints there are.
        ValueError: the folder is a URL.

    Source: ``tf.train.get_checkpoint_state``.

    Example:
        >>> get_checkpoint_state("job1").model_checkpoint_path
        'job1/ckpt-1'
    """
    files.check_local(os.fspath(checkpoint_dir))
    file = Path(checkpoint_dir, latest_filename or STATE_FILE)
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        return None
    found: dict[str, list[Any]] = {}
    try:
        for line in written.decode().splitlines():
            if not line.strip():
                continue
            key, _, value = line.strip().partition(":")
            found.setdefault(key, []).append(json_text.parse(value.strip()))
        latest = [_inside(checkpoint_dir, path) for path in found.get("model_checkpoint_path", ())]
        paths = [_inside(checkpoint_dir, path) for path in found.get("all_model_checkpoint_paths", ())]
        stamps = [_seconds(stamp) for stamp in found.get("all_model_checkpoint_timestamps", ())]
        preserved = [_seconds(stamp) for stamp in found.get("last_preserved_timestamp", ())]
        if len(latest) != 1 or len(preserved) > 1 or len(stamps) not in (0, len(paths)):
            raise ValueError(
                f"it names {len(latest)} latest checkpoint(s), {len(paths)} in all with {len(stamps)} times, and "
                f"{len(preserved)} time(s) of the last one kept for good"
            )
        return CheckpointState(latest[0], paths, stamps, preserved[0] if preserved else None)
    except ValueError as error:
        there = checkpoints_in(os.fspath(checkpoint_dir))
        remedy = " Delete the file, and restore one of them by its path." if there else ""
        raise DataLossError(
            f"The file {file} is damaged: {error}. These checkpoints are there: {there or 'none'}.{remedy}"
        ) from error


def _inside(directory: str | os.PathLike[str], path: Any) -> str:
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"{str(path)[:80]!r} is no path of a checkpoint")
    return os.path.join(directory, path)


def _seconds(stamp: Any) -> float:
    if type(stamp) not in (int, float) or not 0 <= stamp < 1e12:
        raise ValueError(f"{str(stamp)[:80]} is no time in seconds since 1970")
    return float(stamp)


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None) -> str | None:
    """The path of the latest checkpoint of a folder, to be given to ``Checkpoint.restore``.

    Args:
        checkpoint_dir: the folder.
        latest_filename: another name of the file ``checkpoint``.

    Returns:
        The path without a suffix; ``None`` when there is no checkpoint.

    Raises:
        DataLossError: the file ``checkpoint`` is damaged; the message names the checkpoints there are.

    Example:
        >>> latest_checkpoint("no-such-folder") is None
        True

    Source: ``tf.train.latest_checkpoint``.
    """
    directory = os.fspath(checkpoint_dir)
    state = get_checkpoint_state(directory, latest_filename)
    if state is None:
        return None
    if not files.index_file(state.model_checkpoint_path).exists():
        get_logger().warning(
            "%s names the checkpoint %s, which is not there; these are: %s",
            Path(directory, latest_filename or STATE_FILE),
            state.model_checkpoint_path,
            checkpoints_in(directory) or "none",
        )
        return None
    return state.model_checkpoint_path


def warn_of_unlisted(prefix: str, rank: Callable[[], int]) -> None:
    """Says, on worker 0, that there are checkpoints ``<prefix>-<number>`` though their folder has no list of them.

    Args:
        prefix: of a manager's checkpoints.
        rank: tells the number of this worker; asked only where there are any.
    """
    directory, numbered = os.path.dirname(prefix), re.compile(rf"{re.escape(os.path.basename(prefix))}-\d+")
    found = [path for path in checkpoints_in(directory or ".") if numbered.fullmatch(os.path.basename(path))]
    if found and _is_first(rank):
        get_logger().warning(
            "The list of the folder's checkpoints, %s, does not exist. Their manager knows none of them, and "
            "saves over those of the same numbers. These are there: %s. Restore one by its path to go on from it.",
            Path(directory, STATE_FILE),
            found,
        )


def _is_first(rank: Callable[[], int]) -> bool:
    try:
        return rank() == 0
    except (RuntimeError, TypeError, ValueError):  # the next save or restore raises it
        return True


def checkpoints_in(directory: str) -> list[str]:
    """All checkpoints in a folder, by number."""
    found = [str(file).removesuffix(files.INDEX) for file in Path(directory).glob(f"*{files.INDEX}")]
    return sorted(found, key=lambda path: (re.sub(r"\d+$", "", path), int((re.findall(r"\d+$", path) or ["0"])[0])))


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields each new checkpoint of a folder as it appears, e.g. for an evaluator beside the training job.

    Args:
        checkpoint_dir: the folder; need not exist yet.
        min_interval_secs: at least so many seconds between two.
        timeout: seconds to wait for a new one; ``None`` waits for ever.
        timeout_fn: called when the time is up; the iterator goes on unless it returns true.

    Yields:
        The path of the newest checkpoint, each once; those that came and went while the caller was busy are left out.

    Example:
        >>> for path in checkpoints_iterator("job1", timeout=1.0):
        ...     checkpoint.restore(path).expect_partial()

    Source: ``tf.train.checkpoints_iterator``.
    """
    seen: str | None = None
    while True:
        began = time.monotonic()
        deadline = Deadline(None if timeout is None else timedelta(seconds=timeout))
        while (path := latest_checkpoint(checkpoint_dir)) is None or path == seen:
            if deadline.passed():
                if timeout_fn is None or timeout_fn():
                    return
                deadline = Deadline(deadline.limit)
            time.sleep(min(_POLL_SECONDS, deadline.remaining() or _POLL_SECONDS))
        seen = path
        yield path
        time.sleep(max(0.0, began + min_interval_secs - time.monotonic()))
