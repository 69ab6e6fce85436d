"""``tf.train.Checkpoint``: the state of a job under names, saved and restored by all workers together."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from tfstyle_dist.checkpoint import later
from tfstyle_dist.checkpoint.leaves import CounterLeaf, Leaf
from tfstyle_dist.checkpoint.listing import make_latest
from tfstyle_dist.checkpoint.options import CheckpointOptions, is_async
from tfstyle_dist.checkpoint.planned import Planned, Then, do_nothing
from tfstyle_dist.checkpoint.restoring import restore
from tfstyle_dist.checkpoint.saving import Save, save_by_one
from tfstyle_dist.checkpoint.status import CheckpointLoadStatus
from tfstyle_dist.checkpoint.tracking import find_leaves, group_of, worker_of
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.runtime.worker import Worker

_COUNTER = "save_counter"


class Checkpoint:
    """Saves and restores objects under names (``tf.train.Checkpoint``).

    It holds modules, ``torch.optim`` and ``train`` optimizers, schedulers and whatever else has ``state_dict`` and
    ``load_state_dict`` (an iterator of a distributed dataset: its position), variables, tensors, ``torch.Generator``,
    ``RandomState``, plain values, nested checkpoints, and lists and dicts of these. What is saved does not depend on
    the numbers of workers and replicas. ``save``, ``write``, ``restore``, ``read`` and ``sync`` are collective: all
    workers call them, in cross-replica context.

    An object can be added or replaced later as an attribute; plain values are read and written so. What is added after
    ``restore``, here or to a nested ``Checkpoint``, takes its saved state then; plain values do not.

    Args:
        root: an object to be tracked under the name ``root``.
        **kwargs: the objects by name.

    Raises:
        ValueError: a name that the class needs for itself.

    Example:
        >>> checkpoint = Checkpoint(model=model, optimizer=optimizer, epoch=0)
        >>> path = checkpoint.save("training/ckpt")
        >>> checkpoint.epoch = 7
        >>> checkpoint.restore(path).assert_consumed().matched, checkpoint.epoch
        (3, 0)

    Source: ``tf.train.Checkpoint``.
    """

    def __init__(self, root: Any = None, **kwargs: Any) -> None:
        self._tfstyle_tracked: dict[str, Any] = {}
        self._save: Save | None = None
        self._on_finish: Then = do_nothing
        self._later: list[later.Later] = []
        self._counters = {_COUNTER: 0}
        objects = kwargs if root is None else {"root": root, **kwargs}
        for name, value in objects.items():
            self._check(name, not name.startswith("_"))
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Tracks ``value`` under ``name``; raises ValueError for a name that the class needs for itself."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        self._check(name, not hasattr(Checkpoint, name))
        self._tfstyle_tracked[name] = value
        if self._later:
            later.attached(self, name, value)

    def _check(self, name: str, is_free: bool) -> None:
        if not is_free:
            raise ValueError(f"Checkpoint cannot track an object under the name {name!r}; choose another name.")

    def __getattr__(self, name: str) -> Any:
        """The object tracked under ``name``."""
        tracked = self.__dict__.get("_tfstyle_tracked", {})
        if name in tracked:
            return tracked[name]
        raise AttributeError(f"This Checkpoint has no {name!r}; it tracks {sorted(tracked)}.")

    def __delattr__(self, name: str) -> None:
        """Does not track it any more."""
        if self._tfstyle_tracked.pop(name, None) is None:
            object.__delattr__(self, name)

    @property
    def save_counter(self) -> int:
        """How often ``save`` was called, in the runs before this one too; it is saved and restored."""
        return self._counters[_COUNTER]

    def counter(self, name: str) -> int:
        """A number that is saved and restored with the objects."""
        return self._counters[name]

    def add_counter(self, name: str) -> None:
        """Keeps a number under ``name``, from 0; that an older checkpoint does not have it is no mismatch."""
        self._counters.setdefault(name, 0)

    def add_to_counter(self, name: str) -> None:
        """Adds one."""
        self._counters[name] += 1

    def worker(self) -> Worker:
        """The worker of the strategy that the objects belong to.

        Raises:
            RuntimeError: see ``save``.
        """
        return worker_of(self._leaves(), "this call")

    # ---- saving -----------------------------------------------------------------------------------------------

    def save(
        self,
        file_prefix: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        block: bool = True,
    ) -> str:
        """Writes a numbered checkpoint and makes it the latest one of its folder; collective.

        Args:
            file_prefix: folder and beginning of the name, e.g. ``"/data/job1/ckpt"``.
            options: see ``CheckpointOptions``.
            block: with ``False`` it returns when the state is copied, and the files are written while training goes on.
                Call ``sync()`` at the end; the next save or restore does, too. In an elastic job it always blocks.

        Returns:
            The path of the checkpoint, ``<file_prefix>-<number>``.

        Raises:
            OSError: the disk is full, the folder read-only, ...; raised on all workers. Earlier checkpoints are intact,
                and training can go on.
            TypeError: an object has a state that a checkpoint cannot hold.
            ValueError: an ON_READ variable of aggregation NONE.
            RuntimeError: called in replica context.
            CollectiveMismatchError: the workers save different things.
            PeerLostError, DeadlineExceededError: a worker did not call it, or is gone; the message names it.
        """
        self.sync()
        leaves, group = self._find("Checkpoint.save")
        if group.one_writes:
            self._catch_up(group)
        counter = self.save_counter + 1
        path = f"{os.fspath(file_prefix)}-{counter}"
        latest = functools.partial(make_latest, os.path.abspath(path))
        plan = Planned(path, "Checkpoint.save", numbered=True, on_commit=latest)
        return self._write(leaves, group, plan, is_async(options, block), counter)

    def write(
        self,
        file_prefix: str | os.PathLike[str],
        options: CheckpointOptions | None = None,
        *,
        block: bool = True,
    ) -> str:
        """Writes a checkpoint under exactly this path, replacing one of that name; collective.

        The folder's latest checkpoint and ``save_counter`` stay what they are.

        Args:
            file_prefix: the path of the checkpoint, e.g. ``"/data/job1/before_tuning"``.
            options: see ``CheckpointOptions``.
            block: as for ``save``.

        Returns:
            The path, as it was given.

        Raises:
            OSError, TypeError, ValueError, RuntimeError, CollectiveMismatchError, PeerLostError,
                DeadlineExceededError: as for ``save``.

        Example:
            >>> checkpoint.write("job1/before_tuning")
            'job1/before_tuning'
        """
        self.sync()
        leaves, group = self._find("Checkpoint.write")
        plan = Planned(os.fspath(file_prefix), "Checkpoint.write")
        return self._write(leaves, group, plan, is_async(options, block), self.save_counter)

    def _write(
        self,
        leaves: Sequence[Leaf],
        group: WorkerGroup,
        plan: Planned,
        asynchronous: bool,
        counter: int,
        on_finish: Then = do_nothing,
    ) -> str:
        before, self._counters[_COUNTER] = self.save_counter, counter
        for leaf in leaves:
            if isinstance(leaf, CounterLeaf):  # counted since the leaves were found
                leaf.target = self._counters[leaf.path]
        try:
            if group.one_writes:
                on_finish(plan.path, save_by_one(group, plan, leaves))
                return plan.path
            save = Save(group, plan, leaves)
            if asynchronous:
                save.later()
                self._save, self._on_finish = save, on_finish
            else:
                save.now()
                on_finish(plan.path, save.time)
        except Exception:
            self._counters[_COUNTER] = before
            raise
        return plan.path

    def sync(self) -> None:
        """Waits for a save in the background, if there is one; collective.

        Raises:
            OSError, PeerLostError, DeadlineExceededError: it failed, as for ``save``.
        """
        save, self._save = self._save, None
        if save is not None:
            save.finish()
            self._on_finish(save.path, save.time)

    def _catch_up(self, group: WorkerGroup) -> None:
        """A worker that came back to an elastic job may not have counted all saves: the largest number counts."""
        self._counters[_COUNTER] = max(group.gather_objects(self.save_counter, "Checkpoint.save: number"))

    # ---- restoring --------------------------------------------------------------------------------------------

    def restore(
        self, save_path: str | os.PathLike[str] | None, options: CheckpointOptions | None = None
    ) -> CheckpointLoadStatus:
        """Reads a checkpoint into the objects; collective.

        Works for any numbers of workers and replicas. Objects that the checkpoint does not have stay as they are; the
        result's methods check that, and a warning tells if none of them is called. What comes later is restored then.

        Args:
            save_path: what ``save`` or ``latest_checkpoint`` returned; with ``None`` nothing happens.
            options: accepted for TF's signature.

        Returns:
            What matched; see ``CheckpointLoadStatus``.

        Raises:
            RuntimeError: called in replica context.
            NotFoundError: there is no such checkpoint.
            DataLossError: it is damaged; the message names the file and the other checkpoints of the folder.
            InvalidArgumentError: shapes, dtypes or kinds differ; nothing was changed.
            CollectiveMismatchError: the workers restore different checkpoints.
            PeerLostError, DeadlineExceededError: a worker did not call it, or is gone; the message names it.
        """
        return self._restore(save_path, "Checkpoint.restore")

    def read(self, save_path: str | os.PathLike[str], options: CheckpointOptions | None = None) -> CheckpointLoadStatus:
        """As ``restore``, but ``save_counter`` and the other counters stay what they are; collective.

        Args:
            save_path: what ``write`` or ``save`` returned.
            options: accepted for TF's signature.

        Returns:
            What matched; see ``CheckpointLoadStatus``.

        Raises:
            RuntimeError, NotFoundError, DataLossError, InvalidArgumentError, CollectiveMismatchError, PeerLostError,
                DeadlineExceededError: as for ``restore``.

        Example:
            >>> path = checkpoint.write("job1/before_tuning")
            >>> checkpoint.read(path).assert_consumed().matched, checkpoint.save_counter
            (1, 1)
        """
        before = dict(self._counters)
        status = self._restore(save_path, "Checkpoint.read")
        self._counters = before
        return status

    def _restore(self, save_path: str | os.PathLike[str] | None, what: str) -> CheckpointLoadStatus:
        self.sync()
        if save_path is None:
            return CheckpointLoadStatus(None)
        leaves, group = self._find(what)
        status = restore(group, os.fspath(save_path), leaves, self._counters.keys(), what)
        later.begin(self, status.restored)
        return status

    def _find(self, what: str) -> tuple[list[Leaf], WorkerGroup]:
        """The objects as they are now, and the workers that make a call of all."""
        leaves = self._leaves()
        return leaves, group_of(leaves, what)

    def _leaves(self) -> list[Leaf]:
        def replace(name: str, value: Any) -> None:
            (self._counters if name in self._counters else self._tfstyle_tracked)[name] = value

        return find_leaves(self._tfstyle_tracked, self._counters, replace)
