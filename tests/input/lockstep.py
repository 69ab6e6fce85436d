"""Several workers in threads of one process: a real exchange without processes, for property tests."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tfstyle_dist.comm.group import Done, Pending, WorkerGroup
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.input import DistributedDataset, Request, distribute
from tfstyle_dist.input.split import map_leaves
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.values import local_results


class _Table:
    """Where the threads lay down what they exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.entries: list[Any] = [None] * size


class ThreadGroup(WorkerGroup):
    """A member of a group of threads."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self.rank, self.size, self._table = rank, size, table

    def _exchange(self, value: Any) -> list[Any]:
        self._table.entries[self.rank] = copy.deepcopy(value)
        self._table.barrier.wait(20)
        everyone = list(self._table.entries)
        self._table.barrier.wait(20)
        return everyone

    def all_reduce_async(self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = 0) -> Pending:
        buffer.copy_(torch.stack(self._exchange(buffer)).sum(0))
        return Done()

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        return self._exchange(buffer)

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        buffer.copy_(self._exchange(buffer)[source])

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        return self._exchange(value)

    def report_failure(self, reason: str) -> None:
        self._table.barrier.abort()

    def errored(self) -> Exception | None:
        return None

    def members(self) -> Sequence[str]:
        return [f"thread {r}" for r in range(self.size)]

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        raise NotImplementedError

    def abort(self) -> None:
        self._table.barrier.abort()

    def close(self) -> None:
        return


def run_workers(workers: int, replicas: int, fn: Callable[[Worker], Any]) -> list[Any]:
    """``fn`` on each of W workers of L CPU replicas, in lockstep; the results by worker."""
    table = _Table(workers)
    devices = [ReplicaDevice("cpu", i) for i in range(replicas)]
    members = [Worker(devices, ThreadGroup(rank, workers, table), None) for rank in range(workers)]

    def call(worker: Worker) -> Any:
        try:
            return fn(worker)
        except BaseException:
            table.barrier.abort()
            raise

    if workers == 1:
        return [call(members[0])]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(call, member) for member in members]
        errors = [e for f in futures if (e := f.exception()) is not None]
        first = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None)
        if errors:
            raise first or errors[0]
        return [f.result() for f in futures]


def make(worker: Worker, dataset: Any, **request: Any) -> DistributedDataset:
    """The distributed dataset of one worker."""
    return distribute(dataset, Request(worker, **request), None)


def parts_of(worker: Worker, batch: Any) -> list[list[Any]]:
    """The examples of each local replica as Python values."""
    return [to_list(part) for part in local_results(batch, worker.num_local_replicas)]


def to_list(batch: Any) -> list[Any]:
    """The examples of a batch with one leaf, or of the first leaf."""
    leaves: list[Any] = []
    map_leaves(leaves.append, batch)
    return leaves[0].tolist() if hasattr(leaves[0], "tolist") else list(leaves[0])
