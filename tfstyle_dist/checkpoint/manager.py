"""``tf.train.CheckpointManager``: keeps the last checkpoints of a folder and deletes older ones."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfstyle_dist.checkpoint import files
from tfstyle_dist.checkpoint.checkpoint import Checkpoint
from tfstyle_dist.checkpoint.listing import CheckpointState, get_checkpoint_state, warn_of_unlisted, write_state
from tfstyle_dist.checkpoint.options import CheckpointOptions, is_async
from tfstyle_dist.checkpoint.planned import Planned
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core.errors import DataLossError, NotFoundError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.runtime import context


class CheckpointManager:
    """Saves numbered checkpoints in a folder and keeps the last ones (``tf.train.CheckpointManager``).

    A folder belongs to one manager of one job. All workers build one and make the same calls.

    Args:
        checkpoint: what is saved.
        directory: the folder; made at the first save.
        max_to_keep: how many to keep; ``None`` keeps all.
        keep_checkpoint_every_n_hours: of those that would be deleted, keep one for each so many hours for good.
        checkpoint_name: beginning of the file names.
        step_counter: tells the training step, for ``checkpoint_interval``: a variable, or a function.
        checkpoint_interval: ``save`` does nothing until so many steps after the last checkpoint.
        init_fn: called by ``restore_or_initialize`` when there is no checkpoint.
        last_checkpoint_step: the step from which ``checkpoint_interval`` counts; default: the first ``save`` saves.

    Raises:
        ValueError: ``max_to_keep`` below 1, an interval without a counter, a counter that cannot be asked again, a URL.
        DataLossError: the list of the folder's checkpoints is damaged.

    Example:
        >>> manager = CheckpointManager(Checkpoint(model=model), "training", max_to_keep=3)
        >>> manager.restore_or_initialize() is None
        True
        >>> os.path.basename(manager.save())
        'ckpt-1'

    Source: ``tf.train.CheckpointManager``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: float | None = None,
    ) -> None:
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(f"max_to_keep is {max_to_keep}; give the number of checkpoints to keep, or None for all.")
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError("checkpoint_interval needs a step_counter that tells how far the training is.")
        if isinstance(step_counter, int | float):
            raise ValueError(
                f"step_counter is the number {step_counter}, which never changes. Give a variable, or a function such "
                "as lambda: checkpoint.step."
            )
        self._checkpoint, self._directory, self._max_to_keep = checkpoint, os.fspath(directory), max_to_keep
        self._keep_seconds = None if keep_checkpoint_every_n_hours is None else keep_checkpoint_every_n_hours * 3600
        self._prefix = os.path.join(self._directory, checkpoint_name)
        self._step_counter, self._interval, self._init_fn = step_counter, checkpoint_interval, init_fn
        self._last_step = None if last_checkpoint_step is None else float(last_checkpoint_step)
        self._one_writes: bool | None = None  # whether the job is elastic; not known before the first save
        self._kept: dict[str, float] = {}
        # A little back, so that managers made one after the other agree.
        self._last_preserved = time.time() - 1
        self._latest: str | None = None
        self._recover()

    def _recover(self) -> None:
        """Goes on with what an earlier manager of the folder left.

        What ``Checkpoint.save`` wrote, without a time, is not the manager's to delete, nor what may be kept for good.
        """
        state = get_checkpoint_state(self._directory)
        if state is None:
            warn_of_unlisted(self._prefix, lambda: self._checkpoint._find("CheckpointManager")[1].rank)
            return
        now, preserved = time.time(), state.last_preserved_timestamp
        if preserved is not None and now < preserved:
            get_logger().warning(
                "The clock of this host is behind the last preserved checkpoint timestamp of %s. The checkpoints that "
                "are there may be among those that are kept for good, and are not deleted by this manager.",
                self._directory,
            )
            preserved = now
        stamps = [min(stamp, now) for stamp in state.all_model_checkpoint_timestamps]
        paths = dict(zip(state.all_model_checkpoint_paths, stamps, strict=bool(stamps)))
        there = {path: stamp for path, stamp in paths.items() if files.index_file(path).exists()}
        self._kept = {path: stamp for path, stamp in there.items() if preserved is None or stamp > preserved}
        self._latest = state.model_checkpoint_path if files.index_file(state.model_checkpoint_path).exists() else None
        self._last_preserved = self._last_preserved if preserved is None else preserved

    def _look_again(self) -> None:
        """A worker that came back to an elastic job has missed saves of the others: the list in the folder counts."""
        if self._one_writes is False or context.current_replica() is not None:
            return
        try:
            state = get_checkpoint_state(self._directory)
        except (DataLossError, OSError):  # what is known stays
            return
        listed = None if state is None else state.model_checkpoint_path
        if listed is None or listed in (self._latest, *self._kept) or not files.index_file(listed).exists():
            return
        if self._checkpoint._find("CheckpointManager")[1].one_writes:
            self._recover()

    # ---- facts ------------------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """Steps between two checkpoints; ``None`` when it was not given."""
        return self._interval

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, which ``Checkpoint.restore`` takes; ``None`` when there is none."""
        self._look_again()
        return self._latest

    @property
    def checkpoints(self) -> list[str]:
        """The paths of those that are kept, oldest first; not of those that are kept for good."""
        self._look_again()
        return list(self._kept)

    # ---- saving -----------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
        *,
        block: bool = True,
    ) -> str | None:
        """Saves a checkpoint, then deletes what is too old; collective.

        Args:
            checkpoint_number: its number; default: one more than at the last save. ``save_counter`` counts the save
                in any case.
            check_interval: whether to save nothing before ``checkpoint_interval`` steps have passed.
            options: see ``CheckpointOptions``.
            block: as for ``Checkpoint.save``; ``checkpoints`` lists it after ``sync()``, or the next save.

        Returns:
            Its path; ``None`` when it was not due.

        Raises:
            OSError, TypeError, ValueError, RuntimeError: as for ``Checkpoint.save``.

        Example:
            >>> manager = CheckpointManager(checkpoint, "job1", max_to_keep=3)
            >>> manager.save(checkpoint_number=7)  # on every worker
            'job1/ckpt-7'
        """
        step = None if self._interval is None else self._step()
        asked = step if check_interval else None
        if self._one_writes is False and not self._due(asked):
            return None
        checkpoint = self._checkpoint
        leaves, group = checkpoint._find("CheckpointManager.save")
        self._one_writes = group.one_writes
        if group.one_writes and asked is not None:
            asked = self._agree(group, asked)
        if not self._due(asked):
            return None
        checkpoint.sync()
        if group.one_writes:
            checkpoint._catch_up(group)
            self._recover()
        number = checkpoint.save_counter + 1
        path = f"{self._prefix}-{number if checkpoint_number is None else int(checkpoint_number)}"
        plan = Planned(path, "Checkpoint.save", numbered=True, on_commit=functools.partial(self._commit, os.getcwd()))
        checkpoint._write(leaves, group, plan, is_async(options, block), number, self._finish)
        self._last_step = step
        return path

    def sync(self) -> None:
        """Waits for a save in the background; collective. Raises what ``Checkpoint.sync`` raises."""
        self._checkpoint.sync()

    def _step(self) -> float:
        value = self._step_counter() if callable(self._step_counter) else self._step_counter
        return float(value)

    def _due(self, step: float | None) -> bool:
        """Whether a save at a step is due; one that is asked for whatever the step always is."""
        if step is None or self._interval is None or self._last_step is None:
            return True
        return step - self._last_step >= self._interval

    def _agree(self, group: WorkerGroup, step: float) -> float:
        """The step that counts for all workers. One that came back may not know of the last save: the latest counts."""
        told = group.gather_objects([step, self._last_step], "CheckpointManager.save: step")
        self._last_step = max((last for _, last in told if last is not None), default=None)
        return float(told[0][0])

    def _plan(self, path: str, saved: float) -> tuple[dict[str, float], list[str], float]:
        """What is kept, what is deleted and what was last kept for good, with ``path`` as the newest."""
        kept = {k: v for k, v in self._kept.items() if k != path}
        kept[path] = saved
        old, preserved = [], self._last_preserved
        while self._max_to_keep is not None and len(kept) > self._max_to_keep:
            oldest = next(iter(kept))
            stamp = kept.pop(oldest)
            if self._keep_seconds is not None and stamp - self._keep_seconds >= preserved:
                preserved = stamp
            else:
                old.append(oldest)
        return kept, old, preserved

    def _commit(self, base: str, path: str, saved: float) -> None:
        """On worker 0, maybe in another thread; ``base``: the folder that the process was in when it saved."""
        kept, old, preserved = self._plan(path, saved)

        def write(listed: dict[str, float]) -> None:
            latest, *places = (os.path.join(base, entry) for entry in (path, *listed))
            state = CheckpointState(latest, places, list(listed.values()), preserved)
            write_state(os.path.join(base, self._directory), state)

        if old:
            # Still listed while they are deleted: a manager that comes after a crash tries again.
            write({**self._kept, path: saved})
        for unwanted in old:
            self._delete(os.path.join(base, unwanted), os.path.join(base, self._directory))
        write(kept)

    def _delete(self, path: str, directory: str) -> None:
        if not Path(path).resolve().is_relative_to(Path(directory).resolve()):
            get_logger().warning("%s is not in the folder of its manager, %s, and is not deleted", path, directory)
            return
        try:
            files.remove_checkpoint(path)
        except OSError as error:
            get_logger().warning("The old checkpoint %s could not be deleted: %s", path, error)

    def _finish(self, path: str, saved: float) -> None:
        """On every worker; from worker 0's time, so that all have the same list."""
        self._kept, _, self._last_preserved = self._plan(path, saved)
        self._latest = path

    # ---- restoring --------------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint, or calls ``init_fn`` when there is none; collective.

        A damaged checkpoint is reported as an error in the log, and the one before it is restored.

        Returns:
            The path of the restored checkpoint; ``None`` when there was none.

        Raises:
            DataLossError: all checkpoints are damaged.
            InvalidArgumentError: it does not fit the objects.
        """
        self._look_again()
        candidates = [path for path in reversed(self._kept) if path != self._latest]
        candidates = [self._latest, *candidates] if self._latest is not None else candidates
        for place, path in enumerate(candidates):
            try:
                self._checkpoint.restore(path)
            except (DataLossError, NotFoundError) as error:
                if place + 1 == len(candidates):
                    raise
                get_logger().error("%s GOING BACK TO THE CHECKPOINT BEFORE IT, %s.", error, candidates[place + 1])
                continue
            if self._interval is not None:
                self._last_step = self._step()
            return path
        if self._init_fn is not None:
            self._init_fn()
        return None
