"""What a launch over a list of tensors reads: the table of addresses and the table of chunks, kept for reuse.

Both are built here in plain torch. Building costs the host some microseconds per tensor and one small copy to the
device, so plans are kept, by the addresses of all tensors: a training step that finds its gradients where they were
pays a lookup. A plan holds addresses only and keeps no tensor of the caller alive; the caller passes tensors whose
addresses it has just read, so an old plan cannot reach memory that is no longer theirs.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

# Bytes of one contribution that a program reads at a time: 16 bytes for each of its 128 threads.
BLOCK_BYTES: Final = 2048
MAX_BLOCK_ELEMENTS: Final = 1024
# No contraction to multiply-add, which rounds once where torch rounds twice.
LAUNCH_OPTIONS: Final[dict[str, Any]] = {"num_warps": 4, "enable_fp_fusion": False}
# A program loops over several blocks of a tensor once there are programs enough to fill any device.
MAX_BLOCKS_PER_CHUNK: Final = 8
ENOUGH_CHUNKS: Final = 8192
# Loads and stores of 16 bytes need addresses that are multiples of it.
ALIGNMENT: Final = 16
MAX_PLANS: Final = 64

_T = TypeVar("_T")


class RecentlyUsed(Generic[_T]):
    """A bounded dictionary that forgets what was not used for longest; safe to use from several threads."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, _T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> _T | None:
        """The value of ``key``, which is now the most recently used one, or ``None``."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: Hashable, value: _T) -> None:
        """Keeps ``value`` under ``key``."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries.clear()


@dataclass(eq=False)
class Plan:
    """The tables of one launch.

    Attributes:
        table: int64, 1-d: rows of T addresses, one row of T flags, the bits of the divisor.
        chunks: int64 [C, 3]: tensor, start, end; C is the size of the grid.
    """

    table: Tensor
    chunks: Tensor
    _streams: set[int] = field(default_factory=set)

    def use_on_current_stream(self) -> None:
        """Keeps the memory of the tables from being given away while a launch on this stream may still read it."""
        if self.table.is_cuda:
            stream = torch.cuda.current_stream(self.table.device)
            if stream.cuda_stream not in self._streams:
                self._streams.add(stream.cuda_stream)
                self.table.record_stream(stream)
                self.chunks.record_stream(stream)


_plans: RecentlyUsed[Plan] = RecentlyUsed(MAX_PLANS)
_chunks: RecentlyUsed[Tensor] = RecentlyUsed(MAX_PLANS)
# Plans that a CUDA graph reads on every replay, whenever that is: they are never forgotten.
_captured: dict[PlanKey, Plan] = {}
_upload_streams: dict[torch.device, torch.cuda.Stream] = {}


class PlanKey(NamedTuple):
    """All that the tables of a launch are made of.

    Attributes:
        device: where the tensors are.
        block: the number of elements a program handles at a time.
        divisor: the divisor of the kernel, or ``None`` without one.
        dtypes: one for each row. They matter to the caller's checks: they decide how far a tensor reaches.
        numels: the number of elements of each of the T tensors.
        addresses: row after row, T each: the contributions, then the kernel's own rows.
    """

    device: torch.device
    block: int
    divisor: int | float | None
    dtypes: tuple[torch.dtype, ...]
    numels: tuple[int, ...]
    addresses: tuple[int, ...]


def plan_key(rows: Sequence[Sequence[Tensor]], divisor: int | float | None, block: int) -> PlanKey:
    """The key for rows of T dense tensors on one device; those of a column have the same number of elements."""
    return PlanKey(
        rows[0][0].device,
        block,
        divisor,
        tuple([row[0].dtype for row in rows]),
        tuple([t.numel() for t in rows[0]]),
        tuple([t.data_ptr() for row in rows for t in row]),
    )


def find_overlaps(key: PlanKey) -> list[int]:
    """The tensors whose output, the last row, overlaps one of their own contributions in part.

    Those need a temporary. An output that is exactly one of its own contributions is no overlap.

    Raises:
        ValueError: an output shares memory with another output or with a contribution to another tensor. The result
            would depend on which part of the list is summed first.
    """
    num_tensors = len(key.numels)
    *contributions, outs = [
        key.addresses[first : first + num_tensors] for first in range(0, len(key.addresses), num_tensors)
    ]
    out_size, size = key.dtypes[-1].itemsize, key.dtypes[0].itemsize
    tensors = sorted((t for t in range(num_tensors) if key.numels[t] > 0), key=lambda t: outs[t])
    starts = [outs[t] for t in tensors]
    ends = [outs[t] + out_size * key.numels[t] for t in tensors]
    for position in range(1, len(tensors)):
        if ends[position - 1] > starts[position]:
            a, b = sorted(tensors[position - 1 : position + 1])
            raise ValueError(f"the outputs of tensors {a} and {b} share memory: give each its own")
    overlapping = set()
    for index, row in enumerate(contributions):
        for tensor, start in enumerate(row):
            end = start + size * key.numels[tensor]
            # The outputs are apart, so those that it meets are the ones before `position` that end behind its start.
            position = bisect_left(starts, end) - 1
            while position >= 0 and ends[position] > start and start < end:
                if tensors[position] != tensor:
                    raise ValueError(
                        f"the output of tensor {tensors[position]} shares memory with contribution {index} to tensor "
                        f"{tensor}: give it its own memory, or that of one of its own contributions"
                    )
                if start != outs[tensor] or size != out_size:
                    overlapping.add(tensor)
                position -= 1
    return sorted(overlapping)


def check_apart(key: PlanKey, num_written: int) -> None:
    """Checks that no memory of the last rows, which a kernel writes, is in two places.

    Raises:
        ValueError: a tensor that is written shares memory with another one.
    """
    num_tensors = len(key.numels)
    first_written = len(key.addresses) - num_written * num_tensors
    ranges = []
    for index, start in enumerate(key.addresses):
        row, tensor = divmod(index, num_tensors)
        if key.numels[tensor] > 0:
            ranges.append(
                (start, start + key.dtypes[row].itemsize * key.numels[tensor], index >= first_written, tensor)
            )
    ends = [0, 0]  # of what was only read, of what is written
    for start, end, is_written, tensor in sorted(ranges):
        if start < ends[1] or (is_written and start < ends[0]):
            raise ValueError(
                f"parameter {tensor}, its state or its gradient shares memory with another tensor of which one is "
                "updated: give each its own"
            )
        ends[is_written] = max(ends[is_written], end)


def find_plan(key: PlanKey) -> Plan | None:
    """The kept plan of an earlier call, to be used on the current stream.

    Raises:
        RuntimeError: a CUDA graph is being captured and there is no such plan.
    """
    plan = _plans.get(key) or _captured.get(key)
    if key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if plan is None:
            raise RuntimeError(
                "a CUDA graph captures a sum of tensors that were not summed before: the tables of a new launch "
                "cannot be copied during a capture. Run the step once with the same tensors, then capture it"
            )
        _captured[key] = plan
    elif plan is not None:
        plan.use_on_current_stream()
    return plan


def build_plan(key: PlanKey) -> Plan:
    """Makes a plan, to be used on the current stream, and keeps it."""
    plan = Plan(_build_table(key), _find_chunks(key.numels, key.block, key.device))
    plan.use_on_current_stream()
    _plans.put(key, plan)
    return plan


def forget_plans() -> None:
    """Drops every kept plan, except those that a captured CUDA graph reads."""
    _plans.clear()
    _chunks.clear()


def _build_table(key: PlanKey) -> Tensor:
    numbers = array("q", key.addresses)
    addresses = torch.frombuffer(numbers, dtype=torch.int64).view(-1, len(key.numels))
    flags = (addresses % ALIGNMENT == 0).all(dim=0).to(torch.int64)
    number = 1.0 if key.divisor is None else key.divisor
    divisor = torch.tensor([number], dtype=torch.float64, device="cpu").view(torch.int64)
    return _upload(torch.cat([addresses.view(-1), flags, divisor]), key.device)


def _find_chunks(numels: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    key = (device, block, numels)
    chunks = _chunks.get(key)
    if chunks is None:
        chunks = _upload(build_chunks(numels, block), device)
        _chunks.put(key, chunks)
    return chunks


def build_chunks(numels: Sequence[int], block: int) -> Tensor:
    """Cuts tensors of these sizes into ranges of whole blocks, none of which spans two tensors.

    Returns:
        int64 [C, 3]: tensor, first element, one past the last element. Every element is in one chunk.
    """
    sizes = torch.tensor(numels, dtype=torch.int64, device="cpu")
    size = block
    while size < MAX_BLOCKS_PER_CHUNK * block and int(sizes.sum()) // (2 * size) >= ENOUGH_CHUNKS:
        size *= 2
    counts = (sizes + size - 1) // size
    tensors = torch.repeat_interleave(torch.arange(len(numels), device="cpu"), counts)
    first_chunks = torch.cumsum(counts, 0) - counts
    starts = (torch.arange(len(tensors), device="cpu") - first_chunks[tensors]) * size
    return torch.stack([tensors, starts, torch.minimum(starts + size, sizes[tensors])], dim=1)


def _upload(numbers: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return numbers
    stream = _upload_streams.get(device)
    if stream is None:
        stream = _upload_streams.setdefault(device, torch.cuda.Stream(device))
    # On a stream of its own and waited for: the table is then ready for every stream, and the wait is for this small
    # copy alone, not for what the caller has queued.
    with torch.cuda.stream(stream):
        result = numbers.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return result
