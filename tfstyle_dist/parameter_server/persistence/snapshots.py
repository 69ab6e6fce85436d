"""What a parameter server writes down while it works, and how it comes back from that when it is started again.

A snapshot is made while the server goes on serving: one variable after the other is copied between two requests, with
its optimizer slots and with the counts of the writes that scheduled functions have made to it, and written by a thread.
So a snapshot is consistent for each variable, and a function that is run again after a restart repeats exactly the
writes that the snapshot lacks. Variables, optimizers and hyperparameters that come between two snapshots are in a
journal; with ``every_write`` every write is, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.persistence import journal
from tfstyle_dist.parameter_server.persistence.record_files import (
    RecordFile,
    SnapshotFolder,
    read_records,
)
from tfstyle_dist.parameter_server.persistence.table_state import (
    clear,
    copy_rest,
    copy_variable,
    put_rest,
    put_slots,
    put_variable,
)
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.protocol.header import Header
from tfstyle_dist.parameter_server.protocol.operations import (
    Operation,
)
from tfstyle_dist.parameter_server.server.background_jobs import Jobs
from tfstyle_dist.parameter_server.server.table import VariableTable

KEEP = 2
"""So many snapshots are kept."""
_NEVER = (-1, -1)
_AGAIN_SECONDS = 5.0
"""After what time at the latest a snapshot is made of what a journal lacks."""
_NEW_VERSIONS = 1 << 32
"""Versions after a restart are larger than any that a client may have seen before."""


class SnapshotKeeper:
    """Keeps the files of one server for one session.

    Args:
        options: ``folder``, ``seconds`` between two snapshots, ``every_write``.
        task: index of the server.
        session: of the coordinator.
        table: the state.
        jobs: of the server.
    """

    def __init__(self, options: dict[str, Any], task: int, session: str, table: VariableTable, jobs: Jobs) -> None:
        self.folder = SnapshotFolder(str(options["folder"]), task, session)
        self.seconds, self.every_write = float(options["seconds"]), bool(options["every_write"])
        self._table, self._jobs, self._task = table, jobs, task
        self._journal: RecordFile | None = None
        self._number = 0
        self._job: int | None = None
        self._started, self._changes = time.monotonic(), _NEVER

    def keeps_in(self, folder: str) -> bool:
        """Whether the files are in this folder of a job."""
        return self.folder.path.parent.resolve() == Path(folder).resolve()

    # ---- coming back ------------------------------------------------------------------------------------------

    def restore(self, call: journal.Call) -> bool:
        """Fills the table with what is on the disk, if anything is.

        Args:
            call: carries out a call of the coordinator.

        Returns:
            Whether there was something.
        """
        self.folder.remove_other_sessions()
        snapshots, journals = self.folder.numbers("snapshot"), self.folder.numbers("journal")
        found = self._restore_snapshot(snapshots)
        used = [n for n in journals if n >= found]
        # Without a snapshot the journal from the very start is needed.
        restored = found > 0 or 0 in used
        for number in used if restored else ():
            journal.replay(self.folder.journal(number), self._table, call)
        if restored:
            for stored in self._table.variables.values():
                stored.version += _NEW_VERSIONS
            get_logger().warning(
                "ps task %d restored %d variables from %s", self._task, len(self._table.variables), self.folder.path
            )
        self._number = max([*snapshots, *journals, 0])
        if not restored:
            self._open_journal()
        else:
            self.begin()  # a new journal starts with a new snapshot
        return restored

    def _restore_snapshot(self, numbers: Sequence[int]) -> int:
        for number in reversed(numbers):
            try:
                self._load(list(read_records(self.folder.snapshot(number))))
                return number
            except Exception as error:  # a pickle that is not ours can raise anything
                clear(self._table)
                get_logger().error("snapshot %d cannot be used: %s: %s", number, type(error).__name__, error)
        return 0

    def _load(self, records: Sequence[Sequence[bytes]]) -> None:
        *variables, end = [pickling.loads(parts) for parts in records] or [{}]
        if not isinstance(end, dict) or "rules" not in end:
            raise DataLossError("its end is missing")
        for entry in variables:
            put_variable(self._table, entry)
        put_rest(self._table, end)
        for entry in variables:
            put_slots(self._table, entry["number"], entry["slots"])

    # ---- writing down -----------------------------------------------------------------------------------------

    def _open_journal(self) -> None:
        before, self._journal = self._journal, RecordFile(self.folder.journal(self._number))
        if before is not None:
            before.close()

    def note_call(self, meta: dict[str, Any], parts: Sequence[Any]) -> None:
        """Keeps a call that changed what the table holds, in a snapshot if the journal cannot take it."""
        try:
            if self._journal is not None:
                self._journal.write(journal.call_record(meta, parts))
        except OSError as error:
            self._lacks_something()
            get_logger().error(
                "ps task %d cannot write to %s (%s): a snapshot is to keep what it lacks", self._task,
                self.folder.path, error,
            )  # fmt: skip

    def note_batch(
        self, header: Header, operations: Sequence[Operation], answers: Sequence[Operation], data: torch.Tensor
    ) -> None:
        """Keeps the writes of a batch, with the version that each has made; nothing without ``every_write``.

        Raises:
            DataLossError: the disk does not take them.
        """
        if not self.every_write or self._journal is None:
            return
        record = journal.batch_record(header, operations, answers, data)
        if not record:
            return
        try:
            self._journal.write(record)
        except OSError as error:
            self._lacks_something()
            raise DataLossError(
                f"ps task {self._task} has made this write, but cannot keep it in {self.folder.path} ({error}): it "
                "is lost if the server is killed before its next snapshot. Make room there, or make the strategy "
                "without snapshot_every_write."
            ) from None

    def _lacks_something(self) -> None:
        """The journal lacks what it should have: a snapshot is made, but not all the time while the disk is full."""
        self._changes = _NEVER
        self._started = min(self._started, time.monotonic() - self.seconds + _AGAIN_SECONDS)

    def tick(self) -> None:
        """Called between requests: begins a snapshot when it is time and something has changed."""
        if self._job is not None:
            ended, error = self._jobs.outcome(self._job)
            if not ended:
                return
            self._job = None
            if error is not None:
                self._changes = _NEVER
                get_logger().error(
                    "ps task %d could not write a snapshot to %s (%s); the earlier ones are kept and it will try again",
                    self._task, self.folder.path, error,
                )  # fmt: skip
        if self.unsaved and time.monotonic() - self._started >= self.seconds:
            self.begin()

    def soon(self) -> None:
        """Something came that no journal has: a snapshot is made as soon as possible."""
        self._started = time.monotonic() - self.seconds

    @property
    def unsaved(self) -> bool:
        """Whether something has changed since the last complete snapshot began."""
        return self._job is not None or self._changes != (self._table.applied, self._table.calls)

    def rest_ms(self, most: int) -> int:
        """How long ``tick`` need not be called."""
        if not self.unsaved:
            return most
        return min(most, max(int(1000 * (self._started + self.seconds - time.monotonic())), 1))

    def begin(self) -> None:
        """Begins a snapshot."""
        self._started, self._changes = time.monotonic(), (self._table.applied, self._table.calls)
        self._number += 1
        try:
            self._open_journal()
        except OSError as error:
            get_logger().error("ps task %d cannot write to %s: %s", self._task, self.folder.path, error)
            self._number -= 1
            self._changes = _NEVER
            return
        self._job = self._jobs.start(self._steps(self._number))

    def _steps(self, number: int) -> Iterator[Callable[[], None]]:
        unfinished = Path(f"{self.folder.snapshot(number)}.tmp")
        file = RecordFile(unfinished)
        try:
            for entries in _bundles(self._table):
                yield lambda entries=entries: _write(file, entries)  # type: ignore[misc]
            end = copy_rest(self._table)
            yield lambda: self._finish(file, unfinished, end, number)
        finally:
            file.close()
            unfinished.unlink(missing_ok=True)

    def _finish(self, file: RecordFile, unfinished: Path, end: dict[str, Any], number: int) -> None:
        _write(file, [end])
        file.sync()
        self.folder.publish(unfinished, number)
        kept = self.folder.numbers("snapshot")[-KEEP:]
        self.folder.remove_before(kept[0])

    # ---- life -------------------------------------------------------------------------------------------------

    def close(self, forget: bool) -> None:
        """Ends the keeping.

        Args:
            forget: the session is over; its files are deleted.
        """
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if forget:
            self.folder.remove_all()


def _write(file: RecordFile, entries: Sequence[dict[str, Any]]) -> None:
    for entry in entries:
        file.write(pickling.dumps(entry))


def _bundles(table: VariableTable, most: int = 64 << 20) -> Iterator[list[dict[str, Any]]]:
    """Copies of the variables, small ones together."""
    entries, size = [], 0
    for number in list(table.variables):
        entry = copy_variable(table, number)
        entries.append(entry)
        size += entry["value"].nbytes
        if size >= most:
            yield entries
            entries, size = [], 0
    if entries:
        yield entries
