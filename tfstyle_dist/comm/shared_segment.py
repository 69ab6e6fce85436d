"""Memory that the workers of one host share: one writes in place, all read in place.

Each worker maps a segment twice. Writes through the first mapping are seen by all; those through the second stay with
the worker that makes them, and cost it a copy of the pages concerned alone. The memory has no name in the file system,
so nothing is left behind, however the workers end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from tfstyle_dist.comm import shared_files
from tfstyle_dist.comm.group import WorkerGroup
from tfstyle_dist.comm.places import this_peer
from tfstyle_dist.core.errors import UnavailableError

PAGE = mmap.PAGESIZE
# Of an entry of /proc/self/pagemap; see the kernel's Documentation/admin-guide/mm/pagemap.rst.
_SWAPPED, _FILE_OR_SHARED = 1 << 62, 1 << 61
_COMPARED_BYTES = 1 << 20


class SharedSegment:
    """One segment, as a worker sees it; make it with ``open_segment``.

    Args:
        descriptor: the open memory; the caller closes it.
        nbytes: its size.

    Attributes:
        shared: all bytes; writes are seen by every worker.
        private: the same bytes; writes are seen by this worker alone, until ``forget``.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._copied = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        self._mapped = mmap.mmap(descriptor, nbytes)
        self.shared = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.private = torch.frombuffer(self._copied, dtype=torch.uint8)

    def written(self) -> list[tuple[int, int]]:
        """The ranges of bytes, in whole pages, that this worker wrote through ``private``."""
        count = self.nbytes // PAGE
        entries = bytearray(count * 8)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                pages.seek(self.private.data_ptr() // PAGE * 8)
                if pages.readinto(entries) != len(entries):
                    return self._differing()
        except OSError:
            return self._differing()
        flags = torch.frombuffer(entries, dtype=torch.int64)
        there = (flags < 0) | ((flags & _SWAPPED) != 0)  # the sign bit says that the page is in memory
        own = there & ((flags & _FILE_OR_SHARED) == 0)
        return _ranges(own.nonzero().flatten().tolist(), PAGE)

    def forget(self, start: int, stop: int) -> None:
        """Drops what was written through ``private``, in whole pages: it shows again what is shared."""
        start -= start % PAGE
        stop += -stop % PAGE
        if stop > start:
            self._copied.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def unmap_shared(self) -> None:
        """Lets go of the pages seen through ``shared``, which stay: they count for this worker only when used again."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def _differing(self) -> list[tuple[int, int]]:
        """Where the kernel does not tell which pages were copied: those blocks that differ."""
        blocks = range(0, self.nbytes, _COMPARED_BYTES)
        differ = [
            i
            for i, start in enumerate(blocks)
            if not torch.equal(
                self.private[start : start + _COMPARED_BYTES], self.shared[start : start + _COMPARED_BYTES]
            )
        ]
        return [(lo, min(hi, self.nbytes)) for lo, hi in _ranges(differ, _COMPARED_BYTES)]


def open_segment(group: WorkerGroup, nbytes: int, name: str) -> SharedSegment:
    """Makes a segment and maps it in all workers; collective.

    Args:
        group: the workers, all of one host.
        nbytes: how much is wanted; rounded up to whole pages. Memory is taken when it is written.
        name: for messages.

    Raises:
        ValueError: the workers are on several hosts.
        UnavailableError: a worker cannot map the memory.
    """
    me = this_peer(group.rank)
    nbytes = max(nbytes + -nbytes % PAGE, PAGE)
    problem, made, segment = "", None, None
    with ExitStack() as handles:
        if group.rank == 0:
            try:
                made = shared_files.create(f"tfstyle-{name}", nbytes)
                handles.callback(os.close, made)
            except OSError as error:
                problem = f"worker 0 cannot make {nbytes} bytes of shared memory: {error}"
        facts = group.gather_objects([me.host, me.boot, problem], f"shared {name}")
        check_one_host([fact[:2] for fact in facts])
        problem = str(facts[0][2])
        if not problem:
            here = range(group.size)
            handle = shared_files.hand_out(
                made, group.rank, here, group.gather_objects, group.timeout, f"shared {name}"
            )
            if handle is not None and made is None:
                handles.callback(os.close, handle)
            try:
                if handle is None:
                    raise OSError("it was not handed over")
                segment = SharedSegment(handle, nbytes)
            except (OSError, ValueError) as error:
                problem = f"worker {group.rank} cannot map {nbytes} bytes of worker 0's memory: {error}"
        problems = group.gather_objects(problem, f"shared {name} is open")
    if any(problems) or segment is None:
        raise UnavailableError(
            f"The workers cannot share memory for {name}: {next(filter(None, problems), problem)}. All workers must "
            "run on one Linux host, as one user, and in one network namespace (one container)."
        )
    return segment


def check_one_host(hosts: Sequence[Sequence[str]]) -> None:
    """Raises ValueError unless all workers are on one host.

    Args:
        hosts: name and boot id of each worker's host.
    """
    if len({tuple(h) for h in hosts}) > 1:
        names = ", ".join(f"worker {r} on {h[0]}" for r, h in enumerate(hosts))
        raise ValueError(
            f"Central storage keeps one copy of the model in the memory of one host, but the workers are on several: "
            f"{names}. Start all ranks on one host, or use MultiWorkerMirroredStrategy."
        )


def _ranges(numbers: Sequence[int], unit: int) -> list[tuple[int, int]]:
    """Ranges of ``unit`` times consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number * unit:
            found[-1] = (found[-1][0], (number + 1) * unit)
        else:
            found.append((number * unit, (number + 1) * unit))
    return found
