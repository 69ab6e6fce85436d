"""The files from which a parameter server that was started again restores: snapshots and journals.

Of a server with task index 0 and the folder ``/data/job1`` they are in ``/data/job1/ps-0``: ``<session>-<n>.snapshot``
holds every variable, ``<session>-<n>.journal`` what came after snapshot ``n`` began (``n`` = 0: since the start). A
snapshot is written under another name and renamed when it is complete and on the disk. Both are sequences of records:
lists of byte strings with a checksum. They hold pickles: the folder belongs to the user of the server alone, and files
of others are refused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tfstyle_dist.core.errors import DataLossError
from tfstyle_dist.core.logging import get_logger

MAGIC = b"tfSR"
_HEAD = struct.Struct("<4sII")
_MOST_PARTS = 1 << 20


class RecordFile:
    """A file of records being written.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._size = path, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._handle = os.open(path, flags, 0o600)

    def write(self, parts: Sequence[Any]) -> None:
        """Appends a record. It is in the system's hands when this returns: it outlives the process.

        Raises:
            OSError: the disk is full, ...; the file is as before.
        """
        views = [memoryview(part).cast("B") for part in parts]
        sizes = struct.pack(f"<{len(views)}Q", *map(len, views))
        checksum = zlib.crc32(sizes)
        for view in views:
            checksum = zlib.crc32(view, checksum)
        views.insert(0, memoryview(_HEAD.pack(MAGIC, len(views), checksum) + sizes))
        size = self._size + sum(map(len, views))
        try:
            self._write_all(views)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._size)  # no half a record before the next one
            raise
        self._size = size

    def _write_all(self, views: list[memoryview]) -> None:
        views = [v for v in views if len(v)]
        while views:
            written = os.writev(self._handle, views[:64])
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]

    def sync(self) -> None:
        """Waits until it is on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Closes the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def read_records(path: Path) -> Iterator[list[bytes]]:
    """The records of a file that was complete.

    Raises:
        DataLossError: the file is damaged.
        PermissionError: another user may have written it.
    """
    with _open_own(path) as file:
        size, start = os.fstat(file.fileno()).st_size, 0
        while start < size:
            parts = _read_record(file, start, size)
            if parts is None:
                raise DataLossError(f"{path} is damaged at byte {start}.")
            yield parts
            start = file.tell()


def read_what_is_whole(path: Path) -> Iterator[list[bytes]]:
    """The records of a file whose writer was killed, or that is damaged; what is left out is said in the log.

    Raises:
        PermissionError: another user may have written it.
    """
    with _open_own(path) as file:
        size, start = os.fstat(file.fileno()).st_size, 0
        while start < size:
            parts, offset = _read_record(file, start, size), start
            while parts is None and (offset := _find_magic(file, offset + 1)) >= 0:
                parts = _read_record(file, offset, size)
            if parts is None:
                get_logger().warning(
                    "%s: the last %d bytes are no whole record and are left out: the one that was being written when "
                    "the process was killed, or damaged ones", path, size - start,
                )  # fmt: skip
                return
            if offset > start:
                get_logger().error(
                    "%s is damaged: what its bytes %d to %d kept is lost; the records after them are used", path, start,
                    offset,
                )  # fmt: skip
            yield parts
            start = file.tell()


def _open_own(path: Path) -> Any:
    """Opens a file that only this user can have written: reading it runs what is pickled in it."""
    found = path.lstat()
    if stat.S_ISREG(found.st_mode):
        file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")  # noqa: SIM115
        found = os.fstat(file.fileno())
        if found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return file
        file.close()
    raise PermissionError(_foreign(path, found))


def _foreign(path: Path, found: os.stat_result) -> str:
    return (
        f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, and this parameter server "
        f"runs as user {os.geteuid()}: what others can write there would run here. Give the strategy a "
        "snapshot_folder that belongs to this user alone."
    )


def _find_magic(file: Any, start: int) -> int:
    """Where a record may begin; -1: nowhere."""
    with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        return content.find(MAGIC, start)


def _read_record(file: Any, start: int, size: int) -> list[bytes] | None:
    """The record that begins at a place, after which the file stands then; ``None``: there is no whole one."""
    file.seek(start)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, count, checksum = _HEAD.unpack(head)
    if magic != MAGIC or count > _MOST_PARTS:
        return None
    return _read_parts(file, count, checksum, size)


def _read_parts(file: Any, count: int, checksum: int, size: int) -> list[bytes] | None:
    raw = file.read(8 * count)
    if len(raw) != 8 * count:
        return None
    sizes = struct.unpack(f"<{count}Q", raw)
    if sum(sizes) > size - file.tell():
        return None
    parts, found = [], zlib.crc32(raw)
    for length in sizes:
        parts.append(file.read(length))
        found = zlib.crc32(parts[-1], found)
    return parts if found == checksum else None


class SnapshotFolder:
    """Where one server keeps the files of one session.

    Args:
        folder: of the job.
        task: index of the server.
        session: of the coordinator.

    Raises:
        PermissionError: it is another user's.
    """

    def __init__(self, folder: str, task: int, session: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", session):
            raise ValueError(f"{session!r} is no name of a session.")
        self.path = Path(folder) / f"ps-{task}"
        self._session = session
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(_foreign(self.path, found))
        if found.st_mode & 0o022:
            self.path.chmod(0o700)

    def snapshot(self, number: int) -> Path:
        """The file of a snapshot."""
        return self.path / f"{self._session}-{number}.snapshot"

    def journal(self, number: int) -> Path:
        """What came after snapshot ``number`` began."""
        return self.path / f"{self._session}-{number}.journal"

    def numbers(self, kind: str) -> list[int]:
        """The snapshots or journals there are, in order."""
        pattern = re.compile(rf"{self._session}-(\d+)\.{kind}")
        found = (pattern.fullmatch(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in found if match)

    def remove_other_sessions(self) -> None:
        """Deletes what earlier programs left."""
        for name in os.listdir(self.path):
            if re.fullmatch(r"[0-9a-f]+-\d+\.(snapshot(\.tmp)?|journal)", name) and not name.startswith(
                f"{self._session}-"
            ):
                (self.path / name).unlink(missing_ok=True)

    def remove_before(self, number: int) -> None:
        """Deletes what is older than snapshot ``number``."""
        for kind, path in (("snapshot", self.snapshot), ("journal", self.journal)):
            for other in self.numbers(kind):
                if other < number:
                    path(other).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Deletes the files of this session, and the folder if nothing else is in it."""
        for name in os.listdir(self.path):
            if name.startswith(f"{self._session}-"):
                (self.path / name).unlink(missing_ok=True)
        for folder in (self.path, self.path.parent):
            try:
                folder.rmdir()
            except OSError:
                return

    def publish(self, unfinished: Path, number: int) -> None:
        """Gives a complete snapshot its name, and waits until that is on the disk."""
        unfinished.replace(self.snapshot(number))
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
