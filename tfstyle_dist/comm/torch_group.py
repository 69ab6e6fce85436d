"""Worker processes joined by ``torch.distributed`` (Gloo on CPUs, NCCL on GPUs)."""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.comm.collectives.comparison import Comparison
from tfstyle_dist.comm.collectives.flat import Flat
from tfstyle_dist.comm.collectives.topology import Topology
from tfstyle_dist.comm.collectives.worker_sums import WorkerSums
from tfstyle_dist.comm.group import Pending, SumInto, WorkerGroup
from tfstyle_dist.comm.host_memory.compiled_sums import FindSum, nothing_compiled
from tfstyle_dist.comm.host_memory.host_memory import HostMemory
from tfstyle_dist.comm.peers.peer import Peer, this_peer
from tfstyle_dist.comm.torch_transport import CopiedBack, TorchTransport
from tfstyle_dist.core import env
from tfstyle_dist.core.enums import AggregationMethod


class TorchGroup(WorkerGroup):
    """A ``torch.distributed`` process group with names, sequence numbers and a diagnosis of who is missing.

    Args:
        process_group: the torch group; all its members build a TorchGroup of it at the same point.
        timeout: limit of each wait (the process group must have been made with it).
        store: side channel for "why I left"; ``None`` when the group was made by somebody else.
        backend: what the torch group was made with, e.g. ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``. It carries the
            tensors of the CPU in any case, so what the workers tell each other never waits for a GPU.
        on_close: called once by ``close``.

    Attributes:
        topology: which workers share a host.
    """

    def __init__(
        self,
        process_group: Any,
        timeout: timedelta | None,
        store: Any,
        backend: str,
        on_close: Callable[[], None],
    ) -> None:
        self._transport = TorchTransport(process_group, timeout, store, backend)
        self._operations = self._transport.operations
        self.rank, self.size, self.timeout = self._transport.rank, self._transport.size, timeout
        self._on_close, self._closed = on_close, False
        self._comparison = Comparison(self._operations, self._transport.gather)
        mine = [this_peer(self.rank).facts, _next_group_number(), env.shared_memory(), env.host_name()]
        facts = self.gather_objects(mine, "who is there")
        peers = [Peer.of(r, fact[0]) for r, fact in enumerate(facts)]
        self._operations.introduce(peers, hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16])
        self.topology = Topology.of([(p.host, p.boot, fact[3]) for p, fact in zip(peers, facts, strict=True)])
        self._memory: HostMemory | None = None
        if all(fact[2] for fact in facts) and self.size > len(self.topology.hosts):
            self._memory = HostMemory.open(self._operations, self.topology, self.gather_objects)
        if self._memory is not None and self._memory.for_all:
            self._comparison.memory = self._memory
        self._sums = WorkerSums(self._transport, self._memory, self._comparison, self.topology)
        _open_groups[self] = None

    @property
    def process_group(self) -> Any:
        """The torch group."""
        return self._transport.process_group

    # ---- sums -------------------------------------------------------------------------------------------------

    def use_summation(self, sum_into: SumInto, find_sum: FindSum = nothing_compiled) -> None:
        self._sums.use_summation(sum_into, find_sum)

    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        if self._transport.carries(buffer):
            return self._sums.start(buffer, name, agreed, method)
        host = buffer.cpu()
        return CopiedBack(self._sums.start(host, name, agreed, method), host, buffer)

    def shares_memory(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self._sums.shares_memory(dtype, device.type)

    def backend_of(self, device: torch.device) -> str:
        return device.type if device.type == self._transport.accelerator else "cpu"

    def all_reduce_flat(self, values: Flat, name: str, method: int = AggregationMethod.DEFAULT) -> None:
        if self._sums.shares_memory(values.dtype, "cpu"):
            self._sums.sum_in_memory(values, name, method)
        else:
            super().all_reduce_flat(values, name, method)

    def all_reduce_variant(self, values: Flat, name: str, method: int, variant: int, call: str) -> bool:
        if not self._sums.shares_memory(values.dtype, "cpu"):
            return super().all_reduce_variant(values, name, method, variant, call)
        return self._sums.sum_of_variant(values, name, method, variant, call)

    @property
    def waited(self) -> float:
        return self._sums.waited

    def explain(self, numel: int, dtype: torch.dtype, method: int = AggregationMethod.DEFAULT) -> str:
        return self._sums.explain(numel, dtype, self._transport.accelerator or "cpu", method)

    # ---- other operations -------------------------------------------------------------------------------------

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        host = buffer if self._transport.carries(buffer) else buffer.cpu()
        self._comparison.before(name, host)
        return [part.to(buffer.device) for part in self._transport.gather(host, name)]

    def numbers(self, number: int, name: str) -> list[int]:
        return self._comparison.exchange(name, name, number)

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        host = buffer if self._transport.carries(buffer) else buffer.cpu()
        self._comparison.before(name, host)
        self._transport.broadcast(host, source, name)
        if host is not buffer:
            buffer.copy_(host)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        return self._comparison.gather_objects(value, name)

    def agree(self, signature: str, name: str) -> None:
        self._comparison.agree(signature, name)

    # ---- life -------------------------------------------------------------------------------------------------

    def report_failure(self, reason: str) -> None:
        self._operations.report_failure(reason)

    def errored(self) -> Exception | None:
        return self._operations.error

    def members(self) -> Sequence[str]:
        return [f"worker {p.rank}: pid {p.pid} on {p.host}, {p.state()}" for p in self._operations.peers]

    def neighbours(self) -> Sequence[int]:
        return self.topology.neighbours(self.rank)

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        mine, backend, destroy = self._transport.subgroup(ranks)
        part = TorchGroup(mine, self.timeout, self._operations.store, backend, destroy)
        part.use_summation(self._sums.sum_into, self._sums.find_sum)
        return part

    def leave_library(self) -> None:
        """From now on everything travels over the CPU; all workers must call this."""
        self._transport.leave_library()

    def abort(self) -> None:
        idle = self._transport.idle
        self._operations.abort()
        if not idle:
            self._transport.abort()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _open_groups.pop(self, None)
            self._leave_memory()
            idle = self._transport.idle
            self.abort()
            if self._transport.accelerator and not idle:
                # A library may look for minutes for why its transfers failed, and end the process when it is through.
                leaving = threading.Thread(target=self._on_close, name="tfstyle-leave", daemon=True)
                leaving.start()
                leaving.join(_TO_LEAVE)
            else:
                self._on_close()
            if idle:
                # The last reference: Gloo's threads end here. One that still frees a tensor when the interpreter goes
                # would abort the process. Unfinished transfers would make this wait for the peers, so not then.
                self._transport.release()
                self._on_close = _nothing

    def close_at_exit(self) -> None:
        """Closes the group if that cannot wait for a peer; the others of this host are told in any case."""
        self._leave_memory()
        if self._transport.idle:
            self.close()

    def _leave_memory(self) -> None:
        if self._memory is not None:
            self._memory.leave()


_TO_LEAVE = 5.0  # seconds
_group_number = 0


def _next_group_number() -> int:
    """Counts the groups of this process, so that two groups of the same members are told apart."""
    global _group_number
    _group_number += 1
    return _group_number


# Held until they are closed, so that a program may drop its strategy and end.
_open_groups: dict[TorchGroup, None] = {}


def _nothing() -> None:
    """What a closed group does when it is closed."""


@atexit.register
def _close_at_exit() -> None:
    """Closes what a program left open, the newest first: the end of torch's default group ends all made beside it."""
    for group in reversed(list(_open_groups)):
        group.close_at_exit()
