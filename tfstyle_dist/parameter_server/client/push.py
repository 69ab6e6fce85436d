"""The tensors on all parameter servers, as one process sees them: pulling, writing, pushing gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from tfstyle_dist.parameter_server.client.local_copies import give_back
from tfstyle_dist.parameter_server.client.outdated import check_unwritten, mark
from tfstyle_dist.parameter_server.client.pull import Reader
from tfstyle_dist.parameter_server.client.remote_record import (
    RemoteRecord,
    Shard,
    by_shard,
    gradient_parts,
    parts_by_shard,
)
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol.operations import Op, Operation, dtype_number, tensor_bytes
from tfstyle_dist.parameter_server.protocol.work import NO_WORK, WireOptions, Work


class Servers(Reader):
    """All parameter servers of a cluster, as one process sees them.

    Args:
        links: one for each ps task.
        options: how tensors travel.
    """

    def __init__(self, links: Sequence[ServerLink], options: WireOptions) -> None:
        super().__init__(links, options)
        self._writes: dict[int, int] = {}

    @classmethod
    def of(
        cls,
        context: Any,
        addresses: Sequence[str],
        handshake: Mapping[str, Any],
        timeout: timedelta | None,
        options: WireOptions | None = None,
    ) -> Servers:
        """Links to the servers at ``addresses``; each connects when it is first needed."""
        links = [
            ServerLink(context, address, f"/job:ps/task:{index}", dict(handshake), timeout)
            for index, address in enumerate(addresses)
        ]
        return cls(links, options or WireOptions())

    def close(self, goodbye: bool = True) -> None:
        """Closes all links."""
        self.outdated.clear()
        for link in self.links:
            link.close(goodbye)

    # ---- steps ------------------------------------------------------------------------------------------------

    def begin(self, work: Work) -> None:
        """A scheduled function starts in this process."""
        self.work, self.reads = work, {}
        self.reconnect()
        self.steps = 1 if self.steps is None else self.steps + 1
        self._writes.clear()
        if work.attempt > 1:
            # Its earlier attempt may still be at work somewhere: from here on the servers refuse it.
            for link in self.links:
                link.call({"method": "fence", "closure": work.closure, "attempt": work.attempt})

    @property
    def may_return(self) -> bool:
        """Whether a server was lost that can come back: then the function under way is to be run again."""
        return any(link.may_return for link in self.links)

    def end(self) -> None:
        """The function is over: waits until the servers have taken its writes.

        Raises:
            Exception: the first error of a write.
        """
        self.work = NO_WORK
        first: Exception | None = None
        for link in self.links:
            link.flush()
        for link in self.links:
            try:
                link.finish()
                link.sweep()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    # ---- writing ----------------------------------------------------------------------------------------------

    def write(self, record: RemoteRecord, op: Op, value: torch.Tensor) -> None:
        """Assigns to, adds to or subtracts from a tensor; the servers do it in one go for each shard."""
        self._before_write()
        number = dtype_number(value.dtype)
        with self._lock:
            give_back(record)
            for shard, part in parts_by_shard(record, value.detach().contiguous()):
                self._send(shard, Operation(op, number, shard.number), [part])
            self._after_write([record])

    def add_rows(self, record: RemoteRecord, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Adds values to some rows; a row named twice gets both."""
        self._before_write()
        with self._lock:
            for shard, positions, ids in by_shard(record, rows):
                part = values.detach() if positions is None else values.detach()[positions]
                operation = Operation(Op.ADD_ROWS, dtype_number(part.dtype), shard.number, 0, ids.numel())
                self._send(shard, operation, [ids, part.contiguous()])
            self._after_write([record])

    def assign_elements(self, record: RemoteRecord, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Assigns to some elements and leaves the others alone; they are counted through the whole tensor."""
        self._before_write()
        with self._lock:
            for shard in record.shards:
                here = (numbers >= shard.offset) & (numbers < shard.offset + shard.numel)
                ids, part = numbers[here] - shard.offset, values.detach()[here]
                if len(ids):
                    operation = Operation(Op.ASSIGN_ELEMENTS, dtype_number(part.dtype), shard.number, 0, len(ids))
                    self._send(shard, operation, [ids, part])
            self._after_write([record])

    def push(self, rule: int, pairs: Sequence[tuple[RemoteRecord, torch.Tensor]]) -> None:
        """Sends gradients; the servers' optimizer ``rule`` makes one step with those of one server.

        Args:
            rule: number of the optimizer.
            pairs: tensors and their gradients, dense or sparse.
        """
        self._before_write()
        updated = [record for record, _ in pairs]
        check_unwritten(updated)
        with self._lock:
            by_server: dict[int, tuple[list[Operation], list[torch.Tensor]]] = {}
            for record, grad in pairs:
                for shard, operation, tensors in gradient_parts(
                    record, grad, self.is_near(record), self.wire_dtype(record)
                ):
                    operation.argument, operation.extra = self._count(shard), rule
                    operations, data = by_server.setdefault(shard.server, ([], []))
                    operations.append(operation)
                    data.extend(tensors)
            for server, (operations, data) in by_server.items():
                self.links[server].post(self.work, operations, data)
            self._after_write(updated)
            self.outdated.update(dict.fromkeys(mark(updated, self)))

    def _send(self, shard: Shard, operation: Operation, tensors: list[torch.Tensor]) -> None:
        operation.nbytes, operation.argument = tensors[-1].nbytes, self._count(shard)
        self.links[shard.server].post(self.work, [operation], tensors)

    def _count(self, shard: Shard) -> int:
        """How many writes to this shard the function made before."""
        count = self._writes.get(shard.number, 0)
        if self.work.closure:
            self._writes[shard.number] = count + 1
        return count

    def _before_write(self) -> None:
        if self.work.closure == 0:
            self.reconnect()

    def _after_write(self, records: Sequence[RemoteRecord]) -> None:
        for record in records:
            record.stamp, record.written = -1, True
        if self.work.closure == 0:
            for server in {s.server for r in records for s in r.shards}:
                self.links[server].finish()

    # ---- calls ------------------------------------------------------------------------------------------------

    def create(self, records: Sequence[RemoteRecord], fill: tuple[str, float, float, int] | None = None) -> None:
        """Makes the tensors on their servers with the values of the local copies.

        Args:
            records: the tensors.
            fill: kind, two numbers and seed of values that the servers make instead.
        """
        with self._lock:
            for server in range(len(self.links)):
                entries: list[dict[str, Any]] = []
                parts: list[Any] = []
                for record in records:
                    local: Any = record.components[0].detach()
                    whole = local.contiguous() if fill is None else local
                    for index, (shard, part) in enumerate(parts_by_shard(record, whole)):
                        if shard.server != server:
                            continue
                        shape = [shard.rows, *local.shape[1:]] if local.dim() else []
                        name = record.local_name if len(record.shards) == 1 else f"{record.local_name}/part_{index}"
                        entries.append(
                            {"number": shard.number, "name": name, "shape": shape, "dtype": dtype_number(local.dtype)}
                        )
                        if fill is not None:
                            entries[-1]["fill"] = list(fill)
                            parts.append(b"")
                            continue
                        parts.append(tensor_bytes(part))
                for batch in _in_batches(list(zip(entries, parts, strict=True))):
                    self.call(server, {"method": "create", "variables": [e for e, _ in batch]}, [p for _, p in batch])
            for record in records:
                record.created = True

    def call(self, server: int, meta: dict[str, Any], parts: Sequence[Any] = ()) -> dict[str, Any]:
        """Calls a method of one server."""
        return self._persist(lambda: self.links[server].call(meta, parts))

    def call_all(self, meta: dict[str, Any], parts: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Calls a method on every server."""
        return [self.call(server, meta, parts) for server in range(len(self.links))]


def _in_batches(
    entries: list[tuple[dict[str, Any], Any]], most: int = 512
) -> Iterable[list[tuple[dict[str, Any], Any]]]:
    iterator = iter(entries)
    while batch := list(itertools.islice(iterator, most)):
        yield batch
