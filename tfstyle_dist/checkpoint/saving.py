"""Writing a checkpoint: all workers together, each its share; it exists when worker 0 has given it its name."""

from __future__ import annotations

import atexit
import json
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.checkpoint import dcp, files, on_servers
from tfstyle_dist.checkpoint.exchange import by_one, exchange
from tfstyle_dist.checkpoint.leaves import Leaf
from tfstyle_dist.checkpoint.planned import Planned
from tfstyle_dist.checkpoint.snapshot import Snapshot
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.core.deadline import Deadline
from tfstyle_dist.core.errors import DataLossError, DeadlineExceededError, NotFoundError
from tfstyle_dist.core.logging import get_logger

_POLL_SECONDS = 0.02
_LIMIT_AT_EXIT = timedelta(seconds=30)


class Save:
    """One checkpoint on its way to the disk.

    Args:
        group: the workers that save together.
        plan: what is to be written where.
        leaves: what is saved.

    Attributes:
        path: the checkpoint, as the program gave it.
        error: why it failed.
        time: when it was begun, on worker 0.
    """

    def __init__(self, group: WorkerGroup, plan: Planned, leaves: Sequence[Leaf]) -> None:
        self.path = plan.path
        self.error: Exception | None = None
        self._group, self._plan = group, plan
        self._failed = f"Checkpoint {plan.path!r} was not written (those before it are untouched)"
        self._thread: threading.Thread | None = None
        self._seen = False
        snapshot, error, token = None, None, secrets.token_hex(4)
        self._folder = files.new_folder(plan.place, token)
        _under_way.add(self)
        try:
            snapshot = Snapshot(leaves, group.rank)
            if group.rank == 0:
                self._prepare()
        except Exception as failure:
            error = failure
        same = {"path": plan.path, "saves": None if snapshot is None else snapshot.describe()}
        try:
            told = exchange(group, plan.what, self._failed, error, same=same, token=token, time=time.time())
            assert snapshot is not None
            snapshot.resolve()
        except Exception:
            self._clean()
            raise
        self.time: float = told[0]["time"]
        self._folder = files.new_folder(plan.place, told[0]["token"])
        self._objects, self._own = snapshot.objects, snapshot.own
        self._tensors, self._facts = snapshot.share(group.rank, group.size)
        self._sources = snapshot.sources()
        self._server_parts: list[str] = []

    def _prepare(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        under_way = {save._folder for save in list(_under_way)}
        files.remove_leftovers(self._plan.place, self._plan.numbered, under_way)
        self._folder.mkdir()

    # ---- on all workers ---------------------------------------------------------------------------------------

    def now(self) -> None:
        """Writes, and returns when the checkpoint exists.

        Raises:
            OSError: a worker could not write; raised on all.
            PeerLostError, DeadlineExceededError: a worker is gone, or did not come in time.
        """
        error = _outcome(self._write_part)
        try:
            exchange(self._group, f"{self._plan.what}: written", self._failed, error)
            error = _outcome(self._commit) if self._group.rank == 0 else None
            exchange(self._group, f"{self._plan.what}: committed", self._failed, error)
        except Exception:
            self._clean()
            raise

    def later(self) -> None:
        """Copies what is saved and writes it in a thread, while training goes on; ``finish`` tells how it went.

        Raises:
            Exception: a worker could not copy, for lack of memory; raised on all, and there is nothing to finish.
        """
        error = _outcome(self._copy)
        try:
            exchange(self._group, f"{self._plan.what}: copied", self._failed, error)
        except Exception:
            self._clean()
            raise
        self._thread = threading.Thread(target=self._work, name=f"checkpoint {Path(self.path).name}")
        self._thread.start()

    def finish(self) -> None:
        """Waits for a save begun with ``later``; collective.

        Raises:
            OSError, PeerLostError, DeadlineExceededError: as for ``now``.
        """
        assert self._thread is not None
        self._thread.join()
        self._seen = True
        try:
            # The worker that failed tells why.
            error = None if isinstance(self.error, _FailedElsewhere) else self.error
            exchange(self._group, "Checkpoint.sync", self._failed, error)
        finally:
            self._clean()

    def _clean(self) -> None:
        if self._group.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the work ---------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        self._tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self._tensors.items()}

    def _write_part(self) -> None:
        part = self._folder / f"part-{self._group.rank}"
        try:
            dcp.write_part(part, self._tensors)
            if self._sources:
                self._server_parts = on_servers.write(self._folder, self._sources)
            dcp.finish_part(part, self._facts, self._own)
        except Exception:
            shutil.rmtree(part, ignore_errors=True)  # makes room for the word to the others
            raise
        self._tensors = {}

    def _commit(self) -> None:
        """On worker 0, when all parts are there."""
        names = [f"part-{worker}" for worker in range(self._group.size)]
        for part in self._server_parts:
            made = json.loads((self._folder / f"{part}.json").read_text(encoding="utf-8"))["parts"]
            (self._folder / f"{part}.json").unlink()
            names += [f"{part}-{number}" for number in range(made)]
        content: dict[str, Any] = {
            "saved": {
                "workers": self._group.size,
                "time": self.time,
                "torch": str(torch.__version__),
            },
            "objects": self._objects,
            "tensors": {},
            "files": {},
        }
        for worker, name in enumerate(names):  # what servers wrote has nothing of a worker's own
            about = (self._folder / f"{name}.json").read_text(encoding="utf-8")
            part = json.loads(about)
            content["tensors"].update(part["tensors"])
            content["files"].update(part["files"])
            for path, tree in part["own"].items():
                content["objects"][path]["tree"][str(worker)] = tree
        dcp.join_parts(self._folder, names)
        for name in names:
            (self._folder / f"{name}.json").unlink()
        content["files"][dcp.METADATA_FILE] = files.fingerprint(self._folder / dcp.METADATA_FILE)
        files.publish(self._folder, self._plan.place, content)
        self._plan.on_commit(self.path, self.time)

    # ---- in a thread ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """No group here: the training uses it meanwhile. The workers meet through the files."""
        self.error = _outcome(self._work_alone)
        if self.error is not None:
            get_logger().error("%s: %s", self._failed, self.error)
            with suppress(OSError):
                self._mark(self._group.rank).touch()

    def _work_alone(self) -> None:
        self._write_part()
        deadline = Deadline(self._group.timeout)
        if self._group.rank == 0:
            self._wait(deadline, lambda w: (self._folder / f"part-{w}.json").exists(), "written their part")
            self._commit()
        else:
            self._wait(deadline, lambda w: w != 0 or self._committed(), "given the checkpoint its name")

    def _committed(self) -> bool:
        try:
            return str(files.read_index(self._plan.place)["data"]) == self._folder.name.removesuffix(files.UNFINISHED)
        except (NotFoundError, DataLossError):
            return False

    def _wait(self, deadline: Deadline, done: Callable[[int], bool], what: str) -> None:
        at_exit = None
        while absent := [worker for worker in range(self._group.size) if not done(worker)]:
            for worker in range(self._group.size):
                if worker != self._group.rank and self._mark(worker).exists():
                    raise _FailedElsewhere(f"worker {worker} could not write")
            if at_exit is None and not threading.main_thread().is_alive():
                at_exit = Deadline(_LIMIT_AT_EXIT)
            if deadline.passed() or (at_exit is not None and at_exit.passed()):
                raise DeadlineExceededError(
                    f"worker(s) {absent} have not {what} within {at_exit or deadline}. They may be gone, or "
                    f"{self._folder.parent} may not be on a disk that all hosts share"
                )
            time.sleep(_POLL_SECONDS)

    def _mark(self, worker: int) -> Path:
        return self._folder / f"part-{worker}.failed"

    def report_unseen(self) -> None:
        """At the end of the program: says what nobody asked for, and cleans up."""
        if self._thread is not None and not self._seen and self.error is not None:
            get_logger().error("%s: %s. Call sync() at the end to have it raised.", self._failed, self.error)
            self._clean()


def save_by_one(group: WorkerGroup, plan: Planned, leaves: Sequence[Leaf]) -> float:
    """One worker writes what every worker holds; if it is lost, the next one does.

    Args:
        group: one whose ``one_writes`` is true.
        plan: what is to be written where.
        leaves: what is saved.

    Returns:
        The time of the save.

    Raises:
        OSError: it could not be written; on all workers.
    """

    def write() -> float:
        save = Save(group, plan, leaves)
        save.now()
        return save.time

    failed = f"Checkpoint {plan.path!r} was not written (those before it are untouched)"
    return float(by_one(group, plan.what, failed, write))


class _FailedElsewhere(Exception):
    """Another worker has the error."""


_under_way: weakref.WeakSet[Save] = weakref.WeakSet()
"""The saves of this process, as long as somebody asks for their end."""


@atexit.register
def _report_at_exit() -> None:
    for save in list(_under_way):
        save.report_unseen()


def _outcome(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None
