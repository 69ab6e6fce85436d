"""``PreemptionCheckpointHandler``: all workers save at the same step when one is about to be ended."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tfstyle_dist.checkpoint import Checkpoint, CheckpointManager
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.train.preemption_watch import TerminationWatch

RESTARTABLE_EXIT_CODE = 143  # what a shell says of a process that SIGTERM ended
_RUN_CALLS = "preemption_run_calls"


@dataclass(frozen=True)
class TerminationConfig:
    """How a worker learns that it is to end, and what it does then (``experimental.TerminationConfig``).

    Args:
        termination_watcher_fn: asked once a second in a thread; true: this worker is to end; default: SIGTERM.
        exit_fn: called on all workers after the checkpoint; default: ends the process with exit code 143.
        grace_period: seconds between the notice and the end. With 0, the default, all workers save and exit at once.
            With more they save at once, train on, and save again and exit shortly before the end.
        save_fn: called in place of the manager's ``save``.
    """

    termination_watcher_fn: Callable[[], Any] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


class PreemptionCheckpointHandler:
    """Saves a checkpoint when a worker is about to be preempted, and restores it at the next start.

    All workers make one and call ``run`` for each step alike. After one of them was told to end, that step is still
    made; before the next one all save, and call ``exit_fn``. Each call costs one small message among the workers.

    Args:
        cluster_resolver: accepted for TF's signature; the workers are those of the checkpoint's objects.
        checkpoint_or_checkpoint_manager: what to save. Its newest checkpoint is restored here.
        checkpoint_dir: the folder, when a ``Checkpoint`` is given; one checkpoint is kept.
        termination_config: see ``TerminationConfig``.

    Raises:
        TypeError: no ``Checkpoint`` and no ``CheckpointManager``.
        ValueError: a ``Checkpoint`` without a folder, or SIGTERM is to be watched outside the main thread.

    Example:
        >>> handler = PreemptionCheckpointHandler(None, manager)
        >>> while handler.total_run_calls < 100:
        ...     handler.run(train_step)

    Source: ``tf.distribute.experimental.PreemptionCheckpointHandler``.
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._checkpoint = self._manager.checkpoint
        self._config = termination_config or TerminationConfig()
        self._checkpoint.add_counter(_RUN_CALLS)
        self._manager.restore_or_initialize()
        self._worker = self._checkpoint.worker()
        self._watch = TerminationWatch(self._config.termination_watcher_fn)
        self._told: tuple[bool, bool] | None = None  # whether any worker is to end, and whether its time has come
        self._ends_at: float | None = None
        self._counting_down = False
        self._longest_step = self._longest_save = 0.0

    @property
    def total_run_calls(self) -> int:
        """How many calls of ``run`` came to their end, in the runs before this one too."""
        return self._checkpoint.counter(_RUN_CALLS)

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves and exits if a worker was told to end before the last call; else, or then, makes a step.

        Args:
            distributed_train_function: the step, e.g. a function that calls ``strategy.run``.
            *args: for it.
            **kwargs: for it.

        Returns:
            What the function returns; an exception passes through, and is not counted.
        """
        self._save_if_told()
        self._tell()
        began = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._longest_step = max(self._longest_step, time.monotonic() - began)
        self._checkpoint.add_to_counter(_RUN_CALLS)
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """The same for loops that do not use ``run``: call it after each step, on all workers.

        Args:
            *args: for ``CheckpointManager.save``, or for ``save_fn``.
            **kwargs: likewise.
        """
        self._save_if_told(*args, **kwargs)
        self._tell()

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """For a loop with ``save_checkpoint_if_preempted``: a notice during its last steps is not lost.

        At the end of the block all workers save and exit if one of them was told to end. An error in the block of a
        worker that was told to end carries a note that says so.
        """
        try:
            yield
        except Exception as error:
            if self._watch.fired_at is not None:
                error.add_note("[tfstyle_dist] this worker had been told to end; no checkpoint was saved after that")
            raise
        self._save_if_told()
        self._tell()
        self._save_if_told()

    # ---- agreeing ---------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Tells the others what this worker knows; acted on before the next step."""
        due = self._ends_at is not None and time.monotonic() >= self._ends_at - self._reserve()
        flags = self._worker.group.numbers(2 * int(due) + int(self._watch.fired), "preemption")
        self._told = any(f & 1 for f in flags), any(f & 2 for f in flags)

    def _reserve(self) -> float:
        """Seconds that a step and a save may take, twice."""
        return 2 * (2 * self._longest_step + self._longest_save)

    def _save_if_told(self, *args: Any, **kwargs: Any) -> None:
        if self._told is None:
            return
        told, due = self._told
        self._told = None
        if not (due if self._counting_down else told):
            return
        began = time.monotonic()
        save = self._config.save_fn or self._default_save
        save(*args, **kwargs)
        self._longest_save = max(self._longest_save, time.monotonic() - began)
        grace = self._config.grace_period or 0
        if grace > 0 and not self._counting_down:
            self._counting_down = True
            self._ends_at = None if self._watch.fired_at is None else self._watch.fired_at + grace
            get_logger().warning("A worker is to end: saved a checkpoint, training goes on for up to %g s.", grace)
            return
        self._counting_down, self._ends_at = False, None
        self._watch.clear()
        get_logger().warning("A worker is to end: saved a checkpoint after %d calls of run.", self.total_run_calls)
        (self._config.exit_fn or _exit)()

    def _default_save(self, *args: Any, **kwargs: Any) -> None:
        self._manager.save(*args, **{"check_interval": False, **({} if args else kwargs)})


def _manager_of(given: Any, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    if not isinstance(given, Checkpoint):
        raise TypeError(f"PreemptionCheckpointHandler takes a Checkpoint or a CheckpointManager, got {given!r}.")
    if not directory:
        raise ValueError("PreemptionCheckpointHandler needs a checkpoint_dir when it is given a Checkpoint.")
    return CheckpointManager(given, directory, max_to_keep=1)


def _exit() -> None:
    sys.exit(RESTARTABLE_EXIT_CODE)


class PreemptionWatcher:
    """Notices that this worker was told to end by SIGTERM (``experimental.PreemptionWatcher``).

    Ask ``preemption_message`` in the loop; ``PreemptionCheckpointHandler`` does that, and saves.

    Raises:
        ValueError: built outside the main thread.

    Example:
        >>> PreemptionWatcher().preemption_message is None
        True
    """

    def __init__(self) -> None:
        self._watch = TerminationWatch(None)

    @property
    def preemption_message(self) -> str | None:
        """Which worker was told to end; ``None`` while none was."""
        if not self._watch.fired:
            return None
        return f"SIGTERM for process {os.getpid()} on {socket.gethostname()}"

    def block_until_worker_exit(self) -> None:
        """Nothing, as in TensorFlow outside TPUs: each worker of this package ends by itself."""
