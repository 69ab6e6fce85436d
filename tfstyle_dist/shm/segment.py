"""Memory that the workers of one host share: one writes in place, all read in place.

Each worker maps a segment twice. Writes through the first mapping are seen by all; those through the second stay with
the worker that makes them, and cost it a copy of the pages concerned alone. The memory has no name in the file system,
so nothing is left behind, however the workers end.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Protocol

import torch

from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.shm import memory_file, pages
from tfstyle_dist.shm.namespaces import host_and_boot
from tfstyle_dist.shm.pages import PAGE

_COMPARED_BYTES = 1 << 20


class Workers(Protocol):
    """Those who open a segment together: a worker group."""

    @property
    def rank(self) -> int:
        """This worker's number."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def timeout(self) -> timedelta | None:
        """The limit of each wait; ``None``: there is none."""

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """The values of all workers in rank order; all workers call it."""


class Segment:
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
        self.shared = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
        self._own = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
        self.private = torch.frombuffer(self._own, dtype=torch.uint8)

    def private_bytes(self, start: int, stop: int) -> memoryview:
        """Some bytes of ``private``; whoever looks at a tensor that was made of them keeps this object alive."""
        return memoryview(self._own)[start:stop]

    def written(self) -> list[tuple[int, int]]:
        """The ranges of bytes, in whole pages, that this worker wrote through ``private``."""
        found = pages.copied_pages(self.private.data_ptr(), self.nbytes)
        return self._differing() if found is None else found

    def forget(self, start: int, stop: int) -> None:
        """Drops what was written through ``private``, in whole pages: it shows again what is shared."""
        start -= start % PAGE
        stop += -stop % PAGE
        if stop > start:
            pages.drop(self.private.data_ptr() + start, stop - start)

    def unmap_shared(self) -> None:
        """Lets go of the pages seen through ``shared``, which stay: they count for this worker only when used again."""
        pages.drop(self.shared.data_ptr(), self.nbytes)

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
        return [(lo, min(hi, self.nbytes)) for lo, hi in pages.ranges_of(differ, _COMPARED_BYTES)]


Written = list[tuple[Segment, list[tuple[int, int]]]]
"""Segments, and the ranges of bytes that this worker wrote through ``private``."""


def written_in(segments: Iterable[Segment]) -> Written:
    """What this worker wrote, in those segments where it wrote something."""
    return [(segment, ranges) for segment in list(segments) if (ranges := segment.written())]


def open_segment(group: Workers, nbytes: int, name: str) -> Segment:
    """Makes a segment and maps it in all workers; collective.

    Args:
        group: the workers, all of one host.
        nbytes: how much is wanted; rounded up to whole pages. Memory is taken when it is written.
        name: for messages.

    Raises:
        ValueError: the workers are on several hosts.
        UnavailableError: a worker cannot map the memory.
    """
    nbytes = max(nbytes + -nbytes % PAGE, PAGE)
    problem, made, segment = "", None, None
    with ExitStack() as handles:
        if group.rank == 0:
            try:
                made = memory_file.create(f"tfstyle-{name}", nbytes)
                handles.callback(os.close, made)
            except OSError as error:
                problem = f"worker 0 cannot make {nbytes} bytes of shared memory: {error}"
        facts = group.gather_objects([*host_and_boot(), problem], f"shared {name}")
        check_one_host([fact[:2] for fact in facts])
        problem = str(facts[0][2])
        if not problem:
            here = range(group.size)
            handle = memory_file.hand_out(made, group.rank, here, group.gather_objects, group.timeout, f"shared {name}")
            if handle is not None and made is None:
                handles.callback(os.close, handle)
            try:
                if handle is None:
                    raise OSError("it was not handed over")
                segment = Segment(handle, nbytes)
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
