"""The group of XLA devices: one worker for each, a process or a thread where torch_xla runs several in one process."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.comm.collectives.comparison import mismatch
from tfstyle_dist.comm.collectives.operations import call_site
from tfstyle_dist.comm.group import Done, Pending, WorkerGroup
from tfstyle_dist.comm.xla.xla_adapter import XlaAdapter
from tfstyle_dist.core import env
from tfstyle_dist.core.enums import AggregationMethod
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.core.logging import get_logger


class XlaGroup(WorkerGroup):
    """One worker for each XLA device.

    Inside a step (``step()``) the operations are traced and run with the step's graph. Outside, each is a graph of its
    own and runs at once.

    XLA cannot be interrupted: a wait that passes the timeout is reported in the log, with the likely reasons, and goes
    on.

    Args:
        adapter: the contact with XLA.
        timeout: after which a wait is reported; ``None``: never.
    """

    traces = True

    def __init__(self, adapter: XlaAdapter, timeout: timedelta | None) -> None:
        self.adapter, self.timeout = adapter, timeout
        self.rank, self.size = adapter.rank, adapter.world_size
        self._in_step = False
        self._debug = env.debug_collectives()
        self._error: Exception | None = None

    @contextlib.contextmanager
    def step(self, same: bool = True) -> Iterator[None]:
        """At the end all that was traced inside runs. An error leaves it alone.

        Args:
            same: whether all workers trace the same program, shapes included. If not, operations inside run as outside.
        """
        # What came before, such as a replica's own numbers, must not become part of the common program.
        self._begin("the step's arguments")
        self._in_step = same
        try:
            yield
        finally:
            self._in_step = False
        with self._reporting_delay("the step"):
            self.adapter.sync()

    def reduce_gradients(self, gradients: Sequence[torch.Tensor], scale: float) -> None:
        """Replaces each gradient by ``scale`` times its sum over the workers; XLA packs them itself."""
        self._begin("gradients")
        self.adapter.all_reduce(gradients, scale)
        self._run("gradients")

    # ---- operations -------------------------------------------------------------------------------------------

    def all_reduce_async(
        self, buffer: torch.Tensor, name: str, agreed: bool = False, method: int = AggregationMethod.DEFAULT
    ) -> Pending:
        """See ``WorkerGroup``; XLA chooses the order of the sum, whatever the method."""
        self._begin(name)
        remote = buffer.to(self.adapter.device, copy=True)
        self.adapter.all_reduce([remote])
        self._give_back(buffer, remote, name)
        return Done()

    def all_gather(self, buffer: torch.Tensor, name: str) -> list[torch.Tensor]:
        self._begin(name)
        stacked = self.adapter.all_gather(buffer.to(self.adapter.device))
        if buffer.device != stacked.device:
            return list(self._fetch(stacked, name).unbind(0))
        self._run(name)
        return list(stacked.unbind(0))

    def broadcast(self, buffer: torch.Tensor, source: int, name: str) -> None:
        self._begin(name)
        remote = buffer.to(self.adapter.device, copy=True)
        self.adapter.broadcast(remote, source)
        self._give_back(buffer, remote, name)

    def gather_objects(self, value: Any, name: str) -> list[Any]:
        """See ``WorkerGroup``: sizes first, then JSON padded to a power of two, so that few graphs are compiled."""
        self._begin(name)
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([data.numel()], dtype=torch.int32)
        sizes = [int(n) for n in self._fetch(self.adapter.all_gather(size.to(self.adapter.device)), name).flatten()]
        padded = torch.zeros(1 << max(8, (max(sizes) - 1).bit_length()), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self._fetch(self.adapter.all_gather(padded.to(self.adapter.device)), name)
        return [json.loads(bytes(row[:n].tolist()).decode()) for row, n in zip(rows, sizes, strict=True)]

    def agree(self, signature: str, name: str) -> None:
        """See ``WorkerGroup``; inside a step only with ``TFSTYLE_DEBUG=collectives``: it would cut the graph in two."""
        if self._in_step and not self._debug:
            return
        calls = self.gather_objects(f"{name} {signature} at {call_site()}", name)
        mine = {str(call).rpartition(" at ")[0] for call in calls}
        if len(mine) > 1:
            raise mismatch(calls)

    # ---- life -------------------------------------------------------------------------------------------------

    def report_failure(self, reason: str) -> None:
        """See ``WorkerGroup``: said in the log; there is no side channel beside XLA."""
        get_logger().error("worker %d of %d leaves: %s", self.rank, self.size, reason)

    def errored(self) -> Exception | None:
        return self._error

    def members(self) -> Sequence[str]:
        return [f"worker {r}: XLA device {r} of {self.size}" for r in range(self.size)]

    def split(self, ranks: Sequence[Sequence[int]]) -> WorkerGroup:
        """Subgroups of XLA devices are axes of a mesh, not groups of workers."""
        raise UnavailableError(
            "A group of XLA devices cannot be split; use TPUStrategy(use_spmd=True) with an "
            "experimental_device_assignment."
        )

    def abort(self) -> None:
        if self._error is None:
            self._error = UnavailableError("This worker group was aborted; build a new strategy.")

    def close(self) -> None:
        """See ``WorkerGroup``; the devices stay with the process."""
        self.abort()

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> None:
        """Outside a step, runs what was traced before: it may differ from worker to worker."""
        if self._error is not None:
            raise self._error
        self._run(name)

    def _run(self, name: str) -> None:
        if not self._in_step:
            with self._reporting_delay(name):
                self.adapter.sync()

    def _fetch(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        with self._reporting_delay(name):
            return self.adapter.fetch(tensor)

    def _give_back(self, buffer: torch.Tensor, remote: torch.Tensor, name: str) -> None:
        if buffer.device == remote.device:
            buffer.copy_(remote)
            self._run(name)
        else:
            buffer.copy_(self._fetch(remote, name))

    @contextlib.contextmanager
    def _reporting_delay(self, name: str) -> Iterator[None]:
        """Reports a wait that takes longer than the timeout."""
        if self.timeout is None:
            yield
            return
        seconds = self.timeout.total_seconds()
        watch = threading.Timer(
            seconds,
            get_logger().error,
            (
                "worker %d of %d has waited for XLA in '%s' for %g s. Either a large graph is being compiled, or "
                "another worker is gone or runs another program: all must make the same calls with the same shapes.",
                self.rank,
                self.size,
                name,
                seconds,
            ),
        )
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()
