"""Reading the tensors on the parameter servers: pulls, rows, and what is asked for before it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.parameter_server.client.local_copies import Ahead, Pull
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord, Shard, by_shard
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol.operations import (
    FLAG_UNCHANGED,
    MOST_COPIED,
    Op,
    Operation,
    dtype_number,
    padded,
)
from tfstyle_dist.parameter_server.protocol.work import NO_WORK, WireOptions, Work
from tfstyle_dist.parameter_server.transports.value_reader import ValueReader
from tfstyle_dist.variables.record import raw

_T = TypeVar("_T")


class Reader:
    """Local copies of the tensors on all servers.

    Args:
        links: one for each ps task.
        options: how tensors travel.

    Attributes:
        work: the scheduled function under way.
        steps: counts the functions this process has run; ``None`` on the coordinator, where each read is fresh.
        reads: what the function under way has read.
        watches: whether what the function writes to parameters is looked for by their values.
        outdated: parameters of modules that the function has updated and not read since.
    """

    def __init__(self, links: Sequence[ServerLink], options: WireOptions) -> None:
        self.links, self.options = list(links), options
        self.work: Work = NO_WORK
        self.steps: int | None = None
        self.reads: dict[RemoteRecord, None] = {}
        self.outdated: dict[RemoteRecord, None] = {}
        self.watches = False
        self._lock = threading.RLock()
        self._ahead: dict[int, Ahead] = {}

    def reconnect(self) -> bool:
        """Lets servers that were lost come back, if there are snapshots; whether one was lost."""
        return sum(link.reconnect() for link in self.links) > 0

    def _persist(self, action: Callable[[], _T]) -> _T:
        """On the coordinator: waits for a server that was lost and can come back, and does ``action`` once more."""
        while True:
            try:
                return action()
            except UnavailableError:
                if self.steps is not None or not self.reconnect():
                    raise

    # ---- reading ----------------------------------------------------------------------------------------------

    def refresh(self, records: Sequence[RemoteRecord], read: bool = False) -> None:
        """Pulls those local copies that may be out of date, with one request for each server.

        Args:
            records: the tensors.
            read: they are being read by the function under way: the next run of it pulls them at its start.
        """
        with self._lock:
            if read and self.steps is not None:
                self.reads.update(dict.fromkeys(records))
            wanted = list(dict.fromkeys(r for r in records if self.steps is None or r.stamp != self.steps))
            if wanted:
                with raw():  # what is outdated here must not pull
                    self._persist(lambda: self._pull(wanted))

    def pull_outdated(self) -> None:
        """Pulls what the function under way has updated: it goes on with what its updates have made."""
        self.refresh(list(self.outdated))
        self.outdated.clear()

    def read(self, record: RemoteRecord) -> None:
        """Makes sure that one tensor's local copy may be used by whoever reads it now."""
        if self.steps is not None and record.stamp == self.steps:
            self.reads[record] = None
        else:
            self.refresh([record], read=True)

    def _pull(self, records: Sequence[RemoteRecord]) -> None:
        pulls = {id(record): Pull(record, self.steps, self.watches) for record in records}
        by_server: dict[int, list[tuple[RemoteRecord, int]]] = {}
        for record in records:
            if not self._take_ahead(record, pulls[id(record)]):
                for index, shard in enumerate(record.shards):
                    by_server.setdefault(shard.server, []).append((record, index))
        narrow: list[tuple[torch.Tensor, torch.Tensor]] = []

        def target(record: RemoteRecord, index: int, version: int) -> torch.Tensor:
            wanted = pulls[id(record)].target(index, version)
            dtype = self.wire_dtype(record)
            if dtype is record.components[0].dtype:
                return wanted
            narrow.append(
                (wanted.view(record.components[0].dtype), torch.empty(record.shards[index].numel, dtype=dtype))
            )
            return narrow[-1][1].view(torch.uint8)

        for server, entries in by_server.items():
            by_server[server] = entries = self._read_directly(self.links[server], entries, pulls)
            if entries:
                self._ask(server, entries, target)
        for server, entries in by_server.items():
            if entries:
                self.links[server].finish()
        for wide, data in narrow:
            wide.copy_(data)
        for pull in pulls.values():
            pull.done()

    def _ask(
        self,
        server: int,
        entries: Sequence[tuple[RemoteRecord, int]],
        target: Callable[[RemoteRecord, int, int], torch.Tensor],
        unchanged: Callable[[RemoteRecord, int], None] = lambda record, index: None,
    ) -> None:
        """Asks one server for shards.

        Args:
            server: which one.
            entries: tensors and indices of their shards.
            target: gives the bytes that a shard's go into.
            unchanged: called instead when the local copy is as new as the server's.
        """
        operations, answer_bytes = [], 0
        for record, index in entries:
            shard, dtype = record.shards[index], self.wire_dtype(record)
            operations.append(Operation(Op.PULL, dtype_number(dtype), shard.number, record.versions[index]))
            answer_bytes += padded(shard.numel * dtype.itemsize)

        def take(answers: list[Operation]) -> list[torch.Tensor]:
            targets = []
            for (record, index), answer in zip(entries, answers, strict=True):
                if answer.extra & FLAG_UNCHANGED:
                    unchanged(record, index)
                else:
                    targets.append(target(record, index, answer.argument))
            return targets

        self.links[server].batch(self.work, operations, [], take, answer_bytes)

    # ---- ahead ------------------------------------------------------------------------------------------------

    def ask_ahead(self, records: Iterable[RemoteRecord]) -> None:
        """Asks for what the next function will pull; it comes while this one computes.

        Args:
            records: the parameters that the next function can reach. Those of servers on this host are left out: they
                are used where they are.
        """
        self._ahead = {}
        if not self.options.ahead or self.steps is None:
            return
        with self._lock:
            by_server: dict[int, list[tuple[RemoteRecord, int]]] = {}
            for record in records:
                if record.kind == "parameter" and record.fixed and not self.is_near(record):
                    self._ahead[id(record)] = Ahead(self.steps + 1)
                    for index, shard in enumerate(record.shards):
                        by_server.setdefault(shard.server, []).append((record, index))
            coming = self._ahead

            def target(record: RemoteRecord, index: int, version: int) -> torch.Tensor:
                data = torch.empty(record.shards[index].numel, dtype=self.wire_dtype(record))
                coming[id(record)].parts[index] = (version, data)
                return data.view(torch.uint8)

            def unchanged(record: RemoteRecord, index: int) -> None:
                coming[id(record)].parts[index] = (record.versions[index], None)

            for server, entries in by_server.items():
                self._ask(server, entries, target, unchanged)
                self.links[server].receive_in_background()

    def _take_ahead(self, record: RemoteRecord, pull: Pull) -> bool:
        """Whether all of a tensor was asked for ahead, and has come: then that is its value."""
        found = self._ahead.get(id(record))
        if found is None or found.step != self.steps:
            return False
        del self._ahead[id(record)]  # after an update of this function's own it is not good enough
        changed = any(v != record.versions[index] for index, (v, data) in found.parts.items() if data is None)
        if changed or len(found.parts) < len(record.shards):
            return False
        for index, (version, data) in found.parts.items():
            if data is not None:
                pull.target(index, version).view(record.components[0].dtype).copy_(data)
        return True

    def _read_directly(
        self, link: ServerLink, entries: list[tuple[RemoteRecord, int]], pulls: Mapping[int, Pull]
    ) -> list[tuple[RemoteRecord, int]]:
        """Copies what shared memory holds; gives those that must be asked for."""
        values = link.values([record.shards[index].number for record, index in entries])
        for record, _ in entries:
            if record.leased is not None and record.leased is not values:
                record.forget()  # the server may use that memory again
        if values is None:
            return entries
        rest = []
        for record, index in entries:
            number, pull = record.shards[index].number, pulls[id(record)]
            if number not in values:
                rest.append((record, index))
            elif values.version(number) != record.versions[index]:
                leased = values.lease(number) if pull.may_lease else None
                if leased is not None:
                    data, version = leased
                    local = record.components[0]
                    pull.adopt(data.view(local.dtype).view(local.shape), version, values)
                elif not self._copy(values, record, index, pull):
                    rest.append((record, index))
        return rest

    def _copy(self, values: ValueReader, record: RemoteRecord, index: int, pull: Pull) -> bool:
        """Copies a shard out of shared memory, if it is not written all the time."""
        number = record.shards[index].number
        if pull.may_replace:
            made = values.clone(number, record.components[0])
            if made is not None:
                pull.adopt(*made, None)
            return made is not None
        version = values.copy(number, pull.part(index))
        pull.versions[index] = version or 0
        return version is not None

    def wire_dtype(self, record: RemoteRecord) -> torch.dtype:
        """How the elements of a tensor and of its gradients travel."""
        own: torch.dtype = record.components[0].dtype
        narrow = self.options.dtype is not None and own is torch.float32 and record.kind == "parameter"
        return self.options.dtype if narrow and not self.is_near(record) else own  # type: ignore[return-value]

    def is_near(self, record: RemoteRecord) -> bool:
        """Whether all of a tensor is on this host, in shared memory."""
        return all(self.links[shard.server].is_near for shard in record.shards)

    def pull_rows(self, record: RemoteRecord, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of a tensor.

        Args:
            record: the tensor.
            rows: int64 row numbers, one-dimensional; they may repeat.

        Returns:
            A new tensor with one row for each number.
        """
        local, dtype = record.components[0], self.wire_dtype(record)
        result = torch.empty((rows.numel(), *local.shape[1:]), dtype=local.dtype)

        def pull() -> None:
            used = []
            for shard, positions, ids in by_shard(record, rows):
                whole = positions is None and dtype is local.dtype
                part = result if whole else torch.empty((ids.numel(), *result.shape[1:]), dtype=dtype)
                values = self.links[shard.server].values([shard.number])
                if values is not None and shard.number in values and values.rows(shard.number, ids, part):
                    if positions is not None:
                        result[positions] = part
                    continue
                self._ask_for_rows(shard, ids, part)
                used.append((shard.server, positions, part))
            for server, _, _ in used:
                self.links[server].finish()
            for _, positions, part in used:
                if positions is not None:
                    result[positions] = part.to(result.dtype)
                elif part is not result:
                    result.copy_(part)

        with self._lock:
            self._persist(pull)
        return result

    def _ask_for_rows(self, shard: Shard, ids: torch.Tensor, target: torch.Tensor) -> None:
        """Asks a server for rows, in several messages if they are very many."""
        most = max(min(MOST_COPIED * ids.numel() // max(target.nbytes, 1), ids.numel()), 1)
        for numbers, part in zip(ids.split(most), target.split(most), strict=True):
            operation = Operation(Op.PULL_ROWS, dtype_number(target.dtype), shard.number, 0, numbers.numel())

            def take(answers: list[Operation], part: torch.Tensor = part) -> list[torch.Tensor]:
                return [part.view(-1).view(torch.uint8)]

            self.links[shard.server].batch(self.work, [operation], [numbers], take, padded(part.nbytes))
