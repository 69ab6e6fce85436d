"""The transport of ``torch.distributed``: every call that moves tensors, and the translation of its errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tfstyle_dist.comm import forks
from tfstyle_dist.comm.collectives.halving import Messages
from tfstyle_dist.comm.collectives.operations import Operation, Operations, name_of
from tfstyle_dist.comm.group import Done, Pending
from tfstyle_dist.core import element_types, torch_internals
from tfstyle_dist.core.raw_bytes import bytes_of
from tfstyle_dist.core.tracing import region

_UNLIMITED = timedelta(days=365)
_WATCHDOG_GRACE = timedelta(seconds=30)


def torch_limit(timeout: timedelta | None, backend: str) -> timedelta:
    """The limit of torch's own group, at which the watchdog of a library such as NCCL ends the process.

    Args:
        timeout: ours.
        backend: what the group is made with.
    """
    if timeout is None:
        return _UNLIMITED
    return 2 * timeout + _WATCHDOG_GRACE if "," in backend else timeout


_DONE = Done()
_MOVED_AS_THEY_ARE = frozenset(element_types.COMMON) - {torch.int16}


def _movable(buffer: torch.Tensor) -> torch.Tensor:
    """The memory of a buffer as something that Gloo and NCCL move: of a type that they do not know, its bytes."""
    return buffer if buffer.dtype in _MOVED_AS_THEY_ARE or not buffer.is_contiguous() else bytes_of(buffer)


_made_among: dict[tuple[int, ...], int] = {}  # how many groups this process has made of the same members


def group_among(ranks: Sequence[int], backend: str, timeout: timedelta | None) -> Any:
    """A new torch group of some processes of the default group; these alone call this.

    Args:
        ranks: the members, in the numbers of the default group, in ascending order.
        backend: what it is made with.
        timeout: ours.
    """
    members = tuple(ranks)
    _made_among[members] = _made_among.get(members, 0) + 1
    name = f"tfstyle/{'_'.join(map(str, members))}/{_made_among[members]}"
    return torch_internals.group_among(name, ranks, backend, torch_limit(timeout, backend))


def members_of(process_group: Any) -> int:
    """How many workers a torch group has; -1 where this worker is none of them."""
    return dist.get_world_size(process_group)


class CopiedBack:
    """A sum that is made in another tensor: on the CPU, or of a type that can be added."""

    def __init__(self, pending: Pending, summed: torch.Tensor, buffer: torch.Tensor) -> None:
        self._pending: Pending = pending
        self._summed, self._buffer = summed, buffer

    def wait(self) -> None:
        """See ``Pending``."""
        if self._pending is not _DONE:
            self._pending.wait()
            self._pending = _DONE
            self._buffer.copy_(self._summed)

    def moving(self) -> bool:
        """See ``Pending``."""
        return self._pending.moving()


class _Transfer:
    """A torch work handle with the transport's error handling around its wait."""

    __slots__ = ("_buffer", "_operation", "_transport", "_work")

    def __init__(self, transport: TorchTransport, operation: Operation, work: Any, buffer: torch.Tensor) -> None:
        self._transport, self._operation, self._work, self._buffer = transport, operation, work, buffer

    def wait(self) -> None:
        """Waits for the transfer; a second call returns at once."""
        if self._work is None:
            return
        try:
            with region("wait for", self._operation.name):
                self._transport.wait_for(self._work, self._buffer)
        except RuntimeError as error:
            self._transport.fail(self._operation, error)
        self._transport.in_flight.discard(self._operation.sequence)
        self._work = None  # it would keep the connections open after the group is closed

    def moving(self) -> bool:
        """See ``Pending``."""
        return self._work is not None and not self._work.is_completed()


class TorchTransport:
    """Moves tensors between the members of a torch process group; a ``socket_sums.Transport``.

    No call compares what the workers are about to do. Gloo ends the process when sizes disagree, so whoever calls makes
    sure of it before.

    Args:
        process_group: the torch group.
        timeout: limit of each wait (the process group must have been made with it).
        store: side channel for "why I left"; ``None`` when the group was made by somebody else.
        backend: what the torch group was made with, e.g. ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Attributes:
        accelerator: the kind of accelerator whose tensors it moves, such as ``"cuda"``; ``""``: the CPU's alone.
        rank: this worker's number.
        size: number of workers.
        process_group: the torch group; ``None`` after ``release``.
        operations: the numbers of the calls, and what broke the group.
        in_flight: numbers of the transfers that were not waited for.
    """

    def __init__(self, process_group: Any, timeout: timedelta | None, store: Any, backend: str) -> None:
        forks.let_threads_become_known()
        self._backend, self.accelerator = backend, backend.partition(",")[2].partition(":")[0]
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.process_group = process_group
        self.operations = Operations(self.rank, self.size, timeout, store)
        self.in_flight: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether the group works and every transfer has been waited for."""
        return self.operations.error is None and not self.in_flight

    def carries(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer can be moved from where it is; else a copy on the CPU is."""
        return buffer.device.type in ("cpu", "meta", self.accelerator)  # of meta tensors only the sizes exist

    # ---- between all workers ----------------------------------------------------------------------------------

    def start_all_reduce(self, buffer: torch.Tensor, name: str) -> Pending:
        """Starts the library's own sum."""
        if buffer.dtype is torch.int16:  # no library adds it
            wide = buffer.to(torch.int32)
            return CopiedBack(self.start_all_reduce(wide, name), wide, buffer)
        return self._start(name, buffer, lambda: dist.all_reduce(buffer, group=self.process_group, async_op=True))

    def start_gather(self, buffer: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Pending]:
        """Starts collecting the buffers of all workers, of one size."""
        out = [torch.empty_like(buffer) for _ in range(self.size)]
        parts, sent = [_movable(part) for part in out], _movable(buffer)
        begin = lambda: dist.all_gather(parts, sent, group=self.process_group, async_op=True)  # noqa: E731
        return out, self._start(name, buffer, begin)

    def start_all_to_all(self, buffer: torch.Tensor, name: str) -> tuple[torch.Tensor, Pending]:
        """Starts sending a slice to every worker; see ``socket_sums.Transport``."""
        out = torch.empty_like(buffer)
        received, sent = _movable(out), _movable(buffer)
        begin = lambda: dist.all_to_all_single(received, sent, group=self.process_group, async_op=True)  # noqa: E731
        return out, self._start(name, buffer, begin)

    def gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        """The buffers of all workers, of one size, in rank order."""
        out, pending = self.start_gather(buffer, name)
        pending.wait()
        return out

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        """Replaces ``buffer`` by that of worker ``source``."""
        moved = _movable(buffer)
        begin = lambda: dist.broadcast(moved, group_src=source, group=self.process_group, async_op=True)  # noqa: E731
        self._start(name, buffer, begin).wait()

    # ---- between two workers ----------------------------------------------------------------------------------

    def exchange(self, sends: Messages, receives: Messages, name: str) -> None:
        """Sends to and receives from single workers; see ``socket_sums.Transport``."""
        messages = [dist.P2POp(dist.isend, _movable(t), group=self.process_group, group_peer=p) for p, t in sends]
        messages += [dist.P2POp(dist.irecv, _movable(t), group=self.process_group, group_peer=p) for p, t in receives]
        if not messages:
            return
        operation = self._next(name, max((t for _, t in (*sends, *receives)), key=torch.Tensor.numel))
        try:
            with region("exchange", name):
                for work in dist.batch_isend_irecv(messages):
                    self.wait_for(work, messages[0].tensor)
        except RuntimeError as error:
            self.fail(operation, error)

    # ---- life -------------------------------------------------------------------------------------------------

    def subgroup(self, ranks: Sequence[Sequence[int]]) -> tuple[Any, str, Callable[[], None]]:
        """The torch group of those of ``ranks`` that hold this worker, its backend, and what ends it; collective."""
        limit, members = self.operations.timeout, dist.get_process_group_ranks(self.process_group)
        if len(members) == dist.get_world_size():
            mine, _ = dist.new_subgroups_by_enumeration(
                [list(r) for r in ranks], timeout=torch_limit(limit, self._backend), backend=self._backend
            )
        else:  # the others of the default group know nothing of this
            part = next(sorted(members[r] for r in part) for part in ranks if self.rank in part)
            mine = group_among(part, self._backend, limit)
        return mine, self._backend, lambda: dist.destroy_process_group(mine)

    def leave_library(self) -> None:
        """From now on moves tensors of the CPU alone."""
        self._backend, self.accelerator = "gloo", ""

    def abort(self) -> None:
        """Ends what an accelerator's library has under way, where it can: nobody else would."""
        abort = getattr(self.process_group, "abort", None)
        if self.accelerator and abort is not None:
            with suppress(RuntimeError):
                abort()

    def release(self) -> None:
        """Gives the torch group away: its threads end with the last reference to it."""
        self.process_group = None

    # ---- helpers ----------------------------------------------------------------------------------------------

    def wait_for(self, work: Any, buffer: torch.Tensor) -> None:
        """Waits for one of torch's works.

        The limit of a group that has a library is longer than ours: the library's watchdog would end the process where
        the others can still be told who is absent.
        """
        limit = self.operations.timeout
        if self.accelerator and limit is not None and buffer.device.type == "cpu":
            work.wait(limit)
        else:
            work.wait()

    def fail(self, operation: Operation, error: RuntimeError) -> NoReturn:
        """Raises what an error in one of torch's calls means.

        Args:
            operation: the call.
            error: what came out of it.
        """
        if str(error).startswith("DataLoader worker"):
            self.in_flight.add(operation.sequence)  # in part, maybe
            raise error  # torch's signal handler speaks up in whatever runs when a loader process dies
        self.operations.fail(operation, error)

    def _start(self, name: str, buffer: torch.Tensor, begin: Callable[[], Any]) -> Pending:
        operation = self._next(name, buffer)
        try:
            with region("start", name):
                transfer = _Transfer(self, operation, begin(), buffer)
        except RuntimeError as error:
            self.fail(operation, error)
        self.in_flight.add(operation.sequence)
        return transfer

    def _next(self, name: str, buffer: torch.Tensor) -> Operation:
        return Operation(name, self.operations.begin(), name_of(buffer.dtype), buffer.numel())
